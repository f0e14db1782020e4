package rewrite

import (
	"regexp"
	"strings"
	"testing"
)

// TestAfterBecomesACondition fixes the text of the splice around the condition; keyset_test.go has the conditions.
func TestAfterBecomesACondition(t *testing.T) {
	t.Parallel()
	const up, down = "(id > ('x') OR (koldstore.key_may_be_null($ks$t$ks$, $ks$id$ks$) AND id IS NULL))", "(id < ('x'))"
	for _, c := range []struct{ name, in, want string }{
		{"no where", "SELECT * FROM t ORDER BY id LIMIT 5 AFTER ('x')", "SELECT * FROM t WHERE " + up + " ORDER BY id LIMIT 5  "},
		{"where", "SELECT * FROM t WHERE a OR b ORDER BY id DESC LIMIT 5 AFTER ('x')", "SELECT * FROM t WHERE (a OR b) AND (" + down + ") ORDER BY id DESC LIMIT 5  "},
		{"glued", "select*from t where(a)order by id desc limit(5)after('x')for update", "select*from t where((a)) AND (" + down + ")order by id desc limit(5) for update"},
		{"comments", "SELECT * FROM t -- c\nWHERE /*1*/ a -- d\n/*2*/ ORDER BY id DESC LIMIT 5 AFTER ('x')", "SELECT * FROM t -- c\nWHERE /*1*/ (a) AND (" + down + ") -- d\n/*2*/ ORDER BY id DESC LIMIT 5  "},
		{"comment in front of ORDER BY", "SELECT * FROM t -- c\nORDER BY id DESC LIMIT 5 AFTER ('x')", "SELECT * FROM t WHERE " + down + " -- c\nORDER BY id DESC LIMIT 5  "},
		{"offset in front", "SELECT * FROM t ORDER BY id DESC OFFSET 2 LIMIT 5 AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC OFFSET 2 LIMIT 5  "},
		{"offset behind", "SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x') OFFSET 2", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5   OFFSET 2"},
		{"fetch first", "SELECT * FROM t ORDER BY id DESC FETCH FIRST 5 ROWS ONLY AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC FETCH FIRST 5 ROWS ONLY  "},
		{"fetch next", "SELECT * FROM t ORDER BY id DESC OFFSET 1 ROW FETCH NEXT ROW ONLY AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC OFFSET 1 ROW FETCH NEXT ROW ONLY  "},
		{"limit all", "SELECT * FROM t ORDER BY id DESC LIMIT ALL AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT ALL  "},
		{"limit expression", "SELECT * FROM t ORDER BY id DESC LIMIT CASE WHEN a THEN 1 ELSE 2 END AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT CASE WHEN a THEN 1 ELSE 2 END  "},
		{"limit with a cast", "SELECT * FROM t ORDER BY id DESC LIMIT '5'::bigint AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT '5'::bigint  "},
		{"locks in front", "SELECT * FROM t ORDER BY id DESC FOR UPDATE LIMIT 5 AFTER ('x')", "SELECT * FROM t WHERE " + down + " ORDER BY id DESC FOR UPDATE LIMIT 5  "},
		{"is distinct from", "SELECT a IS DISTINCT FROM b FROM t WHERE a IS NOT DISTINCT FROM b ORDER BY id DESC LIMIT 5 AFTER ('x')", "SELECT a IS DISTINCT FROM b FROM t WHERE (a IS NOT DISTINCT FROM b) AND (" + down + ") ORDER BY id DESC LIMIT 5  "},
		{"alias and qualifier", `SELECT * FROM ONLY "S"."T" * AS q ORDER BY Q.id LIMIT 5 AFTER ('x')`, `SELECT * FROM ONLY "S"."T" * AS q WHERE (Q.id > ('x') OR (koldstore.key_may_be_null($ks$"S"."T"$ks$, $ks$id$ks$) AND Q.id IS NULL)) ORDER BY Q.id LIMIT 5  `},
		{"join", "SELECT * FROM t JOIN u USING (id) ORDER BY id LIMIT 5 AFTER ('x')", "SELECT * FROM t JOIN u USING (id) WHERE (id > ('x') OR (id IS NULL)) ORDER BY id LIMIT 5  "},
		{"common table", "WITH t AS (SELECT 1 AS id) SELECT * FROM t ORDER BY id LIMIT 5 AFTER ('x')", "WITH t AS (SELECT 1 AS id) SELECT * FROM t WHERE (id > ('x') OR (id IS NULL)) ORDER BY id LIMIT 5  "},
		{"view", "CREATE VIEW v AS SELECT * FROM t ORDER BY id LIMIT 5 AFTER ('x') WITH CHECK OPTION", "CREATE VIEW v AS SELECT * FROM t WHERE (id > ('x') OR (id IS NULL)) ORDER BY id LIMIT 5   WITH CHECK OPTION"},
		{"alias of a column", "SELECT o.id AS k, count FROM t o ORDER BY k DESC LIMIT 5 AFTER ('x')", "SELECT o.id AS k, count FROM t o WHERE (o.id < ('x')) ORDER BY k DESC LIMIT 5  "},
		{"other items", "SELECT f(id), id + 1, upper(id) u, a.*, id, CAST(b AS int) FROM t a ORDER BY id DESC LIMIT 5 AFTER ('x')", "SELECT f(id), id + 1, upper(id) u, a.*, id, CAST(b AS int) FROM t a WHERE " + down + " ORDER BY id DESC LIMIT 5  "},
		{"declare", "DECLARE c CURSOR FOR SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')", "DECLARE c CURSOR FOR SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  "},
		{"copy", "COPY (SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')) TO STDOUT", "COPY (SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  ) TO STDOUT"},
		{"prepare", "PREPARE p(text) AS SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')", "PREPARE p(text) AS SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  "},
		{"explain", "EXPLAIN (ANALYZE) SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')", "EXPLAIN (ANALYZE) SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  "},
		{"table as", "CREATE TABLE x AS SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x') WITH NO DATA", "CREATE TABLE x AS SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5   WITH NO DATA"},
		{"insert", "INSERT INTO x SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x') ON CONFLICT DO NOTHING", "INSERT INTO x SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5   ON CONFLICT DO NOTHING"},
		{"with", "WITH d AS (DELETE FROM y RETURNING *) SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')", "WITH d AS (DELETE FROM y RETURNING *) SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  "},
		{
			"two levels", "SELECT * FROM (SELECT * FROM t ORDER BY id DESC LIMIT 5 AFTER ('x')) q WHERE a ORDER BY id DESC LIMIT 5 AFTER ('x')",
			"SELECT * FROM (SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 5  ) q WHERE (a) AND (" + down + ") ORDER BY id DESC LIMIT 5  ",
		},
		{
			"in where", "SELECT * FROM t WHERE (SELECT a FROM t ORDER BY id DESC LIMIT 1 AFTER ('x')) ORDER BY id DESC LIMIT 5 AFTER ('x')",
			"SELECT * FROM t WHERE ((SELECT a FROM t WHERE " + down + " ORDER BY id DESC LIMIT 1  )) AND (" + down + ") ORDER BY id DESC LIMIT 5  ",
		},
		{
			"beside unions", "(SELECT * FROM t ORDER BY id DESC LIMIT 1 AFTER ('x')) UNION ALL (SELECT * FROM t ORDER BY id DESC LIMIT 2 AFTER ('x'))",
			"(SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 1  ) UNION ALL (SELECT * FROM t WHERE " + down + " ORDER BY id DESC LIMIT 2  )",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := withoutProof(mustRewrite(t, c.in)); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// withoutProof takes away what conditions of one key end with.
func withoutProof(sql string) string {
	return withoutTypes(regexp.MustCompile(` AND \(TRUE OR ROW\([\w.]+, 0\) [<>] ROW\(\('x'\), 0\)\)`).ReplaceAllString(sql, ""))
}

// withoutTypes takes away the question about the types of each key and its value.
func withoutTypes(sql string) string {
	return regexp.MustCompile(` AND koldstore\.compares_keys\(CASE WHEN FALSE THEN [^ ]+ END, CASE WHEN FALSE THEN [^ ]+ END\)`).ReplaceAllString(sql, "")
}

func TestAfterKeepsParameters(t *testing.T) {
	t.Parallel()
	got := mustRewrite(t, "SELECT $3::int FROM t a ORDER BY x DESC, id DESC LIMIT $1 AFTER ($2::date, $4)")
	for _, p := range []string{"$1", "$2::date", "$3::int", "$4"} {
		if !strings.Contains(got, p) {
			t.Errorf("%s is missing in %s", p, got)
		}
	}
	if first := strings.Index(got, "$2"); !strings.HasPrefix(got[first-len("ROW(x, id) < ROW(("):], "ROW(x, id) < ROW(($2::date), ($4))") {
		t.Errorf("the first use of $2 is not the comparison with its key: %s", got)
	}
}

// TestOutputNames holds select lists in which the key in ORDER BY is not the column of FROM, or cannot be told.
func TestOutputNames(t *testing.T) {
	t.Parallel()
	for _, list := range []string{
		"id::text", "id::double precision", `id COLLATE "C"`, "(id)::text", "CAST(id AS text)", "upper(a) id", "upper(a) AS ID", `a + b AS "id"`,
		"CASE WHEN a > 1 THEN b ELSE id END", "(SELECT id FROM u)", "id(a)", "(a).id", "(a).*", "s.id(1)", "id[1]", "(id)", "a::id", "NOT a, (a.id)",
		"ROW(1) id", "coalesce(a, 1) id", "id AT TIME ZONE 'UTC'", "a OPERATOR(pg_catalog.+) 1 id", "ALL upper(a) id", `U&"\0069d"(a)`,
	} {
		in := "SELECT " + list + " FROM t ORDER BY id LIMIT 5 AFTER ('x')"
		if r := Rewrite(in, conforming); r.Refusal == nil || r.Refusal.Code != "0A000" {
			t.Errorf("%s: not refused: %s", in, r.SQL)
		}
		// A qualified key can only be a column of FROM.
		mustRewrite(t, "SELECT "+list+" FROM t ORDER BY t.id LIMIT 5 AFTER ('x')")
	}
	for _, list := range []string{
		"id", "*", "t.*", "s.t.*, upper(a)", "t.id", "t.id id", "id AS id", "upper(id)", "id || 'x'", "- id", "a AS b, id", "count", "ALL id", "id = 1", "a id2", "f(id) AS x", "", "1 select",
	} {
		mustRewrite(t, "SELECT "+list+" FROM t ORDER BY id LIMIT 5 AFTER ('x')")
	}
}

// A second AFTER is one too many, and the error points at it and not at something that nobody has typed.
func TestAfterTwice(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		sql string
		at  int
	}{
		{"SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4) AFTER (5)", 47},
		{"SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4) OFFSET 3 LIMIT 2 after (5)", 64},
		{"SELECT * FROM (SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4) AFTER (5)) x ORDER BY id LIMIT 1 AFTER (1)", 62},
	} {
		r := Rewrite(c.sql, conforming)
		if r.Refusal == nil || r.Refusal.Code != "42601" || r.Refusal.Position != c.at || !strings.HasPrefix(strings.ToLower(r.Refusal.Message), `syntax error at or near "after"`) {
			t.Errorf("%s: %v", c.sql, r.Refusal)
		}
	}
	mustRewrite(t, "SELECT * FROM (SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4)) x ORDER BY id LIMIT 1 AFTER (1)")
	mustRewrite(t, "(SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4)) UNION ALL (SELECT * FROM t ORDER BY id LIMIT 5 AFTER (4))")
}
