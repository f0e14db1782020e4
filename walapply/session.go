package walapply

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"

	"github.com/koldproxy/koldproxy"
)

func isNotLeader(err error) bool { return errors.Is(err, ErrNotLeader) }

// session is one attempt to follow the slot: a walsender, an apply session and the goroutines between them. Every error
// ends it; the next one begins at the checkpoint.
type session struct {
	a       *Applier
	epoch   int64
	retry   *retry
	started func() // called when the server has begun to stream

	conn *pgx.Conn
	cp   checkpoint
	// logEnd is where the log ended when the session began. Who has come that far has seen everything that a failure before
	// could have been about.
	logEnd koldproxy.LSN
	// busySince is when the open apply transaction began, in nanoseconds since 1970; 0 if none is open.
	busySince atomic.Int64
}

// run returns nil only if ctx ended.
func (s *session) run(ctx context.Context) (err error) {
	if s.conn, err = s.a.connect(ctx, "apply", nil); err != nil {
		return err
	}
	defer closeConn(ctx, s.conn)
	defer s.a.target.Close()
	if s.a.cfg.LockWait > 0 {
		defer (&lockWatch{session: s}).start(ctx)()
	}
	if err := s.deposeApply(ctx); err != nil {
		return err
	}
	if s.cp, err = readCheckpoint(ctx, s.conn, s.epoch); err != nil {
		return err
	}
	return s.noteGap(ctx, s.follow(ctx))
}

// follow streams from the checkpoint on, if nothing speaks against it.
func (s *session) follow(ctx context.Context) error {
	if err := checkCopy(ctx, s.conn, &s.cp); err != nil {
		return err
	}
	if s.cp.gap != "" {
		if s.a.cfg.OnGap == OnGapStop && !s.cp.anew {
			return gap("%s", s.cp.gap)
		}
		if err := s.beginAnew(ctx); err != nil {
			return err
		}
	}
	wal, err := s.a.connectReplication(ctx)
	if err != nil {
		return err
	}
	slot, timeout, err := s.prepare(ctx, wal)
	if err == nil {
		s.a.target.Reset()
		err = s.start(ctx, wal)
	}
	if err != nil {
		closePgConn(ctx, wal)
		return err
	}
	return s.stream(ctx, wal, slot, timeout)
}

// deposeApply ends apply sessions that a former leader, or a former session of ours, has left behind.
func (s *session) deposeApply(ctx context.Context) error {
	_, err := s.conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE application_name = $1 AND datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()`,
		applicationName("apply"))
	if err != nil {
		return fmt.Errorf("terminate former apply sessions: %w", err)
	}
	return nil
}

// prepare makes sure that there is a slot that continues the checkpoint and that nobody else uses. It returns the slot and
// the server's wal_sender_timeout, 0 if there is none.
func (s *session) prepare(ctx context.Context, wal *pgconn.PgConn) (slotState, time.Duration, error) {
	system, err := pglogrepl.IdentifySystem(ctx, wal)
	if err != nil {
		return slotState{}, 0, fmt.Errorf("identify the server: %w", err)
	}
	if err := checkServer(ctx, s.conn); err != nil {
		return slotState{}, 0, err
	}
	slot, err := freeSlot(ctx, s.conn, s.cp.slot)
	if err != nil {
		return slot, 0, err
	}
	if err := checkSlot(&s.cp, slot, system.SystemID, system.Timeline); err != nil {
		return slot, 0, err
	}
	if err := s.a.checkConfirmed(&s.cp, slot); err != nil {
		return slot, 0, err
	}
	if _, err := s.checkPublication(ctx); err != nil {
		return slot, 0, err
	}
	if !slot.exists {
		version, err := serverVersion(ctx, s.conn)
		if err != nil {
			return slot, 0, err
		}
		if slot.confirmed, err = createSlot(ctx, wal, s.cp.slot, version); err != nil {
			return slot, 0, blamed(ctx, s.conn, err)
		}
		s.a.log.Info().Str("slot", s.cp.slot).Stringer("lsn", slot.confirmed).Msg("created the replication slot")
	}
	if s.cp.systemID == "" {
		if err := s.cp.begin(ctx, s.conn, slot.confirmed, system.SystemID, system.Timeline); err != nil {
			return slot, 0, err
		}
	}
	if err := s.cp.noteTold(ctx, s.conn, max(slot.confirmed, s.cp.applied)+toldStep); err != nil {
		return slot, 0, err
	}
	if s.logEnd, err = logEnd(ctx, s.conn); err != nil {
		return slot, 0, err
	}
	timeout, err := senderTimeout(ctx, wal)
	return slot, timeout, err
}

func logEnd(ctx context.Context, conn *pgx.Conn) (koldproxy.LSN, error) {
	var end string
	if err := conn.QueryRow(ctx, `SELECT pg_current_wal_flush_lsn()::text`).Scan(&end); err != nil {
		return 0, fmt.Errorf("ask for the end of the log: %w", err)
	}
	return koldproxy.ParseLSN(end)
}

func serverVersion(ctx context.Context, conn *pgx.Conn) (version int, err error) {
	if err := conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil {
		return 0, fmt.Errorf("ask for the server's version: %w", err)
	}
	return version, nil
}

// senderTimeout asks the walsender itself, because the setting may differ between roles and databases.
func senderTimeout(ctx context.Context, wal *pgconn.PgConn) (time.Duration, error) {
	results, err := wal.Exec(ctx, `SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'`).ReadAll()
	var row [][]byte
	if err == nil {
		row, err = onlyRow(results, 1)
	}
	var ms int64
	if err == nil {
		ms, err = strconv.ParseInt(string(row[0]), 10, 32)
	}
	if err != nil {
		return 0, fmt.Errorf("ask for wal_sender_timeout: %w", err)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// start makes the server stream from the checkpoint on.
func (s *session) start(ctx context.Context, wal *pgconn.PgConn) error {
	publication := pgx.Identifier{s.a.cfg.Publication}.Sanitize()
	err := pglogrepl.StartReplication(ctx, wal, s.cp.slot, pglogrepl.LSN(s.cp.applied), pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + strings.ReplaceAll(publication, "'", "''") + "'"},
	})
	if err != nil {
		return fmt.Errorf("start replication from slot %s at %v: %w", s.cp.slot, s.cp.applied, err)
	}
	return nil
}

