package changefeed

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrNoStream is what [OpenReplay] returns for a stream that does not exist, or is not there yet.
var ErrNoStream = errors.New("there is no such stream")

// Replay reads the log of one stream for somebody who has the right to it; it asks nobody for that right. It belongs to one
// goroutine.
type Replay struct {
	pool     *pgxpool.Pool
	id       int64
	preImage bool
}

// ReplayEvent is one event as live push publishes it: Payload is a JSON text in one line.
type ReplayEvent struct {
	ID      string
	Payload []byte
}

// OpenReplay finds a stream. The pool's role must own the logs.
func OpenReplay(ctx context.Context, pool *pgxpool.Pool, schema, name string) (*Replay, error) {
	r := &Replay{pool: pool}
	err := pool.QueryRow(ctx, `SELECT stream_id, pre_image FROM koldstore.stream WHERE schema_name = $1 AND name = $2 AND state NOT IN ('pending', 'seeding')`,
		schema, name).Scan(&r.id, &r.preImage)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNoStream
	}
	if err != nil {
		return nil, fmt.Errorf("look for stream %s.%s: %w", schema, name, err)
	}
	return r, nil
}

// End is the id of the newest event, and floor that of the newest one that is gone; empty if there is none.
func (r *Replay) End(ctx context.Context) (end, floor string, err error) {
	log, err := r.log(ctx)
	if err != nil {
		return "", "", err
	}
	err = r.pool.QueryRow(ctx, `SELECT coalesce((SELECT max(id) FROM `+log+`), ''), coalesce(greatest(s.floor, koldstore.expired(s.stream_id)), '')
		FROM koldstore.stream s WHERE s.stream_id = $1`, r.id).Scan(&end, &floor)
	if err != nil {
		return "", "", fmt.Errorf("find the end of a stream: %w", err)
	}
	return end, floor, nil
}

// log is the name of the log now; it may have been moved to another schema.
func (r *Replay) log(ctx context.Context) (string, error) {
	var log string
	err := r.pool.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname) FROM koldstore.stream s
		JOIN pg_catalog.pg_class c ON c.oid = s.log_oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE s.stream_id = $1`, r.id).Scan(&log)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", ErrNoStream
	}
	if err != nil {
		return "", fmt.Errorf("look for the log of a stream: %w", err)
	}
	return log, nil
}

// Page returns up to limit events behind an id, oldest first, without those that have expired. Fewer than limit means that
// there are no more by now. The events' prev is the id of the one before, as seen from here.
func (r *Replay) Page(ctx context.Context, after string, limit int) ([]ReplayEvent, error) {
	log, err := r.log(ctx)
	if err != nil {
		return nil, err
	}
	old := "NULL::text"
	if r.preImage {
		old = "coalesce(l.old::text, 'null')"
	}
	rows, err := r.pool.Query(ctx, fmt.Sprintf(`SELECT l.id, l.op, l.k::text, pg_catalog.floor(EXTRACT(epoch FROM l.ts) * 1000)::bigint, coalesce(l.doc::text, 'null'), %s
		FROM %s l
		WHERE l.id > $1 AND l.ts > coalesce(pg_catalog.statement_timestamp() - (SELECT retention FROM koldstore.stream WHERE stream_id = $3), '-infinity')
		ORDER BY l.id LIMIT $2`, old, log), after, limit, r.id)
	if err != nil {
		return nil, fmt.Errorf("read the log of a stream: %w", err)
	}
	defer rows.Close()
	var page []ReplayEvent
	for rows.Next() {
		var e liveEvent
		if err := rows.Scan(&e.id, &e.op, &e.k, &e.millis, &e.doc, &e.old); err != nil {
			return nil, fmt.Errorf("read the log of a stream: %w", err)
		}
		page = append(page, ReplayEvent{ID: e.id, Payload: e.payload(after)})
		after = e.id
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read the log of a stream: %w", err)
	}
	return page, nil
}
