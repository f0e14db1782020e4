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

// batchRows is how many rows are decoded at a time for who reads a table from page to page, and pieceRows for who reads at one place: a
// page of the usual size is one piece. What is decoded at a time shares the unpacking of the columns' pages.
const (
	batchRows = 2048
	pieceRows = 1024
)

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
	on := s.readsOn(req.Table, req.After) && req.Limit*sparse >= batchRows
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
		if err := s.appendRows(ctx, segment, ordinals, on, &page, &size); err != nil {
			return Page{}, err
		}
		if !page.Complete {
			if n := len(page.Rows); n > 0 {
				page.Through = page.Rows[n-1].Seq
			}
			s.endsAt(req.Table, page.Through)
			if on {
				s.fetchAhead(ctx, segment, next)
			}
			return page, nil
		}
		page.Through = segment.maxSeq
	}
	s.endsAt(req.Table, page.Through)
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
		if err := s.appendRows(ctx, segment, ordinals, false, &part, &size); err != nil {
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

// appendRows reads rows of one segment into a page, and counts their size. on says that the reader goes from page to page: then whole
// batches are decoded.
func (s *Store) appendRows(ctx context.Context, segment *liveSegment, ordinals []uint32, on bool, page *Page, size *int64) error {
	for len(ordinals) > 0 {
		rows, err := s.someRows(ctx, segment, ordinals, on)
		if err != nil {
			return err
		}
		for i := range rows {
			*size += int64(len(rows[i].PK) + len(rows[i].Image))
		}
		if *size > s.cfg.MaxPageBytes && len(page.Rows)+len(rows) > 1 { // one row can be no smaller page
			return koldproxy.Errorf(codeLimitExceeded, "the page of cold rows is larger than %d bytes", s.cfg.MaxPageBytes).
				WithHint("Ask for fewer rows at a time (limit_rows).")
		}
		page.Rows = append(page.Rows, rows...)
		ordinals = ordinals[len(rows):]
	}
	return nil
}

// sparse is the share of a batch below which only the rows that are wanted are decoded.
const sparse = 4

// someRows gives at least the first of the rows that are wanted: those of its batch, where that is decoded or worth it, otherwise those up to a
// batch that is.
func (s *Store) someRows(ctx context.Context, segment *liveSegment, ordinals []uint32, on bool) ([]Row, error) {
	for n := 0; n < len(ordinals) && n < pieceRows; {
		number := int(ordinals[n]) / batchRows
		end := n + 1
		for end < len(ordinals) && int(ordinals[end])/batchRows == number {
			end++
		}
		decoded, err := s.batch(ctx, segment, number, on && (end-n)*sparse >= segment.rowsIn(number))
		if err != nil {
			return nil, err
		}
		rows, ok := decoded.pick(ordinals[n:end], number)
		switch {
		case ok && n == 0:
			return rows, nil
		case ok: // which the next call finds again
			ordinals = ordinals[:n]
		}
		n = end
	}
	return s.readRows(ctx, &segment.segmentRow, ordinals[:min(len(ordinals), pieceRows)], false)
}

// rowsIn is how many rows a batch has, those that are dead included.
func (s *liveSegment) rowsIn(number int) int { return min(batchRows, int(s.rows)-number*batchRows) }

// decodedBatch are rows of a batch, at their places; those that were dead when it was decoded have no op.
type decodedBatch []Row

// pick takes rows out of a batch if all of them are in it.
func (b decodedBatch) pick(ordinals []uint32, number int) ([]Row, bool) {
	if b == nil {
		return nil, false
	}
	rows := make([]Row, len(ordinals))
	for i, ordinal := range ordinals {
		if rows[i] = b[int(ordinal)-number*batchRows]; rows[i].Op == 0 { // asked for by a reader of an older generation
			return nil, false
		}
	}
	return rows, true
}

// batch gives a batch that is decoded, or is being decoded; another one only if it is worth it, and nil otherwise.
func (s *Store) batch(ctx context.Context, segment *liveSegment, number int, worth bool) (decodedBatch, error) {
	key := cacheKey{segment.id, number}
	if decoded, ok := s.cache.get(key).(decodedBatch); ok {
		return decoded, nil
	}
	if decoded := s.fetched(ctx, key); decoded != nil || !worth {
		return decoded, nil
	}
	return s.decodeBatch(ctx, segment, number)
}

// decodeBatch decodes the live rows of a batch into the cache.
func (s *Store) decodeBatch(ctx context.Context, segment *liveSegment, number int) (decodedBatch, error) {
	first, total := number*batchRows, segment.rowsIn(number)
	ordinals := segment.live(first, first+total, total, false)
	rows, err := s.readRows(ctx, &segment.segmentRow, ordinals, false)
	if err != nil {
		return nil, err
	}
	decoded := make(decodedBatch, total)
	bytes := int64(total) * 64
	for i, ordinal := range ordinals {
		decoded[int(ordinal)-first] = rows[i]
		bytes += int64(len(rows[i].PK) + len(rows[i].Image))
	}
	s.cache.put(cacheKey{segment.id, number}, decoded, bytes)
	return decoded, nil
}
