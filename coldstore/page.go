package coldstore

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/RoaringBitmap/roaring/v2"
	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
)

// The modes of a page.
const (
	ModeForward = "forward" // upward from a position
	ModeLast    = "last"    // the newest rows
)

// PageRequest asks for a page of cold rows. Segments and Generation are those of the caller's snapshot; Generation zero
// means the newest.
type PageRequest struct {
	Table      uint32
	Generation int64
	Segments   []uuid.UUID
	Mode       string
	After      koldproxy.Seq // forward only: rows above it
	Limit      int           // at most so many rows
}

// Page is a part of the named segments, ascending by seq, without rows that newer segments superseded. Rows that the mirror
// supersedes are in it.
type Page struct {
	Rows []Row
	// Through is the position up to which the page is complete: every live row of the named segments above After and up to
	// Through is in it. Mode last: the highest seq of the segments.
	Through koldproxy.Seq
	// Complete says that the named segments have nothing more in that direction.
	Complete bool
}

// codeLimitExceeded is PostgreSQL's program_limit_exceeded.
const codeLimitExceeded = "54000"

// batchRows is how many rows are decoded at a time.
const batchRows = 1024

// Page reads a page. A segment that is missing or damaged is a [*koldproxy.Error] with code KS002, never a shorter page. A
// segment that retention has dropped since can still be read while its object exists.
func (s *Store) Page(ctx context.Context, req PageRequest) (page Page, err error) {
	begin := time.Now()
	defer func() {
		status := statusOK
		if err != nil {
			status = statusError
		}
		s.metrics.pages.WithLabelValues(status).Inc()
		s.metrics.pageSeconds.Observe(time.Since(begin).Seconds())
		s.metrics.rowsRead.Add(float64(len(page.Rows)))
	}()
	if req.Limit < 1 || req.After < 0 || req.Mode != ModeForward && req.Mode != ModeLast {
		return Page{}, koldproxy.Errorf(koldproxy.CodeInvalidParameter, "cold page of mode %q after %d with limit %d cannot be read", req.Mode, req.After, req.Limit)
	}
	segments, err := s.named(ctx, req)
	if err != nil {
		return Page{}, err
	}
	if req.Mode == ModeLast {
		return s.lastPage(ctx, segments, req)
	}
	return s.forwardPage(ctx, segments, req)
}

// liveSegment is a segment with the rows that count for a request.
type liveSegment struct {
	segmentRow
	dead *roaring.Bitmap
}

// named loads the segments of a request, in the order of their seqs.
func (s *Store) named(ctx context.Context, req PageRequest) ([]liveSegment, error) {
	rows, err := loadSegments(ctx, s.pool, "segment_id = ANY($1) AND table_oid = $2 AND state <> 'in_progress'", req.Segments, req.Table)
	if err != nil {
		return nil, err
	}
	found := make(map[uuid.UUID]bool, len(rows))
	segments := make([]liveSegment, len(rows))
	for i := range rows {
		found[rows[i].id] = true
		dead, err := decodeDead(rows[i].dead)
		if err != nil {
			return nil, unreadable(rows[i].id, rows[i].object, fmt.Errorf("catalog: %w", err))
		}
		segments[i] = liveSegment{segmentRow: rows[i], dead: dead.all()}
		if req.Generation > 0 {
			if segments[i].dead, err = dead.asOf(req.Generation); err != nil {
				return nil, koldproxy.Errorf(codeSnapshotTooOld, "cold segment %s is no longer known as of generation %d", rows[i].id, req.Generation).
					WithHint("Begin a new transaction and repeat the statement.")
			}
		}
	}
	for _, id := range req.Segments {
		if !found[id] {
			return nil, gone(id)
		}
	}
	return segments, nil
}

// codeSnapshotTooOld is PostgreSQL's snapshot_too_old.
const codeSnapshotTooOld = "72000"

// live lists the ordinals in [from, to) that are not dead, at most limit of them; from the end if backward, but ascending in
// any case.
func (s *liveSegment) live(from, to, limit int, backward bool) []uint32 {
	if s.dead.IsEmpty() {
		if backward {
			from = max(from, to-limit)
		} else {
			to = min(to, from+limit)
		}
	}
	var ordinals []uint32
	for i := range to - from {
		ordinal := uint32(from + i)
		if backward {
			ordinal = uint32(to - 1 - i)
		}
		if len(ordinals) == limit {
			break
		}
		if !s.dead.Contains(ordinal) {
			ordinals = append(ordinals, ordinal)
		}
	}
	if backward {
		slices.Reverse(ordinals)
	}
	return ordinals
}

