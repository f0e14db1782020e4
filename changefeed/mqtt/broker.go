package mqtt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

// ErrRefused is what errors of [Auth.Login] are (errors.Is) when PostgreSQL has judged and said no. Any other error means
// that it could not be asked.
var ErrRefused = errors.New("login refused")

// ErrNoPassword is what [PostgresAuth.Login] returns where the server does not ask for a password: it trusts koldproxy's address, say, which is
// no reason to trust whoever has come to koldproxy.
var ErrNoPassword = errors.New("the server does not ask koldproxy for a password of this role, so that none can be checked; " +
	"pg_hba.conf has to ask for one (scram-sha-256) where koldproxy comes from")

// Auth answers from PostgreSQL who may do what. Its methods run concurrently, as far as [Config] lets them, and must
// return when ctx ends.
type Auth interface {
	// Login returns nil if user is a role that may log in with password, an error that is [ErrRefused] if it is not. Errors
	// are logged and must not name the password.
	Login(ctx context.Context, user, password string) error
	// MaySubscribe tells whether a role may receive what is published on a topic; topic is never a filter. False for roles
	// and topics that do not exist.
	MaySubscribe(ctx context.Context, user, topic string) (bool, error)
}

// Broker is an MQTT broker whose only publisher is the change feed. Make one with [New]; all methods may run concurrently.
type Broker struct {
	cfg     Config
	auth    Auth
	log     zerolog.Logger
	metrics *metrics
	server  *mochi.Server
	router  *router
	rights  *Rights
	logins  chan struct{} // one element for each login under way

	queue       chan *message
	queuedBytes atomic.Int64

	clients     atomic.Uint64 // names connections for mochi
	connections atomic.Int64

	mu           sync.Mutex
	sessions     map[sessionKey]*session // by what MQTT's takeover rule goes by
	serving      int
	stopDispatch chan struct{}
	dispatched   chan struct{}
	stopWatch    context.CancelFunc
	watched      chan struct{}
}

// sessionKey is who holds a session. The role is part of it: a client must not end another role's session by guessing its
// client identifier.
type sessionKey struct{ user, clientID string }

// New makes a broker. It asks auth about logins and rights, logs to log, and registers its metrics with reg (nil for none);
// they may be registered once.
func New(cfg Config, auth Auth, log zerolog.Logger, reg prometheus.Registerer) (*Broker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	capabilities := mochi.NewDefaultServerCapabilities()
	capabilities.MinimumProtocolVersion = 4
	capabilities.MaximumQos = 0
	capabilities.RetainAvailable = 0
	capabilities.MaximumSessionExpiryInterval = 0
	capabilities.TopicAliasMaximum = 0
	capabilities.MaximumPacketSize = 64 << 10 // what clients send
	capabilities.MaximumClientWritesPending = 64
	b := &Broker{
		cfg:  cfg,
		auth: auth,
		log:  log,
		// mochi logs whole packets, passwords included; what is worth logging is logged here.
		server:   mochi.New(&mochi.Options{Capabilities: capabilities, Logger: slog.New(slog.DiscardHandler)}),
		router:   newRouter(),
		rights:   NewRights(cfg, auth),
		logins:   make(chan struct{}, cfg.LoginConcurrency),
		queue:    make(chan *message, cfg.PublishQueue),
		sessions: make(map[sessionKey]*session),
	}
	var err error
	if b.metrics, err = newMetrics(reg, b); err != nil {
		return nil, err
	}
	if err := b.server.AddHook(&hooks{broker: b}, nil); err != nil {
		return nil, fmt.Errorf("set up mqtt: %w", err)
	}
	return b, nil
}

// Serve accepts clients on ln, which may be a TLS listener, until ctx ends, and closes ln. It returns nil then, after all
// clients are disconnected and their goroutines have ended. Several listeners may be served at a time.
func (b *Broker) Serve(ctx context.Context, ln net.Listener) error {
	b.beginServing() //nolint:contextcheck // what it starts serves several listeners
	defer b.endServing()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer ln.Close()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		ln.Close()
	}()

	var (
		conns   = make(map[*conn]struct{})
		connsMu sync.Mutex
		wg      sync.WaitGroup
	)
	err := b.accept(ctx, ln, func(nc net.Conn) {
		c := newConn(ctx, nc, b.cfg.WriteTimeout)
		connsMu.Lock()
		conns[c] = struct{}{}
		connsMu.Unlock()
		wg.Go(func() {
			b.serveConn(c)
			connsMu.Lock()
			delete(conns, c)
			connsMu.Unlock()
		})
	})
	cancel()
	<-stopped
	connsMu.Lock()
	for c := range conns {
		c.end(packets.ErrServerShuttingDown)
	}
	connsMu.Unlock()
	wg.Wait()
	return err
}

// accept hands every accepted connection on until ctx ends (nil) or ln is closed by somebody else.
func (b *Broker) accept(ctx context.Context, ln net.Listener, serve func(net.Conn)) error {
	delay := time.Duration(0)
	for {
		nc, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				nc.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept mqtt clients: %w", err)
		case err != nil: // out of file descriptors, or a client that left again: the next one may do better
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			b.log.Warn().Err(err).Msg("accept mqtt client")
			select {
			case <-time.After(delay):
			case <-ctx.Done():
			}
		case b.connections.Add(1) > int64(b.cfg.MaxConnections):
			b.connections.Add(-1)
			b.metrics.refused.WithLabelValues("connections").Inc()
			nc.Close()
		default:
			delay = 0
			serve(nc)
		}
	}
}

