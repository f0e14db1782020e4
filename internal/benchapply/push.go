package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"
)

// subscriberRole may log in at the broker; its password is its name.
const subscriberRole = "bench_subscriber"

// pushed is smallStreams with a broker, and a role that may subscribe to s0.
func (b *bench) pushed(ctx context.Context) (d *database, topic string, err error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, "", err
	}
	if d, err = b.smallStreams(ctx, 1, func(d *database) { d.mqttAddr = address }); err != nil {
		return d, "", err
	}
	topic = "$stream/" + d.name + "/s0"
	return d, topic, exec1(ctx, d.source,
		fmt.Sprintf(`DO $$ BEGIN IF to_regrole('%[1]s') IS NULL THEN CREATE ROLE %[1]s LOGIN PASSWORD '%[1]s'; END IF; END $$`, subscriberRole),
		fmt.Sprintf(`CALL koldstore.grant_subscribe(ARRAY['%s'], ARRAY['%s']::name[])`, topic, subscriberRole))
}

// subscriber is an MQTT connection that only receives.
type subscriber struct {
	conn   net.Conn
	reader *bufio.Reader
}

// dial connects and subscribes; it returns once the broker has confirmed.
func dial(ctx context.Context, address, topic, id string) (*subscriber, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	s := &subscriber{conn: conn, reader: bufio.NewReaderSize(conn, 64<<10)}
	hello := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
	hello.ProtocolName, hello.ProtocolVersion, hello.CleanSession, hello.ClientIdentifier = "MQTT", 4, true, id
	hello.UsernameFlag, hello.PasswordFlag, hello.Username, hello.Password = true, true, subscriberRole, []byte(subscriberRole)
	subscribe := packets.NewControlPacket(packets.Subscribe).(*packets.SubscribePacket)
	subscribe.MessageID, subscribe.Topics, subscribe.Qoss = 1, []string{topic}, []byte{0}
	if err = hello.Write(conn); err == nil {
		err = subscribe.Write(conn)
	}
	for range 2 {
		var answer packets.ControlPacket
		if err == nil {
			answer, err = packets.ReadPacket(s.reader)
		}
		switch a := answer.(type) {
		case *packets.ConnackPacket:
			if a.ReturnCode != 0 {
				err = fmt.Errorf("the broker refuses the login: %d", a.ReturnCode)
			}
		case *packets.SubackPacket:
			if a.ReturnCodes[0] != 0 {
				err = fmt.Errorf("the broker refuses the subscription: %d", a.ReturnCodes[0])
			}
		}
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return s, nil
}

// next is the payload of the next message.
func (s *subscriber) next() ([]byte, error) {
	for {
		p, err := packets.ReadPacket(s.reader)
		if err != nil {
			return nil, err
		}
		if m, ok := p.(*packets.PublishPacket); ok {
			return m.Payload, nil
		}
	}
}

// pushLatency measures from the commit of an insert to the moment when a subscriber has its event, while nothing else happens.
func pushLatency(ctx context.Context, b *bench) (err error) {
	d, topic, err := b.pushed(ctx)
	if d != nil {
		defer func() { err = errors.Join(err, d.drop(ctx)) }()
	}
	if err != nil {
		return err
	}
	sub, err := dial(ctx, d.mqttAddr, topic, "latency")
	if err != nil {
		return err
	}
	defer sub.conn.Close()
	var seen []float64
	next := int64(1)
	for end := time.Now().Add(time.Duration(b.seconds) * time.Second); time.Now().Before(end); next++ {
		if _, err := d.source.Exec(ctx, `INSERT INTO t0 (id, bucket, amount, at) VALUES ($1, 0, 1, now())`, next); err != nil {
			return err
		}
		committed := time.Now()
		payload, err := sub.next()
		if err != nil {
			return err
		}
		seen = append(seen, float64(time.Since(committed).Microseconds())/1000)
		var event struct{ K int64 }
		if err := json.Unmarshal(payload, &event); err != nil || event.K != next {
			return fmt.Errorf("received %s for row %d", payload, next)
		}
		time.Sleep(5 * time.Millisecond)
	}
	slices.Sort(seen)
	fmt.Printf("\n| Commit to MQTT subscriber, idle | p50, ms | p99, ms |\n|---|---|---|\n| %d events | %.1f | %.1f |\n", len(seen), seen[len(seen)/2], seen[len(seen)*99/100])
	return nil
}

// fanOut lets a thousand subscribers receive what a writer commits at several rates. Messages are counted, so what is missing
// in the end was dropped.
func fanOut(ctx context.Context, b *bench) (err error) {
	const subscribers = 1000
	d, topic, err := b.pushed(ctx)
	if d != nil {
		defer func() { err = errors.Join(err, d.drop(ctx)) }()
	}
	if err != nil {
		return err
	}
	before, err := d.peakBytes()
	if err != nil {
		return err
	}
	var received atomic.Int64
	var reading sync.WaitGroup
	defer reading.Wait()
	var subs []*subscriber
	defer func() {
		for _, s := range subs {
			_ = s.conn.Close() // which ends its reader
		}
	}()
	for i := range subscribers {
		s, err := dial(ctx, d.mqttAddr, topic, fmt.Sprint("fan-", i))
		if err != nil {
			return err
		}
		subs = append(subs, s)
		reading.Go(func() {
			for {
				if _, err := s.next(); err != nil {
					return
				}
				received.Add(1)
			}
		})
	}
	connected, err := d.peakBytes()
	if err != nil {
		return err
	}
	fmt.Printf("\n| Fan-out to %d subscribers (%d KB each) | Events | Events/s written | Messages/s delivered | Dropped | CPU µs/message | Peak of memory |\n|---|---|---|---|---|---|---|\n", subscribers, (connected-before)/subscribers>>10)
	next := int64(1)
	for _, rate := range []int{50, 200, 500, 1000} {
		cpu, err := d.cpu()
		if err != nil {
			return err
		}
		start, begun := received.Load(), time.Now()
		n := rate * b.seconds
		for i := range n {
			if _, err := d.source.Exec(ctx, `INSERT INTO t0 (id, bucket, amount, at) VALUES ($1, 0, 1, now())`, next); err != nil {
				return err
			}
			next++
			time.Sleep(time.Until(begun.Add(time.Duration(i+1) * time.Second / time.Duration(rate))))
		}
		took := time.Since(begun)
		// Over when everything has come, or nothing any more.
		last := int64(-1)
		for now := received.Load(); now-start < int64(n*subscribers) && now != last; now = received.Load() {
			last = now
			time.Sleep(500 * time.Millisecond)
		}
		got := received.Load() - start
		after, err := d.cpu()
		if err != nil {
			return err
		}
		peak, err := d.peakBytes()
		if err != nil {
			return err
		}
		fmt.Printf("| %d/s | %d | %.0f | %.0f | %.2f %% | %.1f | %d MB |\n", rate, n, float64(n)/took.Seconds(), float64(got)/took.Seconds(),
			100*(1-float64(got)/float64(n*subscribers)), float64((after-cpu).Microseconds())/float64(got), peak>>20)
	}
	return nil
}
