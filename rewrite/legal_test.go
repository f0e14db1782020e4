package rewrite

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// legal are texts in which koldproxy's words mean something to PostgreSQL, or stand in literals, comments and bodies.
// They run against the schema of legalSchema.
var legal = []string{
	"SELECT 5 AFTER LIMIT after('1')",
	"SELECT 500 AFTER",
	"SELECT 500 after, 1 AS limit LIMIT 1",
	"SELECT * FROM (SELECT 1 LIMIT 500) after (x)",
	"SELECT * FROM generate_series(1,2) AFTER (x) LIMIT 1",
	"SELECT 1 LIMIT (1) - after('1')",
	"SELECT 1 LIMIT 2 OPERATOR(pg_catalog.-) after('1')",
	"SELECT 1 LIMIT CASE WHEN after('1') = 1 THEN after('1') ELSE after ('2') END",
	"SELECT 1 LIMIT NOT_NULL.v OFFSET after('1')",
	"WITH after (x) AS (SELECT 1) SELECT * FROM after",
	"INSERT INTO after (stream) VALUES ('x')",
	"ALTER TYPE mood ADD VALUE 'c' AFTER 'a'",
	"CREATE TRIGGER tr AFTER INSERT ON stream EXECUTE FUNCTION tg()",
	"SELECT stream.stream, streams FROM stream, (SELECT 1 AS streams) s",
	"CREATE TABLE topic (after int, koldstore int)",
	"SELECT count(*) FILTER (WHERE true) OVER after FROM stream WINDOW after AS (ORDER BY stream)",
	"CREATE FUNCTION body() RETURNS SETOF text LANGUAGE sql BEGIN ATOMIC SELECT 'SHOW STREAMS'; SELECT stream FROM after; END",
	"CREATE RULE ru AS ON INSERT TO stream DO ALSO (SELECT 1; INSERT INTO after VALUES ('DROP STREAM x'))",
	"DO $a$ BEGIN PERFORM $b$ CREATE STREAM s ON t $b$; END $a$",
	"SELECT $$;$$, $a$ CREATE STREAM $b$ x $a$",
	"SELECT 1 a$$b",
	`SELECT 'SHOW STREAMS; DROP STREAM x' AS "CREATE STREAM s", U&'d\0061t', U&'!0061' UESCAPE '!'`,
	"SELECT /*/ ' DROP STREAM x; */ 1",
	"SELECT 1 /* a /* b */ ; DROP STREAM x; */",
	"SELECT 1; -- DROP STREAM s\n",
	"SELECT E'a\\'; DROP STREAM x; --'",
	"SELECT 'a'\n 'b';\n DROP TABLE IF EXISTS streams",
	"SELECT*FROM after; SELECT/**/stream/**/FROM/**/after",
	"PREPARE showing AS SELECT stream FROM after; EXECUTE showing",
	"SELECT 'äöü😀 AFTER (1)' LIMIT 1",
}

const legalSchema = `
	CREATE TABLE after (stream text);
	CREATE TABLE stream (stream text);
	CREATE TYPE mood AS ENUM ('a');
	CREATE FUNCTION after(text) RETURNS int LANGUAGE sql AS 'SELECT $1::int';
	CREATE FUNCTION tg() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';`

func TestLegalTextsStayAndRun(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, legalSchema)
	for _, sql := range legal {
		r := Rewrite(sql, conforming)
		if r.Changed || r.SQL != sql || r.Refusal != nil {
			t.Errorf("%s: became %s (refusal %v)", sql, r.SQL, r.Refusal)
		}
		if strings.Contains(sql, "NOT_NULL") {
			continue // for the grammar only: LIMIT has no columns
		}
		exec(t, conn, sql)
	}
}

