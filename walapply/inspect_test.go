package walapply_test

import (
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// Inspect sees, without an applier, what one would.
func TestInspect(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	inspect := func(want ...string) {
		t.Helper()
		list, err := walapply.Inspect(t.Context(), d.sql, "koldproxy", walapply.OnGapStop)
		if err != nil {
			t.Fatal(err)
		}
		if len(list) != len(want) {
			t.Fatalf("%d problems, want %q: %v", len(list), want, list)
		}
		for i, p := range list {
			if !strings.Contains(p.Error(), want[i]) {
				t.Errorf("problem %q, want %q", p, want[i])
			}
		}
	}
	inspect()
	a := d.applied()
	d.exec(`CREATE TABLE u (id int PRIMARY KEY)`)
	d.exec(`SELECT koldstore.manage_table('u')`)
	inspect()
	d.awaitApplied()
	a.stop()
	inspect()

	d.exec(`ALTER PUBLICATION koldproxy DROP TABLE u`)
	inspect("u: its table is not in publication")
	d.exec(`ALTER PUBLICATION koldproxy ADD TABLE u`)
	d.exec(`ALTER PUBLICATION koldproxy SET (publish = 'insert')`)
	inspect("leaves out kinds of changes")
	d.exec(`ALTER PUBLICATION koldproxy SET (publish = 'insert, update, delete, truncate')`)
	d.exec(`ALTER PUBLICATION koldproxy RENAME TO hidden`)
	inspect("publication koldproxy was dropped")
	d.exec(`ALTER PUBLICATION hidden RENAME TO koldproxy`)
	d.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)
	inspect("does not exist any more")
	d.exec(`UPDATE koldstore.checkpoint SET gap = 'noted before', gap_at = now()`)
	inspect("noted before")
	d.exec(`UPDATE koldstore.checkpoint SET gap = NULL, timeline = 7`)
	inspect("timeline 7")
	d.exec(`UPDATE koldstore.checkpoint SET slot_name = 'koldproxy_1'`)
	inspect("is a copy of that of database template1")
	d.exec(`ALTER SCHEMA koldstore RENAME TO hidden`)
	inspect("koldproxy migrate up")
}
