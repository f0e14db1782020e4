package proxy

import (
	"errors"
	"net"
)

// bufferSize is a stream's buffer as long as no message has to be seen as a whole.
const bufferSize = 32 << 10

// errMessageTooLarge is returned by fill when the buffer may not grow any more. Callers gather only messages within their
// limits, so it means a mistake of theirs.
var errMessageTooLarge = errors.New("message exceeds the buffer's limit")

// stream reads one direction of a connection into a buffer that grows as bytes arrive. It belongs to one goroutine at a
// time.
type stream struct {
	conn net.Conn
	buf  []byte
	r, w int   // buf[r:w] has been read and not consumed
	err  error // the end of the connection, found by a read-ahead; fill returns it when asked for more
}

func newStream(conn net.Conn) *stream { return &stream{conn: conn, buf: make([]byte, bufferSize)} }

func (s *stream) buffered() []byte { return s.buf[s.r:s.w] }

// fill reads once, growing the buffer up to limit bytes if it is full. Slices of the buffer are void afterwards.
func (s *stream) fill(limit int) error {
	if s.err != nil {
		return s.err
	}
	if err := s.makeRoom(limit); err != nil {
		return err
	}
	n, err := s.conn.Read(s.buf[s.w:])
	s.w += n
	if n > 0 {
		return nil // an error that came along comes again
	}
	return err
}

// makeRoom makes room for reading, in a buffer of up to limit bytes. Slices of the buffer are void afterwards.
func (s *stream) makeRoom(limit int) error {
	switch {
	case s.r == s.w:
		s.r, s.w = 0, 0
		if len(s.buf) > 2*bufferSize { // a large message has passed
			s.buf = make([]byte, bufferSize)
		}
	case s.w == len(s.buf) && s.r > 0:
		s.w = copy(s.buf, s.buf[s.r:s.w])
		s.r = 0
	}
	if s.w == len(s.buf) {
		if len(s.buf) >= limit {
			return errMessageTooLarge
		}
		grown := make([]byte, min(max(2*len(s.buf), bufferSize), limit))
		copy(grown, s.buf[:s.w])
		s.buf = grown
	}
	return nil
}

// grow makes the buffer at least size bytes large.
func (s *stream) grow(size int) {
	if len(s.buf) >= size {
		return
	}
	grown := make([]byte, size)
	s.w = copy(grown, s.buffered())
	s.r, s.buf = 0, grown
}

// room says whether a read-ahead may go on: up to limit bytes are kept.
func (s *stream) room(limit int) bool { return s.w-s.r < limit }

// more is fill for messages of up to limit bytes.
func (s *stream) more(limit int) func() error {
	return func() error { return s.fill(limit + bufferSize) }
}
