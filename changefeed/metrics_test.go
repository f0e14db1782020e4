package changefeed_test

import (
	"context"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
)

// series are the values of one metric by the values of its labels.
func series(t *testing.T, registry *prometheus.Registry, name string) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	must(t, err)
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			if f.GetName() == name {
				values[strings.Join(labels, " ")] = m.GetCounter().GetValue()
			}
		}
	}
	return values
}

// An alert on an increase does not see the first step of a series that begins with it.
func TestCountersBeginAtZero(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	changefeed.NewMetrics(registry)
	for _, name := range []string{"quarantined_rows", "broken", "events", "published_events", "skipped_events", "swept_events", "mirror_rows", "seeded_rows", "healed_rows"} {
		if got := series(t, registry, "koldproxy_changefeed_"+name+"_total"); !maps.Equal(got, map[string]float64{"": 0}) {
			t.Errorf("%s begins as %v", name, got)
		}
	}
	want := map[string]float64{"cold_page ok": 0, "cold_page error": 0, "flush ok": 0, "flush error": 0, "invalid error": 0}
	if got := series(t, registry, "koldproxy_changefeed_demands_total"); !maps.Equal(got, want) {
		t.Errorf("demands begin as %v", got)
	}
}

// The same of each stream, on the leader and on others, from when it is known until it is dropped.
func TestLostEventsOfAStreamBeginAtZero(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	const lost = "koldproxy_stream_events_lost_total"
	leader, live := prometheus.NewRegistry(), prometheus.NewRegistry()
	h.counts = changefeed.NewMetrics(leader)
	h.startApplier()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	follower := changefeed.NewFollower(changefeed.DefaultTailConfig("db"), h.pool, &board{}, zerolog.Nop(), changefeed.NewMetrics(live))
	var turn sync.Mutex
	go func() { done <- follower.Follow(ctx, &turn) }()
	defer func() { cancel(); must(t, <-done) }()

	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("quiet", "t", "id > 0")
	for _, registry := range []*prometheus.Registry{leader, live} {
		h.eventually("the stream is counted from 0", func() bool { return maps.Equal(series(t, registry, lost), map[string]float64{"public.quiet": 0}) })
	}
	h.exec(`CALL koldstore.drop_stream('public', 'quiet')`)
	h.eventually("it is forgotten", func() bool { return len(series(t, live, lost)) == 0 })
}
