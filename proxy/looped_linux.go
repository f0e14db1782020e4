package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// loopTurns is how often a session may read before it is the next one's turn.
	loopTurns = 4
	// loopHangUp are the events after which a descriptor is read until its end shows.
	loopHangUp = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	// maxIdleOut is the largest buffer for output that a session keeps.
	maxIdleOut = 64 << 10
)

// looped is a session in a loop. It belongs to the loop's goroutine, except before begin and after concluded, when it
// belongs to one of the session's own.
type looped struct {
	loop    *loop
	session *session
	client  end
	server  end

	begun   bool // begin has been called
	sound   bool // no panic has interrupted what is going on
	leaving bool // the pumps are to go on
	over    bool // both sides have ended
	gone    bool // out of the loop
	queued  bool // in loop.again
}

// end is one of a looped session's sockets.
type end struct {
	*looped
	fd      int
	secure  *tlsConn // nil without TLS
	in      *stream  // what the peer has said
	out     []byte   // what it has not taken yet, as records if there is TLS; meanwhile the other end is not read
	waits   bool     // something for it is in the loop's batch of sends
	ready   bool     // there may be something to read
	drained bool     // of the records that the socket holds there is none left
	closes  bool     // the peer has finished, or is gone
	ended   bool     // it was read to its end
}

func (x *looped) other(e *end) *end {
	if e == &x.client {
		return &x.server
	}
	return &x.client
}

// interest is what epoll is to tell about an end. That it takes more is asked only while there is more: a Unix socket would
// report each message that its peer reads.
func (e *end) interest() *unix.EpollEvent {
	event := &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(e.fd)}
	if len(e.out) > 0 {
		event.Events |= unix.EPOLLOUT
	}
	return event
}

// carry has the loop run a session from now on. When it has left the loop it goes on in a goroutine of its own, see goOn.
func (l *loop) carry(s *session) error {
	x := &looped{loop: l, session: s}
	if err := x.take(); err != nil {
		return err
	}
	s.mu.Lock()
	s.looped = x
	s.mu.Unlock()
	l.ask(x.begin)
	return nil
}

// goOn does what is to be done after the loop: a session that has ended is finished, the pumps go on with others.
func (x *looped) goOn() {
	s, carried := x.session, false
	defer func() {
		if !carried {
			s.finish()
			s.group.wg.Done()
		}
	}()
	defer s.server.recovered()
	if x.over || !x.sound {
		return
	}
	if err := x.restore(); err != nil {
		s.note(err)
		return
	}
	carried = s.pump(s.life) && s.relay()
}

