package coldstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/RoaringBitmap/roaring/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// deaths are the rows of one segment that a new file supersedes.
type deaths struct {
	segment  uuid.UUID
	version  int64 // of the bitmap they are to be added to
	before   deadRows
	ordinals *roaring.Bitmap
}

// hashTable finds the ordinals of a file's rows by the hash of their key. Most hashes that are looked up are not in it, so a
// bitmap that fits into the processor's cache is asked first.
type hashTable struct {
	hashes []int64
	filter []uint64 // one bit for each hash, by its low bits
	slots  []uint32 // ordinal + 1, by the high bits; the next free slot where one is taken
}

func newHashTable(hashes []int64) *hashTable {
	size := 64
	for size < 2*len(hashes) {
		size *= 2
	}
	t := &hashTable{hashes: hashes, filter: make([]uint64, size/8), slots: make([]uint32, size)}
	for ordinal, h := range hashes {
		word, bit := t.bit(h)
		t.filter[word] |= bit
		slot := t.slot(h)
		for t.slots[slot] != 0 {
			slot = (slot + 1) & (len(t.slots) - 1)
		}
		t.slots[slot] = uint32(ordinal) + 1
	}
	return t
}

func (t *hashTable) bit(hash int64) (word int, bit uint64) {
	n := uint64(hash) & uint64(64*len(t.filter)-1)
	return int(n / 64), 1 << (n % 64)
}

func (t *hashTable) slot(hash int64) int { return int(uint64(hash)>>32) & (len(t.slots) - 1) }

func (t *hashTable) each(hash int64, fn func(ordinal uint32)) {
	if word, bit := t.bit(hash); t.filter[word]&bit == 0 {
		return
	}
	for slot := t.slot(hash); t.slots[slot] != 0; slot = (slot + 1) & (len(t.slots) - 1) {
		if ordinal := t.slots[slot] - 1; t.hashes[ordinal] == hash {
			fn(ordinal)
		}
	}
}

// pair is a row of an older segment and a row of the new file whose keys have the same hash.
type pair struct{ before, now uint32 }

// superseded finds the rows of active segments whose keys are in the new file: candidates by the hash of the key, then by
// the key itself, which is read from both files. The result holds for the generation that comes with it.
func (s *Store) superseded(ctx context.Context, t *managedTable, self *segmentRow, hashes []int64) (int64, []deaths, error) {
	var (
		generation int64
		all        []deaths
		table      = newHashTable(hashes)
	)
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "SELECT generation FROM koldstore.managed_table WHERE table_oid = $1", t.oid).Scan(&generation)
		if errors.Is(err, pgx.ErrNoRows) {
			return noLongerManaged(t)
		}
		if err != nil {
			return fmt.Errorf("read generation: %w", err)
		}
		segments, err := loadSegments(ctx, tx, "table_oid = $1 AND state = 'active'", t.oid)
		if err != nil {
			return err
		}
		found, err := s.candidatesIn(ctx, tx, t, segments, table)
		if err != nil {
			return err
		}
		for i := range found {
			d, err := s.deathsIn(ctx, tx, t, &found[i], self)
			if err != nil {
				return fmt.Errorf("rows superseded in segment %s: %w", found[i].segment.id, err)
			}
			if !d.ordinals.IsEmpty() {
				all = append(all, d)
			}
		}
		return nil
	})
	return generation, all, err
}

// candidates are rows of one segment that are alive and whose keys have the hash of a key in the new file.
type candidates struct {
	segment *segmentRow
	before  deadRows
	pairs   []pair
}

