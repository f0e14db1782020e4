package coldstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// RunJobs does what is to be done now: at most one queued flush, then what checks of storages, retention, compaction and the sweep
// ask for. Every PolicyInterval it also queues flushes of tables that are due. worked says that there may be more to do at once.
//
// It is for the leader. Its first call, and the first one of every Run, takes up jobs that a dead process has left.
func (s *Store) RunJobs(ctx context.Context) (worked bool, err error) {
	flushed, err := s.flushNext(ctx)
	if err != nil && !flushed {
		return false, err
	}
	did, choresErr := s.doChores(ctx)
	return flushed || did, errors.Join(err, choresErr)
}

// flushNext carries out the oldest queued flush, if there is one. Jobs of several tables may be at work at the same time.
func (s *Store) flushNext(ctx context.Context) (worked bool, err error) {
	if err := s.adopt(ctx); err != nil {
		return false, err
	}
	j, err := s.claim(ctx, nil)
	if err != nil || j == nil {
		return false, err
	}
	return true, s.carryOut(ctx, j)
}

// doChores does everything that nobody waits for.
func (s *Store) doChores(ctx context.Context) (worked bool, err error) {
	var errs []error
	for _, chore := range []func(context.Context) (bool, error){s.checkStorages, s.showPresence, s.forgetDropped, s.dropExpired, s.forgetTombstones, s.compactTables, s.sweep, s.shrinkMirrors, s.queueDue} {
		did, err := chore(ctx)
		worked = worked || did
		errs = append(errs, err) // one that fails does not keep the others from their work
	}
	return worked, errors.Join(errs...)
}

// due says whether it is time for a look, of which at says when it is due, and sets when the next one is.
func (s *Store) due(at *time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Before(*at) {
		return false
	}
	*at = now.Add(s.cfg.PolicyInterval)
	return true
}

// queueDue queues flushes of tables whose policy asks for one.
func (s *Store) queueDue(ctx context.Context) (bool, error) {
	if !s.due(&s.policyAt) {
		return false, nil
	}
	rows, err := s.pool.Query(ctx, `SELECT table_oid FROM koldstore.managed_table
		WHERE auto_flush AND state = 'active' AND (hot_row_limit IS NOT NULL OR move_after IS NOT NULL)`)
	if err != nil {
		return false, fmt.Errorf("look for tables to flush: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return false, fmt.Errorf("look for tables to flush: %w", err)
	}
	queued := false
	for _, oid := range tables {
		if !s.mayRetry(oid) {
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

// Run does what RunJobs does until ctx ends, flushes of up to Flushers tables and the rest beside each other: as long as there is
// work, then whenever koldstore_job is notified, and every PollInterval. It returns nil when ctx has ended; troubles are logged and tried again. One
// connection of its own listens.
func (s *Store) Run(ctx context.Context) error {
	s.mu.Lock()
	s.requeue = true // who led before may have left jobs, also when it was this process long ago
	s.policyAt = time.Time{}
	s.mu.Unlock()
	s.presence.beginAnew()
	group, ctx := errgroup.WithContext(ctx)
	work := []func(context.Context) (bool, error){s.doChores}
	for range s.cfg.Flushers {
		work = append(work, s.flushNext)
	}
	var wakes []chan struct{}
	for _, fn := range work {
		wake := make(chan struct{}, 1)
		wakes = append(wakes, wake)
		group.Go(func() error { s.repeat(ctx, wake, fn); return nil })
	}
	group.Go(func() error { s.listen(ctx, wakes); return nil })
	return group.Wait()
}

// repeat does one kind of work until ctx ends. What fails again and again is tried less and less often.
func (s *Store) repeat(ctx context.Context, wake <-chan struct{}, work func(context.Context) (bool, error)) {
	pause := s.cfg.PollInterval
	for ctx.Err() == nil {
		worked, err := work(ctx)
		switch {
		case err == nil:
			pause = s.cfg.PollInterval
		case ctx.Err() == nil:
			s.log.Error().Err(err).Msg("cold storage work failed and is tried again")
			pause = min(2*pause, max(s.cfg.PollInterval, s.cfg.PolicyInterval))
		}
		if worked && err == nil {
			continue
		}
		select {
		case <-wake:
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// listen pokes wakes at every notification. A lost connection is made again; meanwhile the poll goes on.
func (s *Store) listen(ctx context.Context, wakes []chan struct{}) {
	for {
		err := s.listenOnce(ctx, wakes)
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

func (s *Store) listenOnce(ctx context.Context, wakes []chan struct{}) error {
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
		for _, wake := range wakes {
			select {
			case wake <- struct{}{}:
			default: // it is awake already
			}
		}
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return err
		}
	}
}
