package integration_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// The tests of this file hold a stream to what docs/guarantees.md says of it, fact by fact, through the proxy.

// TestOptionsOfAStream: what is left out, and what each option means.
func TestOptionsOfAStream(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int); INSERT INTO orders VALUES (1, 1), (2, 2)")
	c.exec("CREATE STREAM plain ON orders WHEN (v > 0)")
	c.exec("CREATE STREAM IF NOT EXISTS now ON orders WHEN (v > 0) WITH (start = 'now', pre_image = false, retention = '90m')")
	c.exec("CREATE STREAM early ON orders WHEN (v > 0) WITH (start = 'earliest', pre_image = true, retention = 30d)")
	c.exec("CREATE STREAM day ON orders WHEN (v > 0) WITH (retention = '24h')")
	// CREATE STREAM has returned, so the backfill is done: no fence is needed, and old is NULL as for an insert.
	if got := c.text("SELECT string_agg(concat_ws(' ', op, k, doc -> 'v', old IS NULL), ', ' ORDER BY id) FROM _stream_early"); got != "put 1 1 t, put 2 2 t" {
		t.Errorf("the backfill: %s", got)
	}
	c.exec("INSERT INTO orders VALUES (3, 3); UPDATE orders SET v = 30 WHERE id = 3; UPDATE orders SET v = -1 WHERE id = 3; DELETE FROM orders WHERE id = 2")
	c.fence()
	const events = "put 3 3, put 3 30, exit 3 -1, delete 2 2"
	for _, stream := range []string{"plain", "now", "day"} { // future writes only
		if got := c.text("SELECT string_agg(concat_ws(' ', op, k, doc -> 'v'), ', ' ORDER BY id) FROM _stream_" + stream); got != events {
			t.Errorf("stream %s: %s", stream, got)
		}
	}
	if got := c.text("SELECT string_agg(concat_ws(' ', op, k, doc -> 'v', coalesce(old ->> 'v', 'NULL')), ', ' ORDER BY id) FROM (SELECT * FROM _stream_early ORDER BY id OFFSET 2) e"); got !=
		"put 3 3 NULL, put 3 30 3, exit 3 -1 30, delete 2 2 2" {
		t.Errorf("with pre_image: %s", got)
	}
	for stream, want := range map[string]string{"plain": "NULL", "now": "01:30:00", "early": "30 days", "day": "24:00:00"} {
		if got := c.text("SELECT retention FROM koldstore.show_streams() WHERE name = $1", stream); got != want {
			t.Errorf("retention of %s: %s, want %s", stream, got, want)
		}
	}
}

