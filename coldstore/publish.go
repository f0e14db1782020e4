package coldstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// errGenerationMoved says that the manifest changed between looking for superseded rows and publishing.
var errGenerationMoved = errors.New("the manifest has changed meanwhile")

const (
	// publishAttempts is how often publishing is tried while rows are locked or the manifest moves.
	publishAttempts = 20
	// politeAttempts of them do not wait for a row lock at all, so that the applier is never the one to lose a deadlock.
	politeAttempts = 15
	// lockWait bounds the wait of the other attempts; it is shorter than PostgreSQL's deadlock_timeout of one second.
	lockWait    = "800ms"
	publishWait = 20 * time.Millisecond
)

// publish makes a stored file count: one transaction, described at [Store.tryPublish].
func (s *Store) publish(ctx context.Context, t *managedTable, j *job, segment *segmentRow, sum *summary) error {
	p := publication{table: t, job: j, segment: segment, sum: sum}
	err := errGenerationMoved
	for attempt := 1; ; attempt++ {
		if errors.Is(err, errGenerationMoved) {
			if p.generation, p.dying, err = s.superseded(ctx, t, segment, sum.hashes); err != nil {
				return fmt.Errorf("publish segment %s: %w", segment.id, err)
			}
			if err := s.cfg.step("probed"); err != nil {
				return err
			}
		}
		p.polite = attempt <= politeAttempts
		err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return s.tryPublish(ctx, tx, &p) })
		if err == nil {
			j.rows += sum.rows
			j.segments++
			s.hashes.put(t.oid, segment.id, sum.hashes)
			return nil
		}
		if attempt == publishAttempts || !errors.Is(err, errGenerationMoved) && !isLockConflict(err) {
			return fmt.Errorf("publish segment %s: %w", segment.id, err)
		}
		select {
		case <-time.After(time.Duration(attempt) * publishWait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// isLockConflict says whether a transaction failed because of others and can simply be tried again.
func isLockConflict(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	switch pgErr.Code {
	case "55P03", "40P01", "40001": // lock_not_available, deadlock_detected, serialization_failure
		return true
	}
	return false
}

// publication is one attempt to publish.
type publication struct {
	table      *managedTable
	job        *job
	segment    *segmentRow
	sum        *summary
	generation int64 // that dying was found in
	dying      []deaths
	polite     bool
}

// tryPublish is the transaction that moves rows from the mirror to a segment. After it the segment is active, the rows that
// it supersedes in older segments are dead, and its own rows are gone from the mirror, except for those that have changed
// since: they have a new seq, stay, and hide the version in the file. Its order of locks is leadership, table, job, segments,
// mirror.
func (s *Store) tryPublish(ctx context.Context, tx pgx.Tx, p *publication) error {
	if err := s.cfg.fence(ctx, tx); err != nil {
		return err
	}
	if err := p.lockTable(ctx, tx); err != nil {
		return err
	}
	if err := s.cfg.step("locked"); err != nil {
		return err
	}
	if err := p.activate(ctx, tx); err != nil {
		return err
	}
	if err := s.cfg.step("activated"); err != nil {
		return err
	}
	now := s.cfg.Now()
	for i := range p.dying {
		if err := p.bury(ctx, tx, &p.dying[i], now, now.Add(-s.cfg.DeadHistory)); err != nil {
			return err
		}
	}
	if err := s.cfg.step("marked"); err != nil {
		return err
	}
	if err := p.prune(ctx, tx); err != nil {
		return err
	}
	return s.cfg.step("pruned")
}

// lockTable takes the table's row, which every change of the manifest takes, compares the generation and raises it.
func (p *publication) lockTable(ctx context.Context, tx pgx.Tx) error {
	var (
		mirror     uint32
		generation int64
		coldMax    koldproxy.Seq
	)
	err := tx.QueryRow(ctx, "SELECT mirror_oid, generation FROM koldstore.managed_table WHERE table_oid = $1 FOR UPDATE", p.table.oid).Scan(&mirror, &generation)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && mirror != p.table.mirrorOID {
		return noLongerManaged(p.table)
	}
	if err != nil {
		return fmt.Errorf("lock managed table: %w", err)
	}
	err = tx.QueryRow(ctx, "SELECT coalesce(max(max_seq), -1) FROM koldstore.segment WHERE table_oid = $1 AND state = 'active'", p.table.oid).Scan(&coldMax)
	if err != nil {
		return fmt.Errorf("read manifest: %w", err)
	}
	// Segments never overlap: a file that would was made from rows that another flush has published.
	if coldMax >= p.sum.minSeq {
		return errStale
	}
	if generation != p.generation {
		return errGenerationMoved
	}
	_, err = tx.Exec(ctx, "UPDATE koldstore.managed_table SET generation = generation + 1 WHERE table_oid = $1", p.table.oid)
	if err != nil {
		return fmt.Errorf("raise generation: %w", err)
	}
	tag, err := tx.Exec(ctx, `UPDATE koldstore.job SET progress = jsonb_build_object('rows_flushed', $3::bigint, 'segments', $4::bigint)
		WHERE job_id = $1 AND status = 'running' AND started_at = $2`, p.job.id, p.job.startedAt, p.job.rows+p.sum.rows, p.job.segments+1)
	if err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return errCancelled
	}
	return nil
}

// activate makes the segment readable.
func (p *publication) activate(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, `UPDATE koldstore.segment SET state = 'active', min_seq = $2, max_seq = $3, row_count = $4, tombstones = $5,
		size_bytes = $6, sha256 = $7, key_hashes = $8, layout = $9 WHERE segment_id = $1 AND state = 'in_progress'`,
		p.segment.id, p.sum.minSeq, p.sum.maxSeq, p.sum.rows, p.sum.tombstones, p.segment.size, p.segment.sha256, encodeHashes(p.sum.hashes), p.segment.layout)
	if err != nil {
		return fmt.Errorf("activate: %w", err)
	}
	if tag.RowsAffected() != 1 { // it was taken for a leftover and removed
		return errStale
	}
	return nil
}

