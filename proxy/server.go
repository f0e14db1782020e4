package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// Fulfiller answers demands: what a statement needs from outside of PostgreSQL before it can go on.
type Fulfiller interface {
	// Fulfil answers a demand raised in a session on database and returns the JSON object to stage.
	// A *koldproxy.Error goes to the client as it is. It may take long; ctx ends when the client cancels the statement or
	// goes away. It is called from many sessions at once.
	Fulfil(ctx context.Context, database string, demand json.RawMessage) (json.RawMessage, error)
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
}

// Server is a proxy in front of one PostgreSQL server. Its methods may be called concurrently.
type Server struct {
	cfg              Config
	deps             Deps
	log              zerolog.Logger
	metrics          *Metrics
	certs            *certificates
	network, address string

	keys       keyTable
	cancels    chan struct{} // slots for forwarding cancel requests
	sessions   chan struct{} // slots for sessions
	handshakes chan struct{} // slots for clients without a session
}

// New makes a Server. It reads the TLS files and opens nothing else.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Auth == AuthSCRAM && deps.Verifiers == nil {
		return nil, errors.New("proxy.auth: scram needs a source of password verifiers")
	}
	certs, err := newCertificates(cfg, deps.Log)
	if err != nil {
		return nil, err
	}
	network, address, err := splitAddress(cfg.Upstream)
	if err != nil {
		return nil, err
	}
	if deps.Metrics == nil {
		deps.Metrics = NewMetrics(nil)
	}
	return &Server{
		cfg:        cfg,
		deps:       deps,
		log:        deps.Log,
		metrics:    deps.Metrics,
		certs:      certs,
		network:    network,
		address:    address,
		cancels:    make(chan struct{}, cfg.MaxCancels),
		sessions:   make(chan struct{}, cfg.MaxConnections),
		handshakes: make(chan struct{}, cfg.MaxHandshakes),
	}, nil
}

// Serve accepts clients on ln until ctx ends, then drains (drain.go) and returns nil when the last session and its server
// connection have ended. It closes ln. An error means that ln broke; sessions are drained in that case too. Serve may run
// on several listeners at once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
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
	g.drain(context.WithoutCancel(ctx)) // clients that come meanwhile are told so, and cancel requests still work
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
	wg     sync.WaitGroup

	mu       sync.Mutex
	draining bool
	cut      bool
	sessions map[*session]struct{}
	idle     chan struct{}         // closed when draining and no session is left
	conns    map[net.Conn]struct{} // clients without a session
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
			g.server.log.Warn().Err(err).Msg("cannot accept")
			time.Sleep(backoff)
			backoff = min(2*backoff, maxBackoff)
		}
	}
}

// admit starts the handshake of a client in a goroutine of its own.
func (g *group) admit(ctx context.Context, conn net.Conn) {
	s := g.server
	select {
	case s.handshakes <- struct{}{}:
	default:
		s.metrics.refused.WithLabelValues("handshakes").Inc()
		_ = conn.Close()
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut {
		<-s.handshakes
		_ = conn.Close()
		return
	}
	g.conns[conn] = struct{}{}
	g.wg.Add(1)
	go func() {
		defer g.wg.Done()
		// Sessions outlive ctx: they are told by drain.
		g.serveClient(context.WithoutCancel(ctx), conn)
	}()
}

// serveClient serves one connection from its first byte to its last.
func (g *group) serveClient(ctx context.Context, conn net.Conn) {
	s := g.server
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var once sync.Once
	shaken := func() {
		once.Do(func() {
			g.mu.Lock()
			delete(g.conns, conn)
			g.mu.Unlock()
			<-s.handshakes
		})
	}
	defer shaken()
	defer conn.Close()
	defer s.recovered()
	s.tuneClient(conn)
	deadline := time.Now().Add(s.cfg.HandshakeTimeout)
	_ = conn.SetDeadline(deadline)
	in := newStream(conn)
	packet, err := readStartup(in, s.policyFor(conn))
	if err != nil {
		s.refused(err)
		if e, ok := errors.AsType[*koldproxy.Error](err); ok {
			_, _ = in.conn.Write(errorFields("FATAL", e).appendTo(nil, msgError))
		}
		return
	}
	if packet.code == codeCancel {
		_ = conn.SetDeadline(time.Time{})
		if err := s.cancel(ctx, conn, packet); err != nil {
			s.log.Warn().Err(err).Msg("cannot forward a cancel request")
		}
		return
	}
	select {
	case s.sessions <- struct{}{}:
		defer func() { <-s.sessions }()
	default:
		s.metrics.refused.WithLabelValues("connections").Inc()
		_, _ = in.conn.Write(fatal(koldproxy.CodeTooManyConnections, "sorry, too many clients already (koldproxy allows %d)",
			s.cfg.MaxConnections))
		return
	}
	session := newSession(s, in, parseStartup(packet))
	session.deadline = deadline
	if !g.join(session) {
		s.metrics.refused.WithLabelValues("draining").Inc()
		_, _ = in.conn.Write(shuttingDown())
		return
	}
	defer g.leave(session)
	session.run(ctx, packet, shaken)
}

// refused notes why a connection came to nothing before its startup packet.
func (s *Server) refused(err error) {
	if errors.Is(err, errHandshake) {
		s.metrics.refused.WithLabelValues("tls").Inc()
		s.log.Info().Err(err).Msg("no TLS connection with a client")
		return
	}
	s.metrics.refused.WithLabelValues("startup").Inc()
	s.log.Debug().Err(err).Msg("no startup packet")
}

// intercepts says whether statements of a database are looked at.
func (s *Server) intercepts(database string) bool {
	return len(s.cfg.Databases) == 0 || slices.Contains(s.cfg.Databases, database)
}
