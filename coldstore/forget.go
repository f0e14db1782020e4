package coldstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// forgetDropped ends the feeds of tables that were dropped: what they had in cold storage is deleted, their mirrors go.
func (s *Store) forgetDropped(ctx context.Context) (bool, error) {
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid FROM koldstore.managed_table m
		WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.table_oid)`)
	if err != nil {
		return false, fmt.Errorf("look for dropped tables: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return false, fmt.Errorf("look for dropped tables: %w", err)
	}
	for _, oid := range tables {
		err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return s.forgetTable(ctx, tx, oid) })
		if isLockConflict(err) {
			continue // somebody still reads the mirror; the next look finds it again
		}
		if err != nil {
			return false, fmt.Errorf("forget dropped table %d: %w", oid, err)
		}
		s.log.Info().Uint32("table", oid).Msg("feed of a dropped table ended")
	}
	return false, nil
}

func (s *Store) forgetTable(ctx context.Context, tx pgx.Tx, oid uint32) error {
	if err := s.cfg.fence(ctx, tx); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', $1, true)", lockWait); err != nil {
		return err
	}
	var mirror *string
	err := tx.QueryRow(ctx, `SELECT (SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
			WHERE c.oid = m.mirror_oid)
		FROM koldstore.managed_table m WHERE m.table_oid = $1 FOR UPDATE`, oid).Scan(&mirror)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	if mirror != nil {
		if _, err := tx.Exec(ctx, "DROP TABLE "+*mirror); err != nil {
			return err
		}
	}
	for _, sql := range []string{
		"UPDATE koldstore.segment SET state = 'deleted', ended_at = clock_timestamp(), key_hashes = NULL WHERE table_oid = $1 AND state IN ('active', 'detached')",
		"UPDATE koldstore.job SET status = 'cancelled', ended_at = clock_timestamp() WHERE table_oid = $1 AND status IN ('queued', 'running')",
		"DELETE FROM koldstore.managed_table WHERE table_oid = $1",
	} {
		if _, err := tx.Exec(ctx, sql, oid); err != nil {
			return err
		}
	}
	_, err = tx.Exec(ctx, "SELECT koldstore.unpublish($1)", oid)
	return err
}

// forgetRows is how many deletes one transaction forgets.
const forgetRows = 10_000

// forgetTombstones removes old deletes from mirrors of tables that have no segments; where there are segments, a delete in the mirror
// hides rows of them, and goes by way of a flush and a compaction. So do deletes that rows are in front of: a compaction can move those, see
// beginning.
func (s *Store) forgetTombstones(ctx context.Context) (bool, error) {
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid, m.tombstone_retention::text FROM koldstore.managed_table m WHERE m.tombstone_retention IS NOT NULL AND m.state = 'active'
		AND NOT EXISTS (SELECT FROM koldstore.segment g WHERE g.table_oid = m.table_oid AND g.state IN ('active', 'in_progress'))`)
	if err != nil {
		return false, fmt.Errorf("look for old deletes: %w", err)
	}
	type setting struct {
		Table     uint32
		Retention string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[setting])
	if err != nil {
		return false, fmt.Errorf("look for old deletes: %w", err)
	}
	worked, period := false, s.period()
	for _, t := range tables {
		oid, state := t.Table, [2]any{t.Retention, period}
		if s.isSettled(chore{"forget deletes", oid}, state) {
			continue
		}
		var n int64
		err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
			n, err = s.forgetTombstonesOf(ctx, tx, oid)
			return err
		})
		if err != nil && !isLockConflict(err) {
			return worked, fmt.Errorf("forget old deletes of table %d: %w", oid, err)
		}
		worked = worked || n == forgetRows
		if err == nil && n < forgetRows {
			s.settle(chore{"forget deletes", oid}, state)
		}
	}
	return worked, nil
}

// forgetTombstonesOf removes a bounded number of the oldest deletes and raises the floor over them, in one transaction.
func (s *Store) forgetTombstonesOf(ctx context.Context, tx pgx.Tx, oid uint32) (int64, error) {
	if err := s.cfg.fence(ctx, tx); err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', $1, true)", lockWait); err != nil {
		return 0, err
	}
	t, err := loadTable(ctx, tx, oid, s.cfg.Now())
	if err != nil || t.forgetBelow == nil {
		return 0, err
	}
	var free bool // the lock keeps flushes from publishing; what one has published before shows here
	err = tx.QueryRow(ctx, `WITH locked AS (SELECT FROM koldstore.managed_table WHERE table_oid = $1 FOR UPDATE)
		SELECT count(*) = 1 FROM locked`, oid).Scan(&free)
	if err == nil && free {
		err = tx.QueryRow(ctx, "SELECT NOT EXISTS (SELECT FROM koldstore.segment WHERE table_oid = $1 AND state = 'active')", oid).Scan(&free)
	}
	if err != nil || !free {
		return 0, err
	}
	var (
		n       int64
		highest koldproxy.Seq
	)
	err = tx.QueryRow(ctx, fmt.Sprintf(`WITH gone AS (DELETE FROM %[1]s WHERE seq IN (
			SELECT seq FROM %[1]s WHERE op = 3 AND seq < $1 AND seq < coalesce((SELECT min(seq) FROM %[1]s WHERE op <> 3), $1) ORDER BY seq LIMIT $2 FOR UPDATE) RETURNING seq)
		SELECT count(*), coalesce(max(seq), 0) FROM gone`, t.mirror), *t.forgetBelow, forgetRows).Scan(&n, &highest)
	if err != nil || n == 0 {
		return n, err
	}
	_, err = tx.Exec(ctx, "UPDATE koldstore.managed_table SET floor = greatest(floor, $2) WHERE table_oid = $1", oid, highest)
	return n, err
}
