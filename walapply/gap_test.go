package walapply_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// documented are the SQL blocks in a chapter of docs/operations.md: what an operator is told to run is what is tested.
func documented(t testing.TB, chapter string, blocks int) []string {
	t.Helper()
	text, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\n## "+chapter+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	var list []string
	for _, m := range regexp.MustCompile("(?ms)^ *```sql\n(.*?)^ *```$").FindAllStringSubmatch(rest, -1) {
		list = append(list, m[1])
	}
	if len(list) != blocks {
		t.Fatalf("chapter %s has %d blocks of SQL, want %d", chapter, len(list), blocks)
	}
	return list
}

// beginAnew is what closes a gap.
func beginAnew(t testing.TB) string {
	t.Helper()
	return strings.Join(documented(t, "Gaps", 1), "")
}

// awaitGap waits until the applier shows a gap and has written it down.
func (d *database) awaitGap(a *running, want string) {
	d.t.Helper()
	d.await("the gap to show", func() bool {
		var setup *walapply.SetupError
		return errors.As(a.Status().Err, &setup) && setup.Gap && strings.Contains(setup.Problem, want)
	})
	if err := a.Status().Err; !strings.Contains(err.Error(), "docs/operations.md") {
		d.t.Errorf("no word about what to do in %q", err)
	}
	d.await("the gap to be written down", func() bool {
		return query[bool](d, `SELECT coalesce(gap, '') LIKE '%' || $1 || '%' AND gap_at IS NOT NULL FROM koldstore.checkpoint`, want)
	})
}

// applied starts an applier, has it apply a row, and leaves it running.
func (d *database) applied(change ...func(*walapply.Config)) *running {
	d.t.Helper()
	d.exec(`CREATE TABLE t (id int PRIMARY KEY, v text); ALTER PUBLICATION koldproxy ADD TABLE t`)
	a := d.startStreaming(&recorder{}, change...)
	d.exec(`INSERT INTO t VALUES (0)`)
	d.awaitApplied()
	d.exec(`TRUNCATE recorded`)
	return a
}

func (d *database) worksAfter(a *running, repair string) {
	d.t.Helper()
	d.exec(repair)
	d.await("the applier to stream", func() bool { return a.Status().Streaming })
	d.exec(`INSERT INTO t VALUES (99)`)
	d.awaitApplied()
	d.equal(d.lines(), []string{"INSERT t (99,NULL)"})
	d.await("the error to go", func() bool { return a.Status().Err == nil })
}

// A slot of the same name that somebody made by hand begins behind what was lost.
func TestGapStaysWhenTheSlotComesBack(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, ownCluster(t))
	d.applied().stop()
	d.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)
	d.exec(`INSERT INTO t VALUES (1)`)
	first := d.start(&recorder{})
	d.awaitGap(first, "does not exist any more")

	d.exec(`SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'pgoutput')`)
	first.stop()
	rec := &recorder{}
	second := d.start(rec)
	d.awaitGap(second, "does not exist any more")
	d.exec(`INSERT INTO t VALUES (2)`)
	if rec.count(&rec.applies) > 0 || second.Status().Streaming {
		t.Errorf("the slot made by hand is read: %+v", second.Status())
	}
	d.worksAfter(second, beginAnew(t))
}