// candidatesIn goes through the key hashes of all segments once: those that are in memory, then, in one query, the others.
func (s *Store) candidatesIn(ctx context.Context, tx pgx.Tx, t *managedTable, segments []segmentRow, table *hashTable) ([]candidates, error) {
	active := make(map[uuid.UUID]*segmentRow, len(segments))
	for i := range segments {
		active[segments[i].id] = &segments[i]
	}
	s.hashes.keep(t.oid, active)
	var (
		all    []candidates
		unread []uuid.UUID
	)
	compare := func(segment *segmentRow, hashes []int64) error {
		c, err := table.matches(segment, hashes)
		if err == nil && len(c.pairs) > 0 {
			all = append(all, c)
		}
		return err
	}
	for i := range segments {
		hashes := s.hashes.get(t.oid, segments[i].id)
		if hashes == nil {
			unread = append(unread, segments[i].id)
		} else if err := compare(&segments[i], hashes); err != nil {
			return nil, err
		}
	}
	if len(unread) == 0 {
		return all, nil
	}
	rows, err := tx.Query(ctx, "SELECT segment_id, key_hashes FROM koldstore.segment WHERE segment_id = ANY($1)", unread)
	if err != nil {
		return nil, fmt.Errorf("read key hashes: %w", err)
	}
	var (
		id     uuid.UUID
		data   pgtype.DriverBytes // not copied
		hashes []int64
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &data}, func() error {
		if len(data)%8 != 0 {
			return fmt.Errorf("%w: %d bytes of key hashes of segment %s", errInvariant, len(data), id)
		}
		hashes = decodeHashes(hashes, data)
		if err := compare(active[id], hashes); err != nil {
			return err
		}
		if s.hashes.put(t.oid, id, hashes) {
			hashes = nil
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read key hashes: %w", err)
	}
	return all, nil
}

// matches finds the live rows of a segment that have the hash of a key in the new file.
func (t *hashTable) matches(segment *segmentRow, hashes []int64) (candidates, error) {
	c := candidates{segment: segment}
	if int64(len(hashes)) != segment.rows {
		return c, fmt.Errorf("%w: %d key hashes for %d rows of segment %s", errInvariant, len(hashes), segment.rows, segment.id)
	}
	var err error
	if c.before, err = decodeDead(segment.dead); err != nil {
		return c, fmt.Errorf("segment %s: %w", segment.id, err)
	}
	dead := c.before.all()
	for ordinal, hash := range hashes {
		t.each(hash, func(now uint32) {
			if !dead.Contains(uint32(ordinal)) {
				c.pairs = append(c.pairs, pair{uint32(ordinal), now})
			}
		})
	}
	return c, nil
}

func (s *Store) deathsIn(ctx context.Context, tx pgx.Tx, t *managedTable, c *candidates, self *segmentRow) (deaths, error) {
	d := deaths{segment: c.segment.id, version: c.segment.deadVersion, before: c.before, ordinals: roaring.New()}
	for batch := range slices.Chunk(c.pairs, batchRows) {
		if err := s.confirm(ctx, tx, t, c.segment, self, batch, d.ordinals); err != nil {
			return d, err
		}
	}
	return d, nil
}

// confirm adds those rows of the older segment whose keys are really the same.
func (s *Store) confirm(ctx context.Context, tx pgx.Tx, t *managedTable, old, self *segmentRow, pairs []pair, into *roaring.Bitmap) error {
	before, err := s.keys(ctx, old, pairs, func(p pair) uint32 { return p.before })
	if err != nil {
		return err
	}
	now, err := s.keys(ctx, self, pairs, func(p pair) uint32 { return p.now })
	if err != nil {
		return err
	}
	var doubtful []pair
	var rows [][2]Row
	for _, p := range pairs {
		if a, b := before[p.before], now[p.now]; string(a.PK) == string(b.PK) {
			into.Add(p.before)
		} else {
			doubtful, rows = append(doubtful, p), append(rows, [2]Row{a, b})
		}
	}
	if len(doubtful) == 0 {
		return nil
	}
	shape, err := loadShape(ctx, tx, t)
	if err != nil {
		return err
	}
	same, err := shape.sameKeys(ctx, tx, rows)
	if err != nil {
		return err
	}
	for i, p := range doubtful {
		if same[i] {
			into.Add(p.before)
		}
	}
	return nil
}

func (s *Store) keys(ctx context.Context, segment *segmentRow, pairs []pair, side func(pair) uint32) (map[uint32]Row, error) {
	ordinals := make([]uint32, len(pairs))
	for i, p := range pairs {
		ordinals[i] = side(p)
	}
	slices.Sort(ordinals)
	ordinals = slices.Compact(ordinals)
	rows, err := s.readRows(ctx, segment, ordinals, true)
	if err != nil {
		return nil, err
	}
	keys := make(map[uint32]Row, len(rows))
	for i, ordinal := range ordinals {
		keys[ordinal] = rows[i]
	}
	return keys, nil
}