// TestForwarded has texts that PostgreSQL refuses, or judges otherwise than they look.
func TestForwarded(t *testing.T) {
	t.Parallel()
	old := Options{ClientEncoding: "UTF8"}
	for _, c := range []struct {
		name, sql string
		opts      Options
	}{
		{"not this statement", "CREATE OR REPLACE STREAM s ON t", conforming},
		{"setting", "SHOW streams.x", conforming},
		{"quoted setting", `SHOW "streams"`, conforming},
		{"two settings", "SHOW STREAMS x", conforming},
		{"explained show", "EXPLAIN SHOW STREAMS", conforming},
		{"explained create", "EXPLAIN CREATE STREAM s ON t WHEN (a)", conforming},
		{"prepared create", "PREPARE p AS CREATE STREAM s ON t WHEN (a)", conforming},
		{"quoted keyword", `CREATE "stream" s ON t WHEN (a)`, conforming},
		{"unterminated comment", "/* SHOW STREAMS", conforming},
		{"unterminated literal", "SELECT '; SHOW STREAMS", conforming},
		{"junk number", "SHOW STREAMS; SELECT 30d", conforming},
		{"NUL", "SHOW STREAMS;\x00", conforming},
		{"broken UTF-8", "SHOW STREAMS; SELECT '\xc3'", conforming},
		{"too long", "SHOW STREAMS; SELECT '" + strings.Repeat("x", MaxTextBytes) + "'", conforming},
		{"backslash in a plain literal", `SELECT 'a\'; SHOW STREAMS; --'`, old},
		{"backslash in a moved value", `SELECT id FROM t ORDER BY id LIMIT 1 AFTER ('\')`, old},
		{"BIG5", "SELECT '\xa5\x5c; SHOW STREAMS", Options{ConformingStrings: true, ClientEncoding: "BIG5"}},
		{"SJIS", "SHOW STREAMS", Options{ConformingStrings: true, ClientEncoding: "SJIS"}},
		{"unknown encoding", "SHOW STREAMS", Options{ConformingStrings: true, ClientEncoding: "EBCDIC"}},
		{"function body", "CREATE FUNCTION f() RETURNS int RETURN (SELECT id FROM t ORDER BY id LIMIT 1 AFTER ('x'))", conforming},
		{"atomic body", "CREATE PROCEDURE f() BEGIN ATOMIC SELECT id FROM t ORDER BY id LIMIT 1 AFTER ('x'); SHOW STREAMS; END", conforming},
		{"rule", "CREATE RULE r AS ON INSERT TO t DO (SELECT id FROM t ORDER BY id LIMIT 1 AFTER ('x'); SHOW STREAMS)", conforming},
		{"limit and offset in front", "SELECT id FROM t ORDER BY id LIMIT 5 OFFSET 1 AFTER ('x')", conforming},
		{"with ties", "SELECT id FROM t ORDER BY id FETCH FIRST 5 ROWS WITH TIES AFTER ('x')", conforming},
		{"no parenthesis", "SELECT id FROM t ORDER BY id LIMIT 5 AFTER 'x'", conforming},
		{"unbalanced", "SELECT id FROM t) ORDER BY id LIMIT 5 AFTER ('x')", conforming},
		{"unclosed values", "SELECT id FROM t ORDER BY id LIMIT 5 AFTER ('x'", conforming},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if r := Rewrite(c.sql, c.opts); r.Changed || r.SQL != c.sql || r.Refusal != nil || len(r.Statements) > 0 {
				t.Errorf("became %s (refusal %v)", r.SQL, r.Refusal)
			}
		})
	}
}

// TestConformingStrings shows what the option decides: with it the literal ends at its second quote.
func TestConformingStrings(t *testing.T) {
	t.Parallel()
	const text = `SELECT 'a\'; SHOW STREAMS; --'`
	if r := Rewrite(text, conforming); !r.Changed {
		t.Error("the second statement was not found")
	}
	// Without a backslash in a plain literal the option does not matter.
	if r := Rewrite(`SHOW STREAMS; SELECT E'\'', 1 AS "\"`, Options{}); !r.Changed {
		t.Error("a text that reads the same under both settings was not rewritten")
	}
}

// TestEncodingUnsure has a text of two statements whose second one is a literal if the text is GBK.
func TestEncodingUnsure(t *testing.T) {
	t.Parallel()
	const text = "SELECT E'\u3042\\', '; SHOW STREAMS; --'"
	if r := Rewrite(text, Options{ConformingStrings: true}); !r.Changed {
		t.Error("the second statement was not found")
	}
	if r := Rewrite(text, Options{ConformingStrings: true, EncodingUnsure: true}); r.Changed {
		t.Errorf("%s", r.SQL)
	}
	if r := Rewrite("SELECT '\u3042', E'a\\''; SHOW STREAMS", Options{ConformingStrings: true, EncodingUnsure: true}); !r.Changed {
		t.Error("a text that reads the same in every encoding was not rewritten")
	}
}

