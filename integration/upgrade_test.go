package integration_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// upgrade is a service with a configuration for the commands that run beside `serve`.
type upgrade struct {
	*service
	t      *testing.T
	config string
}

func newUpgrade(t *testing.T) *upgrade {
	t.Helper()
	u := &upgrade{service: newService(t, localpg.TestCluster(t), true), t: t, config: filepath.Join(t.TempDir(), configName)}
	text := fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [%q]\n[cold]\nurl = %q\n", u.cluster.DSN(u.database, u.role, u.password), u.database, "file://"+u.cold)
	must(t, os.WriteFile(u.config, []byte(text), 0o600))
	return u
}

// migrate runs `koldproxy migrate` and returns what it prints and whether it succeeded.
func (u *upgrade) migrate(args ...string) (string, bool) {
	u.t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(u.t.Context(), binary, append([]string{"migrate", "--config", u.config}, args...)...)
	cmd.Env = append(os.Environ(), noRaceSleep)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err == nil
}

func (u *upgrade) mustMigrate(args ...string) {
	u.t.Helper()
	if out, ok := u.migrate(args...); !ok {
		u.t.Fatalf("migrate %v: %s", args, out)
	}
}

// version is what `migrate status` says.
func (u *upgrade) version() (version, newest int) {
	u.t.Helper()
	out, ok := u.migrate("status", "--json")
	var states map[string]struct{ Version, Newest int }
	if err := json.Unmarshal([]byte(out), &states); err != nil || !ok {
		u.t.Fatalf("migrate status: %v %s", err, out)
	}
	return states[u.database].Version, states[u.database].Newest
}

// TestUpgrade goes through the versions of the catalog: a stream and a feed that were made under an older one go on under the newest, with
// what they had, hot and cold. Without KOLDPROXY_TEST_LONG only the last step is taken.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	u := newUpgrade(t)
	u.mustMigrate("up")
	_, newest := u.version()
	inst := u.serve(t) // makes the slot
	must(t, inst.stop(syscall.SIGTERM))
	last := newest - 1
	if longTests {
		last = migrations.FirstWhole
	}
	direct := open(t, u.cluster.DSN(u.database, u.app, u.password))
	direct.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); INSERT INTO orders SELECT i, i * 100 FROM generate_series(1, 30) i")
	for v := newest - 1; v >= last; v-- {
		u.mustMigrate("down", "--to", fmt.Sprint(v))
		if got, _ := u.version(); got != v {
			t.Fatalf("after down to %d status says %d", v, got)
		}
		direct.exec("CALL koldstore.create_stream(NULL, 'big', NULL, 'orders', 'total > 1000')")
		direct.exec("SELECT koldstore.manage_table('orders', min_flush_rows => 1)")
		direct.exec("UPDATE orders SET total = total + 1")
		u.mustMigrate("up")
		if got, _ := u.version(); got != newest {
			t.Fatalf("after up from %d status says %d", v, got)
		}
		must(t, inst.start(nil))
		app := u.connect(t, inst)
		app.fence()
		app.checkFeed("orders")
		app.flush("orders")
		app.exec("UPDATE orders SET total = total + 1 WHERE id % 2 = 0")
		app.fence()
		app.checkFeed("orders")
		if got, want := app.text("SELECT count(*)::text FROM _stream_big"), app.text("SELECT (count(*) + count(*) FILTER (WHERE id % 2 = 0))::text FROM orders WHERE total > 1000"); got != want {
			t.Errorf("version %d: the stream has %s events, want %s", v, got, want)
		}
		app.forget("big", "orders")
		must(t, app.Close(app.ctx))
		must(t, inst.stop(syscall.SIGTERM))
	}
}

