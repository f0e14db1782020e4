package changefeed_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// A table whose cold rows cannot be read keeps nobody else waiting, whatever wants to read them, and goes on when they can be.
func TestUnreadableColdRowsStopTheirTableOnly(t *testing.T) {
	t.Parallel()
	lost := koldproxy.Errorf(koldproxy.CodeColdUnreadable, "cold segment 7 is missing")
	for _, tt := range []struct {
		name   string
		begin  string
		err    error
		silent bool
	}{
		{"heal, missing", `SELECT koldstore.heal_table('sc')`, lost, false},
		{"heal, silent", `SELECT koldstore.heal_table('sc')`, nil, true},
		{"truncate, missing", `TRUNCATE sc`, lost, false},
		{"truncate, silent", `TRUNCATE sc`, nil, true},
		{"gap, missing", "", lost, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.exec(`CREATE TABLE sc (id int PRIMARY KEY)`, `INSERT INTO sc VALUES (1)`, `CREATE TABLE p (id int PRIMARY KEY)`)
			h.manage("sc")
			h.manage("p")
			h.stream("s", "p", "true")
			h.fence()
			h.stopApplier()
			cold := &shelf{rows: []changefeed.PageRow{{Seq: 1, Op: koldproxy.OpInsert, PK: json.RawMessage(`{"id": 1}`), Image: json.RawMessage(`{"id":1}`)}}}
			cold.fail(tt.err, tt.silent)
			h.config.Cold = cold
			h.admin(`DELETE FROM koldstore.sc__cl`, `INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256)
				VALUES (gen_random_uuid(), 'sc'::regclass, 'default', 'k', 'active', 1, 1, 1, '\x00')`)
			if tt.begin == "" {
				h.dropSlot()
			} else {
				h.exec(tt.begin)
			}
			h.startApplier()
			h.eventually("the healing has begun", func() bool {
				return h.rows(`SELECT state = 'healing' AND heal_step = 'cold' FROM koldstore.managed_table WHERE table_oid = 'sc'::regclass`)[0] == "t"
			})
			h.exec(`INSERT INTO p VALUES (2)`)
			h.eventually("the other table goes on", func() bool {
				return h.rows(`SELECT count(*) FROM _stream_s`)[0] == "1" && h.rows(`SELECT count(*) FROM koldstore.p__cl`)[0] == "1"
			})
			if s := h.applier.Status(); s.Err != nil {
				t.Errorf("applying fails: %v", s.Err)
			}
			if !tt.silent {
				const why = "cold segment 7 is missing"
				h.eventually("the job says why", func() bool {
					return h.rows(`SELECT count(*) FROM koldstore.job j WHERE j.job_type = 'heal' AND j.status <> 'completed' AND j.error ~ $1 AND j.error ~ 'cancel_job'`, why)[0] == "1"
				})
				h.expect(`SELECT koldstore.table_status('sc') ->> 'state', koldstore.table_status('sc') ->> 'reason' ~ '`+why+`'`, "healing t")
				h.fence() // for everybody else
			}
			cold.fail(nil, false)
			if tt.silent { // a new applier does not wait for what an old one has asked for
				h.stopApplier()
				h.startApplier()
			}
			h.eventually("the table is healed", func() bool {
				return h.rows(`SELECT state FROM koldstore.managed_table WHERE table_oid = 'sc'::regclass`)[0] == "active"
			})
			h.fence()
			h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL", "active NULL")
			h.expect(`SELECT count(*) FROM koldstore.job WHERE error IS NOT NULL OR status <> 'completed'`, "0")
			if tt.begin == "TRUNCATE sc" {
				h.expect(`SELECT id, op FROM koldstore.sc__cl`, "1 3")
			} else {
				h.expect(`SELECT count(*) FROM koldstore.sc__cl`, "0")
			}
			must(t, feedtest.CheckFeed(t.Context(), h.pool, "p", "jsonb_build_object('id', t.id)", 100, nil))
		})
	}
}

// The same for whatever else goes wrong with one table or stream: here their job cannot be written.
func TestFailingSeedsStopTheirTableOnly(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE a (id int PRIMARY KEY)`, `INSERT INTO a VALUES (1)`, `CREATE TABLE b (id int PRIMARY KEY)`, `INSERT INTO b VALUES (1)`)
	h.admin(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no' USING ERRCODE = '58030'; END $$`,
		`CREATE TRIGGER refuse BEFORE UPDATE ON koldstore.job FOR EACH ROW WHEN (NEW.progress <> OLD.progress AND NEW.table_oid::text = '`+h.rows(`SELECT 'a'::regclass::oid`)[0]+`') EXECUTE FUNCTION public.refuse()`)
	h.manage("a")
	made := make(chan error)
	go func() { // who makes a stream waits for its backfill
		_, err := h.pool.Exec(context.Background(), `CALL koldstore.create_stream(NULL, 'sa', NULL, 'a', 'true', false, '{"start": "earliest"}')`)
		made <- err
	}()
	h.eventually("the first stream has begun", func() bool { return h.rows(`SELECT count(*) FROM koldstore.stream WHERE state = 'seeding'`)[0] == "1" })
	h.manage("b")
	h.stream("sb", "b", "true", "start", "earliest")
	h.eventually("the other table is seeded", func() bool {
		return h.rows(`SELECT string_agg(m.state, ' ' ORDER BY m.table_oid) = 'seeding active' FROM koldstore.managed_table m`)[0] == "t"
	})
	h.eventually("the other stream is backfilled", func() bool {
		return h.rows(`SELECT string_agg(s.state, ' ' ORDER BY s.name) = 'seeding active' FROM koldstore.stream s`)[0] == "t"
	})
	h.eventually("the jobs say why", func() bool {
		return h.rows(`SELECT count(*) FROM koldstore.job WHERE error ~ '58030'`)[0] == "2"
	})
	if s := h.applier.Status(); s.Err != nil {
		t.Errorf("applying fails: %v", s.Err)
	}
	h.admin(`DROP TRIGGER refuse ON koldstore.job`)
	must(t, <-made)
	h.eventually("all are done", func() bool {
		return h.rows(`SELECT count(*) FROM koldstore.job WHERE status = 'completed' AND error IS NULL`)[0] == "4"
	})
	h.expect(`SELECT state, reason FROM koldstore.managed_table UNION ALL SELECT state, reason FROM koldstore.stream`, "active NULL", "active NULL", "active NULL", "active NULL")
	h.events("sa", "put 1")
}
