package coldstore

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// maxRestarts is how often a flush begins again after another one overtook it.
const maxRestarts = 3

// flush carries out a job and says how it ended: completed or not_due.
func (s *Store) flush(ctx context.Context, j *job) (string, error) {
	if err := s.cfg.step("claimed"); err != nil {
		return "", err
	}
	for restart := 0; ; restart++ {
		status, err := s.flushTable(ctx, j)
		if !errors.Is(err, errStale) || restart == maxRestarts {
			return status, err
		}
		s.metrics.conflicts.Inc()
		s.log.Info().Str("job", j.id.String()).Uint32("table", j.table).Msg("flush was overtaken and begins again")
	}
}

func (s *Store) flushTable(ctx context.Context, j *job) (string, error) {
	t, err := loadTable(ctx, s.pool, j.table, s.cfg.Now())
	if err != nil {
		return "", err
	}
	if t.state != "active" {
		return "", koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "table %s cannot be flushed: its change feed is %s", t, t.state).WithDetail(t.reason)
	}
	after, err := coldEnd(ctx, s.pool, t)
	if err != nil {
		return "", err
	}
	through, err := planFlush(ctx, s.pool, t, j.force)
	if err != nil {
		return "", err
	}
	if err := s.cfg.step("planned"); err != nil {
		return "", err
	}
	if through < 0 && !j.force && j.rows == 0 {
		return jobNotDue, nil
	}
	for more := through >= 0; more; {
		if after, more, err = s.flushFile(ctx, t, j, after, through); err != nil {
			return "", err
		}
	}
	return jobCompleted, nil
}

// coldEnd is the highest seq in cold storage, -1 if there is none. Every row of the mirror is above it; a flush begins there, so that it
// does not go over the places of all rows again that flushes have removed from the mirror before.
func coldEnd(ctx context.Context, q querier, t *managedTable) (koldproxy.Seq, error) {
	var (
		end  koldproxy.Seq
		left bool
	)
	// In one statement, since a flush may publish between two.
	err := q.QueryRow(ctx, fmt.Sprintf(`WITH cold AS (SELECT coalesce(max(max_seq), -1) AS "end" FROM koldstore.segment WHERE table_oid = $1 AND state = 'active')
		SELECT cold."end", EXISTS (SELECT FROM %s WHERE seq <= cold."end") FROM cold`, t.mirror), t.oid).Scan(&end, &left)
	if err != nil {
		return -1, fmt.Errorf("plan flush of %s: %w", t, err)
	}
	if left {
		return -1, fmt.Errorf("%w: the mirror of %s has rows up to seq %d, where cold storage ends", errInvariant, t, end)
	}
	return end, nil
}

// planFlush chooses the seq up to which the mirror is to be flushed; -1 means nothing. Rows that change meanwhile get higher
// seqs, so a flush ends however busy the table is.
func planFlush(ctx context.Context, q querier, t *managedTable, force bool) (koldproxy.Seq, error) {
	through := koldproxy.Seq(-1)
	if force {
		err := q.QueryRow(ctx, fmt.Sprintf("SELECT coalesce(max(seq), -1) FROM %s", t.mirror)).Scan(&through)
		if err != nil {
			return -1, fmt.Errorf("plan flush of %s: %w", t, err)
		}
		return through, nil
	}
	var excess int64
	if t.hotRowLimit != nil {
		if err := q.QueryRow(ctx, fmt.Sprintf("SELECT count(*) - $1 FROM %s", t.mirror), *t.hotRowLimit).Scan(&excess); err != nil {
			return -1, fmt.Errorf("plan flush of %s: %w", t, err)
		}
	}
	if t.moveBelow != nil {
		var old int64
		if err := q.QueryRow(ctx, fmt.Sprintf("SELECT count(*) FROM %s WHERE seq < $1", t.mirror), *t.moveBelow).Scan(&old); err != nil {
			return -1, fmt.Errorf("plan flush of %s: %w", t, err)
		}
		excess = max(excess, old)
	}
	n := dueRows(excess, t.minFlush, t.maxPerFile)
	if n == 0 {
		return -1, nil
	}
	err := q.QueryRow(ctx, fmt.Sprintf("SELECT seq FROM %s ORDER BY seq OFFSET $1 LIMIT 1", t.mirror), n-1).Scan(&through)
	if errors.Is(err, pgx.ErrNoRows) { // the applier was at work between the two statements
		return planFlush(ctx, q, t, true)
	}
	if err != nil {
		return -1, fmt.Errorf("plan flush of %s: %w", t, err)
	}
	return through, nil
}

