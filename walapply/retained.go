package walapply

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// The server keeps the write-ahead log from the slot's restart_lsn on, however much that is. Whoever watches the slot can only
// warn, or let go of it before the disk is full: a full disk stops the database, a gap stops nobody.

// retainedWatch measures what the slot holds back, on a connection of its own: the apply session may be busy with the very
// transaction that keeps the log.
type retainedWatch struct {
	a      *Applier
	warned time.Time
}

// run watches until ctx ends. It returns an error when the slot was given up, and the session that reads it has to end.
func (w *retainedWatch) run(ctx context.Context, slot string) error {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			closeConn(ctx, conn)
		}
	}()
	for sleep(ctx, w.a.cfg.WatchInterval) {
		var err error
		if conn == nil {
			if conn, err = w.a.connect(ctx, "watch", nil); err != nil {
				conn = nil
				continue // the session itself will notice
			}
		}
		if err = w.look(ctx, conn, slot); err != nil {
			var setup *SetupError
			if errors.As(err, &setup) {
				return err
			}
			closeConn(ctx, conn)
			conn = nil
		}
	}
	return nil
}

func (w *retainedWatch) look(ctx context.Context, conn *pgx.Conn, slot string) error {
	var retained int64
	err := conn.QueryRow(ctx, `SELECT coalesce((SELECT (pg_current_wal_insert_lsn() - restart_lsn)::bigint FROM pg_replication_slots
		WHERE slot_name = $1 AND database = current_database()), 0)`, slot).Scan(&retained)
	if err != nil {
		return fmt.Errorf("measure the retained log: %w", err)
	}
	w.a.metrics.retained.Set(float64(retained))
	w.a.update(func(s *Status) { s.RetainedBytes = retained })
	switch {
	case w.a.cfg.MaxRetainedBytes > 0 && retained > w.a.cfg.MaxRetainedBytes:
		err := gap("replication slot %s was given up: it held back %d MiB of write-ahead log, and %d are allowed (apply.max_retained_mib)",
			slot, retained>>20, w.a.cfg.MaxRetainedBytes>>20)
		err.abandon = true
		return err
	case w.a.cfg.WarnRetainedBytes > 0 && retained > w.a.cfg.WarnRetainedBytes && time.Since(w.warned) > logAgain:
		w.warned = time.Now()
		w.a.log.Warn().Str("slot", slot).Int64("bytes", retained).Msg("the replication slot holds back a lot of write-ahead log")
	}
	return nil
}
