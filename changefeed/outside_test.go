package changefeed_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/walapply"
)

// Where there are no event triggers, and nobody writes, what others do to logs, mirrors and tables is noticed all the same.
func TestChangesFromOutsideAreNoticedWithoutEventTriggers(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	registry := prometheus.NewRegistry()
	h.counts = changefeed.NewMetrics(registry)
	h.change = func(c *walapply.Config) { c.WatchInterval = 50 * time.Millisecond }
	h.startApplier()
	h.admin(`DO $$ DECLARE e record; BEGIN FOR e IN SELECT evtname FROM pg_event_trigger WHERE evtname ~ '^koldproxy_' LOOP EXECUTE format('DROP EVENT TRIGGER %I', e.evtname); END LOOP; END $$`)

	type outside struct {
		name, by, reason string
		admin            bool // as an administrator; the owner of the schema may not
		managed          bool // what it is done to: a managed table, or a stream
	}
	dropped := "its table, log or predicate was dropped"
	all := []outside{
		{name: "log", by: `DROP TABLE _stream_log`, reason: dropped},
		{name: "source", by: `DROP TABLE t_source CASCADE`, reason: dropped},
		{name: "predicate", by: `ALTER TABLE t_predicate DROP COLUMN v CASCADE`, reason: dropped},
		{name: "key", by: `ALTER TABLE t_key DROP CONSTRAINT t_key_pkey`, reason: "the primary key of its table was dropped"},
		{name: "identity", by: `ALTER TABLE t_identity REPLICA IDENTITY DEFAULT`, reason: "the replica identity of its table was changed"},
		{name: "generated", by: `ALTER TABLE t_generated ADD g int GENERATED ALWAYS AS (1) STORED`, reason: "its table has a generated column now, which this version does not support"},
		{name: "heir", by: `CREATE TABLE child () INHERITS (t_heir)`, reason: "its table is part of an inheritance tree now, which this version does not support"},
		{name: "m_source", by: `DROP TABLE t_m_source`, reason: "the table was dropped", managed: true},
		{name: "m_mirror", by: `DO $$ BEGIN EXECUTE 'DROP TABLE ' || (SELECT m.mirror_oid::regclass FROM koldstore.managed_table m WHERE m.table_name = 't_m_mirror'); END $$`, reason: "its mirror was dropped", managed: true, admin: true},
		{name: "m_key", by: `ALTER TABLE t_m_key DROP CONSTRAINT t_m_key_pkey`, reason: "the primary key of its table was dropped", managed: true},
		{name: "m_type", by: `ALTER TABLE t_m_type ALTER id TYPE bigint`, reason: "the type of a column of its primary key was changed", managed: true},
	}
	for _, o := range all {
		h.exec(fmt.Sprintf(`CREATE TABLE t_%s (id int PRIMARY KEY, v int)`, o.name))
		if o.managed {
			h.manage("t_" + o.name)
		} else {
			h.stream(o.name, "t_"+o.name, "v > 0")
		}
	}
	h.exec(`CREATE TABLE kept (id int PRIMARY KEY, v int)`)
	h.stream("kept", "kept", "v > 0")
	h.fence()
	for _, o := range all {
		if o.admin {
			h.admin(o.by)
		} else {
			h.exec(o.by)
		}
		sql, name := `SELECT state, coalesce(reason, '') FROM koldstore.stream WHERE name = $1`, o.name
		if o.managed {
			sql, name = `SELECT state, coalesce(reason, '') FROM koldstore.managed_table WHERE table_name = $1`, "t_"+o.name
		}
		h.eventually(o.by+" is noticed", func() bool { return h.rows(sql, name)[0] == "broken "+o.reason })
	}
	h.exec(`ALTER TABLE kept ADD more int`)
	h.eventually("a column is noticed", func() bool {
		return h.rows(`SELECT jsonb_array_length(shape) FROM koldstore.published_table WHERE table_oid = 'kept'::regclass`)[0] == "3"
	})
	h.expect(`SELECT state FROM koldstore.stream WHERE name = 'kept'`, "active")
	h.exec(`INSERT INTO kept VALUES (1, 1, 1)`)
	h.fence()
	h.expect(`SELECT doc FROM _stream_kept`, `{"v": 1, "id": 1, "more": 1}`)
	if got := series(t, registry, "koldproxy_changefeed_broken_total")[""]; got < 5 {
		t.Errorf("%v broken streams and feeds were counted", got)
	}
}
