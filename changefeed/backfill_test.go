package changefeed_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

const earliest = `CALL koldstore.create_stream(NULL, '%s', NULL, '%s', '%s', options => '{"start": "earliest", "pre_image": "true"}')`

// createEarliest creates a stream from a session of its own, after other statements if there are any, and says what comes of it.
func (h *host) createEarliest(before, name, table, predicate string) <-chan error {
	h.t.Helper()
	conn, err := pgx.Connect(h.t.Context(), h.app.Config().ConnString())
	must(h.t, err)
	h.t.Cleanup(func() { conn.Close(context.Background()) })
	_, err = conn.Exec(h.t.Context(), before)
	must(h.t, err)
	created := make(chan error, 1)
	go func() {
		_, err := conn.Exec(h.t.Context(), fmt.Sprintf(earliest, name, table, predicate))
		created <- err
	}()
	return created
}

// While the backfill goes on, others write, truncate, rename columns that are no key, and the applier is stopped and started
// over and over. In the end the log's fold is what the table holds, nothing came twice, and nothing is left behind.
func TestBackfillBesideWriters(t *testing.T) {
	if os.Getenv("KOLDPROXY_TEST_LONG") == "" {
		t.Skip("takes minutes on a busy machine; make test-long runs it")
	}
	t.Parallel()
	for _, composite := range []bool{false, true} {
		h := newHost(t)
		h.stopApplier()
		h.config.SeedRows = 7
		h.startApplier()
		ctx := t.Context()
		must(t, feedtest.CreateTable(ctx, h.app, "r", composite))
		h.exec(`INSERT INTO r (id, v, note, kind) SELECT g, g % 100, 'x', chr(97 + g % 26) FROM generate_series(1, 600) g`)
		var writers sync.WaitGroup
		for i := range 3 {
			conn, err := pgx.Connect(ctx, h.app.Config().ConnString())
			must(t, err)
			defer conn.Close(context.Background())
			history := feedtest.NewHistory("r", 700, uint64(i)+77)
			history.Truncate = i == 0
			writers.Go(func() {
				for range 150 {
					if err := history.Step(ctx, conn); err != nil {
						t.Errorf("writer: %v", err)
						return
					}
				}
			})
		}
		created := h.createEarliest("", "s", "r", `v > 50 OR note = ''x'' AND v IS NOT NULL`)
		restarts := 0
		for running := true; running; {
			select {
			case err := <-created:
				must(t, err)
				running = false
			case <-time.After(150 * time.Millisecond):
				if restarts < 4 {
					h.stopApplier()
					h.startApplier()
					restarts++
				}
			}
		}
		h.expect(`SELECT state FROM koldstore.stream`, "active") // CREATE STREAM returns when it is done
		writers.Wait()
		h.fence()
		key := "to_jsonb(t.id)"
		if composite {
			key = "jsonb_build_object('kind', t.kind, 'id', t.id)"
		}
		must(t, feedtest.CheckFold(ctx, h.pool, "_stream_s", "r", feedtest.Predicate, key, true))
		// Nothing twice: of a key the image of an event's old row is that of the event before.
		h.expect(`SELECT k, op, doc, old, before FROM (SELECT k, op, doc, old, lag(CASE WHEN op = 'put' THEN doc END) OVER w AS before, row_number() OVER w AS n FROM _stream_s WINDOW w AS (PARTITION BY k ORDER BY id)) x
			WHERE n > 1 AND before IS NOT NULL AND old IS DISTINCT FROM before`)
		h.expect(`SELECT count(*) FROM koldstore.seed_touched`, "0")
		h.expect(`SELECT count(*) FROM pg_proc WHERE proname LIKE 'reader\_%'`, "0")
		h.expect(`SELECT job_type, status FROM koldstore.job`, "backfill completed")
		h.expect(`SELECT events_lost FROM koldstore.stream_status`, "0")
	}
}

// Writers are not kept waiting: with a page read and the applier gone, the table can be written to.
func TestBackfillLeavesTheTableAlone(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t SELECT generate_series(1, 5000)`)
	h.stream("first", "t", "false") // publishes the table, which takes its lock for a moment
	h.stopApplier()
	created := h.createEarliest("", "s", "t", "true")
	h.eventually("the stream is there", func() bool { return h.rows(`SELECT count(*) FROM koldstore.stream WHERE name = 's'`)[0] == "1" })
	h.exec(`SET lock_timeout = '1ms'`, `INSERT INTO t VALUES (5001)`, `UPDATE t SET id = -id WHERE id = 1`, `DELETE FROM t WHERE id = 2`)
	h.expect(`SELECT args, status FROM koldstore.job`, `{"stream": "public.s"} queued`)
	h.startApplier()
	must(t, <-created)
	// The changes are events, as the stream has begun; the rest is backfilled.
	h.expect(`SELECT op, count(*), count(DISTINCT k) FROM _stream_s GROUP BY op ORDER BY op`, "delete 2 2", "put 5000 5000")
	h.expect(`SELECT status, progress ->> 'events' FROM koldstore.job`, "completed 4998")
}

// Whoever cancels CREATE STREAM, or the job, has no stream.
func TestBackfillIsCancelled(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t SELECT generate_series(1, 5000)`)
	h.stopApplier()
	for _, how := range []string{
		`SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'creator' AND wait_event = 'PgSleep'`,
		`SELECT koldstore.cancel_job(job_id) FROM koldstore.job WHERE status = 'queued'`,
	} {
		done := h.createEarliest(`SET application_name = 'creator'`, "s", "t", "true")
		h.eventually("the backfill is waited for", func() bool {
			return h.rows(`SELECT count(*) FROM koldstore.stream WHERE name = 's'`)[0] == "1"
		})
		var err error
		h.eventually("it is cancelled", func() bool {
			h.admin(how)
			select {
			case err = <-done:
				return true
			default:
				return false
			}
		})
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "57014" {
			t.Errorf("%s: %v", how, err)
		}
		h.expect(`SELECT count(*) FROM koldstore.stream`, "0")
		h.expect(`SELECT DISTINCT status FROM koldstore.job`, "cancelled")
	}
	h.startApplier()
	h.stream("s", "t", "true", "start", "earliest") // the name is free
	h.expect(`SELECT count(*) FROM _stream_s`, "5000")
}

