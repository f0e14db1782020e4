package coldstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// PostgreSQL gives the space that flushed rows have left to new ones, and hardly ever back: the indexes stay as large as they were, and so
// does the table while there is a row at its end. After a first flush of many rows that is as much as their files take.

const (
	// shrinkBytes is how large a mirror's indexes are at least before it is worth a look, and shrinkPerRow how many bytes of them for each
	// row are several times what they need.
	shrinkBytes, shrinkPerRow = 4 << 20, 400
	// shrinkRows bounds how many rows are written anew: nobody else can use the mirror for so long, about a second.
	shrinkRows = 200_000
	// shrinkTimeout is when that is given up, and shrinkWait how long it waits, and lets others wait, for those who use the mirror.
	shrinkTimeout, shrinkWait = "5s", "100ms"
)

// shrinkMirrors writes mirrors anew of which flushes have left little but holes, once those have been vacuumed.
func (s *Store) shrinkMirrors(ctx context.Context) (bool, error) {
	if !s.due(&s.shrinkAt) {
		return false, nil
	}
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid FROM koldstore.managed_table m
		WHERE m.state = 'active' AND m.generation > 0 AND pg_catalog.pg_indexes_size(m.mirror_oid) > $1`, shrinkBytes)
	if err != nil {
		return false, fmt.Errorf("look for mirrors to shrink: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return false, fmt.Errorf("look for mirrors to shrink: %w", err)
	}
	var errs []error
	for _, oid := range tables {
		t, err := loadTable(ctx, s.pool, oid, s.cfg.Now())
		if err != nil || s.isSettled(chore{"shrink", oid}, t.generation) {
			continue // it went away, or there has been no flush since
		}
		var done bool
		err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
			done, err = s.shrinkMirror(ctx, tx, t)
			return err
		})
		switch {
		case err == nil && done:
			s.settle(chore{"shrink", oid}, t.generation)
			s.log.Info().Str("table", t.String()).Msg("mirror was written anew without the space of flushed rows")
		case isTimeout(err) && ctx.Err() == nil:
			s.settle(chore{"shrink", oid}, t.generation) // after the next flush there may be less
			s.log.Warn().Str("table", t.String()).Msg("mirror keeps the space of flushed rows: writing it anew takes too long")
		case err != nil && !isLockConflict(err):
			errs = append(errs, fmt.Errorf("shrink the mirror of %s: %w", t, err))
		}
	}
	return false, errors.Join(errs...)
}

// isTimeout says whether PostgreSQL ended a statement because of its timeout, or somebody's cancel.
func isTimeout(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "57014" // query_canceled
}

// shrinkMirror is the transaction that writes a mirror anew, in the order of seq, if that is worth it and does not take long. Readers with an
// older snapshot see in it what they saw before.
func (s *Store) shrinkMirror(ctx context.Context, tx pgx.Tx, t *managedTable) (bool, error) {
	if err := s.cfg.fence(ctx, tx); err != nil {
		return false, err
	}
	if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true)", shrinkWait, shrinkTimeout); err != nil {
		return false, err
	}
	var (
		bytes, dead int64
		index       string
	)
	err := tx.QueryRow(ctx, `SELECT pg_catalog.pg_indexes_size($1), pg_catalog.pg_stat_get_dead_tuples($1), c.relname::text
		FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attname = 'seq'
		WHERE i.indrelid = $1 AND i.indkey::text = a.attnum::text AND i.indisunique AND i.indisvalid LIMIT 1`, t.mirrorOID).Scan(&bytes, &dead, &index)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	most := min(bytes/shrinkPerRow, shrinkRows)
	if bytes <= shrinkBytes || dead > most { // what is not vacuumed yet would have to be gone through
		return false, nil
	}
	// Every row is above what is in cold storage; below are the places of the rows that were.
	var few bool
	err = tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) <= $2 FROM (SELECT FROM %s
		WHERE seq > (SELECT coalesce(max(max_seq), -1) FROM koldstore.segment WHERE table_oid = $1 AND state = 'active') LIMIT $2 + 1) r`, t.mirror), t.oid, most).Scan(&few)
	if err != nil || !few {
		return false, err
	}
	if err := s.cfg.step("shrink"); err != nil {
		return false, err
	}
	_, err = tx.Exec(ctx, "CLUSTER "+t.mirror+" USING "+quoteName(index))
	return err == nil, err
}
