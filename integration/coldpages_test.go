package integration_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// TestColdPagesWithinStatements puts koldstore.changes_since, with all of its rows cold, into every kind of statement that
// can hold a function call, also where the text does not show it.
func TestColdPagesWithinStatements(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE m (id int PRIMARY KEY, v int); INSERT INTO m SELECT i, i FROM generate_series(1, 25) i; CREATE TABLE n (id int PRIMARY KEY); INSERT INTO n VALUES (1), (2)")
	c.exec("SELECT koldstore.manage_table('m', max_rows_per_file => 10)")
	c.exec("SELECT koldstore.manage_table('n')")
	c.flush("m")
	c.flush("n")
	feed := func(args string) string { return "koldstore.changes_since('m'" + args + ")" }
	c.exec("CREATE VIEW feed AS SELECT * FROM " + feed(""))
	c.exec(`CREATE VIEW "Feed sum" AS SELECT count(*) AS n FROM feed`)
	c.exec("CREATE FUNCTION feed_max() RETURNS int LANGUAGE sql AS $$ SELECT max((pk ->> 'id')::int) FROM feed $$")
	c.exec("CREATE PROCEDURE feed_into() LANGUAGE plpgsql AS $$ BEGIN CREATE TEMP TABLE into_here ON COMMIT DROP AS SELECT * FROM feed; END $$")
	c.exec("CREATE TABLE traced (n bigint); CREATE FUNCTION trace() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.n := feed_count(); RETURN NEW; END $$")
	c.exec("CREATE FUNCTION feed_count() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT count(*) FROM " + feed("") + "); END $$")

	c.exec("CREATE TRIGGER tr BEFORE INSERT ON traced FOR EACH ROW EXECUTE FUNCTION trace()")

	for _, test := range []struct {
		name, sql, want string
		before, after   string // statements around it in the same transaction
		onlyInBlock     bool
	}{
		{name: "the function", sql: "SELECT count(*), max(pk ->> 'id') FROM " + feed(""), want: "25,9"},
		{name: "a page", sql: "SELECT string_agg(pk ->> 'id', ' ') FROM " + feed(", limit_rows => 12"), want: "1 2 3 4 5 6 7 8 9 10 11 12"},
		{name: "the newest rows", sql: "SELECT string_agg(pk ->> 'id', ' ') FROM " + feed(", last_rows => 3"), want: "23 24 25"},
		{name: "in the select list", sql: "SELECT count(f) FROM (SELECT koldstore.changes_since('m') f) x", want: "25"},
		{name: "a sub-select", sql: "SELECT (SELECT count(*) FROM " + feed("") + ") + 1", want: "26"},
		{name: "a common table expression", sql: "WITH f AS (SELECT * FROM " + feed("") + ") SELECT count(*) FROM f a JOIN f b USING (seq)", want: "25"},
		{name: "two feeds", sql: "SELECT count(*) FROM " + feed("") + " a, koldstore.changes_since('n') b", want: "50"},
		{name: "two pages of one feed", sql: "SELECT (SELECT count(*) FROM " + feed(", limit_rows => 3") + "), (SELECT count(*) FROM " + feed(", last_rows => 4") + ")", want: "3,4"},
		{name: "lateral, a page behind each row of another", sql: "SELECT count(*) FROM (SELECT seq FROM " + feed(", limit_rows => 3") + ") a, LATERAL koldstore.changes_since('m', since_seq => a.seq) b", want: "69"},
		{name: "a union", sql: "SELECT count(*) FROM (SELECT seq FROM " + feed("") + " UNION SELECT seq FROM " + feed("") + ") x", want: "25"},
		{name: "several statements in one message", sql: "SELECT 1; SELECT count(*) FROM " + feed("") + "; SELECT 2", want: "1;25;2"},
		{name: "with AFTER", sql: "SELECT count(*) FROM (SELECT seq FROM " + feed("") + " ORDER BY seq LIMIT 5 AFTER (0)) x", want: "5"},
		{name: "INSERT … SELECT", sql: "INSERT INTO copied SELECT seq FROM " + feed("") + " RETURNING 1", before: "CREATE TEMP TABLE copied (seq bigint)", after: "SELECT count(*) FROM copied", want: strings.Repeat("1;", 24) + "1;25", onlyInBlock: true},
		{name: "CREATE TABLE AS", sql: "CREATE TEMP TABLE made AS SELECT seq FROM " + feed(""), after: "SELECT count(*) FROM made", want: "25", onlyInBlock: true},
		{name: "a view", sql: "SELECT count(*) FROM feed", want: "25"},
		{name: "a view of a view", sql: "SELECT sum(n) FROM \"Feed sum\"", want: "25"},
		{name: "a PL/pgSQL function that calls it", sql: "SELECT feed_count()", want: "25"},
		{name: "an SQL function", sql: "SELECT feed_max(), feed_count()", want: "25,25"},
		{name: "a procedure", sql: "CALL feed_into()", after: "SELECT count(*) FROM pg_temp.into_here", want: "25", onlyInBlock: true},
		{name: "a trigger", sql: "INSERT INTO traced VALUES (1) RETURNING n", want: "25", before: "TRUNCATE traced"},
		{
			name: "a function that is younger than the catalog's answer", sql: "SELECT young()", want: "25",
			before: "CREATE OR REPLACE FUNCTION young() RETURNS bigint LANGUAGE sql AS $f$ SELECT count(*) FROM feed $f$", onlyInBlock: true,
		},
		{name: "a DO block", sql: "DO $$ BEGIN PERFORM feed_count(); END $$", want: ""},
		{name: "a DO block that calls it itself", sql: "DO $$ BEGIN IF (SELECT count(*) FROM " + feed("") + ") <> 25 THEN RAISE 'short'; END IF; END $$", want: ""},
		{
			name: "a default that calls a function just made", sql: "INSERT INTO pg_temp.defaulted (i) VALUES (1) RETURNING n", want: "25", onlyInBlock: true, after: "DROP TABLE pg_temp.defaulted; DROP FUNCTION made()",
			before: "CREATE FUNCTION made() RETURNS bigint LANGUAGE sql AS $f$ SELECT count(*) FROM " + feed("") + " $f$; CREATE TEMP TABLE defaulted (i int, n bigint DEFAULT made())",
		},
		{
			name: "a view that was renamed just now", sql: "SELECT count(*) FROM renamed", want: "25", onlyInBlock: true, after: "DROP VIEW renamed",
			before: "CREATE VIEW named AS SELECT * FROM feed; ALTER VIEW named RENAME TO renamed",
		},
		{name: "EXECUTE of a prepared statement", sql: "EXECUTE f(12)", before: "PREPARE f(int) AS SELECT count(*) FROM koldstore.changes_since(since_seq => 0, table_name => 'm', limit_rows => $1)", after: "DEALLOCATE f", want: "12", onlyInBlock: true},
		{name: "FETCH from a cursor", sql: "FETCH ALL FROM f", before: "DECLARE f CURSOR FOR SELECT count(*) FROM " + feed(""), want: "25", onlyInBlock: true},
		{name: "FETCH from a cursor over a view", sql: "FETCH 1 FROM f; FETCH ALL FROM f", before: "DECLARE f SCROLL CURSOR WITH HOLD FOR SELECT n FROM \"Feed sum\" UNION ALL SELECT count(*) FROM feed", want: "25;25", after: "CLOSE f", onlyInBlock: true},
		{name: "arguments that are expressions", sql: "SELECT count(*) FROM koldstore.changes_since('m', (SELECT 0), limit_rows => 5 + length('abc'))", want: "8"},
		{name: "transaction control in the text", sql: "BEGIN; SELECT count(*) FROM feed; COMMIT", want: "25"},
	} {
		for _, block := range []bool{false, true} {
			if test.onlyInBlock && !block {
				continue
			}
			name := test.name
			if block {
				name += ", in a transaction"
			}
			t.Run(name, func(t *testing.T) {
				c := w.connect(t)
				if block {
					c.exec("BEGIN")
				}
				if test.before != "" {
					c.exec(test.before)
				}
				got, err := c.simple(test.sql)
				if err != nil {
					t.Fatal(describe(err))
				}
				if test.after != "" {
					more, err := c.simple(test.after)
					must(t, err)
					got = append(got, more...)
				}
				if joined := strings.Join(got, ";"); joined != test.want {
					t.Errorf("%s gives %q, want %q", test.sql, joined, test.want)
				}
				if block {
					c.exec("COMMIT")
				}
				if got := c.text("SELECT coalesce(current_setting('koldstore.staged', true), '')"); got != "" {
					t.Errorf("a page of %d bytes is staged after the transaction", len(got))
				}
			})
		}
	}
}

