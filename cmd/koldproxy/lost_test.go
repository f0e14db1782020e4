package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// TestForgetSegmentBringsRowsBack: when an object is lost for good, what it held and the table still has comes as new changes, what
// was deleted stays deleted, cursors that may have missed a delete are refused, and flushes go on.
func TestForgetSegmentBringsRowsBack(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, dsn := i.serve()
	conn := connectTo(t, dsn)
	do(t, conn, "CREATE TABLE notes (id int PRIMARY KEY, body text); SELECT koldstore.manage_table('notes')")
	const cold = "SELECT max(max_seq) FROM koldstore.segment WHERE state = 'active'"
	var ends []int64
	for _, sql := range []string{
		"INSERT INTO notes SELECT n, 'first' FROM generate_series(1, 5) n",
		"DELETE FROM notes WHERE id = 1; UPDATE notes SET body = 'second' WHERE id = 2; INSERT INTO notes VALUES (6, 'second')",
		"INSERT INTO notes VALUES (7, 'third')",
	} {
		do(t, conn, sql)
		do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
		i.must("flush", "notes", "--force", "--wait")
		ends = append(ends, ask1[int64](t, conn, cold))
	}
	p.stop(syscall.SIGTERM)
	direct := connectTo(t, i.dsn)
	lost := ask1[string](t, direct, "SELECT segment_id::text FROM koldstore.segment WHERE state = 'active' AND tombstones > 0")
	object := ask1[string](t, direct, "SELECT object_key FROM koldstore.segment WHERE segment_id = '"+lost+"'")
	if err := os.Remove(filepath.Join(filepath.Dir(i.socket), "cold", object)); err != nil {
		t.Fatal(err)
	}

	p, dsn = i.serve()
	conn = connectTo(t, dsn)
	fails := func(sql, code string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		if pe, ok := errors.AsType[*pgconn.PgError](err); !ok || pe.Code != code {
			t.Errorf("%s: %v, want %s", sql, err, code)
		}
	}
	fails("SELECT * FROM koldstore.changes_since('notes')", "KS002")
	do(t, conn, "SELECT koldstore.forget_segment('"+lost+"')")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	state := func(since string) string {
		t.Helper()
		return ask1[string](t, conn, "SELECT string_agg(format('%s %s', pk ->> 'id', row_image ->> 'body'), ', ' ORDER BY pk ->> 'id') FROM koldstore.changes_since('notes', "+since+")")
	}
	if got, want := state("0"), "2 second, 3 first, 4 first, 5 first, 6 second, 7 third"; got != want {
		t.Errorf("the feed has %s, want %s", got, want)
	}
	fails("SELECT * FROM koldstore.changes_since('notes', "+strconv.FormatInt(ends[0], 10)+")", "KS001")
	// With what was below the floor, where the cursors of a reader who begins anew would be refused.
	if got, want := state(strconv.FormatInt(ends[2], 10)), "2 second, 3 first, 4 first, 5 first, 6 second"; got != want {
		t.Errorf("after the last flush the feed has %s, want %s", got, want)
	}
	after, pages := int64(0), 0
	for ; ; pages++ {
		var next *int64
		if err := conn.QueryRow(t.Context(), "SELECT max(seq) FROM koldstore.changes_since('notes', $1, 1)", after).Scan(&next); err != nil {
			t.Fatalf("from the beginning in pages of one row, after %d: %v", after, err)
		}
		if next == nil {
			break
		}
		after = *next
	}
	if pages != 6 {
		t.Errorf("%d pages of one row", pages)
	}
	do(t, conn, "UPDATE notes SET body = 'fourth' WHERE id = 6")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	i.must("flush", "notes", "--force", "--wait")
	i.must("verify", "notes")
	if got, want := state("0"), "2 second, 3 first, 4 first, 5 first, 6 fourth, 7 third"; got != want {
		t.Errorf("the feed has %s, want %s", got, want)
	}
	p.stop(syscall.SIGTERM)
}