// A table that its owner cannot read whole, or that goes away, is an error of CREATE STREAM, and there is no stream.
func TestBackfillFails(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t VALUES (1)`,
		`ALTER TABLE t ENABLE ROW LEVEL SECURITY`, `ALTER TABLE t FORCE ROW LEVEL SECURITY`)
	_, err := h.app.Exec(t.Context(), fmt.Sprintf(earliest, "s", "t", "true"))
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "55000" && pg.Code != "42501" {
		t.Errorf("got %v", err)
	}
	h.expect(`SELECT count(*) FROM koldstore.stream`, "0")
	h.exec(`ALTER TABLE t NO FORCE ROW LEVEL SECURITY`)
	h.stream("s", "t", "true", "start", "earliest")
	h.expect(`SELECT k FROM _stream_s`, "1")
}

// Inside a transaction block there is nobody to wait for: the backfill is part of it, and keeps writers out until its end.
func TestBackfillInATransaction(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t VALUES (1), (2)`)
	ctx := t.Context()
	for _, block := range []struct{ begin, end string }{{"BEGIN", "COMMIT"}, {"BEGIN; SAVEPOINT a", "RELEASE a; COMMIT"}} {
		_, err := h.app.Exec(ctx, block.begin)
		must(t, err)
		h.stream("s", "t", "true", "start", "earliest")
		var n int
		must(t, h.app.QueryRow(ctx, `SELECT count(*) FROM _stream_s`).Scan(&n))
		if n != 2 {
			t.Errorf("%d events before the commit", n)
		}
		_, err = h.app.Exec(ctx, block.end)
		must(t, err)
		h.exec(`CALL koldstore.drop_stream(NULL, 's')`)
	}
	h.exec(`SELECT; ` + fmt.Sprintf(earliest, "s", "t", "true")) // several statements in one message are a block, too
	h.expect(`SELECT count(*) FROM _stream_s`, "2")
}

// A TRUNCATE ends a backfill, however often one comes: nothing is left of what was there before the stream.
func TestBackfillUnderTruncates(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.config.SeedRows = 10
	h.startApplier()
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int)`, `INSERT INTO t SELECT g, 0 FROM generate_series(1, 2000) g`)
	ctx := t.Context()
	created := h.createEarliest("", "s", "t", "v % 2 = 0")
	h.eventually("CREATE STREAM returns", func() bool {
		h.exec(`TRUNCATE t`, `INSERT INTO t SELECT g, g FROM generate_series(1, 20) g`)
		select {
		case err := <-created:
			must(t, err)
			return true
		default:
			return false
		}
	})
	h.exec(`BEGIN; TRUNCATE t; INSERT INTO t SELECT g, g FROM generate_series(1, 5) g; TRUNCATE t; INSERT INTO t VALUES (7, 2); COMMIT`)
	h.fence()
	must(t, feedtest.CheckFold(ctx, h.pool, "_stream_s", "t", "v % 2 = 0", "to_jsonb(t.id)", true))
	h.expect(`SELECT op, k FROM _stream_s ORDER BY id DESC LIMIT 5`, "put 7", "delete 4", "delete 2", "put 4", "put 2")
	h.expect(`SELECT s.state, j.status, (SELECT count(*) FROM koldstore.seed_touched), u.events = (SELECT count(*) FROM _stream_s)
		FROM koldstore.stream s JOIN koldstore.job j ON j.job_id = s.seed_job JOIN koldstore.stream_status u USING (stream_id)`, "active completed 0 t")
}

// A backfill that is waited for under a statement_timeout, or whose table goes away, leaves no stream.
func TestBackfillIsGivenUp(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t SELECT generate_series(1, 5000)`)
	h.stream("other", "t", "false") // publishes the table, for which the applier is needed
	h.stopApplier()
	for _, give := range []struct{ up, code string }{{`SET statement_timeout = '1s'`, "57014"}, {`SET statement_timeout = 0`, "55000"}} {
		how, code := give.up, give.code
		done := h.createEarliest(how, "s", "t", "true")
		if code == "55000" {
			h.eventually("the backfill is waited for", func() bool { return h.rows(`SELECT count(*) FROM koldstore.stream WHERE name = 's'`)[0] == "1" })
			h.exec(`DROP TABLE t CASCADE`)
		}
		err := <-done
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != code {
			t.Errorf("%s: %v", how, err)
		}
		h.expect(`SELECT name FROM koldstore.stream`, "other")
		h.expect(`SELECT to_regclass('_stream_s')`, "NULL")
	}
}

// A predicate whose code does not work where koldproxy runs it breaks the stream, whose creator is told.
func TestBackfillOfAPredicateThatDoesNotWork(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE FUNCTION inner1(int) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1 > 5'`,
		`CREATE FUNCTION outer1(int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN inner1($1); END'`,
		`CREATE TABLE t (id int PRIMARY KEY, v int)`, `INSERT INTO t VALUES (9, 9)`)
	err := <-h.createEarliest(`SELECT 1`, "s", "t", "outer1(v)")
	if err == nil || !strings.Contains(err.Error(), "inner1") {
		t.Errorf("the statement says %v", err)
	}
}