// TestShapeOfTheLog: an ordinary table in the same database and schema, with these columns and no others.
func TestShapeOfTheLog(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY); CREATE STREAM s ON orders WHEN (true); CREATE STREAM p ON orders WHEN (true) WITH (pre_image = true);
		CREATE TABLE pairs ("B" text, a int, PRIMARY KEY (a, "B")); CREATE STREAM pairs ON pairs WHEN (true)`)
	columns := func(log string) string {
		return c.text("SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attcollation::regcollation::text, ', ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped", log)
	}
	const want = `id text "C", op text "default", k jsonb -, ts timestamp with time zone -, doc jsonb -`
	if got := columns("_stream_s"); got != want {
		t.Errorf("columns: %s", got)
	}
	if got := columns("_stream_p"); got != want+", old jsonb -" {
		t.Errorf("columns with pre_image: %s", got)
	}
	if got := c.text("SELECT concat_ws(' ', relkind, relpersistence, relnamespace::regnamespace) FROM pg_class WHERE oid = '_stream_s'::regclass"); got != "p p "+w.schema {
		t.Errorf("the log is a %s", got)
	}
	before := time.Now().Add(-time.Second)
	c.exec("INSERT INTO orders VALUES (7); INSERT INTO pairs VALUES ('x', 5)")
	c.fence()
	if got := c.text("SELECT k FROM _stream_s"); got != "7" {
		t.Errorf("the key of one column: %s", got)
	}
	if got := c.text("SELECT k FROM _stream_pairs"); !sameJSON(got, `{"a": 5, "B": "x"}`) {
		t.Errorf("the key of two columns: %s", got)
	}
	var ts time.Time
	must(t, c.QueryRow(c.ctx, "SELECT ts FROM _stream_s").Scan(&ts))
	if ts.Before(before) || ts.After(time.Now().Add(time.Second)) {
		t.Errorf("ts is %v", ts)
	}
	// Because it is a table: it joins, aggregates, is copied, is in \d, feeds views and materialized views, cursors and COPY.
	c.exec("CREATE VIEW seen AS SELECT k FROM _stream_s; CREATE MATERIALIZED VIEW kept AS SELECT o.id, s.op FROM orders o JOIN _stream_s s ON s.k = to_jsonb(o.id)")
	if got := c.text("SELECT count(*) FROM kept JOIN seen ON seen.k = to_jsonb(kept.id)"); got != "1" {
		t.Errorf("joined: %s", got)
	}
	c.exec("DROP VIEW seen; DROP MATERIALIZED VIEW kept")
	if got := c.text("SELECT count(*) FROM information_schema.tables WHERE table_schema = $1 AND table_name = '_stream_s' AND table_type = 'BASE TABLE'", w.schema); got != "1" {
		t.Errorf("information_schema does not know the log")
	}
	// The log goes with its stream, and a later stream of the name has a log of its own.
	c.exec("DROP STREAM s")
	if got := c.text("SELECT to_regclass('_stream_s')"); got != "NULL" {
		t.Errorf("the log outlives its stream: %s", got)
	}
	c.exec("CREATE STREAM s ON orders WHEN (true)")
	if got := c.text("SELECT count(*) FROM _stream_s"); got != "0" {
		t.Errorf("%s events in a new log", got)
	}
}

// TestReplayFromAnyPosition: pages follow each other without a gap or a repeat, and every event is a position to go back to.
func TestReplayFromAnyPosition(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big_orders ON orders WHEN (total > 1000)")
	c.exec("INSERT INTO orders SELECT i, 2000 FROM generate_series(1, 1203) i")
	c.fence()
	const page = "SELECT id, op, k, ts, doc FROM _stream_big_orders ORDER BY id LIMIT 500"
	all := c.rows("SELECT id, op, k, ts, doc FROM _stream_big_orders ORDER BY id")
	var paged [][]string
	for sql := page; ; {
		rows := c.rows(sql)
		paged = append(paged, rows...)
		if len(rows) < 500 {
			break
		}
		sql = page + " AFTER ('" + rows[len(rows)-1][0] + "')"
	}
	if len(all) != 1203 || fmt.Sprint(paged) != fmt.Sprint(all) {
		t.Fatalf("%d events in pages, %d in one", len(paged), len(all))
	}
	for i := range all {
		if i > 0 && all[i][0] <= all[i-1][0] { // as bytes
			t.Fatalf("id %s does not sort behind %s", all[i][0], all[i-1][0])
		}
		if i%200 != 0 {
			continue
		}
		rest := c.rows(strings.Replace(page, "500", "5000", 1)+" AFTER ($1)", all[i][0])
		if len(rest) != len(all)-i-1 || len(rest) > 0 && rest[0][0] != all[i+1][0] {
			t.Errorf("behind event %d: %d events", i, len(rest))
		}
	}
}

// TestReplayDoesNotPileUp: a log is passed on as it is read. koldproxy's memory does not grow with what goes through it.
func TestReplayDoesNotPileUp(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, demo)
	w := newTenantOf(t, inst)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE STREAM s ON orders WHEN (true)")
	const events, bytes = 400, 100_000
	c.exec("INSERT INTO orders SELECT i, repeat('x', $2::int) FROM generate_series(1, $1::int) i", events, bytes)
	c.fence()
	pid := inst.cmd.Process.Pid
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
		t.Skipf("the peak of a process's memory cannot be reset here: %v", err)
	}
	before := peakMemory(t, pid)
	rows, err := c.Query(c.ctx, "SELECT id, op, k, ts, doc FROM _stream_s ORDER BY id", pgx.QueryExecModeSimpleProtocol)
	must(t, err)
	n, size := 0, 0
	for rows.Next() {
		n, size = n+1, size+len(rows.RawValues()[4])
	}
	must(t, rows.Err())
	if n != events || size < events*bytes {
		t.Fatalf("%d events of %d bytes", n, size)
	}
	if grown := peakMemory(t, pid) - before; grown > int64(size)/2 {
		t.Errorf("reading %d MB took %d MB of memory", size>>20, grown>>20)
	}
}

// peakMemory is the largest resident size that a process has had, in bytes.
func peakMemory(t *testing.T, pid int) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if found == nil {
		t.Skip("the kernel does not tell the peak of a process's memory")
	}
	kilobytes, err := strconv.ParseInt(string(found[1]), 10, 64)
	must(t, err)
	return kilobytes << 10
}

// TestPredicateIsAWhereClause: WHEN selects what the same text behind WHERE does, for rows that are there and for rows that come.
func TestPredicateIsAWhereClause(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec(`CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy'); CREATE DOMAIN percent AS int CHECK (VALUE BETWEEN 0 AND 100);
		CREATE FUNCTION odd(int) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN $1 % 2 = 1;
		CREATE FUNCTION near(int, int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN abs($1 - $2) < 3; END';
		CREATE OPERATOR <~> (LEFTARG = int, RIGHTARG = int, FUNCTION = near);
		CREATE TABLE t (id int PRIMARY KEY, v int, note text, german text COLLATE "de-x-icu", m mood, p percent, tags text[], j jsonb, during int4range, at timestamp, long text)`)
	predicates := []string{
		"v > 10", "NOT (v > 10)", "v IS NULL", "v <> 10 OR v IS NULL", "v IN (1, NULL)", "v NOT IN (1, NULL)", "v BETWEEN 3 AND 20 AND status_is_absent IS NULL",
		"note LIKE 'a%' OR note ~ '^B'", "german < 'o'", `note COLLATE "C" < 'a'`, "lower(note) = 'ärger'", "m >= 'ok'", "m IN ('sad', 'happy')", "p > 50", "'x' = ANY (tags)", "tags[1] IS DISTINCT FROM 'x'",
		"j @> '{\"a\": 1}'", "(j ->> 'a')::int > 0", "j -> 'b' = 'null'", "during @> 5", "isempty(during)", "at >= '2024-02-29'", "odd(v)", "v <~> 10", "length(long) > 5000",
		"(v, id) > (10, 3)", "CASE WHEN v > 10 THEN id > 2 END", "coalesce(v, 0) = 0 AND t.id > 0", "ROW(v, m) IS NOT NULL", "ROW(t.id, v) IS DISTINCT FROM ROW(3, 10)", "true", "NULL",
	}
	if !longTests { // each costs a stream
		for i := range predicates[:len(predicates)/2] {
			predicates[i] = predicates[2*i]
		}
		predicates = predicates[:len(predicates)/2]
	}
	rows := func(from int) {
		c.exec(fmt.Sprintf(`INSERT INTO t
			SELECT %d + i, (ARRAY[NULL, 0, 1, 10, 11, 20])[1 + i %% 6], (ARRAY['apple', 'Beet', 'Ärger', NULL, ''])[1 + i %% 5], (ARRAY['öl', 'Zug', 'ost', NULL])[1 + i %% 4],
				(ARRAY['sad', 'ok', 'happy', NULL]::mood[])[1 + i %% 4], (ARRAY[0, 50, 51, NULL])[1 + i %% 4], (ARRAY['{x,y}', '{}', '{NULL}', NULL]::text[])[1 + i %% 4]::text[],
				(ARRAY['{"a": 1}', '{"a": "2", "b": null}', 'null', '[1]', NULL]::jsonb[])[1 + i %% 5], (ARRAY['[1,9)', 'empty', NULL, '(,)']::int4range[])[1 + i %% 4],
				(ARRAY['2024-02-29', '-infinity', '2020-01-01 12:00', NULL]::timestamp[])[1 + i %% 4], CASE WHEN i %% 3 > 0 THEN repeat(md5(i::text), 30 * (i %% 40)) END
			FROM generate_series(1, 60) i`, from))
	}
	c.exec("ALTER TABLE t ADD status_is_absent text")
	rows(0)
	c.exec("BEGIN") // with one lock of the table for all of them
	for i, p := range predicates {
		c.exec(fmt.Sprintf("CREATE STREAM s%d ON t WHEN (%s) WITH (start = 'earliest')", i, p))
	}
	c.exec("COMMIT")
	for _, p := range []string{"t IS NOT NULL", "t IS DISTINCT FROM NULL", "v > 1 AND NOT (t.*) IS NULL"} {
		_, err := c.Exec(c.ctx, "CREATE STREAM whole ON t WHEN ("+p+")")
		wantError(t, err, "0A000", "row as a whole")
	}
	check := func() {
		t.Helper()
		c.fence()
		for i, p := range predicates {
			c.checkFold(fmt.Sprintf("s%d", i), "t", p)
			if lost := c.text("SELECT events_lost FROM koldstore.show_streams() WHERE name = $1", fmt.Sprintf("s%d", i)); lost != "0" {
				t.Errorf("WHEN (%s): %s events lost", p, lost)
			}
		}
	}
	check()
	rows(100)
	c.exec("UPDATE t SET v = coalesce(v, 9) + 1, tags = array_append(tags, 'x'), j = coalesce(j, '{}') || '{\"a\": 1}' WHERE id % 3 = 0; UPDATE t SET id = id + 1000 WHERE id % 7 = 0; DELETE FROM t WHERE id % 5 = 0")
	check()
	// Columns that are renamed are followed.
	c.exec(`ALTER TABLE t RENAME v TO "Wert"; UPDATE t SET "Wert" = 15`) // documents that are older have the older name
	c.fence()
	c.checkFold("s0", "t", `"Wert" > 10`)
	if shown := find(c.rows("SHOW STREAMS"), "s0"); shown[2] != `("Wert" > 10)` {
		t.Errorf("the predicate is shown as %s", shown[2])
	}
	if _, err := c.Exec(c.ctx, `ALTER TABLE t DROP "Wert"`); err == nil {
		t.Error("a column that predicates use was dropped")
	}
	wantError(t, func() error { _, err := c.Exec(c.ctx, `ALTER TABLE t ALTER "Wert" TYPE bigint`); return err }(), "0A000", "")
}

// TestOnlyVisibleChangesAreReported: what was taken back, suppressed or lost against another writer has never been, and each
// of those that became visible is there, in the order of its key.
func TestOnlyVisibleChangesAreReported(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c, other := w.connect(t), w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, v int CHECK (v < 1000)); CREATE STREAM s ON orders WHEN (true)
		; CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN CASE WHEN NEW.v = 13 THEN NULL ELSE NEW END; END'
		; CREATE TRIGGER skip BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION skip()`)
	c.exec("BEGIN; INSERT INTO orders VALUES (1, 1); ROLLBACK")
	c.exec("BEGIN; INSERT INTO orders VALUES (2, 1); SAVEPOINT a; UPDATE orders SET v = 2; ROLLBACK TO a; UPDATE orders SET v = 3; COMMIT")
	c.exec("INSERT INTO orders VALUES (2, 9) ON CONFLICT DO NOTHING")
	c.exec("INSERT INTO orders VALUES (2, 4) ON CONFLICT (id) DO UPDATE SET v = excluded.v")
	c.exec("INSERT INTO orders VALUES (3, 13)") // the trigger says no
	for _, refused := range []string{"INSERT INTO orders VALUES (4, 5000)", "UPDATE orders SET v = 5000", "INSERT INTO orders VALUES (5, 1), (2, 1)"} {
		if _, err := c.Exec(c.ctx, refused); err == nil {
			t.Errorf("%s went through", refused)
		}
	}
	// Of two writers at SERIALIZABLE one loses; the loser's value is in no event.
	c.exec("BEGIN ISOLATION LEVEL SERIALIZABLE")
	c.text("SELECT sum(v) FROM orders")
	other.exec("BEGIN ISOLATION LEVEL SERIALIZABLE; UPDATE orders SET v = 500 WHERE id = 2; COMMIT")
	_, err := c.Exec(c.ctx, "UPDATE orders SET v = 600 WHERE id = 2")
	wantError(t, err, "40001", "")
	c.exec("ROLLBACK")
	c.exec("PREPARE TRANSACTION 'none'; ROLLBACK; DELETE FROM orders WHERE v = -1")
	c.fence()
	if got := c.text("SELECT string_agg(concat_ws(' ', op, k, doc ->> 'v'), ', ' ORDER BY id) FROM _stream_s"); got != "put 2 1, put 2 3, put 2 4, put 2 500" {
		t.Errorf("events: %s", got)
	}
}

