package integration_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
)

// cancelAfter is how long a statement may sleep before it is cancelled: it runs by then, or is cancelled as soon as it does.
const cancelAfter = 300 * time.Millisecond

func sqlstate(err error) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Sprint(err)
	}
	return pg.Code
}

// plainPgx is what the scripts of testdata/drivers do, with pgx.
func plainPgx(t *testing.T, dsn string) []string {
	t.Helper()
	c := open(t, dsn)
	var lines []string
	show := func(name string, values ...any) { lines = append(lines, line(name, values...)) }

	show("bound", values(t, c, "SELECT $1::int + 1, $2::text, $3::text::numeric::text, NULL::text", 41, "größe", "1.50")...)
	var doubled []any
	for i := range 3 {
		doubled = append(doubled, values(t, c, "SELECT $1::int * 2", i+1)...)
	}
	show("prepared", doubled...)
	show("bytes", hex.EncodeToString(values(t, c, "SELECT $1::bytea", []byte("\x00\xff\x5c\x27"))[0].([]byte)))
	_, err := c.Exec(c.ctx, "SELECT 1 / 0")
	show("error", sqlstate(err))
	_, err = c.Exec(c.ctx, "SELEC 1")
	show("syntax", sqlstate(err))
	c.exec("BEGIN; CREATE TEMP TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); SAVEPOINT a")
	_, unique := c.Exec(c.ctx, "INSERT INTO t VALUES (1, 'b')")
	_, aborted := c.Exec(c.ctx, "SELECT 1")
	c.exec("ROLLBACK TO a")
	c.exec("INSERT INTO t VALUES (2, $1)", "b")
	c.exec("COMMIT")
	show("savepoint", sqlstate(unique), sqlstate(aborted), c.text("SELECT count(*) FROM t"))
	c.exec("BEGIN; DELETE FROM t; ROLLBACK")
	show("rollback", c.text("SELECT count(*) FROM t"))
	_, err = c.CopyFrom(c.ctx, pgx.Identifier{"t"}, []string{"id", "v"}, pgx.CopyFromRows([][]any{{3, "c"}, {4, nil}})) // in binary
	must(t, err)
	var copied bytes.Buffer
	_, err = c.PgConn().CopyTo(c.ctx, &copied, "COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)")
	must(t, err)
	show("copy", anys(strings.Fields(copied.String()))...)
	c.exec("BEGIN; DECLARE large CURSOR FOR SELECT i FROM generate_series(1, 20000) i")
	var fetched [][]string
	for page := c.rows("FETCH 1000 FROM large"); len(page) > 0; page = c.rows("FETCH 1000 FROM large") {
		fetched = append(fetched, page...)
	}
	show("large", count(t, fetched)...)
	c.exec("COMMIT")
	show("streamed", count(t, c.rows("SELECT i FROM generate_series(1, $1::int) i", 20000))...)
	c.exec("LISTEN news")
	c.exec("NOTIFY news, 'payload'")
	n, err := c.WaitForNotification(c.ctx)
	must(t, err)
	show("notify", n.Channel, n.Payload)
	c.notices = nil
	c.exec("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
	show("notice", c.notices[0].Message)
	stop := time.AfterFunc(cancelAfter, func() {
		if err := c.PgConn().CancelRequest(c.ctx); err != nil {
			t.Error(err)
		}
	})
	defer stop.Stop()
	_, err = c.Exec(c.ctx, "SELECT pg_sleep(60)")
	show("cancel", sqlstate(err))
	show("after cancel", c.text("SELECT 1"))
	return lines
}

// line is a line of what a driver prints.
func line(name string, values ...any) string {
	words := make([]string, len(values))
	for i, v := range values {
		if words[i] = fmt.Sprint(v); v == nil {
			words[i] = "NULL"
		}
	}
	return name + " " + strings.Join(words, "|")
}

func anys(words []string) []any {
	list := make([]any, len(words))
	for i, w := range words {
		list[i] = w
	}
	return list
}

// values is the single row of a query that is prepared, with binary results.
func values(t *testing.T, c *client, sql string, args ...any) []any {
	t.Helper()
	rows, err := c.Query(c.ctx, sql, args...)
	must(t, err)
	list, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
	must(t, err)
	return list
}

// count is the number of rows of numbers, and their sum.
func count(t *testing.T, rows [][]string) []any {
	t.Helper()
	sum := 0
	for _, row := range rows {
		i, err := strconv.Atoi(row[0])
		must(t, err)
		sum += i
	}
	return []any{len(rows), sum}
}

// openSQL opens a pool of one session.
func openSQL(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	must(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { must(t, db.Close()) })
	return db
}

// plainSQL is what the scripts of testdata/drivers do, with database/sql.
func plainSQL(t *testing.T, dsn string) []string {
	t.Helper()
	ctx, db := t.Context(), openSQL(t, dsn)
	var lines []string
	show := func(name string, values ...any) { lines = append(lines, line(name, values...)) }
	number := func(q interface {
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	}, query string, args ...any,
	) (n int) {
		t.Helper()
		must(t, q.QueryRowContext(ctx, query, args...).Scan(&n))
		return n
	}

	var text, numeric string
	var sum int
	var null sql.NullString
	must(t, db.QueryRowContext(ctx, "SELECT $1::int + 1, $2::text, $3::numeric, NULL::text", 41, "größe", "1.50").Scan(&sum, &text, &numeric, &null))
	if null.Valid {
		t.Errorf("NULL is %q", null.String)
	}
	show("bound", sum, text, numeric, nil)
	twice, err := db.PrepareContext(ctx, "SELECT $1::int * 2")
	must(t, err)
	var doubled [3]any
	for i := range doubled {
		var n int
		must(t, twice.QueryRowContext(ctx, i+1).Scan(&n))
		doubled[i] = n
	}
	must(t, twice.Close())
	show("prepared", doubled[:]...)
	var raw []byte
	must(t, db.QueryRowContext(ctx, "SELECT $1::bytea", []byte("\x00\xff\x5c\x27")).Scan(&raw))
	show("bytes", hex.EncodeToString(raw))
	_, err = db.ExecContext(ctx, "SELECT 1 / $1::int", 0)
	show("error", sqlstate(err))
	_, err = db.ExecContext(ctx, "SELEC 1")
	show("syntax", sqlstate(err))

	tx, err := db.BeginTx(ctx, nil)
	must(t, err)
	for _, statement := range []string{"CREATE TEMP TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')", "SAVEPOINT a"} {
		_, err := tx.ExecContext(ctx, statement)
		must(t, err)
	}
	_, unique := tx.ExecContext(ctx, "INSERT INTO t VALUES ($1, 'b')", 1)
	_, aborted := tx.ExecContext(ctx, "SELECT 1")
	_, err = tx.ExecContext(ctx, "ROLLBACK TO a")
	must(t, err)
	_, err = tx.ExecContext(ctx, "INSERT INTO t VALUES (2, $1)", "b")
	must(t, err)
	must(t, tx.Commit())
	show("savepoint", sqlstate(unique), sqlstate(aborted), number(db, "SELECT count(*) FROM t"))
	tx, err = db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
	must(t, err)
	_, err = tx.ExecContext(ctx, "DELETE FROM t")
	must(t, err)
	must(t, tx.Rollback())
	show("rollback", number(db, "SELECT count(*) FROM t"))

	rows, err := db.QueryContext(ctx, "SELECT i FROM generate_series(1, $1::int) i", 20000)
	must(t, err)
	n, total := 0, 0
	for rows.Next() {
		var i int
		must(t, rows.Scan(&i))
		n, total = n+1, total+i
	}
	must(t, errors.Join(rows.Err(), rows.Close()))
	show("large", n, total)
	cancelled, cancel := context.WithTimeout(ctx, cancelAfter)
	defer cancel()
	if _, err := db.ExecContext(cancelled, "SELECT pg_sleep(60)"); errors.Is(err, context.DeadlineExceeded) {
		show("cancel", "57014") // the driver tells it so
	}
	show("after cancel", number(db, "SELECT 1"))
	return lines
}

// feedSQL is what the scripts of testdata/drivers do with a feed and a stream, with database/sql.
func feedSQL(t *testing.T, w *tenant) report {
	t.Helper()
	ctx, db := t.Context(), openSQL(t, w.inst.dsn("demo", map[string][]string{"search_path": {w.schema}}))
	r := report{feeds: map[string][]feedRow{}}
	drain := func(query func(ctx context.Context, args ...any) (*sql.Rows, error)) []feedRow {
		t.Helper()
		return drainPages(t, func(since int64) ([]feedRow, error) {
			rows, err := query(ctx, w.table("m"), since, driversPage)
			if err != nil {
				return nil, err
			}
			return scanFeed(rows)
		})
	}
	with := func(q interface {
		QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	},
	) func(ctx context.Context, args ...any) (*sql.Rows, error) {
		return func(ctx context.Context, args ...any) (*sql.Rows, error) {
			return q.QueryContext(ctx, pgxFeed, args...)
		}
	}
	r.feeds["autocommit"] = drain(with(db))
	prepared, err := db.PrepareContext(ctx, pgxFeed)
	must(t, err)
	r.feeds["prepared"] = drain(prepared.QueryContext)
	must(t, prepared.Close())
	tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true, Isolation: sql.LevelRepeatableRead})
	must(t, err)
	r.feeds["read-only transaction"] = drain(with(tx))
	must(t, tx.Commit())

	exec := func(query string) {
		t.Helper()
		_, err := db.ExecContext(ctx, query)
		must(t, err)
	}
	exec("CREATE STREAM own_sql ON m WHEN (id % 2 = 0) WITH (start = 'earliest')")
	exec("CREATE STREAM IF NOT EXISTS own_sql ON m WHEN (id > 0)")
	rows, err := db.QueryContext(ctx, "SHOW STREAMS")
	must(t, err)
	r.columns, err = rows.Columns()
	must(t, err)
	for rows.Next() {
		var name, table, predicate string
		var consumers, lag sql.NullInt64 // a stream of which nothing is known yet
		must(t, rows.Scan(&name, &table, &predicate, &consumers, &lag))
		if name == "own_sql" {
			r.shown = append(r.shown, predicate)
		}
	}
	must(t, errors.Join(rows.Err(), rows.Close()))
	var first string
	must(t, db.QueryRowContext(ctx, "SELECT id FROM _stream_own_sql ORDER BY id LIMIT $1", 1).Scan(&first))
	must(t, db.QueryRowContext(ctx, "SELECT count(*) FROM _stream_own_sql").Scan(&r.events))
	must(t, db.QueryRowContext(ctx, "SELECT count(*) FROM (SELECT id FROM _stream_own_sql ORDER BY id LIMIT $1 AFTER ($2)) x", 1000, first).Scan(&r.after))
	tx, err = db.BeginTx(ctx, nil)
	must(t, err)
	_, err = tx.ExecContext(ctx, "DROP STREAM own_sql")
	must(t, err)
	must(t, tx.Rollback())
	exec("DROP STREAM own_sql")
	_, err = db.ExecContext(ctx, pgxFeed, w.table("m"), -1, driversPage)
	r.refused = sqlstate(err)
	return r
}

func scanFeed(rows *sql.Rows) ([]feedRow, error) {
	var page []feedRow
	for rows.Next() {
		f := feedRow{image: "NULL"}
		var image sql.NullString
		if err := rows.Scan(&f.seq, &f.op, &f.pk, &f.deleted, &image, &f.source); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		if image.Valid {
			f.image = image.String
		}
		page = append(page, f)
	}
	return page, errors.Join(rows.Err(), rows.Close())
}
