package coldstore_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

func (f *fixture) runJobs(store *coldstore.Store) {
	f.t.Helper()
	for worked := true; worked; {
		var err error
		worked, err = store.RunJobs(f.t.Context())
		ok(f.t, err)
	}
}

func (tab *table) floor() (floor koldproxy.Seq, generation int64) {
	tab.t.Helper()
	tab.scan("SELECT floor, generation FROM koldstore.managed_table WHERE table_oid = $1", []any{tab.oid}, &floor, &generation)
	return floor, generation
}

func TestRetentionDropsOldSegmentsAndRaisesTheFloor(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.DeleteGrace, cfg.NoCompaction = time.Hour, true })
	tab := f.messages("")
	for day := range 4 { // segments of four days, the last one of today
		tab.seq = koldproxy.SeqAt(time.Now().Add(time.Duration(day-3) * 24 * time.Hour))
		tab.put(day, "x")
		tab.put(100, "every day")
		tab.mustFlush(2, 1)
	}
	before := tab.segments()
	s, err := tab.snapshot(t.Context())
	ok(t, err)
	want, err := tab.drainSnapshot(t.Context(), f.store, s, 10)
	ok(t, err)

	f.runJobs(f.store)
	if len(tab.segments()) != 4 {
		t.Fatal("dropped without a retention")
	}
	f.exec("UPDATE koldstore.managed_table SET retention = '36 hours'")
	_, generation := tab.floor()
	f.runJobs(f.store)
	floor, raised := tab.floor()
	if left := tab.segments(); len(left) != 2 || floor != before[1].MaxSeq || raised != generation+1 {
		t.Fatalf("%d segments, floor %d, generation %d", len(left), floor, raised)
	}
	if now, err := tab.drain(t.Context(), f.store, 10); err != nil || len(now) != 3 {
		t.Errorf("after retention: %v, %v", now, err)
	}
	// A reader that has begun before goes on while the objects are there.
	if again, err := tab.drainSnapshot(t.Context(), f.newStore(), s, 10); err != nil || len(again) != len(want) {
		t.Errorf("older snapshot: %v, %v", again, err)
	}
	f.cfg.DeleteGrace = 0
	impatient := f.newStore()
	f.runJobs(impatient)
	_, err = os.Stat(filepath.Join(f.folder, before[0].Object))
	if !os.IsNotExist(err) {
		t.Errorf("the object is still there: %v", err)
	}
	_, err = tab.drainSnapshot(t.Context(), impatient, s, 10)
	var client *koldproxy.Error
	if !errors.As(err, &client) || client.Code != koldproxy.CodeColdUnreadable {
		t.Errorf("a snapshot whose objects are gone: %v", err)
	}
	// Everything may go; the floor stays.
	f.exec("UPDATE koldstore.managed_table SET retention = '1 microsecond'")
	f.runJobs(impatient)
	if last, _ := tab.floor(); len(tab.segments()) != 0 || last != before[3].MaxSeq {
		t.Errorf("floor %d, want %d", last, before[3].MaxSeq)
	}
	f.exec("UPDATE koldstore.managed_table SET retention = '200000 years'")
	f.runJobs(impatient)
	tab.verified()
}

func TestTheSweepRemovesWhatACrashLeft(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.InProgressTimeout = 10 * time.Minute })
	tab := f.messages("")
	// A writer that was killed: its rows say in_progress, one with its object and one with a temporary file only.
	object, temp := filepath.Join(f.folder, "7", "a.parquet"), filepath.Join(f.folder, "7", ".tmp-b.parquet-X")
	ok(t, os.Mkdir(filepath.Dir(object), 0o700))
	write(t, object, "whole")
	write(t, temp, "half")
	f.exec(`INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, created_at) VALUES
		(gen_random_uuid(), 7, 'default', '7/a.parquet', now() - interval '9 min'), (gen_random_uuid(), 7, 'default', '7/b.parquet', now() - interval '9 min')`)
	f.runJobs(f.store)
	if _, err := os.Stat(object); err != nil {
		t.Errorf("taken away too early: %v", err)
	}
	f.exec("UPDATE koldstore.segment SET created_at = created_at - interval '2 min'")
	f.runJobs(f.store)
	tab.noLeftovers()
	for _, name := range []string{object, temp} {
		if _, err := os.Stat(name); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
}