// TestAStreamCostsItsMatches: one row for each change that matters, and none for others.
func TestAStreamCostsItsMatches(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int); CREATE STREAM narrow ON orders WHEN (v = 1); CREATE STREAM wide ON orders WHEN (true)")
	c.exec("INSERT INTO orders SELECT i, i FROM generate_series(1, 1000) i; UPDATE orders SET v = v + 10; DELETE FROM orders WHERE id > 500")
	c.fence()
	if got := c.text("SELECT string_agg(op, ' ' ORDER BY id) FROM _stream_narrow"); got != "put exit" {
		t.Errorf("the narrow stream has %s", got)
	}
	if got := c.text("SELECT count(*) FROM _stream_wide"); got != "2500" {
		t.Errorf("the wide stream has %s events of 2500 changes", got)
	}
}

// TestHealingTellsStreamsNothing: comparing a feed with its table brings no old rows into the streams of the table.
func TestHealingTellsStreamsNothing(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int); INSERT INTO orders SELECT i, i FROM generate_series(1, 300) i")
	c.exec("CREATE STREAM s ON orders WHEN (true)")
	c.exec("SELECT koldstore.manage_table('orders')")
	c.exec("UPDATE orders SET v = -v WHERE id = 1")
	c.exec("SELECT koldstore.heal_table('orders')")
	c.fence()
	await(t, "the table to be compared", func() bool {
		return c.text("SELECT count(*) FROM jsonb_array_elements(koldstore.list_jobs(table_name => 'orders')) j WHERE j ->> 'status' NOT IN ('completed')") == "0"
	})
	if got := c.text("SELECT string_agg(op || k, ' ' ORDER BY id) FROM _stream_s"); got != "put1" {
		t.Errorf("events: %s", got)
	}
}

