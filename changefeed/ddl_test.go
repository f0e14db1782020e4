package changefeed_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// B20: columns change their names, come and go, in the middle of a transaction; documents have the columns of
// today, with the values that they had.
func TestColumnsChangeInTheMiddleOfATransaction(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "id > 0")
	h.manage("t")
	h.exec(`BEGIN; INSERT INTO t VALUES (1, 1, ''); ALTER TABLE t RENAME v TO w; INSERT INTO t VALUES (2, 2, '');
		ALTER TABLE t DROP big; INSERT INTO t VALUES (4, 4); ALTER TABLE t ADD d int DEFAULT 5; INSERT INTO t VALUES (5, 5, 6); COMMIT`)
	h.fence()
	h.expect(`SELECT doc FROM _stream_s ORDER BY id`,
		`{"d": 5, "w": 1, "id": 1}`, `{"d": 5, "w": 2, "id": 2}`, `{"d": 5, "w": 4, "id": 4}`, `{"d": 6, "w": 5, "id": 5}`)
	h.exec(`ALTER TABLE t RENAME id TO key; ALTER TABLE t RENAME TO t2; ALTER SCHEMA public RENAME TO other`, `SET search_path = other`,
		`INSERT INTO t2 VALUES (6, 6, NULL)`, `UPDATE t2 SET key = 7 WHERE key = 5`)
	h.fence()
	h.expect(`SELECT op, k, doc FROM other._stream_s ORDER BY id OFFSET 4`, `put 6 {"d": null, "w": 6, "key": 6}`, `delete 5 {"d": 6, "w": 5, "key": 5}`, `put 7 {"d": 6, "w": 5, "key": 7}`)
	// The mirror was made for the key that the table had; it stays as it is, and says why.
	h.expect(`SELECT state, reason FROM koldstore.managed_table`, `broken column "id" of the primary key has been renamed to "key"`)
	h.expect(`SELECT id, op FROM koldstore.t__cl ORDER BY id`, "1 1", "2 1", "4 1", "5 1")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// A foreign key would keep events from expiring, and the log from going with its stream.
func TestForeignKeysToLogs(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "true")
	h.admin(`CREATE TABLE other (id text)`)
	for _, sql := range []string{`CREATE TABLE f (x text REFERENCES _stream_s)`, `ALTER TABLE other ADD FOREIGN KEY (id) REFERENCES _stream_s`} {
		_, err := h.pool.Exec(t.Context(), sql)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42809" {
			t.Errorf("%s: %v", sql, err)
		}
	}
	h.exec(`CALL koldstore.drop_stream(NULL, 's')`)
}

