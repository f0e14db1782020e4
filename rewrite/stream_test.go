package rewrite

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestReplacedStatements fixes what each statement of the grammar becomes.
func TestReplacedStatements(t *testing.T) {
	t.Parallel()
	call := func(streamSchema, stream, tableSchema, table, predicate, ifNotExists, options string) string {
		return "CALL koldstore.create_stream(stream_schema => " + streamSchema + ", stream_name => $ks$" + stream + "$ks$, table_schema => " +
			tableSchema + ", table_name => $ks$" + table + "$ks$, predicate => $ks$" + predicate + "$ks$, if_not_exists => " + ifNotExists +
			", options => $ks$" + options + "$ks$)"
	}
	drop := func(schema, stream, ifExists string) string {
		return "CALL koldstore.drop_stream(stream_schema => " + schema + ", stream_name => $ks$" + stream + "$ks$, if_exists => " + ifExists + ")"
	}
	const show = `SELECT name, "table", predicate, consumers, lag FROM koldstore.show_streams($ks${}$ks$)`
	for _, c := range []struct{ name, in, want string }{
		{"plain", "CREATE STREAM s ON t WHEN (a > 1)", call("NULL", "s", "NULL", "t", "a > 1", "false", "{}")},
		{"schemas", "create stream A.S on B.T when (true)", call("$ks$a$ks$", "s", "$ks$b$ks$", "t", "true", "false", "{}")},
		{"if not exists", "CREATE STREAM IF NOT EXISTS s ON t WHEN (a)", call("NULL", "s", "NULL", "t", "a", "true", "{}")},
		{"keywords as names", "CREATE STREAM if ON value WHEN (a)", call("NULL", "if", "NULL", "value", "a", "false", "{}")},
		{"quoted names", `CREATE STREAM "S.é" ON "T ""q" WHEN ("A b")`, call("NULL", "S.é", "NULL", `T "q`, `"A b"`, "false", "{}")},
		{"escaped name", `CREATE STREAM U&"d\0061t\+01F600" ON U&"x!0061" UESCAPE '!' WHEN (a)`, call("NULL", "dat😀", "NULL", "xa", "a", "false", "{}")},
		{"long name", "CREATE STREAM " + strings.Repeat("x", 70) + " ON t WHEN (a)", call("NULL", strings.Repeat("x", 70), "NULL", "t", "a", "false", "{}")},
		{"predicate as typed", "CREATE STREAM s ON t WHEN (  (a)\n /* ) */ -- )\n AND b = ')' AND c = $$($$ )", call("NULL", "s", "NULL", "t", "(a)\n /* ) */ -- )\n AND b = ')' AND c = $$($$", "false", "{}")},
		{
			"options", "CREATE STREAM s ON t WHEN (a) WITH (start = 'now', PRE_IMAGE = true, retention = '24h')",
			call("NULL", "s", "NULL", "t", "a", "false", `{"start":"now","pre_image":true,"retention":"24h"}`),
		},
		{"retention without quotes", "CREATE STREAM s ON t WHEN (a) WITH (retention=30d)", call("NULL", "s", "NULL", "t", "a", "false", `{"retention":"30d"}`)},
		{"retention in words", "CREATE STREAM s ON t WHEN (a) WITH (Retention\n=\t1h30m , start = earliest)", call("NULL", "s", "NULL", "t", "a", "false", `{"retention":"1h30m","start":"earliest"}`)},
		{
			"values", `CREATE STREAM s ON t WHEN (a) WITH (a = 1, b = -2.5, c = .5, d = 'it''s "x" \', e = E'x', f = $q$y$q$, g = "Q q", h = on, i = FALSE, j = +7, "K" = 007)`,
			call("NULL", "s", "NULL", "t", "a", "false", `{"a":1,"b":-2.5,"c":".5","d":"it's \"x\" \\","e":"x","f":"y","g":"Q q","h":"on","i":false,"j":7,"K":"007"}`),
		},
		{"drop", "DROP STREAM s", drop("NULL", "s", "false")},
		{"drop if exists", `drop/**/stream if exists "S" . "T"`, drop("$ks$S$ks$", "T", "true")},
		{"show", "SHOW STREAMS", show},
		{"comments around", "/*app='x',line:3*/ SHOW STREAMS -- c", "/*app='x',line:3*/ " + show + " -- c"},
		{"line comment ends at CR", "-- c\rSHOW STREAMS", "-- c\r" + show},
		{"blanks", "\t\r\f\nSHOW\tSTREAMS\n", "\t\r\f\n" + show + "\n"},
		{"empty statements", ";;SHOW STREAMS;", ";;" + show + ";"},
		{"among others", "SELECT 1; DROP STREAM s; BEGIN", "SELECT 1; " + drop("NULL", "s", "false") + "; BEGIN"},
		{"after a function", "CREATE FUNCTION f() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 1 AS end; END; SHOW STREAMS", "CREATE FUNCTION f() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 1 AS end; END; " + show},
		{"after a rule", "CREATE RULE r AS ON INSERT TO t DO (SELECT 1; SELECT 2); SHOW STREAMS", "CREATE RULE r AS ON INSERT TO t DO (SELECT 1; SELECT 2); " + show},
		{"after dollar quotes", "DO $a$ SHOW STREAMS; $b$ x $a$; SHOW STREAMS", "DO $a$ SHOW STREAMS; $b$ x $a$; " + show},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := Rewrite(c.in, conforming)
			if r.Refusal != nil {
				t.Fatalf("refused: %v at %d", r.Refusal, r.Refusal.Position)
			}
			if r.SQL != c.want || !r.Changed {
				t.Errorf("got  %s\nwant %s", r.SQL, c.want)
			}
		})
	}
}

