package walapply

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/koldproxy/koldproxy"
)

// receiver reads the walsender, decodes, and fills the queue. It is the only one that reads the connection.
type receiver struct {
	a       *Applier
	wal     *pgconn.PgConn
	ack     *acknowledger
	queue   *queue
	decoder *decoder

	batch      []message // decoded, and not in the queue yet
	batchBytes int
}

// restTime is how long what comes in may be left with the kernel while the apply loop is busy.
const restTime = time.Millisecond

// run returns why nothing more comes. It blocks in a read that only [acknowledger.sayGoodbye] or the server ends.
func (r *receiver) run(ctx context.Context) error {
	burstOf(r.wal).beforeRead = func() {
		if r.handOver(ctx) == nil {
			r.queue.rest(ctx, restTime)
		}
	}
	err := r.receive(ctx)
	return errors.Join(err, r.handOver(ctx))
}

func (r *receiver) receive(ctx context.Context) error {
	for {
		// No ctx here: watching it would cost more than the read.
		raw, err := r.wal.ReceiveMessage(context.Background()) //nolint:contextcheck // see above
		if err != nil {
			return fmt.Errorf("read the stream: %w", err)
		}
		switch msg := raw.(type) {
		case *pgproto3.CopyData:
			before := len(r.batch)
			if r.batch, err = r.copyData(r.batch, msg.Data); err != nil {
				return err
			}
			for i := before; i < len(r.batch); i++ {
				r.batchBytes += r.batch[i].bytes
			}
			if r.batchBytes > burstBytes {
				if err := r.handOver(ctx); err != nil {
					return err
				}
			}
		case *pgproto3.ErrorResponse:
			return streamError(msg, r.a.cfg.Publication)
		case *pgproto3.CopyDone, *pgproto3.CommandComplete:
			return errors.New("the server ended the stream")
		case *pgproto3.NoticeResponse:
			if err := streamError((*pgproto3.ErrorResponse)(msg), r.a.cfg.Publication); isGap(err) {
				return err
			}
		case *pgproto3.ParameterStatus:
		default:
			return fmt.Errorf("unexpected %T in the stream", msg)
		}
	}
}

// handOver puts what has been decoded into the queue.
func (r *receiver) handOver(ctx context.Context) error {
	if len(r.batch) == 0 {
		return nil
	}
	r.a.backlog.Add(int64(r.batchBytes))
	if err := r.queue.put(ctx, r.batch); err != nil {
		return err
	}
	clear(r.batch)
	r.batch, r.batchBytes = r.batch[:0], 0
	return nil
}

func (r *receiver) copyData(dst []message, data []byte) ([]message, error) {
	if len(data) == 0 {
		return dst, errors.New("empty message in the stream")
	}
	switch data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		if err != nil {
			return dst, err
		}
		if k.ReplyRequested {
			if err := r.ack.send(); err != nil {
				return dst, err
			}
		}
		r.saw(koldproxy.LSN(k.ServerWALEnd))
		return append(dst, message{kind: messageKeepalive, lsn: koldproxy.LSN(k.ServerWALEnd), bytes: messageBytes}), nil
	case pglogrepl.XLogDataByteID:
		x, err := pglogrepl.ParseXLogData(data[1:])
		if err != nil {
			return dst, err
		}
		r.saw(koldproxy.LSN(x.WALStart))
		dst, err = r.decoder.decode(dst, x.WALData)
		if n := len(dst) - 1; err == nil && n >= 0 && dst[n].kind == messageCommit {
			dst[n].behind = x.ServerTime.Sub(dst[n].time)
		}
		return dst, err
	default:
		return dst, fmt.Errorf("unknown message %q in the stream", data[0])
	}
}

func (r *receiver) saw(lsn koldproxy.LSN) {
	if uint64(lsn) > r.a.received.Load() {
		r.a.received.Store(uint64(lsn))
	}
}

// acknowledger tells the server how far we are. Any goroutine may use it; it is the only one that writes the connection,
// directly to the socket, because [pgconn.PgConn] itself is in the receiver's hands.
type acknowledger struct {
	wal *pgconn.PgConn
	a   *Applier

	mu       sync.Mutex
	position koldproxy.LSN
}

// advance acknowledges lsn at once if that is news.
func (k *acknowledger) advance(lsn koldproxy.LSN) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if lsn <= k.position {
		return nil
	}
	k.position = lsn
	k.a.remember(lsn) // before the server can know it
	if err := k.write(); err != nil {
		return err
	}
	k.a.metrics.acknowledged.Set(float64(lsn))
	k.a.update(func(s *Status) { s.Acknowledged = lsn })
	return nil
}

// acknowledged is the current position.
func (k *acknowledger) acknowledged() koldproxy.LSN {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.position
}

// send repeats the current position.
func (k *acknowledger) send() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.write()
}

// run sends a status update every interval, so that the server knows us alive while a batch takes long.
func (k *acknowledger) run(ctx context.Context, interval time.Duration) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if err := k.send(); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// write sends a standby status update with the position as written, flushed and applied. The caller holds mu.
func (k *acknowledger) write() error {
	const size = 1 + 3*8 + 8 + 1
	buf := make([]byte, 0, 1+4+size)
	buf = append(buf, 'd')
	buf = binary.BigEndian.AppendUint32(buf, 4+size)
	buf = append(buf, pglogrepl.StandbyStatusUpdateByteID)
	for range 3 {
		buf = binary.BigEndian.AppendUint64(buf, uint64(k.position))
	}
	buf = binary.BigEndian.AppendUint64(buf, uint64(time.Since(postgresEpoch).Microseconds()))
	buf = append(buf, 0) // no reply wanted
	if _, err := k.wal.Conn().Write(buf); err != nil {
		return fmt.Errorf("acknowledge %v: %w", k.position, err)
	}
	return nil
}

var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// farewell is how long the walsender gets to end by itself, which frees the slot for whoever comes next.
const farewell = time.Second

// sayGoodbye asks the walsender to end and makes the receiver's read return soon, in any case.
func (k *acknowledger) sayGoodbye() {
	conn := k.wal.Conn()
	_ = conn.SetDeadline(time.Now().Add(farewell)) // a socket that takes no deadline is closed, and the read over
	k.mu.Lock()                                    // after the deadline, which ends a write that the server does not take
	defer k.mu.Unlock()
	_, _ = conn.Write([]byte{'X', 0, 0, 0, 4}) // if it fails, the deadline remains
}
