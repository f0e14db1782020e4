package proxy

import (
	"os"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// loopsExist says whether this system has event loops.
const loopsExist = true

const (
	// loopBuffer is the buffer that the sessions of a loop read into, one after the other.
	loopBuffer = 128 << 10
	// loopEvents bounds how much is asked for at once.
	loopEvents = 256
	// yieldEvery is how often the goroutine goes through Go's scheduler. One that has not for 10 ms gets a signal, or loses
	// its processor while it waits; after the latter the runtime's monitor wakes up every 20 µs for a while, at a tenth of all
	// the processor time that forwarding takes.
	yieldEvery = 5 * time.Millisecond
	// yieldChecks is after how many waits the clock is read.
	yieldChecks = 4
)

// loop carries sessions with one goroutine. It waits with epoll for sockets that Go's own poller does not know, and reads
// and writes without telling the scheduler: none of these calls can block. Only a wait that may last does tell it.
//
// Everything but the fields below mu belongs to the goroutine.
type loop struct {
	spin   time.Duration // how long to look for events before sleeping
	epoll  int
	events [loopEvents]unix.EpollEvent
	ends   []*end // by descriptor
	again  []*looped
	buf    []byte
	batch  sends
	done   chan struct{}

	waits   uint
	yielded time.Time // when it went through Go's scheduler last

	bell    int // an eventfd that wakes the goroutine up
	mu      sync.Mutex
	asked   []func()
	closing bool
}

func newLoop(spin time.Duration) (*loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(epoll)
		return nil, os.NewSyscallError("eventfd", err)
	}
	l := &loop{spin: spin, epoll: epoll, bell: bell, buf: make([]byte, loopBuffer), done: make(chan struct{})}
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, bell, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(bell)}); err != nil {
		_, _ = unix.Close(epoll), unix.Close(bell)
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	l.batch.ring, _ = newRing() // nil: each send is a call of its own
	go l.run()
	return l, nil
}

// close ends the loop, which must have no sessions.
func (l *loop) close() {
	l.mu.Lock()
	l.closing = true
	l.ring()
	l.mu.Unlock()
	<-l.done
}

// ask has the loop's goroutine call f. Any goroutine may call it.
func (l *loop) ask(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, f)
	l.ring()
}

// ring wakes the goroutine up; l.mu is held.
func (l *loop) ring() {
	one := [8]byte{1} // a counter in the machine's order: any value but zero will do
	_, _ = unix.Write(l.bell, one[:])
}

func (l *loop) run() {
	defer close(l.done)
	defer func() { _, _ = unix.Close(l.epoll), unix.Close(l.bell) }()
	defer l.batch.close()
	for {
		n := l.wait()
		l.batch.open = n > 1 && l.batch.ring != nil
		for _, event := range l.events[:n] {
			if int(event.Fd) == l.bell {
				if l.attend() {
					return
				}
			} else if e := l.ends[event.Fd]; e != nil { // nil: it was closed because of an event before this one
				e.looped.handle(e, event.Events)
			}
		}
		l.batch.send()
		l.batch.open = false
		again := l.again
		l.again = nil
		for _, x := range again {
			x.again()
		}
	}
}

// watch has epoll tell what happens to an end from now on, once each time something does.
func (l *loop) watch(e *end) error {
	for len(l.ends) <= e.fd {
		l.ends = append(l.ends, nil)
	}
	l.ends[e.fd] = e
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, e.fd, e.interest()))
}

// change tells epoll that the interest in an end has changed. What is the case already is told as well.
func (l *loop) change(e *end) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, e.fd, e.interest()))
}

// forget undoes watch, if it was called.
func (l *loop) forget(e *end) {
	if e.fd < len(l.ends) && l.ends[e.fd] == e {
		l.ends[e.fd] = nil
		_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, e.fd, nil)
	}
}

// wait returns how many events there are, at least one unless there is other work.
func (l *loop) wait() int {
	if len(l.again) > 0 {
		return l.look()
	}
	l.waits++
	if l.waits%yieldChecks == 0 && time.Since(l.yielded) > yieldEvery {
		runtime.Gosched()
		l.yielded = time.Now()
	}
	if l.spin > 0 {
		if n := l.poll(); n > 0 {
			return n
		}
	}
	for {
		n, err := unix.EpollWait(l.epoll, l.events[:], -1)
		if err == nil {
			return n
		}
	}
}

// poll looks for events for a while.
func (l *loop) poll() int {
	for begun := time.Now(); ; {
		if n := l.look(); n > 0 || time.Since(begun) > l.spin {
			return n
		}
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

// look returns how many events there are now.
func (l *loop) look() int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(l.epoll), uintptr(unsafe.Pointer(&l.events)), loopEvents, 0, 0, 0) //nolint:gosec // the pointer is used within the call
	if errno != 0 {
		return 0
	}
	return int(n)
}

// attend does what other goroutines have asked for. It is true when the loop is to end.
func (l *loop) attend() bool {
	var counter [8]byte
	_, _ = unix.Read(l.bell, counter[:])
	l.mu.Lock()
	asked, closing := l.asked, l.closing
	l.asked = nil
	l.mu.Unlock()
	for _, f := range asked {
		f()
	}
	return closing
}
