package coldstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// What becomes of a flush job (koldstore.job.status).
const (
	jobQueued    = "queued"
	jobRunning   = "running"
	jobCompleted = "completed"
	jobNotDue    = "not_due"
	jobCancelled = "cancelled"
	jobError     = "error"
)

// Result is how a flush job stands. Its JSON is what koldstore.flush_table returns.
type Result struct {
	OK          bool      `json:"ok"`
	JobID       uuid.UUID `json:"job_id"`
	Status      string    `json:"status"`
	RowsFlushed int64     `json:"rows_flushed"`
	Segments    int64     `json:"segments"`
	Error       *string   `json:"error"`
}

// job is a flush job that this process has claimed.
type job struct {
	id    uuid.UUID
	table uint32
	force bool
	// startedAt is the claim: whoever takes the job over writes another time, and this process's updates find nothing.
	startedAt      time.Time
	rows, segments int64         // progress, also that of earlier claims
	done           chan struct{} // closed when this claim is at its end
}

// Enqueue queues a flush of a table, or finds the one that is queued or running (status already_running). It does not wait.
func (s *Store) Enqueue(ctx context.Context, table uint32, force bool) (Result, error) {
	if _, err := loadTable(ctx, s.pool, table, s.cfg.Now()); err != nil {
		return Result{}, err
	}
	r := Result{OK: true}
	err := s.pool.QueryRow(ctx, "SELECT job_id, status FROM koldstore.enqueue_flush($1, $2)", table, force).Scan(&r.JobID, &r.Status)
	if err != nil {
		return Result{}, fmt.Errorf("enqueue flush of table %d: %w", table, err)
	}
	return r, nil
}

// waitInterval is the time between two looks at a job that somebody else carries out.
const waitInterval = 50 * time.Millisecond

// Flush sees a flush job to its end and says how it ended. It carries the job out itself if nobody has begun and this process
// is the leader; otherwise it waits. The error is for not knowing the outcome; a flush that failed is a Result with status
// error. When ctx ends while the job is at work here, the job goes back to the queue.
func (s *Store) Flush(ctx context.Context, jobID uuid.UUID) (Result, error) {
	for {
		if done := s.runningHere(jobID); done != nil {
			select {
			case <-done:
			case <-ctx.Done():
				return Result{}, ctx.Err()
			}
		}
		r, err := s.result(ctx, jobID)
		if err != nil {
			return Result{}, err
		}
		if r.Status == jobQueued {
			j, err := s.claim(ctx, &jobID)
			switch {
			case err != nil && ctx.Err() != nil:
				return Result{}, ctx.Err()
			case err != nil:
				s.log.Debug().Err(err).Str("job", jobID.String()).Msg("flush is left to another instance")
			case j != nil:
				if err := s.carryOut(ctx, j); err != nil {
					return Result{}, err
				}
				continue
			}
		}
		if r.Status != jobQueued && r.Status != jobRunning {
			return r, nil
		}
		select {
		case <-time.After(waitInterval):
		case <-ctx.Done():
			return Result{}, ctx.Err()
		}
	}
}

// result reads how a job stands.
func (s *Store) result(ctx context.Context, id uuid.UUID) (Result, error) {
	r := Result{JobID: id}
	err := s.pool.QueryRow(ctx, `SELECT status, coalesce((progress ->> 'rows_flushed')::bigint, 0), coalesce((progress ->> 'segments')::bigint, 0), error
		FROM koldstore.job WHERE job_id = $1 AND job_type = 'flush'`, id).Scan(&r.Status, &r.RowsFlushed, &r.Segments, &r.Error)
	if errors.Is(err, pgx.ErrNoRows) {
		return Result{}, koldproxy.Errorf(koldproxy.CodeInvalidParameter, "there is no flush job %s", id)
	}
	if err != nil {
		return Result{}, fmt.Errorf("read job %s: %w", id, err)
	}
	r.OK = r.Status != jobError && r.Status != jobCancelled
	return r, nil
}

func (s *Store) runningHere(id uuid.UUID) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j, ok := s.running[id]; ok {
		return j.done
	}
	return nil
}

// begin notes that a claim is at work in this process. A claim of the same job that is still here has lost it.
func (s *Store) begin(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[j.id] = j
}

// end lets go of a claim. orphan says that the job may be left running in the catalog.
func (s *Store) end(j *job, orphan bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[j.id] == j {
		delete(s.running, j.id)
	}
	s.requeue = s.requeue || orphan
	close(j.done)
}

