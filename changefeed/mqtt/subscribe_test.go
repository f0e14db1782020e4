package mqtt

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/mochi-mqtt/server/v2/packets"
)

const (
	topicA = "$stream/default/a"
	topicB = "$stream/default/b"
)

func TestSubscribe(t *testing.T) {
	t.Parallel()
	for _, version := range []byte{4, 5} {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			refused := map[byte]byte{4: 0x80, 5: 0x87}[version]
			c := w.reader(version, "a")
			codes := c.subscribe(topicA, topicB, "$stream/default/none", "$stream/nowhere/a", "$stream/default/public.a", "$stream/default", "$STREAM/default/a",
				"$share/g/"+topicA, "$share/g/"+topicB, "$share//"+topicA, "$SHARE/g/"+topicA, "$SYS/#", "$share/g/$SYS/#", "$stream/default/a+")
			want := []byte{0, refused, refused, refused, refused, refused, refused, 0, refused, refused, refused, refused, refused, refused}
			if !bytes.Equal(codes, want) {
				t.Errorf("SUBACK % x, want % x", codes, want)
			}
			w.broker.Publish(topicB, []byte("not for you"))
			w.broker.Publish(topicA, []byte(`{"id":"1"}`))
			if got := c.next(); got != topicA+` {"id":"1"}` {
				t.Errorf("got %s", got)
			}
			if got := c.next(); got != topicA+` {"id":"1"}` { // the shared subscription is another one
				t.Errorf("got %s", got)
			}
			c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Pingreq}})
			c.expect(packets.Pingresp)
			if n := w.broker.Consumers(topicA); n != 1 {
				t.Errorf("%d consumers of a", n)
			}
			if n := w.broker.Consumers(topicB); n != 0 {
				t.Errorf("%d consumers of b", n)
			}
			c.packet++
			c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Unsubscribe, Qos: 1}, PacketID: c.packet, Filters: packets.Subscriptions{{Filter: topicA}, {Filter: "$share/g/" + topicA}}})
			c.expect(packets.Unsuback)
			if n := w.broker.Consumers(topicA); n != 0 {
				t.Errorf("%d consumers of a after UNSUBSCRIBE", n)
			}
			c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Disconnect}})
			c.expectEnd()
		})
	}
}

// Whatever the filter, a message reaches only those who may read its topic, and a leading wildcard matches none of them.
func TestWildcardsDoNotLeak(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.reader(4, "a")
	c.mustSubscribe("#", "+/#", "+/default/b", "+/+/+", "$share/g/#", "$share/g/+/default/b", "/#")
	if n := w.broker.Consumers(topicA) + w.broker.Consumers(topicB); n != 0 {
		t.Errorf("%d consumers by leading wildcards", n)
	}
	c.mustSubscribe("$stream/#", "$stream/+/b", "$stream/default/+", "$share/g/$stream/+/b")
	w.broker.Publish(topicB, []byte("not for you"))
	w.broker.Publish(topicA, []byte("for you"))
	if got := c.next(); got != topicA+" for you" {
		t.Errorf("got %s", got)
	}
	if n := w.dropped(dropDenied); n != 2 { // one by its own filters, one by the shared one
		t.Errorf("%v messages denied", n)
	}
}

func TestRevocationEndsDelivery(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.RightsTTL = 200 * time.Millisecond })
	user := w.role("reader", "a", "b")
	c := login(t, w.addr, 5, user, password)
	c.mustSubscribe("$stream/default/+")
	arrives := func() bool { // whether a message of topic a comes before one of topic b that is published after it
		w.broker.Publish(topicA, nil)
		w.broker.Publish(topicB, nil)
		if c.next() == topicA+" " {
			c.next()
			return true
		}
		return false
	}
	if !arrives() {
		t.Fatal("nothing is delivered to a role that may read")
	}
	w.exec("REVOKE SELECT ON source_a FROM " + user)
	revoked := time.Now()
	eventually(t, "delivery ends", func() bool { return !arrives() })
	if took := time.Since(revoked); took > 2*time.Second {
		t.Errorf("delivery went on for %v", took)
	}
	w.exec("GRANT SELECT ON source_a TO " + user)
	eventually(t, "delivery begins again", arrives)
	w.exec("ALTER ROLE " + user + " RENAME TO renamed" + user)
	defer w.exec("ALTER ROLE renamed" + user + " RENAME TO " + user)
	eventually(t, "a role that does not exist receives nothing", func() bool {
		denied := w.dropped(dropDenied)
		w.broker.Publish(topicB, nil)
		eventually(t, "the message is judged", func() bool { return w.dropped(dropDenied) > denied || w.queuesAreEmpty() })
		return w.dropped(dropDenied) > denied
	})
}

