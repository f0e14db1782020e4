package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"

	"github.com/koldproxy/koldproxy/rewrite"
)

// maxNames bounds the part of a Bind, Describe, Execute or Close in which names are looked for.
const maxNames = 64 << 10

// pumpClient forwards what the client sends until the client or the session ends.
func (s *session) pumpClient(ctx context.Context) error {
	if err := s.resumeFront(); err != nil {
		s.frontFailed(err)
		return err
	}
	for {
		if err := s.relayClient(ctx); err != nil {
			s.frontFailed(err)
			return err
		}
		if s.goHome() {
			return nil
		}
		if err := s.front.fill(s.frontLimit()); err != nil {
			s.frontEnded(err)
			return err
		}
	}
}

// resumeFront does what a loop has left to be done.
func (s *session) resumeFront() error {
	left := s.left.toServer
	s.left.toServer = nil
	if s.left.front != nil {
		return s.left.front
	}
	return s.catchUp(s.back, sideServer, left)
}

// catchUp writes what a loop has left for a side; it has been counted.
func (s *session) catchUp(to *stream, side side, left []byte) error {
	var err error
	if secure, ok := to.conn.(*tlsConn); ok {
		err = secure.socket.flush()
	} else if len(left) > 0 {
		_, err = to.conn.Write(left)
	}
	if err != nil {
		return &failure{side, "write", err}
	}
	return nil
}

// goHome ends pumpServer if the session is quiet and came here on a detour from a loop. The caller has to return then.
func (s *session) goHome() bool {
	if !s.homeward || s.front.r < s.front.w || s.front.err != nil || s.frontRest > 0 {
		return false
	}
	s.mu.Lock()
	quiet := s.tracker.settled() && !s.tracker.copying && !s.draining && !s.over
	s.mu.Unlock()
	if !quiet || s.takeover() != nil {
		return false
	}
	s.returning = s.back.r == s.back.w && s.back.err == nil && s.backRest == 0
	if !s.returning {
		s.giveBack()
		return false
	}
	s.homeward = false
	s.giveBack()
	<-s.pumped
	return true
}

// frontLimit bounds the buffer for the client's messages: those that have to be seen whole are bounded by it.
func (s *session) frontLimit() int {
	return max(s.server.cfg.InspectBytes, s.server.cfg.HoldBytes) + bufferSize
}

// frontEnded tells the server that the client will say no more. The server still carries out what it was sent, and its
// end ends the session.
func (s *session) frontEnded(err error) {
	s.mu.Lock()
	over := s.over
	s.over = true
	s.mu.Unlock()
	if over { // this was the lingering
		return
	}
	if !isEOF(err) {
		s.note(&failure{sideClient, "read", err})
	}
	closeWrite(s.back.conn)
}

// frontFailed ends the session when the client's messages cannot be forwarded any more.
func (s *session) frontFailed(err error) {
	f, ok := errors.AsType[*failure](err)
	if errors.Is(err, errOver) || ok && f.side == sideServer && f.direction != "protocol" {
		// pumpServer has ended the session, or is about to find out. The client is read, up to the deadline that
		// pumpServer sets, until it has got the last message.
		<-s.pumped
		_, _ = io.Copy(io.Discard, s.front.conn)
		return
	}
	s.note(err)
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	_ = s.back.conn.Close()
}

// relayClient forwards what the client's buffer holds, as far as it is complete enough to be understood.
func (s *session) relayClient(ctx context.Context) error {
	in := s.front
	pos := in.r                       // in.buf[in.r:pos] is to be forwarded
	run, tail := pos, s.frontRest > 0 // in.buf[run:pos] of it are whole messages, unless it ends within the first
	s.open = s.inBatch
	for {
		if s.frontRest > 0 {
			n := min(s.frontRest, int64(in.w-pos))
			pos += int(n)
			s.frontRest -= n
			if tail && s.frontRest == 0 {
				run, tail = pos, false
			}
		}
		b := in.buf[pos:in.w]
		if s.frontRest > 0 || len(b) < headerLen {
			break
		}
		size := binary.BigEndian.Uint32(b[1:])
		if size < 4 { // PostgreSQL closes the connection without a word
			s.mu.Lock()
			s.terminated = true
			s.mu.Unlock()
			s.frontRest = math.MaxInt64
			continue
		}
		skimmed, err := s.skimClient(b)
		if err != nil {
			return err
		}
		if skimmed > 0 {
			s.frontRest = skimmed
			continue
		}
		kind, total := b[0], int64(size)+1
		need := s.clientNeeds(kind, total)
		if int64(len(b)) < need {
			break
		}
		seen := b[:min(total, int64(len(b)))]
		if s.looped != nil && s.takesLong(kind, seen) { //nolint:contextcheck // the catalog is asked within a time of its own
			return s.detour(pos)
		}
		var m looked
		if s.ahead != nil {
			m, s.ahead = *s.ahead, nil
		} else {
			m = s.look(kind, seen, total, in.buf[run:pos]) //nolint:contextcheck // the catalog is asked within a time of its own
		}
		if m.care && s.looped != nil {
			s.ahead = &looked{m.detail, m.rewritten, m.care} // once is enough: what was looked at is counted and kept
			return s.detour(pos)
		}
		if m.rewritten == nil && !m.care {
			if err := s.expect(kind, m.detail); err != nil {
				return err
			}
			s.frontRest = total
			continue
		}
		if pos > in.r {
			if err := s.toServer(in.buf[in.r:pos]); err != nil {
				return err
			}
		}
		if m.rewritten == nil {
			m.rewritten = append([]byte(nil), seen...)
		}
		pos += int(total)
		in.r = pos
		if m.care {
			s.inBatch = kind != msgQuery
			if err := s.runDemanding(ctx, kind, m); err != nil {
				return err
			}
			pos = in.r // reading ahead may have moved the buffer
			run, s.open = pos, s.inBatch
			continue
		}
		if err := s.expect(kind, m.detail); err != nil {
			return err
		}
		run, s.open = pos, s.inBatch
		if err := s.toServer(m.rewritten); err != nil {
			return err
		}
	}
	if pos == in.r {
		return nil
	}
	err := s.toServer(in.buf[in.r:pos])
	in.r = pos
	return err
}

