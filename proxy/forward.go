package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"time"

	"github.com/koldproxy/koldproxy"
)

// linger is how long a client may take to read the last message before its connection is closed: closing with its bytes
// unread would make the kernel throw that message away.
const linger = 500 * time.Millisecond

// maxNames bounds the part of a Bind, Describe, Execute or Close in which names are looked for.
const maxNames = 64 << 10

// pumpClient forwards what the client sends until the client or the session ends.
func (s *session) pumpClient(ctx context.Context) error {
	for {
		if err := s.relayClient(ctx); err != nil {
			s.frontFailed(err)
			return err
		}
		if err := s.front.fill(s.frontLimit()); err != nil {
			s.frontEnded(err)
			return err
		}
	}
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
	pos := in.r // in.buf[in.r:pos] is to be forwarded
	for {
		if s.frontRest > 0 {
			n := min(s.frontRest, int64(in.w-pos))
			pos += int(n)
			s.frontRest -= n
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
		kind, total := b[0], int64(size)+1
		need := s.clientNeeds(kind, total)
		if int64(len(b)) < need {
			break
		}
		seen := b[:min(total, int64(len(b)))]
		m := s.look(kind, seen, total)
		if m.rewritten == nil && !m.mayDemand {
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
		if m.mayDemand {
			if err := s.runDemanding(ctx, kind, m); err != nil {
				return err
			}
			pos = in.r // reading ahead may have moved the buffer
			continue
		}
		if err := s.expect(kind, m.detail); err != nil {
			return err
		}
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

// looked is what became of looking at a message of the client.
type looked struct {
	detail    *detail
	rewritten []byte // the message to send instead; nil means as it is
	mayDemand bool   // it runs by the rules of demand.go
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

// look finds out what a message means to koldproxy. seen is as much of it as clientNeeds asked for, or more.
func (s *session) look(kind byte, seen []byte, total int64) (m looked) {
	if !s.intercept {
		return m
	}
	body := seen[headerLen:]
	whole := int64(len(seen)) == total
	switch kind {
	case msgQuery:
		if whole && total <= int64(s.server.cfg.InspectBytes) {
			var t *text
			if t, m.rewritten = s.rewrittenQuery(body); t != nil {
				m.detail = &detail{text: t}
				m.mayDemand = t.mayDemand
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
			}
		case msgExecute:
			m.mayDemand = whole && s.tracker.mightDemand(m.detail.name)
		}
	}
	return m
}

// expect tells the tracker about a message that is about to be forwarded.
func (s *session) expect(kind byte, d *detail) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return errOver
	}
	if kind == msgTerminate {
		s.terminated = true
	}
	if s.tracked {
		s.tracker.sent(kind, d)
	}
	return nil
}

// pumpServer forwards what the server sends until the server or the session ends, and says goodbye where the server
// cannot do so itself.
func (s *session) pumpServer() error {
	defer close(s.pumped)
	defer s.backEnded()
	for {
		if _, err := s.relayServer(s.toClient, ""); err != nil {
			s.note(err)
			return err
		}
		if s.goodbye() {
			return nil
		}
		err := s.back.fill(s.backLimit())
		switch {
		case err == nil:
		case interrupted(err):
			s.attend()
		default:
			s.serverGone(err)
			return err
		}
	}
}

// backLimit bounds the buffer for the server's messages: those that have to be seen whole are bounded by it.
func (s *session) backLimit() int { return s.server.cfg.HoldBytes + bufferSize }

// backEnded ends the client's side, after the last message for it has been written, and then the server's.
func (s *session) backEnded() {
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	_ = s.back.conn.Close()
	closeWrite(s.front.conn)
	_ = s.front.conn.SetReadDeadline(time.Now().Add(linger))
}

// attend finds out why pumpServer's reading was interrupted. Flags and deadline change together under mu, so that none of
// them is lost.
func (s *session) attend() {
	s.mu.Lock()
	wanted := s.wanted
	s.wanted = false
	_ = s.back.conn.SetReadDeadline(time.Time{})
	s.mu.Unlock()
	if wanted {
		s.parked <- struct{}{}
		<-s.resume
	}
}

// goodbye ends the session if it is draining and idle, or cut and between two messages.
func (s *session) goodbye() bool {
	s.mu.Lock()
	idle := s.draining && s.tracked && s.tracker.idle() && !s.wanted
	if s.backRest > 0 || !idle && !s.severed {
		s.mu.Unlock()
		return false
	}
	s.over = true
	s.mu.Unlock()
	_ = s.toClient(fatal(koldproxy.CodeAdminShutdown, "terminating connection because koldproxy is shutting down"))
	closeWrite(s.back.conn)
	_ = s.back.conn.SetReadDeadline(time.Now().Add(cutGrace))
	_, _ = io.Copy(io.Discard, s.back.conn) // until the server process has ended
	return true
}

// serverGone says what the server did not say: that it is gone. Never in the middle of a message.
func (s *session) serverGone(err error) {
	s.mu.Lock()
	expected := s.terminated || s.over || s.last == msgError
	s.mu.Unlock()
	if expected {
		return
	}
	s.note(&failure{sideServer, "read", err})
	if s.backRest == 0 {
		_ = s.toClient(lost())
	}
}

// event is a message of the server at which relayServer stopped, as the client is to see it. The zero event means that
// more bytes are needed; an event without a message is one that is too large to keep, and goes through with what follows.
type event struct {
	typ     byte
	message []byte
}

// relayServer hands what the server's buffer holds to write, edited, as far as it is complete enough to be understood. It
// stops at a message whose type is in stops: that message is consumed and returned, and not written.
func (s *session) relayServer(write func([]byte) error, stops string) (event, error) {
	in := s.back
	pos := in.r
	flush := func() error {
		if pos == in.r {
			return nil
		}
		err := write(in.buf[in.r:pos])
		in.r = pos
		return err
	}
	for {
		if s.backRest > 0 {
			n := min(s.backRest, int64(in.w-pos))
			pos += int(n)
			s.backRest -= n
		}
		b := in.buf[pos:in.w]
		if s.backRest > 0 || len(b) < headerLen {
			return event{}, flush()
		}
		size := binary.BigEndian.Uint32(b[1:])
		if size < 4 { // nothing that follows can be understood
			s.backRest = math.MaxInt64
			continue
		}
		typ, total := b[0], int64(size)+1
		stop := contains(stops, typ)
		if stop && total > int64(s.server.cfg.HoldBytes) {
			s.answered(typ, nil)
			err := flush()
			s.backRest = total
			return event{typ: typ}, err
		}
		var body []byte
		if stop || s.wantsBody(typ, total) {
			if int64(len(b)) < total {
				return event{}, flush()
			}
			body = b[headerLen:total]
		}
		message := s.answered(typ, body)
		switch {
		case message == nil && !stop:
			s.backRest = total
			continue
		case message == nil:
			message = append([]byte(nil), b[:total]...)
		}
		if err := flush(); err != nil {
			return event{}, err
		}
		pos += int(total)
		in.r = pos
		if stop {
			return event{typ, message}, nil
		}
		if err := write(message); err != nil {
			return event{}, err
		}
	}
}

func (s *session) wantsBody(typ byte, total int64) bool {
	if !s.tracked || total > int64(s.server.cfg.HoldBytes) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker.needsBody(typ, int(total))
}

// answered tells the tracker about a message of the server and returns what the client is to see instead, nil for the
// message as it is.
func (s *session) answered(typ byte, body []byte) []byte {
	s.mu.Lock()
	s.last = typ
	var o origin
	if s.tracked {
		o = s.tracker.received(typ, body)
	}
	s.mu.Unlock()
	return edit(typ, body, o)
}

func contains(types string, typ byte) bool {
	for i := range len(types) {
		if types[i] == typ {
			return true
		}
	}
	return false
}
