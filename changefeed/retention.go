package changefeed

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
)

// Sweeper frees the space of events that are past their stream's retention. They have been invisible since the moment they
// expired; the policy on the log sees to that. It also makes the partitions of logs ahead of time.
//
// A log is partitioned by age. A partition whose events have all expired is detached, which waits for those who read the log
// but lets nobody wait, and then dropped: there is nothing to vacuum. That is done within seconds, because roles that bypass
// row-level security see expired events until then. Events are deleted one by one only from a partition that lasts too long to
// wait for its end, and once in an interval: it was made under a longer retention, or nothing has been written since.
type Sweeper struct {
	interval time.Duration
	pool     *pgxpool.Pool
	log      zerolog.Logger
	metrics  *Metrics
	sweeping sync.Mutex // a log can have one partition only that is being detached
}

const (
	// sweepRows is how many events one transaction deletes at most.
	sweepRows = 5000
	// tendInterval is how often logs are looked at for whether they need another partition, or an old one has expired.
	tendInterval = 5 * time.Second
	// detachTimeout is how long a sweep waits for readers of one log; the next one goes on from there.
	detachTimeout = 30 * time.Second
	// lockTimeout bounds the waiting for a lock, behind which others would have to wait.
	lockTimeout = time.Second
	// room is for how long a log must have partitions when one is detached: until that is done none can be attached.
	room = detachTimeout + 15*time.Second
)

// NewSweeper makes a Sweeper that does nothing until Run. The pool's role must own the logs. An interval of zero turns sweeping
// off. Nil metrics count into the void.
func NewSweeper(interval time.Duration, pool *pgxpool.Pool, log zerolog.Logger, metrics *Metrics) *Sweeper {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Sweeper{interval: interval, pool: pool, log: log, metrics: metrics}
}

// Run sweeps at once and then every interval, extends logs, and keeps their privileges those of their tables, until ctx ends; then it
// returns nil.
func (s *Sweeper) Run(ctx context.Context) error {
	var tending sync.WaitGroup
	tending.Go(func() { s.every(ctx, tendInterval, s.extend) })
	tending.Go(func() { s.every(ctx, tendInterval, s.followRights) })
	if s.interval > 0 {
		tending.Go(func() { s.every(ctx, tendInterval, s.expire) })
		s.every(ctx, s.interval, s.sweepAndLog)
	}
	tending.Wait()
	return nil
}