func TestDollarTagsAvoidTheText(t *testing.T) {
	t.Parallel()
	in := `CREATE STREAM s ON t WHEN (a = '$ks$' AND b = $ks1$x$ks1$ AND c = '$ks')`
	r := Rewrite(in, conforming)
	if !strings.Contains(r.SQL, `predicate => $ks2$a = '$ks$' AND b = $ks1$x$ks1$ AND c = '$ks'$ks2$`) {
		t.Error(r.SQL)
	}
	// A decoded name may hold what the text does not.
	r = Rewrite(`DROP STREAM U&"\0024ks$"`, conforming)
	if !strings.Contains(r.SQL, `stream_name => $ks1$$ks$$ks1$`) {
		t.Error(r.SQL)
	}
}

func TestOptionsOfCreateStreamAreJSON(t *testing.T) {
	t.Parallel()
	r := Rewrite("CREATE STREAM s ON t WHEN (a) WITH (x = 'tab\tquote\"back\\slash\nline', y = 1e5, z = 0x1F, w = now)", conforming)
	_, options, _ := strings.Cut(r.SQL, "options => $ks$")
	options, _, _ = strings.Cut(options, "$ks$")
	var got map[string]any
	if err := json.Unmarshal([]byte(options), &got); err != nil {
		t.Fatalf("%s: %v", options, err)
	}
	if got["x"] != "tab\tquote\"back\\slash\nline" || got["y"] != 1e5 || got["z"] != "0x1F" || got["w"] != "now" {
		t.Errorf("%v", got)
	}
}

func TestShowStreamsCarriesStats(t *testing.T) {
	t.Parallel()
	r := Rewrite("SHOW STREAMS", Options{StreamStats: json.RawMessage(`{"public.é😀$ks$":{"consumers":1}}`), ConformingStrings: true})
	if !strings.HasSuffix(r.SQL, `show_streams($ks1${"public.\u00e9\ud83d\ude00$ks$":{"consumers":1}}$ks1$)`) {
		t.Error(r.SQL)
	}
}

func TestStatementsAreNumbered(t *testing.T) {
	t.Parallel()
	in := "SELECT 1;; /* c */; CREATE STREAM é ON t WHEN ( a); SELECT 2; SHOW STREAMS; SELECT id FROM t ORDER BY id LIMIT 1 AFTER (2); DROP STREAM s"
	r := Rewrite(in, conforming)
	want := []Statement{
		{Ordinal: 1, Tag: "CREATE STREAM", Predicate: strings.Index(in, "a);")}, // é has two bytes
		{Ordinal: 3, Tag: "SHOW"}, {Ordinal: 4}, {Ordinal: 5, Tag: "DROP STREAM"},
	}
	if len(r.Statements) != len(want) {
		t.Fatalf("%+v", r.Statements)
	}
	for i, s := range r.Statements {
		if s != want[i] {
			t.Errorf("statement %d: got %+v, want %+v", i, s, want[i])
		}
	}
}

