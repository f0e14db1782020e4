package rewrite

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// TestAfterWorksInsideOtherStatements runs what wraps a query and compares the ids that come out.
func TestAfterWorksInsideOtherStatements(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, `CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t SELECT i, i % 3 FROM generate_series(1, 9) i;
		CREATE TABLE u (id int PRIMARY KEY)`)
	for _, c := range []struct {
		sql  string
		want []string
	}{
		{"SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3)", []string{"4", "5"}},
		{"SELECT id FROM t WHERE a = 1 OR id = 9 ORDER BY id DESC LIMIT 3 AFTER ('8') OFFSET 1", []string{"4", "1"}},
		{"SELECT id FROM t ORDER BY a DESC, id LIMIT 3 AFTER (1, 4) FOR UPDATE SKIP LOCKED", []string{"7", "3", "6"}},
		{"SELECT id AS k FROM t ORDER BY k FETCH FIRST ROW ONLY AFTER (3)", []string{"4"}},
		{"SELECT q.id FROM t JOIN (SELECT id FROM t ORDER BY id LIMIT 4 AFTER (2)) q USING (id) ORDER BY q.id LIMIT 9 AFTER (4)", []string{"5", "6"}},
		{"BEGIN; DECLARE c CURSOR FOR SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3); FETCH ALL FROM c; COMMIT", []string{"4", "5"}},
		{"PREPARE p(text) AS SELECT id FROM t ORDER BY id LIMIT 2 AFTER ($1::int); EXECUTE p('3')", []string{"4", "5"}},
		{"CREATE TABLE made AS SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3); TABLE made", []string{"4", "5"}},
		{"INSERT INTO u SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3) ON CONFLICT DO NOTHING RETURNING id", []string{"4", "5"}},
		{"WITH c AS (SELECT id FROM t ORDER BY id LIMIT 3 AFTER (3)) SELECT id FROM c ORDER BY id LIMIT 9 AFTER (4)", []string{"5", "6"}},
		{"CREATE VIEW v AS SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3); SELECT id FROM v", []string{"4", "5"}},
		{"(SELECT id FROM t ORDER BY id LIMIT 1 AFTER (3)) UNION ALL (SELECT id FROM t ORDER BY id DESC LIMIT 1 AFTER (3))", []string{"4", "2"}},
		{"SELECT x.id FROM u, LATERAL (SELECT t.id FROM t ORDER BY t.id LIMIT 1 AFTER (u.id)) x ORDER BY x.id LIMIT 9 AFTER (0)", []string{"5", "6"}},
	} {
		results, err := conn.PgConn().Exec(context.Background(), mustRewrite(t, c.sql)).ReadAll()
		if err != nil {
			t.Errorf("%s: %v", c.sql, err)
			continue
		}
		var got []string
		for _, r := range results {
			for _, row := range r.Rows {
				got = append(got, string(row[0]))
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.sql, got, c.want)
		}
	}
	copied, err := conn.PgConn().CopyTo(context.Background(), discard{}, mustRewrite(t, "COPY (SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3)) TO STDOUT"))
	if err != nil || copied.RowsAffected() != 2 {
		t.Errorf("COPY: %v %v", copied, err)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestParametersTakeTheTypeOfTheirKey looks at what PostgreSQL infers, which is what drivers encode for.
func TestParametersTakeTheTypeOfTheirKey(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, "CREATE TABLE t (id bigint PRIMARY KEY, v varchar(10), ts timestamptz NOT NULL, o oid)")
	for _, c := range []struct {
		sql  string
		want []uint32
	}{
		{"SELECT * FROM t ORDER BY id LIMIT $1 AFTER ($2)", []uint32{pgtype.Int8OID, pgtype.Int8OID}},
		{"SELECT * FROM t ORDER BY o DESC LIMIT $2 AFTER ($1)", []uint32{pgtype.OIDOID, pgtype.Int8OID}},
		{"SELECT * FROM t ORDER BY ts, id LIMIT 5 AFTER ($1, $2)", []uint32{pgtype.TimestamptzOID, pgtype.Int8OID}},
		{"SELECT * FROM t ORDER BY v DESC, ts DESC, id DESC LIMIT 5 AFTER ($3, $2, $1)", []uint32{pgtype.Int8OID, pgtype.TimestamptzOID, pgtype.TextOID}},
		{"SELECT * FROM t ORDER BY ts DESC, v, id LIMIT 5 AFTER ($1, $2, $3)", []uint32{pgtype.TimestamptzOID, pgtype.TextOID, pgtype.Int8OID}},
		{"SELECT * FROM t ORDER BY id LIMIT 5 AFTER ($1::int4)", []uint32{pgtype.Int4OID}},
	} {
		s, err := conn.PgConn().Prepare(context.Background(), "", mustRewrite(t, c.sql), nil)
		if err != nil {
			t.Errorf("%s: %v", c.sql, err)
			continue
		}
		if !slices.Equal(s.ParamOIDs, c.want) {
			t.Errorf("%s: got %v, want %v", c.sql, s.ParamOIDs, c.want)
		}
	}
}

// TestAfterWithParametersAndPlans runs AFTER with $n in the extended protocol and under EXPLAIN.
func TestAfterWithParametersAndPlans(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, "CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t SELECT i, i % 3 FROM generate_series(1, 9) i")
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		rows, err := conn.Query(context.Background(), mustRewrite(t, "SELECT id FROM t ORDER BY a DESC, id LIMIT $1 AFTER ($2, $3) OFFSET $4"), mode, 3, 1, 4, 1)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := pgx.CollectRows(rows, pgx.RowTo[int]); err != nil || !slices.Equal(got, []int{3, 6, 9}) {
			t.Errorf("%v: %v, %v", mode, got, err)
		}
	}
	for _, sql := range []string{
		"EXPLAIN (ANALYZE, TIMING OFF) SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3)",
		"EXPLAIN ANALYZE CREATE TABLE made AS SELECT id FROM t ORDER BY id LIMIT 2 AFTER (3)",
		"PREPARE p AS SELECT id FROM t ORDER BY id FETCH FIRST 2 ROWS ONLY AFTER ($1); EXPLAIN ANALYZE EXECUTE p (3)",
	} {
		results, err := conn.PgConn().Exec(context.Background(), mustRewrite(t, sql)).ReadAll()
		if err != nil {
			t.Errorf("%s: %v", sql, err)
			continue
		}
		if plan := string(results[len(results)-1].Rows[0][0]); !strings.Contains(plan, "rows=2") {
			t.Errorf("%s: %s", sql, plan)
		}
	}
}