// TestDowngrade: going back a step keeps what both versions know, and is refused as a whole, with the reason, where streams and feeds have
// no place. Version 0 takes everything away.
func TestDowngrade(t *testing.T) {
	t.Parallel()
	u := newUpgrade(t)
	inst := u.serve(t)
	app := u.connect(t, inst)
	app.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); INSERT INTO orders SELECT i, i * 100 FROM generate_series(1, 30) i")
	app.exec("CREATE STREAM big ON orders WHEN (total > 1000) WITH (start = 'earliest')")
	app.exec("SELECT koldstore.manage_table('orders')")
	app.fence()
	must(t, inst.stop(syscall.SIGTERM))
	_, newest := u.version()
	direct := open(t, u.cluster.DSN(u.database, u.app, u.password))
	refused := false
	for v := newest - 1; v >= 1 && !refused; v-- {
		out, ok := u.migrate("down", "--to", fmt.Sprint(v))
		got, _ := u.version()
		switch {
		case ok && got != v, !ok && got != v+1:
			t.Fatalf("down to %d: %q, and status says %d", v, out, got)
		case !ok && (v >= migrations.FirstWhole || !strings.Contains(out, "cannot hold the streams and feeds")):
			t.Fatalf("down to %d does not say what is in the way: %s", v, out)
		}
		refused = !ok
		if n := direct.text("SELECT count(*)::text FROM _stream_big"); n != "20" {
			t.Errorf("down to %d: the log has %s events", v, n)
		}
		if n := direct.text("SELECT count(*)::text FROM koldstore.orders__cl"); n != "30" {
			t.Errorf("down to %d: the mirror has %s rows", v, n)
		}
	}
	if !refused {
		t.Error("the catalog goes away under a stream and a feed")
	}
	u.mustMigrate("up")
	must(t, inst.start(nil))
	app = u.connect(t, inst)
	app.exec("DELETE FROM orders WHERE id > 20")
	app.fence()
	app.checkFold("big", "orders", "total > 1000")
	app.checkFeed("orders")
	must(t, app.Close(app.ctx))
	if out, ok := u.migrate("down", "--to", "0"); ok || !strings.Contains(out, "stop koldproxy first") {
		t.Errorf("down to 0 beside a koldproxy that applies changes: %s", out)
	}
	must(t, inst.stop(syscall.SIGTERM))
	u.mustMigrate("down", "--to", "0")
	if left := direct.text("SELECT count(*)::text FROM pg_namespace WHERE nspname = 'koldstore'"); left != "0" {
		t.Error("down to 0 leaves the schema")
	}
	if left := direct.text("SELECT count(*)::text FROM pg_replication_slots WHERE database = current_database()"); left != "0" {
		t.Error("down to 0 leaves the replication slot")
	}
	if left := direct.text("SELECT coalesce(to_regclass('_stream_big')::text, 'nothing')"); left != "nothing" {
		t.Errorf("down to 0 leaves %s", left)
	}
}

// TestNewerCatalog: a process that runs goes on when a newer one has brought the catalog further, as long as columns are added to its tables and
// nothing else; one that begins then says which koldproxy is needed.
func TestNewerCatalog(t *testing.T) {
	t.Parallel()
	u := newUpgrade(t)
	inst := u.serve(t)
	app := u.connect(t, inst)
	app.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000)")
	app.exec("SELECT koldstore.manage_table('orders')")
	admin := u.admin(t)
	_, newest := u.version()
	admin.exec(`DO $$
		DECLARE rel regclass;
		BEGIN
			FOREACH rel IN ARRAY (SELECT array_agg(c.oid) FROM pg_class c WHERE relnamespace = 'koldstore'::regnamespace AND relkind = 'r' AND relname <> 'schema_version' AND NOT relispartition
				AND NOT EXISTS (SELECT FROM koldstore.managed_table m WHERE m.mirror_oid = c.oid))
			LOOP
				EXECUTE format('ALTER TABLE %s ADD COLUMN of_the_next_version text DEFAULT %L', rel, 'x');
			END LOOP;
			UPDATE koldstore.schema_version SET version = version + 1;
		END $$`)
	app.exec("INSERT INTO orders SELECT i, i * 100 FROM generate_series(1, 30) i")
	app.fence()
	app.checkFold("big", "orders", "total > 1000")
	app.flush("orders")
	app.checkFeed("orders")
	must(t, inst.stop(syscall.SIGTERM))

	out, ok := u.migrate("up")
	if want := fmt.Sprintf("version %d", newest+1); ok || !strings.Contains(out, want) || !strings.Contains(out, fmt.Sprintf("migrate down --to %d", newest)) {
		t.Errorf("an older koldproxy says %q", out)
	}
	admin.exec("UPDATE koldstore.schema_version SET version = version - 1")
	must(t, inst.start(nil))
	u.connect(t, inst).forget("big", "orders")
	must(t, inst.stop(syscall.SIGTERM))
}
