package mqtt

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// RelayConfig says to which broker a [Relay] publishes. Start from [DefaultRelayConfig].
type RelayConfig struct {
	// URL is mqtt://, mqtts://, ws:// or wss:// with host and port, and user and password if the broker asks for them.
	URL string
	// Prefix takes the place of $stream in topics, since many brokers keep names with $ for themselves. Default "stream".
	Prefix string
	// Queue bounds the messages that wait while the broker is slow or away, QueueBytes their size. Default 8192, 64 MiB.
	Queue      int
	QueueBytes int64
	// Timeout is how long connecting, and one message, may take. Default 10 s.
	Timeout time.Duration
	// RetryMax is the longest pause between two attempts to connect. Default 10 s.
	RetryMax time.Duration
}

// DefaultRelayConfig returns the defaults for a broker.
func DefaultRelayConfig(address string) RelayConfig {
	return RelayConfig{URL: address, Prefix: "stream", Queue: 8192, QueueBytes: 64 << 20, Timeout: 10 * time.Second, RetryMax: 10 * time.Second}
}

// Validate reports what is wrong with c. It does not repeat the password.
func (c RelayConfig) Validate() error {
	u, err := url.Parse(c.URL)
	if err != nil {
		return errors.New("is no URL")
	}
	switch u.Scheme {
	case "mqtt", "mqtts", "ws", "wss":
	default:
		return fmt.Errorf("scheme %q is none of mqtt, mqtts, ws, wss", u.Scheme)
	}
	if u.Hostname() == "" {
		return errors.New("names no host")
	}
	if c.Prefix == "" || strings.ContainsAny(c.Prefix, "+#\x00") || strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/") {
		return fmt.Errorf("prefix %q is no beginning of a topic", c.Prefix)
	}
	return nil
}

// Relay publishes events to another MQTT broker, QoS 0, and reconnects for ever. Like everything about live push it is a hint:
// what finds no room while the broker is away is dropped and counted. Who may read there is that broker's affair.
type Relay struct {
	cfg    RelayConfig
	log    zerolog.Logger
	queue  chan *message
	queued atomic.Int64 // bytes

	published prometheus.Counter
	dropped   prometheus.Counter
	connected prometheus.Gauge
}

// NewRelay makes a Relay that does nothing until Run. It registers its metrics with reg, nil for none.
func NewRelay(cfg RelayConfig, log zerolog.Logger, reg prometheus.Registerer) (*Relay, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("mqtt.url: %w", err)
	}
	r := &Relay{
		cfg: cfg, log: log, queue: make(chan *message, cfg.Queue),
		published: prometheus.NewCounter(prometheus.CounterOpts{Name: "koldproxy_mqtt_relay_published_total", Help: "Messages sent to the external broker."}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "koldproxy_mqtt_relay_dropped_total", Help: "Messages that the external broker was not sent, because it was slow or away.",
		}),
		connected: prometheus.NewGauge(prometheus.GaugeOpts{Name: "koldproxy_mqtt_relay_connected", Help: "Whether the external broker is connected."}),
	}
	if reg == nil {
		return r, nil
	}
	for _, c := range []prometheus.Collector{r.published, r.dropped, r.connected} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register mqtt metrics: %w", err)
		}
	}
	return r, nil
}

// Publish hands a message on. It never blocks.
func (r *Relay) Publish(topic string, payload []byte) {
	m := &message{topic: r.cfg.Prefix + strings.TrimPrefix(topic, koldproxy.TopicRoot), payload: payload}
	size := int64(m.size())
	if queued := r.queued.Add(size); queued <= r.cfg.QueueBytes || queued == size {
		select {
		case r.queue <- m:
			return
		default:
		}
	}
	r.queued.Add(-size)
	r.dropped.Inc()
}

// Consumers is 0: the other broker does not tell.
func (r *Relay) Consumers(string) int { return 0 }

// Wants is true for the same reason.
func (r *Relay) Wants(string) bool { return true }

// Run publishes until ctx ends, then returns nil.
func (r *Relay) Run(ctx context.Context) error {
	up := make(chan struct{}, 1)
	u, err := url.Parse(r.cfg.URL)
	if err != nil {
		return errors.New("mqtt.url is no URL")
	}
	host, _ := os.Hostname() // without it the id is shorter
	var failing atomic.Bool  // an attempt has failed since the last success; it is said once
	opts := paho.NewClientOptions().
		AddBroker(brokerAddress(u)).
		SetClientID(fmt.Sprintf("koldproxy-%s-%d", host, os.Getpid())).
		SetProtocolVersion(4).
		SetCleanSession(true).
		SetAutoReconnect(true).
		SetConnectRetry(true).
		SetConnectRetryInterval(time.Second).
		SetMaxReconnectInterval(r.cfg.RetryMax).
		SetConnectTimeout(r.cfg.Timeout).
		SetWriteTimeout(r.cfg.Timeout).
		SetOnConnectHandler(func(paho.Client) {
			r.connected.Set(1)
			failing.Store(false)
			r.log.Info().Str("broker", u.Redacted()).Msg("connected to the external mqtt broker")
			select {
			case up <- struct{}{}:
			default:
			}
		}).
		SetConnectionLostHandler(func(_ paho.Client, err error) {
			r.connected.Set(0)
			r.log.Warn().Str("broker", u.Redacted()).Err(err).Msg("lost the external mqtt broker")
		})
	opts.SetConnectionNotificationHandler(func(_ paho.Client, n paho.ConnectionNotification) {
		if f, ok := n.(paho.ConnectionNotificationFailed); ok && !failing.Swap(true) {
			r.log.Warn().Str("broker", u.Redacted()).Err(f.Reason).Msg("cannot connect to the external mqtt broker, trying again")
		}
	})
	if u.User != nil {
		password, _ := u.User.Password()
		opts.SetUsername(u.User.Username()).SetPassword(password)
	}
	client := paho.NewClient(opts)
	client.Connect() // goes on trying on its own
	defer client.Disconnect(uint(time.Second / time.Millisecond))
	for {
		var m *message
		select {
		case <-ctx.Done():
			return nil
		case m = <-r.queue:
		}
		if !r.send(ctx, client, up, m) {
			return nil
		}
		r.queued.Add(-int64(m.size()))
	}
}

// send waits for a connection and writes one message; false if ctx has ended.
func (r *Relay) send(ctx context.Context, client paho.Client, up <-chan struct{}, m *message) bool {
	for !client.IsConnectionOpen() {
		select {
		case <-ctx.Done():
			return false
		case <-up:
		case <-time.After(100 * time.Millisecond):
		}
	}
	token := client.Publish(m.topic, 0, false, m.payload)
	if !token.WaitTimeout(r.cfg.Timeout) || token.Error() != nil {
		r.dropped.Inc()
		return ctx.Err() == nil
	}
	r.published.Inc()
	return true
}

// brokerAddress is the URL as the client library spells it, without credentials, which it would log.
func brokerAddress(u *url.URL) string {
	scheme, port := map[string]string{"mqtt": "tcp", "mqtts": "ssl", "ws": "ws", "wss": "wss"}[u.Scheme],
		map[string]string{"mqtt": "1883", "mqtts": "8883", "ws": "80", "wss": "443"}[u.Scheme]
	if u.Port() != "" {
		port = u.Port()
	}
	return (&url.URL{Scheme: scheme, Host: u.Hostname() + ":" + port, Path: u.Path}).String()
}
