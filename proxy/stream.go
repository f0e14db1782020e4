package proxy

import (
	"errors"
	"net"
	"sync"
)

const (
	// bufferSize is a stream's buffer while much is said and no message has to be seen as a whole.
	bufferSize = 32 << 10
	// restingSize is a stream's buffer while little is said, so that sessions that wait cost little.
	restingSize = 2 << 10
)

// buffers are those of bufferSize that no stream needs.
var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// errMessageTooLarge is returned by fill when the buffer may not grow any more. Callers gather only messages within their
// limits, so it means a mistake of theirs.
var errMessageTooLarge = errors.New("message exceeds the buffer's limit")

// stream reads one direction of a connection into a buffer that grows as bytes arrive. It belongs to one goroutine at a
// time.
type stream struct {
	conn net.Conn
	buf  []byte
	r, w int   // buf[r:w] has been read and not consumed
	last int   // bytes of the last read
	err  error // the end of the connection, found by a read-ahead; fill returns it when asked for more
}

func newStream(conn net.Conn) *stream { return &stream{conn: conn, buf: make([]byte, restingSize)} }

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
	s.last = n
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
		s.fit()
	case s.w == len(s.buf) && s.r > 0:
		s.w = copy(s.buf, s.buf[s.r:s.w])
		s.r = 0
	}
	if s.w == len(s.buf) {
		if len(s.buf) >= limit {
			return errMessageTooLarge
		}
		size := min(max(2*len(s.buf), bufferSize), limit)
		var grown []byte
		if size == bufferSize {
			grown = buffers.Get().(*[bufferSize]byte)[:]
		} else {
			grown = make([]byte, size)
		}
		copy(grown, s.buf[:s.w])
		s.drop()
		s.buf = grown
	}
	return nil
}

// fit gives an empty buffer the size that the last read suggests.
func (s *stream) fit() {
	switch filled := s.last >= len(s.buf); {
	case filled && len(s.buf) < bufferSize:
		s.drop()
		s.buf = buffers.Get().(*[bufferSize]byte)[:]
	case s.last < restingSize && len(s.buf) > restingSize, len(s.buf) > 2*bufferSize: // much has passed
		s.drop()
		s.buf = make([]byte, restingSize)
	}
}

// drop gives the buffer away, in which nothing is left.
func (s *stream) drop() {
	if len(s.buf) == bufferSize {
		buffers.Put((*[bufferSize]byte)(s.buf))
	}
	s.buf = nil
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
