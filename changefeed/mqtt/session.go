package mqtt

import (
	"net"
	"sync/atomic"

	"github.com/mochi-mqtt/server/v2/packets"
)

// Bounds of what a session collects for one write.
const (
	batchBytes  = 64 << 10
	batchFrames = 128
)

// session delivers messages to one client that has logged in.
type session struct {
	broker    *Broker
	conn      *conn
	key       sessionKey
	version   byte // of the protocol: 4 is MQTT 3.1.1
	maxPacket int  // bytes, as an MQTT 5 client may announce; 0 is no bound

	queue   chan delivery
	waiting atomic.Int64 // bytes in queue, or being written

	ending  chan struct{} // closed by conn.end
	stopped chan struct{} // closed by run
}

// delivery is a message in the queue of a session.
type delivery struct {
	message *message
	to      *target
	others  []*target // of a shared subscription: who is to have the message if this one may not
}

// offer puts a delivery into the queue and tells whether there was room. It never waits.
func (s *session) offer(d delivery) bool {
	size := int64(d.message.size())
	if waiting := s.waiting.Add(size); waiting <= int64(s.broker.cfg.SubscriberQueueBytes) || waiting == size {
		select {
		case s.queue <- d:
			return true
		default:
		}
	}
	s.waiting.Add(-size)
	return false
}

// discard empties the queue of a session that has stopped and returns how much was in it.
func (s *session) discard() (n int) {
	for {
		select {
		case <-s.queue:
			n++
		default:
			return n
		}
	}
}

// run writes what is in the queue until the connection fails or is ended, and closes it.
func (s *session) run() {
	defer close(s.stopped)
	defer s.conn.Close()
	frames := make(net.Buffers, 0, batchFrames)
	for {
		select {
		case <-s.ending:
			s.farewell()
			return
		case d := <-s.queue:
			if err := s.write(d, frames); err != nil {
				s.broker.log.Debug().Str("user", s.key.user).Err(err).Msg("write to mqtt client")
				return
			}
		}
	}
}

// write sends a delivery and those that wait behind it, as far as they fit one batch. The array behind frames is reused.
func (s *session) write(d delivery, frames net.Buffers) error {
	frames = frames[:0]
	size, taken := 0, int64(0)
	for more := true; more; {
		taken += int64(d.message.size())
		if frame := s.frame(d); frame != nil {
			frames = append(frames, frame)
			size += len(frame)
		}
		if size >= batchBytes || len(frames) == cap(frames) {
			break
		}
		select {
		case d = <-s.queue:
		default:
			more = false
		}
	}
	defer s.waiting.Add(-taken)
	if len(frames) == 0 {
		return nil
	}
	n := len(frames)
	batch := frames // WriteTo consumes the slice it is called on
	if err := s.conn.writeFrames(&batch); err != nil {
		s.broker.metrics.dropped.WithLabelValues(dropClosed).Add(float64(n))
		return err
	}
	s.broker.metrics.delivered.Add(float64(n))
	return nil
}

// frame returns the packet to send for a delivery, or nil if the client does not get it. It may wait for an answer about
// the client's rights.
func (s *session) frame(d delivery) []byte {
	m := d.message
	allowed, err := s.broker.rights.MaySubscribe(s.conn.ctx, s.key.user, m.topic)
	switch {
	case err != nil:
		s.broker.metrics.dropped.WithLabelValues(dropUnjudged).Inc()
		s.broker.log.Debug().Str("user", s.key.user).Str("topic", m.topic).Err(err).Msg("right to receive cannot be checked")
		return nil
	case !allowed && len(d.others) > 0:
		s.broker.offerGroup(m, d.others)
		return nil
	case !allowed:
		s.broker.metrics.dropped.WithLabelValues(dropDenied).Inc()
		return nil
	}
	var frame []byte
	if s.version >= 5 && len(d.to.identifiers) > 0 {
		frame = m.encode(s.version, d.to.identifiers)
	} else {
		frame = m.frame(s.version)
	}
	if s.maxPacket > 0 && len(frame) > s.maxPacket {
		s.broker.metrics.dropped.WithLabelValues(dropTooLarge).Inc()
		return nil
	}
	return frame
}

// farewell tells an MQTT 5 client why it is disconnected.
func (s *session) farewell() {
	if why := s.conn.why(); s.version >= 5 && why.Code >= packets.ErrUnspecifiedError.Code {
		_ = s.conn.writeFrames(&net.Buffers{disconnectFrame(why)}) // a courtesy; the connection is closed either way
	}
}
