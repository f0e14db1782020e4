package coldstore

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/RoaringBitmap/roaring/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// compactTables does the most useful compaction of each managed table, at most one of each, and says whether there was any. It looks at
// the segments of a table only if something that matters has changed since it found nothing to do.
func (s *Store) compactTables(ctx context.Context) (bool, error) {
	if s.cfg.NoCompaction {
		return false, nil
	}
	states, err := s.compactionStates(ctx)
	if err != nil {
		return false, fmt.Errorf("look for segments to compact: %w", err)
	}
	s.forgetSettled(func(oid uint32) bool { _, there := states[oid]; return there })
	worked := false
	var errs []error
	for oid, state := range states {
		if s.isSettled(chore{"compact", oid}, state) || !s.mayRetry(oid) {
			continue
		}
		did, err := s.Compact(ctx, oid)
		switch {
		case err != nil && ctx.Err() == nil:
			s.retryLater(oid) // a damaged segment is tried again now and then, not all the time
		case err == nil && !did:
			s.settle(chore{"compact", oid}, state)
		}
		worked, errs = worked || did, append(errs, err)
	}
	return worked, errors.Join(errs...)
}

// compactionState is what decides whether segments of a table are worth compacting: the generation, which every change of the manifest
// raises, the settings, and where deletes may be forgotten, how late it is.
type compactionState struct {
	generation int64
	settings   string
	period     int64
}

func (s *Store) compactionStates(ctx context.Context) (map[uint32]compactionState, error) {
	rows, err := s.pool.Query(ctx, `SELECT m.table_oid, m.generation, concat_ws(' ', m.state, m.max_rows_per_file, m.retention, m.tombstone_retention), m.tombstone_retention IS NOT NULL
		FROM koldstore.managed_table m`)
	if err != nil {
		return nil, err
	}
	var (
		states = map[uint32]compactionState{}
		oid    uint32
		state  compactionState
		aging  bool
	)
	_, err = pgx.ForEachRow(rows, []any{&oid, &state.generation, &state.settings, &aging}, func() error {
		state.period = 0
		if aging {
			state.period = s.period()
		}
		states[oid] = state
		return nil
	})
	return states, err
}

// Compact rewrites segments of a table, if that is worth it: neighbours become one segment, and rows that newer segments supersede
// are left out, as are tombstones that may be forgotten. Rows keep their seqs, except for those before such a tombstone. It does one such
// step and says whether there was one. It is for the leader; a flush may run at the same time.
//
// The protocol is that of a flush: a row in state in_progress before the first byte, put-if-absent, reading back, and one
// transaction that exchanges the segments. Rows that died while the file was written are marked as dead in it then. Readers of an older
// snapshot go on with the old objects, which stay for the grace.
func (s *Store) Compact(ctx context.Context, table uint32) (bool, error) {
	t, err := loadTable(ctx, s.pool, table, s.cfg.Now())
	if err != nil {
		var client *koldproxy.Error
		if errors.As(err, &client) { // not managed any more: its segments are on their way out
			return false, nil
		}
		return false, err
	}
	if t.state != "active" {
		return false, nil
	}
	segments, err := loadManifest(ctx, s.pool, "table_oid = $1 AND state = 'active'", table)
	if err != nil {
		return false, err
	}
	run := planCompaction(segments, t)
	if len(run) == 0 {
		return false, nil
	}
	ids := make([]uuid.UUID, len(run))
	for i := range run {
		ids[i] = run[i].id
	}
	if run, err = loadSegments(ctx, s.pool, "segment_id = ANY($1) AND state = 'active'", ids); err != nil {
		return false, err
	}
	if len(run) != len(ids) { // retention was faster
		return true, nil
	}
	begin := time.Now()
	c := &compaction{table: t, sources: run}
	if run[0].id == segments[0].id {
		if c.begins, err = s.planBeginning(ctx, c); err != nil {
			s.metrics.compactions.WithLabelValues(statusError).Inc()
			return false, fmt.Errorf("compact segments of %s: %w", t, err)
		}
	}
	if len(run) == 1 && !manyOf(run[0].deadCount, run[0].rows) && c.begins.forgotten == 0 {
		return false, nil // its deletes were all there was to gain
	}
	switch err := s.compact(ctx, c); {
	case errors.Is(err, errStale):
		s.metrics.conflicts.Inc()
		return true, nil // planned anew from what is there now
	case err != nil:
		s.metrics.compactions.WithLabelValues(statusError).Inc()
		return false, fmt.Errorf("compact segments of %s: %w", t, err)
	}
	s.metrics.compactions.WithLabelValues(statusOK).Inc()
	s.log.Info().Str("table", t.String()).Int("segments", len(run)).Int64("rows", c.sum.rows).Int64("bytes", c.segment.size).
		Int64("tombstones", c.begins.forgotten).Dur("took", time.Since(begin)).Msg("segments compacted")
	return true, nil
}

