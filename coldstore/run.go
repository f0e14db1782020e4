package coldstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// RunJobs does what is to be done now: at most one queued flush, then what retention and the sweep ask for. Every
// PolicyInterval it also queues flushes of tables that are due. worked says that there may be more to do at once.
//
// It is for the leader. Its first call, and the first one of every Run, takes up jobs that a dead process has left.
func (s *Store) RunJobs(ctx context.Context) (worked bool, err error) {
	if err := s.adopt(ctx); err != nil {
		return false, err
	}
	j, err := s.claim(ctx, nil)
	if err != nil {
		return false, err
	}
	var errs []error
	if j != nil {
		worked = true
		errs = append(errs, s.carryOut(ctx, j))
	}
	for _, chore := range []func(context.Context) (bool, error){s.dropExpired, s.sweep, s.queueDue} {
		did, err := chore(ctx)
		worked = worked || did
		errs = append(errs, err) // one that fails does not keep the others from their work
	}
	return worked, errors.Join(errs...)
}

// queueDue queues flushes of tables whose policy asks for one.
func (s *Store) queueDue(ctx context.Context) (bool, error) {
	now := time.Now()
	s.mu.Lock()
	due := !now.Before(s.policyAt)
	if due {
		s.policyAt = now.Add(s.cfg.PolicyInterval)
	}
	s.mu.Unlock()
	if !due {
		return false, nil
	}
	rows, err := s.pool.Query(ctx, `SELECT table_oid FROM koldstore.managed_table
		WHERE auto_flush AND state = 'active' AND storage = $1 AND (hot_row_limit IS NOT NULL OR move_after IS NOT NULL)`, defaultStorage)
	if err != nil {
		return false, fmt.Errorf("look for tables to flush: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return false, fmt.Errorf("look for tables to flush: %w", err)
	}
	queued := false
	for _, oid := range tables {
		s.mu.Lock()
		wait := now.Before(s.retryAt[oid])
		s.mu.Unlock()
		if wait {
			continue
		}
		t, err := loadTable(ctx, s.pool, oid, s.cfg.Now())
		if err != nil {
			s.log.Debug().Err(err).Uint32("table", oid).Msg("table went away while looking for flushes")
			continue
		}
		through, err := planFlush(ctx, s.pool, t, false)
		if err != nil {
			return queued, err
		}
		if through < 0 {
			continue
		}
		if _, err := s.Enqueue(ctx, oid, false); err != nil {
			return queued, err
		}
		queued = true
	}
	return queued, nil
}

// Run calls RunJobs until ctx ends: as long as there is work, then whenever koldstore_job is notified, and every PollInterval.
// It returns nil when ctx has ended; troubles are logged and tried again. One connection of its own listens.
func (s *Store) Run(ctx context.Context) error {
	s.mu.Lock()
	s.requeue = true // who led before may have left jobs, also when it was this process long ago
	s.policyAt = time.Time{}
	s.mu.Unlock()
	wake := make(chan struct{}, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { s.listen(ctx, wake); return nil })
	group.Go(func() error {
		for ctx.Err() == nil {
			worked, err := s.RunJobs(ctx)
			if err != nil && ctx.Err() == nil {
				s.log.Error().Err(err).Msg("cold storage work failed and is tried again")
			}
			if worked && err == nil {
				continue
			}
			select {
			case <-wake:
			case <-time.After(s.cfg.PollInterval):
			case <-ctx.Done():
			}
		}
		return nil
	})
	return group.Wait()
}

// listen pokes wake at every notification. A lost connection is made again; meanwhile the poll goes on.
func (s *Store) listen(ctx context.Context, wake chan<- struct{}) {
	for {
		err := s.listenOnce(ctx, wake)
		if ctx.Err() != nil {
			return
		}
		s.log.Warn().Err(err).Msg("connection that listens for jobs was lost")
		select {
		case <-time.After(s.cfg.PollInterval):
		case <-ctx.Done():
			return
		}
	}
}

func (s *Store) listenOnce(ctx context.Context, wake chan<- struct{}) error {
	conn, err := pgx.ConnectConfig(ctx, s.pool.Config().ConnConfig)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "LISTEN koldstore_job"); err != nil {
		return err
	}
	for {
		// Also before the first notification: one may have come before this connection listened.
		select {
		case wake <- struct{}{}:
		default: // it is awake already
		}
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return err
		}
	}
}
