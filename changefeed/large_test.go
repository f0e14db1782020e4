package changefeed_test

import (
	"testing"
	"time"
)

// Large values take PostgreSQL's own code longer than a row may take. That is no reason to lose them, much less the feed.
func TestLargeValuesBreakNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.config.EvalTimeout = 50 * time.Millisecond
	h.exec(`CREATE TABLE w (id int PRIMARY KEY, a text, b int, c json)`) // images of json come from the server
	h.startApplier()
	h.manage("w")
	h.stream("s", "w", "b > 1 OR md5(upper(a)) IS NOT NULL")
	h.fence()
	for _, sql := range []string{
		`INSERT INTO w SELECT 1, repeat('r', 9000000)`, `INSERT INTO w SELECT 2, repeat('s', 9000000)`,
		`INSERT INTO w SELECT 3, repeat('t', 9000000)`,
	} {
		h.exec(sql)
	}
	h.fence()
	h.events("s", "put 1", "put 2", "put 3")
	h.expect(`SELECT id, length(row_image ->> 'a') FROM koldstore.w__cl ORDER BY id`, "1 9000000", "2 9000000", "3 9000000")
	h.expect(`SELECT state, reason FROM koldstore.stream UNION ALL SELECT state, reason FROM koldstore.managed_table`, "active NULL", "active NULL")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}
