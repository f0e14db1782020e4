package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// inLoop turns event loops on.
func inLoop(c *Config, _ *Deps) { c.EventLoops = 1 }

// looping counts the sessions that are in the server's loops, from within them.
func (p *proxied) looping(t testing.TB) int {
	t.Helper()
	l := &p.server.loops
	l.mu.Lock()
	defer l.mu.Unlock()
	count := 0
	for _, one := range l.all {
		reply := make(chan int)
		one.ask(func() {
			n := 0
			for _, e := range one.ends {
				if e != nil {
					n++
				}
			}
			reply <- n / 2
		})
		count += <-reply
	}
	return count
}

// TestSessionsLeaveTheLoopAndReturn lets a demand come in the middle of a pipeline, cut into single bytes.
func TestSessionsLeaveTheLoopAndReturn(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} }, inLoop)
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	w := dialWire(t, p.dsn(t, direct))
	pipeline := joined(
		parseMessage(t, `Q "SELECT 1"`),
		parseMessage(t, `Q "SELECT n FROM koldstore.changes_since(2)"`),
		parseMessage(t, `Q "SELECT 2"`))
	for round := range 3 {
		w.send(t, pipeline, 1)
		got := strings.Join(w.until('Z', 3), "\n")
		if !strings.Contains(got, `D "21"`) || !strings.Contains(got, `D "2"`) {
			t.Fatalf("round %d: %s", round, got)
		}
	}
	w.send(t, parseMessage(t, `Q "SELECT 3"`), 0) // by now it has settled
	w.until('Z', 1)
	ctx := within(t)
	for p.looping(t) != 1 {
		if ctx.Err() != nil {
			t.Fatalf("%d sessions in loops", p.looping(t))
		}
		w.send(t, parseMessage(t, `Q "SELECT 4"`), 0)
		w.until('Z', 1)
	}
}

// TestBackPressure has both sides of a looped session write much before they read, with and without TLS on both.
func TestBackPressure(t *testing.T) {
	t.Parallel()
	t.Run("plain", func(t *testing.T) {
		t.Parallel()
		p := startProxy(t, inLoop)
		pressBack(t, p, dialWire(t, p.dsn(t, p.cluster.TestDatabase(t))))
	})
	t.Run("TLS", func(t *testing.T) {
		t.Parallel()
		p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), inLoop)
		pressBack(t, p, dialTLS(t, p))
	})
}

// dialTLS is a session of trust_user with TLS from the first byte.
func dialTLS(t testing.TB, p *proxied) *wire {
	t.Helper()
	conn, err := tls.Dial("tcp", p.addr.String(), &tls.Config{NextProtos: []string{alpn}, InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testTimeout))
	w := &wire{conn: conn, in: newStream(conn)}
	w.send(t, startupPacketFor("user", "trust_user", "database", "postgres"), 0)
	if got := w.until('Z', 1); got[len(got)-1] != "Z I" {
		t.Fatalf("%q", got)
	}
	return w
}

func pressBack(t *testing.T, p *proxied, w *wire) {
	t.Helper()
	const rows = 2000
	one := append(bytes.Repeat([]byte("x"), 8000), '\n')
	w.send(t, parseMessage(t, `Q "CREATE TEMP TABLE t (v text); COPY t FROM STDIN"`), 0)
	w.until('G', 1)
	var sent sync.WaitGroup
	sent.Go(func() {
		for range rows {
			w.send(t, appendMessage(nil, 'd', one), 0)
		}
		w.send(t, joined(parseMessage(t, "c"), parseMessage(t, `Q "SELECT v FROM t"`), parseMessage(t, `Q "SELECT v FROM t"`)), 0)
	})
	sent.Wait() // nothing was read so far
	got := 0
	for ready := 0; ready < 3; {
		message, err := w.read()
		if err != nil {
			t.Fatal(err)
		}
		switch message[0] {
		case msgDataRow:
			got++
		case msgReady:
			ready++
		}
	}
	if got != 2*rows {
		t.Errorf("%d rows", got)
	}
	if p.looping(t) != 1 {
		t.Error("the session has left the loop")
	}
}

