package walapply

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the counters and gauges of one [Applier]; docs/metrics.md describes them.
type Metrics struct {
	rows         prometheus.Counter
	transactions prometheus.Counter
	batchSeconds prometheus.Histogram
	errors       prometheus.Counter
	sessions     prometheus.Counter
	terminated   prometheus.Counter
	unpublished  prometheus.Counter
	leading      prometheus.Gauge
	gap          prometheus.Gauge
	gaps         prometheus.Counter
	retained     prometheus.Gauge
	lag          lag // what koldproxy_walapply_lag_seconds shows
	backlog      prometheus.Gauge
	acknowledged prometheus.Gauge
}

// reset is for an instance that does not lead any more: its gauges say nothing of the database.
func (m *Metrics) reset() {
	for _, gauge := range []prometheus.Gauge{m.leading, m.gap, m.retained, m.backlog, m.acknowledged} {
		gauge.Set(0)
	}
	m.lag.forget()
}

// NewMetrics makes the metrics and registers them with reg, which should add the database's name as a label when a process
// has several appliers (prometheus.WrapRegistererWith). A nil reg registers nothing.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		rows: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_rows_total",
			Help: "Row changes of published tables that have been applied.",
		}),
		transactions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_transactions_total",
			Help: "Source transactions with changes that have been applied.",
		}),
		batchSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "koldproxy_walapply_batch_seconds",
			Help:    "Time from the begin to the commit of an apply transaction.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_errors_total",
			Help: "Failures after which applying began again from the checkpoint.",
		}),
		sessions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_sessions_total",
			Help: "Replication connections that began to stream.",
		}),
		terminated: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_terminated_blockers_total",
			Help: "Sessions that were terminated because they kept the applier waiting for a lock.",
		}),
		unpublished: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_unpublished_tables_total",
			Help: "Tables whose streams and change feed were marked broken because the publication did not cover them any more.",
		}),
		gap: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "koldproxy_walapply_gap",
			Help: "1 while nothing is applied because changes may be missing.",
		}),
		gaps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_walapply_gaps_total",
			Help: "Gaps after which applying began anew: streams have a hole, feeds were compared with their tables.",
		}),
		retained: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "koldproxy_walapply_retained_bytes",
			Help: "Write-ahead log that the server keeps because of the slot.",
		}),
		leading: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "koldproxy_walapply_leading",
			Help: "1 while this instance applies changes for the database.",
		}),
		backlog: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "koldproxy_walapply_backlog_bytes",
			Help: "Decoded changes in memory that have not been applied yet.",
		}),
		acknowledged: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "koldproxy_walapply_acknowledged_lsn_bytes",
			Help: "The position that was last acknowledged to the slot, as a byte position in the write-ahead log.",
		}),
	}
	lagSeconds := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "koldproxy_walapply_lag_seconds",
		Help: "Age of the oldest source transaction that is known and not applied yet, or for how long nothing has come through the slot; 0 when nothing is behind, and where this instance does not lead.",
	}, func() float64 { return m.lag.age().Seconds() })
	if reg != nil {
		reg.MustRegister(m.rows, m.transactions, m.batchSeconds, m.errors, m.sessions, m.terminated, m.unpublished, m.leading, m.gap, m.gaps, m.retained, lagSeconds, m.backlog, m.acknowledged)
	}
	return m
}
