package changefeed_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/changefeed/feedtest"
	"github.com/koldproxy/koldproxy/walapply"
)

// dropSlot takes the slot away, as max_slot_wal_keep_size or a failover would.
func (h *host) dropSlot() {
	h.t.Helper()
	h.eventually("the slot is gone", func() bool {
		h.admin(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database() AND active`)
		_, err := h.pool.Exec(h.t.Context(), `SELECT pg_drop_replication_slot(s.slot_name) FROM pg_replication_slots s JOIN koldstore.checkpoint USING (slot_name)`)
		return err == nil
	})
}

// healed waits until the gap has been noticed and the feeds compared.
func (h *host) healed(gaps int) {
	h.t.Helper()
	h.eventually("the gap is noted", func() bool {
		return h.rows(fmt.Sprintf(`SELECT count(*) >= %d FROM koldstore.gap`, gaps))[0] == "t"
	})
	h.fence()
}

// Rows that came, went and changed while there was no slot are in the feed afterwards, and streams show the hole.
func TestGapIsHealed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int)`, `INSERT INTO t SELECT i, i FROM generate_series(1, 100) i`)
	h.manage("t")
	h.stream("s", "t", "v > 0")
	h.fence()
	h.exec(`DELETE FROM t WHERE id = 100`, `UPDATE t SET v = 7 WHERE id = 7`)
	h.fence()
	last := h.rows(`SELECT max(id) FROM _stream_s`)[0]
	h.stopApplier()
	h.dropSlot()
	h.exec(`DELETE FROM t WHERE id <= 3`, `UPDATE t SET v = -1 WHERE id BETWEEN 4 AND 6`, `INSERT INTO t VALUES (100, 1), (101, 1)`,
		`UPDATE t SET id = 200 WHERE id = 50`, `BEGIN; UPDATE t SET v = 0 WHERE id = 8; UPDATE t SET v = 8 WHERE id = 8; COMMIT`)
	before := h.rows(`SELECT watermark FROM koldstore.checkpoint`)[0]
	h.startApplier()
	h.healed(1)
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
	h.expect(fmt.Sprintf(`SELECT op, pk ->> 'id' FROM koldstore.changes_since('t', %s) ORDER BY 1, (pk ->> 'id')::int`, before),
		"1 100", "1 101", "1 200", "2 4", "2 5", "2 6", "3 1", "3 2", "3 3", "3 50")
	h.expect(`SELECT job_type, status, progress FROM koldstore.job ORDER BY created_at`, `seed completed {"rows": 100, "checked": 100}`,
		`heal completed {"rows": 10, "checked": 198}`)
	h.expect(`SELECT m.state, m.heal_step, to_regclass('koldstore.heal_' || m.mirror_oid) FROM koldstore.managed_table m`, "active NULL NULL")
	h.expect(`SELECT state FROM koldstore.show_streams()`, "gap")
	h.expect(`SELECT gaps, gap ->> 'after' = '`+last+`', gap ->> 'reason' ~ 'does not exist any more', (gap ->> 'from_lsn')::pg_lsn < (gap ->> 'to_lsn')::pg_lsn FROM koldstore.stream`, "1 t t t")
	h.expect(`SELECT g ->> 'count', g ->> 'healing', g -> 'last' ->> 'reason' ~ 'does not exist any more' FROM koldstore.gaps() g`, "1 0 t")
	h.exec(`INSERT INTO t VALUES (300, 1)`)
	h.fence()
	h.expect(`SELECT op, k FROM _stream_s ORDER BY id DESC LIMIT 1`, "put 300")
}

// With on_gap = stop nothing happens until somebody wants it.
func TestGapIsHealedWhenAskedFor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.manage("t")
	h.fence()
	h.stopApplier()
	h.dropSlot()
	h.exec(`INSERT INTO t VALUES (1)`)
	h.change = func(c *walapply.Config) { c.OnGap = walapply.OnGapStop }
	h.expect(`SELECT koldstore.heal_gap()`, "f")
	applier := h.run()
	h.eventually("the gap is noted", func() bool { return h.rows(`SELECT gap IS NOT NULL FROM koldstore.checkpoint`)[0] == "t" })
	if _, err := h.app.Exec(t.Context(), `SELECT koldstore.heal_gap()`); err == nil {
		t.Error("anybody may close a gap")
	}
	if applier.Status().Streaming {
		t.Error("it goes on by itself")
	}
	h.expect(`SELECT koldstore.heal_gap()`, "t")
	h.healed(1)
	h.expect(`SELECT id FROM koldstore.t__cl`, "1")
}

// A feed can be compared at any time; a broken one comes back.
func TestHealTable(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v text)`, `INSERT INTO t SELECT i, 'x' FROM generate_series(1, 50) i`)
	h.manage("t")
	h.stream("s", "t", "true")
	h.fence()
	h.admin(`UPDATE koldstore.t__cl SET row_image = '{"no": 1}' WHERE id = 3`, `DELETE FROM koldstore.t__cl WHERE id = 4`, `INSERT INTO koldstore.t__cl VALUES (99, 9, 1, '{}')`)
	h.exec(`SELECT koldstore.heal_table('t')`)
	h.fence()
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
	h.expect(`SELECT gaps FROM koldstore.stream`, "0") // nothing was missed

	h.exec(`ALTER TABLE t DROP CONSTRAINT t_pkey`, `DELETE FROM t WHERE id = 1`, `ALTER TABLE t ADD PRIMARY KEY (id)`)
	h.expect(`SELECT state FROM koldstore.managed_table`, "broken")
	h.exec(`SELECT koldstore.heal_table('t')`, `UPDATE t SET v = 'y' WHERE id = 2`)
	h.fence()
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
	h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL")
}

// Who asks again before a healing has begun gets another job, which ends beside the one that does it: nobody waits for either for ever.
func TestHealTwice(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v text)`, `INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) i`)
	h.manage("t")
	h.fence()
	const twice = `SELECT koldstore.heal_table('t'), koldstore.heal_table('t')`
	const jobs = `SELECT status, count(*) FROM koldstore.job WHERE job_type = 'heal' GROUP BY 1 ORDER BY 1`
	h.exec(twice)
	h.fence()
	h.expect(jobs, "cancelled 1", "completed 1")

	h.exec(`ALTER TABLE t DROP CONSTRAINT t_pkey`, `ALTER TABLE t ADD PRIMARY KEY (id)`)
	h.expect(`SELECT state FROM koldstore.managed_table`, "broken")
	h.exec(twice, `UPDATE t SET v = 'y' WHERE id = 2`)
	h.fence()
	h.expect(jobs, "cancelled 2", "completed 2")
	h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL")
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
}