func (s *Sweeper) every(ctx context.Context, interval time.Duration, work func(context.Context)) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		work(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (s *Sweeper) sweepAndLog(ctx context.Context) {
	removed, err := s.Sweep(ctx)
	if err != nil && ctx.Err() == nil {
		s.log.Error().Err(err).Msg("sweeping expired events failed")
	} else if removed > 0 {
		s.log.Debug().Int64("events", removed).Msg("expired events removed")
	}
}

// extend makes the partitions that will be needed soon. Should it fail, the applier makes them when they are needed.
func (s *Sweeper) extend(ctx context.Context) {
	if err := s.tend(ctx, `SELECT koldstore.extend_logs()`); err != nil && ctx.Err() == nil {
		s.log.Warn().Err(err).Msg("cannot make partitions of logs ahead of time")
	}
}

// followRights gives logs and mirrors the privileges of their tables. Where event triggers can be installed that is done already.
func (s *Sweeper) followRights(ctx context.Context) {
	if err := s.tend(ctx, `SELECT koldstore.follow_rights()`); err != nil && ctx.Err() == nil {
		s.log.Warn().Err(err).Msg("cannot give logs and mirrors the privileges of their tables")
	}
}

// tend runs a statement that waits for nobody for long.
func (s *Sweeper) tend(ctx context.Context, sql string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = '%dms'`, lockTimeout.Milliseconds())); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql)
		return err
	})
}

// expire takes away partitions that have expired, of logs that are written to, unless a sweep is doing that.
func (s *Sweeper) expire(ctx context.Context) {
	if !s.sweeping.TryLock() {
		return
	}
	defer s.sweeping.Unlock()
	rows, err := s.pool.Query(ctx, `SELECT s.stream_id FROM koldstore.stream s CROSS JOIN koldstore.checkpoint k
		CROSS JOIN LATERAL (SELECT l.upper FROM koldstore.log_partitions(s.log_oid) AS l ORDER BY l.upper LIMIT 1) AS p
		WHERE s.retention IS NOT NULL AND s.state NOT IN ('pending', 'seeding') AND p.upper <= koldstore.event_id(k.watermark, '0/0')
		  AND p.upper <= koldstore.millis_prefix(pg_catalog.floor(EXTRACT(epoch FROM pg_catalog.statement_timestamp() - s.retention) * 1000)::bigint)
		  AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = s.log_oid AND i.inhdetachpending) -- the next sweep goes on with that
		ORDER BY s.stream_id`)
	var due []int64
	if err == nil {
		due, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	}
	for _, id := range due {
		_, failed := s.repeat(ctx, id, s.sweepPartition)
		err = errors.Join(err, failed)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn().Err(err).Msg("cannot take expired partitions of logs away")
	}
}

// Sweep goes through all streams once and returns how many events it removed. A stream that fails does not keep it from
// going on with the others; the errors come back together.
func (s *Sweeper) Sweep(ctx context.Context) (removed int64, err error) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	failed := s.dropDetached(ctx)
	rows, err := s.pool.Query(ctx, `SELECT stream_id FROM koldstore.stream WHERE retention IS NOT NULL ORDER BY stream_id`)
	if err != nil {
		return 0, fmt.Errorf("list streams with a retention: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("list streams with a retention: %w", err)
	}
	for _, id := range ids {
		for _, step := range []sweepStep{s.sweepPartition, s.sweepPage} {
			n, err := s.repeat(ctx, id, step)
			removed += n
			failed = errors.Join(failed, err)
		}
	}
	return removed, failed
}

// sweepStep removes some of a stream's expired events and says how many, and whether there may be more.
type sweepStep func(ctx context.Context, stream int64) (removed int64, more bool, err error)

// repeat does a step until nothing is left to do.
func (s *Sweeper) repeat(ctx context.Context, stream int64, step sweepStep) (removed int64, err error) {
	for more := true; more; {
		var n int64
		n, more, err = step(ctx, stream)
		removed += n
		s.metrics.swept.Add(float64(n))
		if err != nil {
			return removed, fmt.Errorf("sweep stream %d: %w", stream, err)
		}
	}
	return removed, nil
}

// oldest is the oldest partition of a log.
type oldest struct {
	log, part string
	events    int64
}

// sweepPartition takes away the oldest partition of a log, if all of its events have expired and none will be added: its ids
// are below the highest position that was handed out. The end of a backfill needs a lock on the log that would have
// to wait for a partition that is being detached, so partitions stay until then.
func (s *Sweeper) sweepPartition(ctx context.Context, id int64) (removed int64, more bool, err error) {
	var p oldest
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		p = oldest{}
		// DROP STREAM locks this row first and the log second; so does this.
		err := tx.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), p.part::regclass::text
			FROM koldstore.stream s
			JOIN pg_catalog.pg_class c ON c.oid = s.log_oid
			JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
			CROSS JOIN LATERAL (SELECT l.part, l.upper FROM koldstore.log_partitions(s.log_oid) AS l ORDER BY l.upper LIMIT 1) AS p
			WHERE s.stream_id = $1 AND s.retention IS NOT NULL AND s.state NOT IN ('pending', 'seeding')
			  AND p.upper <= (SELECT koldstore.event_id(k.watermark, '0/0') FROM koldstore.checkpoint k) FOR NO KEY UPDATE OF s`, id).Scan(&p.log, &p.part)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		var newest *string
		var gone bool
		err = tx.QueryRow(ctx, fmt.Sprintf(`WITH s AS (SELECT pg_catalog.statement_timestamp() - retention AS horizon FROM koldstore.stream WHERE stream_id = $1)
			SELECT coalesce((SELECT l.ts <= s.horizon FROM %[1]s l ORDER BY l.id DESC LIMIT 1), true)
			   AND NOT EXISTS (SELECT FROM %[1]s l WHERE l.ts > s.horizon), (SELECT max(l.id) FROM %[1]s l) FROM s`, p.part), id).Scan(&gone, &newest)
		if err != nil || !gone {
			p.part = ""
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT count(*) FROM `+p.part).Scan(&p.events); err != nil || newest == nil {
			return err
		}
		// Said before the events go, so that nobody takes a log that begins later for a whole one.
		_, err = tx.Exec(ctx, `UPDATE koldstore.stream SET floor = greatest(floor, $2) WHERE stream_id = $1`, id, *newest)
		return err
	})
	if err != nil || p.part == "" {
		return 0, false, err
	}
	if err := s.detach(ctx, id, fmt.Sprintf(`ALTER TABLE %s DETACH PARTITION %s CONCURRENTLY`, p.log, p.part)); err != nil {
		return 0, false, err
	}
	return p.events, true, s.drop(ctx, p.part)
}

// detach runs one statement that waits for readers of a stream's log. Interrupted, it leaves a partition that no new query sees any
// more.
func (s *Sweeper) detach(ctx context.Context, stream int64, sql string) error {
	if exists, err := s.makeRoom(ctx, stream); err != nil || !exists {
		return err
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, fmt.Sprintf(`SET statement_timeout = '%dms'`, detachTimeout.Milliseconds())); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	_, reset := conn.Exec(context.WithoutCancel(ctx), `RESET statement_timeout`)
	return errors.Join(err, reset)
}

// makeRoom sees to it that the applier needs no new partition while one is being detached. It says whether the stream exists.
func (s *Sweeper) makeRoom(ctx context.Context, stream int64) (exists bool, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = '%dms'`, lockTimeout.Milliseconds())); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `SELECT koldstore.extend_log(s.log_oid, s.stream_id, s.retention, $2 +
				greatest((k.watermark >> 22) + 1704067200000, pg_catalog.floor(EXTRACT(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint))
			FROM koldstore.stream s CROSS JOIN koldstore.checkpoint k WHERE s.stream_id = $1 FOR KEY SHARE OF s`, stream, room.Milliseconds())
		exists = tag.RowsAffected() > 0
		return err
	})
	if err != nil {
		return false, fmt.Errorf("make room in a log: %w", err)
	}
	return exists, nil
}

