package changefeed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// TailConfig says how a [Tail] works. Start from [DefaultTailConfig].
type TailConfig struct {
	// Database is the name of the database as topics show it.
	Database string
	// MaxBehind is how many events of a stream may have been missed for them to be published at the start; beyond it live
	// push goes on at the end of the log. Default 10 000.
	MaxBehind int
	// PageRows is how many events are read at once; default 1000.
	PageRows int
	// Interval is how often positions are stored and lag is measured; default 1 s.
	Interval time.Duration
}

// DefaultTailConfig returns a TailConfig for a database with every default filled in.
func DefaultTailConfig(database string) TailConfig {
	return TailConfig{Database: database, MaxBehind: 10_000, PageRows: 1000, Interval: time.Second}
}

// Tail follows the stream logs of one database and tells live subscribers about new events, in order: each event goes to the
// stream's topic, and a NOTIFY on channel koldstore_stream_<name> with the newest id follows. What it says is a hint; the log
// is the truth. It begins where its stored position is, with a new stream at the stream's creation: the events that
// start = 'earliest' backfilled are in the log for those who want them and are not pushed. Logs of topics that nobody wants are not read.
//
// Stats and Wake may be called from any goroutine at any time.
type Tail struct {
	cfg     TailConfig
	follows bool // it tells its own subscribers what another instance applies: it stores nothing and notifies nobody
	pool    *pgxpool.Pool
	publish Publisher
	log     zerolog.Logger
	metrics *Metrics
	wake    chan struct{}

	streams map[int64]*tailed // by stream_id; belongs to Run or Follow
	holding bool              // see hold; the same
	upTo    string            // the position in the write-ahead log that hold waits for

	mu  sync.Mutex
	lag map[string]liveStream // by schema.name
}

type liveStream struct {
	topic string
	lag   int64
}

// tailed is where the tail is in one stream.
type tailed struct {
	id                        int64
	label, name, topic, table string
	preImage                  bool
	retention                 *string // as an interval literal
	events                    int64   // the stream's counter when it was last read to the end, -1 before
	position, stored          string  // the last id that was published, and what the catalog says about it
	told                      string  // the last id that NOTIFY has told
}

// NewTail makes a Tail that does nothing until Run. The pool's role must own the logs. Nil metrics count into the void.
func NewTail(cfg TailConfig, pool *pgxpool.Pool, publisher Publisher, log zerolog.Logger, metrics *Metrics) *Tail {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Tail{
		cfg: cfg, pool: pool, publish: publisher, metrics: metrics, log: log.With().Str("db", cfg.Database).Logger(),
		wake: make(chan struct{}, 1), lag: make(map[string]liveStream),
	}
}

// NewFollower makes a Tail for an instance that does not lead, whose subscribers are to be told all the same. It does nothing until
// Follow.
func NewFollower(cfg TailConfig, pool *pgxpool.Pool, publisher Publisher, log zerolog.Logger, metrics *Metrics) *Tail {
	t := NewTail(cfg, pool, publisher, log, metrics)
	t.follows = true
	return t
}

// Wake says that there may be new events. It never blocks.
func (t *Tail) Wake() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Run publishes until ctx ends, then stores its positions and returns nil. Errors are logged and tried again. It must run on
// the leader only, and not twice at a time.
func (t *Tail) Run(ctx context.Context) error {
	t.streams, t.holding, t.upTo = make(map[int64]*tailed), true, ""
	ticker := time.NewTicker(t.cfg.Interval)
	defer ticker.Stop()
	defer t.storePositionsAtEnd(ctx)
	failing, pause := false, holdPause
	for {
		err := t.hold(ctx)
		if err == nil {
			err = t.pass(ctx)
		}
		var soon <-chan time.Time
		if t.holding && err == nil {
			soon = time.After(pause)
			pause = min(2*pause, t.cfg.Interval)
		}
		select {
		case <-ctx.Done():
			return nil
		default:
		}
		if err != nil && !failing {
			t.log.Error().Err(err).Msg("live push is stalled, trying again")
		}
		failing = err != nil
		wake := t.wake
		if failing {
			wake = nil // not more often than the ticker says
		}
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		case <-soon:
		case <-ticker.C:
			if _, err := t.storePositions(ctx); err != nil && ctx.Err() == nil {
				t.log.Error().Err(err).Msg("cannot store the positions of live push")
			}
		}
	}
}

