package walapply

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// LeaderLockClass and LeaderLockID are the two keys of the advisory lock that the leader of a database holds, as pg_locks
// shows them ("kold" in ASCII, and 1). Advisory locks belong to one database.
const (
	LeaderLockClass int32 = 0x6b6f6c64
	LeaderLockID    int32 = 1
)

// contend waits for leadership and leads until something ends it.
func (a *Applier) contend(ctx context.Context, r *retry) (err error) {
	conn, err := a.connect(ctx, "leader", map[string]string{
		// A leader that does not ping any more is not one.
		"idle_session_timeout": fmt.Sprint(max(a.cfg.Lease, a.cfg.TakeoverInterval*2).Milliseconds()),
	})
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)
	for {
		leads, err := a.tryLock(ctx, conn)
		if err != nil {
			return err
		}
		if leads {
			return a.lead(ctx, conn, r)
		}
		r.passed(r.at) // somebody else leads; that is as good
		if !sleep(ctx, a.cfg.TakeoverInterval) {
			return nil
		}
	}
}

func (a *Applier) tryLock(ctx context.Context, conn *pgx.Conn) (ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Lease)
	defer cancel()
	if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1, $2)`, LeaderLockClass, LeaderLockID).Scan(&ok); err != nil {
		return false, fmt.Errorf("ask for the leader's lock: %w", err)
	}
	return ok, nil
}

// lead runs everything that only the leader does. conn holds the lock and is closed after lead has returned.
func (a *Applier) lead(ctx context.Context, conn *pgx.Conn, r *retry) error {
	epoch, err := a.depose(ctx, conn)
	if err != nil {
		return err
	}
	a.log.Info().Int64("epoch", epoch).Msg("leading")
	a.epoch.Store(epoch)
	a.metrics.leading.Set(1)
	a.metrics.lag.stop() // until it streams
	a.update(func(s *Status) { *s = Status{Leading: true, Epoch: epoch, LastCommit: s.LastCommit} })
	defer func() {
		a.epoch.Store(0)
		a.backlog.Store(0)
		a.metrics.reset()
		a.update(func(s *Status) { *s = Status{LastCommit: s.LastCommit} })
		a.log.Info().Int64("epoch", epoch).Msg("not leading any more")
	}()

	group, ctx := errgroup.WithContext(ctx)
	ready := make(chan struct{})
	group.Go(func() error { return a.keepLease(ctx, conn) })
	group.Go(func() error { return a.follow(ctx, epoch, ready, r) })
	if a.cfg.WhileLeading != nil {
		group.Go(func() error {
			select {
			case <-ready:
				return a.cfg.WhileLeading(ctx)
			case <-ctx.Done():
				return nil
			}
		})
	}
	return group.Wait()
}

// keepLease pings the session that holds the lock, which both keeps it alive and tells when it is gone.
func (a *Applier) keepLease(ctx context.Context, conn *pgx.Conn) error {
	for sleep(ctx, a.cfg.Lease/5) {
		// The server measures the silence, and the epoch keeps a deposed leader from writing: a late answer does no harm.
		pingCtx, cancel := context.WithTimeout(ctx, a.cfg.Lease)
		err := conn.Ping(pingCtx)
		cancel()
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("lost the session that holds the leader's lock: %w", err)
		}
	}
	return nil
}

// depose takes the next epoch. Transactions that a former leader left open (its process may be stopped, or cut off) hold
// the checkpoint row; their sessions are terminated.
func (a *Applier) depose(ctx context.Context, conn *pgx.Conn) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Lease)
	defer cancel()
	for {
		epoch, err := takeEpoch(ctx, conn)
		if sqlState(err) != "55P03" { // lock_not_available
			return epoch, err
		}
		_, err = conn.Exec(ctx, `SELECT pg_terminate_backend(a.pid)
			FROM pg_stat_activity a JOIN pg_locks l USING (pid)
			WHERE l.relation = 'koldstore.checkpoint'::regclass AND l.mode IN ('RowShareLock', 'RowExclusiveLock') AND l.granted
				AND a.datname = current_database() AND a.usename = current_user AND a.pid <> pg_backend_pid()`)
		if err != nil {
			return 0, fmt.Errorf("terminate sessions of a former leader: %w", err)
		}
		if !sleep(ctx, 20*time.Millisecond) {
			return 0, fmt.Errorf("take the next epoch: the checkpoint row is locked: %w", ctx.Err())
		}
	}
}

// follow reads the slot in one session after the other until ctx ends or leadership is lost. It closes ready when the first
// one has begun to stream.
func (a *Applier) follow(ctx context.Context, epoch int64, ready chan<- struct{}, r *retry) error {
	for {
		s := &session{a: a, epoch: epoch, retry: r, started: func() {
			if ready != nil {
				close(ready)
				ready = nil
			}
		}}
		err := s.run(ctx)
		a.metrics.lag.stop()
		a.update(func(s *Status) { s.Streaming = false })
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // whoever ended ctx has the reason
		case isNotLeader(err):
			return err
		}
		if !r.wait(ctx, err) {
			return nil
		}
	}
}

// sleep waits for d; it says false when ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
