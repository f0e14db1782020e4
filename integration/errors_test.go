package integration_test

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// protocols are the ways in which drivers send a statement.
var protocols = []struct {
	name string
	mode pgx.QueryExecMode
}{
	{"simple", pgx.QueryExecModeSimpleProtocol},
	{"extended", pgx.QueryExecModeExec},
	{"prepared", pgx.QueryExecModeCacheStatement},
}

// badInput is a statement that is refused, with what it is refused with.
type badInput struct {
	sql, code, text string
	role            string // one or more; default demo
	hint            string // part of the hint, if one is due
}

const both = "demo postgres"

// TestBadInput sends what must be refused: each in every protocol, in autocommit and in a transaction block, and checks
// that the session goes on as after an error of PostgreSQL's own.
func TestBadInput(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric, status text);
		CREATE TABLE nopk (id int);
		CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE);
		CREATE TABLE generated (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
		CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF parts DEFAULT;
		CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
		CREATE VIEW v AS SELECT * FROM orders;
		CREATE TABLE _stream_taken (x int);
		CREATE TABLE other (id int PRIMARY KEY);
		CREATE TABLE feed (id int PRIMARY KEY, v int);
		CREATE STREAM there ON orders WHEN (total > 1)`)
	c.exec("SELECT koldstore.manage_table('feed')")
	c.exec("INSERT INTO orders VALUES (1, 10, 'x'), (2, 20, 'y')")
	c.exec("INSERT INTO feed VALUES (1, 1)")
	c.fence()
	if n := c.text("SELECT count(*) FROM _stream_there"); n != "2" {
		t.Fatalf("%s events before", n)
	}

	for _, in := range badStatements(w) {
		for _, role := range strings.Fields(cmp.Or(in.role, "demo")) {
			for _, p := range protocols {
				t.Run(fmt.Sprintf("%s as %s, %s protocol", in.sql, role, p.name), func(t *testing.T) {
					in.check(t, w.connectAs(t, role), p.mode)
				})
			}
		}
	}

	// Nothing of all that had an effect.
	if got := c.text("SELECT string_agg(name, ' ') FROM koldstore.visible_stream WHERE schema_name = $1", w.schema); got != "there" {
		t.Errorf("streams afterwards: %s", got)
	}
	if got := c.text("SELECT string_agg(op || k, ' ' ORDER BY id) FROM _stream_there"); got != "put1 put2" {
		t.Errorf("events afterwards: %s", got)
	}
	if got := c.drain("feed", 0, 10); len(got) != 1 {
		t.Errorf("feed afterwards: %v", got)
	}
}

// check sends the statement alone and in a transaction block.
func (in badInput) check(t *testing.T, c *client, mode pgx.QueryExecMode) {
	t.Helper()
	refused := func() {
		t.Helper()
		_, err := c.Exec(c.ctx, in.sql, mode)
		if err == nil { // take it back, for the sake of the next ones
			_, _ = c.Exec(c.ctx, "ROLLBACK; DROP STREAM IF EXISTS s")
		}
		e := wantError(t, err, in.code, in.text)
		if !strings.Contains(e.Hint, in.hint) {
			t.Errorf("hint %q, want %q in it", e.Hint, in.hint)
		}
	}
	refused()
	if got := c.text("SELECT 1"); got != "1" {
		t.Errorf("the session is not usable afterwards")
	}
	c.exec("BEGIN")
	c.exec("CREATE TEMP TABLE before (x int)")
	refused()
	if status := c.PgConn().TxStatus(); status != 'E' {
		t.Errorf("the transaction is %q after the error", status)
	}
	// Syntax is judged before the state of the transaction, that of a predicate behind it.
	_, err := c.Exec(c.ctx, in.sql, mode)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "25P02" && (in.code != "42601" || pg.Code != in.code) {
		t.Errorf("in the failed transaction: %v", err)
	}
	c.exec("ROLLBACK")
	if got := c.text("SELECT to_regclass('pg_temp.before') IS NULL"); got != "t" {
		t.Errorf("the transaction was not rolled back")
	}
}

func badStatements(w *tenant) []badInput {
	return []badInput{
		// CREATE STREAM
		{sql: "CREATE STREAM s ON orders", code: "42601", text: "WHEN", hint: "WHEN"},
		{sql: "CREATE STREAM s ON orders WITH (start = 'now')", code: "42601", text: "WHEN", hint: "WHEN"},
		{sql: "CREATE STREAM s ON orders WHEN ()", code: "42601"},
		{sql: "CREATE STREAM s ON orders WHEN (total >)", code: "42601"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1", code: "42601"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (start = 'now', start = 'earliest')", code: "42601", text: "redundant"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (color = 'red')", code: "22023", text: `"color"`, hint: "start, pre_image and retention"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (start = 'tomorrow')", code: "22023", text: "start", hint: "'earliest'"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (start = 'NOW')", code: "22023", text: "start"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (pre_image = 'perhaps')", code: "22023", text: "pre_image"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = 'a while')", code: "22023", text: "retention", hint: "24h"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = '0h')", code: "22023", text: "retention"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = '24')", code: "22023", text: "retention"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = '')", code: "22023", text: "retention"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = -5)", code: "22023", text: "retention"},
		{sql: "CREATE STREAM s ON orders WHEN (total > 1) WITH (retention = '999999999w')", code: "22023", text: "retention"},
		{sql: "CREATE STREAM s ON missing WHEN (total > 1)", code: "42P01", text: `"missing"`},
		{sql: "CREATE STREAM s ON nowhere.orders WHEN (total > 1)", code: "42P01", text: `"nowhere.orders"`},
		{sql: "CREATE STREAM nowhere.s ON orders WHEN (total > 1)", code: "3F000", text: `"nowhere"`},
		{sql: "CREATE STREAM s ON nopk WHEN (id > 1)", code: "55000", text: "no primary key", hint: "ADD PRIMARY KEY"},
		{sql: "CREATE STREAM s ON deferred WHEN (id > 1)", code: "55000", text: "deferrable"},
		{sql: "CREATE STREAM s ON generated WHEN (id > 1)", code: "55000", text: "generated"},
		{sql: "CREATE STREAM s ON part WHEN (id > 1)", code: "55000", text: "partition", hint: "parts"},
		{sql: "CREATE STREAM s ON unlogged WHEN (id > 1)", code: "55000", text: "unlogged"},
		{sql: "CREATE STREAM s ON v WHEN (id > 1)", code: "55000", text: "view"},
		{sql: "CREATE STREAM s ON _stream_there WHEN (op = 'put')", code: "42501", text: "owner"},
		{sql: "CREATE STREAM s ON _stream_there WHEN (op = 'put')", code: "55000", text: "koldproxy itself", role: "postgres"},
		{sql: "CREATE STREAM s ON orders WHEN (total > (SELECT 1))", code: "0A000", text: "subquery"},
		{sql: "CREATE STREAM s ON orders WHEN (EXISTS (SELECT FROM other))", code: "0A000", text: "subquery"},
		{sql: "CREATE STREAM s ON orders WHEN (now() > '2020-01-01')", code: "42P17", text: "IMMUTABLE"},
		{sql: "CREATE STREAM s ON orders WHEN (random() > 0.5)", code: "42P17", text: "IMMUTABLE"},
		{sql: "CREATE STREAM s ON orders WHEN (status = current_user)", code: "42P17", text: "IMMUTABLE"},
		{sql: "CREATE STREAM s ON orders WHEN (sum(total) > 1)", code: "42803", text: "aggregate"},
		{sql: "CREATE STREAM s ON orders WHEN (row_number() OVER () > 1)", code: "42P20", text: "window"},
		{sql: "CREATE STREAM s ON orders WHEN (total)", code: "42804", text: "boolean"},
		{sql: "CREATE STREAM s ON orders WHEN (nope > 1)", code: "42703", text: `"nope"`},
		{sql: "CREATE STREAM s ON orders WHEN (other.id > 1)", code: "42P01", text: `"other"`},
		{sql: "CREATE STREAM there ON orders WHEN (total > 1)", code: "42710", text: `"there"`},
		{sql: "CREATE STREAM taken ON orders WHEN (total > 1)", code: "42P07", text: "_stream_taken"},
		{sql: "CREATE STREAM IF NOT EXISTS taken ON orders WHEN (total > 1)", code: "42P07", text: "_stream_taken"},
		{sql: "CREATE STREAM " + strings.Repeat("s", 60) + " ON orders WHEN (total > 1)", code: "42622", text: "too long"},
		{sql: "DROP STREAM missing", code: "42704", text: `"missing"`},
		{sql: "DROP STREAM taken", code: "42704", text: `"taken"`},
		{sql: "DROP TABLE orders", code: "2BP01"},

		// The log is read-only, for everybody.
		{sql: "INSERT INTO _stream_there (id, op, k, ts) VALUES ('1', 'put', '1', now())", code: "42809", text: "_stream_there", hint: "DROP STREAM", role: both},
		{sql: "INSERT INTO _stream_there (id, op, k, ts) VALUES ('1', 'put', '1', now()) ON CONFLICT DO NOTHING", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "UPDATE _stream_there SET op = 'exit'", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "UPDATE _stream_there SET op = 'exit' WHERE false", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "DELETE FROM _stream_there", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "WITH gone AS (DELETE FROM _stream_there RETURNING 1) SELECT count(*) FROM gone", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "MERGE INTO _stream_there s USING (SELECT 1) x ON true WHEN MATCHED THEN DELETE", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "TRUNCATE _stream_there", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "DROP TABLE _stream_there", code: "42809", text: "_stream_there", hint: "DROP STREAM", role: both},
		{sql: "DROP TABLE _stream_there CASCADE", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "DROP SCHEMA " + w.schema + " CASCADE", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "ALTER TABLE _stream_there ADD x int", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "ALTER TABLE _stream_there RENAME TO something", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "ALTER TABLE _stream_there DISABLE TRIGGER ALL", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "ALTER TABLE _stream_there SET SCHEMA public", code: "42809", hint: "DROP STREAM", role: both},
		{sql: "DROP TRIGGER koldproxy_guard ON _stream_there", code: "42809", hint: "DROP STREAM", role: "postgres"},
		{sql: "DROP POLICY koldproxy_readers ON _stream_there", code: "42809", hint: "DROP STREAM", role: "postgres"},
		{sql: "CREATE RULE r AS ON INSERT TO _stream_there DO INSTEAD NOTHING", code: "42809", hint: "DROP STREAM", role: "postgres"},
		{sql: "SET session_replication_role = replica; DELETE FROM _stream_there", code: "42809", hint: "DROP STREAM", role: "postgres"},
		{sql: "DELETE FROM koldstore.feed__cl", code: "42809", text: "feed__cl", role: both},

		// The feed.
		{sql: "SELECT * FROM koldstore.changes_since('feed', limit_rows => 10, last_rows => 11)", code: "22023", text: "last_rows"},
		{sql: "SELECT * FROM koldstore.changes_since('feed', last_rows => 0)", code: "22023", text: "last_rows"},
		{sql: "SELECT * FROM koldstore.changes_since('feed', since_seq => -1)", code: "22023", text: "since_seq"},
		{sql: "SELECT * FROM koldstore.changes_since('feed', since_seq => NULL)", code: "22023", text: "since_seq"},
		{sql: "SELECT * FROM koldstore.changes_since('feed', limit_rows => 0)", code: "22023", text: "limit_rows"},
		{sql: "SELECT * FROM koldstore.changes_since('feed', limit_rows => -1)", code: "22023", text: "limit_rows"},
		{sql: "SELECT * FROM koldstore.changes_since(NULL)", code: "22023", text: "table_name"},
		{sql: "SELECT * FROM koldstore.changes_since('orders')", code: "55000", text: "not managed", hint: "manage_table"},
		{sql: "SELECT * FROM koldstore.changes_since('missing')", code: "42P01", text: `"missing"`},
		{sql: "SELECT koldstore.manage_table('nopk')", code: "55000", text: "no primary key"},
		{sql: "SELECT koldstore.manage_table('feed')", code: "55000", text: "already managed"},
		{sql: "SELECT koldstore.manage_table('other', storage => 'nowhere')", code: "22023", text: "nowhere"},
		{sql: "SELECT koldstore.manage_table('other', hot_row_limit => -1)", code: "22023", text: "hot_row_limit"},
		{sql: "SELECT koldstore.manage_table('other', retention => '-1 day')", code: "22023", text: "retention"},
		{sql: "SELECT koldstore.flush_table('orders', wait => true)", code: "55000", text: "not managed"},
		{sql: "SELECT koldstore.unmanage_table('orders')", code: "55000", text: "not managed"},
		{sql: "SELECT koldstore.set_retention('feed', '0 s')", code: "22023", text: "retention"},
		{sql: "SELECT koldstore.table_status('orders')", code: "55000", text: "not managed"},
		{sql: "SELECT koldstore.wait_for_async_mirror('-1 s')", code: "22023", text: "timeout"},
	}
}

// TestPrivilegesAreTheCallers: streams and feeds show rows to those who may read all of the table.
func TestPrivilegesAreTheCallers(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	admin := w.connectAs(t, "postgres")
	guest := w.schema + "_guest"
	admin.exec(fmt.Sprintf("CREATE ROLE %[1]s LOGIN PASSWORD '%[1]s'; GRANT USAGE, CREATE ON SCHEMA %[2]s TO %[1]s", guest, w.schema))
	t.Cleanup(func() { admin.exec("DROP OWNED BY " + guest + "; DROP ROLE " + guest) })
	owner := w.connect(t)
	owner.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM s ON orders WHEN (total > 1)")
	owner.exec("SELECT koldstore.manage_table('orders')")
	owner.exec("INSERT INTO orders VALUES (1, 10)")
	owner.flush("orders")

	c := w.connectAs(t, guest)
	refused := func(code, text, sql string) {
		t.Helper()
		_, err := c.Exec(c.ctx, sql)
		wantError(t, err, code, text)
	}
	feed := "SELECT * FROM koldstore.changes_since('orders')"
	refused("42501", "must be owner", "CREATE STREAM mine ON orders WHEN (total > 1)")
	refused("42501", "must be owner", "DROP STREAM s")
	refused("42501", "permission denied", "SELECT * FROM _stream_s")
	refused("42501", "permission denied", feed)
	refused("42501", "must be owner", "SELECT koldstore.flush_table('orders', wait => true, force => true)")
	// Asking for a cold page by hand helps nobody: the demand is judged by the server.
	demand := fmt.Sprintf(`{"kind": "cold_page", "table": %s, "generation": 1, "mode": "forward", "after": 0, "limit": 10, "segments": []}`, owner.text("SELECT 'orders'::regclass::oid"))
	refused("KS003", "", fmt.Sprintf("DO $$ BEGIN RAISE 'give' USING ERRCODE = 'KS003', DETAIL = '%s'; END $$ -- koldstore", demand))

	owner.exec("GRANT SELECT ON orders TO " + guest)
	if got := c.rows("SELECT op, k FROM _stream_s"); len(got) != 1 {
		t.Errorf("the log shows %v", got)
	}
	if got := c.rows(feed); len(got) != 1 || got[0][5] != "cold" {
		t.Errorf("the feed shows %v", got)
	}
	owner.exec("REVOKE SELECT ON orders FROM " + guest + "; GRANT SELECT (id) ON orders TO " + guest)
	refused("42501", "permission denied", feed)
	owner.exec("GRANT SELECT ON orders TO " + guest + "; ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON orders USING (id > 1)")
	refused("42501", "row-level security", feed)
	refused("42501", "row-level security", "SELECT * FROM _stream_s")
}

// TestCursorBelowTheFloor: what retention has taken away is an error and not a short page.
func TestCursorBelowTheFloor(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE m (id int PRIMARY KEY, v int)")
	c.exec("SELECT koldstore.manage_table('m', min_flush_rows => 1, auto_flush => false)")
	c.exec("INSERT INTO m SELECT i, i FROM generate_series(1, 10) i")
	c.fence()
	old := c.drain("m", 0, 100)
	c.flush("m")
	cursor := old[4].seq
	if rest := c.drain("m", cursor, 100); len(rest) != 5 {
		t.Fatalf("%d rows behind the fifth of ten", len(rest))
	}
	c.exec("INSERT INTO m VALUES (11, 11)")
	c.fence()

	// The segment has to become a second old; until then each call asks for a sweep that drops nothing.
	await(t, "the segment to be dropped", func() bool {
		c.exec("SELECT koldstore.set_retention('m', '1 second')")
		return c.text("SELECT koldstore.table_status('m') ->> 'segments'") == "0"
	})
	for _, p := range protocols {
		_, err := c.Exec(c.ctx, fmt.Sprintf("SELECT * FROM koldstore.changes_since('m', since_seq => %d)", cursor), p.mode)
		if e := wantError(t, err, "KS001", "no longer retained"); e.Hint == "" {
			t.Errorf("no hint")
		}
	}
	floor := c.text("SELECT koldstore.table_status('m') ->> 'floor'")
	if last := fmt.Sprint(old[9].seq); floor != last {
		t.Errorf("the floor is %s, the last dropped seq %s", floor, last)
	}
	for since, want := range map[int64]int{0: 1, old[9].seq: 1} {
		if got := c.drain("m", since, 100); len(got) != want || got[0].pk != `{"id": 11}` {
			t.Errorf("from %d: %v", since, got)
		}
	}
	if got := c.rows("SELECT seq FROM koldstore.changes_since('m', last_rows => 5)"); len(got) != 1 {
		t.Errorf("the newest five: %v", got)
	}
}

// TestColdRowsOnADirectConnection: without koldproxy in between a page that needs cold rows is an error, with the way out.
func TestColdRowsOnADirectConnection(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE m (id int PRIMARY KEY, v int)")
	c.exec("SELECT koldstore.manage_table('m')")
	c.exec("INSERT INTO m VALUES (1, 1), (2, 2)")
	c.flush("m")
	c.exec("INSERT INTO m VALUES (3, 3)")
	c.fence()
	feed := c.drain("m", 0, 100)

	direct := w.connectDirect(t, "demo")
	for _, sql := range []string{
		"SELECT * FROM koldstore.changes_since('m')",
		"SELECT * FROM koldstore.changes_since('m', last_rows => 2)",
		fmt.Sprintf("SELECT * FROM koldstore.changes_since('m', since_seq => %d)", feed[0].seq),
		"SELECT koldstore.flush_table('m', wait => true, force => true)",
	} {
		for _, p := range protocols {
			_, err := direct.Exec(direct.ctx, sql, p.mode)
			if e := wantError(t, err, "KS003", ""); !strings.Contains(e.Hint, "through koldproxy") {
				t.Errorf("hint: %q", e.Hint)
			}
		}
	}
	// What needs no cold rows works.
	if got := direct.drain("m", feed[1].seq, 100); len(got) != 1 {
		t.Errorf("the hot rows: %v", got)
	}
	if got := direct.rows("SELECT seq FROM koldstore.changes_since('m', last_rows => 1)"); len(got) != 1 {
		t.Errorf("the newest row: %v", got)
	}
	direct.exec("SELECT koldstore.flush_table('m', force => true)") // queued, koldproxy does it
	await(t, "the queued flush", func() bool { return c.text("SELECT koldstore.table_status('m') ->> 'hot_rows'") == "0" })
	if _, err := direct.Exec(direct.ctx, "CREATE STREAM s ON m WHEN (v > 1)"); err == nil {
		t.Error("PostgreSQL has learned CREATE STREAM")
	}
}

// await polls until a condition holds that has no event of its own.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("still waiting for %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestSessionsWithOldStrings does what an application does whose sessions have standard_conforming_strings off, in which the text of
// functions is read in another way: its DDL works, and so do streams and feeds.
func TestSessionsWithOldStrings(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("SET standard_conforming_strings = off; SET escape_string_warning = off")
	c.exec("CREATE TABLE gone (id int PRIMARY KEY); ALTER TABLE gone ADD n int; DROP TABLE gone")
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, note text)")
	c.exec("SELECT koldstore.manage_table('orders')")
	c.exec(`CREATE STREAM noted ON orders WHEN (note = E'a\\b') WITH (retention = '24h')`)
	c.exec("ALTER STREAM noted SET (retention = '2d')")
	c.exec(`INSERT INTO orders VALUES (1, 'a\\b'), (2, 'ab')`)
	c.fence()
	if got := c.text("SELECT string_agg(k::text, ' ') FROM _stream_noted"); got != "1" {
		t.Errorf("the stream has %s", got)
	}
	c.flush("orders")
	if got := c.text(`SELECT string_agg(row_image ->> 'note', ' ' ORDER BY seq) FROM koldstore.changes_since('orders')`); got != `a\b ab` {
		t.Errorf("the feed has %s", got)
	}
	if got := c.text("SELECT count(*) FROM koldstore.visible_stream WHERE name = 'noted'"); got != "1" {
		t.Errorf("%s streams", got)
	}
	c.exec("DROP STREAM noted; DROP TABLE orders")
}
