package walapply_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// gauges are the values of all gauges of an applier.
func gauges(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		if g := f.GetMetric()[0].GetGauge(); g != nil {
			values[strings.TrimPrefix(f.GetName(), "koldproxy_walapply_")] = g.GetValue()
		}
	}
	return values
}

// The lag is that of now, whatever it is that applying is stuck in, and nothing when nothing is behind. A former leader shows no gauge of
// the database.
func TestLagGrowsWhileNothingIsApplied(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	registry := prometheus.NewRegistry()
	d.metrics = walapply.NewMetrics(registry)
	var fails atomic.Bool
	var inApply, inWork atomic.Pointer[chan struct{}] // what is stuck, until it is closed
	stuck := func(ctx context.Context, in *atomic.Pointer[chan struct{}]) {
		if c := in.Load(); c != nil {
			select {
			case <-*c:
			case <-ctx.Done():
			}
		}
	}
	rec := &recorder{
		before: func(ctx context.Context, _ []koldproxy.Change) error {
			stuck(ctx, &inApply)
			if fails.Load() {
				return errors.New("the disk is full")
			}
			return nil
		},
		work: func(ctx context.Context, _ pgx.Tx, _ *koldproxy.Sequence) (bool, error) {
			stuck(ctx, &inWork)
			return false, nil
		},
	}
	a := d.startStreaming(rec, func(c *walapply.Config) { c.WatchInterval = 20 * time.Millisecond })
	lag := func() float64 { return gauges(t, registry)["lag_seconds"] }
	grows := func(why string) {
		t.Helper()
		first := lag()
		d.await("the lag to begin while "+why, func() bool { first = lag(); return first > 0 })
		d.await("the lag to grow while "+why, func() bool { return lag() >= first+0.1 })
		if got := a.Status().Lag; got < time.Duration(first*float64(time.Second)) {
			t.Errorf("the status says %v while %s", got, why)
		}
	}
	vanishes := func(why string) {
		t.Helper()
		d.await("the lag to vanish when "+why, func() bool { return lag() == 0 })
	}
	vanishes("nothing has happened")

	for what, in := range map[string]*atomic.Pointer[chan struct{}]{"a batch is stuck": &inApply, "background work is stuck": &inWork} {
		release := make(chan struct{})
		in.Store(&release)
		units := rec.count(&rec.units)
		a.Poke()
		if in == &inWork {
			d.await("background work", func() bool { return rec.count(&rec.units) > units })
		}
		d.exec(`INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t`)
		grows(what)
		in.Store(nil)
		close(release)
		vanishes(what + " no more")
	}

	fails.Store(true)
	d.exec(`INSERT INTO t SELECT max(id) + 1 FROM t`)
	grows("batches fail")
	fails.Store(false)
	vanishes("they work again")

	d.await("the retained log to be measured", func() bool { return gauges(t, registry)["retained_bytes"] > 0 })
	d.exec(`UPDATE koldstore.checkpoint SET gap = 'a test'; SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database()`)
	grows("there is a gap")
	d.exec(beginAnew(t))
	d.await("it to stream again", func() bool { return a.Status().Streaming })
	vanishes("the gap is closed")

	a.stop()
	for name, value := range gauges(t, registry) {
		if value != 0 {
			t.Errorf("a former leader shows %s as %v", name, value)
		}
	}
}
