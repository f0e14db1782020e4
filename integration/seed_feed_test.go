package integration_test

import (
	"fmt"
	"strings"
	"testing"
)

// TestSignatureOfChangesSince: names, types, defaults and result are the contract.
func TestSignatureOfChangesSince(t *testing.T) {
	t.Parallel()
	c := newTenant(t).connect(t)
	const want = "table_name regclass, since_seq bigint DEFAULT 0, limit_rows integer DEFAULT 1000, last_rows integer DEFAULT NULL::integer" +
		" -> TABLE(seq bigint, op smallint, pk jsonb, deleted boolean, row_image jsonb, source text)"
	if got := c.text("SELECT pg_get_function_arguments(oid) || ' -> ' || pg_get_function_result(oid) FROM pg_proc WHERE oid = 'koldstore.changes_since'::regproc"); got != want {
		t.Errorf("changes_since is\n%s\nwant\n%s", got, want)
	}
}

// TestModesOfChangesSince: resume, rewind and from the start, hot, cold and both; what each row says.
func TestModesOfChangesSince(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	messages := w.schema + "_messages"
	c.exec(fmt.Sprintf("CREATE TABLE %s (id bigint PRIMARY KEY, body text)", messages))
	c.exec("SELECT koldstore.manage_table($1::text::regclass)", messages)
	c.exec(fmt.Sprintf("INSERT INTO %s SELECT i, 'first' FROM generate_series(1, 6) i", messages))
	c.exec(fmt.Sprintf("UPDATE %s SET body = 'second' WHERE id = 2", messages))
	c.exec(fmt.Sprintf("DELETE FROM %s WHERE id = 3", messages))
	c.fence()
	columns := func(args string) string {
		var lines []string
		for _, r := range c.rows(fmt.Sprintf("SELECT op, pk ->> 'id', deleted, row_image ->> 'body' FROM koldstore.changes_since(table_name => '%s'::regclass%s)", messages, args)) {
			lines = append(lines, strings.Join(r, " "))
		}
		return strings.Join(lines, ", ")
	}
	sources := func() string {
		return c.text(fmt.Sprintf("SELECT string_agg(source, ' ' ORDER BY seq) FROM koldstore.changes_since('%s')", messages))
	}
	seqs := c.rows(fmt.Sprintf("SELECT seq FROM koldstore.changes_since('%s')", messages))
	// One row for each key, in the order of its last change.
	all := []string{"1 1 f first", "1 4 f first", "1 5 f first", "1 6 f first", "2 2 f second", "3 3 t NULL"}
	check := func() {
		t.Helper()
		if got := columns(", since_seq => 0, limit_rows => 100"); got != strings.Join(all, ", ") {
			t.Fatalf("from the start: %s", got)
		}
		for i, seq := range seqs {
			after := strings.Join(all[i+1:], ", ") // never the row at the cursor itself
			if got := columns(", since_seq => " + seq[0]); got != after {
				t.Errorf("behind row %d: %s", i, got)
			}
			if got := columns(", since_seq => " + seq[0] + ", limit_rows => 2, last_rows => 1"); got != strings.Join(all[i+1:min(i+3, len(all))], ", ") {
				t.Errorf("behind row %d, with last_rows, which does not count then: %s", i, got)
			}
			last := strings.Join(all[len(all)-1-i:], ", ") // the newest, oldest of them first
			if got := columns(fmt.Sprintf(", since_seq => 0, limit_rows => 1000, last_rows => %d", i+1)); got != last {
				t.Errorf("the last %d: %s", i+1, got)
			}
		}
		if got := columns(", limit_rows => 3"); got != strings.Join(all[:3], ", ") {
			t.Errorf("a page of 3: %s", got)
		}
	}
	check()
	if got := sources(); got != "hot hot hot hot hot hot" {
		t.Errorf("sources: %s", got)
	}
	// The mirror itself may be looked at.
	if got := c.text(fmt.Sprintf("SELECT string_agg(id || ' ' || op, ', ' ORDER BY seq) FROM (SELECT id, seq, op FROM koldstore.%s__cl WHERE seq > $1 ORDER BY seq LIMIT 100) m", messages), seqs[2][0]); got != "6 1, 2 2, 3 3" {
		t.Errorf("the mirror: %s", got)
	}
	c.flush(messages)
	// An empty mirror is not the end: the same cursors go on, in cold storage.
	if got := c.text(fmt.Sprintf("SELECT count(*) FROM koldstore.%s__cl", messages)); got != "0" {
		t.Errorf("%s rows in the mirror after a flush", got)
	}
	check()
	if got := sources(); got != "cold cold cold cold cold cold" {
		t.Errorf("sources: %s", got)
	}
	c.exec(fmt.Sprintf("UPDATE %s SET body = 'third' WHERE id = 5", messages))
	c.fence()
	all = append(append(all[:2:2], all[3:]...), "2 5 f third")
	seqs = c.rows(fmt.Sprintf("SELECT seq FROM koldstore.changes_since('%s')", messages))
	check()
	if got := sources(); got != "cold cold cold cold cold hot" {
		t.Errorf("sources: %s", got)
	}
}
