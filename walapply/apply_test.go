package walapply_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

func TestRowsArriveAsPostgreSQLWroteThem(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, sql string
		want      []string
	}{
		{
			"identity default",
			`INSERT INTO t VALUES (1, 1, NULL), (2, 2, ''); UPDATE t SET v = 3 WHERE id = 1; UPDATE t SET id = 9 WHERE id = 1; DELETE FROM t WHERE id = 2`,
			[]string{
				"INSERT t (1,1,NULL)", "INSERT t (2,2,)", "UPDATE t (1,3,NULL)",
				"UPDATE t (9,3,NULL) was (1,missing,missing)", "DELETE t was (2,missing,missing)",
			},
		},
		{
			"identity full",
			`ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, NULL, 'x'); UPDATE t SET v = 3; UPDATE t SET v = v; DELETE FROM t`,
			[]string{
				"INSERT t (1,NULL,x)", "UPDATE t (1,3,x) was (1,NULL,x)", "UPDATE t (1,3,x) was (1,3,x)", "DELETE t was (1,3,x)",
			},
		},
		{
			"unchanged toast, default",
			`INSERT INTO t VALUES (1, 1, repeat('x', 9000)); UPDATE t SET v = 2`,
			[]string{"INSERT t (1,1,9000 bytes)", "UPDATE t (1,2,unchanged)"},
		},
		{
			"unchanged toast, full",
			`ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 1, repeat('x', 9000)); UPDATE t SET v = 2; DELETE FROM t`,
			[]string{"INSERT t (1,1,9000 bytes)", "UPDATE t (1,2,unchanged) was (1,1,9000 bytes)", "DELETE t was (1,2,9000 bytes)"},
		},
		{
			"truncate of several tables, an unpublished one among them",
			`BEGIN; INSERT INTO t VALUES (1, 1, ''); TRUNCATE t, u, unpublished; INSERT INTO t VALUES (2, 2, ''); COMMIT`,
			[]string{"INSERT t (1,1,)", "TRUNCATE t", "TRUNCATE u", "INSERT t (2,2,)"},
		},
		{
			"changes of shape within a transaction",
			`BEGIN; INSERT INTO t VALUES (1, 1, ''); ALTER TABLE t RENAME v TO w; INSERT INTO t VALUES (2, 2, '');
			ALTER TABLE t ALTER w TYPE text USING 'q' || w; INSERT INTO t VALUES (3, 'r', ''); ALTER TABLE t DROP big;
			INSERT INTO t VALUES (4, 's'); ALTER TABLE t ADD d int DEFAULT 5; INSERT INTO t VALUES (5, 't'); COMMIT`,
			[]string{"INSERT t (1,1,)", "INSERT t (2,2,)", "INSERT t (3,r,)", "INSERT t (4,s)", "INSERT t (5,t,5)"},
		},
		{
			"rollbacks and savepoints",
			`BEGIN; INSERT INTO t VALUES (1, 1, ''); ROLLBACK; BEGIN; INSERT INTO t VALUES (2, 2, ''); SAVEPOINT a; INSERT INTO t VALUES (3, 3, '');
			ROLLBACK TO a; SAVEPOINT b; INSERT INTO t VALUES (4, 4, ''); RELEASE b; COMMIT`,
			[]string{"INSERT t (2,2,)", "INSERT t (4,4,)"},
		},
		{
			"two-phase commit counts when it is committed",
			`BEGIN; INSERT INTO t VALUES (1, 1, ''); PREPARE TRANSACTION '%[1]s_a'; BEGIN; INSERT INTO t VALUES (2, 2, ''); PREPARE TRANSACTION '%[1]s_b';
			INSERT INTO t VALUES (3, 3, ''); COMMIT PREPARED '%[1]s_a'; ROLLBACK PREPARED '%[1]s_b'`,
			[]string{"INSERT t (3,3,)", "INSERT t (1,1,)"},
		},
		{
			"schema and table renamed",
			`CREATE SCHEMA s; CREATE TABLE s.x (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE s.x; INSERT INTO s.x VALUES (1);
			ALTER TABLE s.x RENAME TO y; INSERT INTO s.y VALUES (2)`,
			[]string{"INSERT s.x (1)", "INSERT s.y (2)"},
		},
		{
			"text formats do not depend on the role or the database",
			`CREATE TABLE f (id int PRIMARY KEY, a timestamptz, b interval, c float8, d bytea, e date);
			ALTER PUBLICATION koldproxy ADD TABLE f;
			INSERT INTO f VALUES (1, '2024-05-06 07:08:09.5+00', '1 mon -1 day', 0.1::float8 + 0.2::float8, '\x00ff', '2024-05-06')`,
			[]string{`INSERT f (1,2024-05-06 07:08:09.5+00,1 mon -1 days,0.30000000000000004,\x00ff,2024-05-06)`},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, localpg.TestCluster(t))
			d.exec(`CREATE TABLE t (id int PRIMARY KEY, v int, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
				CREATE TABLE u (id int PRIMARY KEY); CREATE TABLE unpublished (id int);
				ALTER PUBLICATION koldproxy ADD TABLE t, u`)
			name := query[string](d, `SELECT current_database()`)
			for _, set := range []string{"datestyle = 'SQL, DMY'", "intervalstyle = 'iso_8601'", "extra_float_digits = -3", "bytea_output = 'escape'", "timezone = 'Asia/Tokyo'"} {
				d.exec("ALTER DATABASE " + name + " SET " + set)
			}
			d.startStreaming(&recorder{})
			sql := tt.sql
			if strings.Contains(sql, "%[1]s") {
				sql = fmt.Sprintf(sql, name)
			}
			for _, stmt := range strings.Split(sql, ";") { // one by one, so that each is its own transaction unless it says BEGIN
				d.exec(stmt)
			}
			d.awaitApplied()
			d.equal(d.lines(), tt.want)
		})
	}
}

