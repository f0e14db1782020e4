package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strings"
	"time"
)

// mqttSubscriber is as much of an MQTT 3.1.1 client as the tour needs: it logs in, subscribes at QoS 0 and reads what is
// published. It is written by hand so that the tour does not judge the broker by the broker's own library.
type mqttSubscriber struct {
	conn net.Conn
	in   *bufio.Reader
}

// Packet types, in the upper half of the first byte.
const (
	mqttConnect   = 0x10
	mqttConnack   = 0x20
	mqttPublish   = 0x30
	mqttSubscribe = 0x82 // the lower half is fixed for SUBSCRIBE
	mqttSuback    = 0x90
)

// maxMQTTBody is more than any event of the tour has.
const maxMQTTBody = 1 << 20

var mosquittoSub = regexp.MustCompile(`^mosquitto_sub -u (\S+) -P (\S+) -t '([^']+)'\n$`)

// subscribe does what the tour's mosquitto_sub line does, at the broker of this demo.
func (t *tour) subscribe(ctx context.Context, line string) error {
	parts := mosquittoSub.FindStringSubmatch(line)
	if parts == nil {
		return errors.New("the tour understands one kind of mosquitto_sub line only")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", t.broker)
	if err != nil {
		return fmt.Errorf("connect to the broker: %w", err)
	}
	t.events = &mqttSubscriber{conn: conn, in: bufio.NewReader(conn)}
	defer t.events.interruptible(ctx)()
	return t.events.begin(parts[1], parts[2], parts[3])
}

// begin logs in and subscribes.
func (s *mqttSubscriber) begin(user, password, topic string) error {
	body := append(mqttString("MQTT"), 4, 0xC2, 0, 0) // level 4; user name, password, clean session; no keep-alive
	for _, field := range []string{"koldproxy-tour", user, password} {
		body = append(body, mqttString(field)...)
	}
	if err := s.send(mqttConnect, body); err != nil {
		return err
	}
	if answer, err := s.read(mqttConnack); err != nil {
		return fmt.Errorf("log in to the broker: %w", err)
	} else if len(answer) != 2 || answer[1] != 0 {
		return fmt.Errorf("log in to the broker: refused with % x", answer)
	}
	body = append([]byte{0, 1}, mqttString(topic)...) // packet id 1
	if err := s.send(mqttSubscribe, append(body, 0)); err != nil {
		return err
	}
	if answer, err := s.read(mqttSuback); err != nil {
		return fmt.Errorf("subscribe to %s: %w", topic, err)
	} else if len(answer) != 3 || answer[2] != 0 {
		return fmt.Errorf("subscribe to %s: refused with % x", topic, answer)
	}
	return nil
}

// receive returns the payloads of the next n messages, one a line.
func (s *mqttSubscriber) receive(ctx context.Context, n int) (string, error) {
	if s == nil {
		return "", errors.New("nothing was subscribed to")
	}
	defer s.interruptible(ctx)()
	var out strings.Builder
	for i := range n {
		body, err := s.read(mqttPublish)
		if err != nil {
			return "", fmt.Errorf("wait for message %d of %d: %w; so far:\n%s", i+1, n, err, out.String())
		}
		if len(body) < 2 || len(body) < 2+int(binary.BigEndian.Uint16(body)) {
			return "", errors.New("a message without a topic")
		}
		out.Write(body[2+binary.BigEndian.Uint16(body):])
		out.WriteString("\n")
	}
	return out.String(), nil
}

// interruptible makes reads and writes fail when ctx ends, until the returned function is called.
func (s *mqttSubscriber) interruptible(ctx context.Context) func() {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

func (s *mqttSubscriber) send(kind byte, body []byte) error {
	packet := []byte{kind}
	for n := len(body); ; {
		digit := byte(n & 0x7F)
		if n >>= 7; n > 0 {
			packet = append(packet, digit|0x80)
			continue
		}
		packet = append(packet, digit)
		break
	}
	_, err := s.conn.Write(append(packet, body...))
	return err
}

// read returns the body of the next packet, which must be of one kind.
func (s *mqttSubscriber) read(kind byte) ([]byte, error) {
	first, err := s.in.ReadByte()
	if err != nil {
		return nil, err
	}
	length, shift := 0, 0
	for {
		digit, err := s.in.ReadByte()
		if err != nil {
			return nil, err
		}
		length |= int(digit&0x7F) << shift
		if digit&0x80 == 0 {
			break
		}
		if shift += 7; shift > 21 {
			return nil, errors.New("a packet with a broken length")
		}
	}
	if length > maxMQTTBody {
		return nil, fmt.Errorf("a packet of %d bytes", length)
	}
	body := make([]byte, length)
	if _, err := io.ReadFull(s.in, body); err != nil {
		return nil, err
	}
	if first&0xF0 != kind&0xF0 {
		return nil, fmt.Errorf("a packet of kind %#x", first&0xF0)
	}
	return body, nil
}

func (s *mqttSubscriber) close() { _ = s.conn.Close() }

func mqttString(s string) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(s))), s...)
}