// stream runs the goroutines of a started session and closes wal at the end.
func (s *session) stream(parent context.Context, wal *pgconn.PgConn, slot slotState, timeout time.Duration) error {
	group, ctx := errgroup.WithContext(parent)
	ack := &acknowledger{wal: wal, a: s.a, position: max(s.cp.applied, slot.confirmed)}
	q := newQueue(s.a.cfg.QueueBytes)
	s.a.backlog.Store(0)
	s.a.received.Store(uint64(s.cp.applied))
	s.a.metrics.sessions.Inc()
	s.a.metrics.gap.Set(0)
	s.a.metrics.lag.stream(q, s.cp.applied)
	s.a.remember(ack.position)
	s.a.update(func(st *Status) {
		st.Streaming, st.Applied, st.Acknowledged = true, s.cp.applied, ack.position
	})
	s.a.log.Debug().Stringer("lsn", s.cp.applied).Msg("streaming")
	s.started()

	interval := s.a.cfg.StatusInterval
	if timeout > 0 {
		interval = min(interval, max(timeout/3, time.Millisecond))
	}
	group.Go(func() error { return ack.run(ctx, interval) })
	group.Go(func() error { return (&retainedWatch{a: s.a}).run(ctx, s.cp.slot) })
	received := make(chan struct{})
	go func() {
		defer close(received)
		r := &receiver{a: s.a, wal: wal, ack: ack, queue: q, decoder: newDecoder()}
		q.close(r.run(ctx))
	}()
	group.Go(func() error {
		l := &applyLoop{session: s, queue: q, ack: ack, seqs: koldproxy.NewSequence(s.cp.watermark), background: true}
		return l.run(ctx)
	})
	err := group.Wait()
	ack.sayGoodbye()
	<-received
	closePgConn(ctx, wal)
	if parent.Err() != nil {
		if err := s.noteTold(context.WithoutCancel(parent), ack.acknowledged()); err != nil {
			s.a.log.Debug().Err(err).Msg("stopping")
		}
	}
	if err == nil || parent.Err() != nil {
		return parent.Err()
	}
	return err
}

// noteTimeout is short, since the process is to end within seconds.
const noteTimeout = time.Second

// noteTold notes at an orderly stop what the slot was told last. A query that the stop has cancelled takes its connection
// along, so there may have to be another one; the epoch keeps a successor's note safe from this one.
func (s *session) noteTold(ctx context.Context, told koldproxy.LSN) error {
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	conn := s.conn
	if conn.IsClosed() || conn.PgConn().TxStatus() != 'I' {
		var err error
		if conn, err = s.a.connect(ctx, "stop", nil); err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
	}
	return s.cp.noteTold(ctx, conn, told)
}