// compaction is one replacement of neighbouring segments.
type compaction struct {
	table   *managedTable
	sources []segmentRow
	begins  beginning // if the first source is the table's oldest segment
	segment *segmentRow
	sum     summary
	origin  []origin // of each row of the new file
}

// origin is where a row of a compacted file comes from: a source by its index, and a row of it.
type origin struct {
	source  int
	ordinal uint32
}

func (s *Store) compact(ctx context.Context, c *compaction) (err error) {
	c.segment = &segmentRow{id: uuid.New(), table: c.table.oid, storage: c.sources[0].storage, layout: c.sources[0].layout}
	c.segment.object = objectKey(c.table.oid, c.segment.id)
	s.noteWriting(c.segment.id, true)
	defer s.noteWriting(c.segment.id, false)
	_, err = s.pool.Exec(ctx, "INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key) VALUES ($1, $2, $3, $4)",
		c.segment.id, c.table.oid, c.segment.storage, c.segment.object)
	if err != nil {
		return fmt.Errorf("note segment: %w", err)
	}
	published := false
	defer func() {
		if !published {
			s.abandon(ctx, c.segment)
		}
	}()
	if err := s.cfg.step("compaction noted"); err != nil {
		return err
	}
	temp, err := s.tempFile()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, temp.Close()) }()
	if err := s.merge(ctx, c, temp); err != nil {
		return err
	}
	if c.sum.rows > 0 {
		if err := s.upload(ctx, c.segment, &c.sum, temp); err != nil {
			return err
		}
	}
	if err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return s.exchange(ctx, tx, c) }); err != nil {
		return err
	}
	published = c.sum.rows > 0
	return s.cfg.step("compaction published")
}

// merge writes the rows that count into one file. It holds a batch of rows and a row group in memory.
func (s *Store) merge(ctx context.Context, c *compaction, temp io.Writer) error {
	hash := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(temp, hash, countBytes{&c.segment.size}), 256<<10)
	var w *segmentWriter
	for i := range c.sources {
		source := &c.sources[i]
		f, err := s.segment(ctx, source)
		if err != nil {
			return unreadable(source.id, source.object, err)
		}
		if w == nil {
			l := *f.layout
			l.segment = c.segment.id.String()
			l.name = c.table.String()
			if w, err = newSegmentWriter(out, &l, rowGroupLimits{rows: s.cfg.RowGroupRows, bytes: s.cfg.RowGroupBytes}); err != nil {
				return err
			}
			defer w.stop()
		}
		if err := s.mergeSource(ctx, c, i, f, w); err != nil {
			return err
		}
	}
	var err error
	if c.sum, err = w.close(); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write segment %s: %w", c.segment.id, err)
	}
	c.segment.rows, c.segment.minSeq, c.segment.maxSeq, c.segment.sha256 = c.sum.rows, c.sum.minSeq, c.sum.maxSeq, hash.Sum(nil)
	return s.cfg.step("compaction encoded")
}

