package walapply

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Anybody may lock the log of a stream (LOCK TABLE asks for no more than a privilege that everybody has), and a session that
// is forgotten in the middle of a transaction can do so for ever. Applying must not wait for ever, since everything behind
// the apply transaction waits with it.

// blockersSQL lists who keeps a backend from a lock on a relation that belongs to our role, or on a row of one. A row's lock
// is waited for as that of a transaction; the relation shows in the tuple lock that the waiter holds meanwhile.
const blockersSQL = `SELECT DISTINCT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), c.relname::text
	FROM pg_locks w
	LEFT JOIN pg_locks t ON w.locktype = 'transactionid' AND t.pid = w.pid AND t.locktype = 'tuple'
	JOIN pg_class c ON c.oid = coalesce(w.relation, t.relation)
	JOIN pg_roles r ON r.oid = c.relowner AND r.rolname = current_user
	CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b(pid)
	JOIN pg_stat_activity a ON a.pid = b.pid
	WHERE w.pid = $1 AND NOT w.granted`

type blocker struct {
	pid                         int32
	user, application, relation string
}

// lockWatch ends sessions that have kept the apply session waiting for longer than LockWait.
type lockWatch struct {
	*session
	conn  *pgx.Conn // nil until it is needed
	since map[int32]time.Time
}

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
	now, since := time.Now(), make(map[int32]time.Time)
	blockers, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b blocker, err error) {
		err = row.Scan(&b.pid, &b.user, &b.application, &b.relation)
		return b, err
	})
	if err != nil {
		return fmt.Errorf("list blocking sessions: %w", err)
	}
	for _, b := range blockers {
		first, known := w.since[b.pid]
		if !known {
			first = now
		}
		since[b.pid] = first
		if now.Sub(first) < w.a.cfg.LockWait {
			continue
		}
		delete(since, b.pid)
		var done bool
		if err := w.conn.QueryRow(ctx, `SELECT pg_terminate_backend($1)`, b.pid).Scan(&done); err != nil {
			return fmt.Errorf("terminate a session that keeps the applier waiting: %w", err)
		}
		if done {
			w.a.metrics.terminated.Inc()
			w.a.log.Warn().Int32("pid", b.pid).Str("user", b.user).Str("application", b.application).Str("relation", b.relation).
				Msg("terminated a session that kept the applier waiting for a lock")
		}
	}
	w.since = since
	return nil
}