// simple sends a text as one message and returns its rows, columns joined by commas.
func (c *client) simple(sql string) ([]string, error) {
	results, err := c.PgConn().Exec(c.ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	var list []string
	for _, r := range results {
		for _, row := range textRows(r.Rows) {
			list = append(list, strings.Join(row, ","))
		}
	}
	return list, nil
}

// TestCopyOfAColdFeed reads a feed with COPY, by which the answer is no rows but a stream of data.
func TestCopyOfAColdFeed(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE m (id int PRIMARY KEY, v text)")
	c.exec("INSERT INTO m SELECT i, repeat('x', 1000) FROM generate_series(1, 3000) i")
	c.exec("SELECT koldstore.manage_table('m')")
	c.flush("m")
	var out strings.Builder
	_, err := c.PgConn().CopyTo(c.ctx, &out, "COPY (SELECT pk ->> 'id' FROM koldstore.changes_since('m', limit_rows => 100000)) TO STDOUT")
	must(t, err)
	var want []string
	for i := range 3000 {
		want = append(want, fmt.Sprint(i+1))
	}
	if got := strings.Fields(out.String()); !slices.Equal(got, want) {
		t.Errorf("%d lines: %s", len(got), firstDifference(got, want))
	}
}

// TestColdRowsAreForThoseWhoMayRead lets a role that may not read a table try to see its cold rows in the session of one who
// may: with functions that run with the role's rights, with demands it forges, and after SET ROLE in one text.
func TestColdRowsAreForThoseWhoMayRead(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE secret (id int PRIMARY KEY, v text); INSERT INTO secret VALUES (1, 'classified')")
	c.exec("SELECT koldstore.manage_table('secret')")
	c.flush("secret")
	su := w.connectAs(t, "postgres")
	su.exec("CREATE ROLE spy; CREATE SCHEMA spying AUTHORIZATION spy; GRANT USAGE ON SCHEMA spying TO PUBLIC; GRANT USAGE ON SCHEMA " + w.schema + " TO spy")
	t.Cleanup(func() { su.exec("RESET ROLE; DROP OWNED BY spy CASCADE; DROP ROLE spy") })
	su.exec("SET ROLE spy")
	su.exec(`CREATE FUNCTION spying.look() RETURNS text LANGUAGE sql SECURITY DEFINER AS $$
			SELECT coalesce(current_setting('koldstore.staged', true), '') || coalesce(koldstore.staged('{"kind": "cold_page"}')::text, '') || (SELECT count(*) FROM koldstore.stage_key) $$;
		CREATE FUNCTION spying.forge(demand text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
			IF coalesce(current_setting('koldstore.staged', true), '') = '' THEN
				RAISE EXCEPTION 'changes_since' USING ERRCODE = 'KS003', DETAIL = demand;
			END IF;
			RETURN spying.look();
		END $$;
		CREATE FUNCTION spying.ask() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT count(*) FROM koldstore.changes_since('` + w.table("secret") + `') $$`)
	su.exec("RESET ROLE")
	_, err := c.simple("SELECT * FROM koldstore.changes_since('secret', limit_rows => 9), pg_sleep(0)")
	must(t, err)
	var pg *pgconn.PgError
	direct := w.connectDirect(t, "demo")
	_, err = direct.simple("SELECT * FROM koldstore.changes_since('secret')")
	if !errors.As(err, &pg) || pg.Code != "KS003" {
		t.Fatal("no demand", err)
	}
	demand := pg.Detail
	for _, test := range []struct{ name, sql string }{
		{"a function beside the feed", "SELECT f.source, spying.look() FROM koldstore.changes_since('secret') f"},
		{"a forged demand", "SELECT 'changes_since', spying.forge('" + demand + "')"},
		{"SET ROLE in the text", "SET ROLE spy; SELECT 'changes_since', spying.forge('" + demand + "'); RESET ROLE"},
	} {
		for _, session := range []*client{c, su} {
			rows, err := session.simple(test.sql)
			if strings.Contains(strings.Join(rows, " "), "classified") || err == nil && len(rows) == 0 {
				t.Errorf("%s: %v", test.name, rows)
			}
			session.exec("RESET ROLE")
		}
	}
	for _, session := range []*client{c, su} { // the owner of the function may not read
		if _, err := session.simple("SELECT spying.ask()"); !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("asked as the spy: %v", err)
		}
	}
}

