package main

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// checked runs check --json and returns the findings that are not ok, by name.
func (i *installation) checked(args ...string) map[string]finding {
	i.t.Helper()
	_, out := i.koldproxy(append([]string{"check", "--json"}, args...)...)
	var all []finding
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		i.t.Fatalf("%v\n%s", err, out)
	}
	bad := map[string]finding{}
	for _, f := range all {
		if f.Result != resultOK {
			bad[f.Check] = f
		}
	}
	return bad
}

// expect compares findings with what is wanted: name of the check to its result and a part of the remedy.
func expectFindings(t *testing.T, what string, got map[string]finding, want map[string]string) {
	t.Helper()
	for check, f := range got {
		if _, ok := want[check]; !ok {
			t.Errorf("%s: not expected: %+v", what, f)
		}
	}
	for check, text := range want {
		f := got[check]
		result, remedy, _ := strings.Cut(text, ": ")
		if f.Result != result || !strings.Contains(f.Remedy, remedy) {
			t.Errorf("%s: %s is %+v, want %s", what, check, f, text)
		}
	}
}

// Each precondition that a server does not meet is named, with what to do, and doing it is enough.
func TestCheckNamesWhatAServerLacks(t *testing.T) {
	t.Parallel()
	cluster, err := localpg.Start(t.Context(), localpg.Config{
		Settings: map[string]string{
			"wal_level": "replica", "max_replication_slots": "0", "max_wal_senders": "1", "max_slot_wal_keep_size": "64MB", "synchronous_standby_names": "*",
			"synchronous_commit": "local", // or everything here would wait for that standby
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	i := &installation{t: t, dsn: cluster.DSN("postgres", "", ""), database: "postgres"}
	i.config = writeConfig(t, fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [\"one\", \"two\"]\n[cold]\nurl = \"file://%s\"\n", cluster.DSN("one", "svc", "s"), dir))
	server := map[string]string{
		"wal_level":            "problem: ALTER SYSTEM SET wal_level = logical;",
		"replication slots":    "problem: ALTER SYSTEM SET max_replication_slots = 2;",
		"wal senders":          "problem: ALTER SYSTEM SET max_wal_senders = 2;",
		"kept log":             "note: max_slot_wal_keep_size = '1024MB'",
		"synchronous standbys": "problem: name the real standbys",
		"superuser":            "note: nothing has to be done",
		"koldproxy_eval":       `problem: CREATE ROLE koldproxy_eval NOLOGIN; GRANT koldproxy_eval TO "svc";`,
		"replication":          `problem: ALTER ROLE "svc" REPLICATION;`,
		"create schema":        `problem: GRANT CREATE ON DATABASE "two" TO "svc";`,
		"catalog":              "problem: koldproxy migrate up",
	}
	expectFindings(t, "without the role", i.checked(), map[string]string{
		"connection": "problem: koldproxy init", "sessions to " + cluster.Host + ":" + fmt.Sprint(cluster.Port): "problem: koldproxy init",
	})
	admin := connectTo(t, i.dsn)
	for _, sql := range []string{"CREATE ROLE svc LOGIN PASSWORD 's'", "CREATE ROLE app", "CREATE DATABASE one", "CREATE DATABASE two"} {
		do(t, admin, sql)
	}
	expectFindings(t, "a bare role", i.checked(), server)
	do(t, admin, "ALTER ROLE svc REPLICATION; CREATE ROLE koldproxy_eval NOLOGIN; GRANT koldproxy_eval TO svc; GRANT CREATE ON DATABASE one, two TO svc")
	for _, check := range []string{"koldproxy_eval", "replication", "create schema"} {
		delete(server, check)
	}
	expectFindings(t, "with rights", i.checked(), server)
	tables := connectTo(t, cluster.DSN("one", "", ""))
	do(t, tables, "CREATE TABLE theirs (id int PRIMARY KEY); ALTER TABLE theirs OWNER TO app; CREATE TABLE ours (id int PRIMARY KEY)")
	server["owners"] = "note: GRANT app TO \"svc\";\ntables of superusers need another owner"
	expectFindings(t, "with tables of others", i.checked(), server)

	hba := filepath.Join(cluster.DataDir, "pg_hba.conf")
	if err := os.WriteFile(hba, []byte("host all postgres 127.0.0.1/32 scram-sha-256\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, admin, "SELECT pg_reload_conf()")
	for end := time.Now().Add(processTimeout); ; time.Sleep(10 * time.Millisecond) {
		if f, refused := i.checked()["connection"]; refused {
			if !strings.Contains(f.Remedy, `host  "two"  "svc"  127.0.0.1/32  scram-sha-256`) {
				t.Errorf("without an entry in pg_hba.conf: %+v", f)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("pg_hba.conf is not reloaded")
		}
	}
}

func TestCheckOfTables(t *testing.T) {
	t.Parallel()
	i := install(t)
	admin := connectTo(t, i.dsn)
	do(t, admin, `CREATE TABLE good (id int PRIMARY KEY); CREATE TABLE nokey (id int); CREATE UNLOGGED TABLE fast (id int PRIMARY KEY); CREATE VIEW seen AS SELECT 1 AS id`)
	expectFindings(t, "before the catalog is there", i.checked("good"), map[string]string{"catalog": "problem: migrate up", "table good": "problem: migrate up"})
	p, _ := i.serve()
	expectFindings(t, "tables", i.checked("good", "nokey", "fast", "seen", "nowhere"), map[string]string{
		"table nokey": "problem: ADD PRIMARY KEY", "table fast": "problem: SET LOGGED", "table seen": "problem: docs/sql.md", "table nowhere": "problem: with its schema",
	})
	do(t, admin, "UPDATE koldstore.checkpoint SET gap = 'the cat ate it', gap_at = now()")
	expectFindings(t, "a gap", i.checked(), map[string]string{"applying": `problem: on_gap = "heal"`})
	do(t, admin, "UPDATE koldstore.checkpoint SET gap = NULL, gap_at = NULL")
	p.stop(os.Interrupt)
}

// A standby and an old server are told by what they answer; here the answers come from functions of that name.
func TestCheckOfOtherServers(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]string{
		"FUNCTION shadow.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true'":                                     "primary",
		"FUNCTION shadow.current_setting(text) RETURNS text LANGUAGE sql AS $$SELECT '140009'$$":                                "version",
		"FUNCTION shadow.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT pg_catalog.now() - interval '1 hour'$$": "clock",
	} {
		i := install(t)
		do(t, connectTo(t, i.dsn), "CREATE SCHEMA shadow; CREATE "+answer)
		do(t, connectTo(t, i.dsn), fmt.Sprintf("ALTER DATABASE %s SET search_path = shadow, pg_catalog", i.database))
		if f := i.checked()[want]; f.Remedy == "" {
			t.Errorf("%s: %+v", want, f)
		}
	}
}

func TestCheckOfCertificates(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, c := range map[string]struct {
		from, until time.Duration
		want        string
	}{
		"good": {-time.Hour, 90 * 24 * time.Hour, resultOK}, "soon": {-time.Hour, 24 * time.Hour, resultNote},
		"expired": {-2 * time.Hour, -time.Hour, resultProblem}, "early": {time.Hour, 2 * time.Hour, resultProblem},
	} {
		f := finding{Result: resultOK}
		f.judgeCertificate(&x509.Certificate{Subject: pkix.Name{CommonName: "db"}, NotBefore: now.Add(c.from), NotAfter: now.Add(c.until)}, now)
		if f.Result != c.want || (f.Remedy == "") != (c.want == resultOK) || !strings.Contains(f.Found, "CN=db") {
			t.Errorf("%s: %+v", name, f)
		}
	}
	cfg := defaultConfig()
	cfg.Proxy.TLSCert, cfg.Proxy.ServerCA = filepath.Join(t.TempDir(), "missing"), writeConfig(t, "no certificate")
	findings := checkCertificates(cfg)
	if len(findings) != 2 || findings[0].Result != resultProblem || findings[1].Result != resultProblem {
		t.Errorf("files that are none: %+v", findings)
	}
}

func TestConnectRemedies(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	_, err := pgx.Connect(t.Context(), cluster.DSN("no such database", "", ""))
	if got := connectRemedy(err, `no "such`); !strings.Contains(got, `CREATE DATABASE "no ""such"`) {
		t.Errorf("no database: %q for %v", got, err)
	}
	_, err = pgx.Connect(t.Context(), "host=127.0.0.1 port=1 user=x dbname=x sslmode=disable")
	if got := connectRemedy(err, "x"); !strings.Contains(got, "start the server") {
		t.Errorf("no server: %q for %v", got, err)
	}
	message := `no pg_hba.conf entry for host "2001:db8::1", user "s v", database "app", no encryption`
	if got := hbaRemedy("app", message); !strings.Contains(got, `host  "app"  "s v"  2001:db8::1/128  scram-sha-256`) {
		t.Errorf("an IPv6 address: %s", got)
	}
}