// refusals are texts that are koldproxy's but wrong. A ^ stands in front of the character that the error points at.
var refusals = []struct{ name, in, code, message string }{
	{"no WHEN", "CREATE STREAM s ON t^", "42601", "WHEN is required in CREATE STREAM"},
	{"no WHEN, more text", "SELECT 'äö'; CREATE STREAM s ON t^ ; SELECT 1", "42601", "WHEN is required in CREATE STREAM"},
	{"no WHEN, options", "CREATE STREAM s ON t^ WITH (start = 'now')", "42601", "WHEN is required in CREATE STREAM"},
	{"nothing", "CREATE STREAM^", "42601", "syntax error at end of input"},
	{"no name", "CREATE STREAM ^ON t WHEN (a)", "42601", `syntax error at or near "ON"`},
	{"no ON", "CREATE STREAM s ^WHEN (a)", "42601", `syntax error at or near "WHEN"`},
	{"no table", "CREATE STREAM s ON ^WHEN (a)", "42601", `syntax error at or near "WHEN"`},
	{"other word", "CREATE STREAM s ON t ^WHERE (a)", "42601", `syntax error at or near "WHERE"`},
	{"empty WHEN", "CREATE STREAM s ON t WHEN (^)", "42601", `syntax error at or near ")"`},
	{"no parentheses", "CREATE STREAM s ON t WHEN ^a > 1", "42601", `syntax error at or near "a"`},
	{"open parenthesis", "CREATE STREAM s ON t WHEN (a > (1)^", "42601", "syntax error at end of input"},
	{"open parenthesis, more text", "CREATE STREAM s ON t WHEN (a^; SELECT 1", "42601", `syntax error at or near ";"`},
	{"trailing word", "CREATE STREAM s ON t WHEN (a) ^foo", "42601", `syntax error at or near "foo"`},
	{"trailing literal", "CREATE STREAM s ON t WHEN (a) WITH (b = 1) ^'x'", "42601", `syntax error at or near "'x'"`},
	{"three names", "CREATE STREAM a.b^.c ON t WHEN (a)", "42601", "improper qualified name (too many dotted names)"},
	{"dangling dot", "CREATE STREAM a. ^'x' ON t WHEN (a)", "42601", `syntax error at or near "'x'"`},
	{"bad escape", `CREATE STREAM ^U&"\00zz" ON t WHEN (a)`, "42601", "invalid Unicode escape"},
	{"parameter", "CREATE STREAM s ON t WHEN (a > ^$1)", "42P02", "there is no parameter $1"},
	{"parameter in options", "CREATE STREAM s ON t WHEN (a) WITH (start = ^$2)", "42P02", "there is no parameter $2"},
	{"no options", "CREATE STREAM s ON t WHEN (a) WITH (^)", "42601", `syntax error at or near ")"`},
	{"no value", "CREATE STREAM s ON t WHEN (a) WITH (start ^)", "42601", `syntax error at or near ")"`},
	{"empty value", "CREATE STREAM s ON t WHEN (a) WITH (start = ^, b = 1)", "42601", `syntax error at or near ","`},
	{"open options", "CREATE STREAM s ON t WHEN (a) WITH (start = 1^", "42601", "syntax error at end of input"},
	{"option twice", "CREATE STREAM s ON t WHEN (a) WITH (start = 'now', ^START = 'now')", "42601", "conflicting or redundant options"},
	{"escapes in a value", `CREATE STREAM s ON t WHEN (a) WITH (start = ^E'n\x6fw')`, "0A000", "string literals with escapes are not supported in the statements of koldproxy"},
	{"drop nothing", "DROP STREAM ^; SELECT 1", "42601", `syntax error at or near ";"`},
	{"drop two", "DROP STREAM a^, b", "42601", `syntax error at or near ","`},
	{"drop cascade", "DROP STREAM a ^CASCADE", "42601", `syntax error at or near "CASCADE"`},
	{"after a good one", "CREATE STREAM s ON t WHEN (a); DROP STREAM ^", "42601", "syntax error at end of input"},

	{"alter nothing", "ALTER STREAM SET ^(retention = 1)", "42601", `syntax error at or near "("`},
	{"alter otherwise", "ALTER STREAM s ^RENAME TO t", "42601", `syntax error at or near "RENAME"`},
	{"set without value", "ALTER STREAM s SET (retention^)", "42601", `syntax error at or near ")"`},
	{"reset with value", "ALTER STREAM s RESET (retention ^= 1)", "42601", `syntax error at or near "="`},
	{"alter twice", "ALTER STREAM s SET (retention = 1)^, SET (retention = 1)", "42601", `syntax error at or near ","`},
	{"alter with a parameter", "ALTER STREAM s SET (retention = ^$1)", "42P02", "there is no parameter $1"},

	{"options of two owners", "ALTER TABLE t SET (koldstore_enabled = true, ^fillfactor = 70)", "0A000", "the options of koldstore cannot be set together with anything else"},
	{"the other owner first", "ALTER TABLE t SET (^fillfactor = 70, koldstore_enabled = true)", "0A000", "the options of koldstore cannot be set together with anything else"},
	{"and another change", "SELECT 'ä'; ALTER TABLE t SET (koldstore_enabled = true), ^ADD x int", "0A000", "the options of koldstore cannot be set together with anything else"},
	{"another change first", "ALTER TABLE t ^ADD x int DEFAULT (1), SET (koldstore_enabled)", "0A000", "the options of koldstore cannot be set together with anything else"},
	{"options reset", "ALTER TABLE t ^RESET (koldstore_enabled)", "0A000", "the options of koldstore cannot be reset"},
	{"option set twice", "ALTER TABLE t SET (koldstore_enabled, ^Koldstore_Enabled)", "42601", "conflicting or redundant options"},
	{"option without value", "ALTER TABLE t SET (koldstore_enabled = ^)", "42601", `syntax error at or near ")"`},
	{"option with a parameter", "ALTER TABLE t SET (koldstore_hot_row_limit = ^$1)", "42P02", "there is no parameter $1"},
	{"options not closed", "ALTER TABLE t SET (koldstore_enabled = true^", "42601", "syntax error at end of input"},
	{"escapes in an option", `ALTER TABLE t SET (koldstore_storage = ^E'\x41')`, "0A000", "string literals with escapes are not supported in the statements of koldproxy"},

	{"grant nothing", "GRANT SUBSCRIBE ON TOPIC ^TO bob", "42601", `syntax error at or near "TO"`},
	{"grant to nobody", "GRANT SUBSCRIBE ON TOPIC 'a' TO^", "42601", "syntax error at end of input"},
	{"grant from", "GRANT SUBSCRIBE ON TOPIC 'a' ^FROM bob", "42601", `syntax error at or near "FROM"`},
	{"revoke to", "SELECT 'é'; REVOKE SUBSCRIBE ON TOPIC 'a' ^TO bob", "42601", `syntax error at or near "TO"`},
	{"grant a name", "GRANT SUBSCRIBE ON TOPIC ^a TO bob", "42601", `syntax error at or near "a"`},
	{"grant to a literal", "GRANT SUBSCRIBE ON TOPIC 'a' TO ^'bob'", "42601", `syntax error at or near "'bob'"`},
	{"grant to a reserved word", "GRANT SUBSCRIBE ON TOPIC 'a' TO ^user", "42601", `syntax error at or near "user"`},
	{"grant option", "GRANT SUBSCRIBE ON TOPIC 'a' TO bob ^WITH GRANT OPTION", "42601", `syntax error at or near "WITH"`},
	{"revoke cascade", "REVOKE SUBSCRIBE ON TOPIC 'a' FROM bob ^CASCADE", "42601", `syntax error at or near "CASCADE"`},
	{"grant a parameter", "GRANT SUBSCRIBE ON TOPIC ^$1 TO bob", "42P02", "there is no parameter $1"},
	{"escapes in a filter", `GRANT SUBSCRIBE ON TOPIC ^E'\x41' TO bob`, "0A000", "string literals with escapes are not supported in the statements of koldproxy"},

	{"no ORDER BY", "SELECT id FROM t LIMIT 5 ^AFTER ('x')", "42601", "AFTER requires ORDER BY"},
	{"too few values", "SELECT 'é' FROM t ORDER BY a, b LIMIT 5 AFTER ('x'^)", "42601", "AFTER has fewer values than ORDER BY has keys"},
	{"too many values", "SELECT 1 FROM t ORDER BY a LIMIT 5 AFTER ('x', ^'y', 'z')", "42601", "AFTER has more values than ORDER BY has keys"},
	{"no values", "SELECT id FROM t ORDER BY id LIMIT 5 AFTER (^)", "42601", `syntax error at or near ")"`},
	{"empty value", "SELECT id FROM t ORDER BY id LIMIT 5 AFTER ('x', ^)", "42601", `syntax error at or near ")"`},
	{"distinct", "SELECT DISTINCT id FROM t ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with DISTINCT"},
	{"distinct on", "SELECT DISTINCT ON (id) id FROM t ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with DISTINCT"},
	{"group by", "SELECT id FROM t GROUP BY id ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with GROUP BY"},
	{"having", "SELECT 1 AS a FROM t HAVING true ORDER BY a LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with HAVING"},
	{"union", "SELECT id FROM t UNION ALL SELECT id FROM u ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with UNION, INTERSECT or EXCEPT"},
	{"union of parentheses", "(SELECT 1 AS a) EXCEPT (SELECT 2) ORDER BY a LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with UNION, INTERSECT or EXCEPT"},
	{"select in parentheses", "(SELECT id FROM t) ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is supported in SELECT only"},
	{"values", "VALUES (1), (2) ORDER BY 1 LIMIT 5 ^AFTER (1)", "0A000", "AFTER is supported in SELECT only"},
	{"aggregate", "SELECT (1 + Count(*)) FROM t ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with aggregate functions"},
	{"window", "SELECT id, 1 + (row_number() OVER (ORDER BY x)) FROM t ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with window functions"},
	{"window clause", "SELECT id FROM t WINDOW w AS () ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is not supported with window functions"},
	{"ordinal", "SELECT id FROM t ORDER BY 1 LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is supported only where ORDER BY names columns, with COLLATE, ASC or DESC, NULLS FIRST or LAST"},
	{"expression", "SELECT id FROM t ORDER BY id + 1 LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is supported only where ORDER BY names columns, with COLLATE, ASC or DESC, NULLS FIRST or LAST"},
	{"parentheses", `SELECT id FROM t ORDER BY (id COLLATE "C") LIMIT 5 ^AFTER ('x')`, "0A000", "AFTER is supported only where ORDER BY names columns, with COLLATE, ASC or DESC, NULLS FIRST or LAST"},
	{"using", "SELECT id FROM t ORDER BY id USING > LIMIT 5 ^AFTER ('x')", "0A000", "AFTER is supported only where ORDER BY names columns, with COLLATE, ASC or DESC, NULLS FIRST or LAST"},
	{"alias", "SELECT upper(id) AS id FROM t ORDER BY id LIMIT 5 ^AFTER ('x')", "0A000", `AFTER is not supported where "id" in ORDER BY is or may be an expression of the select list`},
	{"nested", "SELECT id FROM t ORDER BY id LIMIT 5 AFTER ((SELECT id FROM t ORDER BY id LIMIT 1 ^AFTER ('x')))", "0A000", "AFTER is not supported within the values of another AFTER"},
	{"too many keys", "SELECT 1 FROM t ORDER BY a" + strings.Repeat(", a", 32) + " LIMIT 5 ^AFTER (1)", "0A000", "AFTER is supported with at most 32 keys"},
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, c := range refusals {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			before, after, ok := strings.Cut(c.in, "^")
			if !ok {
				t.Fatal("the row has no ^")
			}
			in := before + after
			r := Rewrite(in, conforming)
			if r.Refusal == nil {
				t.Fatalf("not refused, became %s", r.SQL)
			}
			if unspoiled(r) != in || len(r.Statements) != 0 {
				t.Errorf("a refused text was changed to %s", r.SQL)
			}
			if r.Refusal.Code != c.code || r.Refusal.Message != c.message {
				t.Errorf("got %v, want %s (SQLSTATE %s)", r.Refusal, c.message, c.code)
			}
			if want := len([]rune(before)) + 1; r.Refusal.Position != want {
				t.Errorf("position %d, want %d", r.Refusal.Position, want)
			}
		})
	}
}

// What is executed later than it is looked at reads its numbers then.
func TestShowStreamsLater(t *testing.T) {
	t.Parallel()
	later := conforming
	later.StatsLater, later.StreamStats = true, json.RawMessage(`{"public.s":{"consumers":7}}`)
	r := Rewrite("SHOW STREAMS", later)
	if !strings.Contains(r.SQL, "current_setting('koldstore.stream_stats', true)") || strings.Contains(r.SQL, "consumers\":7") || !r.Statements[0].StatsLater {
		t.Errorf("%s %+v", r.SQL, r.Statements)
	}
	if r := Rewrite("SHOW STREAMS", conforming); r.Statements[0].StatsLater {
		t.Errorf("%+v", r.Statements)
	}
}
