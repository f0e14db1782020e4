package changefeed_test

import "testing"

// A position of another stream, or of one that had the name before, is none behind which nothing is missing.
func TestPositionsFromBeforeAStream(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	h.exec(`INSERT INTO t VALUES (1)`)
	h.fence()
	before := h.rows(`SELECT id FROM _stream_s`)[0]
	h.expect(`SELECT id < koldstore.stream_floor('s') FROM _stream_s`, "f")
	h.exec(`CALL koldstore.drop_stream(NULL, 's')`, `INSERT INTO t VALUES (2)`)
	h.stream("s", "t", "true")
	h.stream("all", "t", "true", "start", "earliest")
	h.exec(`INSERT INTO t VALUES (3)`)
	h.fence()
	h.expect(`SELECT '`+before+`' < koldstore.stream_floor('s'), id < koldstore.stream_floor('s'), koldstore.stream_floor('all') FROM _stream_s`, "t f NULL")
}

// A child table's rows are shown by its parent and are not in the log as the parent's: what follows the parent says so.
func TestChildTables(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, table := range []string{"a", "b", "c"} {
		h.exec(`CREATE TABLE ` + table + ` (id int PRIMARY KEY)`)
		h.stream("s_"+table, table, "true")
	}
	h.manage("a")
	h.fence()
	h.exec(`CREATE TABLE child () INHERITS (a)`, `CREATE TABLE stepchild (LIKE b)`, `ALTER TABLE stepchild INHERIT b`)
	const why = "broken its table is part of an inheritance tree now, which this version does not support"
	h.expect(`SELECT name, state, reason FROM koldstore.stream ORDER BY name`, "s_a "+why, "s_b "+why, "s_c active NULL")
	h.expect(`SELECT state FROM koldstore.managed_table`, "broken")
	h.expect(`SELECT name, lag FROM koldstore.show_streams('{"public.s_a": {"lag": 0}, "public.s_c": {"lag": 0}}')`, "s_a NULL", "s_b NULL", "s_c 0")
}