// The applier is behind while columns are renamed, dropped and added: old rows are matched to today's columns.
func TestColumnsChangeWhileBehind(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, a int, b text, c text)`)
	h.stream("s", "t", "a > 0", "pre_image", "true")
	h.exec(`INSERT INTO t VALUES (1, 1, 'b', 'c')`)
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (2, 2, 'b2', 'c2')`,
		`ALTER TABLE t RENAME b TO x`, `ALTER TABLE t RENAME c TO b`, // b is another column now
		`UPDATE t SET a = 3 WHERE id = 2`,
		`ALTER TABLE t DROP b`, `ALTER TABLE t RENAME a TO "A ""a"""`,
		`UPDATE t SET x = 'x3' WHERE id = 2`,
		`ALTER TABLE t ADD b text DEFAULT 'new'`,
		`DELETE FROM t WHERE id = 1`)
	h.startApplier()
	h.fence()
	h.expect(`SELECT op, k, doc, old FROM _stream_s ORDER BY id OFFSET 1`,
		`put 2 {"b": "new", "x": "b2", "id": 2, "A \"a\"": 2} NULL`,
		`put 2 {"b": "new", "x": "b2", "id": 2, "A \"a\"": 3} {"b": "new", "x": "b2", "id": 2, "A \"a\"": 2}`,
		`put 2 {"b": "new", "x": "x3", "id": 2, "A \"a\"": 3} {"b": "new", "x": "b2", "id": 2, "A \"a\"": 3}`,
		`delete 1 {"b": "new", "x": "b", "id": 1, "A \"a\"": 1} {"b": "new", "x": "b", "id": 1, "A \"a\"": 1}`)
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// Names that need quoting work everywhere.
func TestOddNames(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE SCHEMA "S.é"`, `SET search_path = "S.é", public`)
	const columns = `"a""b" int, "it's \" text, "t" text, "lit" text, PRIMARY KEY ("it's \", "a""b")`
	for _, table := range []string{`T ""q""`, `../x`, `a/b+#`} {
		h.exec(fmt.Sprintf(`CREATE TABLE %s (%s)`, `"`+table+`"`, columns), fmt.Sprintf(`INSERT INTO "%s" VALUES (1, 'x', 't', 'l')`, table))
		h.manage(`"` + table + `"`)
		plain := table
		if table[0] == 'T' {
			plain = `T "q"`
		}
		h.stream(plain, plain, `"t" IS NULL OR lit = 'l'`, "start", "earliest")
		h.exec(fmt.Sprintf(`UPDATE "%s" SET "a""b" = 2`, table))
		h.fence()
		h.expect(fmt.Sprintf(`SELECT op, k FROM "S.é"."_stream_%s" ORDER BY id`, table),
			`put {"a\"b": 1, "it's \\": "x"}`, `delete {"a\"b": 1, "it's \\": "x"}`, `put {"a\"b": 2, "it's \\": "x"}`)
		h.exec(fmt.Sprintf(`TRUNCATE "%s"`, table))
		h.fence()
		h.expect(fmt.Sprintf(`SELECT pk, op FROM koldstore.changes_since('"S.é"."%s"')`, table), `{"a\"b": 1, "it's \\": "x"} 3`, `{"a\"b": 2, "it's \\": "x"} 3`)
	}
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// Predicates are judged by a role that may use no schema but koldproxy's, whatever types of other schemas they name.
func TestSchemaThatNobodyElseMayUse(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE SCHEMA private`, `SET search_path = private`, `CREATE TYPE pair AS (a int, b text)`, `CREATE TYPE mood AS ENUM ('sad', 'happy')`,
		`CREATE TABLE t (id int PRIMARY KEY, p pair, m mood, v int)`)
	for i, predicate := range []string{"v > 0", "(p).a > 0", "p <> ROW(0, '')::pair", "m = 'happy'"} {
		h.stream(fmt.Sprint("s", i), "t", predicate)
	}
	_, err := h.app.Exec(t.Context(), `CALL koldstore.create_stream(NULL, 'x', NULL, 't', 't <> ROW(0, NULL, NULL, NULL)::t')`)
	if err == nil || !strings.Contains(err.Error(), "names the row type of its own table") {
		t.Errorf("a predicate that names the row type of its table: %v", err)
	}
	h.exec(`INSERT INTO t VALUES (1, ROW(1, 'b'), 'happy', 1)`, `UPDATE t SET id = 2`, `UPDATE t SET p = ROW(0, ''), m = 'sad', v = 0`, `UPDATE t SET p = ROW(1, 'c'), m = 'happy', v = 1`, `DELETE FROM t`)
	h.fence()
	for i := range 4 {
		h.expect(fmt.Sprintf(`SELECT op, k FROM private._stream_s%d ORDER BY id`, i), "put 1", "delete 1", "put 2", "exit 2", "put 2", "delete 2")
	}
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
	h.expect(`SELECT DISTINCT state FROM koldstore.stream`, "active")
}

// Streams and columns come and go while writers write: no event is lost to a catalog that changed between two statements.
func TestDefinitionsChangeUnderLoad(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ctx := t.Context()
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int)`)
	h.stream("s", "t", "id > 0")
	h.manage("t")
	const rows = 600
	var wg sync.WaitGroup
	conn, err := pgx.ConnectConfig(ctx, h.app.Config())
	must(t, err)
	wg.Go(func() {
		defer conn.Close(context.Background())
		for i := 1; i <= rows; i++ {
			if _, err := conn.Exec(ctx, fmt.Sprintf(`INSERT INTO t (id) VALUES (%d)`, i)); err != nil {
				t.Errorf("insert %d: %v", i, err)
				return
			}
		}
	})
	for i := range 15 {
		h.exec(fmt.Sprintf(`ALTER TABLE t ADD c%d int DEFAULT %d`, i, i))
		h.stream("x", "t", "true")
		h.exec(fmt.Sprintf(`ALTER TABLE t RENAME c%[1]d TO d%[1]d`, i), `CALL koldstore.drop_stream(NULL, 'x')`)
		if i%3 == 0 {
			h.exec(fmt.Sprintf(`ALTER TABLE t DROP d%d`, i))
		}
	}
	wg.Wait()
	h.fence()
	h.expect(`SELECT count(*), count(DISTINCT k), bool_and(op = 'put') FROM _stream_s`, fmt.Sprintf("%d %d t", rows, rows))
	h.expect(`SELECT count(*) FROM koldstore.t__cl`, fmt.Sprint(rows))
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
	h.expect(`SELECT name, state FROM koldstore.stream`, "s active")
	// Documents never show a value under another column's name.
	h.expect(`SELECT count(*) FROM _stream_s, jsonb_each(doc) d WHERE d.key ~ '^[cd][0-9]' AND d.value::text <> substr(d.key, 2)`, "0")
}

// What goes with CASCADE takes the streams along that need it, which say what they have lost; the others go on.
func TestDropsThatCascade(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TYPE mood AS ENUM ('sad', 'happy')`, `CREATE FUNCTION f(int) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 > 0'`,
		`CREATE TABLE t (id int PRIMARY KEY, v int, m mood, w int)`, `CREATE TABLE u (id int PRIMARY KEY)`)
	h.stream("column", "t", "v > 0")
	h.stream("type", "t", "m = 'sad'")
	h.stream("function", "t", "f(w)")
	h.stream("other", "t", "id > 0")
	h.stream("gone", "u", "true")
	h.exec(`INSERT INTO t VALUES (1, 1, 'sad', 1)`)
	h.fence()
	h.exec(`ALTER TABLE t DROP v CASCADE`, `DROP TYPE mood CASCADE`, `DROP FUNCTION f CASCADE`, `DROP TABLE u CASCADE`, `INSERT INTO t VALUES (2, 2)`)
	h.fence()
	const predicate = "broken its predicate was dropped with what it depended on"
	h.expect(`SELECT name, state, reason FROM koldstore.stream ORDER BY name`,
		"column "+predicate, "function "+predicate, "gone broken its table was dropped", "other active NULL", "type "+predicate)
	h.events("other", "put 1", "put 2")
	for _, stream := range []string{"column", "type", "function"} { // what they had stays readable
		h.events(stream, "put 1")
	}
}
