package proxy

import (
	"encoding/binary"
	"io"
	"math"
	"time"

	"github.com/koldproxy/koldproxy"
)

// linger is how long a client may take to read the last message before its connection is closed: closing with its bytes
// unread would make the kernel throw that message away.
const linger = 500 * time.Millisecond

// pumpServer forwards what the server sends until the server or the session ends, and says goodbye where the server
// cannot do so itself.
func (s *session) pumpServer() error {
	defer close(s.pumped)
	defer func() {
		if !s.returning {
			s.backEnded()
		}
	}()
	if err := s.resumeBack(); err != nil {
		s.note(err)
		return err
	}
	for {
		if s.goodbye() { // ahead of what a cut takeover has left in the buffer
			return nil
		}
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
			if s.attend(); s.returning {
				return nil
			}
		default:
			s.serverGone(err)
			return err
		}
	}
}

// resumeBack does what a loop has left to be done.
func (s *session) resumeBack() error {
	left := s.left.toClient
	s.left.toClient = nil
	if s.left.back != nil {
		return s.left.back
	}
	return s.catchUp(s.front, sideClient, left)
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
		if stops == "" {
			if s.backRest = s.skimServer(b); s.backRest > 0 {
				continue
			}
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

// skimServer tells the tracker about those messages in front of b that cannot have to be edited, and returns how many bytes
// they are, the last one's missing end included.
func (s *session) skimServer(b []byte) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tracker.named {
		return 0
	}
	for n+headerLen <= int64(len(b)) {
		rest := b[n:]
		typ, total := rest[0], int64(binary.BigEndian.Uint32(rest[1:]))+1
		if total < headerLen {
			break
		}
		var body []byte
		if s.needsBody(typ, total) {
			if int64(len(rest)) < total {
				break
			}
			body = rest[headerLen:total]
		}
		s.hear(typ, body)
		n += total
	}
	return n
}

func (s *session) wantsBody(typ byte, total int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.needsBody(typ, total)
}

// needsBody is wantsBody with mu held.
func (s *session) needsBody(typ byte, total int64) bool {
	return s.tracked && total <= int64(s.server.cfg.HoldBytes) && s.tracker.needsBody(typ, int(total))
}

// answered tells the tracker about a message of the server and returns what the client is to see instead, nil for the
// message as it is.
func (s *session) answered(typ byte, body []byte) []byte {
	return edit(typ, body, s.received(typ, body))
}

func (s *session) received(typ byte, body []byte) origin {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hear(typ, body)
}

// hear is received with mu held.
func (s *session) hear(typ byte, body []byte) origin {
	s.last = typ
	if !s.tracked {
		return origin{}
	}
	return s.tracker.received(typ, body)
}

func contains(types string, typ byte) bool {
	for i := range len(types) {
		if types[i] == typ {
			return true
		}
	}
	return false
}
