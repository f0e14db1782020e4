package changefeed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/koldproxy/koldproxy"
)

// ErrNoStream is what [OpenReplay] returns for a stream that does not exist, or is not there yet.
var ErrNoStream = errors.New("there is no such stream")

// undefinedTable is the SQLSTATE of a relation that does not exist.
const undefinedTable = "42P01"

// Replay reads the log of one stream for somebody who has the right to it; it asks nobody for that right. It belongs to one
// goroutine.
type Replay struct {
	pool     *pgxpool.Pool
	id       int64
	preImage bool
	// The log as it was found last: its name, which changes when it is moved or renamed, and its OID, which tells.
	log string
	oid uint32
}

// ReplayEvent is one event as live push publishes it: Payload is a JSON text in one line.
type ReplayEvent struct {
	ID      string
	Payload []byte
	Gap     *ReplayGap // what is missing in front of it, or nil
}

// ReplayGap says that events of which a reader cannot know are missing: those up to Floor have expired, or those behind it were
// never captured; or that its position was none, and that it is told of what comes behind Floor.
type ReplayGap struct {
	Floor  string `json:"floor"`
	Reason string `json:"reason"`
}

// Reasons of a gap beside those of holes: retention has made it, or the position is one of the future (see [FromFuture]).
const (
	Expired = "retention"
	Ahead   = "ahead"
)

// FromFuture says whether a position, with end and floor of [Replay.End], is one of the future, so that events would be passed over in
// silence until their ids are above it. That of another stream, or of a moment, is not: clocks of several koldproxies differ by less than
// a minute.
func FromFuture(after, end, floor string, now time.Time) bool {
	return after > max(end, floor, koldproxy.EventID(koldproxy.SeqAt(now.Add(time.Minute)), 0))
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
	return r, r.find(ctx)
}

// find looks up what the log is called now.
func (r *Replay) find(ctx context.Context) error {
	err := r.pool.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), c.oid FROM koldstore.stream s
		JOIN pg_catalog.pg_class c ON c.oid = s.log_oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE s.stream_id = $1`, r.id).Scan(&r.log, &r.oid)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNoStream
	}
	if err != nil {
		return fmt.Errorf("look for the log of a stream: %w", err)
	}
	return nil
}

// End is the id of the newest event, and floor that of the newest one that is gone; empty if there is none.
func (r *Replay) End(ctx context.Context) (end, floor string, err error) {
	err = r.query(ctx, `SELECT coalesce((SELECT max(id) FROM %[1]s), ''), coalesce(greatest(s.floor, koldstore.expired(s.stream_id)), '')
		FROM koldstore.stream s WHERE s.stream_id = $1 AND s.log_oid = $2`, nil, func(row pgx.CollectableRow) error { return row.Scan(&end, &floor) })
	if err != nil {
		return "", "", fmt.Errorf("find the end of a stream: %w", err)
	}
	return end, floor, nil
}

// Events is how many events the stream has had by now. It changes with every event.
func (r *Replay) Events(ctx context.Context) (n int64, err error) {
	err = r.pool.QueryRow(ctx, `SELECT events FROM koldstore.stream_status WHERE stream_id = $1`, r.id).Scan(&n)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, ErrNoStream
	}
	if err != nil {
		return 0, fmt.Errorf("count the events of a stream: %w", err)
	}
	return n, nil
}

// Page returns up to limit events behind an id, oldest first, without those that have expired. Fewer than limit means that
// there are no more by now. The events' prev is the id of the one before, as seen from here.
func (r *Replay) Page(ctx context.Context, after string, limit int) (page []ReplayEvent, err error) {
	old := "NULL::text"
	if r.preImage {
		old = "coalesce(l.old::text, 'null')"
	}
	// Whether the event at the position is still there is asked of the same snapshot: if it is, so is everything behind it.
	known := true
	before := after
	err = r.query(ctx, `SELECT s.known, s.hole, s.reason, l.* FROM (SELECT t.retention, coalesce(t.gap ->> 'after', '') AS hole, coalesce(t.gap ->> 'reason', '') AS reason, EXISTS (SELECT FROM %[1]s a
				WHERE a.id = $3 AND a.ts > coalesce(pg_catalog.statement_timestamp() - t.retention, '-infinity')) AS known
			FROM koldstore.stream t WHERE t.stream_id = $1 AND t.log_oid = $2) s
		LEFT JOIN LATERAL (SELECT l.id, l.op, l.k::text, pg_catalog.floor(EXTRACT(epoch FROM l.ts) * 1000)::bigint, coalesce(l.doc::text, 'null'), `+old+`
			FROM %[1]s l WHERE l.id > $3 AND l.ts > coalesce(pg_catalog.statement_timestamp() - s.retention, '-infinity')
			ORDER BY l.id LIMIT $4) l ON true ORDER BY l.id`, []any{after, limit}, func(row pgx.CollectableRow) error {
		var id, op, k, doc *string
		var millis *int64
		var hole ReplayGap
		var e liveEvent
		if err := row.Scan(&known, &hole.Floor, &hole.Reason, &id, &op, &k, &millis, &doc, &e.old); err != nil || id == nil {
			return err
		}
		e.id, e.op, e.k, e.millis, e.doc = *id, *op, *k, *millis, *doc
		event := ReplayEvent{ID: e.id, Payload: e.payload(before)}
		if before != "" && before <= hole.Floor && hole.Floor < e.id {
			event.Gap = &hole
		}
		page = append(page, event)
		before = e.id
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the log of a stream: %w", err)
	}
	if known || after == "" || len(page) == 0 {
		return page, nil
	}
	var floor string
	first := page[0].ID
	err = r.query(ctx, `SELECT coalesce(greatest(s.floor, (SELECT max(l.id) FROM %[1]s l WHERE l.id > $3 AND l.id < $4)), '')
		FROM koldstore.stream s WHERE s.stream_id = $1 AND s.log_oid = $2`, []any{after, first}, func(row pgx.CollectableRow) error { return row.Scan(&floor) })
	if err != nil {
		return nil, fmt.Errorf("find the beginning of a stream: %w", err)
	}
	if floor > after { // also if it has passed the page meanwhile, or events whose commits were told of late
		page[0].Gap = &ReplayGap{Floor: floor, Reason: Expired}
	}
	return page, nil
}

// query runs a statement about the log, in which %[1]s is its name, $1 the stream and $2 the log's OID: no row means that the
// log is another one by now. If it was moved, the statement runs again with its new name.
func (r *Replay) query(ctx context.Context, sql string, args []any, scan func(pgx.CollectableRow) error) error {
	for again := true; ; again = false {
		n := 0
		rows, err := r.pool.Query(ctx, fmt.Sprintf(sql, r.log), append([]any{r.id, r.oid}, args...)...)
		if err == nil {
			for rows.Next() && err == nil {
				n++
				err = scan(rows)
			}
			rows.Close()
			err = errors.Join(err, rows.Err())
		}
		var pg *pgconn.PgError
		moved := err == nil && n == 0 || errors.As(err, &pg) && pg.Code == undefinedTable
		switch {
		case !moved:
			return err
		case !again:
			return ErrNoStream
		}
		if err := r.find(ctx); err != nil {
			return err
		}
	}
}