// TestPanicInALoop ends one session; its neighbours in the loop do not notice.
func TestPanicInALoop(t *testing.T) {
	t.Parallel()
	p := startProxy(t, inLoop)
	direct := p.cluster.TestDatabase(t)
	victim, other := dialWire(t, p.dsn(t, direct)), dialWire(t, p.dsn(t, direct))
	for _, w := range []*wire{victim, other} {
		w.send(t, parseMessage(t, `Q "SELECT 1"`), 0)
		w.until('Z', 1)
	}
	p.server.keys.mu.Lock()
	var sessions []*session
	for _, list := range p.server.keys.sessions {
		sessions = append(sessions, list...)
	}
	p.server.keys.mu.Unlock()
	if len(sessions) != 2 {
		t.Fatalf("%d sessions", len(sessions))
	}
	broken := sessions[0]
	p.inside(t, broken, func() { broken.tracker = nil }) // the next message panics with broken.mu held
	ends := 0
	for _, w := range []*wire{victim, other} {
		w.send(t, parseMessage(t, `Q "SELECT 2"`), 0)
		if got := w.until('Z', 1); got[len(got)-1] == "EOF" {
			ends++
		}
	}
	if ends != 1 {
		t.Errorf("%d sessions have ended", ends)
	}
	<-broken.ended
	if !broken.mu.TryLock() {
		t.Fatal("the session's lock is held for ever")
	}
	broken.mu.Unlock()
	p.backends(t, direct, 1)
}

// inside has a session's loop call f and waits for that.
func (p *proxied) inside(t testing.TB, s *session, f func()) {
	t.Helper()
	ctx := within(t)
	for {
		s.mu.Lock()
		x := s.looped
		s.mu.Unlock()
		if x == nil { // on its way into the loop
			if ctx.Err() != nil {
				t.Fatal("the session is in no loop")
			}
			continue
		}
		done := make(chan struct{})
		x.loop.ask(func() { f(); close(done) })
		<-done
		return
	}
}

// TestHalfClose has a client say that it will say no more, in front of answers that do not fit into the sockets.
func TestHalfClose(t *testing.T) {
	t.Parallel()
	for _, loops := range []int{-1, 1} {
		p := startProxy(t, func(c *Config, _ *Deps) { c.EventLoops = loops })
		direct := p.cluster.TestDatabase(t)
		closeHalf(t, dialWire(t, p.dsn(t, direct)), `Q "CREATE TABLE last (i int)"`)
		p.backends(t, direct, 0)
		var exists bool
		if err := connect(t, direct).QueryRow(within(t), "SELECT to_regclass('last') IS NOT NULL").Scan(&exists); err != nil || !exists {
			t.Errorf("%d loops: what was sent ahead of the end was not carried out, %v", loops, err)
		}
	}
}

// TestHalfCloseOverTLS is TestHalfClose with TLS on both sides, where each end says that it has finished, and is believed.
func TestHalfCloseOverTLS(t *testing.T) {
	t.Parallel()
	for _, loops := range []int{-1, 1} {
		p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), func(c *Config, _ *Deps) { c.EventLoops = loops })
		closeHalf(t, dialTLS(t, p), `Q "SELECT 1 LIMIT 0"`)
	}
}

func closeHalf(t *testing.T, w *wire, last string) {
	t.Helper()
	const rows = 2000
	w.send(t, joined(parseMessage(t, `Q "SELECT repeat('x', 8000) FROM generate_series(1, 2000)"`), parseMessage(t, last)), 0)
	if err := w.conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, ready := 0, 0
	for {
		message, err := w.read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch message[0] {
		case msgDataRow:
			got++
		case msgReady:
			ready++
		}
	}
	if got != rows || ready != 2 {
		t.Errorf("%d rows, %d statements", got, ready)
	}
}

// TestTLSLeavesTheLoopAndReturns sends and reads pieces of records while a session goes back and forth between loop and pumps.
func TestTLSLeavesTheLoopAndReturns(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), inLoop)
	w := dialTLS(t, p)
	large := strings.Repeat(" ", maxLoopedText) // with a trigger word: it is parsed outside of the loop
	for round := range 20 {
		w.send(t, joined(
			parseMessage(t, `Q "SELECT 1"`),
			appendMessage(nil, msgQuery, zeroTerminated("SELECT 2 AS stream"+large)),
			parseMessage(t, `Q "SELECT repeat('x', 100000)"`)), []int{0, 1000, 20_000}[round%3])
		if got := w.until('Z', 3); len(got) != 3*4 {
			t.Fatalf("round %d: %d messages", round, len(got))
		}
	}
	ctx := within(t)
	for p.looping(t) != 1 {
		if ctx.Err() != nil {
			t.Fatalf("%d sessions in loops", p.looping(t))
		}
		w.send(t, parseMessage(t, `Q "SELECT 3"`), 0)
		w.until('Z', 1)
	}
}