// drop removes a table that was a partition; nobody reads it any more.
func (s *Sweeper) drop(ctx context.Context, part string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = '%dms'`, lockTimeout.Milliseconds())); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `DROP TABLE IF EXISTS `+part)
		return err
	})
}

// dropDetached finishes what an earlier sweep has begun: partitions that were being detached, and those that were.
func (s *Sweeper) dropDetached(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, `SELECT c.oid::regclass::text, coalesce(i.inhparent::regclass::text, ''), coalesce(s.stream_id, 0)
		FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid LEFT JOIN koldstore.stream s ON s.log_oid = i.inhparent
		WHERE c.relkind = 'r' AND koldstore.is_log_partition(c.relnamespace::regnamespace::text, c.relname) AND (i.inhrelid IS NULL OR i.inhdetachpending)`)
	if err != nil {
		return fmt.Errorf("list detached partitions: %w", err)
	}
	type detached struct {
		Part, Log string
		Stream    int64
	}
	left, err := pgx.CollectRows(rows, pgx.RowToStructByPos[detached])
	if err != nil {
		return fmt.Errorf("list detached partitions: %w", err)
	}
	var failed error
	for _, d := range left {
		var err error
		if d.Log != "" {
			err = s.detach(ctx, d.Stream, fmt.Sprintf(`ALTER TABLE %s DETACH PARTITION %s FINALIZE`, d.Log, d.Part))
		}
		if err == nil {
			err = s.drop(ctx, d.Part)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("drop partition %s: %w", d.Part, err))
		}
	}
	return failed
}

// sweepPage deletes expired events from a partition that will not be dropped for long: it covers more time than partitions
// of this retention do, or it has expired as a whole and is still the one that is written to. Events are in the order of their
// commits, so when one of these pages holds an event that is to stay, the pages behind it hold next to none that is to go.
func (s *Sweeper) sweepPage(ctx context.Context, id int64) (removed int64, more bool, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var log string
		err := tx.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname)
			FROM koldstore.stream s
			JOIN pg_catalog.pg_class c ON c.oid = s.log_oid
			JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
			CROSS JOIN LATERAL (SELECT l.upper FROM koldstore.log_partitions(s.log_oid) AS l ORDER BY l.upper LIMIT 1) AS p
			CROSS JOIN LATERAL (SELECT pg_catalog.to_timestamp(p.upper::bigint / 1000.0) AS until) AS t
			WHERE s.stream_id = $1 AND s.retention IS NOT NULL
			  AND (t.until > pg_catalog.statement_timestamp() + 2 * koldstore.log_width(s.retention)
			       OR t.until <= pg_catalog.statement_timestamp() - s.retention) FOR NO KEY UPDATE OF s`, id).Scan(&log)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		var looked int64
		err = tx.QueryRow(ctx, fmt.Sprintf(`WITH oldest AS (
				SELECT id, ts <= pg_catalog.statement_timestamp() - s.retention AS expired
				FROM (SELECT retention FROM koldstore.stream WHERE stream_id = $1) s, (SELECT id, ts FROM %[1]s ORDER BY id LIMIT $2) l),
			gone AS (DELETE FROM %[1]s l USING oldest WHERE l.id = oldest.id AND oldest.expired RETURNING l.id),
			raised AS (UPDATE koldstore.stream s SET floor = greatest(s.floor, f.id) FROM (SELECT max(id) AS id FROM gone) f
				WHERE s.stream_id = $1 AND f.id IS NOT NULL)
			SELECT (SELECT count(*) FROM oldest), (SELECT count(*) FROM gone)`, log), id, sweepRows).Scan(&looked, &removed)
		more = looked == sweepRows && removed == looked
		return err
	})
	if err != nil {
		return 0, false, err
	}
	return removed, more, nil
}
