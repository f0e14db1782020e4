package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
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
	cluster := localpg.OwnCluster(t, localpg.Config{
		Settings: map[string]string{
			"wal_level": "replica", "max_replication_slots": "0", "max_wal_senders": "1", "max_slot_wal_keep_size": "64MB", "synchronous_standby_names": "*",
			"synchronous_commit": "local", // or everything here would wait for that standby
		},
	})
	dir := t.TempDir()
	i := &installation{t: t, dsn: cluster.DSN("postgres", "", ""), database: "postgres"}
	i.config = writeConfig(t, fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [\"one\", \"two\"]\n[proxy]\nlisten = \"unix:%s/socket\"\n[cold]\nurl = \"file://%[2]s\"\n[http]\nlisten = \"\"\n",
		cluster.DSN("one", "svc", "s"), dir))
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
		"catalog":              "note: koldproxy serve installs it",
	}
	expectFindings(t, "without the role", i.checked(), map[string]string{
		"connection": "problem: koldproxy init", "sessions to " + cluster.Host + ":" + fmt.Sprint(cluster.Port): "problem: koldproxy init",
	})
	admin := connectTo(t, i.dsn)
	for _, sql := range []string{"CREATE ROLE svc LOGIN PASSWORD 's'", "CREATE ROLE app", "CREATE DATABASE one", "CREATE DATABASE two"} {
		do(t, admin, sql)
	}
	expectFindings(t, "a bare role", i.checked(), server)
	// The remedies are SQL: running them is enough.
	remedy := func(check string) {
		t.Helper()
		do(t, admin, i.checked()[check].Remedy)
		delete(server, check)
	}
	do(t, admin, "ALTER ROLE svc REPLICATION; GRANT CREATE ON DATABASE one, two TO svc")
	delete(server, "replication")
	delete(server, "create schema")
	remedy("koldproxy_eval")
	expectFindings(t, "with rights", i.checked(), server)

	do(t, admin, "ALTER ROLE koldproxy_eval SUPERUSER BYPASSRLS LOGIN; GRANT app TO koldproxy_eval; ALTER ROLE svc CONNECTION LIMIT 4; ALTER DATABASE two CONNECTION LIMIT 12")
	server["koldproxy_eval"] = "problem: ALTER ROLE koldproxy_eval NOSUPERUSER NOBYPASSRLS NOLOGIN;\nREVOKE app FROM koldproxy_eval;"
	server["connection limits"] = "problem: ALTER ROLE svc CONNECTION LIMIT -1;\nALTER DATABASE two CONNECTION LIMIT -1;"
	expectFindings(t, "with rights for code of users, and few connections", i.checked(), server)
	if code, out := i.koldproxy("migrate", "up"); code != exitFailed {
		t.Errorf("migrate up although code of users has rights: exit code %d\n%s", code, out)
	}
	remedy("koldproxy_eval")
	remedy("connection limits")

	tables := connectTo(t, cluster.DSN("one", "", ""))
	do(t, tables, "REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC")
	server["plpgsql"] = `problem: GRANT USAGE ON LANGUAGE plpgsql TO "svc";`
	expectFindings(t, "without plpgsql", i.checked(), server)
	do(t, tables, i.checked()["plpgsql"].Remedy)
	delete(server, "plpgsql")
	do(t, tables, "CREATE TABLE theirs (id int PRIMARY KEY); ALTER TABLE theirs OWNER TO app; CREATE TABLE ours (id int PRIMARY KEY)")
	server["owners"] = "note: GRANT app TO \"svc\";\ntables of superusers need another owner"
	expectFindings(t, "with tables of others", i.checked(), server)
	i.must("migrate", "up")
	delete(server, "catalog")
	server["table theirs"] = `problem: GRANT app TO "svc";`
	server["table ours"] = "problem: ALTER TABLE ours OWNER TO …;"
	server["table \"Foo"] = "problem: name it as SQL does"
	got := i.checked("--database", "one", "theirs", "ours", `"Foo`)
	delete(got, "applying")
	expectFindings(t, "named tables of others", got, server)
	if code, _ := i.koldproxy("check", "--database", "three", "theirs"); code != exitUsage {
		t.Errorf("a database that is not configured: exit code %d", code)
	}
	for _, check := range []string{"table theirs", "table ours", "table \"Foo"} {
		delete(server, check)
	}
	do(t, tables, "GRANT app TO svc; ALTER ROLE svc NOINHERIT; DROP TABLE ours")
	if cluster.Major >= 16 {
		do(t, tables, "GRANT app TO svc WITH INHERIT FALSE")
	}
	remedy = func(check string) {
		t.Helper()
		_, sql, _ := strings.Cut(i.checked()[check].Remedy, ": ")
		do(t, admin, sql)
		delete(server, check)
	}
	remedy("owners")
	server["table theirs"] = "problem: Start koldproxy" // which is what is left
	got = i.checked("--database", "one", "theirs")
	delete(got, "applying")
	expectFindings(t, "with INHERIT again", got, server)

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

	// A server that wants TLS needs no line for connections without.
	certificateFor(t, cluster.DataDir)
	if err := os.WriteFile(hba, []byte("local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, admin, "ALTER SYSTEM SET ssl = on")
	do(t, admin, "SELECT pg_reload_conf()")
	sessions := "sessions to " + cluster.Host + ":" + fmt.Sprint(cluster.Port)
	for end := time.Now().Add(processTimeout); !strings.Contains(i.checked()[sessions].Remedy, `proxy.server_tls = "require"`); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("of a server that wants TLS check says %+v", i.checked()[sessions])
		}
	}
	if f, there := i.checked("--set", "proxy.server_tls=require")[sessions]; there {
		t.Errorf("with TLS: %+v", f)
	}
	plain := "host=" + cluster.Host + " port=" + fmt.Sprint(cluster.Port) + " user=svc password=s dbname=one sslmode=disable"
	if f := i.checked("--set", "postgres.dsn="+plain)["connection"]; !strings.Contains(f.Remedy, "sslmode=require") {
		t.Errorf("a service connection without TLS: %+v", f)
	}
}

