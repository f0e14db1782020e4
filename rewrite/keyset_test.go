package rewrite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"pgregory.net/rapid"
)

func TestConditions(t *testing.T) {
	t.Parallel()
	nullable := func(key string) string {
		return "koldstore.key_may_be_null($ks$t$ks$, $ks$" + key + "$ks$)"
	}
	for _, c := range []struct{ order, values, want string }{
		{"a", "1", "(a > (1) OR (" + nullable("a") + " AND a IS NULL))"},
		{"a NULLS FIRST", "'x'::text", "(a > ('x'::text))"},
		{"a DESC", "-1", "(a < (-1))"},
		{"a DESC NULLS LAST", "1", "(a < (1) OR (" + nullable("a") + " AND a IS NULL))"},
		{"a", "$1", "(a > ($1) OR (" + nullable("a") + " AND a IS NULL AND ($1) IS NOT NULL))"},
		{"a DESC", "$1", "(a < ($1) OR (($1) IS NULL AND a IS NOT NULL))"},
		{"a", "NULL", "(a > (NULL))"},
		{"a DESC", "NULL", "(a < (NULL) OR a IS NOT NULL)"},
		{"a DESC, b DESC", "1, 2", "(ROW(a, b) < ROW((1), (2)))"},
		{"a NULLS FIRST, b", "1, 2", "(ROW(a, b) > ROW((1), (2)) OR ((" + nullable("b") + ") AND (a > (1) OR (a = (1) AND (b > (2) OR (b IS NULL))))))"},
		{"a DESC, b DESC", "1, NULL", "(ROW(a, b) < ROW((1), (NULL)) OR (a < (1) OR (a = (1) AND (b < (NULL) OR b IS NOT NULL))))"},
		{"a, b DESC", "1, 2", "((a >= (1) OR (" + nullable("a") + " AND a IS NULL)) AND (a > (1) OR (a IS NULL) OR (a = (1) AND (b < (2)))))"},
		{"a DESC, b", "1, $1", "((a <= (1)) AND (a < (1) OR (a = (1) AND (b > ($1) OR (b IS NULL AND ($1) IS NOT NULL)))))"},
		{"a DESC, b", "NULL, 2", "((a < (NULL) OR a IS NOT NULL OR (a IS NULL AND (b > (2) OR (b IS NULL)))))"},
	} {
		got := mustRewrite(t, "SELECT FROM t ORDER BY "+c.order+" LIMIT 5 AFTER ("+c.values+")")
		got, _, _ = strings.Cut(strings.TrimPrefix(got, "SELECT FROM t WHERE "), " ORDER BY")
		want := c.want + proofOf(c.want)
		if got := withoutTypes(got); got != want {
			t.Errorf("%s after %s:\ngot  %s\nwant %s", c.order, c.values, got, want)
		}
	}
}

