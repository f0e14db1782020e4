package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// Fulfiller answers demands: what a statement needs from outside of PostgreSQL before it can go on.
type Fulfiller interface {
	// Fulfil answers a demand raised in a session on database and returns the JSON object to stage, which the caller owns. The
	// demand is in the canonical form of [koldproxy.Demand].
	// A *koldproxy.Error goes to the client as it is. It may take long; ctx ends when the client cancels the statement or
	// goes away. It is called from many sessions at once.
	Fulfil(ctx context.Context, database string, demand json.RawMessage) (json.RawMessage, error)
	// StageSecrets are what answers for sessions on database are sealed with (koldstore.stage_secret): the one that keys of boxes are
	// made of, and the one for MACs. mark is the SHA-256 of the latter in hexadecimal, as the session's server has it now. They
	// are not to be changed. It is called from many sessions at once.
	StageSecrets(ctx context.Context, database, mark string) (secret, seal []byte, err error)
}

// StreamStats knows what only this process knows about streams.
type StreamStats interface {
	// StreamStats is a JSON object {"<schema>.<stream>": {"consumers": n, "lag": n}} of this instance, for SHOW STREAMS.
	// It is called from many sessions at once and must not block.
	StreamStats(database string) json.RawMessage
}

// Deps are the parts that a Server works with. The zero value is a proxy that logs nothing and fulfils nothing: KS003
// then reaches the client.
type Deps struct {
	Log         zerolog.Logger
	Metrics     *Metrics    // nil: counted but not registered anywhere
	Fulfiller   Fulfiller   // may be nil
	StreamStats StreamStats // may be nil
	Verifiers   Verifiers   // needed for auth = "scram"
	Prober      Prober      // needed for target_session_attrs other than "any"
}

// Server is a proxy in front of PostgreSQL. Its methods may be called concurrently.
type Server struct {
	cfg      Config // as it was at first: for what Reload cannot change
	settings atomic.Pointer[settings]
	deps     Deps
	log      zerolog.Logger
	metrics  *Metrics
	certs    *certificates
	states   serverStates
	asking   asking
	held     budget

	loops     loops
	admission admission
	keys      keyTable
	cancels   chan struct{} // slots for forwarding cancel requests
	waiting   chan struct{} // slots for cancel requests, those that wait for such a slot included
	reloading sync.Mutex    // held by Reload
}

// New makes a Server. It reads the TLS files and opens nothing else.
func New(cfg Config, deps Deps) (*Server, error) {
	set, err := newSettings(cfg)
	if err != nil {
		return nil, err
	}
	if deps.Metrics == nil {
		deps.Metrics = NewMetrics(nil)
	}
	s := &Server{
		cfg:     cfg,
		deps:    deps,
		log:     deps.Log,
		metrics: deps.Metrics,
		states:  serverStates{prober: deps.Prober},
		held:    budget{limit: heldSessions * int64(cfg.HoldBytes)},
		cancels: make(chan struct{}, cfg.MaxCancels),
		waiting: make(chan struct{}, waitingCancels*cfg.MaxCancels),
	}
	if err := s.needs(set); err != nil {
		return nil, err
	}
	if s.certs, err = newCertificates(cfg, deps.Log); err != nil {
		return nil, err
	}
	s.settings.Store(set)
	return s, nil
}

// needs says which part of Deps is missing for some settings.
func (s *Server) needs(set *settings) error {
	if set.Auth == AuthSCRAM && s.deps.Verifiers == nil {
		return errors.New("proxy.auth: scram needs a source of password verifiers")
	}
	if set.TargetSessionAttrs != SessionAny && s.deps.Prober == nil {
		return errors.New("proxy.target_session_attrs: needs a prober")
	}
	return nil
}

// Serve accepts clients on ln until ctx ends, then drains (drain.go) and returns nil when the last session and its server
// connection have ended. It closes ln. An error means that ln broke; sessions are drained in that case too. Serve may run
// on several listeners at once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	defer s.loops.use()()
	g := newGroup(s)
	failed := make(chan error, 1)
	go func() { failed <- g.accept(ctx, ln) }()
	var err error
	accepting := true
	select {
	case <-ctx.Done():
	case err = <-failed:
		accepting = false
	}
	deadline := time.Now().Add(s.current().DrainTimeout)
	if shared, filterErr := handOver(ln); accepting && shared { // somebody else takes the clients that come from now on
		if filterErr != nil {
			s.log.Info().Err(filterErr).Msg("cannot hold back connections: those that begin while the listener is closed are reset")
		}
		time.Sleep(handOverTime) // for those whose connection is being made
		_ = ln.Close()
		err, accepting = <-failed, false
		g.settle(deadline)
	}
	g.drain(context.WithoutCancel(ctx), deadline) // clients that come meanwhile are told so, and cancel requests still work
	_ = ln.Close()
	if accepting {
		<-failed
	}
	g.finish()
	return err
}

// group is what one Serve has to wait for.
type group struct {
	server *Server
	wg     sync.WaitGroup // clients and sessions

	mu       sync.Mutex
	draining bool
	cut      bool
	sessions map[*session]struct{}
	idle     chan struct{}         // closed when draining and no session is left
	conns    map[net.Conn]struct{} // clients without a session
	starting int                   // those of them that have sent a startup packet
}

func newGroup(s *Server) *group {
	return &group{server: s, sessions: map[*session]struct{}{}, conns: map[net.Conn]struct{}{}, idle: make(chan struct{})}
}

// Waits between attempts to accept when the process is out of descriptors or memory.
const (
	minBackoff = 5 * time.Millisecond
	maxBackoff = time.Second
)