// A client that has lost the right to a topic that it named is told so by the end of its connection, whether or not anything
// is published; others go on.
func TestRevocationEndsSubscriptions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.RightsTTL = 200 * time.Millisecond })
	user, other := w.role("reader", "a", "b"), w.role("other", "a")
	old, new5, shared := login(t, w.addr, 4, user, password), login(t, w.addr, 5, user, password), login(t, w.addr, 5, user, password)
	onB, stays := login(t, w.addr, 5, user, password), login(t, w.addr, 5, other, password)
	for _, c := range []*client{old, new5, stays} {
		c.mustSubscribe(topicA)
	}
	shared.mustSubscribe("$share/g/" + topicA)
	onB.mustSubscribe(topicB)
	w.exec("REVOKE SELECT ON source_a FROM " + user)
	old.expectEnd()
	for _, c := range []*client{new5, shared} {
		if reason := c.expectEnd(); reason != packets.ErrNotAuthorized.Code {
			t.Errorf("DISCONNECT %#x", reason)
		}
	}
	w.broker.Publish(topicA, []byte("a"))
	w.broker.Publish(topicB, []byte("b"))
	if got := stays.next(); got != topicA+" a" {
		t.Errorf("another role received %s", got)
	}
	if got := onB.next(); got != topicB+" b" {
		t.Errorf("on another topic came %s", got)
	}
}

// queuesAreEmpty tells whether everything published has been delivered or dropped.
func (w *world) queuesAreEmpty() bool {
	w.broker.mu.Lock()
	defer w.broker.mu.Unlock()
	for _, s := range w.broker.sessions {
		if s.waiting.Load() != 0 {
			return false
		}
	}
	return w.broker.queuedBytes.Load() == 0
}

func TestNothingIsDeliveredUnjudged(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.RightsTTL = time.Millisecond })
	c := w.reader(5, "a", "b")
	c.mustSubscribe("$stream/default/#")
	w.exec("ALTER FUNCTION koldstore.may_subscribe RENAME TO gone")
	time.Sleep(2 * time.Millisecond) // let the answer about the subscription grow too old
	w.broker.Publish(topicA, []byte("nobody knows"))
	eventually(t, "the message is dropped", func() bool { return w.dropped(dropUnjudged) == 1 })
	if codes := c.subscribe(topicB); codes[0] != 0x87 {
		t.Errorf("SUBACK %#x, want 0x87", codes[0])
	}
	w.exec("ALTER FUNCTION koldstore.gone RENAME TO may_subscribe")
	eventually(t, "PostgreSQL can be asked again", func() bool { return c.subscribe(topicA)[0] == 0 })
	w.broker.Publish(topicA, []byte("known"))
	if got := c.next(); got != topicA+" known" {
		t.Errorf("got %s", got)
	}
}

func TestSharedSubscription(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user, stranger := w.role("member", "a"), w.role("stranger", "b")
	const filter = "$share/workers/$stream/default/#"
	members := []*client{login(t, w.addr, 4, user, password), login(t, w.addr, 5, user, password)}
	for _, m := range append(members, login(t, w.addr, 5, stranger, password)) {
		m.mustSubscribe(filter)
	}
	if n := w.broker.Consumers(topicA); n != 3 {
		t.Errorf("%d consumers", n)
	}
	const rounds = 30
	for i := range rounds {
		w.broker.Publish(topicA, fmt.Append(nil, i))
	}
	// What falls to the stranger is passed on, so that the two members get everything, each message once.
	seen := make(map[string]int)
	got := make(chan string)
	for _, m := range members {
		go func() {
			for {
				pk, err := m.read()
				if err != nil {
					return
				}
				got <- string(pk.Payload)
			}
		}()
	}
	for range rounds {
		select {
		case payload := <-got:
			seen[payload]++
		case <-time.After(patience):
			t.Fatalf("%d of %d messages arrived", len(seen), rounds)
		}
	}
	if len(seen) != rounds {
		t.Errorf("%d different messages of %d: %v", len(seen), rounds, seen)
	}
	for _, m := range members {
		m.conn.Close()
	}
}

func TestSubscriptionIdentifiers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.reader(5, "a")
	for id, filter := range map[int]string{3: topicA, 300: "$stream/#"} {
		pk := packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, PacketID: uint16(id), Filters: packets.Subscriptions{{Filter: filter, Identifier: id}}}
		pk.Properties.SubscriptionIdentifier = []int{id}
		c.send(pk)
		c.expect(packets.Suback)
	}
	w.broker.Publish(topicA, []byte("x"))
	ids := c.expect(packets.Publish).Properties.SubscriptionIdentifier
	if len(ids) != 2 || ids[0]+ids[1] != 303 {
		t.Errorf("identifiers %v", ids)
	}
}

func TestTooManySubscriptions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.MaxSubscriptions = 2 })
	c := w.reader(5, "a")
	c.mustSubscribe(topicA, "#")
	c.mustSubscribe("#") // no new one
	c.packet++
	c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, PacketID: c.packet, Filters: packets.Subscriptions{{Filter: "x"}}})
	if reason := c.expectEnd(); reason != packets.ErrQuotaExceeded.Code {
		t.Errorf("DISCONNECT %#x", reason)
	}
}