// TestDrainInALoop is TestDrain for sessions that a loop carries when the time comes, and one that is cut there.
func TestDrainInALoop(t *testing.T) {
	t.Parallel()
	p := startProxy(t, inLoop, func(c *Config, _ *Deps) { c.DrainTimeout = time.Second })
	direct := p.cluster.TestDatabase(t)
	idle, busy, stuck := dialWire(t, p.dsn(t, direct)), dialWire(t, p.dsn(t, direct)), dialWire(t, p.dsn(t, direct))
	for _, w := range []*wire{idle, busy, stuck} {
		w.send(t, parseMessage(t, `Q "SELECT 1"`), 0)
		w.until('Z', 1)
	}
	busy.send(t, parseMessage(t, `Q "BEGIN"`), 0)
	busy.until('Z', 1)
	stuck.send(t, parseMessage(t, `Q "SELECT pg_sleep(1000)"`), 0)
	if n := p.looping(t); n != 3 {
		t.Errorf("%d sessions in the loop", n)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); p.stop() }()
	const farewell = `C="57P01"`
	for name, w := range map[string]*wire{"idle": idle, "in a transaction": busy, "in a statement": stuck} {
		got := w.until('?', 1)
		if len(got) < 2 || got[len(got)-1] != "EOF" || !strings.Contains(got[len(got)-2], farewell) {
			t.Errorf("the session that was %s got %q", name, got)
		}
	}
	<-stopped
	p.backends(t, direct, 0)
}

// TestNoDescriptorIsLeftBehind runs many sessions with all kinds of ends: a thousand with KOLDPROXY_TEST_LONG, then with pumps
// as well. TestMain sees whether goroutines are left.
func TestNoDescriptorIsLeftBehind(t *testing.T) {
	t.Run("loop", func(t *testing.T) { leaveNoDescriptor(t, 1) })
	if os.Getenv("KOLDPROXY_TEST_LONG") != "" {
		t.Run("pumps", func(t *testing.T) { leaveNoDescriptor(t, -1) })
	}
}

func leaveNoDescriptor(t *testing.T, loops int) {
	t.Helper()
	p := startProxy(t, func(c *Config, _ *Deps) { c.EventLoops = loops })
	direct := p.cluster.TestDatabase(t)
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	session := func(t *testing.T, i int) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, parseMessage(t, `Q "SELECT 1"`), 0)
		w.until('Z', 1)
		if i%2 == 0 {
			w.send(t, parseMessage(t, "X"), 0)
			_, _ = io.Copy(io.Discard, w.conn)
		}
		_ = w.conn.Close()
	}
	session(t, 0)
	p.backends(t, direct, 0)
	before := descriptors()
	each := 12 // each costs a process of the server
	if os.Getenv("KOLDPROXY_TEST_LONG") != "" {
		each = 125
	}
	t.Run("sessions", func(t *testing.T) {
		for worker := range 8 {
			t.Run(strconv.Itoa(worker), func(t *testing.T) {
				t.Parallel()
				for i := range each {
					session(t, i)
				}
			})
		}
	})
	p.backends(t, direct, 0)
	ctx := within(t)
	for descriptors() > before+10 { // other tests' come and go
		if ctx.Err() != nil {
			t.Fatalf("%d descriptors, before %d", descriptors(), before)
		}
	}
}

// TestPumpsAlone is the way of systems without loops.
func TestPumpsAlone(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.EventLoops = -1 })
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	var n int
	if err := conn.QueryRow(context.Background(), "SELECT $1::int", pgx.QueryExecModeExec, 7).Scan(&n); err != nil || n != 7 {
		t.Errorf("%d, %v", n, err)
	}
	if p.looping(t) != 0 {
		t.Error("there is a loop")
	}
}

// Somebody may want something of a session that the loop has taken and not begun with yet: a drain, a session to be ended.
func TestLoopIsWokenBeforeASessionBegins(t *testing.T) {
	t.Parallel()
	l, err := newLoop(0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	x := &looped{loop: l, session: &session{draining: true}}
	x.wake()
	looked := make(chan bool)
	l.ask(func() { looked <- x.gone || x.leaving })
	if <-looked {
		t.Error("the session left before it began")
	}
}

// TestSessionsSideBySide has many sessions of one loop busy at once, so that batches of sends form, with answers of all sizes.
func TestSessionsSideBySide(t *testing.T) {
	t.Parallel()
	p := startProxy(t, inLoop)
	dsn := p.dsn(t, p.cluster.TestDatabase(t))
	var clients sync.WaitGroup
	for client := range 12 {
		w := dialWire(t, dsn)
		clients.Go(func() {
			for round := range 60 {
				var pipeline []byte
				var want []string
				for i := range 1 + round%4 {
					size := (client*7919 + round*104729 + i*31) % 5000
					pipeline = append(pipeline, parseMessage(t, fmt.Sprintf(`Q "SELECT repeat('%d.', %d)"`, client, size))...)
					want = append(want, fmt.Sprintf("D %q", strings.Repeat(strconv.Itoa(client)+".", size)))
				}
				w.send(t, pipeline, 0)
				got := w.until('Z', len(want))
				got = slices.DeleteFunc(got, func(message string) bool { return message[0] != 'D' })
				if !slices.Equal(got, want) {
					t.Errorf("client %d, round %d: answers of other sizes or of others", client, round)
					return
				}
			}
		})
	}
	clients.Wait()
}
