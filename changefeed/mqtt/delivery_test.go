package mqtt

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mochi-mqtt/server/v2/packets"
)

// A subscriber that never reads costs the others nothing: all of them get everything, in order, while it loses what does
// not fit its queue and is disconnected in the end.
func TestStuckSubscriber(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.WriteTimeout, c.MaxMessageBytes = 500*time.Millisecond, 1<<20 })
	user := w.role("reader", "a")
	stuck := login(t, w.addr, 4, user, password)
	_ = stuck.conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	stuck.mustSubscribe(topicA)
	good := []*client{login(t, w.addr, 4, user, password), login(t, w.addr, 5, user, password)}
	for _, c := range good {
		c.mustSubscribe(topicA)
	}

	const events, window = 20_000, 200
	padding := strings.Repeat("x", 1000)
	var received [2]atomic.Int64
	var wg sync.WaitGroup
	for i, c := range good {
		wg.Go(func() {
			for n := range events {
				pk, err := c.read()
				if want := fmt.Sprintf("%d %s", n, padding); err != nil || string(pk.Payload) != want {
					t.Errorf("subscriber %d, message %d: %v, %.20q", i, n, err, pk.Payload)
					received[i].Store(events)
					return
				}
				received[i].Add(1)
			}
		})
	}
	begun := time.Now()
	for n := range events {
		if n >= window {
			// Faster than any reader is no fair test: the good ones have bounded queues too.
			eventuallyFast(t, func() bool { return received[0].Load() > int64(n-window) && received[1].Load() > int64(n-window) })
		}
		w.broker.Publish(topicA, fmt.Appendf(nil, "%d %s", n, padding))
	}
	wg.Wait()
	t.Logf("%d events to two subscribers beside a stuck one: %.0f a second", events, events/time.Since(begun).Seconds())
	if n := w.dropped(dropSubscriberQueue) + w.dropped(dropClosed); n == 0 {
		t.Error("no drop is counted")
	}
	if n := w.dropped(dropPublishQueue); n != 0 {
		t.Errorf("%v messages dropped for all", n)
	}
	eventually(t, "the stuck subscriber is disconnected", func() bool { return w.broker.Consumers(topicA) == 2 })
}

// eventuallyFast spins rather than sleeps: a test of throughput would measure the sleep.
func eventuallyFast(t *testing.T, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(20 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatal("subscribers do not get on")
		}
	}
}

// Publish itself is bounded and does not wait, even when nothing takes messages out of its queue.
func TestPublishNeverBlocks(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.PublishQueue, cfg.SubscriberQueueBytes, cfg.MaxMessageBytes = 10, 1<<10, 100<<10
	b, err := New(cfg, nil, nopLog, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.Publish("t", []byte("nobody is there, nothing is queued"))
	s := &session{broker: b}
	b.router.join(s)
	b.router.subscribe(s, "t", subscription{pattern: "t"})
	for range 100 {
		b.Publish("t", []byte("x"))
	}
	if n := len(b.queue); n != 10 {
		t.Errorf("%d messages queued", n)
	}
	for len(b.queue) > 0 {
		b.queuedBytes.Add(-int64((<-b.queue).size()))
	}
	for range 5 {
		b.Publish("t", make([]byte, 9<<10)) // 16 KiB fit
	}
	if n := len(b.queue); n != 1 {
		t.Errorf("%d large messages queued", n)
	}
	b.Publish("t", make([]byte, 100<<10+1))
	b.Publish("t/+", nil)
	for reason, want := range map[string]float64{dropPublishQueue: 94, dropTooLarge: 1, dropTopic: 1} {
		if got := (&world{broker: b}).dropped(reason); got != want {
			t.Errorf("%s: %v dropped, want %v", reason, got, want)
		}
	}
}

func TestSubscriberQueueIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.SubscriberQueueBytes = 1000
	s := &session{broker: &Broker{cfg: cfg}, queue: make(chan delivery, 100)}
	large, small := delivery{message: &message{payload: make([]byte, 5000)}}, delivery{message: &message{payload: make([]byte, 400)}}
	for i, c := range []struct {
		d    delivery
		fits bool
	}{{large, true}, {small, false}, {large, false}} {
		if s.offer(c.d) != c.fits {
			t.Errorf("offer %d: %v", i, !c.fits)
		}
	}
	s.waiting.Add(-int64((<-s.queue).message.size()))
	for i, fits := range []bool{true, true, false} {
		if s.offer(small) != fits {
			t.Errorf("small offer %d: %v", i, !fits)
		}
	}
}

func TestLargeMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	pk := connectPacket(user, password)
	pk.Properties.MaximumPacketSize = 100
	small, any5, any4 := dial(t, w.addr, 5), login(t, w.addr, 5, user, password), login(t, w.addr, 4, user, password)
	if ack := small.connect(pk); ack.ReasonCode != 0 {
		t.Fatalf("CONNACK %#x", ack.ReasonCode)
	}
	large := bytes.Repeat([]byte("0123456789"), 300_000)
	for _, c := range []*client{small, any5, any4} {
		c.mustSubscribe(topicA)
	}
	w.broker.Publish(topicA, large)
	w.broker.Publish(topicA, []byte("small"))
	for _, c := range []*client{any5, any4} {
		if got := c.expect(packets.Publish).Payload; !bytes.Equal(got, large) {
			t.Errorf("got %d bytes", len(got))
		}
	}
	if got := small.next(); got != topicA+" small" {
		t.Errorf("got %.100s", got)
	}
	if n := w.dropped(dropTooLarge); n != 1 {
		t.Errorf("%v too large", n)
	}
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user, other := w.role("reader", "a"), w.role("other", "a")
	connect := func(user string) *client {
		pk := connectPacket(user, password)
		pk.Connect.ClientIdentifier = "sensor"
		pk.Connect.Clean = false // nothing is kept, whatever the client wants
		c := dial(t, w.addr, 5)
		if ack := c.connect(pk); ack.ReasonCode != 0 || ack.SessionPresent {
			t.Fatalf("CONNACK %#x, session present %v", ack.ReasonCode, ack.SessionPresent)
		}
		return c
	}
	first := connect(user)
	first.mustSubscribe(topicA)
	stranger := connect(other)
	stranger.mustSubscribe(topicA)
	second := connect(user)
	if reason := first.expectEnd(); reason != packets.ErrSessionTakenOver.Code {
		t.Errorf("DISCONNECT %#x", reason)
	}
	second.mustSubscribe(topicA)
	eventually(t, "the first one is gone", func() bool { return w.broker.Consumers(topicA) == 2 })
	w.broker.Publish(topicA, []byte("x"))
	for _, c := range []*client{second, stranger} {
		if got := c.next(); got != topicA+" x" {
			t.Errorf("got %s", got)
		}
	}
}

// mochi computes one and a half keepalives in 16 bits, which is nothing for this one.
func TestLongKeepalive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pk := connectPacket(w.role("reader", "a"), password)
	pk.Connect.Keepalive = 43691
	c := dial(t, w.addr, 4)
	c.connect(pk)
	c.mustSubscribe(topicA)
	w.broker.Publish(topicA, []byte("x"))
	if got := c.next(); got != topicA+" x" {
		t.Errorf("got %s", got)
	}
}

func TestShortKeepalive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pk := connectPacket(w.role("reader"), password)
	pk.Connect.Keepalive = 1
	c := dial(t, w.addr, 4)
	c.connect(pk)
	begun := time.Now()
	c.expectEnd()
	if took := time.Since(begun); took < time.Second {
		t.Errorf("disconnected after %v", took)
	}
}

// mochi's decoder panics when an MQTT 5 SUBSCRIBE ends before its options.
func TestTruncatedSubscribe(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	other := login(t, w.addr, 5, user, password)
	other.mustSubscribe(topicA)
	c := login(t, w.addr, 5, user, password)
	c.mustSubscribe(topicA)
	c.sendRaw([]byte{0x82, 6, 0, 9, 0, 0, 1, 'x'})
	c.expectEnd()
	eventually(t, "its subscription is gone", func() bool { return w.broker.Consumers(topicA) == 1 })
	w.broker.Publish(topicA, []byte("x"))
	if got := other.next(); got != topicA+" x" {
		t.Errorf("got %s", got)
	}
	if n := w.broker.server.Clients.Len(); n != 1 {
		t.Errorf("mochi knows %d clients", n)
	}
}

// Shutdown is clean while clients come, subscribe and go, events are published, and one subscriber is stuck.
func TestShutdownUnderLoad(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	stuck := login(t, w.addr, 4, user, password)
	stuck.mustSubscribe(topicA)
	faithful := login(t, w.addr, 5, user, password)
	faithful.mustSubscribe(topicA)

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var logins atomic.Int64
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				w.broker.Publish(topicA, make([]byte, 2000))
				time.Sleep(50 * time.Microsecond)
			}
		})
		wg.Go(func() {
			for ctx.Err() == nil {
				conn, err := net.Dial("tcp", w.addr)
				if err != nil {
					return // the listener is closed
				}
				c := &client{t: t, conn: conn, version: 5}
				c.send(connectPacket(user, password))
				c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, PacketID: 1, Filters: packets.Subscriptions{{Filter: topicA}}})
				var answer [64]byte
				_ = conn.SetReadDeadline(time.Now().Add(patience))
				_, _ = conn.Read(answer[:])
				conn.Close()
				logins.Add(1)
			}
		})
	}
	ended := make(chan byte, 1)
	go func() { ended <- faithful.expectEnd() }()
	eventually(t, "clients come and go while the stuck one's queue overflows", func() bool {
		return logins.Load() > 20 && w.dropped(dropSubscriberQueue) > 0
	})
	begun := time.Now()
	if err := w.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if took := time.Since(begun); took > 4*time.Second {
		t.Errorf("shutdown took %v", took)
	}
	cancel()
	wg.Wait()
	if reason := <-ended; reason != packets.ErrServerShuttingDown.Code {
		t.Errorf("DISCONNECT %#x, want 0x8b", reason)
	}
	if n := w.broker.connections.Load(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
	if n := w.broker.server.Clients.Len() + len(w.broker.sessions) + len(w.broker.router.sessions); n != 0 {
		t.Errorf("%d entries are left in maps", n)
	}
	if n := w.broker.router.subscriptions.Load(); n != 0 {
		t.Errorf("%d subscriptions are left", n)
	}
}
