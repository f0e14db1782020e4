package proxy

import (
	"context"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"
)

// cutGrace is how long a session may take to end after it was cut: long enough for PostgreSQL to act on a cancel request.
const cutGrace = 5 * time.Second

// cutWrite is how long a client may take to read what it has got when its session is cut.
const cutWrite = time.Second

// join makes a session one that drain waits for. It is false when draining has begun.
func (g *group) join(s *session) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.draining {
		return false
	}
	g.sessions[s] = struct{}{}
	g.server.metrics.sessions.Inc()
	g.server.metrics.sessionsTotal.Inc()
	return true
}

func (g *group) leave(s *session) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.sessions, s)
	g.server.metrics.sessions.Dec()
	if g.draining && len(g.sessions) == 0 {
		close(g.idle)
	}
}

// drain tells all sessions to end at their next idle moment, waits for them until the deadline, and cuts the rest.
func (g *group) drain(ctx context.Context, deadline time.Time) {
	g.mu.Lock()
	g.draining = true
	if len(g.sessions) == 0 {
		close(g.idle)
	}
	for s := range g.sessions {
		s.drain()
	}
	g.mu.Unlock()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-g.idle:
		return
	case <-timer.C:
	}
	g.mu.Lock()
	rest := make([]*session, 0, len(g.sessions))
	for s := range g.sessions {
		rest = append(rest, s)
	}
	g.mu.Unlock()
	if len(rest) > 0 {
		g.server.log.Warn().Int("sessions", len(rest)).Msg("drain timeout: cutting sessions")
	}
	var cutting errgroup.Group
	cutting.SetLimit(g.server.cfg.MaxCancels)
	for _, s := range rest {
		cutting.Go(func() error { s.cut(ctx); return nil })
	}
	_ = cutting.Wait()
	<-g.idle
}

// finish ends the handshakes that are under way and waits for everything. No client is admitted any more.
func (g *group) finish() {
	g.mu.Lock()
	g.cut = true
	for conn := range g.conns {
		_ = conn.Close()
	}
	g.mu.Unlock()
	g.wg.Wait()
}

// recovered keeps a panic within the goroutine that defers it. It must be deferred directly.
func (s *Server) recovered() {
	if r := recover(); r != nil {
		s.metrics.errors.WithLabelValues(string(sideProxy), "panic").Inc()
		s.log.Error().Interface("panic", r).Bytes("stack", debug.Stack()).Msg("panic in a session")
	}
}
