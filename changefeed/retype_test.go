package changefeed_test

import (
	"testing"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// Statements that rewrite rows without a change of theirs in the log: the feed is compared with the table, in its place in the
// log; streams whose rows have changed show a hole.
func TestSilentRewrites(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, sql, hole string }{
		{"type", `ALTER TABLE t ALTER v TYPE text USING 'v' || v`, "1"},
		{"type of the same bytes", `ALTER TABLE t ALTER note TYPE varchar(40)`, "1"},
		{"default", `ALTER TABLE t ADD extra int DEFAULT 7`, "0"},
		{"volatile default", `ALTER TABLE t ADD extra uuid DEFAULT gen_random_uuid()`, "0"},
		{"identity", `ALTER TABLE t ADD extra int GENERATED ALWAYS AS IDENTITY`, "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int, note text)`)
			h.stream("s", "t", "id > 0")
			h.manage("t")
			h.exec(`INSERT INTO t SELECT i, i, 'n' FROM generate_series(1, 20) i`)
			h.fence()
			h.stopApplier()
			h.exec(`INSERT INTO t VALUES (21, 21, 'before')`, c.sql, `INSERT INTO t (id, v, note) VALUES (22, 22, 'after')`, `DELETE FROM t WHERE id = 1`)
			h.startApplier()
			h.eventually("the heal has begun", func() bool { return h.rows(`SELECT count(*) FROM koldstore.job WHERE job_type = 'heal'`)[0] == "1" })
			h.fence()
			must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
			h.expect(`SELECT gaps, state FROM koldstore.stream`, c.hole+" active")
			h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL")
			h.expect(`SELECT op, k FROM _stream_s ORDER BY id DESC LIMIT 3`, "delete 1", "put 22", "put 21")
		})
	}
}