// serveConn lives as long as a connection does. A panic ends this connection only: mochi's decoder has them for packets
// that end too early.
func (b *Broker) serveConn(c *conn) {
	defer b.connections.Add(-1)
	defer b.leave(c)
	defer func() {
		if p := recover(); p != nil {
			b.metrics.refused.WithLabelValues("protocol").Inc()
			b.log.Warn().Str("user", c.user).Stringer("remote", c.RemoteAddr()).Any("panic", p).Msg("mqtt client disconnected for a packet that cannot be read")
		}
	}()
	_ = c.Conn.SetReadDeadline(time.Now().Add(b.cfg.HandshakeTimeout)) // fails for closed connections only, and so does the read
	err := b.server.EstablishConnection("", c)
	b.log.Debug().Str("user", c.user).Stringer("remote", c.RemoteAddr()).AnErr("err", err).Msg("mqtt client disconnected")
}

// leave undoes what a connection has left in maps and waits for its session.
func (b *Broker) leave(c *conn) {
	c.cancel()
	c.Close()
	if c.client != nil { // mochi forgets its client on some paths only
		b.server.UnsubscribeClient(c.client)
		b.server.Clients.Delete(c.client.ID)
	}
	s := c.session
	if s == nil {
		return
	}
	b.router.drop(s)
	b.mu.Lock()
	if b.sessions[s.key] == s {
		delete(b.sessions, s.key)
	}
	b.mu.Unlock()
	c.end(packets.CodeDisconnect)
	<-s.stopped
	b.metrics.dropped.WithLabelValues(dropClosed).Add(float64(s.discard()))
}

// enter starts the session of a client that has logged in, and ends the one that the same role held with the same client
// identifier.
func (b *Broker) enter(c *conn, s *session) {
	b.mu.Lock()
	old := b.sessions[s.key]
	b.sessions[s.key] = s
	b.mu.Unlock()
	if old != nil {
		old.conn.end(packets.ErrSessionTakenOver)
	}
	b.router.join(s)
	go s.run()
	c.attach(s)
}

// Publish hands a message to those who are subscribed to topic and may read it. It never blocks: what finds no place in
// the queue, is larger than [Config.MaxMessageBytes] or names a topic that MQTT does not allow is dropped and counted. The
// broker keeps payload; the caller must not change it any more.
func (b *Broker) Publish(topic string, payload []byte) {
	if b.router.empty() {
		return
	}
	m := &message{topic: topic, payload: payload}
	size := int64(m.size())
	switch {
	case !validTopic(topic):
		b.metrics.dropped.WithLabelValues(dropTopic).Inc()
		return
	case len(payload) > b.cfg.MaxMessageBytes:
		b.metrics.dropped.WithLabelValues(dropTooLarge).Inc()
		return
	}
	if queued := b.queuedBytes.Add(size); queued <= 16*int64(b.cfg.SubscriberQueueBytes) || queued == size {
		select {
		case b.queue <- m:
			b.metrics.published.Inc()
			return
		default:
		}
	}
	b.queuedBytes.Add(-size)
	b.metrics.dropped.WithLabelValues(dropPublishQueue).Inc()
}

// Consumers is the number of connected clients with a subscription that matches topic, whether or not they may read it.
func (b *Broker) Consumers(topic string) int { return b.router.route(topic).consumers }

// Wants says whether the topic has consumers.
func (b *Broker) Wants(topic string) bool { return b.Consumers(topic) > 0 }

// beginServing starts the dispatcher with the first listener.
func (b *Broker) beginServing() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serving++
	if b.serving == 1 {
		b.stopDispatch, b.dispatched = make(chan struct{}), make(chan struct{})
		go b.dispatch(b.stopDispatch, b.dispatched)
		watching, cancel := context.WithCancel(context.Background())
		b.watched = make(chan struct{})
		b.stopWatch = cancel
		go b.watchRights(watching, b.watched)
	}
}

// endServing stops it with the last.
func (b *Broker) endServing() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serving--
	if b.serving == 0 {
		close(b.stopDispatch)
		<-b.dispatched
		b.stopWatch()
		<-b.watched
	}
}

// dispatch moves messages from the queue to the queues of subscribers. Nothing in it waits.
func (b *Broker) dispatch(stop <-chan struct{}, done chan<- struct{}) {
	defer close(done)
	for {
		select {
		case <-stop:
			return
		case m := <-b.queue:
			b.queuedBytes.Add(-int64(m.size()))
			r := b.router.route(m.topic)
			for i := range r.direct {
				if !r.direct[i].session.offer(delivery{message: m, to: &r.direct[i]}) {
					b.metrics.dropped.WithLabelValues(dropSubscriberQueue).Inc()
				}
			}
			for _, g := range r.groups {
				b.offerGroup(m, g.next())
			}
		}
	}
}

// offerGroup gives a message to the first member of a shared subscription that has room. The others come along: should
// that member turn out not to have the right to read it, it passes the message on to them.
func (b *Broker) offerGroup(m *message, members []*target) {
	for i, t := range members {
		if t.session.offer(delivery{message: m, to: t, others: members[i+1:]}) {
			return
		}
	}
	if len(members) > 0 {
		b.metrics.dropped.WithLabelValues(dropSubscriberQueue).Inc()
	}
}
