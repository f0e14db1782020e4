package proxy

import (
	"bytes"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// ringForTest skips where the kernel lets nobody have one.
func ringForTest(t *testing.T) *ring {
	t.Helper()
	r, err := newRing()
	if err != nil {
		t.Skipf("io_uring: %v", err)
	}
	t.Cleanup(r.close)
	return r
}

// socketPair is a pair of connected Unix sockets.
func socketPair(t *testing.T) (a, b int) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
	return pair[0], pair[1]
}

// TestRing sends in many batches, so that the ring goes round, and compares what arrives.
func TestRing(t *testing.T) {
	t.Parallel()
	r := ringForTest(t)
	a, b := socketPair(t)
	var sent, got bytes.Buffer
	buf := make([]byte, 64<<10)
	for batch := range 300 {
		var texts [][]byte
		for i := 0; i <= batch%ringSize; i++ {
			texts = append(texts, fmt.Appendf(nil, "%d.%d;", batch, i))
			sent.Write(texts[i])
			r.add(a, texts[i])
		}
		if full := len(texts) == ringSize; r.full() != full {
			t.Fatalf("full with %d sends: %v", len(texts), r.full())
		}
		told := 0
		begun := r.submit(func(i, n int, errno syscall.Errno) {
			if n != len(texts[i]) || errno != 0 {
				t.Errorf("%d: %d of %d bytes, %v", i, n, len(texts[i]), errno)
			}
			told++
		})
		if begun != len(texts) || told != begun {
			t.Fatalf("%d sends, %d begun, %d done", len(texts), begun, told)
		}
		n, err := unix.Read(b, buf)
		if err != nil {
			t.Fatal(err)
		}
		got.Write(buf[:n])
	}
	if !bytes.Equal(got.Bytes(), sent.Bytes()) {
		t.Error("something else has arrived")
	}
}

// TestRingDoesNotWait has one peer that takes no more, one that is gone, and one that takes everything.
func TestRingDoesNotWait(t *testing.T) {
	t.Parallel()
	r := ringForTest(t)
	full, _ := socketPair(t)
	for filled := false; !filled; {
		n, errno := sendNow(full, make([]byte, 64<<10))
		if errno != 0 {
			t.Fatal(errno)
		}
		filled = n == 0
	}
	gone, other := socketPair(t)
	_ = unix.Shutdown(other, unix.SHUT_RD)
	well, _ := socketPair(t)
	x := []byte("x")
	for _, fd := range []int{full, gone, well} {
		r.add(fd, x)
	}
	var got []string
	r.submit(func(i, n int, errno syscall.Errno) { got = append(got, fmt.Sprint(i, n, int(errno))) })
	want := []string{fmt.Sprint(0, 0, int(syscall.EAGAIN)), fmt.Sprint(1, 0, int(syscall.EPIPE)), fmt.Sprint(2, 1, 0)}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%q instead of %q", got, want)
	}
}

// endForTest is an end of a session that its loop does not carry: nothing but sending can be done with it.
func endForTest(l *loop, fd int) *end {
	x := &looped{loop: l, session: &session{}}
	x.client = end{looped: x, fd: fd}
	x.server = end{looped: x, fd: -1}
	return &x.client
}

// TestBatchOfSends has a batch with peers that read, one that does not, and one that is gone, and sends to them until the one
// that does not read takes no more. All that was not refused arrives, in order.
func TestBatchOfSends(t *testing.T) {
	t.Parallel()
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(epoll) })
	l := &loop{epoll: epoll}
	l.batch = sends{ring: ringForTest(t), open: true}

	a, peerA := socketPair(t)
	b, peerB := socketPair(t)
	c, peerC := socketPair(t)
	_ = unix.Shutdown(peerC, unix.SHUT_RD)
	reads, stuck, gone := endForTest(l, a), endForTest(l, b), endForTest(l, c)
	for _, e := range []*end{reads, stuck, gone} {
		if err := l.watch(e); err != nil {
			t.Fatal(err)
		}
	}
	var toReads, toStuck, fromReads, fromStuck bytes.Buffer
	buf := make([]byte, 1<<20)
	for round := 0; len(stuck.out) < 3*batchedSize; round++ {
		for i := range 3 { // the second and third find the first in the batch
			text := []byte(strings.Repeat(fmt.Sprintf("%d.%d;", round, i), 200))
			for _, one := range []struct {
				e   *end
				log *bytes.Buffer
			}{{reads, &toReads}, {stuck, &toStuck}} {
				one.log.Write(text)
				if err := one.e.send(text); err != nil {
					t.Fatal(err)
				}
			}
		}
		if round == 0 {
			if err := gone.send([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		if !reads.waits {
			t.Fatal("nothing is in the batch")
		}
		l.batch.send()
		n, err := unix.Read(peerA, buf)
		if err != nil {
			t.Fatal(err)
		}
		fromReads.Write(buf[:n])
	}
	if !gone.leaving || gone.session.left.back == nil || !strings.Contains(gone.session.left.back.Error(), "broken pipe") {
		t.Errorf("the session whose peer is gone: %v, %v", gone.leaving, gone.session.left.back)
	}
	if reads.leaving || stuck.leaving || len(l.again) != 1 {
		t.Errorf("others leave the loop as well, %d are called again", len(l.again))
	}
	for fromStuck.Len() < toStuck.Len() {
		n, err := unix.Read(peerB, buf)
		if err != nil {
			t.Fatal(err)
		}
		fromStuck.Write(buf[:n])
		if len(stuck.out) > 0 {
			stuck.flush()
		}
	}
	if !bytes.Equal(fromReads.Bytes(), toReads.Bytes()) || !bytes.Equal(fromStuck.Bytes(), toStuck.Bytes()) {
		t.Error("something else has arrived")
	}
}

// TestBatchTheKernelDoesNotTake sends although the ring is of no use any more.
func TestBatchTheKernelDoesNotTake(t *testing.T) {
	t.Parallel()
	r := ringForTest(t)
	nothing, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(r.fd)
	r.fd = nothing
	l := &loop{batch: sends{ring: r, open: true}}
	a, peer := socketPair(t)
	for _, text := range []string{"one", "two"} {
		if err := endForTest(l, a).send([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	l.batch.send()
	buf := make([]byte, 100)
	if n, err := unix.Read(peer, buf); err != nil || string(buf[:n]) != "onetwo" {
		t.Errorf("%q, %v", buf[:n], err)
	}
}
