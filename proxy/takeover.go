package proxy

import (
	"context"
	"time"
)

// readAhead bounds what is read from a client while its statement is being repeated. Reading on is how it is noticed that
// the client goes away; a client that sends more than this is not watched any further.
const readAhead = 64 << 10

// takeover parks pumpServer, so that the calling goroutine, pumpClient's, owns both directions until it calls giveBack.
func (s *session) takeover() error {
	s.mu.Lock()
	if s.over {
		s.mu.Unlock()
		return errOver
	}
	s.wanted = true
	_ = s.back.conn.SetReadDeadline(longAgo) // pumpServer runs: there is no loop
	s.mu.Unlock()
	select {
	case <-s.parked:
		return nil
	case <-s.pumped:
		return errOver
	}
}

// giveBack lets pumpServer go on.
func (s *session) giveBack() { s.resume <- struct{}{} }

// watch reads ahead from the client in a goroutine of its own and calls gone if the client goes away. The returned
// function ends it, and must be called before anybody else reads from the client.
func (s *session) watch(gone context.CancelCauseFunc) (stop func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.server.recovered()
		for s.front.room(readAhead) {
			err := s.front.fill(max(2*readAhead, len(s.front.buf)))
			if err == nil {
				continue
			}
			if !interrupted(err) {
				s.front.err = err
				gone(errClientGone)
			}
			return
		}
	}()
	return func() {
		_ = s.front.conn.SetReadDeadline(longAgo)
		<-done
		_ = s.front.conn.SetReadDeadline(time.Time{})
	}
}

// pull reads more from the server during a takeover.
func (s *session) pull() error {
	for {
		err := s.back.fill(s.backLimit())
		switch {
		case err == nil:
			return nil
		case !interrupted(err):
			s.back.err = err // for pumpServer, which knows what to do about it
			return &failure{sideServer, "read", err}
		}
		s.mu.Lock() // somebody wanted pumpServer's attention; it looks when it has the session back
		severed := s.severed
		_ = s.back.conn.SetReadDeadline(time.Time{})
		s.mu.Unlock()
		if severed {
			return errOver
		}
	}
}

// hold keeps the answer of a statement back until it is certain that the client is to see it.
type hold struct {
	session *session
	limit   int
	held    []byte
	kept    []byte // what is not part of the answer, and is not thrown away with it
	open    bool   // too much to keep: everything goes through
	share   share
}

// write is for relayServer.
func (h *hold) write(b []byte) error {
	if h.open {
		return h.session.toClient(b)
	}
	h.held = append(h.held, b...)
	if len(h.held) <= h.limit && h.share.afford(cap(h.held)) {
		return nil
	}
	return h.release()
}

// keep takes a notification or a parameter status, which come from elsewhere.
func (h *hold) keep(message []byte) error {
	if !h.open {
		h.kept = append(h.kept, message...)
	}
	return h.write(message)
}

// discard throws the answer away.
func (h *hold) discard() {
	if !h.open {
		h.held = append(h.held[:0], h.kept...)
	}
}

// release lets the answer go, and what follows too.
func (h *hold) release() error {
	defer h.share.release()
	h.open = true
	held := h.held
	h.held, h.kept = nil, nil
	if len(held) == 0 {
		return nil
	}
	return h.session.toClient(held)
}