// claim takes a queued job, the given one or the oldest, and marks it as running here. No job is nil. Jobs of tables that are
// still being seeded or healed stay in the queue.
func (s *Store) claim(ctx context.Context, id *uuid.UUID) (*job, error) {
	j := &job{done: make(chan struct{})}
	var args []byte
	begun := false
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.cfg.fence(ctx, tx); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, `
			UPDATE koldstore.job SET status = 'running', started_at = clock_timestamp()
			WHERE job_id = (
				SELECT j.job_id FROM koldstore.job j LEFT JOIN koldstore.managed_table m ON m.table_oid = j.table_oid
				WHERE j.job_type = 'flush' AND j.status = 'queued' AND coalesce(m.state, '') NOT IN ('pending', 'seeding', 'healing') AND ($1::uuid IS NULL OR j.job_id = $1)
				ORDER BY j.created_at FOR UPDATE OF j SKIP LOCKED LIMIT 1)
			RETURNING job_id, table_oid, args, started_at, coalesce((progress ->> 'rows_flushed')::bigint, 0), coalesce((progress ->> 'segments')::bigint, 0)`, id).
			Scan(&j.id, &j.table, &args, &j.startedAt, &j.rows, &j.segments)
		if err == nil {
			s.begin(j) // before the commit, so that nobody ever sees a running job that is not here
			begun = true
		}
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		if begun {
			s.end(j, true) // the commit may have come through
		}
		return nil, fmt.Errorf("claim flush job: %w", err)
	}
	var parsed struct {
		Force bool `json:"force"`
	}
	if err := json.Unmarshal(args, &parsed); err != nil {
		s.log.Warn().Err(err).Str("job", j.id.String()).Msg("arguments of a flush job cannot be read; it runs without force")
	}
	j.force = parsed.Force
	return j, nil
}

// carryOut runs a claimed job and records how it ended. The error is only for an outcome that could not be recorded.
func (s *Store) carryOut(ctx context.Context, j *job) error {
	recorded := false
	defer func() { s.end(j, !recorded) }()
	begin := time.Now()
	status, err := s.flush(ctx, j)
	var message *string
	switch {
	case err == nil:
	case ctx.Err() != nil: // the process is stopping; the next one goes on
		status = jobQueued
	case errors.Is(err, errCancelled):
		status = jobCancelled
	default:
		status = jobError
		text := explain(err)
		message = &text
		s.retryLater(j.table)
	}
	s.metrics.flushSeconds.Observe(time.Since(begin).Seconds())
	s.metrics.flushes.WithLabelValues(status).Inc()
	level := zerolog.InfoLevel
	if status == jobError {
		level = zerolog.ErrorLevel
	}
	s.log.WithLevel(level).Str("job", j.id.String()).Uint32("table", j.table).Str("status", status).Int64("rows", j.rows).Int64("segments", j.segments).AnErr("err", err).Dur("took", time.Since(begin)).Msg("flush ended")

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	recordErr := s.cfg.step("recorded")
	if recordErr == nil {
		_, recordErr = s.pool.Exec(ctx, `
			UPDATE koldstore.job SET status = $3, error = $4, ended_at = CASE WHEN $3 = 'queued' THEN NULL ELSE clock_timestamp() END
			WHERE job_id = $1 AND status = 'running' AND started_at = $2`, j.id, j.startedAt, status, message)
	}
	if recordErr != nil {
		return fmt.Errorf("record the end of flush job %s: %w", j.id, recordErr)
	}
	recorded = true
	return nil
}

// retryLater leaves a table alone for a while, after something that was not asked for by a person has failed.
func (s *Store) retryLater(table uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retryAt[table] = time.Now().Add(s.cfg.RetryAfter)
}

func (s *Store) mayRetry(table uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !time.Now().Before(s.retryAt[table])
}

// explain is an error with the detail that a client would get beside it.
func explain(err error) string {
	var client *koldproxy.Error
	if errors.As(err, &client) && client.Detail != "" {
		return err.Error() + ": " + client.Detail
	}
	return err.Error()
}

// adopt puts jobs that say running back into the queue if they belong to nobody: those of a process that died, and those
// whose end could not be recorded. Only the leader runs jobs, so to it every claim that is not at work here is an orphan.
func (s *Store) adopt(ctx context.Context) error {
	s.mu.Lock()
	needed := s.requeue
	s.requeue = false // before looking: what is orphaned from now on is looked for again
	s.mu.Unlock()
	if !needed {
		return nil
	}
	var adopted int64
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.cfg.fence(ctx, tx); err != nil {
			return err
		}
		orphans, err := s.orphans(ctx, tx)
		if err != nil {
			return err
		}
		for _, o := range orphans {
			tag, err := tx.Exec(ctx, `UPDATE koldstore.job SET status = 'queued', started_at = NULL
				WHERE job_id = $1 AND status = 'running' AND started_at IS NOT DISTINCT FROM $2`, o.JobID, o.StartedAt)
			if err != nil {
				return err
			}
			adopted += tag.RowsAffected()
		}
		return nil
	})
	if err != nil {
		s.mu.Lock()
		s.requeue = true
		s.mu.Unlock()
		return fmt.Errorf("take up interrupted flushes: %w", err)
	}
	if adopted > 0 {
		s.log.Info().Int64("jobs", adopted).Msg("interrupted flushes were taken up again")
	}
	return nil
}

// claim is a job that the catalog shows as running, and since when.
type claim struct {
	JobID     uuid.UUID
	StartedAt *time.Time
}

// orphans looks for claims that are not at work here. The catalog is read first: other goroutines claim jobs meanwhile, and
// note that before they commit, so a claim that the catalog shows is either here, or at its end, or an orphan.
func (s *Store) orphans(ctx context.Context, q querier) ([]claim, error) {
	rows, err := q.Query(ctx, "SELECT job_id, started_at FROM koldstore.job WHERE job_type = 'flush' AND status = 'running'")
	if err != nil {
		return nil, err
	}
	claims, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claim])
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(claims, func(c claim) bool {
		j, here := s.running[c.JobID]
		return here && c.StartedAt != nil && j.startedAt.Equal(*c.StartedAt)
	}), nil
}
