package proxy

import (
	"net"
	"sync"
	"time"
)

// socket is what carries the records of a TLS connection: a connection of Go's or, while an event loop runs the session, a
// descriptor of the loop's. TLS does not notice when it changes, which happens while nobody reads or writes.
type socket struct {
	net.Conn        // nil in a loop
	end      *end   // nil outside of loops
	first    []byte // what had been read from the connection before TLS began

	mu   sync.Mutex
	left []byte // records that a loop has not got rid of; they go first
}

// Read reads what the peer has sent. In a loop it does not wait: os.ErrDeadlineExceeded says that there is nothing now, which
// is an error that TLS forgets.
func (s *socket) Read(b []byte) (int, error) {
	if len(s.first) > 0 {
		n := copy(b, s.first)
		if s.first = s.first[n:]; len(s.first) == 0 {
			s.first = nil
		}
		return n, nil
	}
	if s.end != nil {
		return s.end.receiveRecord(b)
	}
	return s.Conn.Read(b)
}

// Write sends b. In a loop it does not wait: what the peer does not take at once is kept.
func (s *socket) Write(b []byte) (int, error) {
	if s.end != nil {
		return len(b), s.end.send(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.clear(); err != nil {
		return 0, err
	}
	return s.Conn.Write(b)
}

// SetWriteDeadline does nothing in a loop, which does not wait. TLS sets one to say goodbye.
func (s *socket) SetWriteDeadline(at time.Time) error {
	if s.end != nil {
		return nil
	}
	return s.Conn.SetWriteDeadline(at)
}

// flush sends what a loop has left. Reading may write as well, so that it is not certain who comes first.
func (s *socket) flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.clear()
}

// clear is flush with mu held.
func (s *socket) clear() error {
	if len(s.left) == 0 {
		return nil
	}
	_, err := s.Conn.Write(s.left)
	s.left = nil
	return err
}

// underneath is the connection that carries conn's bytes: itself, unless it is encrypted.
func underneath(conn net.Conn) net.Conn {
	if secure, ok := conn.(*tlsConn); ok {
		return secure.socket.Conn
	}
	return conn
}