// Somebody else moved the slot, or made another one, between two sessions of the same leader.
func TestSlotThatConfirmsMoreThanItWasTold(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	a := d.applied(func(c *walapply.Config) { c.RetryMin, c.RetryMax = 2*time.Second, 2*time.Second })
	d.exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database()`)
	d.await("the walsender to end", func() bool {
		return query[bool](d, `SELECT NOT active FROM pg_replication_slots WHERE database = current_database()`)
	})
	d.exec(`INSERT INTO t VALUES (1)`)
	d.exec(`SELECT pg_replication_slot_advance(slot_name, pg_current_wal_insert_lsn()) FROM koldstore.checkpoint`)
	d.awaitGap(a, "replaced or advanced")
	d.worksAfter(a, beginAnew(t))
}

// The same while no applier was running.
func TestSlotReplacedBetweenTwoRuns(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.applied().stop()
	d.startStreaming(&recorder{}).stop() // an ordinary restart is no gap
	d.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)
	d.exec(`INSERT INTO t VALUES (1)`)
	d.exec(`SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'pgoutput')`)
	a := d.start(&recorder{})
	d.awaitGap(a, "replaced or advanced")
	d.worksAfter(a, beginAnew(t))
}

// The same after a kill, which leaves the checkpoint as it was while the applier ran: less exact, but never less than what the slot was
// told.
func TestSlotReplacedAfterAKill(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, ownCluster(t)) // the log of other tests would count as well
	a := d.applied()
	const bounded = `SELECT told_lsn >= confirmed_flush_lsn FROM koldstore.checkpoint JOIN pg_replication_slots USING (slot_name)`
	d.exec(`CREATE TABLE others AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
	end := query[string](d, `SELECT pg_current_wal_flush_lsn()::text`)
	d.await("the slot to be told of others' log", func() bool {
		return query[bool](d, `SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM koldstore.checkpoint JOIN pg_replication_slots USING (slot_name)`, end)
	})
	if !query[bool](d, bounded) {
		t.Error("the slot was told more than the checkpoint says")
	}
	running := query[string](d, `SELECT told_lsn::text FROM koldstore.checkpoint`)
	a.stop()
	d.exec(`UPDATE koldstore.checkpoint SET told_lsn = '` + running + `'`)
	d.startStreaming(&recorder{}).stop() // a kill alone is no gap

	d.exec(`UPDATE koldstore.checkpoint SET told_lsn = '` + running + `'`)
	d.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)
	d.exec(`INSERT INTO t VALUES (1); INSERT INTO others SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
	d.exec(`SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'pgoutput')`)
	b := d.start(&recorder{})
	d.awaitGap(b, "replaced or advanced")
	d.worksAfter(b, beginAnew(t))
}

// A slot that holds back too much is given up, also where nothing goes on by itself then.
func TestSlotThatHoldsBackTooMuch(t *testing.T) {
	t.Parallel()
	for _, onGap := range []string{walapply.OnGapHeal, walapply.OnGapStop} {
		t.Run(onGap, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, ownCluster(t))
			blocked := make(chan struct{})
			rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
				select {
				case <-blocked:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}}
			a := d.startStreaming(rec, func(c *walapply.Config) {
				c.OnGap, c.WatchInterval, c.MaxRetainedBytes = onGap, 50*time.Millisecond, 4<<20
			})
			d.exec(`CREATE TABLE t (id int PRIMARY KEY, v text); SELECT koldstore.manage_table('t')`)
			d.exec(`INSERT INTO t SELECT i, (SELECT string_agg(md5(i::text || j), '') FROM generate_series(1, 50) j) FROM generate_series(1, 5000) i`)
			if onGap == walapply.OnGapStop {
				d.awaitGap(a, "was given up")
				d.await("the slot to go", func() bool {
					return query[bool](d, `SELECT NOT EXISTS (SELECT FROM pg_replication_slots WHERE database = current_database())`)
				})
				return
			}
			d.await("the gap", func() bool {
				return query[bool](d, `SELECT EXISTS (SELECT FROM koldstore.gap WHERE reason LIKE '%was given up%')`)
			})
			close(blocked)
			d.await("the log to be let go", func() bool { return a.Status().Streaming && a.Status().RetainedBytes < 4<<20 })
		})
	}
}

// The slot that the checkpoint of a copy names is in use, by the original.
func TestCopyOfADatabaseLeavesTheOriginalAlone(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	d := newDatabase(t, cluster)
	d.applied().stop()
	original := query[string](d, `SELECT current_database()::text`)
	d.sql.Close(t.Context())
	copied := &database{t: t, dsn: cluster.TestDatabase(t)}
	copied.reconnect()
	name := query[string](copied, `SELECT current_database()::text`)
	copied.sql.Close(t.Context())
	admin, err := pgx.Connect(t.Context(), cluster.DSN("postgres", "", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	for _, sql := range []string{`DROP DATABASE "` + name + `"`, `CREATE DATABASE "` + name + `" TEMPLATE "` + original + `"`} {
		d.await(sql, func() bool { _, err := admin.Exec(t.Context(), sql); return err == nil })
	}
	d.reconnect()
	copied.reconnect()
	defer copied.sql.Close(context.Background())

	d.startStreaming(&recorder{})
	d.await("the original to read its slot", func() bool {
		return query[bool](d, `SELECT active FROM pg_replication_slots WHERE database = current_database()`)
	})
	walsender := query[int](d, `SELECT active_pid FROM pg_replication_slots WHERE database = current_database()`)
	a := copied.start(&recorder{})
	copied.awaitGap(a, "is a copy of that of database "+original)
	if err := a.Status().Err; !strings.Contains(err.Error(), `"Copies"`) || strings.Contains(err.Error(), "drop") {
		t.Errorf("the advice is %q", err)
	}
	d.exec(`INSERT INTO t VALUES (1)`)
	d.awaitApplied()
	if now := query[int](d, `SELECT active_pid FROM pg_replication_slots WHERE database = current_database()`); now != walsender {
		t.Errorf("walsender %d of the original was replaced by %d", walsender, now)
	}
	copied.worksAfter(a, strings.Join(documented(t, "Copies", 2), ""))
	a.stop()
	copied.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)
}

// What the publication leaves out is not in the stream, so whoever counted on it is broken.
func TestPublicationThatLacksTables(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, breakIt, want string }{
		{"table taken out", `ALTER PUBLICATION koldproxy DROP TABLE t`, "not in publication"},
		{"rows filtered", `ALTER PUBLICATION koldproxy DROP TABLE t; ALTER PUBLICATION koldproxy ADD TABLE t WHERE (id > 5)`, "filters the rows"},
		{"columns listed", `ALTER PUBLICATION koldproxy DROP TABLE t; ALTER PUBLICATION koldproxy ADD TABLE t (id, v)`, "lists columns"},
		{"kinds of changes left out", `ALTER PUBLICATION koldproxy SET (publish = 'insert')`, "left out kinds"},
		{"markers left out", `ALTER PUBLICATION koldproxy DROP TABLE koldstore.wal_marker`, "left out koldstore.wal_marker"},
	} {
		for _, running := range []bool{false, true} {
			t.Run(tt.name+map[bool]string{true: " while applying", false: " before"}[running], func(t *testing.T) {
				t.Parallel()
				d := newDatabase(t, localpg.TestCluster(t))
				d.exec(`CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)`)
				fast := func(c *walapply.Config) { c.WatchInterval = 20 * time.Millisecond }
				a := d.startStreaming(&recorder{}, fast)
				d.exec(`SELECT koldstore.manage_table('t')`)
				d.exec(`SELECT koldstore.manage_table('u')`)
				d.exec(`INSERT INTO koldstore.stream (schema_name, name, table_oid, log_oid, predicate, predicate_fn, pre_image, start_at, created_by)
					SELECT 'public', 's', 't'::regclass, 1, 'true', 0, false, 'now', current_user`)
				d.awaitApplied()
				if !running {
					a.stop()
				}
				d.exec(tt.breakIt)
				if !running {
					a = d.start(&recorder{}, fast)
				}
				d.await("stream and feed to be broken", func() bool {
					return query[int](d, `SELECT count(*) FROM (SELECT table_oid, state, reason FROM koldstore.stream UNION ALL
						SELECT table_oid, state, reason FROM koldstore.managed_table) x
						WHERE table_oid = 't'::regclass AND state = 'broken' AND reason LIKE '%' || $1 || '%'`, tt.want) == 2
				})
				if n := query[int](d, `SELECT count(*) FROM koldstore.job j JOIN koldstore.managed_table m ON m.seed_job = j.job_id WHERE m.table_oid = 't'::regclass AND j.status <> 'error'`); n != 0 {
					t.Errorf("%d seeds of a broken feed go on", n)
				}
				if strings.Contains(tt.want, "left out") {
					d.await("the problem to show", func() bool { return a.Status().Err != nil })
					if err := a.Status().Err; !strings.Contains(err.Error(), "not what koldproxy made") {
						t.Errorf("status shows %v", err)
					}
					return
				}
				if query[string](d, `SELECT state FROM koldstore.managed_table WHERE table_oid = 'u'::regclass`) == "broken" {
					t.Error("a feed that lacks nothing is broken")
				}
				d.await("the applier to stream", func() bool { return a.Status().Streaming })
				d.exec(`TRUNCATE recorded; INSERT INTO u VALUES (1)`)
				d.awaitApplied()
				d.equal(d.lines(), []string{"INSERT u (1)"})
				if got := query[*string](d, `SELECT gap FROM koldstore.checkpoint`); got != nil {
					t.Errorf("a gap was noted: %s", *got)
				}
			})
		}
	}
}

func TestPublicationDroppedWhileApplying(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	a := d.applied(func(c *walapply.Config) { c.WatchInterval = 20 * time.Millisecond })
	d.exec(`SELECT koldstore.manage_table('t')`)
	d.awaitApplied()
	d.exec(`TRUNCATE recorded; DROP PUBLICATION koldproxy`)
	d.awaitGap(a, "publication koldproxy was dropped")
	d.worksAfter(a, beginAnew(t))
}

// syncBuffer is a log that a test reads while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *syncBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

// pgoutput looks the publication up as it was when a change was written, so one that was made again does not help.
func TestPublicationMadeAgainBehindTheSlot(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.applied().stop()
	d.exec(`DROP PUBLICATION koldproxy; INSERT INTO t VALUES (1)`)
	d.exec(`CREATE PUBLICATION koldproxy FOR TABLE koldstore.wal_marker, t; INSERT INTO t VALUES (2)`)
	var log syncBuffer
	a, err := walapply.New(d.config(), &recorder{}, zerolog.New(&log), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	r := &running{Applier: a, stop: sync.OnceFunc(func() { cancel(); <-done })}
	defer r.stop()
	d.awaitGap(r, "older than publication koldproxy")
	if strings.Contains(log.String(), "works again") {
		t.Errorf("nothing works, and the log says:\n%s", log.String())
	}
	d.worksAfter(r, beginAnew(t))
	d.await("the log to say that it works", func() bool { return strings.Contains(log.String(), "works again") })
}
