package walapply_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// Random histories by several writers, with the applier being hurt in every way while it follows. Afterwards, what it
// recorded must be what triggers wrote into an audit table in the writers' own transactions: everything once, whole
// transactions together and in commit order.

func TestRandomHistoryWithBrokenConnections(t *testing.T) {
	t.Parallel()
	runHistory(t, localpg.TestCluster(t), false)
}

func TestRandomHistoryWithServerCrashes(t *testing.T) {
	t.Parallel()
	runHistory(t, ownCluster(t), true)
}

// A history is as long as it takes for both: on a busy machine the faults would otherwise outnumber the changes.
const (
	historyTime         = 6 * time.Second
	historyTransactions = 150 // that came to their end, with a few changes each
	historyWriters      = 4
)

func runHistory(t *testing.T, cluster *localpg.Cluster, crashes bool) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d := newDatabase(t, cluster)
	d.exec(`CREATE TABLE a (id int PRIMARY KEY, v int, pad text); CREATE TABLE b (LIKE a INCLUDING ALL); ALTER TABLE b REPLICA IDENTITY FULL;
		ALTER PUBLICATION koldproxy ADD TABLE a, b;
		CREATE TABLE audit (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, xid bigint, line text);
		CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO audit (xid, line) VALUES (pg_current_xact_id()::text::bigint & 4294967295, TG_OP || ' ' || TG_TABLE_NAME || CASE TG_OP
				WHEN 'TRUNCATE' THEN '' WHEN 'DELETE' THEN ' ' || OLD.id
				ELSE ' ' || NEW.id || ' ' || NEW.v || ' ' || coalesce(NEW.pad, 'NULL') END);
			RETURN NULL;
		END $$;
		CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON a FOR EACH ROW EXECUTE FUNCTION audit();
		CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON b FOR EACH ROW EXECUTE FUNCTION audit();
		CREATE TRIGGER audit_truncate AFTER TRUNCATE ON a EXECUTE FUNCTION audit();
		CREATE TRIGGER audit_truncate AFTER TRUNCATE ON b EXECUTE FUNCTION audit()`)

	var failures atomic.Int64
	var chance atomic.Int64 // in a thousand, that an Apply fails
	faulty := rand.New(rand.NewPCG(seed, 1))
	rec := &auditRecorder{fail: func() error {
		if int64(faulty.IntN(1000)) < chance.Load() {
			failures.Add(1)
			return errors.New("injected failure")
		}
		return nil
	}}
	// Wait for the slot: what is committed before it exists is none of the applier's business.
	small := func(c *walapply.Config) {
		c.BatchRows, c.QueueBytes, c.Lease = 500, 256<<10, 2*time.Second
		c.RetryMin, c.RetryMax = time.Millisecond, 20*time.Millisecond
	}
	applier := d.startStreaming(rec, small)
	chance.Store(150)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var committed atomic.Int64
	var writers sync.WaitGroup
	for i := range historyWriters {
		writers.Go(func() {
			w := &writer{d: d, committed: &committed, name: fmt.Sprintf("%d_%d", seed, i), rnd: rand.New(rand.NewPCG(seed, uint64(100+i)))}
			w.run(ctx)
		})
	}
	faults := map[string]int{}
	rnd := rand.New(rand.NewPCG(seed, 2))
	for begin := time.Now(); time.Since(begin) < historyTime || committed.Load() < historyTransactions; {
		sleepFor(ctx, time.Duration(rnd.IntN(200))*time.Millisecond)
		awaitProgress(ctx, rec)
		fault := []string{"walsender", "apply", "leader", "restart", "everything"}[rnd.IntN(5)]
		if crashes && rnd.IntN(4) == 0 {
			fault = "crash"
		}
		faults[fault]++
		switch fault {
		case "restart":
			applier.stop()
			applier = d.start(rec, small)
		case "crash":
			if err := cluster.Kill(context.WithoutCancel(ctx)); err != nil {
				t.Fatal(err)
			}
			if err := cluster.Restart(context.WithoutCancel(ctx)); err != nil {
				t.Fatal(err)
			}
		default:
			terminate(d.dsn, fault)
		}
	}
	cancel()
	writers.Wait()
	chance.Store(0)
	d.reconnect()
	commitPrepared(d)
	d.awaitApplied()
	t.Logf("faults %v, failed batches %d, sessions %d, commits %d", faults, failures.Load(), rec.count(&rec.resets), rec.count(&rec.commits))
	checkHistory(d)
}

