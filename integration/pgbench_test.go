package integration_test

import (
	"fmt"
	"strings"
	"testing"
)

// TestPgbench runs pgbench through the proxy in a schema with a stream and a managed table, and compares both with the
// tables afterwards.
func TestPgbench(t *testing.T) {
	t.Parallel()
	scale, seconds := "1", "3"
	if longTests {
		scale, seconds = "5", "10"
	}
	w := newTenant(t)
	bench := func(args ...string) outcome {
		return program{
			name: "pgbench",
			args: append(args, "-h", "127.0.0.1", "-p", fmt.Sprint(w.inst.ports.proxy), "-U", "demo", database),
			env:  []string{"PGPASSWORD=demo", "PGOPTIONS=-csearch_path=" + w.schema},
		}.mustRun(t)
	}
	bench("-i", "-q", "-s", scale)
	c := w.connect(t)
	c.exec("CREATE STREAM deep ON pgbench_accounts WHEN (abalance < -1000)")
	c.exec("SELECT koldstore.manage_table('pgbench_tellers')")
	c.exec("SELECT koldstore.manage_table('pgbench_branches')")

	for _, mode := range []string{"prepared", "extended", "simple"} {
		if mode != "prepared" && !longTests {
			continue
		}
		report := bench("-n", "-M", mode, "-c", "8", "-j", "2", "-T", seconds).stdout
		if !strings.Contains(report, "number of failed transactions: 0 (") {
			t.Errorf("pgbench -M %s:\n%s", mode, report)
		}
	}

	c.fence()
	c.checkFold("deep", "pgbench_accounts", "abalance < -1000")
	c.checkFeed("pgbench_tellers")
	c.checkFeed("pgbench_branches")
	if n := c.flush("pgbench_tellers"); n == 0 {
		t.Error("nothing was flushed")
	}
	c.checkFeed("pgbench_tellers")
}

// TestDumpAndRestore dumps a database with streams and managed tables and restores it elsewhere, both through the proxy.
func TestDumpAndRestore(t *testing.T) {
	t.Parallel()
	clientTools(t, "pg_dump")
	inst := newInstance(t, demo) // a dump needs a database in which nobody else makes and drops tables
	w := newTenantOf(t, inst)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric, note text);
		CREATE STREAM big ON orders WHEN (total > 1000) WITH (pre_image = true, retention = '30d')`)
	c.exec("SELECT koldstore.manage_table('orders')")
	c.exec("INSERT INTO orders SELECT i, i * 10, repeat('x', i % 50) FROM generate_series(1, 500) i")
	c.exec("DELETE FROM orders WHERE id % 7 = 0")
	c.flush("orders")
	c.exec("UPDATE orders SET total = 0 WHERE id % 5 = 0")
	c.fence()

	admin := inst.connect(t, "postgres", nil)
	fingerprint := func(c *client) [][]string {
		return c.rows(`SELECT count(*), md5(string_agg(o::text, ',' ORDER BY id)) FROM ` + w.table("orders") + ` o
			UNION ALL SELECT count(*), md5(string_agg(s::text, ',' ORDER BY id)) FROM ` + w.table("_stream_big") + ` s`)
	}
	want := fmt.Sprint(fingerprint(admin))

	for _, test := range []struct {
		name, role string
		args       []string
	}{
		{"everything as the superuser", "postgres", nil},
		{"the application's own tables as their owner", "demo", []string{"--schema=" + w.schema, "--exclude-table=*._stream_*", "--no-publications"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			restored := "restored_" + test.role
			admin.exec("CREATE DATABASE " + restored + " OWNER " + test.role)
			dump := program{name: "pg_dump", args: append(test.args, "-d", inst.dsn(test.role, nil))}.mustRun(t)
			target := strings.Replace(inst.dsn(test.role, nil), "/"+database, "/"+restored, 1)
			program{name: "psql", args: []string{"-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target}, stdin: dump.stdout}.mustRun(t)
			copied := open(t, target)
			if test.role == "postgres" {
				if got := fmt.Sprint(fingerprint(copied)); got != want {
					t.Errorf("restored: %s, dumped: %s", got, want)
				}
			} else if got := copied.text("SELECT count(*) FROM " + w.table("orders")); got != admin.text("SELECT count(*) FROM "+w.table("orders")) {
				t.Errorf("%s rows restored", got)
			}
		})
	}
}