// certificateFor puts a certificate and its key where a server of these data looks for them.
func certificateFor(t *testing.T, data string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(data, "PG_VERSION"))
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	for name, block := range map[string]*pem.Block{"server.crt": {Type: "CERTIFICATE", Bytes: certificate}, "server.key": {Type: "PRIVATE KEY", Bytes: private}} {
		path := filepath.Join(data, name)
		if err := errors.Join(os.WriteFile(path, pem.EncodeToMemory(block), 0o600), os.Chown(path, int(owner.Uid), int(owner.Gid))); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCheckOfTables(t *testing.T) {
	t.Parallel()
	i := install(t)
	admin := connectTo(t, i.dsn)
	do(t, admin, `CREATE TABLE good (id int PRIMARY KEY); CREATE TABLE nokey (id int); CREATE UNLOGGED TABLE fast (id int PRIMARY KEY); CREATE VIEW seen AS SELECT 1 AS id`)
	expectFindings(t, "before the catalog is there", i.checked("good"), map[string]string{"catalog": "note: migrate up", "table good": "problem: migrate up"})
	p, _ := i.serve()
	expectFindings(t, "tables", i.checked("good", "nokey", "fast", "seen", "nowhere"), map[string]string{
		"table nokey": "problem: ADD PRIMARY KEY", "table fast": "problem: SET LOGGED", "table seen": "problem: docs/sql.md", "table nowhere": "problem: with its schema",
	})
	do(t, admin, "UPDATE koldstore.checkpoint SET gap = 'the cat ate it', gap_at = now()")
	expectFindings(t, "a gap", i.checked(), map[string]string{"applying": `problem: on_gap = "heal"`})
	do(t, admin, "UPDATE koldstore.checkpoint SET gap = NULL, gap_at = NULL")
	do(t, admin, `SELECT koldstore.register_storage('archive', 'filesystem', '/volume/archive', "check" => false)`)
	do(t, admin, "UPDATE koldstore.storage SET wants_check = false, check_error = 'no such bucket' WHERE name = 'archive'")
	if f := i.checked()["registered storages"]; f.Result != resultProblem || !strings.Contains(f.Found, "archive has failed its check: no such bucket") || !strings.Contains(f.Remedy, "alter_storage_credentials('archive'") {
		t.Errorf("a storage that fails: %+v", f)
	}
	p.stop(os.Interrupt)

	do(t, admin, "UPDATE koldstore.checkpoint SET slot_name = 'koldproxy_1'") // as in a copy of database 1
	if f := i.checked("--set", "apply.on_gap=heal")["applying"]; f.Result != resultProblem || strings.Contains(f.Remedy, "closes the gap") || !strings.Contains(f.Remedy, "Copies") {
		t.Errorf("a copy: %+v", f)
	}
}

// A pooler that separates the statements of a session is named, and one that does not is not; the service connection stands neither.
func TestCheckOfPoolers(t *testing.T) {
	t.Parallel()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		t.Skip("pgbouncer is not installed")
	}
	i := install(t)
	cc, err := pgx.ParseConfig(i.dsn)
	if err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[string]string{"transaction": resultProblem, "session": resultOK} {
		dir := reachableDir(t)
		text := fmt.Sprintf("[databases]\n* = user=%s password=%s host=%s port=%d\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = %s\nlisten_port = 6432\nauth_type = any\npool_mode = %s\n",
			cc.User, cc.Password, cc.Host, cc.Port, dir, mode)
		if os.Getuid() == 0 {
			text += "user = nobody\n"
		}
		ini := filepath.Join(dir, "pgbouncer.ini")
		if err := errors.Join(os.WriteFile(ini, []byte(text), 0o644), os.Chmod(dir, 0o777)); err != nil {
			t.Fatal(err)
		}
		startCommand(t, exec.Command(binary, "-q", ini))
		upstream := "unix:" + filepath.Join(dir, ".s.PGSQL.6432")
		for end := time.Now().Add(processTimeout); ; time.Sleep(10 * time.Millisecond) {
			if conn, err := net.Dial("unix", strings.TrimPrefix(upstream, "unix:")); err == nil {
				_ = conn.Close()
				break
			}
			if time.Now().After(end) {
				t.Fatal("pgbouncer does not start")
			}
		}
		f, bad := i.checked("--set", "proxy.upstream="+upstream, "--set", "proxy.server_tls=disable")["sessions to "+upstream]
		if bad != (want == resultProblem) || bad && !strings.Contains(f.Remedy, "pool_mode = session") {
			t.Errorf("pool_mode = %s: %+v", mode, f)
		}
		f = i.checked("--set", fmt.Sprintf("postgres.dsn=host=%s port=6432 user=postgres dbname=%s", dir, i.database))["connection"]
		if f.Result != resultProblem || !strings.Contains(f.Remedy, "name the server itself") {
			t.Errorf("pool_mode = %s as the service connection: %+v", mode, f)
		}
	}
}

// Addresses that another program has are named; those of a koldproxy that runs are no problem.
func TestCheckOfSockets(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	c := defaultConfig()
	c.Proxy.Listen, c.HTTP.Listen = "unix:"+filepath.Join(t.TempDir(), "socket"), ""
	c.MQTT.Enabled, c.MQTT.Listen = true, taken.Addr().String()
	findings := checkSockets(t.Context(), c)
	if len(findings) != 2 || findings[0].Result != resultOK || findings[1].Result != resultProblem || findings[1].Check != "mqtt.listen" {
		t.Errorf("one address is taken: %+v", findings)
	}
	c.Proxy.Listen = taken.Addr().String()
	for _, f := range checkSockets(t.Context(), c) {
		if f.Result != resultOK || !strings.Contains(f.Found, "seems to run") {
			t.Errorf("all addresses are taken: %+v", f)
		}
	}
	c.MQTT.Listen = "192.0.2.1:1883"
	if f := checkSockets(t.Context(), c)[1]; f.Result != resultProblem || !strings.Contains(f.Remedy, "address of this machine") {
		t.Errorf("an address of another machine: %+v", f)
	}
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
