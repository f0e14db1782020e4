package coldstore

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	flushes       *prometheus.CounterVec // by status
	flushSeconds  prometheus.Histogram
	rowsFlushed   prometheus.Counter
	bytesWritten  prometheus.Counter
	segments      prometheus.Counter
	conflicts     prometheus.Counter
	compactions   *prometheus.CounterVec // by status
	pages         *prometheus.CounterVec // by status
	pageSeconds   prometheus.Histogram
	rowsRead      prometheus.Counter
	verifications *prometheus.CounterVec // by status
	cacheBytes    prometheus.Gauge
	dropped       prometheus.Counter
	deleted       prometheus.Counter
}

// The values of label status.
const (
	statusOK      = "ok"
	statusError   = "error"
	statusCorrupt = "corrupt"
)

func newMetrics(r prometheus.Registerer) *metrics {
	if r == nil {
		r = prometheus.NewRegistry()
	}
	const namespace, subsystem = "koldproxy", "coldstore"
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help})
		r.MustRegister(c)
		return c
	}
	// Every series begins at 0: an alert on an increase does not see the first step of one that begins with it.
	byStatus := func(name, help string, statuses ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}, []string{"status"})
		r.MustRegister(c)
		for _, status := range statuses {
			c.WithLabelValues(status)
		}
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, Buckets: buckets})
		r.MustRegister(h)
		return h
	}
	m := &metrics{
		flushes:       byStatus("flushes_total", "Flush jobs that ended, by status (completed, not_due, error, cancelled, queued: put back).", jobCompleted, jobNotDue, jobError, jobCancelled, jobQueued),
		flushSeconds:  histogram("flush_seconds", "Duration of flush jobs.", prometheus.ExponentialBuckets(0.01, 4, 9)),
		rowsFlushed:   counter("flushed_rows_total", "Rows moved from mirrors into segments."),
		bytesWritten:  counter("written_bytes_total", "Bytes of published segments."),
		segments:      counter("segments_published_total", "Segments that became active."),
		conflicts:     counter("publish_conflicts_total", "Files that were given up because another flush had published first."),
		compactions:   byStatus("compactions_total", "Replacements of segments by a compacted one, by status (ok, error).", statusOK, statusError),
		pages:         byStatus("pages_total", "Pages read, by status (ok, error).", statusOK, statusError),
		pageSeconds:   histogram("page_seconds", "Duration of page reads.", prometheus.ExponentialBuckets(0.0005, 2, 14)),
		rowsRead:      counter("page_rows_total", "Rows returned in pages."),
		verifications: byStatus("verifications_total", "Objects whose checksum was compared with the catalog, by status (ok, corrupt, error).", statusOK, statusCorrupt, statusError),
		cacheBytes:    prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: "cache_bytes", Help: "Memory of opened segments and of rows that were decoded lately."}),
		dropped:       counter("segments_dropped_total", "Segments dropped by retention."),
		deleted:       counter("objects_deleted_total", "Objects removed from the bucket."),
	}
	r.MustRegister(m.cacheBytes)
	return m
}
