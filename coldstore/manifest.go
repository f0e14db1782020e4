package coldstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// querier is a pool, a connection or a transaction.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// managedTable is a row of koldstore.managed_table.
type managedTable struct {
	oid         uint32
	schema      string
	name        string
	mirrorOID   uint32
	mirror      string // qualified and quoted
	state       string
	reason      string
	storage     string
	hotRowLimit *int64
	minFlush    int64
	maxPerFile  int64
	moveBelow   *koldproxy.Seq // move_after as of now
	forgetBelow *koldproxy.Seq // tombstone_retention as of now
	keep        *koldproxy.Seq // retention: what is below it is dropped now
	generation  int64
	now         koldproxy.Seq // the moment that the others were computed for
}

func (t *managedTable) String() string { return t.schema + "." + t.name }

// millisBefore is SQL for the moment an interval before $1, in milliseconds since 1970. Intervals that lead out of
// PostgreSQL's range of timestamps mean "before everything".
func millisBefore(interval string) string {
	return fmt.Sprintf(`CASE WHEN extract(epoch FROM %[1]s) < 1e10 THEN floor(extract(epoch FROM $1::timestamptz - %[1]s) * 1000)::bigint
		WHEN %[1]s IS NOT NULL THEN 0 END`, interval)
}

func loadTable(ctx context.Context, q querier, oid uint32, now time.Time) (*managedTable, error) {
	t := &managedTable{oid: oid}
	var moveBefore, forgetBefore, keepSince *int64
	err := q.QueryRow(ctx, `
		SELECT m.schema_name, m.table_name, m.mirror_oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), m.state,
		       coalesce(m.reason, ''), m.storage, m.hot_row_limit, m.min_flush_rows, m.max_rows_per_file, m.generation, `+millisBefore("m.move_after")+`, `+millisBefore("m.tombstone_retention")+`, `+millisBefore("m.retention")+`
		FROM koldstore.managed_table m
		JOIN pg_catalog.pg_class c ON c.oid = m.mirror_oid
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE m.table_oid = $2`, now, oid).
		Scan(&t.schema, &t.name, &t.mirrorOID, &t.mirror, &t.state, &t.reason, &t.storage, &t.hotRowLimit, &t.minFlush, &t.maxPerFile, &t.generation, &moveBefore, &forgetBefore, &keepSince)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "table with OID %d is not managed by koldstore", oid)
	}
	if err != nil {
		return nil, fmt.Errorf("load managed table %d: %w", oid, err)
	}
	t.moveBelow, t.forgetBelow, t.keep = seqBefore(moveBefore), seqBefore(forgetBefore), seqBefore(keepSince)
	t.now = koldproxy.SeqAt(now)
	return t, nil
}

func seqBefore(millis *int64) *koldproxy.Seq {
	if millis == nil {
		return nil
	}
	seq := koldproxy.SeqAt(time.UnixMilli(*millis))
	return &seq
}

// segmentRow is a row of koldstore.segment without its key hashes, which are large.
type segmentRow struct {
	id          uuid.UUID
	table       uint32
	storage     string
	object      string
	state       string
	minSeq      koldproxy.Seq
	maxSeq      koldproxy.Seq
	rows        int64
	deadCount   int64
	tombstones  int64
	size        int64
	sha256      []byte
	dead        []byte
	deadVersion int64
	createdAt   time.Time
	layout      string
	tried       bool // of one that is being written: its object may exist
}

// loadSegments reads the segments that a condition on koldstore.segment chooses, in the order of their seqs.
func loadSegments(ctx context.Context, q querier, condition string, args ...any) ([]segmentRow, error) {
	return selectSegments(ctx, q, "dead", condition, args)
}

// loadManifest is loadSegments without the bitmaps of dead rows, for those who want to know how many there are.
func loadManifest(ctx context.Context, q querier, condition string, args ...any) ([]segmentRow, error) {
	return selectSegments(ctx, q, "NULL::bytea", condition, args)
}

func selectSegments(ctx context.Context, q querier, dead, condition string, args []any) ([]segmentRow, error) {
	rows, err := q.Query(ctx, `SELECT segment_id, table_oid, storage, object_key, state, coalesce(min_seq, 0), coalesce(max_seq, 0), row_count, dead_count, tombstones,
		size_bytes, sha256, `+dead+`, dead_version, created_at, coalesce(layout, '')
		FROM koldstore.segment WHERE `+condition+" ORDER BY min_seq", args...)
	if err != nil {
		return nil, fmt.Errorf("load segments: %w", err)
	}
	segments, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s segmentRow, err error) {
		err = row.Scan(&s.id, &s.table, &s.storage, &s.object, &s.state, &s.minSeq, &s.maxSeq, &s.rows, &s.deadCount, &s.tombstones,
			&s.size, &s.sha256, &s.dead, &s.deadVersion, &s.createdAt, &s.layout)
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("load segments: %w", err)
	}
	return segments, nil
}

func (s *segmentRow) expected() expected {
	return expected{object: s.object, size: s.size, sha256: s.sha256, rows: s.rows, minSeq: s.minSeq, maxSeq: s.maxSeq}
}

// objectKey is where the file of a segment is. Names of tables never appear in it.
func objectKey(table uint32, id uuid.UUID) string { return fmt.Sprintf("%d/%s.parquet", table, id) }

// SegmentInfo describes an active segment.
type SegmentInfo struct {
	ID         uuid.UUID     `json:"segment_id"`
	Object     string        `json:"object"`
	MinSeq     koldproxy.Seq `json:"min_seq"`
	MaxSeq     koldproxy.Seq `json:"max_seq"`
	Rows       int64         `json:"rows"`
	Dead       int64         `json:"dead"`
	Tombstones int64         `json:"tombstones"`
	SizeBytes  int64         `json:"size_bytes"`
	CreatedAt  time.Time     `json:"created_at"`
}

// Segments lists the active segments of a table in the order of their seqs. A table without any gives none; it need not be
// managed.
func (s *Store) Segments(ctx context.Context, table uint32) ([]SegmentInfo, error) {
	rows, err := loadManifest(ctx, s.pool, "table_oid = $1 AND state = 'active'", table)
	if err != nil {
		return nil, err
	}
	infos := make([]SegmentInfo, len(rows))
	for i, r := range rows {
		infos[i] = SegmentInfo{
			ID: r.id, Object: r.object, MinSeq: r.minSeq, MaxSeq: r.maxSeq, Rows: r.rows, Dead: r.deadCount, Tombstones: r.tombstones,
			SizeBytes: r.size, CreatedAt: r.createdAt,
		}
	}
	return infos, nil
}
