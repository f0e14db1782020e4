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
	// passed is when the hole was noticed behind which the reader has begun; empty if it is to be told of whatever it passes.
	passed string
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

// Reasons of a gap beside those of holes: retention has made it, or the position is one of the future.
const (
	Expired = "retention"
	Ahead   = "ahead"
)

// Where [Replay.Begin] may begin beside an event's id: before the earliest event that is retained, or behind the newest.
const (
	FromEarliest = ""
	FromNewest   = "newest"
)

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

// Begin returns the position of a reader that begins somewhere: what a page is to be read behind. It is no event's if there is none yet, but
// as good. A gap says what the reader has missed already, or that its position is one of the future: events would be passed over in
// silence until their ids are above it. That of another stream, or of a moment, is not: clocks of several koldproxies differ by less than
// a minute.
func (r *Replay) Begin(ctx context.Context, from string) (position string, gap *ReplayGap, err error) {
	var end, floor, hole string
	err = r.query(ctx, `SELECT coalesce((SELECT max(id) FROM %[1]s), greatest(koldstore.event_id(c.watermark, '0/0'), s.floor, s.began)),
			coalesce(greatest(s.floor, koldstore.expired(s.stream_id)), ''), coalesce(s.gap ->> 'noticed_at', '')
		FROM koldstore.stream s CROSS JOIN koldstore.checkpoint c WHERE s.stream_id = $1 AND s.log_oid = $2`, nil,
		func(row pgx.CollectableRow) error { return row.Scan(&end, &floor, &hole) })
	if err != nil {
		return "", nil, fmt.Errorf("find the end of a stream: %w", err)
	}
	switch {
	case from == FromNewest:
		r.passed = hole
		return end, nil, nil
	case from > max(end, floor, koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(time.Minute)), 0)):
		return end, &ReplayGap{Floor: end, Reason: Ahead}, nil
	case from != FromEarliest && from < floor:
		return floor, &ReplayGap{Floor: floor, Reason: Expired}, nil
	}
	return from, nil, nil
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

// replayBytes is what the rows of a page take in the table, at most, but for the last one. Large ones are compressed there.
const replayBytes = 1 << 20

// Page returns up to limit events behind an id, oldest first, without those that have expired; fewer if they are large. It says whether
// there may be more by now. The events' prev is the id of the one before in the log.
func (r *Replay) Page(ctx context.Context, after string, limit int) (page []ReplayEvent, more bool, err error) {
	old, size := "NULL::text", "pg_catalog.pg_column_size(l.doc)"
	if r.preImage {
		old, size = "coalesce(l.old::text, 'null')", "coalesce(pg_catalog.pg_column_size(l.doc), 0) + coalesce(pg_catalog.pg_column_size(l.old), 0)"
	}
	// Whether the event at the position is still there is asked of the same snapshot: if it is, so is everything behind it.
	known := true
	before := after
	prev := "" // what the log has in front of an event; a position need not be one of its
	err = r.query(ctx, `SELECT s.known, s.behind, s.hole, s.reason, s.noticed, l.* FROM (SELECT t.retention,
			coalesce(greatest((SELECT max(a.id) FROM %[1]s a WHERE a.id <= $3), CASE WHEN t.floor <= $3 THEN t.floor END), '') AS behind, coalesce(t.gap ->> 'after', '') AS hole, coalesce(t.gap ->> 'reason', '') AS reason,
			coalesce(t.gap ->> 'noticed_at', '') AS noticed, EXISTS (SELECT FROM %[1]s a
				WHERE a.id = $3 AND a.ts > coalesce(pg_catalog.statement_timestamp() - t.retention, '-infinity')) AS known
			FROM koldstore.stream t WHERE t.stream_id = $1 AND t.log_oid = $2) s
		LEFT JOIN LATERAL (SELECT l.id, l.op, l.k::text, pg_catalog.floor(EXTRACT(epoch FROM l.ts) * 1000)::bigint, coalesce(l.doc::text, 'null'), `+old+`, l.found
			FROM (SELECT l.*, count(*) OVER () AS found, coalesce(sum(`+size+`) OVER (ORDER BY l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
				FROM (SELECT * FROM %[1]s l WHERE l.id > $3 AND l.ts > coalesce(pg_catalog.statement_timestamp() - s.retention, '-infinity') ORDER BY l.id LIMIT $4) l) l
			WHERE l.before < $5) l ON true ORDER BY l.id`, []any{after, limit, replayBytes}, func(row pgx.CollectableRow) error {
		var id, op, k, doc *string
		var millis, found *int64
		var hole ReplayGap
		var noticed, behind string
		var e liveEvent
		if err := row.Scan(&known, &behind, &hole.Floor, &hole.Reason, &noticed, &id, &op, &k, &millis, &doc, &e.old, &found); err != nil || id == nil {
			return err
		}
		e.id, e.op, e.k, e.millis, e.doc = *id, *op, *k, *millis, *doc
		if len(page) == 0 {
			prev = behind
		}
		event := ReplayEvent{ID: e.id, Payload: e.payload(prev)}
		if before != "" && before <= hole.Floor && hole.Floor < e.id && (r.passed == "" || noticed != r.passed) {
			event.Gap = &hole
		}
		page = append(page, event)
		more = *found == int64(limit) || int64(len(page)) < *found
		before, prev = e.id, e.id
		return nil
	})
	if err != nil {
		return nil, false, fmt.Errorf("read the log of a stream: %w", err)
	}
	if known || after == "" || len(page) == 0 {
		return page, more, nil
	}
	var floor string
	first := page[0].ID
	err = r.query(ctx, `SELECT coalesce(greatest(s.floor, (SELECT max(l.id) FROM %[1]s l WHERE l.id > $3 AND l.id < $4)), '')
		FROM koldstore.stream s WHERE s.stream_id = $1 AND s.log_oid = $2`, []any{after, first}, func(row pgx.CollectableRow) error { return row.Scan(&floor) })
	if err != nil {
		return nil, false, fmt.Errorf("find the beginning of a stream: %w", err)
	}
	if floor > after { // also if it has passed the page meanwhile, or events whose commits were told of late
		page[0].Gap = &ReplayGap{Floor: floor, Reason: Expired}
	}
	return page, more, nil
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