// Follow publishes what is new in each interval until ctx ends, then returns nil. It does nothing while turn is held, as it is
// while this instance leads and Run publishes. It begins at the ends of the logs: what was missed before is told by Run.
func (t *Tail) Follow(ctx context.Context, turn *sync.Mutex) error {
	ticker := time.NewTicker(t.cfg.Interval)
	defer ticker.Stop()
	failing := false
	for {
		if turn.TryLock() {
			err := t.pass(ctx)
			turn.Unlock()
			if err != nil && !failing && ctx.Err() == nil {
				t.log.Error().Err(err).Msg("live push is stalled, trying again")
			}
			failing = err != nil
		} else {
			t.streams = nil
			t.forgetLag()
		}
		select {
		case <-ctx.Done():
			t.forgetLag()
			return nil
		case <-ticker.C:
		}
	}
}

// holdPause is when it is asked again whether live push may begin, twice as late each time: mostly there is next to nothing to wait for.
const holdPause = 10 * time.Millisecond

// hold keeps live push back from the beginning of Run until everything that was committed before is in the logs: only then it shows how
// far behind a stream is. Who waits for NOTIFY is told of new events meanwhile.
func (t *Tail) hold(ctx context.Context) error {
	if !t.holding {
		return nil
	}
	if t.upTo == "" {
		if err := t.pool.QueryRow(ctx, `SELECT pg_catalog.pg_current_wal_flush_lsn()::text`).Scan(&t.upTo); err != nil {
			return fmt.Errorf("find the end of the write-ahead log: %w", err)
		}
	}
	var applied bool
	err := t.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_slots r JOIN koldstore.checkpoint c USING (slot_name)
		WHERE r.database = pg_catalog.current_database() AND r.confirmed_flush_lsn >= $1::text::pg_lsn)`, t.upTo).Scan(&applied)
	if err != nil {
		return fmt.Errorf("look how far changes are applied: %w", err)
	}
	if !applied {
		return nil
	}
	for _, s := range t.streams {
		if err := t.skipIfFarBehind(ctx, s); err != nil {
			if err = t.unlessDropped(ctx, s, err); err != nil {
				return err
			}
		}
		s.events = -1 // to be read
	}
	t.holding = false
	return nil
}

// pass publishes everything that is new by now, unless it is held back.
func (t *Tail) pass(ctx context.Context) error {
	due, err := t.look(ctx)
	if err != nil {
		return fmt.Errorf("look for new events: %w", err)
	}
	newest := make(map[*tailed]string, len(due)) // in the logs of those that are held back
	var failed error
	due, skipped := t.skipUnwanted(ctx, due)
	for _, s := range due {
		// One log that cannot be read (it is being dropped) is no reason to leave the others out.
		var err error
		if t.holding {
			var end string
			if err = t.pool.QueryRow(ctx, s.endSQL(), s.position).Scan(&end); err == nil {
				newest[s] = end
			}
		} else {
			err = t.drain(ctx, s)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("read the log of stream %s: %w", s.label, err))
		}
	}
	var channels, ids []string
	for _, s := range slices.Concat(due, skipped) {
		if id := max(s.position, newest[s]); id != s.told {
			s.told = id
			channels, ids = append(channels, channel(s.name)), append(ids, id)
		}
	}
	if len(ids) > 0 && !t.follows {
		_, err := t.pool.Exec(ctx, `SELECT pg_catalog.pg_notify(u.channel, u.id) FROM unnest($1::text[], $2::text[]) AS u(channel, id)`, channels, ids)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("notify: %w", err))
		}
	}
	return failed
}

// look reads which streams there are and returns those with events that have not been read.
func (t *Tail) look(ctx context.Context) ([]*tailed, error) {
	rows, err := t.pool.Query(ctx, `
		SELECT s.stream_id, s.schema_name, s.name, pg_catalog.format('%I.%I', n.nspname, c.relname), s.pre_image, s.retention::text, u.events, coalesce(u.tail_id, '')
		FROM koldstore.stream s
		JOIN koldstore.stream_status u USING (stream_id)
		JOIN pg_catalog.pg_class c ON c.oid = s.log_oid
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE s.state NOT IN ('pending', 'seeding')
		ORDER BY s.stream_id`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	present := make(map[int64]bool)
	var due, unknown []*tailed
	for rows.Next() {
		var now tailed
		var schema string
		var events int64
		if err := rows.Scan(&now.id, &schema, &now.name, &now.table, &now.preImage, &now.retention, &events, &now.stored); err != nil {
			return nil, err
		}
		now.label, now.topic = schema+"."+now.name, koldproxy.StreamTopic(t.cfg.Database, schema, now.name)
		s := t.streams[now.id]
		if s == nil {
			s = &now
			s.events, s.position, s.told = -1, s.stored, s.stored
			unknown = append(unknown, s)
		} else {
			s.table, s.retention = now.table, now.retention
		}
		present[now.id] = true
		if s.events != events {
			// Read before the log is: what comes in between is found by the next look.
			s.events = events
			due = append(due, s)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	rows.Close()
	begins := t.streams == nil
	if begins {
		t.streams = make(map[int64]*tailed)
	}
	for _, s := range unknown {
		switch {
		case t.follows && begins:
			err = t.skipToEnd(ctx, s)
		case !t.holding:
			err = t.skipIfFarBehind(ctx, s)
		}
		if err != nil {
			if err = t.unlessDropped(ctx, s, err); err != nil {
				return nil, err
			}
			continue
		}
		t.streams[s.id] = s
	}
	t.keepOnly(present)
	return due, nil
}

// keepOnly forgets streams that were dropped and lists those that are there.
func (t *Tail) keepOnly(present map[int64]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, s := range t.streams {
		if !present[id] {
			delete(t.streams, id)
			delete(t.lag, s.label)
			t.metrics.forgetStream(s.label)
		}
	}
	for _, s := range t.streams { // after the deletions: a stream may have been dropped and created again
		t.metrics.knowStream(s.label)
		if entry := t.lag[s.label]; entry.topic == "" {
			t.lag[s.label] = liveStream{topic: s.topic}
		}
	}
}

func (t *Tail) setLag(s *tailed, lag int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lag[s.label] = liveStream{topic: s.topic, lag: lag}
}

// skipIfFarBehind spares subscribers a flood of history.
func (t *Tail) skipIfFarBehind(ctx context.Context, s *tailed) error {
	var behind int64
	err := t.pool.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) FROM (SELECT FROM %s WHERE id > $1 ORDER BY id LIMIT $2) x`, s.table),
		s.position, t.cfg.MaxBehind+1).Scan(&behind)
	if err != nil {
		return fmt.Errorf("measure how far stream %s is behind: %w", s.label, err)
	}
	if behind <= int64(t.cfg.MaxBehind) {
		return nil
	}
	err = t.pool.QueryRow(ctx, fmt.Sprintf(`SELECT count(*), max(id) FROM %s WHERE id > $1`, s.table), s.position).Scan(&behind, &s.position)
	if err != nil {
		return fmt.Errorf("skip to the end of stream %s: %w", s.label, err)
	}
	t.metrics.skipped.Add(float64(behind))
	t.log.Warn().Str("stream", s.label).Int64("events", behind).Str("id", s.position).
		Msg("live push is too far behind and goes on at the end of the log; the events are in the log")
	return nil
}

