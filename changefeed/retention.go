package changefeed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
)

// Sweeper frees the space of events that are past their stream's retention. They have been invisible since the moment they
// expired; the policy on the log sees to that.
type Sweeper struct {
	interval time.Duration
	pool     *pgxpool.Pool
	log      zerolog.Logger
	metrics  *Metrics
}

// sweepRows is how many events one transaction removes at most.
const sweepRows = 5000

// NewSweeper makes a Sweeper that does nothing until Run. The pool's role must own the logs. An interval of zero turns sweeping
// off. Nil metrics count into the void.
func NewSweeper(interval time.Duration, pool *pgxpool.Pool, log zerolog.Logger, metrics *Metrics) *Sweeper {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Sweeper{interval: interval, pool: pool, log: log, metrics: metrics}
}

// Run sweeps at once and then every interval until ctx ends; then it returns nil.
func (s *Sweeper) Run(ctx context.Context) error {
	if s.interval <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(s.interval)
	defer ticker.Stop()
	for {
		removed, err := s.Sweep(ctx)
		if err != nil && ctx.Err() == nil {
			s.log.Error().Err(err).Msg("sweeping expired events failed")
		} else if removed > 0 {
			s.log.Debug().Int64("events", removed).Msg("expired events removed")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Sweep goes through all streams once and returns how many events it removed. A stream that fails does not keep it from
// going on with the others; the errors come back together.
func (s *Sweeper) Sweep(ctx context.Context) (removed int64, err error) {
	rows, err := s.pool.Query(ctx, `SELECT stream_id FROM koldstore.stream WHERE retention IS NOT NULL ORDER BY stream_id`)
	if err != nil {
		return 0, fmt.Errorf("list streams with a retention: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("list streams with a retention: %w", err)
	}
	var failed error
	for _, id := range ids {
		for {
			n, more, err := s.sweepPage(ctx, id)
			removed += n
			s.metrics.swept.Add(float64(n))
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("sweep stream %d: %w", id, err))
			}
			if err != nil || !more {
				break
			}
		}
	}
	return removed, failed
}

// sweepPage looks at the oldest events of a log. They are in the order of their commits, so when one of these pages holds an
// event that is to stay, the pages behind it hold next to none that is to go: a later sweep gets those.
func (s *Sweeper) sweepPage(ctx context.Context, id int64) (removed int64, more bool, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var log string
		// DROP STREAM locks this row first and the log second; so does this.
		err := tx.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname)
			FROM koldstore.stream s
			JOIN pg_catalog.pg_class c ON c.oid = s.log_oid
			JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
			WHERE s.stream_id = $1 AND s.retention IS NOT NULL FOR NO KEY UPDATE OF s`, id).Scan(&log)
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