// flushFile moves the oldest rows above a seq into one file and publishes it. It returns the last seq of the file, and whether rows up to
// through are left.
func (s *Store) flushFile(ctx context.Context, t *managedTable, j *job, after, through koldproxy.Seq) (last koldproxy.Seq, more bool, err error) {
	begin := time.Now()
	segment := &segmentRow{id: uuid.New(), table: t.oid, storage: t.storage}
	segment.object = objectKey(t.oid, segment.id)
	s.noteWriting(segment.id, true)
	defer s.noteWriting(segment.id, false)
	// Known to the catalog before the first byte exists anywhere: what a crash leaves is found from here, not by listing.
	_, err = s.pool.Exec(ctx, "INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, job_id) VALUES ($1, $2, $3, $4, $5)",
		segment.id, t.oid, segment.storage, segment.object, j.id)
	if err != nil {
		return after, false, fmt.Errorf("note segment: %w", err)
	}
	published := false
	defer func() {
		if !published {
			s.abandon(ctx, segment)
		}
	}()
	if err := s.cfg.step("noted"); err != nil {
		return after, false, err
	}
	temp, err := s.tempFile()
	if err != nil {
		return after, false, err
	}
	defer func() { err = errors.Join(err, temp.Close()) }()
	sum, more, err := s.encode(ctx, t, segment, after, through, temp)
	if err != nil || sum.rows == 0 {
		return after, false, err
	}
	if err := s.upload(ctx, segment, &sum, temp); err != nil {
		return after, false, err
	}
	if err := s.publish(ctx, t, j, segment, &sum); err != nil {
		return after, false, err
	}
	published = true
	s.metrics.segments.Inc()
	s.metrics.rowsFlushed.Add(float64(sum.rows))
	s.metrics.bytesWritten.Add(float64(segment.size))
	s.log.Info().Str("table", t.String()).Str("segment", segment.id.String()).Int64("rows", sum.rows).Int64("bytes", segment.size).
		Int64("min_seq", int64(sum.minSeq)).Int64("max_seq", int64(sum.maxSeq)).Dur("took", time.Since(begin)).Msg("segment published")
	return sum.maxSeq, more, s.cfg.step("published")
}

// maxFileRows bounds what is kept in memory for each row of a file (seq and hash), whatever max_rows_per_file says.
const maxFileRows = 1 << 20

// encode writes the oldest rows of the mirror above a seq to temp, under one snapshot, and fills in the segment's size and checksum.
func (s *Store) encode(ctx context.Context, t *managedTable, segment *segmentRow, after, through koldproxy.Seq, temp io.Writer) (sum summary, more bool, err error) {
	hash := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(temp, hash, countBytes{&segment.size}), 256<<10)
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, pinSettings); err != nil {
			return fmt.Errorf("pin settings: %w", err)
		}
		shape, err := loadShape(ctx, tx, t)
		if err != nil {
			return err
		}
		l := layout{table: t.oid, name: t.String(), segment: segment.id.String(), columns: shape.columns, key: shape.key}
		if segment.layout, err = l.fingerprint(); err != nil {
			return err
		}
		w, err := newSegmentWriter(out, &l,
			rowGroupLimits{rows: s.cfg.RowGroupRows, bytes: s.cfg.RowGroupBytes})
		if err != nil {
			return err
		}
		defer w.stop()
		most := min(t.maxPerFile, maxFileRows)
		err = shape.read(ctx, tx, after, through, most+1, func(row *mirrorRow) (bool, error) {
			if w.full(most, s.cfg.MaxFileBytes) {
				more = true // this row begins the next file
				return true, nil
			}
			if err := s.cfg.step("row"); err != nil {
				return false, err
			}
			return false, w.add(row)
		})
		if err != nil {
			return err
		}
		sum, err = w.close()
		return err
	})
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return summary{}, false, fmt.Errorf("encode segment %s: %w", segment.id, err)
	}
	segment.rows, segment.minSeq, segment.maxSeq, segment.sha256 = sum.rows, sum.minSeq, sum.maxSeq, hash.Sum(nil)
	return sum, more, s.cfg.step("encoded")
}

