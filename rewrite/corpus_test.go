package rewrite

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"pgregory.net/rapid"
)

// TestServerAcceptsWhatIsLegal builds queries with AFTER, good and bad ones, and prepares what becomes of them. A query that is
// rewritten is accepted exactly when the same query without AFTER is; one that is refused or left alone is a syntax error.
func TestServerAcceptsWhatIsLegal(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `CREATE TABLE t (id int PRIMARY KEY, a int, b int NOT NULL, "Odd ""name" int); CREATE TABLE u (id int, c int)`)
	accepts := func(t *rapid.T, sql string) *pgconn.PgError {
		_, err := conn.PgConn().Prepare(context.Background(), "", sql, []uint32{pgtype.Int4OID, pgtype.Int8OID})
		pgErr, refused := errors.AsType[*pgconn.PgError](err)
		if err != nil && !refused {
			t.Fatal(err)
		}
		return pgErr
	}
	counts := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		for range 10 {
			var sql, plain strings.Builder
			query(t, &sql, &plain, 2)
			r := Rewrite(sql.String(), conforming)
			got := accepts(t, r.SQL)
			if r.Refusal != nil || !r.Changed {
				counts["refused"]++
				if got == nil || got.Code != "42601" {
					t.Fatalf("%s: not rewritten (%v), PostgreSQL says %v", sql.String(), r.Refusal, got)
				}
				continue
			}
			want := accepts(t, plain.String())
			if want == nil {
				counts["accepted"]++
			} else {
				counts["wrong anyway"]++
			}
			if (got == nil) != (want == nil) || got != nil && got.Code != want.Code {
				t.Fatalf("%s\nbecame %s: %v\nwithout AFTER %s: %v", sql.String(), r.SQL, got, plain.String(), want)
			}
		}
	})
	if counts["refused"] == 0 || counts["accepted"] == 0 || counts["wrong anyway"] == 0 {
		t.Errorf("the corpus is one-sided: %v", counts)
	}
	t.Log(counts)
}

// query writes a query with AFTER to sql, and without it to plain.
func query(t *rapid.T, sql, plain *strings.Builder, depth int) {
	both := func(s string) { sql.WriteString(s); plain.WriteString(s) }
	pick := func(name string, choice ...string) string { return rapid.SampledFrom(choice).Draw(t, name) }
	nested := func(name string) bool { return depth > 0 && rapid.IntRange(0, 9).Draw(t, name) == 5 }

	space := pick("space", " ", " ", " /* c */ ", "\n-- c\n\t")
	if nested("with") {
		both("WITH t AS" + space + "(")
		query(t, sql, plain, depth-1)
		both(")" + space)
	}
	both("SELECT" + space)
	mostly := func(name string, choice, rare []string) string {
		if rapid.IntRange(0, 9).Draw(t, name+" is rare") == 5 {
			choice = rare
		}
		return rapid.SampledFrom(choice).Draw(t, name)
	}
	both(mostly("list", []string{"*", "t.*", "id", "id, a", "t.id AS x, a", "id AS id, b", "a + b, id", "upper('x') AS up, t.id", `"Odd ""name"`, ""}, []string{"max(id)", "DISTINCT id", "id::bigint"}))
	if nested("column") {
		both(", (")
		query(t, sql, plain, depth-1)
		both(") AS sub")
	}
	both(space + "FROM" + space)
	if nested("from") {
		both("(")
		query(t, sql, plain, depth-1)
		both(") t")
	} else {
		// No name that two tables of FROM have: ORDER BY id finds the one of SELECT t.*, a condition finds both (42702).
		both(mostly("from", []string{"t", "t AS t", "t JOIN (SELECT 1 AS c) u ON c = id", "ONLY t", "public.t"}, []string{"t JOIN u USING (id)", "t, (SELECT 1 AS c) u", "u AS t", "nowhere"}))
	}
	both(mostly("where", []string{"", " WHERE a = 1 OR b = 2", " WHERE NOT a = 1 AND id BETWEEN 1 AND 5", " WHERE a IN (1, 2)", " WHERE $1 = b"}, []string{" WHERE (a)", " GROUP BY id"}))
	if nested("exists") {
		both(" AND EXISTS (")
		query(t, sql, plain, depth-1)
		both(")")
	}
	keys := make([]string, rapid.SampledFrom([]int{1, 1, 1, 2, 2, 3, 0}).Draw(t, "keys"))
	for i := range keys {
		keys[i] = mostly("key", []string{"id", "t.id", "a", "b", `"Odd ""name"`}, []string{"x", "nothing", "id + 1", "1"})
	}
	for i, k := range keys {
		if i == 0 {
			both(" ORDER BY ")
		} else {
			both(", ")
		}
		both(k + pick("direction", "", "", " ASC", " DESC") + pick("nulls", "", "", " NULLS FIRST", " NULLS LAST"))
	}
	both(pick("limit", " LIMIT 5", " LIMIT $2", " LIMIT (1 + 1)", " FETCH FIRST 3 ROWS ONLY", " OFFSET 1 LIMIT 5", " FETCH NEXT ROW ONLY", " LIMIT ALL"))
	count := len(keys)
	if rapid.IntRange(0, 15).Draw(t, "another number") == 7 {
		count = rapid.IntRange(0, 3).Draw(t, "values")
	}
	values := make([]string, count)
	for i := range values {
		values[i] = pick("value", "1", "'2'", "NULL", "$1", "$1::int", "1 + 2", "(3)", "abs(-1)", "CASE WHEN true THEN 1 END")
	}
	sql.WriteString(pick("after", " AFTER (", " after(", " AFTER/**/(") + strings.Join(values, ", ") + ")")
	both(pick("end", "", "", " OFFSET 2", " FOR UPDATE", " FOR SHARE OF t SKIP LOCKED"))
}
