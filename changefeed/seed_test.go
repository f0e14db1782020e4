package changefeed_test

import (
	"fmt"
	"testing"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// A table with rows gets its mirror while writers write into it and the applier is stopped, started and cut off: live changes
// win over the seed, and no row is missing.
func TestSeedUnderConcurrentWriters(t *testing.T) {
	t.Parallel()
	for _, composite := range []bool{false, true} {
		t.Run(fmt.Sprintf("composite key %v", composite), func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			ctx := t.Context()
			s := seed(t)
			must(t, feedtest.CreateTable(ctx, h.app, "r", composite))
			keys := []string{"id"}
			if composite {
				keys = []string{"kind", "id"}
			}
			audit, err := feedtest.NewAudit(ctx, h.app, "r", feedtest.Predicate, keys...)
			must(t, err)
			h.exec(`INSERT INTO r (id, v, kind) SELECT i, i % 100, 'k' || i % 3 FROM generate_series(1, 1000) i`, `DELETE FROM r WHERE id % 7 = 0`, `TRUNCATE r_audit`)
			h.stopApplier()
			h.config.SeedRows = 20
			h.startApplier()
			h.manage("r")
			h.stream("s", "r", feedtest.Predicate, "start", "earliest")
			h.writeHistories(s, 2, 100)
			h.fence()
			ever, err := audit.Keys(ctx, h.pool)
			must(t, err)
			must(t, feedtest.CheckFeed(ctx, h.pool, "r", audit.FeedKey(), 100, nil))
			must(t, feedtest.CheckFold(ctx, h.pool, "_stream_s", "r", feedtest.Predicate, audit.StreamKey(), true))
			// A key that was deleted before its seed page came has no tombstone: nobody has ever seen it in the feed. Every other has.
			feed, err := feedtest.DrainFeed(ctx, h.pool, "r", 100)
			must(t, err)
			if len(feed) < len(ever)/2 {
				t.Errorf("%d rows in the feed of a table that has had %d keys", len(feed), len(ever))
			}
			h.expect(`SELECT m.state, j.status, j.error FROM koldstore.managed_table m JOIN koldstore.job j ON j.job_id = m.seed_job`, "active completed NULL")
			h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
		})
	}
}

// The seed of a still table: every row once, op 1, in pages that a restart does not repeat.
func TestSeedGoesOnAfterRestart(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE u (a text COLLATE "C", b numeric, v int, PRIMARY KEY (b, a))`,
		`INSERT INTO u SELECT 'k"' || i, i % 5 + 0.50, i FROM generate_series(1, 1000) i`)
	h.stopApplier()
	h.config.SeedRows = 7
	h.startApplier()
	h.manage("u")
	for range 5 {
		before := h.rows(`SELECT coalesce(seed_key, '') FROM koldstore.managed_table`)[0]
		h.eventually("the seed moves", func() bool {
			return h.rows(`SELECT coalesce(seed_key, '') FROM koldstore.managed_table`)[0] != before
		})
		h.stopApplier()
		h.startApplier()
	}
	h.fence()
	h.expect(`SELECT count(*), count(DISTINCT seq), min(op), max(op), bool_and(m.row_image = to_jsonb(u.*)) FROM koldstore.u__cl m JOIN u USING (a, b)`, "1000 1000 1 1 t")
	h.expect(`SELECT j.status, j.progress, j.started_at <= j.ended_at FROM koldstore.job j`, `completed {"rows": 1000, "checked": 1000} t`)
	h.expect(`SELECT bool_and(ordered) FROM (SELECT seq > lag(seq, 1, 0::bigint) OVER (ORDER BY b, a) AS ordered FROM koldstore.u__cl) x`, "t")
	h.expect(`SELECT max(m.seq) <= max(c.watermark) FROM koldstore.u__cl m, koldstore.checkpoint c`, "t")
}

// An empty table is seeded as well.
func TestSeedOfAnEmptyTable(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE u (id int PRIMARY KEY)`)
	h.manage("u")
	h.fence()
	h.expect(`SELECT m.state, j.status, j.progress FROM koldstore.managed_table m JOIN koldstore.job j ON j.job_id = m.seed_job`, `active completed {"rows": 0, "checked": 0}`)
}

// Rows that do not become JSON are in quarantine; the others are in the mirror.
func TestSeedSkipsBadRows(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE j (id int PRIMARY KEY, a json)`, `INSERT INTO j SELECT i, CASE WHEN i IN (1, 50, 51, 100) THEN '"\u0000"' ELSE '1' END::json FROM generate_series(1, 100) i`)
	h.manage("j")
	h.fence()
	h.expect(`SELECT count(*) FROM koldstore.j__cl`, "96")
	h.expect(`SELECT (row_text::j).id, sqlstate FROM koldstore.quarantine ORDER BY seq`, "1 22P05", "50 22P05", "51 22P05", "100 22P05")
	h.expect(`SELECT status, progress FROM koldstore.job`, `completed {"rows": 96, "checked": 100}`)
}
