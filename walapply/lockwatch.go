package walapply

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Anybody may lock the log of a stream (LOCK TABLE asks for no more than a privilege that everybody has), and a session that
// is forgotten in the middle of a transaction can do so for ever. Applying must not wait for ever, since everything behind
// the apply transaction waits with it.

// blockersSQL lists who keeps a backend from a lock, and whether that is one on a relation that belongs to our role, or on a row of one.
// A row's lock is waited for as that of a transaction; the relation shows in the tuple lock that the waiter holds meanwhile. A
// prepared transaction has no process, which is shown as 0.
const blockersSQL = `SELECT DISTINCT b.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(c.oid::regclass::text, ''),
		coalesce(c.relowner = (SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user), false) AND a.pid IS NOT NULL
	FROM pg_locks w
	LEFT JOIN pg_locks t ON w.locktype = 'transactionid' AND t.pid = w.pid AND t.locktype = 'tuple'
	LEFT JOIN pg_class c ON c.oid = coalesce(w.relation, t.relation)
	CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b(pid)
	LEFT JOIN pg_stat_activity a ON a.pid = b.pid
	WHERE w.pid = $1 AND NOT w.granted`

type blocker struct {
	pid                         int32
	user, application, relation string
	ours                        bool // it is ended when it takes too long
}

// lockWatch names sessions that have kept the apply session waiting for longer than LockWait, and ends them if the lock is on something of
// ours.
type lockWatch struct {
	*session
	conn  *pgx.Conn // nil until it is needed
	since map[int32]waiting
}

// waiting is for how long a blocker has been known.
type waiting struct{ began, logged time.Time }

// start runs the watch in a goroutine until stop is called, which waits for its end.
func (w *lockWatch) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); w.run(ctx) }()
	return func() { cancel(); <-done }
}

// run looks a few times in each LockWait until ctx ends. It costs nothing while apply transactions are short.
func (w *lockWatch) run(ctx context.Context) {
	wait := w.a.cfg.LockWait
	interval := max(min(wait/4, time.Second), time.Millisecond)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	defer func() {
		if w.conn != nil {
			closeConn(ctx, w.conn)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if begun := w.busySince.Load(); begun == 0 || time.Since(time.Unix(0, begun)) < interval {
			clear(w.since)
			continue
		}
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			w.a.log.Warn().Err(err).Msg("cannot see who keeps the applier waiting")
		}
	}
}

func (w *lockWatch) look(ctx context.Context) error {
	if w.conn == nil || w.conn.IsClosed() {
		var err error
		if w.conn, err = w.a.connect(ctx, "watch", nil); err != nil {
			return err
		}
	}
	rows, err := w.conn.Query(ctx, blockersSQL, int32(w.session.conn.PgConn().PID()))
	if err != nil {
		return fmt.Errorf("list blocking sessions: %w", err)
	}
	blockers, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b blocker, err error) {
		err = row.Scan(&b.pid, &b.user, &b.application, &b.relation, &b.ours)
		return b, err
	})
	if err != nil {
		return fmt.Errorf("list blocking sessions: %w", err)
	}
	now, since := time.Now(), make(map[int32]waiting)
	var failed error
	for _, b := range blockers {
		known, ok := w.since[b.pid]
		if !ok {
			known.began = now
		}
		// Once it is overdue, and from then on each time that it is named again: a right to end it may have been granted.
		if now.Sub(known.began) >= w.a.cfg.LockWait && now.Sub(known.logged) >= logAgain {
			known.logged = now
			ended, err := w.deal(ctx, b)
			failed = errors.Join(failed, err)
			if ended {
				continue
			}
		}
		since[b.pid] = known
	}
	w.since = since
	return failed
}

// deal ends a blocker, or says who it is and why it goes on. The error is for those that say nothing about it.
func (w *lockWatch) deal(ctx context.Context, b blocker) (ended bool, err error) {
	var refused error
	if b.ours {
		err := w.conn.QueryRow(ctx, `SELECT pg_terminate_backend($1)`, b.pid).Scan(&ended)
		if err != nil && sqlState(err) == "" {
			return false, fmt.Errorf("terminate a session that keeps the applier waiting: %w", err)
		}
		refused = err
	}
	if b.ours && refused == nil && !ended {
		return false, nil // it has gone by itself
	}
	event := w.a.log.Warn().Int32("pid", b.pid).Str("user", b.user).Str("application", b.application).Str("relation", b.relation)
	switch {
	case ended:
		w.a.metrics.terminated.Inc()
		event.Msg("terminated a session that kept the applier waiting for a lock")
	case b.pid == 0:
		event.Msg("a prepared transaction keeps the applier waiting for a lock; COMMIT PREPARED or ROLLBACK PREPARED ends it")
	default:
		event.AnErr("err", refused).Msg("a session keeps the applier waiting for a lock and is not terminated by koldproxy; end its transaction")
	}
	return ended, nil
}
