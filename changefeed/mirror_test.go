package changefeed_test

import "testing"

// What a mirror is likely to have is updated, what it is likely not to have is copied in. Neither guess has to be right.
func TestMirrorOfManyKeys(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (name text, no int, v jsonb, PRIMARY KEY (name, no))`)
	h.manage("t")
	const rows = `SELECT format(E'%s\t\\n"\n\r\\', g), g, jsonb_build_object('a', E'tab\t back\\ line\n', 'n', g) FROM generate_series(1, 1000) g`
	same := func() {
		t.Helper()
		h.fence()
		h.expect(`SELECT count(*), count(*) FILTER (WHERE m.row_image = to_jsonb(t)), count(DISTINCT m.seq) FROM koldstore.t__cl m JOIN t USING (name, no) WHERE m.op <> 3`, "1000 1000 1000")
		h.expect(`SELECT count(*) FROM koldstore.t__cl m WHERE m.op <> 3 AND NOT EXISTS (SELECT FROM t WHERE t.name = m.name AND t.no = m.no)`, "0")
	}
	h.exec(`INSERT INTO t ` + rows)
	same()
	h.exec(`BEGIN; INSERT INTO t SELECT 'gone', g FROM generate_series(1, 1000) g; DELETE FROM t WHERE name = 'gone'; COMMIT`)
	same()
	h.expect(`SELECT count(*), bool_and(op = 3 AND row_image IS NULL) FROM koldstore.t__cl WHERE name = 'gone'`, "1000 t")

	// Tombstones are where new keys are expected, again and again.
	for range 2 {
		h.exec(`DELETE FROM t`)
		h.exec(`INSERT INTO t ` + rows)
		same()
	}
	// Rows that went to cold storage are where standing ones are expected.
	h.fence()
	h.admin(`DELETE FROM koldstore.t__cl WHERE no % 2 = 0`)
	h.exec(`UPDATE t SET v = v || '{"b": 1}'`)
	same()
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}
