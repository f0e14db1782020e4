package mqtt

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/mochi-mqtt/server/v2/packets"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// client is a small MQTT client for tests: one packet out, one packet in, nothing in the background.
type client struct {
	t       testing.TB
	conn    net.Conn
	reader  *bufio.Reader
	version byte
	packet  uint16
}

// dial opens a connection and sends nothing.
func dial(t testing.TB, addr string, version byte) *client {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	t.Cleanup(func() { conn.Close() })
	return &client{t: t, conn: conn, reader: bufio.NewReader(conn), version: version}
}

// connectPacket is a CONNECT with a clean session; tests change what they are about.
func connectPacket(user, password string) packets.Packet {
	return packets.Packet{
		FixedHeader: packets.FixedHeader{Type: packets.Connect},
		Connect: packets.ConnectParams{
			ProtocolName: []byte("MQTT"), Clean: true, Keepalive: 60,
			UsernameFlag: user != "", Username: []byte(user),
			PasswordFlag: password != "", Password: []byte(password),
		},
	}
}

// login connects and fails the test unless the broker lets it in.
func login(t testing.TB, addr string, version byte, user, password string) *client {
	t.Helper()
	c := dial(t, addr, version)
	if ack := c.connect(connectPacket(user, password)); ack.ReasonCode != 0 {
		t.Fatalf("login of %s: CONNACK %#x", user, ack.ReasonCode)
	}
	return c
}

// connect sends a CONNECT packet and returns the CONNACK.
func (c *client) connect(pk packets.Packet) packets.Packet {
	c.t.Helper()
	c.send(pk)
	return c.expect(packets.Connack)
}

// subscribe sends the filters in one packet and returns the codes of SUBACK.
func (c *client) subscribe(filters ...string) []byte {
	c.t.Helper()
	c.packet++
	pk := packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, PacketID: c.packet}
	for _, f := range filters {
		pk.Filters = append(pk.Filters, packets.Subscription{Filter: f, Qos: 1})
	}
	c.send(pk)
	return c.expect(packets.Suback).ReasonCodes
}

// mustSubscribe fails the test unless every filter is granted with QoS 0.
func (c *client) mustSubscribe(filters ...string) {
	c.t.Helper()
	for i, code := range c.subscribe(filters...) {
		if code != 0 {
			c.t.Fatalf("subscribe %s: %#x", filters[i], code)
		}
	}
}

// publish sends a QoS 0 message.
func (c *client) publish(topic, payload string) {
	c.t.Helper()
	c.send(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Publish}, TopicName: topic, Payload: []byte(payload)})
}

// next returns the next message as "topic payload".
func (c *client) next() string {
	c.t.Helper()
	pk := c.expect(packets.Publish)
	return pk.TopicName + " " + string(pk.Payload)
}

// expect reads the next packet and fails the test unless it is of a type.
func (c *client) expect(kind byte) packets.Packet {
	c.t.Helper()
	pk, err := c.read()
	if err != nil {
		c.t.Fatalf("read %s: %v", packets.PacketNames[kind], err)
	}
	if pk.FixedHeader.Type != kind {
		c.t.Fatalf("got %s (reason %#x, topic %q), want %s", packets.PacketNames[pk.FixedHeader.Type], pk.ReasonCode, pk.TopicName, packets.PacketNames[kind])
	}
	return pk
}

// expectEnd reads until the broker closes the connection and returns the reason of the DISCONNECT before it; 0 if none.
func (c *client) expectEnd() (reason byte) {
	c.t.Helper()
	for {
		pk, err := c.read()
		var timeout net.Error
		switch {
		case errors.As(err, &timeout) && timeout.Timeout():
			c.t.Fatal("the connection is still open")
		case err != nil:
			return reason
		case pk.FixedHeader.Type == packets.Disconnect:
			reason = pk.ReasonCode
		}
	}
}

// send encodes and writes a packet.
func (c *client) send(pk packets.Packet) {
	c.t.Helper()
	pk.ProtocolVersion = c.version
	var buf bytes.Buffer
	var err error
	switch pk.FixedHeader.Type {
	case packets.Connect:
		err = pk.ConnectEncode(&buf)
	case packets.Publish:
		err = pk.PublishEncode(&buf)
	case packets.Subscribe:
		err = pk.SubscribeEncode(&buf)
	case packets.Unsubscribe:
		err = pk.UnsubscribeEncode(&buf)
	case packets.Pingreq:
		err = pk.PingreqEncode(&buf)
	case packets.Disconnect:
		err = pk.DisconnectEncode(&buf)
	default:
		err = fmt.Errorf("no encoder")
	}
	if err != nil {
		c.t.Fatalf("encode %s: %v", packets.PacketNames[pk.FixedHeader.Type], err)
	}
	c.sendRaw(buf.Bytes())
}

// sendRaw writes bytes. An error shows at the next read.
func (c *client) sendRaw(b []byte) {
	_ = c.conn.SetWriteDeadline(time.Now().Add(patience))
	_, _ = c.conn.Write(b)
}

// read returns the next packet.
func (c *client) read() (pk packets.Packet, err error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(patience))
	first, err := c.reader.ReadByte()
	if err != nil {
		return pk, err
	}
	if err := pk.FixedHeader.Decode(first); err != nil {
		return pk, err
	}
	if pk.FixedHeader.Remaining, _, err = packets.DecodeLength(c.reader); err != nil {
		return pk, err
	}
	body := make([]byte, pk.FixedHeader.Remaining)
	if _, err := io.ReadFull(c.reader, body); err != nil {
		return pk, err
	}
	pk.ProtocolVersion = c.version
	switch pk.FixedHeader.Type {
	case packets.Connack:
		err = pk.ConnackDecode(body)
	case packets.Publish:
		err = pk.PublishDecode(body)
	case packets.Suback:
		err = pk.SubackDecode(body)
	case packets.Unsuback:
		err = pk.UnsubackDecode(body)
	case packets.Disconnect:
		err = pk.DisconnectDecode(body)
	case packets.Pingresp:
	default:
		err = fmt.Errorf("unexpected packet type %d", pk.FixedHeader.Type)
	}
	return pk, err
}
