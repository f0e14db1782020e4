package mqtt

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Why a message was not delivered: the values of the label reason of koldproxy_mqtt_dropped_total.
const (
	dropPublishQueue    = "publish_queue"    // dropped for all: the broker does not keep up
	dropSubscriberQueue = "subscriber_queue" // this subscriber does not keep up
	dropTooLarge        = "too_large"        // larger than the broker or the client allows
	dropTopic           = "topic"            // not a topic that MQTT allows
	dropDenied          = "denied"           // the role may not read the topic
	dropUnjudged        = "unjudged"         // PostgreSQL could not be asked
	dropClosed          = "closed"           // the connection ended first
)

type metrics struct {
	published     prometheus.Counter
	delivered     prometheus.Counter
	dropped       *prometheus.CounterVec
	refused       *prometheus.CounterVec
	subscriptions prometheus.GaugeFunc
	connections   prometheus.GaugeFunc
}

func newMetrics(reg prometheus.Registerer, b *Broker) (*metrics, error) {
	m := &metrics{
		published: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_mqtt_published_total", Help: "Messages accepted for delivery to subscribers.",
		}),
		delivered: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_mqtt_delivered_total", Help: "Messages written to subscribers, counted for each.",
		}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "koldproxy_mqtt_dropped_total", Help: "Messages that were not delivered, counted for each subscriber, or once if for all, by reason.",
		}, []string{"reason"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "koldproxy_mqtt_refused_total", Help: "What clients were refused, by what it was.",
		}, []string{"what"}),
		subscriptions: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "koldproxy_mqtt_subscriptions", Help: "Subscriptions of connected clients.",
		}, func() float64 { return float64(b.router.subscriptions.Load()) }),
		connections: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "koldproxy_mqtt_connections", Help: "Open connections, logged in or not.",
		}, func() float64 { return float64(b.connections.Load()) }),
	}
	for _, reason := range []string{dropPublishQueue, dropSubscriberQueue, dropTooLarge, dropTopic, dropDenied, dropUnjudged, dropClosed} {
		m.dropped.WithLabelValues(reason)
	}
	for _, what := range []string{"connections", "login", "login_unavailable", "subscription", "publish", "protocol"} {
		m.refused.WithLabelValues(what)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.published, m.delivered, m.dropped, m.refused, m.subscriptions, m.connections} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register mqtt metrics: %w", err)
		}
	}
	return m, nil
}