// TestRefusedTextsAreSyntaxErrors checks that PostgreSQL refuses what the rewriter refuses, so that sending it unchanged
// is safe, and at the place that RefusalAt names.
func TestRefusedTextsAreSyntaxErrors(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	for _, c := range refusals {
		in := strings.Replace(c.in, "^", "", 1)
		r := Rewrite(in, conforming)
		_, err := conn.PgConn().Exec(context.Background(), r.SQL).ReadAll()
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) {
			t.Errorf("%s: PostgreSQL accepts it", in)
			continue
		}
		if at := r.RefusalAt; pgErr.Code != "42601" || int(pgErr.Position) != at {
			t.Errorf("%s: PostgreSQL says %s at %d, RefusalAt is %d", in, pgErr.Code, pgErr.Position, at)
		}
	}
}

func TestRefusalBehindAnotherError(t *testing.T) {
	t.Parallel()
	r := Rewrite("SELEC 1; DROP STREAM", conforming)
	if r.Refusal == nil || r.RefusalAt != len("SELEC 1; DROP ")+1 {
		t.Errorf("%v at %d", r.Refusal, r.RefusalAt)
	}
}

func TestMayDemand(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		"SELECT * FROM koldstore.changes_since('t')", "select * from KoldStore.Changes_Since('t')", `SELECT * FROM "koldstore"."changes_since"('t')`,
		"SELECT * FROM koldstore /*x*/ . changes_since ('t')", `SELECT * FROM U&"kold\0073tore".changes_since('t')`, `SELECT U&"koldstore".U&"changes!005fsince" UESCAPE '!' ('t')`,
		"SELECT changes_since('t')", "SELECT flush_table ('t')", "SELECT 1; SELECT koldstore.flush_table('t', wait => true)", "DECLARE c CURSOR FOR SELECT * FROM koldstore.changes_since('t')",
		"SHOW STREAMS; SELECT changes_since('t')", "DO $$ BEGIN PERFORM koldstore.changes_since('t'); END $$", "SELECT 1; do language plpgsql 'BEGIN PERFORM flush_table(1); END'",
		"CREATE OR REPLACE FUNCTION f() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM koldstore.changes_since(1)'",
	} {
		if !Rewrite(sql, conforming).MayDemand {
			t.Errorf("%s: no demand expected", sql)
		}
	}
	for _, sql := range []string{
		"SELECT 'koldstore.changes_since'", `SELECT * FROM "KoldStore"."Changes_Since"('t')`, "SELECT changes_since FROM t", "SELECT 1 -- koldstore.changes_since('t')", "SELECT $$changes_since('t')$$",
		"DO $$ BEGIN END $$; SELECT 'changes_since'", "CREATE VIEW v AS SELECT 'changes_since'",
	} {
		if Rewrite(sql, conforming).MayDemand {
			t.Errorf("%s: a demand expected", sql)
		}
	}
	// What cannot be scanned counts if it holds the word.
	if !Rewrite("SELECT Changes_Since('\x95\x5c')", Options{ClientEncoding: "SJIS"}).MayDemand {
		t.Error("SJIS: no demand expected")
	}
	if !Rewrite(`SELECT changes_since('\')`, Options{}).MayDemand {
		t.Error("backslash: no demand expected")
	}
}

// TestBannersAreRead makes sure that the guard against hostile texts takes no ordinary one for them.
func TestBannersAreRead(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		strings.Repeat("/"+strings.Repeat("*", 200)+"/\n", 1000) + "SHOW STREAMS",
		strings.Repeat(strings.Repeat("-", 500)+"\n", 1000) + "SHOW STREAMS",
		"SELECT '" + strings.Repeat("+"+strings.Repeat("-", 78)+"+\n", 1000) + "'; SHOW STREAMS",
	} {
		mustRewrite(t, in)
	}
}
