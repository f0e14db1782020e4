package integration_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// clientTools skips a test of programs that refuse to talk to a newer server than themselves, when only an older one is there:
// the binaries of some versions come without client programs.
func clientTools(t *testing.T, names ...string) {
	t.Helper()
	bins, err := localpg.FindBinaries("")
	must(t, err)
	server := version(t, filepath.Join(bins, "postgres"))
	for _, name := range names {
		if tool := version(t, name); tool < server {
			t.Skipf("%s of PostgreSQL %d does not work with the server of PostgreSQL %d, whose binaries come without it", name, tool, server)
		}
	}
}

// version is the major version that a program of PostgreSQL says it has.
func version(t *testing.T, name string) (major int) {
	t.Helper()
	p := program{name: name, args: []string{"--version"}}
	said := p.mustRun(t).stdout
	_, number, _ := strings.Cut(said, "(PostgreSQL) ")
	if _, err := fmt.Sscan(strings.SplitN(number, ".", 2)[0], &major); err != nil {
		t.Fatalf("the version of %s in %q: %v", name, said, err)
	}
	return major
}

// TestArchives dumps into pg_dump's own formats and restores them with several jobs, everything through the proxy.
func TestArchives(t *testing.T) {
	t.Parallel()
	clientTools(t, "pg_dump", "pg_restore")
	inst := newInstance(t, demo)
	w := newTenantOf(t, inst)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric, note text, raw bytea); CREATE INDEX ON orders (total);
		CREATE TABLE lines (id int PRIMARY KEY, order_id int REFERENCES orders, note text)`)
	c.exec("INSERT INTO orders SELECT i, i / 7.0, 'größe ' || i, decode(repeat('00ff5c', i % 100), 'hex') FROM generate_series(1, 2000) i")
	c.exec("INSERT INTO lines SELECT i, 1 + i % 2000, repeat('x', i % 300) FROM generate_series(1, 5000) i")
	sum := `SELECT md5(string_agg(o::text, ',' ORDER BY id)) || (SELECT md5(string_agg(l::text, ',' ORDER BY id)) FROM ` + w.table("lines") + ` l) FROM ` + w.table("orders") + " o"
	want := c.text(sum)
	admin := inst.connect(t, "postgres", nil)
	for _, archive := range []struct {
		format     string
		dump, load []string
	}{
		{"custom", []string{"-Fc"}, []string{"-j", "2"}},
		{"directory", []string{"-Fd", "-j", "2"}, []string{"-j", "2"}},
		{"tar", []string{"-Ft"}, nil},
	} {
		t.Run(archive.format, func(t *testing.T) {
			admin.exec("CREATE DATABASE from_" + archive.format + " OWNER demo")
			target := strings.Replace(inst.dsn("demo", nil), "/"+database, "/from_"+archive.format, 1)
			path := filepath.Join(t.TempDir(), "archive")
			program{name: "pg_dump", args: append(archive.dump, "-n", w.schema, "-f", path, "-d", inst.dsn("demo", nil))}.mustRun(t)
			program{name: "pg_restore", args: append(archive.load, "-e", "-d", target, path)}.mustRun(t)
			if got := open(t, target).text(sum); got != want {
				t.Errorf("restored %s, dumped %s", got, want)
			}
		})
	}
}

// TestReplicationTools: physical and logical replication connections pass through. A base backup is whole, as its manifest
// says, and logical decoding gives the same directly and through the proxy.
func TestReplicationTools(t *testing.T) {
	t.Parallel()
	clientTools(t, "pg_basebackup", "pg_recvlogical")
	inst := newInstance(t, demo)
	w := newTenantOf(t, inst)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, note text); INSERT INTO orders SELECT i, repeat('x', 1000) FROM generate_series(1, 2000) i")

	t.Run("pg_basebackup", func(t *testing.T) {
		for _, wal := range []string{"stream", "fetch"} { // stream needs a second replication connection
			folder := filepath.Join(t.TempDir(), "backup")
			program{name: "pg_basebackup", args: []string{"-d", inst.dsn("postgres", nil), "-D", folder, "-X", wal, "-c", "fast"}}.mustRun(t)
			program{name: "pg_verifybackup", args: []string{folder}}.mustRun(t)
		}
	})
	t.Run("pg_recvlogical", func(t *testing.T) {
		admin := inst.connect(t, "postgres", nil)
		ways := map[string]string{"direct": inst.directDSN("postgres", nil), "proxied": inst.dsn("postgres", nil)}
		for slot, dsn := range ways {
			program{name: "pg_recvlogical", args: []string{"-d", dsn, "--slot", slot, "--create-slot", "-P", "test_decoding"}}.mustRun(t)
		}
		c.exec("UPDATE orders SET note = 'größe ' || id; DELETE FROM orders WHERE id % 2 = 0")
		end := admin.text("SELECT pg_current_wal_flush_lsn()")
		admin.exec("SELECT pg_logical_emit_message(true, 'test', 'so that there is something behind the end')")
		got := map[string]string{}
		for slot, dsn := range ways {
			path := filepath.Join(t.TempDir(), "changes")
			program{name: "pg_recvlogical", args: []string{
				"-d", dsn, "--slot", slot, "--start", "-f", path, "--endpos", end,
				"-o", "include-xids=0", "-o", "skip-empty-xacts=1", "--status-interval", "1",
			}}.mustRun(t)
			raw, err := os.ReadFile(path)
			must(t, err)
			var changes []string // of the table; koldproxy writes too
			for line := range strings.Lines(string(raw)) {
				if strings.HasPrefix(line, "table "+w.schema+".") {
					changes = append(changes, line)
				}
			}
			if got[slot] = strings.Join(changes, ""); len(changes) != 3000 {
				t.Errorf("%s: %d changes", slot, len(changes))
			}
			program{name: "pg_recvlogical", args: []string{"-d", dsn, "--slot", slot, "--drop-slot"}}.mustRun(t)
		}
		if got["direct"] != got["proxied"] {
			t.Error("what is decoded differs")
		}
	})
}