// Keys of a type of somebody's own are compared as records, and a domain over one is what it is made from.
func TestHealKeysOfOwnTypes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, columns string }{
		{"an enum", `k mood PRIMARY KEY, v int`},
		{"a domain over an enum", `k likes PRIMARY KEY, v int`},
		{"a domain over a domain, beside a number", `k very_much, v int, PRIMARY KEY (v, k)`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.exec(`CREATE TYPE mood AS ENUM ('a', 'b', 'c')`, `CREATE DOMAIN likes AS mood`, `CREATE DOMAIN very_much AS likes`,
				`CREATE TABLE t (`+c.columns+`)`, `INSERT INTO t VALUES ('a', 1), ('b', 2)`)
			h.manage("t")
			h.fence()
			h.admin(`UPDATE koldstore.t__cl SET row_image = '{"no": 1}' WHERE k = 'a'`, `DELETE FROM koldstore.t__cl WHERE k = 'b'`)
			h.exec(`SELECT koldstore.heal_table('t')`)
			h.fence()
			h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL")
			h.expect(`SELECT pk ->> 'k', row_image FROM koldstore.changes_since('t') ORDER BY 1`, `a {"k": "a", "v": 1}`, `b {"k": "b", "v": 2}`)
		})
	}
}

// Slots are lost at random moments, under load, while appliers are stopped and cut off and feeds are being healed already.
// Afterwards the feed is the table and its tombstones.
func TestRandomGaps(t *testing.T) {
	t.Parallel()
	for _, composite := range []bool{false, true} {
		t.Run(fmt.Sprintf("composite key %v", composite), func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			ctx, s := t.Context(), seed(t)
			must(t, feedtest.CreateTable(ctx, h.app, "r", composite))
			keys := []string{"id"}
			if composite {
				keys = []string{"kind", "id"}
			}
			audit, err := feedtest.NewAudit(ctx, h.app, "r", feedtest.Predicate, keys...)
			must(t, err)
			h.stopApplier()
			h.config.SeedRows = 3
			h.startApplier()
			h.stream("s", "r", feedtest.Predicate)
			h.manage("r")
			h.fence()
			trouble := rand.New(rand.NewPCG(s, 7))
			for round := range 4 {
				h.writeHistories(s+uint64(round)*10, 2, 30)
				if trouble.IntN(2) == 0 { // while applying goes on
					h.dropSlotUnderLoad(s + uint64(round))
				} else {
					h.stopApplier()
					h.dropSlot()
					h.writeAlone(s+uint64(round)*10+5, 20)
					h.startApplier()
				}
			}
			h.healed(1)
			must(t, feedtest.CheckFeed(ctx, h.pool, "r", audit.FeedKey(), 5, nil))
			events, err := feedtest.ReadLog(ctx, h.pool, "_stream_s")
			must(t, err)
			for i := 1; i < len(events); i++ {
				if events[i].ID <= events[i-1].ID {
					t.Errorf("event %s comes after %s", events[i].ID, events[i-1].ID)
				}
			}
			h.expect(`SELECT state FROM koldstore.managed_table`, "active")
			h.expect(`SELECT gaps > 0, state FROM koldstore.stream`, "t active")
		})
	}
}

