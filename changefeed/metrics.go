package changefeed

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/koldproxy/koldproxy"
)

// Metrics counts what this package does, for all databases together. Work of a transaction is counted when it has committed.
type Metrics struct {
	mirrorRows  prometheus.Counter
	seededRows  prometheus.Counter
	healedRows  prometheus.Counter
	events      prometheus.Counter
	eventsLost  *prometheus.CounterVec
	quarantined prometheus.Counter
	broken      prometheus.Counter
	published   prometheus.Counter
	skipped     prometheus.Counter
	swept       prometheus.Counter
	demands     *prometheus.CounterVec
}

// NewMetrics makes the metrics and registers them with r, unless r is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &Metrics{
		mirrorRows: counter("koldproxy_changefeed_mirror_rows_total", "Rows written to mirrors by live changes."),
		seededRows: counter("koldproxy_changefeed_seeded_rows_total", "Rows copied into mirrors from existing tables."),
		healedRows: counter("koldproxy_changefeed_healed_rows_total", "Rows of mirrors that were brought in line with their tables after changes may have been missed."),
		events:     counter("koldproxy_changefeed_events_total", "Events appended to stream logs."),
		eventsLost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "koldproxy_stream_events_lost_total",
			Help: "Events that could not be appended to a stream's log; the row changes are in koldstore.quarantine.",
		}, []string{"stream"}),
		quarantined: counter("koldproxy_changefeed_quarantined_rows_total", "Row changes that could not become a mirror row or an event."),
		broken:      counter("koldproxy_changefeed_broken_total", "Streams and mirrors that were given up because their definition does not work any more."),
		published:   counter("koldproxy_changefeed_published_events_total", "Events handed to live push."),
		skipped:     counter("koldproxy_changefeed_skipped_events_total", "Events that live push left out because it was too far behind when it started."),
		swept:       counter("koldproxy_changefeed_swept_events_total", "Events removed because they were past their retention."),
		demands: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "koldproxy_changefeed_demands_total",
			Help: "Demands of SQL functions that were answered, by kind and outcome.",
		}, []string{"kind", "outcome"}),
	}
	// Every series begins at 0: an alert on an increase does not see the first step of one that begins with it. See also knowStream.
	for _, kind := range []string{koldproxy.DemandColdPage, koldproxy.DemandFlush} {
		for _, outcome := range []string{outcomeOK, outcomeError} {
			m.demands.WithLabelValues(kind, outcome)
		}
	}
	m.demands.WithLabelValues(invalidDemand, outcomeError)
	if r != nil {
		r.MustRegister(m.mirrorRows, m.seededRows, m.healedRows, m.events, m.eventsLost, m.quarantined, m.broken, m.published, m.skipped, m.swept, m.demands)
	}
	return m
}

// The values of the labels of demands, besides the kinds that there are.
const (
	outcomeOK     = "ok"
	outcomeError  = "error"
	invalidDemand = "invalid"
)

// knowStream begins what is counted of one stream, by schema.name, at 0; forgetStream is for one that was dropped.
func (m *Metrics) knowStream(label string)   { m.eventsLost.WithLabelValues(label) }
func (m *Metrics) forgetStream(label string) { m.eventsLost.DeleteLabelValues(label) }

// tally is what a transaction has done so far.
type tally struct {
	mirrorRows, seededRows, healedRows, events, quarantined, broken int64
	lost                                                            map[string]int64
}

func (m *Metrics) add(t tally) {
	m.mirrorRows.Add(float64(t.mirrorRows))
	m.seededRows.Add(float64(t.seededRows))
	m.healedRows.Add(float64(t.healedRows))
	m.events.Add(float64(t.events))
	m.quarantined.Add(float64(t.quarantined))
	m.broken.Add(float64(t.broken))
	for stream, n := range t.lost {
		m.eventsLost.WithLabelValues(stream).Add(float64(n))
	}
}

func (t *tally) lose(stream string) {
	if t.lost == nil {
		t.lost = make(map[string]int64)
	}
	t.lost[stream]++
}