func (g *group) accept(ctx context.Context, ln net.Listener) error {
	backoff := minBackoff
	for {
		conn, err := ln.Accept()
		switch {
		case err == nil:
			backoff = minBackoff
			g.admit(ctx, conn)
		case errors.Is(err, net.ErrClosed):
			if ctx.Err() == nil {
				return fmt.Errorf("accept on %s: %w", ln.Addr(), err)
			}
			return nil // Serve has closed the listener
		default:
			g.server.metrics.refused.WithLabelValues("accept").Inc()
			g.server.log.Warn().Err(err).Msg("cannot accept")
			time.Sleep(backoff)
			backoff = min(2*backoff, maxBackoff)
		}
	}
}

// admit starts the handshake of a client in a goroutine of its own.
func (g *group) admit(ctx context.Context, conn net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut {
		_ = conn.Close()
		return
	}
	g.conns[conn] = struct{}{}
	g.wg.Add(1)
	set := g.server.current()
	place := g.server.admission.enter(conn, set.MaxHandshakes)
	go func() {
		// Sessions outlive ctx: they are told by drain.
		c := &client{group: g, conn: conn, set: set, place: place, peer: peerOf(conn.RemoteAddr())}
		if !c.serve(context.WithoutCancel(ctx)) {
			g.wg.Done()
		}
	}()
}

// settle waits until no handshake is under way, so that those which began in time succeed. Clients that say nothing get
// silenceTime, the others until the deadline.
func (g *group) settle(deadline time.Time) {
	silent := time.Now().Add(silenceTime)
	for now := time.Now(); now.Before(deadline); now = time.Now() {
		g.mu.Lock()
		conns, starting := len(g.conns), g.starting
		g.mu.Unlock()
		if conns == 0 || starting == 0 && now.After(silent) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// client is a connection until it becomes a session, or comes to nothing.
type client struct {
	*group
	conn  net.Conn
	set   *settings
	place *waiting
	peer  peer

	spoken bool // it has sent a startup packet; guarded by mu
}

// shaken ends being a client without a session. It may be called more than once.
func (c *client) shaken() {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.conns, c.conn)
	if c.spoken {
		c.starting--
		c.spoken = false
	}
}

// speaks notes that the startup packet has come.
func (c *client) speaks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starting++
	c.spoken = true
}

// serve serves one connection from its first byte on. It is true when a session has come of it that a loop carries; otherwise
// everything has ended.
func (c *client) serve(ctx context.Context) (carried bool) {
	s, conn := c.server, c.conn
	defer c.shaken()
	defer conn.Close()
	defer s.admission.leave(c.place) // does no harm when it has left already
	defer s.recovered()
	c.set.tuneClient(conn)
	deadline := time.Now().Add(c.set.HandshakeTimeout)
	_ = conn.SetDeadline(deadline)
	in := &stream{conn: conn, buf: make([]byte, startupBuffer)}
	policy := s.policyFor(conn, c.set)
	packet, err := c.hello(in, policy)
	if evicted := s.admission.leave(c.place); evicted {
		s.metrics.refused.WithLabelValues("handshakes").Inc()
		return false
	}
	if err != nil {
		s.refused(err, c.peer)
		if e, ok := errors.AsType[*koldproxy.Error](err); ok {
			_, _ = in.conn.Write(errorFields("FATAL", e).appendTo(nil, msgError))
		}
		return false
	}
	if packet.code == codeCancel {
		_ = conn.SetDeadline(time.Time{})
		if err := s.cancel(ctx, packet); err != nil {
			s.cancelFailed(err)
		}
		return false
	}
	c.speaks()
	in.grow(restingSize)
	if refusal := s.admission.begin(c.peer, c.set.MaxConnections, c.set.MaxConnectionsPerAddress); refusal != admitted {
		s.metrics.refused.WithLabelValues(refusal.String()).Inc()
		_, _ = in.conn.Write(c.tooMany(refusal))
		return false
	}
	parameters := parseStartup(packet)
	session := newSession(s, in, parameters)
	session.group, session.set, session.peer, session.deadline = c.group, c.set, c.peer, deadline
	session.certified = policy.certifies(in.conn, parameters.user)
	if !c.join(session) {
		s.admission.end(c.peer)
		s.metrics.refused.WithLabelValues("draining").Inc()
		_, _ = in.conn.Write(shuttingDown())
		return false
	}
	defer func() {
		if !carried {
			session.finish()
		}
	}()
	if c.set.ApplicationNameAddHost && parameters.understood {
		packet = packet.withClientAddress(c.peer)
	}
	return session.run(ctx, packet, c.shaken)
}

// hello reads what the client says up to its startup packet, or a cancel request.
func (c *client) hello(in *stream, policy clientPolicy) (startupPacket, error) {
	var err error
	if c.peer, err = identify(in, c.peer, c.set.sources); err != nil {
		return startupPacket{}, err
	}
	return readStartup(in, policy)
}

// tooMany is what a client beyond a limit is told.
func (c *client) tooMany(r refusal) []byte {
	if r == tooManyOfAddress {
		return errorFields("FATAL", koldproxy.Errorf(koldproxy.CodeTooManyConnections, "sorry, too many clients of your address already").
			WithDetail(fmt.Sprintf("koldproxy allows %d for %s.", c.set.MaxConnectionsPerAddress, c.peer.network()))).appendTo(nil, msgError)
	}
	return fatal(koldproxy.CodeTooManyConnections, "sorry, too many clients already (koldproxy allows %d)", c.set.MaxConnections)
}

// intercepts says whether statements of a database are looked at.
func (s *Server) intercepts(database string) bool {
	return len(s.cfg.Databases) == 0 || slices.Contains(s.cfg.Databases, database)
}
