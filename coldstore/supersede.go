package coldstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/RoaringBitmap/roaring/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// deaths are the rows of one segment that a new file supersedes.
type deaths struct {
	segment  uuid.UUID
	version  int64 // of the bitmap they are to be added to
	before   deadRows
	ordinals *roaring.Bitmap
}

// hashTable finds the ordinals of a file's rows by the hash of their key. Rows of the same hash are chained.
type hashTable struct {
	first map[int64]uint32
	next  []uint32
}

const noRow = ^uint32(0)

func newHashTable(hashes []int64) *hashTable {
	t := &hashTable{first: make(map[int64]uint32, len(hashes)), next: make([]uint32, len(hashes))}
	for i, h := range hashes {
		ordinal := uint32(i)
		t.next[i] = noRow
		if before, ok := t.first[h]; ok {
			t.next[i] = before
		}
		t.first[h] = ordinal
	}
	return t
}

func (t *hashTable) each(hash int64, fn func(ordinal uint32)) {
	ordinal, ok := t.first[hash]
	for ; ok && ordinal != noRow; ordinal = t.next[ordinal] {
		fn(ordinal)
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
		for i := range segments {
			d, err := s.deathsIn(ctx, tx, t, &segments[i], self, table)
			if err != nil {
				return fmt.Errorf("rows superseded in segment %s: %w", segments[i].id, err)
			}
			if !d.ordinals.IsEmpty() {
				all = append(all, d)
			}
		}
		return nil
	})
	return generation, all, err
}

func (s *Store) deathsIn(ctx context.Context, tx pgx.Tx, t *managedTable, old, self *segmentRow, table *hashTable) (deaths, error) {
	d := deaths{segment: old.id, version: old.deadVersion, ordinals: roaring.New()}
	var err error
	if d.before, err = decodeDead(old.dead); err != nil {
		return d, err
	}
	var hashes []byte
	if err := tx.QueryRow(ctx, "SELECT key_hashes FROM koldstore.segment WHERE segment_id = $1", old.id).Scan(&hashes); err != nil {
		return d, fmt.Errorf("read key hashes: %w", err)
	}
	if int64(len(hashes)) != 8*old.rows {
		return d, fmt.Errorf("%w: %d bytes of key hashes for %d rows", errInvariant, len(hashes), old.rows)
	}
	dead := d.before.all()
	var candidates []pair
	for ordinal := range uint32(len(hashes) / 8) {
		if !dead.Contains(ordinal) {
			table.each(int64(binary.BigEndian.Uint64(hashes[8*ordinal:])), func(now uint32) {
				candidates = append(candidates, pair{ordinal, now})
			})
		}
	}
	for batch := range slices.Chunk(candidates, batchRows) {
		if err := s.confirm(ctx, tx, t, old, self, batch, d.ordinals); err != nil {
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