// TestSweepIsOnByDefault: every 900 s.
func TestSweepIsOnByDefault(t *testing.T) {
	t.Parallel()
	printed := program{name: binary, args: []string{"config", "print"}}.mustRun(t).stdout
	if !regexp.MustCompile(`(?m)^ttl_reclaim_interval_secs\s*=\s*900\b`).MatchString(printed) {
		t.Errorf("the sweep's interval is not 900 s by default:\n%s", printed)
	}
}

// TestShowStreams: five columns; consumers and lag are those of the instance that is asked, and at most about a second old.
func TestShowStreams(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric, status text); CREATE STREAM big_orders ON orders WHEN (total > 1000 AND status != 'draft')")
	for _, p := range protocols {
		rows, err := c.Query(c.ctx, "SHOW STREAMS", p.mode)
		must(t, err)
		var columns []string
		for _, f := range rows.FieldDescriptions() {
			columns = append(columns, f.Name)
		}
		rows.Close()
		if p.mode == pgx.QueryExecModeSimpleProtocol && rows.CommandTag().String() != "SHOW" {
			t.Errorf("tag %s", rows.CommandTag())
		}
		if want := []string{"name", "table", "predicate", "consumers", "lag"}; !slices.Equal(columns, want) {
			t.Errorf("%s: columns %v", p.name, columns)
		}
	}
	shown := func() []string { return find(c.rows("SHOW STREAMS"), "big_orders") }
	await(t, "the stream to be live", func() bool { return shown()[4] == "0" })
	if got := shown(); got[1] != "orders" || got[2] != "((total > (1000)::numeric) AND (status <> 'draft'::text))" {
		t.Errorf("shown: %v", got)
	}
	sub := w.inst.subscribe(t, "demo", "demo", w.topic("big_orders"))
	if _, ok := sub.await("Subscribed"); !ok {
		t.Fatal("not subscribed")
	}
	await(t, "the subscriber to be counted", func() bool { return shown()[3] != "0" }) // wildcards of other tests may count, too
	c.exec("INSERT INTO orders VALUES (1, 2000, 'open')")
	if _, payload := sub.message(); !strings.Contains(payload, `"op":"put"`) {
		t.Errorf("pushed %s", payload)
	}
	await(t, "nothing to be behind", func() bool { return shown()[4] == "0" })
}