func (h *host) writeAlone(seed uint64, steps int) {
	h.t.Helper()
	history := feedtest.NewHistory("r", 20, seed)
	for range steps {
		must(h.t, history.Step(h.t.Context(), h.app))
	}
}

// dropSlotUnderLoad drops the slot while somebody writes.
func (h *host) dropSlotUnderLoad(seed uint64) {
	h.t.Helper()
	done := make(chan struct{})
	conn, err := h.pool.Acquire(h.t.Context())
	must(h.t, err)
	go func() {
		defer close(done)
		defer conn.Release()
		history := feedtest.NewHistory("r", 20, seed)
		for range 60 {
			if err := history.Step(context.Background(), conn.Conn()); err != nil {
				h.t.Errorf("writer: %v", err)
				return
			}
		}
	}()
	h.dropSlot()
	<-done
}

// Cold rows are compared as well: what is right stays where it is, the rest comes back with a new seq.
func TestColdRowsAreHealed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v numeric)`, `INSERT INTO t SELECT i, 1.50 FROM generate_series(1, 40) i`)
	h.manage("t")
	h.fence()
	h.stopApplier()
	cold := &shelf{}
	for i := range 30 { // 1 to 30 are in cold storage only, 30 as a tombstone
		row := changefeed.PageRow{Seq: koldproxy.Seq(i + 1), Op: koldproxy.OpInsert, PK: json.RawMessage(fmt.Sprintf(`{"id": %d}`, i+1)), Image: json.RawMessage(fmt.Sprintf(`{"v":1.50,"id":%d}`, i+1))}
		if i == 29 {
			row.Op, row.Image = koldproxy.OpDelete, nil
		}
		cold.rows = append(cold.rows, row)
	}
	h.config.Cold, h.config.SeedRows = cold, 4
	h.admin(`DELETE FROM koldstore.t__cl WHERE id <= 30`, `INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256)
		VALUES (gen_random_uuid(), 't'::regclass, 'default', 'k', 'active', 1, 30, 30, '\x00')`)
	h.dropSlot()
	h.exec(`DELETE FROM t WHERE id IN (3, 35)`, `UPDATE t SET v = 2 WHERE id IN (4, 36)`, `UPDATE t SET v = 1.5 WHERE id = 5`, `INSERT INTO t VALUES (41, 0)`)
	h.startApplier()
	h.healed(1)
	h.expect(`SELECT op, id, row_image ->> 'v' FROM koldstore.t__cl WHERE id <= 30 OR id IN (35, 36, 41) ORDER BY id`,
		"3 3 NULL", "2 4 2", "2 5 1.5", "1 30 1.50", "3 35 NULL", "2 36 2", "1 41 0")
	h.expect(`SELECT count(*), state FROM koldstore.t__cl, koldstore.managed_table GROUP BY state`, "15 active")
	h.expect(`SELECT count(*) FROM pg_class WHERE relname LIKE 'heal\_%' AND relnamespace = 'koldstore'::regnamespace`, "0")
}

// A seed that was cancelled leaves a feed that says so, and heal_table brings it back.
func TestCancelledSeed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t SELECT generate_series(1, 500)`)
	h.manage("t")
	h.exec(`SELECT koldstore.cancel_job(seed_job) FROM koldstore.visible_managed_table`)
	h.expect(`SELECT m.state, m.reason, j.status FROM koldstore.managed_table m JOIN koldstore.job j ON j.job_id = m.seed_job`, "broken copying its rows was cancelled cancelled")
	h.startApplier()
	h.exec(`INSERT INTO t VALUES (501)`, `SELECT koldstore.heal_table('t')`)
	h.fence()
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 100, nil))
	h.expect(`SELECT koldstore.cancel_job(seed_job) FROM koldstore.managed_table`, "f")
}

// Nobody can say which columns rows in a hole had; the applier begins with those of today.
func TestColumnsChangeInAHole(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, a text, b text)`, `INSERT INTO t VALUES (1, 'a', 'b')`)
	h.manage("t")
	h.fence()
	h.stopApplier()
	h.dropSlot()
	h.exec(`ALTER TABLE t RENAME a TO c`, `ALTER TABLE t RENAME b TO a`, `ALTER TABLE t RENAME c TO b`, `INSERT INTO t (id, a) VALUES (2, 'new a')`)
	h.startApplier()
	h.healed(1)
	h.exec(`INSERT INTO t (id, b) VALUES (3, 'new b')`)
	h.fence()
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 100, nil))
}