func (s *Store) mergeSource(ctx context.Context, c *compaction, i int, f *segmentFile, w *segmentWriter) error {
	source := &c.sources[i]
	dead, err := decodeDead(source.dead)
	if err != nil {
		return unreadable(source.id, source.object, fmt.Errorf("catalog: %w", err))
	}
	hashes, err := f.hashes(ctx)
	if err != nil {
		return unreadable(source.id, source.object, err)
	}
	live := liveSegment{segmentRow: *source, dead: dead.all()}
	for from := 0; from < len(f.seqs); from += batchRows {
		ordinals := live.live(from, min(from+batchRows, len(f.seqs)), batchRows, false)
		rows, err := s.readRows(ctx, source, ordinals, false)
		if err != nil {
			return err
		}
		for k := range rows {
			row := mirrorRow{Row: rows[k], hash: hashes[ordinals[k]]}
			if c.begins.forgets(row.Seq, row.Op) {
				continue
			}
			row.Seq = c.begins.place(row.Seq, w.summary.maxSeq)
			if err := w.add(&row); err != nil {
				return err
			}
			c.origin = append(c.origin, origin{i, ordinals[k]})
		}
		if err := s.cfg.step("compaction batch"); err != nil {
			return err
		}
	}
	return nil
}

// exchange is the transaction that puts the new segment in the place of its sources.
func (s *Store) exchange(ctx context.Context, tx pgx.Tx, c *compaction) error {
	if err := s.cfg.fence(ctx, tx); err != nil {
		return err
	}
	var generation int64
	err := tx.QueryRow(ctx, "SELECT generation FROM koldstore.managed_table WHERE table_oid = $1 FOR UPDATE", c.table.oid).Scan(&generation)
	if errors.Is(err, pgx.ErrNoRows) {
		return errStale
	}
	if err != nil {
		return fmt.Errorf("lock managed table: %w", err)
	}
	ids := make([]uuid.UUID, len(c.sources))
	for i := range c.sources {
		ids[i] = c.sources[i].id
	}
	now, err := loadSegments(ctx, tx, "segment_id = ANY($1) AND state = 'active'", ids)
	if err != nil {
		return err
	}
	if len(now) != len(ids) { // retention or another compaction took one
		return errStale
	}
	if err := s.cfg.step("compaction locked"); err != nil {
		return err
	}
	if c.sum.rows > 0 {
		died, err := c.diedMeanwhile(now)
		if err != nil {
			return err
		}
		p := publication{segment: c.segment, sum: &c.sum}
		if err := p.activate(ctx, tx); err != nil {
			return err
		}
		if !died.IsEmpty() {
			p.generation = generation
			if err := p.bury(ctx, tx, &deaths{segment: c.segment.id, ordinals: died}, s.cfg.Now(), s.cfg.Now()); err != nil {
				return err
			}
		}
	}
	if err := s.cfg.step("compaction activated"); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "UPDATE koldstore.segment SET state = 'deleted', ended_at = clock_timestamp(), key_hashes = NULL WHERE segment_id = ANY($1)", ids); err != nil {
		return fmt.Errorf("retire segments: %w", err)
	}
	// Whoever sees that a delete is gone also sees the floor above it.
	_, err = tx.Exec(ctx, "UPDATE koldstore.managed_table SET generation = generation + 1, floor = greatest(floor, $2) WHERE table_oid = $1", c.table.oid, c.begins.through)
	if err != nil {
		return fmt.Errorf("raise generation: %w", err)
	}
	return s.cfg.step("compaction retired")
}

// diedMeanwhile lists the rows of the new file that newer segments have superseded since it was begun.
func (c *compaction) diedMeanwhile(now []segmentRow) (*roaring.Bitmap, error) {
	dead := make([]*roaring.Bitmap, len(c.sources))
	for i := range c.sources {
		k := slices.IndexFunc(now, func(n segmentRow) bool { return n.id == c.sources[i].id })
		if now[k].deadVersion == c.sources[i].deadVersion {
			continue
		}
		d, err := decodeDead(now[k].dead)
		if err != nil {
			return nil, err
		}
		dead[i] = d.all()
	}
	died := roaring.New()
	for ordinal, o := range c.origin {
		if dead[o.source] != nil && dead[o.source].Contains(o.ordinal) {
			died.Add(uint32(ordinal))
		}
	}
	return died, nil
}
