package proxy

import "syscall"

const (
	// batchBuffer is the room for what a batch sends.
	batchBuffer = 64 << 10
	// batchedSize is the largest send that a batch takes; copying more would cost what it saves.
	batchedSize = 4 << 10
)

// sends are a loop's batch of sends: those of one round of the loop are handed to the kernel together. Each end has one of
// them at most, so that none depends on what becomes of another.
type sends struct {
	ring *ring // nil: there are no batches
	open bool  // sends are collected
	buf  []byte
	list []batched
}

type batched struct {
	to    *end
	b     []byte // in buf
	n     int    // bytes of it that were taken
	errno syscall.Errno
}

// takes says whether a send may be part of the batch.
func (s *sends) takes(b []byte) bool { return s.open && len(b) > 0 && len(b) <= batchedSize }

// add takes on a send to a peer that has nothing in the batch, and nothing kept for it.
func (s *sends) add(to *end, b []byte) {
	if s.ring.full() || len(s.buf)+len(b) > cap(s.buf) {
		s.send()
	}
	if s.buf == nil {
		s.buf = make([]byte, 0, batchBuffer)
	}
	at := len(s.buf)
	s.buf = append(s.buf, b...)
	to.waits = true
	s.list = append(s.list, batched{to: to, b: s.buf[at:]})
	s.ring.add(to.fd, s.buf[at:])
}

// send carries the batch out. The ends learn what their peers have not taken.
func (s *sends) send() {
	if len(s.list) == 0 {
		return
	}
	begun := s.ring.submit(func(i, n int, errno syscall.Errno) { s.list[i].n, s.list[i].errno = n, errno })
	for i := range s.list[begun:] { // the kernel lacks something, memory for example
		left := &s.list[begun+i]
		left.n, left.errno = sendNow(left.to.fd, left.b)
	}
	for _, one := range s.list {
		if one.errno == syscall.EAGAIN || one.errno == syscall.EINTR {
			one.errno = 0
		}
		one.to.sent(one.b[one.n:], one.errno)
	}
	clear(s.list)
	s.list, s.buf = s.list[:0], s.buf[:0]
}

func (s *sends) close() {
	if s.ring != nil {
		s.ring.close()
	}
}
