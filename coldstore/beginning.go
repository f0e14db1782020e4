package coldstore

import (
	"context"
	"fmt"

	"github.com/koldproxy/koldproxy"
)

// beginning is what a compaction makes of the beginning of a feed: deletes up to a seq are forgotten, for which the floor rises to it. Rows
// in front of that move behind it, in their order. At their old places a reader who begins anew would be refused at the end of each page
// that ends among them, since its cursor is below the floor, and whoever has read them already sees them once more at most.
//
// The zero value leaves everything as it is.
type beginning struct {
	through   koldproxy.Seq // the last delete that is forgotten; 0 for none
	forgotten int64         // how many are
	first     koldproxy.Seq // no row stays below it: the floor
}

func (b *beginning) forgets(seq koldproxy.Seq, op koldproxy.Op) bool {
	return op == koldproxy.OpDelete && seq <= b.through
}

// place is the seq of a row in the new file, where last is that of the row before.
func (b *beginning) place(seq, last koldproxy.Seq) koldproxy.Seq { return max(seq, b.first, last+1) }

// versionAt is a row of a feed by what planBeginning wants to know of it.
type versionAt struct {
	seq koldproxy.Seq
	op  koldproxy.Op
}

// planBeginning chooses what is forgotten of the live rows of a feed's oldest segments, in their order: the deletes below a seq, if what is in
// front of the last of them has room up to and including end. If it has not, because later rows follow without a gap, nothing is. Rows
// that are below the floor already are moved if there is room for them.
func planBeginning(rows []versionAt, below, floor, end koldproxy.Seq) beginning {
	b := beginning{first: floor}
	for _, r := range rows {
		if r.op == koldproxy.OpDelete && r.seq < below {
			b.through = r.seq
			b.forgotten++
		}
	}
	b.first = max(floor, b.through)
	if b.fits(rows, end) {
		return b
	}
	if b = (beginning{first: floor}); b.fits(rows, end) {
		return b
	}
	return beginning{}
}

func (b *beginning) fits(rows []versionAt, end koldproxy.Seq) bool {
	last := koldproxy.Seq(0)
	for _, r := range rows {
		if !b.forgets(r.seq, r.op) {
			last = b.place(r.seq, last)
		}
	}
	return last <= end
}

// planBeginning plans the beginning of a feed for the compaction of its oldest segments.
func (s *Store) planBeginning(ctx context.Context, c *compaction) (beginning, error) {
	tombstones := int64(0)
	for i := range c.sources {
		tombstones += c.sources[i].tombstones
	}
	below := koldproxy.Seq(0)
	if c.table.forgetBelow != nil && tombstones > 0 {
		below = *c.table.forgetBelow
	}
	newest := c.sources[len(c.sources)-1].maxSeq
	// Rows may move up to what follows, in another segment or in the mirror; if nothing does, up to the watermark, above which the applier
	// gives seqs out. In one statement, since a flush may publish between two: what is in the mirror now will never be below.
	var floor, end koldproxy.Seq
	err := s.pool.QueryRow(ctx, fmt.Sprintf(`SELECT m.floor, coalesce(least((SELECT min(g.min_seq) FROM koldstore.segment g WHERE g.table_oid = m.table_oid AND g.state = 'active' AND g.min_seq > $2),
			(SELECT min(seq) FROM %s)) - 1, (SELECT greatest(max(k.watermark), $2) FROM koldstore.checkpoint k))
		FROM koldstore.managed_table m WHERE m.table_oid = $1`, c.table.mirror), c.table.oid, newest).Scan(&floor, &end)
	if err != nil {
		return beginning{}, fmt.Errorf("plan what is forgotten: %w", err)
	}
	if below == 0 && c.sources[0].minSeq >= floor {
		return beginning{}, nil
	}
	var rows []versionAt
	for i := range c.sources {
		if rows, err = s.appendVersions(ctx, rows, &c.sources[i]); err != nil {
			return beginning{}, err
		}
	}
	return planBeginning(rows, below, floor, end), nil
}

// appendVersions adds the live rows of a segment.
func (s *Store) appendVersions(ctx context.Context, to []versionAt, source *segmentRow) ([]versionAt, error) {
	f, err := s.segment(ctx, source)
	if err != nil {
		return to, unreadable(source.id, source.object, err)
	}
	ops, err := f.ops(ctx)
	if err != nil {
		return to, unreadable(source.id, source.object, err)
	}
	dead, err := decodeDead(source.dead)
	if err != nil {
		return to, unreadable(source.id, source.object, fmt.Errorf("catalog: %w", err))
	}
	gone := dead.all()
	for i, seq := range f.seqs {
		if !gone.Contains(uint32(i)) {
			to = append(to, versionAt{seq, koldproxy.Op(ops[i])})
		}
	}
	return to, nil
}