// skimClient tells the tracker about those messages in front of b that nothing is done with, and returns how many bytes they
// are, the last one's missing end included.
func (s *session) skimClient(b []byte) (n int64, err error) {
	if s.intercept && (s.batching || s.ahead != nil) {
		return 0, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.intercept && (s.tracker.wantsNames() || s.tracker.demanded) {
		return 0, nil
	}
	for n+headerLen <= int64(len(b)) {
		kind, size := b[n], binary.BigEndian.Uint32(b[n+1:])
		if size < 4 || s.intercept && (kind == msgQuery || kind == msgParse) {
			break
		}
		if err := s.sending(kind, nil); err != nil {
			return 0, err
		}
		n += int64(size) + 1
	}
	return n, nil
}

// errDetour says that the message in front of the client's buffer cannot be dealt with in a loop.
var errDetour = errors.New("not in an event loop")

// detour forwards what is in front of a message and leaves the message to pumpClient.
func (s *session) detour(pos int) error {
	in := s.front
	if pos > in.r {
		if err := s.toServer(in.buf[in.r:pos]); err != nil {
			return err
		}
		in.r = pos
	}
	return errDetour
}

// maxLoopedText is the largest message whose SQL is parsed in a loop, where the other sessions wait for it.
const maxLoopedText = 16 << 10

// takesLong says whether looking at a message would keep a loop busy for long.
func (s *session) takesLong(kind byte, seen []byte) bool {
	return s.intercept && len(seen) > maxLoopedText && (kind == msgQuery || kind == msgParse) &&
		(rewrite.NeedsLook(seen[headerLen:]) || rewrite.Defines(seen[headerLen:]) || s.asks(seen[headerLen:]))
}

// looked is what became of looking at a message of the client.
type looked struct {
	detail    *detail
	rewritten []byte // the message to send instead; nil means as it is
	care      bool   // it runs by the rules of demand.go
}

// clientNeeds is how many bytes of a message of total bytes have to be there before anything is done with it.
func (s *session) clientNeeds(kind byte, total int64) int64 {
	if !s.intercept {
		return headerLen
	}
	switch kind {
	case msgQuery:
		if total <= int64(s.server.cfg.InspectBytes) {
			return total
		}
	case msgParse:
		if total <= int64(s.server.cfg.InspectBytes) {
			return total
		}
		return min(total, maxNames)
	case msgBind:
		if s.namesMatter() {
			if total <= int64(s.server.cfg.HoldBytes) && s.anyDemands() {
				return total
			}
			return min(total, maxNames)
		}
	case msgDescribe, msgExecute, msgClose:
		if s.namesMatter() {
			return min(total, maxNames)
		}
	}
	return headerLen
}

func (s *session) namesMatter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker.wantsNames()
}

func (s *session) anyDemands() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.tracker.demandStatements) > 0
}

// look finds out what a message means to koldproxy. seen is as much of it as clientNeeds asked for, or more; run is the whole
// messages in front of it that have not been forwarded yet.
func (s *session) look(kind byte, seen []byte, total int64, run []byte) (m looked) {
	if !s.intercept {
		return m
	}
	m = s.understand(kind, seen, total)
	s.keep(kind, m, seen, int64(len(seen)) == total, run)
	return m
}

func (s *session) understand(kind byte, seen []byte, total int64) (m looked) {
	body := seen[headerLen:]
	whole := int64(len(seen)) == total
	switch kind {
	case msgQuery:
		if whole && total <= int64(s.server.cfg.InspectBytes) {
			var t *text
			if t, m.rewritten = s.rewrittenQuery(body); t != nil {
				m.detail = &detail{text: t}
				m.care = t.mayDemand
			}
		}
	case msgParse:
		if whole && total <= int64(s.server.cfg.InspectBytes) {
			t, name, out := s.rewrittenParse(body)
			if t != nil || s.namesMatter() {
				m.detail, m.rewritten = &detail{text: t, name: name}, out
			}
		} else if s.namesMatter() {
			name, _, _ := cString(body)
			m.detail = &detail{name: string(name)}
		}
	case msgBind, msgDescribe, msgExecute, msgClose:
		if !s.namesMatter() {
			return m
		}
		m.detail = names(kind, body)
		s.mu.Lock()
		defer s.mu.Unlock()
		switch kind {
		case msgBind:
			if whole && s.tracker.keepsBind(m.detail.source) {
				m.detail.bind = append([]byte(nil), seen...)
				m.care = true
			}
		case msgExecute:
			m.care = whole && s.tracker.mightDemand(m.detail.name)
		}
	}
	return m
}

// expect tells the tracker about a message that is about to be forwarded.
func (s *session) expect(kind byte, d *detail) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sending(kind, d)
}

// sending is expect with mu held.
func (s *session) sending(kind byte, d *detail) error {
	if s.over {
		return errOver
	}
	switch kind {
	case msgTerminate:
		s.terminated = true
	case msgSync, msgQuery, msgFunction:
		s.inBatch = false
	default:
		s.inBatch = true
	}
	if s.tracked {
		s.tracker.sent(kind, d)
	}
	return nil
}