// A segment that the sweep took for a leftover while its writer was stopped must not come to life.
func TestAWriterThatSleptTooLongPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.InProgressTimeout = time.Nanosecond })
	tab := f.messages("")
	tab.put(1, "x")
	other := f.newStore()
	first := true
	f.failpoint(func(step string) error {
		if step == "probed" && first {
			first = false
			f.exec("UPDATE koldstore.segment SET created_at = created_at - interval '1 s'")
			_, err := other.RunJobs(context.WithoutCancel(t.Context()))
			return err
		}
		return nil
	})
	// other.RunJobs also takes the job itself for an orphan and runs it: the sleeper finds its job taken and its segment gone.
	r := tab.flush(f.store, true)
	f.failpoint(nil)
	if r.Status != "completed" || tab.hot() != 0 || len(tab.segments()) != 1 {
		t.Errorf("%+v, %d hot, %d segments", r, tab.hot(), len(tab.segments()))
	}
	tab.verified()
	tab.noLeftovers()
}

func TestAnOldGenerationIsRefusedWhenItIsNotKnownAnyMore(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Now = func() time.Time { return now } })
	tab := f.messages("")
	for i := range 5 {
		tab.put(i, "x")
	}
	tab.mustFlush(5, 1)
	s, err := tab.snapshot(t.Context())
	ok(t, err)
	for i := range 4 {
		tab.put(i, "y")
		tab.mustFlush(1, 1)
		if got, err := tab.drainSnapshot(t.Context(), f.store, s, 10); i < 2 && (err != nil || len(got) != 5) {
			t.Fatalf("%v, %v", got, err)
		}
		now = now.Add(40 * time.Minute)
	}
	_, err = tab.drainSnapshot(t.Context(), f.store, s, 10)
	var client *koldproxy.Error
	if !errors.As(err, &client) || client.Code != "72000" {
		t.Errorf("got %v", err)
	}
}

// looks counts the statements that a pool sends about segments.
type looks struct{ n atomic.Int64 }

func (l *looks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "layout") { // what only those ask for who want to compact
		l.n.Add(1)
	}
	return ctx
}

func (*looks) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestAQuietTableIsNotLookedAt runs the chores again and again: the segments are read when something has changed, and not otherwise.
func TestAQuietTableIsNotLookedAt(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "a")
	tab.mustFlush(1, 1)
	cfg, err := pgxpool.ParseConfig(f.pool.Config().ConnString())
	ok(t, err)
	l := &looks{}
	cfg.ConnConfig.Tracer = l
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	ok(t, err)
	defer pool.Close()
	store, err := coldstore.New(pool, f.bucket, zerolog.Nop(), f.cfg)
	ok(t, err)
	chores := func() int64 {
		t.Helper()
		before := l.n.Load()
		for range 3 {
			_, err := store.RunJobs(t.Context())
			ok(t, err)
		}
		return l.n.Load() - before
	}
	sweeps := int64(3) // each looks for deleted segments
	if n := chores(); n != 1+sweeps {
		t.Errorf("%d looks at first, want %d", n, 1+sweeps)
	}
	if n := chores(); n != sweeps {
		t.Errorf("%d looks at a quiet table, want %d", n, sweeps)
	}
	f.exec("UPDATE koldstore.managed_table SET max_rows_per_file = max_rows_per_file + 1")
	if n := chores(); n != 1+sweeps {
		t.Errorf("%d looks after a change of settings, want %d", n, 1+sweeps)
	}
	tab.put(2, "b")
	tab.mustFlush(1, 1)
	if n := chores(); n != 1+sweeps {
		t.Errorf("%d looks after a flush, want %d", n, 1+sweeps)
	}
}