// take makes the session's sockets the loop's; Go's poller forgets them.
func (x *looped) take() error {
	s := x.session
	var err error
	x.client = end{looped: x, fd: -1, in: s.front}
	x.server = end{looped: x, fd: -1, in: s.back}
	for _, e := range []*end{&x.client, &x.server} {
		if e.fd, err = duplicate(underneath(e.in.conn)); err != nil {
			x.close()
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range []*end{&x.client, &x.server} {
		_ = underneath(e.in.conn).Close()
		if secure, ok := e.in.conn.(*tlsConn); ok {
			e.secure = secure
			secure.socket.Conn, secure.socket.end = nil, e
		}
		e.in.conn = nil
	}
	return nil
}

func duplicate(conn net.Conn) (int, error) {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	controlErr := raw.Control(func(original uintptr) { fd, err = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(controlErr, os.NewSyscallError("fcntl", err))
}

// restore makes the session's sockets connections of Go's again.
func (x *looped) restore() error {
	defer x.close()
	s := x.session
	front, err := x.client.connection()
	if err != nil {
		return err
	}
	back, err := x.server.connection()
	if err != nil {
		_ = front.Close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.front.conn, s.left.toClient = x.client.release(front)
	s.back.conn, s.left.toServer = x.server.release(back)
	return nil
}

// release gives back the end with a connection of Go's, and what the peer has not taken yet. Records stay with their socket.
func (e *end) release(conn net.Conn) (net.Conn, []byte) {
	if e.secure == nil {
		return conn, e.out
	}
	raw := e.secure.socket
	raw.Conn, raw.end, raw.left = conn, nil, e.out
	return e.secure, nil
}

func (e *end) connection() (net.Conn, error) {
	file, err := unix.FcntlInt(uintptr(e.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	f := os.NewFile(uintptr(file), "session")
	defer func() { _ = f.Close() }() // a copy: FileConn makes its own
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	e.session.set.tuneClient(conn)
	return conn, nil
}

func (x *looped) close() {
	for _, e := range []*end{&x.client, &x.server} {
		if e.fd >= 0 {
			_ = unix.Close(e.fd)
			e.fd = -1
		}
	}
}

// begin is the first thing that happens to a session in the loop.
func (x *looped) begin() {
	x.begun = true
	defer x.concluded()
	defer x.session.server.recovered()
	for _, e := range []*end{&x.client, &x.server} {
		if err := x.loop.watch(e); err != nil {
			x.session.note(err)
			x.leaving = true
		}
		if e.in.err != nil { // found by reading ahead
			x.leaving = true
		}
	}
	x.look()
	if !x.leaving { // what was read ahead; the sockets themselves come as events
		for _, e := range []*end{&x.server, &x.client} {
			x.relay(e)
			x.lend(e)
			e.ready = e.secure != nil // it may have read ahead on its own
		}
		x.forward()
	}
	x.sound = true
}

// wake has the loop look at the session's flags. Any goroutine may call it.
func (x *looped) wake() { x.loop.ask(x.attend) }

// attend looks at the session's flags because wake was called. That may be so before the session begins, which looks at them as well.
func (x *looped) attend() {
	if !x.begun || x.gone {
		return
	}
	x.look()
	x.concluded()
}

// look leaves the loop if somebody wants of the session what takes more than forwarding.
func (x *looped) look() {
	x.session.mu.Lock()
	defer x.session.mu.Unlock()
	if x.session.draining || x.session.severed {
		x.leaving = true
	}
}

// handle goes on with the session as far as that is possible. events are those of e.
func (x *looped) handle(e *end, events uint32) {
	if x.gone {
		return
	}
	defer x.concluded()
	defer x.session.server.recovered()
	x.sound = false
	if events&(unix.EPOLLIN|loopHangUp) != 0 {
		e.ready, e.drained = true, false
	}
	if events&loopHangUp != 0 {
		e.closes = true
	}
	if len(e.out) > 0 && events&(unix.EPOLLOUT|loopHangUp) != 0 {
		e.flush()
	}
	x.forward()
	x.sound = true
}

// again is handle for a session that has had its turn and was not finished.
func (x *looped) again() {
	x.queued = false
	x.handle(&x.client, 0)
}

// concluded lets the session out of the loop if what was done to it had that effect.
func (x *looped) concluded() {
	if x.sound && !x.leaving && !x.over {
		return
	}
	x.settle()
	x.gone = true
	for _, e := range []*end{&x.client, &x.server} {
		x.loop.forget(e)
		x.lend(e)
	}
	if !x.sound || x.over {
		x.close()
	}
	x.session.mu.Lock()
	x.session.looped = nil
	x.session.mu.Unlock()
	go x.goOn()
}

// forward reads and writes until nothing moves, or others should have their turn.
func (x *looped) forward() {
	for range loopTurns {
		moved := false
		for _, e := range [...]*end{&x.server, &x.client} {
			if e.ready && !e.ended && len(x.other(e).out) == 0 && !x.babbles(e) && !x.leaving && !x.over {
				moved = true
				x.receive(e)
			}
		}
		if !moved {
			return
		}
	}
	x.later()
}

// later has the loop go on with the session in its next round.
func (x *looped) later() {
	if !x.queued {
		x.queued = true
		x.loop.again = append(x.loop.again, x)
	}
}

// babbles says whether more is kept for an end than the other one can have said: some records of TLS have answers of its own.
func (x *looped) babbles(e *end) bool { return e.secure != nil && len(e.out) > 2*x.limit(x.other(e)) }

// receive reads once and passes on what can be passed on.
func (x *looped) receive(e *end) {
	in := e.in
	if in.r == in.w { // most of the time
		in.buf, in.r, in.w = x.loop.buf, 0, 0
	} else if err := in.makeRoom(x.limit(e)); err != nil {
		x.failed(e, err)
		return
	}
	free := in.buf[in.w:]
	n, err := e.read(free)
	switch {
	case n > 0:
		in.w += n
		e.ready = n == len(free) || e.closes || e.secure != nil // whatever else comes is an event of its own
		x.relay(e)
	case errors.Is(err, unix.EAGAIN) || interrupted(err):
		e.ready = false
	case errors.Is(err, unix.EINTR):
	case errors.Is(err, io.EOF):
		if x.settle(); len(x.other(e).out) == 0 { // otherwise it is found again when that has gone
			x.finished(e)
		}
	default:
		x.failed(e, os.NewSyscallError("recv", err))
	}
	x.lend(e)
}

// read reads once what has come.
func (e *end) read(b []byte) (int, error) {
	if e.secure != nil {
		return e.secure.Read(b)
	}
	n, errno := receiveNow(e.fd, b)
	switch {
	case errno != 0:
		return 0, errno
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// receiveRecord reads for TLS.
func (e *end) receiveRecord(b []byte) (int, error) {
	for !e.drained {
		n, errno := receiveNow(e.fd, b)
		switch {
		case errno == unix.EAGAIN:
			e.drained = true
		case errno == unix.EINTR:
		case errno != 0:
			return 0, errno
		case n == 0:
			return 0, io.EOF
		default:
			e.drained = n < len(b) && !e.closes
			return n, nil
		}
	}
	return 0, os.ErrDeadlineExceeded
}

// lend takes the loop's buffer back. What is left in it needs one of the session's own.
func (x *looped) lend(e *end) {
	in := e.in
	rest := in.buffered()
	switch {
	case len(rest) == 0 && (len(in.buf) == 0 || &in.buf[0] == &x.loop.buf[0]):
		in.buf, in.r, in.w = nil, 0, 0
	case len(rest) == 0: // one of its own
		in.drop()
		in.r, in.w = 0, 0
	case &in.buf[0] == &x.loop.buf[0]:
		in.buf = make([]byte, max(4<<10, 2*len(rest)))
		in.r, in.w = 0, copy(in.buf, rest)
	}
}

func (x *looped) limit(e *end) int {
	if e == &x.client {
		return x.session.frontLimit()
	}
	return x.session.backLimit()
}

// relay passes on what an end has said.
func (x *looped) relay(e *end) {
	s := x.session
	if e == &x.server {
		if _, err := s.relayServer(s.toClient, ""); err != nil {
			x.leaving, s.left.back = true, err
		}
		return
	}
	switch err := s.relayClient(context.Background()); {
	case errors.Is(err, errDetour):
		x.leaving, s.homeward = true, true
	case err != nil:
		x.leaving, s.left.front = true, err
	}
}

// failed lets the pumps find out what to do about an end that cannot be read any more.
func (x *looped) failed(e *end, err error) {
	e.in.err = err
	x.leaving = true
}

// finished acts on the end of what a peer says. The ordinary end of a session is a client that finishes and then a server
// that does; everything else is for the pumps.
func (x *looped) finished(e *end) {
	s := x.session
	e.ended = true
	s.mu.Lock()
	defer s.mu.Unlock()
	if e == &x.client && !s.over {
		s.over = true
		if x.server.secure != nil {
			_ = x.server.secure.CloseWrite()
		} else {
			_ = unix.Shutdown(x.server.fd, unix.SHUT_WR)
		}
		return // the server still carries out what it was sent
	}
	if e == &x.server && x.client.ended && s.backRest == 0 {
		if x.client.secure != nil {
			_ = x.client.secure.CloseWrite()
		}
		x.over = true
		return
	}
	e.in.err = io.EOF
	x.leaving = true
}

// sendTo writes to a side. What it does not take at once is kept, and counts as written.
func (x *looped) sendTo(to side, b []byte) error {
	e := &x.server
	if to == sideClient {
		e = &x.client
	}
	if e.secure != nil {
		_, err := e.secure.Write(b)
		return err
	}
	return e.send(b)
}

// send writes what the peer takes and keeps the rest.
func (e *end) send(b []byte) error {
	batch := &e.loop.batch
	if e.waits {
		batch.send() // what comes before b
	}
	if len(e.out) == 0 && batch.takes(b) {
		batch.add(e, b)
		return nil
	}
	sent := 0
	if len(e.out) == 0 {
		var errno syscall.Errno
		if sent, errno = sendNow(e.fd, b); errno != 0 {
			return os.NewSyscallError("send", errno)
		}
	}
	return e.keep(b[sent:])
}

// keep keeps what the peer has not taken yet.
func (e *end) keep(rest []byte) error {
	if len(rest) == 0 {
		return nil
	}
	first := len(e.out) == 0
	if e.out = append(e.out, rest...); first {
		return e.loop.change(e)
	}
	return nil
}

// settle sees to it that nothing of the session is in the loop's batch of sends.
func (x *looped) settle() {
	if x.client.waits || x.server.waits {
		x.loop.batch.send()
	}
}

// sent is the end of a send that was part of a batch: the peer has taken all but rest.
func (e *end) sent(rest []byte, errno syscall.Errno) {
	e.waits = false
	var err error
	if errno != 0 {
		err = os.NewSyscallError("send", errno)
	} else {
		err = e.keep(rest)
	}
	if err != nil {
		e.unwritable(err)
		e.looped.later() // the session may be in the middle of something
	}
}

// unwritable leaves the loop because nothing can be written to a peer any more.
func (e *end) unwritable(err error) {
	left, side := &e.session.left.front, sideServer
	if e == &e.looped.client {
		left, side = &e.session.left.back, sideClient
	}
	e.out, e.leaving, *left = nil, true, &failure{side, "write", err}
}

// flush writes more of what was kept.
func (e *end) flush() {
	n, errno := sendNow(e.fd, e.out)
	if errno != 0 {
		e.unwritable(os.NewSyscallError("send", errno))
		return
	}
	if n < len(e.out) {
		e.out = e.out[:copy(e.out, e.out[n:])]
		return
	}
	if e.out = e.out[:0]; cap(e.out) > maxIdleOut {
		e.out = nil
	}
	if err := e.loop.change(e); err != nil {
		e.leaving = true
	}
}

// receiveNow reads what is there. The scheduler is not told: the call does not block.
func receiveNow(fd int, b []byte) (int, syscall.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), //nolint:gosec // the pointer is used within the call
		unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// sendNow writes as much as is taken at once, which may be nothing.
func sendNow(fd int, b []byte) (int, syscall.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), //nolint:gosec // the pointer is used within the call
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	switch errno {
	case 0:
		return int(n), 0
	case unix.EAGAIN, unix.EINTR:
		return 0, 0
	}
	return 0, errno
}