// TestKeysOfExtensions has keys whose operators are in a schema of their own. Pages are in the order of the query or are refused: those of
// text, which PostgreSQL takes where it finds no others, know upper case from lower case.
func TestKeysOfExtensions(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; CREATE DOMAIN folded AS ext.citext;
		CREATE TABLE people (id int PRIMARY KEY, name ext.citext, d folded, v varchar, list ext.citext[]);
		INSERT INTO people SELECT i, n, n, n, ARRAY[n::ext.citext] FROM unnest(ARRAY['a', 'B', 'c', 'D', 'e']) WITH ORDINALITY x(n, i)`)
	read := func(sql string, args ...any) (string, string) {
		rows, _ := conn.Query(context.Background(), mustRewrite(t, sql), append([]any{pgx.QueryExecModeExec}, args...)...)
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		pgErr, _ := errors.AsType[*pgconn.PgError](err)
		if pgErr != nil {
			return pgErr.Code, pgErr.Hint
		}
		return strings.Join(got, " "), ""
	}
	for _, c := range []struct{ sql, without, with string }{
		{"ORDER BY name LIMIT 2 AFTER ('B')", "42883", "c D"},
		{"ORDER BY name DESC LIMIT 2 AFTER ('c')", "42883", "B a"},
		{"ORDER BY d LIMIT 2 AFTER ('b')", "42883", "c D"},
		{"ORDER BY name, id LIMIT 2 AFTER ('b', 2)", "42883", "c D"},
		{"ORDER BY id, name LIMIT 2 AFTER (2, 'b')", "42883", "c D"},
		{"ORDER BY id DESC, name LIMIT 2 AFTER (3, 'c')", "42883", "B a"},
		{"ORDER BY name LIMIT 2 AFTER ('b'::ext.citext)", "42883", "c D"},
		{"ORDER BY name LIMIT 2 AFTER ('b'::text)", "42883", "42804"},
		{"ORDER BY name LIMIT 2 AFTER ((SELECT v FROM people WHERE id = 2))", "42883", "42804"},
		{"ORDER BY name LIMIT 2 AFTER (lower('B'))", "42883", "42804"},
		{"ORDER BY list LIMIT 2 AFTER ('{b}')", "c D", "c D"},
		{`ORDER BY v COLLATE "C" LIMIT 2 AFTER ('B')`, "D a", "D a"},
		{`ORDER BY v COLLATE pg_catalog."C" DESC NULLS LAST, id LIMIT 2 AFTER ('a', 1)`, "D B", "D B"},
		{"ORDER BY name LIMIT 2 AFTER (NULL)", "", ""},
	} {
		for path, want := range map[string]string{"public": c.without, "public, ext": c.with} {
			exec(t, conn, "SET search_path = "+path)
			got, hint := read("SELECT name::text AS it FROM public.people " + c.sql)
			if got != want || want == "42883" && hint != "Add schema ext to search_path." || want == "42804" && !strings.Contains(hint, "citext") {
				t.Errorf("%s in %s: got %q (%s), want %q", c.sql, path, got, hint, want)
			}
		}
	}
	exec(t, conn, "SET search_path = public, ext")
	if got, _ := read("SELECT name::text AS it FROM people ORDER BY name LIMIT 2 AFTER ($1)", "b"); got != "c D" { // a parameter takes the type of the key
		t.Errorf("with a parameter: %s", got)
	}
	sql := mustRewrite(t, "SELECT name FROM people ORDER BY name LIMIT 2 AFTER ($1)")
	if _, err := conn.PgConn().Prepare(context.Background(), "", sql, []uint32{pgtype.VarcharOID}); err != nil {
		t.Error(err)
	} else if err := conn.PgConn().ExecPrepared(context.Background(), "", [][]byte{[]byte("b")}, nil, nil).Read().Err; err == nil {
		t.Error("a parameter of another type is compared") // JDBC's setString
	}
	plan := explain(t, conn, mustRewrite(t, "SELECT name FROM people ORDER BY name DESC LIMIT 2 AFTER ('B')"))
	if strings.Contains(plan, "koldstore") || strings.Contains(plan, "CASE") {
		t.Errorf("the question about types is part of the plan:\n%s", plan)
	}
	exec(t, conn, mustRewrite(t, "CREATE VIEW kept AS SELECT name FROM people ORDER BY name LIMIT 2 AFTER ('B')"))
	exec(t, conn, "SET search_path = public; SELECT * FROM kept")
}

// proofOf is what stands behind a condition: each of its comparisons once more, as rows, unless it is one of rows.
func proofOf(condition string) string {
	var proof []string
	for _, m := range regexp.MustCompile(`\b([ab]) ([<>]=?|=) (\([^()]+\))`).FindAllStringSubmatch(condition, -1) {
		one := " OR ROW(" + m[1] + ", 0) " + m[2] + " ROW(" + m[3] + ", 0)"
		if !slices.Contains(proof, one) {
			proof = append(proof, one)
		}
	}
	if proof == nil {
		return ""
	}
	return " AND (TRUE" + strings.Join(proof, "") + ")"
}

// TestForeignOperators puts operators into the search path that fit better than PostgreSQL's own. Whoever asks for a page does not run
// them, as he does not with ORDER BY alone: he gets an error. Where there are none, the plan is that of the bare condition.
func TestForeignOperators(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `CREATE TABLE kt (v varchar NOT NULL, n int NOT NULL); INSERT INTO kt SELECT i, i FROM generate_series(1, 2000) i; CREATE INDEX ON kt (v, n); ANALYZE kt;
		CREATE TABLE traces (what text); CREATE SCHEMA mal;
		CREATE FUNCTION mal.op(varchar, varchar) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO traces VALUES ('varchar'); RETURN false; END $$;
		CREATE FUNCTION mal.op(varchar, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO traces VALUES ('text'); RETURN false; END $$;
		CREATE FUNCTION mal.op(int, int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO traces VALUES ('int'); RETURN false; END $$`)
	for _, order := range []string{"v", "v DESC", "v, n", "v, n DESC", "v DESC NULLS LAST, n"} {
		for _, value := range []string{"'5'", "$1", "'5'::varchar", "'5'::text", "(SELECT '5'::varchar)"} {
			sql := "SELECT v FROM kt ORDER BY " + order + " LIMIT 3 AFTER (" + value
			if strings.Contains(order, ",") {
				sql += ", 1"
			}
			sql = mustRewrite(t, sql+")")
			ask := func() error {
				var args []any
				if value == "$1" {
					args = []any{"5"}
				}
				_, err := conn.Exec(context.Background(), sql, append([]any{pgx.QueryExecModeExec}, args...)...)
				return err
			}
			if err := ask(); err != nil {
				t.Errorf("%s: %v", sql, err)
			}
			for _, operator := range []string{">", "<", ">=", "<=", "="} {
				for path, types := range map[string][]string{"mal": {"varchar, varchar", "varchar, text"}, "mal, pg_catalog": {"varchar, varchar", "int, int"}} {
					for _, both := range types {
						left, right, _ := strings.Cut(both, ", ")
						exec(t, conn, fmt.Sprintf(`CREATE OPERATOR mal.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = mal.op); SET search_path = %s, public`, operator, left, right, path))
						_ = ask() // an error, where the operator fits
						exec(t, conn, fmt.Sprintf(`RESET search_path; DROP OPERATOR mal.%s (%s)`, operator, both))
					}
				}
			}
		}
	}
	var traces []string
	rows, _ := conn.Query(context.Background(), "SELECT what FROM traces")
	traces, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(traces) > 0 {
		t.Errorf("foreign operators ran: %v, %v", traces, err)
	}

	exec(t, conn, `CREATE OPERATOR mal.> (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = mal.op); SET search_path = mal, public`)
	_, err = conn.Exec(context.Background(), mustRewrite(t, "SELECT v FROM kt ORDER BY v LIMIT 3 AFTER ('5')"))
	if pg, ok := errors.AsType[*pgconn.PgError](err); !ok || pg.Code != "0A000" {
		t.Errorf("the answer is %v", err)
	}
	exec(t, conn, `RESET search_path; DROP OPERATOR mal.> (varchar, varchar)`)
	for _, order := range []string{"v", "v, n", "v DESC, n"} {
		sql := "SELECT v FROM kt ORDER BY " + order + " LIMIT 3 AFTER ('5'" + strings.Repeat(", 1", strings.Count(order, ",")) + ")"
		proved := mustRewrite(t, sql)
		bare, rest, _ := strings.Cut(proved, " AND (TRUE OR ")
		_, rest, _ = strings.Cut(rest, " ORDER BY ")
		if rest == "" { // rows need no proof
			continue
		}
		if got, want := explain(t, conn, proved), explain(t, conn, bare+" ORDER BY "+rest); got != want {
			t.Errorf("%s is planned as\n%s\nand not as\n%s", sql, got, want)
		}
	}
}

// TestPagesAreTheWholeQuery asks for the page behind any row of random tables in random orders, and gets the rows that
// follow it in the query without pages, whatever NULLs and equal keys there are.
func TestPagesAreTheWholeQuery(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `
		CREATE TEMP TABLE loose (id int UNIQUE, a int, b text, c numeric);
		CREATE TEMP TABLE strict (id int PRIMARY KEY, a int NOT NULL, b text COLLATE "C" NOT NULL, c numeric);
		CREATE INDEX ON strict (a, id);
		CREATE TEMP VIEW seen AS SELECT * FROM loose;
		SET enable_seqscan = off; SET jit = off`)
	rapid.Check(t, func(t *rapid.T) {
		fill(t, conn)
		paging{
			from:   rapid.SampledFrom([]string{"loose", "strict", "strict AS s", "seen", "(SELECT * FROM loose) q", "strict LEFT JOIN (SELECT id AS other FROM loose) l ON other = id"}).Draw(t, "from"),
			where:  rapid.SampledFrom([]string{"", " WHERE a = 1 OR a IS NULL OR b < 'x'", " WHERE true"}).Draw(t, "where"),
			order:  orders(t),
			page:   rapid.IntRange(1, 5).Draw(t, "page"),
			params: rapid.Bool().Draw(t, "params"),
			mode:   rapid.SampledFrom([]string{"force_generic_plan", "force_custom_plan"}).Draw(t, "plans"),
		}.check(t, conn)
	})
}

// row is a row of the tables; the second one has no NULLs but in c.
type row struct {
	ID *int    `json:"id"`
	A  *int    `json:"a"`
	B  *string `json:"b"`
	C  *string `json:"c"`
}

// fill draws the rows of both tables.
func fill(t *rapid.T, conn *pgx.Conn) {
	pick := func(name string, values ...string) *string {
		return rapid.SampledFrom(append([]*string{nil}, pointers(values)...)).Draw(t, name)
	}
	loose, strict := []row{}, []row{}
	for id := range rapid.IntRange(0, 14).Draw(t, "rows") {
		r := row{ID: &id, A: rapid.SampledFrom([]*int{nil, new(int), pointers([]int{1})[0]}).Draw(t, "a"), B: pick("b", "", "x", "Y", "é'"), C: pick("c", "-1.5", "0", "NaN")}
		full := r
		if r.A == nil {
			full.A = pointers([]int{7})[0]
		}
		if r.B == nil {
			full.B = pointers([]string{"z"})[0]
		}
		if id == 0 && rapid.Bool().Draw(t, "null id") {
			r.ID = nil
		}
		loose, strict = append(loose, r), append(strict, full)
	}
	sql := ""
	for table, rows := range map[string][]row{"loose": loose, "strict": strict} {
		text, err := json.Marshal(rows)
		if err != nil {
			t.Fatal(err)
		}
		sql += "DELETE FROM " + table + "; INSERT INTO " + table + " SELECT * FROM jsonb_populate_recordset(NULL::" + table + ", $j$" + string(text) + "$j$);"
	}
	if _, err := conn.PgConn().Exec(context.Background(), sql).ReadAll(); err != nil {
		t.Fatal(err)
	}
}

func pointers[T any](values []T) (all []*T) {
	for i := range values {
		all = append(all, &values[i])
	}
	return all
}

// sortKey is a key of ORDER BY and what stands behind it.
type sortKey struct{ column, direction string }

// orders draws keys that make an order complete: id is always one of them.
func orders(t *rapid.T) []sortKey {
	var keys []sortKey
	columns := rapid.Permutation([]string{"a", "b", "c"}).Draw(t, "columns")
	columns = append(columns[:rapid.IntRange(0, 3).Draw(t, "keys")], "id")
	for _, c := range columns {
		keys = append(keys, sortKey{c, rapid.SampledFrom([]string{"", " ASC", " DESC"}).Draw(t, "direction") +
			rapid.SampledFrom([]string{"", " NULLS FIRST", " NULLS LAST"}).Draw(t, "nulls")})
	}
	return keys
}

// paging is one query to be read in pages.
type paging struct {
	from, where, mode string
	order             []sortKey
	page              int
	params            bool
}

func (p paging) check(t *rapid.T, conn *pgx.Conn) {
	var columns, order []string
	for _, k := range p.order {
		columns = append(columns, k.column)
		order = append(order, k.column+k.direction)
	}
	query := "SELECT " + strings.Join(columns, ", ") + " FROM " + p.from + p.where + " ORDER BY " + strings.Join(order, ", ")
	p.read(t, conn, "SET plan_cache_mode = "+p.mode, nil)
	whole := p.read(t, conn, query, nil)
	for range min(2, len(whole)) {
		last := rapid.IntRange(0, len(whole)-1).Draw(t, "last row")
		values, params := p.values(whole[last])
		r := Rewrite(query+fmt.Sprintf(" LIMIT %d AFTER (%s)", p.page, strings.Join(values, ", ")), conforming)
		if !r.Changed {
			t.Fatalf("unchanged: %s (%v)", query, r.Refusal)
		}
		got := p.read(t, conn, r.SQL, params)
		want := whole[last+1 : min(last+1+p.page, len(whole))]
		if !slices.EqualFunc(want, got, slices.Equal[[]string]) {
			t.Fatalf("%s %q\nwhole %q\nwant  %q\ngot   %q", r.SQL, params, whole, want, got)
		}
	}
}

// values are the values of AFTER for a row, as literals or as parameters.
func (p paging) values(row []string) (values, params []string) {
	for i, v := range row {
		switch {
		case p.params:
			values, params = append(values, fmt.Sprintf("$%d", i+1)), append(params, v)
		case v == null:
			values = append(values, "NULL")
		default:
			values = append(values, "'"+strings.ReplaceAll(v, "'", "''")+"'")
		}
	}
	return values, params
}

// null stands for NULL among texts.
const null = "\x00"

// read runs a statement through Parse and Bind with all values as text.
func (p paging) read(t *rapid.T, conn *pgx.Conn, sql string, params []string) (rows [][]string) {
	var values [][]byte
	for _, v := range params {
		if v == null {
			values = append(values, nil)
		} else {
			values = append(values, []byte(v))
		}
	}
	result := conn.PgConn().ExecParams(context.Background(), sql, values, nil, nil, nil).Read()
	if result.Err != nil {
		t.Fatalf("%s: %v", sql, result.Err)
	}
	for _, r := range result.Rows {
		var row []string
		for _, v := range r {
			if v == nil {
				row = append(row, null)
			} else {
				row = append(row, string(v))
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// TestPagesComeFromTheIndex looks at the plans PostgreSQL makes of rewritten queries.
func TestPagesComeFromTheIndex(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `
		CREATE TABLE log (id text COLLATE "C" PRIMARY KEY, a int NOT NULL, n int, pad text);
		INSERT INTO log SELECT lpad(i::text, 20, '0'), i / 10, i, repeat('x', 100) FROM generate_series(1, 100000) i;
		CREATE INDEX ON log (a, id); CREATE INDEX ON log (n);
		CREATE TABLE parts (id text COLLATE "C" PRIMARY KEY, ts timestamptz DEFAULT now()) PARTITION BY RANGE (id);
		CREATE TABLE parts1 PARTITION OF parts FOR VALUES FROM (MINVALUE) TO ('00000000000000050000');
		CREATE TABLE parts2 PARTITION OF parts FOR VALUES FROM ('00000000000000050000') TO (MAXVALUE);
		INSERT INTO parts SELECT id FROM log;
		CREATE TABLE base (id int PRIMARY KEY); CREATE TABLE child (CHECK (id > 0)) INHERITS (base);
		ANALYZE log; ANALYZE parts`)
	const value = "'00000000000000070000'"
	for _, c := range []struct{ query, cond string }{
		{"SELECT * FROM log ORDER BY id LIMIT 500 AFTER (" + value + ")", "(id > " + value + "::text)"},
		{"SELECT * FROM log l ORDER BY l.id LIMIT 500 AFTER (" + value + ")", "(id > " + value + "::text)"},
		{"SELECT * FROM log ORDER BY id DESC LIMIT 500 AFTER (" + value + ")", "(id < " + value + "::text)"},
		{"SELECT * FROM log WHERE pad <> '' ORDER BY id LIMIT 500 AFTER (" + value + ") FOR UPDATE", "(id > " + value + "::text)"},
		{"SELECT * FROM log ORDER BY n DESC LIMIT 500 AFTER (7)", "(n < 7)"},
		{"SELECT * FROM log ORDER BY a, id LIMIT 500 AFTER (7000, " + value + ")", "(ROW(a, id) > ROW(7000, " + value + "::text))"},
		{"SELECT * FROM log ORDER BY a DESC, id DESC LIMIT 500 AFTER (7000, " + value + ")", "(ROW(a, id) < ROW(7000, " + value + "::text))"},
		{"SELECT * FROM log ORDER BY a, id DESC LIMIT 500 AFTER (7000, " + value + ")", "(a >= 7000)"},
		{"SELECT * FROM parts ORDER BY id LIMIT 500 AFTER (" + value + ")", "(id > " + value + "::text)"},
	} {
		plan := explain(t, conn, mustRewrite(t, c.query))
		if !strings.Contains(plan, "Index Cond: "+c.cond) {
			t.Errorf("%s: no index condition %s\n%s", c.query, c.cond, plan)
		}
		if strings.Contains(c.query, "parts") && strings.Contains(plan, "parts1") {
			t.Errorf("%s: reads a partition that the value excludes\n%s", c.query, plan)
		}
	}

	exec(t, conn, "SET plan_cache_mode = force_generic_plan; PREPARE p AS "+mustRewrite(t, "SELECT * FROM log ORDER BY id LIMIT 500 AFTER ($1)"))
	if plan := explain(t, conn, "EXECUTE p ('x')"); !strings.Contains(plan, "Index Cond: (id > $1)") {
		t.Errorf("generic plan:\n%s", plan)
	}
	// The plan of a prepared statement follows the table: rows without a key appear as soon as there may be any.
	exec(t, conn, "ALTER TABLE log DROP CONSTRAINT log_pkey; ALTER TABLE log ALTER id DROP NOT NULL; INSERT INTO log VALUES (NULL, 1)")
	rows, err := conn.PgConn().Exec(context.Background(), "EXECUTE p ('00000000000000100000')").ReadAll()
	if err != nil || len(rows[0].Rows) != 1 || rows[0].Rows[0][0] != nil {
		t.Errorf("after DROP NOT NULL: %v %v", rows, err)
	}
	// A child table by inheritance may have NULLs where its parent has none.
	if plan := explain(t, conn, mustRewrite(t, "SELECT * FROM base ORDER BY id LIMIT 5 AFTER (1)")); !strings.Contains(plan, "IS NULL") {
		t.Errorf("a parent's NOT NULL was believed:\n%s", plan)
	}
}

func explain(t *testing.T, conn *pgx.Conn, sql string) string {
	t.Helper()
	rows, err := conn.Query(context.Background(), "EXPLAIN "+sql, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return strings.Join(lines, "\n")
}