func TestPositionsAndCheckpoint(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	rec := &recorder{}
	r := d.startStreaming(rec)
	d.exec(`INSERT INTO t VALUES (1), (2)`)
	d.exec(`INSERT INTO koldstore.wal_marker (kind, subject) VALUES ('table', 1)`)
	d.exec(`BEGIN; INSERT INTO t VALUES (3); TRUNCATE t; COMMIT`)
	end := query[string](d, `SELECT pg_current_wal_insert_lsn()::text`)
	d.awaitApplied()

	if n := query[int](d, `SELECT count(DISTINCT commit_lsn) FROM recorded`); n != 3 {
		t.Errorf("%d commit positions for three transactions", n)
	}
	if !query[bool](d, `SELECT bool_and(commit_lsn >= lag) FROM (SELECT commit_lsn, lag(commit_lsn) OVER (ORDER BY seq) FROM recorded) r`) {
		t.Error("commit positions are not in order")
	}
	// Five changes: the marker and the truncate are none of rows of published tables.
	if n := query[int](d, `SELECT rows_applied FROM koldstore.checkpoint`); n != 3 {
		t.Errorf("rows_applied is %d, want 3", n)
	}
	if !query[bool](d, `SELECT watermark = (SELECT max(seq) FROM recorded) AND applied_lsn - '0/0' > (SELECT max(commit_lsn) FROM recorded)
		AND applied_lsn <= $1::text::pg_lsn AND system_identifier IS NOT NULL AND timeline = 1 AND applied_at IS NOT NULL FROM koldstore.checkpoint`, end) {
		t.Error("the checkpoint does not show what was applied")
	}
	s := r.Status()
	if !s.Leading || !s.Streaming || s.Err != nil || s.Applied == 0 || s.Acknowledged < s.Applied || s.Received < s.Applied || s.LastCommit.IsZero() || s.BacklogBytes != 0 {
		t.Errorf("status: %+v", s)
	}
	if got := rec.count(&rec.resets); got != 1 {
		t.Errorf("%d resets", got)
	}
}

func TestLargeTransactionsComeInPiecesOfOneApplyTransaction(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY, pad text); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var largest, backlog atomic.Int64
	var a *running
	rec := &recorder{before: func(_ context.Context, changes []koldproxy.Change) error {
		largest.Store(max(largest.Load(), int64(len(changes))))
		backlog.Store(max(backlog.Load(), a.Status().BacklogBytes))
		return nil
	}}
	a = d.startStreaming(rec, func(c *walapply.Config) {
		c.BatchRows, c.QueueBytes = 1000, 256<<10
	})
	d.exec(`INSERT INTO t VALUES (-1); INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20500) g; INSERT INTO t VALUES (-2)`)
	d.awaitApplied()
	if n := largest.Load(); n != 1000 {
		t.Errorf("largest call had %d changes, want 1000", n)
	}
	if n := rec.count(&rec.applies); n != 21 {
		t.Errorf("%d calls, want 21", n)
	}
	if n := query[int](d, `SELECT count(DISTINCT xmin::text) FROM recorded`); n != 1 {
		t.Errorf("one source transaction was applied in %d transactions", n)
	}
	if n := query[int](d, `SELECT count(DISTINCT line) FROM recorded`); n != 20502 {
		t.Errorf("%d lines", n)
	}
	// What is being applied, what is queued and what waits for room in the queue: each may exceed its limit by one burst of the stream.
	if n := backlog.Load(); n > 2*(256<<10)+3*(256<<10)+64<<10 {
		t.Errorf("%d bytes in memory", n)
	}
	if s := a.Status(); s.BacklogBytes != 0 {
		t.Errorf("%d bytes left over", s.BacklogBytes)
	}

	// By size instead of number, with rows larger than a batch.
	a.stop()
	d.exec(`TRUNCATE recorded`)
	d.startStreaming(rec, func(c *walapply.Config) { c.BatchBytes, c.QueueBytes = 100<<10, 64<<10 })
	d.exec(`INSERT INTO t SELECT 30000 + g, repeat('x', 200000) FROM generate_series(1, 20) g`)
	d.awaitApplied()
	if n := query[int](d, `SELECT count(*) FROM recorded`); n != 20 {
		t.Errorf("%d lines", n)
	}
}