// TestColdRowsOfAnotherTable lets a role that may read one table demand the cold rows of another one in words that two readers could
// understand in two ways, and has a function hide rows from those who may read it, by demanding a page of a part of its segments.
func TestColdRowsOfAnotherTable(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE pub (id int PRIMARY KEY); CREATE TABLE secret (id int PRIMARY KEY, v text)")
	c.exec("SELECT koldstore.manage_table('pub'), koldstore.manage_table('secret', max_rows_per_file => 10)")
	c.exec("INSERT INTO pub VALUES (1); INSERT INTO secret SELECT i, 'classified' FROM generate_series(1, 30) i")
	c.flush("pub")
	c.flush("secret")
	su := w.connectAs(t, "postgres")
	reader := w.newRole(t, "reader", "")
	c.exec("GRANT SELECT ON pub TO " + reader + "; GRANT USAGE, CREATE ON SCHEMA " + w.schema + " TO " + reader)
	t.Cleanup(func() { su.exec("DROP OWNED BY " + reader) })
	m := w.connectAs(t, reader)
	m.exec(`CREATE FUNCTION raised(detail text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
			IF coalesce(current_setting('koldstore.staged', true), '') = '' THEN
				RAISE EXCEPTION 'changes_since' USING ERRCODE = 'KS003', DETAIL = detail;
			END IF;
			RETURN 'staged';
		END $$`)
	segments := su.text("SELECT string_agg(format('\"%s\"', segment_id), ',' ORDER BY min_seq) FROM koldstore.segment WHERE state = 'active' AND table_oid = $1::regclass", w.table("secret"))
	last := segments[strings.LastIndexByte(segments, ',')+1:]
	number := func(table string) string { return su.text("SELECT $1::regclass::oid", w.table(table)) }
	demand := func(tables string) string {
		return fmt.Sprintf(`{"kind":"cold_page",%s,"generation":%s,"segments":[%s],"mode":"forward","after":0,"limit":1000000}`, tables,
			su.text("SELECT generation FROM koldstore.managed_table WHERE table_oid = $1::regclass", w.table("secret")), last)
	}
	for _, tables := range []string{
		`"table":` + number("pub") + `,"Table":` + number("secret"), `"Table":` + number("secret") + `,"table":` + number("pub"), `"table":` + number("pub") + `,"table":` + number("secret"),
		`"table":` + number("secret"),
	} {
		_, err := m.simple("SELECT 'changes_since', raised('" + demand(tables) + "')")
		wantError(t, err, "KS003", "")
	}
	rows, err := c.simple("WITH x AS MATERIALIZED (SELECT raised('" + demand(`"table":`+number("secret")) + "')) SELECT count(*) FROM x, LATERAL koldstore.changes_since('secret', 0 * length(x.raised))")
	must(t, err)
	if got := strings.Join(rows, ";"); got != "30" {
		t.Errorf("with a page of the last segment beside it the feed has %s rows", got)
	}
}
