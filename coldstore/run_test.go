package coldstore_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/coldstore"
)

// Two stores on one table, as when leadership moves while the old leader is still at work: each row is in exactly one
// segment, and nothing fails for good.
func TestTwoFlushersOfOneTable(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.NoCompaction = true })
	tab := f.messages("max_rows_per_file = 10")
	for i := range 60 {
		tab.put(i, "x")
	}
	want, err := tab.drain(t.Context(), f.store, 100)
	ok(t, err)
	other := f.newStore()
	overtaken := false
	f.failpoint(func(step string) error {
		if step == "probed" && !overtaken { // in front of the first publication, the other one does everything
			overtaken = true
			f.runJobs(other)
		}
		return nil
	})
	queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	if again, err := other.Enqueue(t.Context(), tab.oid, true); err != nil || again.Status != "already_running" || again.JobID != queued.JobID {
		t.Errorf("second request: %+v, %v", again, err)
	}
	r, err := f.store.Flush(t.Context(), queued.JobID)
	ok(t, err)
	f.failpoint(nil)
	if r.Status != "completed" || r.RowsFlushed != 60 || tab.hot() != 0 {
		t.Errorf("%+v, %d hot", r, tab.hot())
	}
	if got, err := tab.drain(t.Context(), f.store, 100); err != nil || !maps.Equal(got, want) {
		t.Errorf("the feed changed: %v", err)
	}
	if n := len(tab.segments()); n != 6 {
		t.Errorf("%d segments", n)
	}
	tab.verified()
	tab.noLeftovers()
}

// A job that is at work while the same process is asked for it is waited for.
func TestManyWaitForOneFlush(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "x")
	queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	elsewhere := f.newStore()
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			store := f.store
			if i%2 == 0 {
				store = elsewhere
			}
			if r, err := store.Flush(t.Context(), queued.JobID); err != nil || r.Status != "completed" || r.RowsFlushed != 1 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	group.Wait()
	if n := len(tab.segments()); n != 1 {
		t.Errorf("%d segments", n)
	}
	if _, err := f.store.Flush(t.Context(), uuid.New()); err == nil {
		t.Error("a job that does not exist was waited for")
	}
}

// The applier writes, flushes run and readers drain, all at once. No drain may fail, miss a key or show one twice.
func TestReadersAndWritersDuringFlushes(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("max_rows_per_file = 40")
	const keys = 100
	for i := range keys {
		tab.put(i, "0")
	}
	ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
	defer stop()
	var group sync.WaitGroup
	group.Go(func() { // the applier: transactions of several changes, in an order that flushes do not have
		for n := 0; ctx.Err() == nil; n++ {
			err := pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
				for i := range 5 {
					tab.seq++
					_, err := tx.Exec(t.Context(), "INSERT INTO "+tab.mirror+` AS m VALUES ($1, $2, 2, jsonb_build_object('id', $1::bigint, 'v', $3::text))
						ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, op = 2, row_image = excluded.row_image`, (n*37+keys-i*13)%keys, tab.seq, fmt.Sprint(n))
					if err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Errorf("the applier was disturbed: %v", err)
				return
			}
		}
	})
	group.Go(func() {
		for ctx.Err() == nil {
			if r := tab.flush(f.store, true); r.Status != "completed" {
				t.Errorf("%+v %s", r, *r.Error)
				return
			}
		}
	})
	for _, limit := range []int{7, 1000} {
		group.Go(func() {
			drains := 0
			for ; ctx.Err() == nil; drains++ {
				got, err := tab.drain(t.Context(), f.store, limit)
				if err != nil || len(got) != keys {
					t.Errorf("drained %d keys: %v", len(got), err)
					return
				}
			}
			t.Logf("%d drains in pages of %d", drains, limit)
		})
	}
	group.Wait()
	tab.verified()
	t.Logf("%d segments", len(tab.segments()))
}

func TestACancelledJobPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "x")
	f.failpoint(func(step string) error {
		if step == "read back" {
			f.exec("UPDATE koldstore.job SET status = 'cancelled', ended_at = now() WHERE status = 'running'")
		}
		return nil
	})
	r := tab.flush(f.store, true)
	f.failpoint(nil)
	if r.OK || r.Status != "cancelled" || tab.hot() != 1 || len(tab.segments()) != 0 {
		t.Errorf("%+v", r)
	}
	tab.noLeftovers()
	tab.mustFlush(1, 1)
}

func TestUnmanagingEndsAFlush(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "x")
	f.failpoint(func(step string) error {
		if step == "read back" {
			f.exec("DELETE FROM koldstore.managed_table")
		}
		return nil
	})
	r := tab.flush(f.store, true)
	f.failpoint(nil)
	if r.Status != "error" || r.Error == nil || !strings.Contains(*r.Error, "no longer managed") {
		t.Errorf("%+v", r)
	}
	tab.noLeftovers()
}

