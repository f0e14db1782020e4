package coldstore

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// Report is the outcome of [Store.Verify].
type Report struct {
	OK       bool      `json:"ok"`
	Segments int       `json:"segments"`
	Rows     int64     `json:"rows"` // read and compared
	Problems []Problem `json:"problems"`
}

// Problem is one thing that is wrong. Segment is empty for what concerns the table as a whole.
type Problem struct {
	Segment string `json:"segment,omitempty"`
	Object  string `json:"object,omitempty"`
	Problem string `json:"problem"`
}

// Verify reads every object of a table again, cached or not, and compares files, catalog and mirror with each other: checksums,
// counts, order, hashes, dead rows, that segments do not overlap and that no live key is in two of them. Damage is in the
// report; the error is for what could not be checked at all.
func (s *Store) Verify(ctx context.Context, table uint32) (Report, error) {
	report := Report{Problems: []Problem{}}
	var (
		t        *managedTable
		segments []segmentRow
		hashes   [][]byte
		lowest   koldproxy.Seq // of the mirror
	)
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var err error
		if t, err = loadTable(ctx, tx, table, s.cfg.Now()); err != nil {
			return err
		}
		if segments, err = loadSegments(ctx, tx, "table_oid = $1 AND state = 'active'", table); err != nil {
			return err
		}
		for i := range segments {
			var b []byte
			if err := tx.QueryRow(ctx, "SELECT key_hashes FROM koldstore.segment WHERE segment_id = $1", segments[i].id).Scan(&b); err != nil {
				return fmt.Errorf("read key hashes: %w", err)
			}
			hashes = append(hashes, b)
		}
		return tx.QueryRow(ctx, fmt.Sprintf("SELECT coalesce(min(seq), %d) FROM %s", int64(math.MaxInt64), t.mirror)).Scan(&lowest)
	})
	if err != nil {
		return Report{}, fmt.Errorf("verify table %d: %w", table, err)
	}
	report.Segments = len(segments)
	live := map[int64]string{} // hash of a live key to its segment; 64 bits do not collide by chance
	for i := range segments {
		segment := &segments[i]
		found := func(format string, args ...any) {
			report.Problems = append(report.Problems, Problem{segment.id.String(), segment.object, fmt.Sprintf(format, args...)})
		}
		if i > 0 && segment.minSeq <= segments[i-1].maxSeq {
			found("overlaps with segment %s", segments[i-1].id)
		}
		if err := s.verifySegment(ctx, segment, hashes[i], live, found); err != nil {
			return Report{}, err
		}
		report.Rows += segment.rows
	}
	if n := len(segments); n > 0 && lowest <= segments[n-1].maxSeq {
		report.Problems = append(report.Problems, Problem{Problem: fmt.Sprintf("the mirror has seq %d, which is not above the segments' %d", lowest, segments[n-1].maxSeq)})
	}
	report.OK = len(report.Problems) == 0
	return report, nil
}

func (s *Store) verifySegment(ctx context.Context, segment *segmentRow, hashes []byte, live map[int64]string, found func(string, ...any)) error {
	s.opened.drop(segment.id)
	f, err := s.segment(ctx, segment)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		found("%s", err)
		return nil
	}
	dead, err := decodeDead(segment.dead)
	if err != nil {
		found("dead rows: %s", err)
		return nil
	}
	bits := dead.all()
	if n := int64(bits.GetCardinality()); n != segment.deadCount {
		found("%d dead rows instead of %d", n, segment.deadCount)
	}
	if !bits.IsEmpty() && int64(bits.Maximum()) >= segment.rows {
		found("row %d is marked as dead and does not exist", bits.Maximum())
	}
	if int64(len(hashes)) != 8*segment.rows {
		found("key hashes of %d rows instead of %d", len(hashes)/8, segment.rows)
		return nil
	}
	stored, err := f.hashes(ctx)
	if err != nil {
		found("%s", err)
		return nil
	}
	for i, h := range stored {
		if h != int64(binary.BigEndian.Uint64(hashes[8*i:])) {
			found("the key hash of row %d differs from the catalog's", i)
			break
		}
	}
	all := liveSegment{segmentRow: *segment, dead: bits}
	tombstones := int64(0)
	for from := 0; from < len(f.seqs); from += batchRows {
		ordinals := all.live(from, min(from+batchRows, len(f.seqs)), batchRows, false)
		rows, err := s.readRows(ctx, segment, ordinals, false)
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			found("%s", explain(err))
			return nil
		}
		for i := range rows {
			if rows[i].Op == koldproxy.OpDelete {
				tombstones++
			}
			hash := stored[ordinals[i]]
			if other, ok := live[hash]; ok {
				found("row %d has a key that is also live in segment %s", ordinals[i], other)
			}
			live[hash] = segment.id.String()
		}
	}
	if tombstones > segment.tombstones {
		found("%d tombstones instead of at most %d", tombstones, segment.tombstones)
	}
	return nil
}
