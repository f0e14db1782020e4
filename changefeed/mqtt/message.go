package mqtt

import (
	"bytes"
	"sync"

	"github.com/mochi-mqtt/server/v2/packets"
)

// message is one published event on its way to any number of subscribers. It is encoded once for each protocol version,
// by the first session that writes it; all sessions share the bytes.
type message struct {
	topic   string
	payload []byte

	onceV4, onceV5   sync.Once
	frameV4, frameV5 []byte
}

// size is what the message counts in the bounds of queues, in bytes.
func (m *message) size() int { return len(m.topic) + len(m.payload) }

// frame returns the PUBLISH packet for a protocol version. It is shared and must not be changed.
func (m *message) frame(version byte) []byte {
	if version < 5 {
		m.onceV4.Do(func() { m.frameV4 = m.encode(4, nil) })
		return m.frameV4
	}
	m.onceV5.Do(func() { m.frameV5 = m.encode(5, nil) })
	return m.frameV5
}

// encode makes a PUBLISH packet of its own, with MQTT 5 subscription identifiers if there are any.
func (m *message) encode(version byte, identifiers []int) []byte {
	pk := packets.Packet{
		FixedHeader:     packets.FixedHeader{Type: packets.Publish},
		ProtocolVersion: version,
		TopicName:       m.topic,
		Payload:         m.payload,
	}
	pk.Properties.SubscriptionIdentifier = identifiers
	buf := bytes.NewBuffer(make([]byte, 0, m.size()+16))
	// Encoding fails for a missing packet identifier only, which QoS 0 does not have.
	_ = pk.PublishEncode(buf)
	return buf.Bytes()
}

// disconnectFrame is the DISCONNECT packet by which a server ends a session; MQTT 5 only.
func disconnectFrame(code packets.Code) []byte {
	pk := packets.Packet{
		FixedHeader:     packets.FixedHeader{Type: packets.Disconnect},
		ProtocolVersion: 5,
		ReasonCode:      code.Code,
	}
	buf := new(bytes.Buffer)
	_ = pk.DisconnectEncode(buf) // fails never
	return buf.Bytes()
}