// A process that stops puts its job back, one that dies leaves it; the next process completes both.
func TestInterruptedJobsAreTakenUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("max_rows_per_file = 1")
	tab.put(1, "x")
	tab.put(2, "x")
	queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	f.failpoint(func(step string) error {
		if step == "published" {
			cancel()
		}
		return ctx.Err()
	})
	if _, err := f.store.Flush(ctx, queued.JobID); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: %v", err)
	}
	f.failpoint(nil)
	var status string
	f.scan("SELECT status FROM koldstore.job WHERE job_id = $1", []any{queued.JobID}, &status)
	if status != "queued" && status != "running" {
		t.Errorf("the job is %s", status)
	}
	f.exec("UPDATE koldstore.job SET status = 'running', started_at = now() WHERE job_id = $1", queued.JobID) // as if killed
	next := f.newStore()
	f.runJobs(next)
	r, err := next.Flush(t.Context(), queued.JobID)
	ok(t, err)
	if r.Status != "completed" || r.RowsFlushed != 2 || r.Segments != 2 || tab.hot() != 0 {
		t.Errorf("%+v", r)
	}
	tab.verified()
	tab.noLeftovers()
}

// claimAndHold has f.store claim a job and stop right behind that until it is released; then it waits for it to end.
func (f *fixture) claimAndHold(job uuid.UUID) (release func()) {
	claimed, held, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	f.failpoint(func(step string) error {
		if step == "claimed" && first.CompareAndSwap(false, true) {
			close(claimed)
			<-held
		}
		return nil
	})
	go func() {
		defer close(ended)
		if r, err := f.store.Flush(f.t.Context(), job); err != nil || r.Status != "completed" {
			f.t.Errorf("the flush that was held: %+v, %v", r, err)
		}
	}()
	<-claimed
	return sync.OnceFunc(func() { close(held); <-ended })
}

// A job that one flusher claims while the other one looks for jobs that nobody carries out is left to the first.
func TestAClaimIsNoOrphan(t *testing.T) {
	t.Parallel()
	var f *fixture
	var job uuid.UUID
	release := func() {}
	var fenced atomic.Bool
	f = newFixture(t, func(cfg *coldstore.Config) {
		cfg.Fence = func(context.Context, pgx.Tx) error {
			if fenced.CompareAndSwap(false, true) { // the first fence is that of the look for orphans
				release = f.claimAndHold(job)
			}
			return nil
		}
	})
	tab := f.messages("")
	tab.put(1, "x")
	queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	job = queued.JobID
	_, err = f.store.RunJobs(t.Context())
	ok(t, err)
	if n := tab.hot(); n != 1 {
		t.Errorf("the job was carried out by another flusher: %d hot", n)
	}
	release()
	if n := tab.hot(); n != 0 {
		t.Errorf("%d hot after the flush", n)
	}
	tab.verified()
	tab.noLeftovers()
}

// A job that was put back by the next leader returns to this process while its first claim is still at work here.
func TestAJobIsClaimedAgainBesideItsOldClaim(t *testing.T) {
	t.Parallel()
	for _, back := range []struct{ name, sql string }{
		{"queued", "UPDATE koldstore.job SET status = 'queued', started_at = NULL"},
		{"left running", "UPDATE koldstore.job SET started_at = clock_timestamp()"},
	} {
		t.Run(back.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, nil)
			tab := f.messages("")
			tab.put(1, "x")
			queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
			ok(t, err)
			release := f.claimAndHold(queued.JobID)
			f.exec(back.sql)
			f.runJobs(f.store)
			r, err := f.store.Flush(t.Context(), queued.JobID)
			ok(t, err)
			if r.Status != "completed" || r.RowsFlushed != 1 || tab.hot() != 0 {
				t.Errorf("%+v, %d hot", r, tab.hot())
			}
			release()
			if r, err := f.store.Flush(t.Context(), queued.JobID); err != nil || r.RowsFlushed != 1 || r.Segments != 1 {
				t.Errorf("after the old claim has ended: %+v, %v", r, err)
			}
			tab.verified()
			tab.noLeftovers()
		})
	}
}

func TestWhoIsNotTheLeaderPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "x")
	leader := f.store
	lost := errors.New("leadership is lost")
	f.cfg.Fence = func(context.Context, pgx.Tx) error { return lost }
	follower := f.newStore()
	if _, err := follower.RunJobs(t.Context()); !errors.Is(err, lost) {
		t.Errorf("a follower ran jobs: %v", err)
	}
	queued, err := follower.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	answer := make(chan coldstore.Result, 1)
	go func() { // it waits for the leader to do it
		r, err := follower.Flush(t.Context(), queued.JobID)
		if err != nil {
			t.Error(err)
		}
		answer <- r
	}()
	f.runJobs(leader)
	if r := <-answer; r.Status != "completed" || r.RowsFlushed != 1 {
		t.Errorf("%+v", r)
	}
	// Leadership that is lost between claiming and publishing.
	tab.put(2, "x")
	claims := 0
	f.cfg.Fence = func(context.Context, pgx.Tx) error {
		if claims++; claims > 1 {
			return lost
		}
		return nil
	}
	if r := tab.flush(f.newStore(), true); r.Status != "error" || tab.hot() != 1 {
		t.Errorf("%+v", r)
	}
	tab.mustFlush(1, 1)
	tab.verified()
}

func TestRunFlushesWhatIsDueAndWakesUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) {
		cfg.PollInterval = time.Hour // only notifications and the policy at start
		cfg.PolicyInterval = time.Hour
	})
	tab := f.messages("hot_row_limit = 5, min_flush_rows = 5")
	off := f.manage("off", "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", "hot_row_limit = 0, min_flush_rows = 1, auto_flush = false")
	for i := range 10 {
		tab.put(i, "x")
		off.put(i, "x")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.store.Run(ctx) }()
	eventually(t, "the due table is flushed", func() bool { return tab.hot() == 5 })
	eventually(t, "it listens", func() bool {
		var n int
		f.scan("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN koldstore_job'", nil, &n)
		return n == 1
	})
	queued, err := f.newStore().Enqueue(t.Context(), off.oid, true)
	ok(t, err)
	eventually(t, "the queued job is done", func() bool {
		var status string
		f.scan("SELECT status FROM koldstore.job WHERE job_id = $1", []any{queued.JobID}, &status)
		return status == "completed"
	})
	f.exec("UPDATE koldstore.managed_table SET retention = '1 microsecond' WHERE table_oid = $1", off.oid)
	f.exec("NOTIFY koldstore_job")
	eventually(t, "retention is applied", func() bool { return len(off.segments()) == 0 })
	cancel()
	ok(t, <-done)
	if off.hot() != 0 || len(tab.segments()) != 1 {
		t.Errorf("%d hot, %d segments", off.hot(), len(tab.segments()))
	}
}

// TestTablesAreFlushedBesideEachOther holds the flush of one table up until that of another one has ended.
func TestTablesAreFlushedBesideEachOther(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.PolicyInterval = time.Hour })
	slow := f.messages("")
	quick := f.manage("quick", "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", "")
	slow.put(1, "x")
	quick.put(1, "x")
	ended := make(chan struct{})
	var first atomic.Bool
	f.failpoint(func(step string) error {
		if step == "planned" && first.CompareAndSwap(false, true) {
			<-ended
		}
		return nil
	})
	slowJob, err := f.store.Enqueue(t.Context(), slow.oid, true)
	ok(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.store.Run(ctx) }()
	eventually(t, "the first flush is held up", first.Load)
	_, err = f.store.Enqueue(t.Context(), quick.oid, true)
	ok(t, err)
	eventually(t, "the second one ends", func() bool { return quick.hot() == 0 })
	if slow.hot() != 1 {
		t.Error("the first one did not wait")
	}
	close(ended)
	eventually(t, "the first one ends too", func() bool {
		var status string
		f.scan("SELECT status FROM koldstore.job WHERE job_id = $1", []any{slowJob.JobID}, &status)
		return status == "completed"
	})
	cancel()
	ok(t, <-done)
}

// eventually waits for something another goroutine does.
func eventually(t *testing.T, what string, true func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !true() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestJobsOfTablesThatAreBeingSeededWait(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("state = 'seeding'")
	tab.put(1, "x")
	queued, err := f.store.Enqueue(t.Context(), tab.oid, true)
	ok(t, err)
	f.runJobs(f.store)
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Millisecond)
	defer cancel()
	if r, err := f.store.Flush(ctx, queued.JobID); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%+v, %v", r, err)
	}
	f.exec("UPDATE koldstore.managed_table SET state = 'active'")
	r, err := f.store.Flush(t.Context(), queued.JobID)
	ok(t, err)
	if r.Status != "completed" || r.RowsFlushed != 1 {
		t.Errorf("%+v", r)
	}
}

func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	cfg := coldstore.DefaultConfig()
	cfg.RowGroupRows, cfg.DeleteGrace = 0, -1
	err := cfg.Validate()
	if err == nil || !strings.Contains(err.Error(), "row_group_rows") || !strings.Contains(err.Error(), "delete_grace") {
		t.Errorf("%v", err)
	}
}
