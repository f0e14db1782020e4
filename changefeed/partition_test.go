package changefeed_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
	"github.com/koldproxy/koldproxy/walapply"
)

// A partitioned table is captured as a whole, whatever its partitions look like and whoever makes them.
func TestPartitionedTable(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.change = func(c *walapply.Config) { c.WatchInterval = 50 * time.Millisecond }
	h.startApplier()
	h.exec(`CREATE TABLE p (id int, region text, v int, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region)`,
		`CREATE TABLE p_eu PARTITION OF p FOR VALUES IN ('eu')`,
		`CREATE TABLE p_us (note text, gone int, v int, region text NOT NULL, id int NOT NULL)`, // another order of columns
		`ALTER TABLE p_us DROP gone`, `ALTER TABLE p ATTACH PARTITION p_us FOR VALUES IN ('us')`,
		`INSERT INTO p VALUES (1, 'eu', 1, 'a'), (2, 'us', 2, 'b')`)
	h.manage("p")
	h.stream("s", "p", "v > 0", "pre_image", "true")
	feed := func() {
		t.Helper()
		h.fence()
		must(t, feedtest.CheckFeed(t.Context(), h.pool, "p", "jsonb_build_object('region', t.region, 'id', t.id)", 7, nil))
	}
	feed()
	h.exec(`INSERT INTO p VALUES (3, 'us', 3, 'c')`, `UPDATE p SET v = 4 WHERE id = 1`, `DELETE FROM p WHERE id = 2`,
		`UPDATE p SET region = 'eu' WHERE id = 3`, // moves to another partition
		`CREATE TABLE p_asia PARTITION OF p FOR VALUES IN ('asia')`, `INSERT INTO p VALUES (5, 'asia', 5, repeat('x', 9000))`,
		`UPDATE p SET v = 6 WHERE id = 5`, `UPDATE p SET v = 0 WHERE id = 5`, `DELETE FROM p_asia`)
	feed()
	h.expect(`SELECT op, k ->> 'id', k ->> 'region', doc ->> 'v', old ->> 'v', length(doc ->> 'note') FROM _stream_s ORDER BY id`,
		"put 3 us 3 NULL 1", "put 1 eu 4 1 1", "delete 2 us 2 2 1", "delete 3 us 3 3 1", "put 3 eu 3 NULL 1",
		"put 5 asia 5 NULL 9000", "put 5 asia 6 5 9000", "exit 5 asia 0 6 9000")

	// What no change says is compared: partitions that come with rows, go, or are emptied.
	for _, step := range []struct{ sql, want string }{
		{`CREATE TABLE p_af (LIKE p INCLUDING ALL); INSERT INTO p_af VALUES (10, 'af', 1, 'z'); ALTER TABLE p ATTACH PARTITION p_af FOR VALUES IN ('af')`, "added"},
		{`TRUNCATE p_af`, "truncated"},
		{`INSERT INTO p VALUES (11, 'af', 1, 'z'); ALTER TABLE p DETACH PARTITION p_af`, "taken away"},
		{`DROP TABLE p_us`, "taken away"},
	} {
		before := h.rows(`SELECT coalesce(max(gap_id), 0) FROM koldstore.gap`)[0]
		h.exec(step.sql)
		feed() // the fence waits for the noticing
		h.expect(fmt.Sprintf(`SELECT count(*) > 0 FROM koldstore.gap WHERE gap_id > %s AND reason LIKE '%%%s%%'`, before, step.want), "t")
	}
	h.exec(`TRUNCATE p`)
	feed()
	h.expect(`SELECT count(*) FROM (SELECT DISTINCT ON (k) op FROM _stream_s ORDER BY k, id DESC) x WHERE op = 'put'`, "0")
	h.exec(`DROP TABLE p_eu`, `SELECT koldstore.unmanage_table('p')`)
	h.admin(`CALL koldstore.drop_stream('public', 's')`)
	h.expect(`SELECT relname, relreplident FROM pg_class WHERE relname IN ('p', 'p_asia') ORDER BY 1`, "p d", "p_asia d")
}

// Random histories on a table in partitions, with an applier that suffers.
func TestRandomHistoriesOfPartitions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ctx, s := t.Context(), seed(t)
	must(t, feedtest.CreateTable(ctx, h.app, "flat", true))
	h.exec(`CREATE TABLE r (LIKE flat INCLUDING ALL) PARTITION BY HASH (id)`)
	for i := range 3 {
		h.exec(fmt.Sprintf(`CREATE TABLE r%d PARTITION OF r FOR VALUES WITH (MODULUS 3, REMAINDER %[1]d)`, i))
	}
	audit, err := feedtest.NewAudit(ctx, h.app, "r", feedtest.Predicate, "kind", "id")
	must(t, err)
	h.stream("s", "r", feedtest.Predicate)
	h.manage("r")
	h.writeHistories(s, 3, 100)
	h.fence()
	must(t, feedtest.CheckFold(context.Background(), h.pool, "_stream_s", "r", feedtest.Predicate, audit.StreamKey(), true))
	must(t, feedtest.CheckFeed(ctx, h.pool, "r", audit.FeedKey(), 7, nil))
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}