// awaitProgress waits for a commit, so that faults cannot stop the applier for good, but not for long: nothing may be left
// to do, or the machine be slow.
func awaitProgress(ctx context.Context, rec *auditRecorder) {
	commits := rec.count(&rec.commits)
	for end := time.Now().Add(time.Second); rec.count(&rec.commits) < commits+2 && time.Now().Before(end); {
		if !sleepFor(ctx, time.Millisecond) {
			return
		}
	}
}

func sleepFor(ctx context.Context, pause time.Duration) bool {
	select {
	case <-time.After(pause):
		return true
	case <-ctx.Done():
		return false
	}
}

// terminate ends a kind of the applier's sessions. It is a fault, so it may fail.
func terminate(dsn, role string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return
	}
	defer conn.Close(ctx)
	_, _ = conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name LIKE 'koldproxy %' AND $1 IN ('everything', substr(application_name, 11))`, role)
}

func commitPrepared(d *database) {
	rows, _ := d.sql.Query(context.Background(), `SELECT gid FROM pg_prepared_xacts WHERE database = current_database()`)
	gids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		d.t.Fatal(err)
	}
	for _, gid := range gids {
		d.exec(`COMMIT PREPARED '` + gid + `'`)
	}
}

// writer makes random transactions until its context ends, whatever happens to its connection.
type writer struct {
	d    *database
	name string
	rnd  *rand.Rand
	conn *pgx.Conn
	n    int

	committed *atomic.Int64 // transactions of all writers that came to their end; a few rolled back
}

func (w *writer) run(ctx context.Context) {
	defer func() {
		if w.conn != nil {
			w.conn.Close(context.Background())
		}
	}()
	for ctx.Err() == nil {
		if w.conn == nil || w.conn.IsClosed() {
			var err error
			if w.conn, err = pgx.Connect(context.WithoutCancel(ctx), w.d.dsn); err != nil {
				w.conn = nil
				sleepFor(ctx, 20*time.Millisecond)
				continue
			}
			_, _ = w.conn.Exec(context.WithoutCancel(ctx), `SET deadlock_timeout = '20ms'; SET lock_timeout = '500ms'`)
			w.finishPrepared(context.WithoutCancel(ctx))
		}
		// Errors are part of the history: deadlocks, keys that exist, crashes. The audit table knows what became of it.
		if err := w.transaction(context.WithoutCancel(ctx)); err == nil {
			w.committed.Add(1)
		} else if !w.conn.IsClosed() {
			_, _ = w.conn.Exec(context.WithoutCancel(ctx), `ROLLBACK`)
		}
		sleepFor(ctx, time.Duration(w.rnd.IntN(5))*time.Millisecond)
	}
}

// finishPrepared commits what the writer had prepared when its connection broke; its locks stand in everybody's way.
func (w *writer) finishPrepared(ctx context.Context) {
	rows, _ := w.conn.Query(ctx, `SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, $1)`, w.name+"_")
	gids, _ := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, gid := range gids {
		_, _ = w.conn.Exec(ctx, `COMMIT PREPARED '`+gid+`'`)
	}
}

func (w *writer) transaction(ctx context.Context) error {
	w.n++
	stmts := []string{"BEGIN"}
	if w.n == 5 {
		stmts = append(stmts, w.bulk())
	}
	for range 1 + w.rnd.IntN(6) {
		switch w.rnd.IntN(8) {
		case 0:
			stmts = append(stmts, "SAVEPOINT s", w.change(), "ROLLBACK TO s")
		case 1:
			stmts = append(stmts, "SAVEPOINT s", w.change(), w.change(), "RELEASE s")
		default:
			stmts = append(stmts, w.change())
		}
	}
	gid := fmt.Sprintf("%s_%d", w.name, w.n)
	switch w.rnd.IntN(10) {
	case 0:
		stmts = append(stmts, "ROLLBACK")
	case 1:
		stmts = append(stmts, "PREPARE TRANSACTION '"+gid+"'", "COMMIT PREPARED '"+gid+"'")
	case 2:
		stmts = append(stmts, "PREPARE TRANSACTION '"+gid+"'", "ROLLBACK PREPARED '"+gid+"'")
	default:
		stmts = append(stmts, "COMMIT")
	}
	for _, s := range stmts {
		if _, err := w.conn.Exec(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) change() string {
	table, id, v := w.table(), w.rnd.IntN(200), w.rnd.IntN(1_000_000)
	switch w.rnd.IntN(2000) {
	case 0:
		return "TRUNCATE " + table
	case 1:
		return w.bulk()
	case 2:
		return "DELETE FROM " + table + " WHERE id >= 1000"
	}
	switch w.rnd.IntN(10) {
	case 0, 1:
		return fmt.Sprintf("DELETE FROM %s WHERE id = %d", table, id)
	case 2:
		return fmt.Sprintf("UPDATE %s SET id = %d WHERE id = %d AND NOT EXISTS (SELECT FROM %[1]s WHERE id = %[2]d)", table, 200+w.rnd.IntN(200), id)
	case 3:
		return fmt.Sprintf("UPDATE %s SET v = %d WHERE id BETWEEN %d AND %d", table, v, id, id+10)
	case 4:
		return fmt.Sprintf("INSERT INTO %s VALUES (%d, %d, NULL) ON CONFLICT (id) DO UPDATE SET v = excluded.v, pad = NULL", table, id, v)
	default:
		return fmt.Sprintf("INSERT INTO %s VALUES (%d, %d, 'p%d') ON CONFLICT (id) DO UPDATE SET v = excluded.v", table, id, v, v%10)
	}
}

func (w *writer) table() string { return []string{"a", "b"}[w.rnd.IntN(2)] }

// bulk is larger than what the applier takes at once.
func (w *writer) bulk() string {
	first := 1000 + w.rnd.IntN(1_000_000)*1000
	return fmt.Sprintf("INSERT INTO %s SELECT g, %d, 'bulk' FROM generate_series(%d, %d) g ON CONFLICT DO NOTHING", w.table(), w.n, first, first+19999)
}

// auditRecorder records changes in the spelling of the audit trigger. Its Background takes positions too.
type auditRecorder struct {
	recorder
	fail func() error
}

func (r *auditRecorder) Apply(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) error {
	if err := r.fail(); err != nil {
		return err
	}
	seq := seqs.Reserve(int64(len(changes)), time.Now())
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"public", "recorded"}, []string{"seq", "commit_lsn", "xid", "line"},
		pgx.CopyFromSlice(len(changes), func(i int) ([]any, error) {
			c := changes[i]
			return []any{int64(seq) + int64(i), int64(c.CommitLSN), int64(c.XID), auditLine(c)}, nil
		}))
	return err
}

func (r *auditRecorder) Close() {}

func (r *auditRecorder) Due() bool { return true }

func (r *auditRecorder) Background(_ context.Context, _ pgx.Tx, seqs *koldproxy.Sequence) (bool, error) {
	seqs.Reserve(1, time.Now())
	return false, nil
}

func auditLine(c koldproxy.Change) string {
	op := []string{"", "INSERT ", "UPDATE ", "DELETE ", "TRUNCATE "}[c.Op] + c.Relation.Name
	switch {
	case c.New != nil:
		for _, d := range c.New {
			if d.Kind == koldproxy.DatumNull {
				d.Text = "NULL"
			}
			op += " " + d.Text
		}
	case c.Old != nil:
		op += " " + c.Old[0].Text
	}
	return op
}