// bury marks rows of an older segment as dead.
func (p *publication) bury(ctx context.Context, tx pgx.Tx, d *deaths, now, keepSince time.Time) error {
	dead, err := d.before.with(p.generation+1, d.ordinals, now, keepSince).encode()
	if err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, `UPDATE koldstore.segment SET dead = $2, dead_count = dead_count + $3, dead_version = dead_version + 1
		WHERE segment_id = $1 AND state = 'active' AND dead_version = $4`, d.segment, dead, int64(d.ordinals.GetCardinality()), d.version)
	if err != nil {
		return fmt.Errorf("mark dead rows: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return errGenerationMoved
	}
	return nil
}

// politeWait is how long polite attempts wait for a row: next to nothing. PostgreSQL takes milliseconds.
const politeWait = "5ms"

// prune deletes the flushed rows from the mirror: the range of seqs that the file holds. A seq belongs to one version of one row for
// ever, and the applier, which alone gives them out, gives every change a higher one than all before. So what the mirror has in that
// range now was there when the file was written, and is in it: a row that has changed meanwhile has left the range and stays. That
// nothing else is deleted does not rest on this reasoning: the server names every row, and one that is not in the file undoes everything.
func (p *publication) prune(ctx context.Context, tx pgx.Tx) error {
	wait := lockWait
	if p.polite {
		wait = politeWait
	}
	if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', $1, true)", wait); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	rows, err := tx.Query(ctx, fmt.Sprintf("DELETE FROM %s WHERE seq BETWEEN $1 AND $2 RETURNING seq", p.table.mirror), p.sum.minSeq, p.sum.maxSeq)
	if err != nil {
		return fmt.Errorf("delete mirror rows: %w", err)
	}
	var (
		seq     koldproxy.Seq
		foreign int64
	)
	_, err = pgx.ForEachRow(rows, []any{(*int64)(&seq)}, func() error {
		if _, flushed := slices.BinarySearch(p.sum.seqs, seq); !flushed {
			foreign++
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("delete mirror rows: %w", err)
	}
	if foreign > 0 {
		return fmt.Errorf("%w: the mirror of %s has %d rows from seq %d to %d that are not in the segment", errInvariant, p.table, foreign, p.sum.minSeq, p.sum.maxSeq)
	}
	return nil
}