func (s *Store) forwardPage(ctx context.Context, segments []liveSegment, req PageRequest) (Page, error) {
	page := Page{Through: req.After, Complete: true}
	size := int64(0)
	for i := range segments {
		segment := &segments[i]
		if segment.maxSeq <= req.After {
			continue
		}
		f, err := s.openForPage(ctx, &segment.segmentRow)
		if err != nil {
			return Page{}, err
		}
		// One more than wanted shows whether this page is the end.
		ordinals := segment.live(f.after(req.After), len(f.seqs), req.Limit-len(page.Rows)+1, false)
		var next uint32
		if more := len(ordinals) > req.Limit-len(page.Rows); more {
			page.Complete = false
			next = ordinals[len(ordinals)-1]
			ordinals = ordinals[:len(ordinals)-1]
		}
		if err := s.appendRows(ctx, &segment.segmentRow, ordinals, &page, &size); err != nil {
			return Page{}, err
		}
		if !page.Complete {
			if n := len(page.Rows); n > 0 {
				page.Through = page.Rows[n-1].Seq
			}
			if s.follows(req.Table, req.After, page.Through) && req.Limit*sparse >= batchRows {
				s.fetchAhead(ctx, &segment.segmentRow, next)
			}
			return page, nil
		}
		page.Through = segment.maxSeq
	}
	return page, nil
}

func (s *Store) lastPage(ctx context.Context, segments []liveSegment, req PageRequest) (Page, error) {
	page := Page{Complete: true}
	size := int64(0)
	var parts [][]Row
	left := req.Limit
	for i := len(segments) - 1; i >= 0; i-- {
		segment := &segments[i]
		page.Through = max(page.Through, segment.maxSeq)
		ordinals := segment.live(0, int(segment.rows), left+1, true)
		if len(ordinals) > left {
			page.Complete = false
			ordinals = ordinals[len(ordinals)-left:]
		}
		var part Page
		if err := s.appendRows(ctx, &segment.segmentRow, ordinals, &part, &size); err != nil {
			return Page{}, err
		}
		parts = append(parts, part.Rows)
		left -= len(part.Rows)
		if !page.Complete {
			break
		}
	}
	slices.Reverse(parts)
	page.Rows = slices.Concat(parts...)
	return page, nil
}

func (s *Store) openForPage(ctx context.Context, row *segmentRow) (*segmentFile, error) {
	f, err := s.segment(ctx, row)
	switch {
	case err == nil:
		return f, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	default:
		return nil, unreadable(row.id, row.object, err)
	}
}

// appendRows reads rows of one segment into a page, batch by batch, and counts their size.
func (s *Store) appendRows(ctx context.Context, segment *segmentRow, ordinals []uint32, page *Page, size *int64) error {
	for len(ordinals) > 0 {
		batch, n := ordinals[0]/batchRows, 1
		for n < len(ordinals) && ordinals[n]/batchRows == batch {
			n++
		}
		rows, err := s.batch(ctx, segment, int(batch), ordinals[:n])
		if err != nil {
			return err
		}
		for i := range rows {
			*size += int64(len(rows[i].PK) + len(rows[i].Image))
		}
		if *size > s.cfg.MaxPageBytes {
			return koldproxy.Errorf(codeLimitExceeded, "the page of cold rows is larger than %d bytes", s.cfg.MaxPageBytes).
				WithHint("Ask for fewer rows at a time (limit_rows).")
		}
		page.Rows = append(page.Rows, rows...)
		ordinals = ordinals[n:]
	}
	return nil
}

// sparse is the share of a batch below which only the rows that are wanted are decoded.
const sparse = 4

// batch gives rows of one batch. The whole batch is decoded and kept where most of it is wanted, as the next page begins where this one
// ends.
func (s *Store) batch(ctx context.Context, segment *segmentRow, batch int, ordinals []uint32) ([]Row, error) {
	key := cacheKey{segment.id, batch}
	all, ok := s.cache.get(key).([]Row)
	first := batch * batchRows
	if !ok {
		all, ok = s.fetched(ctx, key)
	}
	if !ok {
		total := min(batchRows, int(segment.rows)-first)
		if len(ordinals)*sparse < total {
			return s.readRows(ctx, segment, ordinals, false)
		}
		var err error
		if all, err = s.wholeBatch(ctx, segment, batch); err != nil {
			return nil, err
		}
	}
	rows := make([]Row, len(ordinals))
	for i, ordinal := range ordinals {
		rows[i] = all[int(ordinal)-first]
	}
	return rows, nil
}

// wholeBatch decodes all rows of a batch into the cache.
func (s *Store) wholeBatch(ctx context.Context, segment *segmentRow, batch int) ([]Row, error) {
	first := batch * batchRows
	wanted := make([]uint32, min(batchRows, int(segment.rows)-first))
	for i := range wanted {
		wanted[i] = uint32(first + i)
	}
	all, err := s.readRows(ctx, segment, wanted, false)
	if err != nil {
		return nil, err
	}
	bytes := int64(0)
	for i := range all {
		bytes += int64(len(all[i].PK)+len(all[i].Image)) + 64
	}
	s.cache.put(cacheKey{segment.id, batch}, all, bytes)
	return all, nil
}
