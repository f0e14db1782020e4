package mqtt

import (
	"errors"
	"fmt"
	"time"
)

// Config is what can be set about a [Broker]. Start from [DefaultConfig]; [New] refuses values that make no sense.
type Config struct {
	// MaxConnections bounds connections, logged in or not; further ones are closed at once. Default 10 000.
	MaxConnections int
	// HandshakeTimeout is the time for TLS, where there is any, and CONNECT. Default 10 s.
	HandshakeTimeout time.Duration
	// LoginTimeout is the time for a login at PostgreSQL, waiting for a free place included. Default 10 s.
	LoginTimeout time.Duration
	// LoginConcurrency bounds logins under way at PostgreSQL, each of which is a connection there. Default 8.
	LoginConcurrency int
	// RightsTTL is how long an answer about a right to read is used, and so how long a revoked right may still bring
	// messages. Default 1 s.
	RightsTTL time.Duration
	// RightsTimeout is the time for one question about a right. Default 5 s.
	RightsTimeout time.Duration
	// RightsConcurrency bounds questions about rights under way. Default 8.
	RightsConcurrency int
	// WriteTimeout is how long a subscriber may keep a write waiting before it is disconnected. Default 30 s.
	WriteTimeout time.Duration
	// PublishQueue bounds messages between Publish and the subscribers' queues. Default 8192.
	PublishQueue int
	// SubscriberQueue bounds the messages that wait for one subscriber. Default 512.
	SubscriberQueue int
	// SubscriberQueueBytes bounds their size; a single larger message is let through when nothing else waits. It also
	// bounds, 16 times, what waits between Publish and all subscribers. Default 8 MiB.
	SubscriberQueueBytes int
	// MaxMessageBytes bounds the payload of a message; a larger one is dropped for everybody. Default 8 MiB, at most
	// 255 MiB (MQTT's own bound is 256 MiB).
	MaxMessageBytes int
	// MaxSubscriptions bounds the filters of one client. Default 256.
	MaxSubscriptions int
	// ClientPublish lets clients publish to each other on topics that do not begin with $; every role that may log in can
	// read and write those. Default false.
	ClientPublish bool
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		MaxConnections:       10_000,
		HandshakeTimeout:     10 * time.Second,
		LoginTimeout:         10 * time.Second,
		LoginConcurrency:     8,
		RightsTTL:            time.Second,
		RightsTimeout:        5 * time.Second,
		RightsConcurrency:    8,
		WriteTimeout:         30 * time.Second,
		PublishQueue:         8192,
		SubscriberQueue:      512,
		SubscriberQueueBytes: 8 << 20,
		MaxMessageBytes:      8 << 20,
		MaxSubscriptions:     256,
	}
}

// maxMessageBytes leaves room for the topic and the header in MQTT's largest packet, 268 435 455 bytes.
const maxMessageBytes = 255 << 20

// Validate reports every value that makes no sense, in one error.
func (c Config) Validate() error {
	var errs []error
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"max_connections", int64(c.MaxConnections)},
		{"handshake_timeout", int64(c.HandshakeTimeout)},
		{"login_timeout", int64(c.LoginTimeout)},
		{"login_concurrency", int64(c.LoginConcurrency)},
		{"rights_ttl", int64(c.RightsTTL)},
		{"rights_timeout", int64(c.RightsTimeout)},
		{"rights_concurrency", int64(c.RightsConcurrency)},
		{"write_timeout", int64(c.WriteTimeout)},
		{"publish_queue", int64(c.PublishQueue)},
		{"subscriber_queue", int64(c.SubscriberQueue)},
		{"subscriber_queue_bytes", int64(c.SubscriberQueueBytes)},
		{"max_message_bytes", int64(c.MaxMessageBytes)},
		{"max_subscriptions", int64(c.MaxSubscriptions)},
	} {
		if f.value <= 0 {
			errs = append(errs, fmt.Errorf("mqtt.%s must be positive", f.name))
		}
	}
	if c.MaxMessageBytes > maxMessageBytes {
		errs = append(errs, fmt.Errorf("mqtt.max_message_bytes must be at most %d", maxMessageBytes))
	}
	return errors.Join(errs...)
}
