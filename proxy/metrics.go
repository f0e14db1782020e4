package proxy

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the proxy does. One value serves one registry.
type Metrics struct {
	sessions      prometheus.Gauge
	sessionsTotal prometheus.Counter
	toServer      prometheus.Counter
	toClient      prometheus.Counter
	rewritten     *prometheus.CounterVec
	demands       *prometheus.CounterVec
	errors        *prometheus.CounterVec
	cancels       prometheus.Counter
	refused       *prometheus.CounterVec
}

// NewMetrics registers the proxy's metrics. It panics when they are registered already, as prometheus.MustRegister does;
// a nil registerer registers nothing.
func NewMetrics(registerer prometheus.Registerer) *Metrics {
	const namespace, subsystem = "koldproxy", "proxy"
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}
	}
	bytes := prometheus.NewCounterVec(counter("bytes_total", "Bytes forwarded, by direction."), []string{"direction"})
	m := &Metrics{
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: namespace, Subsystem: subsystem, Name: "sessions", Help: "Sessions that are open.",
		}),
		sessionsTotal: prometheus.NewCounter(counter("sessions_total", "Sessions that were opened.")),
		toServer:      bytes.WithLabelValues("to_server"),
		toClient:      bytes.WithLabelValues("to_client"),
		rewritten: prometheus.NewCounterVec(
			counter("statements_rewritten_total", "Statements of koldproxy's own that were rewritten, by command tag."), []string{"tag"}),
		demands: prometheus.NewCounterVec(
			counter("demands_total", "Demands of statements, by what became of them: fulfilled, denied, failed or passed on."),
			[]string{"outcome"}),
		errors: prometheus.NewCounterVec(
			counter("errors_total", "Sessions that ended with an error, by the side that failed and what it was doing."),
			[]string{"side", "direction"}),
		cancels: prometheus.NewCounter(counter("cancels_total", "Cancel requests that arrived.")),
		refused: prometheus.NewCounterVec(
			counter("refused_total", "Connections and cancel requests that were refused, by reason: accept, address, cancel_key, cancels, closed, connections, "+
				"draining, handshakes, peer, plaintext, policy, proxy_protocol, session_attrs, startup, timeout or tls."),
			[]string{"reason"}),
	}
	if registerer != nil {
		registerer.MustRegister(m.sessions, m.sessionsTotal, bytes, m.rewritten, m.demands, m.errors, m.cancels, m.refused)
	}
	return m
}
