package coldstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// dropExpired drops the segments whose newest change is older than their table's retention, and the oldest ones while all of a table
// are larger than it allows. Segments do not overlap, so the order of their seqs is that of their ages.
func (s *Store) dropExpired(ctx context.Context) (bool, error) {
	tooMuch, err := s.dropOverfull(ctx)
	if err != nil {
		return tooMuch, err
	}
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid, `+millisBefore("m.retention")+` FROM koldstore.managed_table m WHERE m.retention IS NOT NULL`, s.cfg.Now())
	if err != nil {
		return false, fmt.Errorf("look for expired segments: %w", err)
	}
	type limit struct {
		table uint32
		below koldproxy.Seq
	}
	limits, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (limit, error) {
		var (
			l      limit
			millis int64
		)
		err := row.Scan(&l.table, &millis)
		l.below = koldproxy.SeqAt(time.UnixMilli(millis))
		return l, err
	})
	if err != nil {
		return false, fmt.Errorf("look for expired segments: %w", err)
	}
	dropped := tooMuch
	for _, l := range limits {
		var expired bool
		err := s.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM koldstore.segment WHERE table_oid = $1 AND state = 'active' AND max_seq < $2)", l.table, l.below).
			Scan(&expired)
		if err != nil {
			return dropped, fmt.Errorf("look for expired segments: %w", err)
		}
		if !expired {
			continue
		}
		if err := s.drop(ctx, l.table, l.below); err != nil {
			return dropped, fmt.Errorf("drop expired segments of table %d: %w", l.table, err)
		}
		dropped = true
	}
	return dropped, nil
}

// dropOverfull keeps the newest segments that fit into retention_bytes together.
func (s *Store) dropOverfull(ctx context.Context) (bool, error) {
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid, max(g.max_seq) + 1
		FROM koldstore.managed_table m
		JOIN (SELECT a.table_oid, a.max_seq, sum(a.size_bytes) OVER (PARTITION BY a.table_oid ORDER BY a.min_seq DESC) AS with_newer
			FROM koldstore.segment a WHERE a.state = 'active' AND a.table_oid IN (SELECT l.table_oid FROM koldstore.managed_table l WHERE l.retention_bytes IS NOT NULL)) g ON g.table_oid = m.table_oid AND g.with_newer > m.retention_bytes
		GROUP BY m.table_oid`)
	if err != nil {
		return false, fmt.Errorf("look for tables with too many bytes: %w", err)
	}
	below := map[uint32]koldproxy.Seq{}
	var table uint32
	var seq koldproxy.Seq
	if _, err := pgx.ForEachRow(rows, []any{&table, &seq}, func() error { below[table] = seq; return nil }); err != nil {
		return false, fmt.Errorf("look for tables with too many bytes: %w", err)
	}
	for table, seq := range below {
		if err := s.drop(ctx, table, seq); err != nil {
			return false, fmt.Errorf("drop the oldest segments of table %d: %w", table, err)
		}
	}
	return len(below) > 0, nil
}

// drop removes the active segments that end below a position from the manifest and raises the floor, in one transaction:
// whoever sees that they are gone also sees the floor.
func (s *Store) drop(ctx context.Context, table uint32, below koldproxy.Seq) error {
	var (
		segments int64
		floor    koldproxy.Seq
	)
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.cfg.fence(ctx, tx); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, "SELECT floor FROM koldstore.managed_table WHERE table_oid = $1 FOR UPDATE", table).Scan(&floor)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // unmanaged meanwhile
		}
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, `
			WITH dropped AS (
				UPDATE koldstore.segment SET state = 'deleted', ended_at = clock_timestamp(), key_hashes = NULL
				WHERE table_oid = $1 AND state = 'active' AND max_seq < $2 RETURNING max_seq)
			SELECT count(*), coalesce(max(max_seq), 0) FROM dropped`, table, below).Scan(&segments, &floor)
		if err != nil || segments == 0 {
			return err
		}
		if err := s.cfg.step("dropped"); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `UPDATE koldstore.managed_table SET floor = greatest(floor, $2), generation = generation + 1
			WHERE table_oid = $1 RETURNING floor`, table, floor).Scan(&floor)
	})
	if err != nil {
		return err
	}
	if segments > 0 {
		s.metrics.dropped.Add(float64(segments))
		s.log.Info().Uint32("table", table).Int64("segments", segments).Int64("floor", int64(floor)).Msg("retention dropped segments")
	}
	return nil
}

// sweepBatch is how many objects one call removes.
const sweepBatch = 100

// sweep gives up segments that never became active, and removes the objects of deleted segments after the grace. Rows go
// after their objects, so an interruption is made up for by the next call.
func (s *Store) sweep(ctx context.Context) (bool, error) {
	s.mu.Lock()
	here := make([]uuid.UUID, 0, len(s.writing))
	for id := range s.writing {
		here = append(here, id)
	}
	s.mu.Unlock()
	tag, err := s.pool.Exec(ctx, abandonSegments+" AND created_at < clock_timestamp() - $1::interval AND segment_id <> ALL($2)", s.cfg.InProgressTimeout, here)
	if err != nil {
		return false, fmt.Errorf("give up old segments: %w", err)
	}
	if n := tag.RowsAffected(); n > 0 {
		s.log.Info().Int64("segments", n).Msg("segments that were never published are given up")
	}
	segments, err := loadManifest(ctx, s.pool, `segment_id IN (SELECT segment_id FROM koldstore.segment WHERE state = 'deleted'
		AND ended_at <= clock_timestamp() - $1::interval AND created_at > `+anotherHistory+` AND ($3::text[] IS NULL OR storage = ANY ($3))
		ORDER BY random() LIMIT $2)`, s.cfg.DeleteGrace, sweepBatch, s.presence.alone(s.cfg.Now(), s.cfg.DeleteGrace))
	if err != nil {
		return false, err
	}
	var errs []error
	failed := map[string]bool{}
	for i := range segments {
		if failed[segments[i].storage] {
			continue // one complaint about a storage that cannot be reached is enough
		}
		if err := s.remove(ctx, &segments[i]); err != nil {
			failed[segments[i].storage] = true
			errs = append(errs, err)
		}
	}
	err = errors.Join(errs...)
	return err == nil && len(segments) == sweepBatch, err
}

// anotherHistory is SQL for the time since when the database's history is its own. A server that was restored, or promoted beside one that
// lives on, has the catalog of the other, and often its bucket as well: what was there when they parted may be what the other reads, so its
// objects are not removed any more. The words are those of the gap that walapply notices in such a server.
const anotherHistory = `coalesce((SELECT max(noticed_at) FROM koldstore.gap WHERE table_oid IS NULL AND reason LIKE 'the checkpoint belongs to %'), '-infinity')`

func (s *Store) remove(ctx context.Context, segment *segmentRow) error {
	if err := s.cfg.step("sweep"); err != nil {
		return err
	}
	bucket, err := s.bucketOf(ctx, segment.storage)
	if err == nil {
		err = bucket.Delete(ctx, segment.object)
	}
	if err != nil {
		return fmt.Errorf("remove object of segment %s: %w", segment.id, err)
	}
	if _, err := s.pool.Exec(ctx, "DELETE FROM koldstore.segment WHERE segment_id = $1 AND state = 'deleted'", segment.id); err != nil {
		return fmt.Errorf("forget segment %s: %w", segment.id, err)
	}
	s.opened.drop(segment.id)
	s.metrics.deleted.Inc()
	return nil
}