func TestSmallTransactionsShareAnApplyTransactionWhenThereIsABacklog(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.startStreaming(&recorder{}).stop()
	for i := range 500 {
		d.exec(fmt.Sprintf("INSERT INTO t VALUES (%d)", i))
	}
	end := query[string](d, `SELECT pg_current_wal_insert_lsn()::text`)
	d.exec("INSERT INTO t VALUES (500)")
	backlog, err := koldproxy.ParseLSN(end)
	if err != nil {
		t.Fatal(err)
	}
	// The first apply transaction takes until the rest has come.
	var applier atomic.Pointer[walapply.Applier]
	rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
		for ctx.Err() == nil {
			if a := applier.Load(); a != nil && a.Status().Received >= backlog {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	}}
	applier.Store(d.startStreaming(rec, func(c *walapply.Config) { c.Linger = time.Minute }).Applier)
	d.awaitApplied()
	if n := query[int](d, `SELECT count(*) FROM recorded`); n != 501 {
		t.Errorf("%d lines", n)
	}
	// The first; what had been handed over when it ended; what had only been received by then; what was half received.
	if n := query[int](d, `SELECT count(DISTINCT xmin::text) FROM recorded`); n > 4 {
		t.Errorf("501 source transactions took %d apply transactions", n)
	}
}

func TestFailedApplyIsRepeatedFromTheCheckpoint(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var calls, broken atomic.Int64
	broken.Store(1)
	rec := &recorder{before: func(context.Context, []koldproxy.Change) error {
		if n := calls.Add(1); broken.Load() == 1 && n > 2 {
			return errors.New("disk on fire")
		}
		return nil
	}}
	a := d.startStreaming(rec, func(c *walapply.Config) { c.BatchRows = 10 })
	d.exec(`INSERT INTO t SELECT generate_series(1, 55)`)
	d.await("three attempts", func() bool { return rec.count(&rec.resets) >= 4 })
	if err := a.Status().Err; err == nil || !strings.Contains(err.Error(), "disk on fire") {
		t.Errorf("status shows %v", err)
	}
	if n := query[int](d, `SELECT count(*) FROM recorded`); n != 0 {
		t.Errorf("%d lines of a failed transaction", n)
	}
	broken.Store(0)
	d.awaitApplied()
	if n := query[int](d, `SELECT count(*) FROM recorded`); n != 55 {
		t.Errorf("%d lines, want 55", n)
	}
	d.await("the error to go away", func() bool { return a.Status().Err == nil })
}

func TestBackgroundWorkSharesTheSequence(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var todo atomic.Int64
	todo.Store(3)
	rec := &recorder{work: func(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence) (bool, error) {
		if todo.Load() == 0 {
			return false, nil
		}
		_, err := tx.Exec(ctx, `INSERT INTO public.recorded (seq, line) VALUES ($1, 'background')`, seqs.Reserve(1, time.Now()))
		return todo.Add(-1) > 0, err
	}}
	a := d.startStreaming(rec)
	d.await("three units", func() bool { return todo.Load() == 0 })
	d.exec(`INSERT INTO t VALUES (1)`)
	d.awaitApplied()
	todo.Store(1)
	a.Poke()
	d.await("a fourth unit", func() bool { return len(d.lines()) == 5 })
	d.equal(d.lines(), []string{"background", "background", "background", "INSERT t (1)", "background"})
	if !query[bool](d, `SELECT watermark = (SELECT max(seq) FROM recorded) FROM koldstore.checkpoint`) {
		t.Error("the watermark does not cover background work")
	}
}

func TestIdleBackgroundAndProgressWriteNothing(t *testing.T) {
	t.Parallel()
	cluster := ownCluster(t) // nobody else may write into its log
	d := newDatabase(t, cluster)
	rec := &recorder{}
	a := d.startStreaming(rec)
	d.awaitApplied()
	before := query[string](d, `SELECT xmin::text || applied_lsn FROM koldstore.checkpoint`)
	for range 20 {
		n := rec.count(&rec.units)
		a.Poke()
		d.await("background", func() bool { return rec.count(&rec.units) > n })
		d.exec(`SELECT pg_logical_emit_message(true, 'x', 'y')`)
		d.awaitApplied()
	}
	if after := query[string](d, `SELECT xmin::text || applied_lsn FROM koldstore.checkpoint`); after != before {
		t.Errorf("the checkpoint was written: %s, then %s", before, after)
	}
}

func ownCluster(t testing.TB, settings ...map[string]string) *localpg.Cluster {
	t.Helper()
	cfg := localpg.Config{}
	if len(settings) > 0 {
		cfg.Settings = settings[0]
	}
	return localpg.OwnCluster(t, cfg)
}