// skipToEnd is for what nobody here waits for.
func (t *Tail) skipToEnd(ctx context.Context, s *tailed) error {
	t.setLag(s, 0)
	if err := t.pool.QueryRow(ctx, s.endSQL(), s.position).Scan(&s.position); err != nil {
		return fmt.Errorf("find the end of stream %s: %w", s.label, err)
	}
	return nil
}

// endSQL asks for the last id, given the position.
func (s *tailed) endSQL() string { return fmt.Sprintf(`SELECT greatest(max(id), $1) FROM %s`, s.table) }

// skipUnwanted moves streams that nobody waits for to the ends of their logs, all in one round trip. What it says is left is to be
// drained: also streams that somebody has subscribed to meanwhile, and all of them if a log cannot be read.
func (t *Tail) skipUnwanted(ctx context.Context, due []*tailed) (left, skipped []*tailed) {
	var unwanted []*tailed
	var ends pgx.Batch
	for _, s := range due {
		if t.publish.Wants(s.topic) {
			left = append(left, s)
		} else {
			unwanted = append(unwanted, s)
			ends.Queue(s.endSQL(), s.position)
		}
	}
	if len(unwanted) == 0 {
		return left, nil
	}
	positions := make([]string, len(unwanted))
	for i := range unwanted {
		ends.QueuedQueries[i].QueryRow(func(row pgx.Row) error { return row.Scan(&positions[i]) })
	}
	if err := t.pool.SendBatch(ctx, &ends).Close(); err != nil {
		return due, nil
	}
	for i, s := range unwanted {
		// Whoever subscribes now has been told so after this look at the log, or is seen here.
		if t.publish.Wants(s.topic) {
			left = append(left, s)
			continue
		}
		s.position = positions[i]
		t.setLag(s, 0)
		skipped = append(skipped, s)
	}
	return left, skipped
}

// drain publishes what a log holds after the tail's position.
func (t *Tail) drain(ctx context.Context, s *tailed) error {
	measured := time.Now()
	for {
		n, err := t.page(ctx, s)
		if err != nil {
			s.events = -1 // look again
			return t.unlessDropped(ctx, s, err)
		}
		if n < t.cfg.PageRows {
			t.setLag(s, 0)
			return nil
		}
		if time.Since(measured) < t.cfg.Interval {
			continue
		}
		measured = time.Now()
		var lag int64
		if err := t.pool.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) FROM %s WHERE id > $1`, s.table), s.position).Scan(&lag); err != nil {
			return err
		}
		t.setLag(s, lag)
		if t.follows {
			continue
		}
		if _, err := t.storePositions(ctx); err != nil {
			return err
		}
	}
}

// unlessDropped is nil if a stream could not be read because it, or its log, has been dropped meanwhile, and err otherwise.
func (t *Tail) unlessDropped(ctx context.Context, s *tailed, err error) error {
	var there bool
	look := t.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM koldstore.stream s JOIN pg_catalog.pg_class c ON c.oid = s.log_oid WHERE s.stream_id = $1)`, s.id).Scan(&there)
	if look == nil && !there {
		return nil
	}
	return err
}

