package mqtt

import (
	"fmt"
	"testing"

	"github.com/mochi-mqtt/server/v2/packets"
)

// Nothing that a client sends can look like an event.
func TestForgedEvents(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{false, true} {
		t.Run(fmt.Sprint("client publish ", allowed), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *Config) { c.ClientPublish = allowed })
			user := w.role("reader", "a", "b")
			victim := login(t, w.addr, 5, user, password)
			victim.mustSubscribe("$stream/#", "$share/g/$stream/#", "#")
			for _, version := range []byte{4, 5} {
				for _, topic := range []string{topicA, "$stream", "$STREAM/default/a", "$share/g/" + topicA, "$SYS/x"} {
					for qos := range byte(3) {
						forger := login(t, w.addr, version, user, password)
						forger.send(packets.Packet{
							FixedHeader: packets.FixedHeader{Type: packets.Publish, Qos: qos}, PacketID: uint16(qos), TopicName: topic, Payload: []byte("forged"),
						})
						if reason := forger.expectEnd(); version == 5 && reason != 0x87 {
							t.Errorf("PUBLISH to %s: DISCONNECT %#x, want 0x87", topic, reason)
						}
					}
				}
				will := connectPacket(user, password)
				will.Connect.WillFlag, will.Connect.WillTopic, will.Connect.WillPayload = true, topicA, []byte("forged")
				forger := dial(t, w.addr, version)
				if ack, want := forger.connect(will), map[byte]byte{4: 5, 5: 0x87}[version]; ack.ReasonCode != want {
					t.Errorf("will: CONNACK %#x, want %#x", ack.ReasonCode, want)
				}
				forger.expectEnd()
			}
			// An alias stands for a topic that the broker learns after it has judged the empty one.
			forger := login(t, w.addr, 5, user, password)
			alias := packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Publish}, TopicName: "harmless", Payload: []byte("forged")}
			alias.Properties.TopicAlias, alias.Properties.TopicAliasFlag = 1, true
			forger.send(alias)
			forger.expectEnd()

			w.broker.Publish(topicB, []byte("real"))
			for range 2 { // once for each kind of subscription
				if got := victim.next(); got != topicB+" real" {
					t.Errorf("got %s", got)
				}
			}
		})
	}
}

func TestClientPublish(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { c.ClientPublish = true })
	user := w.role("reader")
	listener := login(t, w.addr, 4, user, password)
	listener.mustSubscribe("chat/#")
	will := connectPacket(user, password)
	will.Connect.WillFlag, will.Connect.WillTopic, will.Connect.WillPayload = true, "chat/end", []byte("bye")
	will.Connect.WillProperties.WillDelayInterval = 3600
	speaker := dial(t, w.addr, 5)
	if ack := speaker.connect(will); ack.ReasonCode != 0 {
		t.Fatalf("CONNACK %#x", ack.ReasonCode)
	}
	speaker.publish("chat/room", "hello")
	if got := listener.next(); got != "chat/room hello" {
		t.Errorf("got %s", got)
	}
	speaker.conn.Close()
	if got := listener.next(); got != "chat/end bye" {
		t.Errorf("got %s", got)
	}
	// QoS 1 would not be acknowledged.
	speaker = login(t, w.addr, 5, user, password)
	speaker.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Publish, Qos: 1}, PacketID: 1, TopicName: "chat/room"})
	if reason := speaker.expectEnd(); reason != packets.ErrQosNotSupported.Code {
		t.Errorf("DISCONNECT %#x", reason)
	}
}