type countBytes struct{ n *int64 }

func (c countBytes) Write(p []byte) (int, error) {
	*c.n += int64(len(p))
	return len(p), nil
}

// upload stores the file and reads it back: only what the bucket really holds is published, whatever the bucket has answered.
func (s *Store) upload(ctx context.Context, segment *segmentRow, sum *summary, temp io.ReadSeeker) error {
	if _, err := temp.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("temporary file: %w", err)
	}
	bucket, err := s.bucketOf(ctx, segment.storage)
	if err != nil {
		return fmt.Errorf("store segment %s: %w", segment.id, err)
	}
	segment.tried = true
	err = bucket.PutIfAbsent(ctx, segment.object, temp, segment.size)
	// The key is fresh, so a taken one is our own object, stored by an attempt whose answer was lost. Reading back decides.
	if err != nil && !errors.Is(err, fs.ErrExist) {
		segment.tried = !errors.Is(err, ErrNotStored)
		return fmt.Errorf("store segment %s: %w", segment.id, err)
	}
	if err := s.cfg.step("stored"); err != nil {
		return err
	}
	f, err := s.segment(ctx, segment)
	if err != nil && !IsCorrupt(err) && ctx.Err() == nil { // a fault on the way is no reason to write everything again
		f, err = s.segment(ctx, segment)
	}
	if err != nil {
		return fmt.Errorf("read back segment %s: %w", segment.id, err)
	}
	if int64(len(f.seqs)) != sum.rows {
		return fmt.Errorf("read back segment %s: %d rows instead of %d", segment.id, len(f.seqs), sum.rows)
	}
	return s.cfg.step("read back")
}

// cleanupTimeout bounds what is still done after a failure or a cancellation.
const cleanupTimeout = 5 * time.Second

// abandon gives a segment up that did not become active; the sweep removes its object, if there can be one. If the publishing transaction
// did commit after all (its answer may have been lost), this changes nothing.
func (s *Store) abandon(ctx context.Context, segment *segmentRow) {
	s.opened.drop(segment.id)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	sql := abandonSegments + " AND segment_id = $1"
	if !segment.tried { // nothing to remove, maybe from a storage that cannot even be opened
		sql = "DELETE FROM koldstore.segment WHERE state = 'in_progress' AND segment_id = $1"
	}
	if _, err := s.pool.Exec(ctx, sql, segment.id); err != nil {
		s.log.Warn().Err(err).Str("segment", segment.id.String()).Msg("segment could not be given up; the sweep will")
	}
}

// abandonSegments turns segments that are not published into deleted ones, which the sweep knows how to remove. From then on
// a publisher that comes too late finds no segment to publish.
const abandonSegments = `UPDATE koldstore.segment SET state = 'deleted', min_seq = 0, max_seq = 0, sha256 = '', ended_at = clock_timestamp()
	WHERE state = 'in_progress'`

func (s *Store) noteWriting(id uuid.UUID, writing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if writing {
		s.writing[id] = true
	} else {
		delete(s.writing, id)
	}
}