// page publishes up to PageRows events. Expired ones are past: they are counted as read and not published.
func (t *Tail) page(ctx context.Context, s *tailed) (n int, err error) {
	old := "NULL::text"
	if s.preImage {
		old = "coalesce(old::text, 'null')"
	}
	rows, err := t.pool.Query(ctx, fmt.Sprintf(`SELECT id, op, k::text, pg_catalog.floor(EXTRACT(epoch FROM ts) * 1000)::bigint, coalesce(doc::text, 'null'), %s,
			coalesce(ts <= pg_catalog.statement_timestamp() - $3::text::interval, false)
		FROM %s WHERE id > $1 ORDER BY id LIMIT $2`, old, s.table), s.position, t.cfg.PageRows, s.retention)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var e liveEvent
		var expired bool
		if err := rows.Scan(&e.id, &e.op, &e.k, &e.millis, &e.doc, &e.old, &expired); err != nil {
			return n, err
		}
		n++
		if !expired {
			t.publish.Publish(s.topic, e.payload(s.position))
			t.metrics.published.Inc()
		}
		s.position = e.id
	}
	return n, rows.Err()
}

// storePositions writes down how far each stream has been published. It waits for nobody: what the applier has locked, until its
// transaction ends, is left for the next time, and counted.
func (t *Tail) storePositions(ctx context.Context) (left int, err error) {
	var ids []int64
	var positions []string
	for _, s := range t.streams {
		if s.position != s.stored {
			ids, positions = append(ids, s.id), append(positions, s.position)
		}
	}
	if len(ids) == 0 {
		return 0, nil
	}
	rows, err := t.pool.Query(ctx, `WITH free AS MATERIALIZED (SELECT t.stream_id FROM koldstore.stream_status t WHERE t.stream_id = ANY ($1) FOR NO KEY UPDATE SKIP LOCKED)
		UPDATE koldstore.stream_status t SET tail_id = greatest(t.tail_id, u.id)
		FROM unnest($1::bigint[], $2::text[]) AS u(stream_id, id) JOIN free USING (stream_id)
		WHERE t.stream_id = u.stream_id RETURNING u.stream_id, u.id`, ids, positions)
	if err != nil {
		return 0, fmt.Errorf("store positions of streams: %w", err)
	}
	left = len(ids)
	var id int64
	var position string
	_, err = pgx.ForEachRow(rows, []any{&id, &position}, func() error {
		t.streams[id].stored = position
		left--
		return nil
	})
	if err != nil {
		return left, fmt.Errorf("store positions of streams: %w", err)
	}
	return left, nil
}

// farewell is how long the last storing of positions may take.
const farewell = 2 * time.Second

func (t *Tail) storePositionsAtEnd(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
	defer cancel()
	for {
		left, err := t.storePositions(ctx)
		if err == nil && left > 0 {
			err = pause(ctx)
		}
		if err != nil {
			t.log.Warn().Err(err).Msg("cannot store the positions of live push; what was published last will be published again")
		}
		if err != nil || left == 0 {
			break
		}
	}
	t.forgetLag()
}

// forgetLag makes Stats say nothing.
func (t *Tail) forgetLag() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lag = make(map[string]liveStream)
}

// Stats is what SHOW STREAMS shows beside the catalog: {"<schema>.<stream>": {"consumers": n, "lag": n}}. Lag is the number of
// events after the tail's position, as of at most about a second ago. It is an empty object while neither Run nor Follow publishes.
func (t *Tail) Stats() json.RawMessage {
	type entry struct {
		Consumers int   `json:"consumers"`
		Lag       int64 `json:"lag"`
	}
	t.mu.Lock()
	out := make(map[string]entry, len(t.lag))
	topics := make(map[string]string, len(t.lag))
	for label, s := range t.lag {
		out[label], topics[label] = entry{Lag: s.lag}, s.topic
	}
	t.mu.Unlock()
	for label, topic := range topics {
		out[label] = entry{Consumers: t.publish.Consumers(topic), Lag: out[label].Lag}
	}
	b, err := json.Marshal(out)
	if err != nil {
		return json.RawMessage("{}")
	}
	return b
}
