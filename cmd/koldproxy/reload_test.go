package main

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// TestHangupReloads changes keys of both kinds, and then one that cannot be used.
func TestHangupReloads(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, dsn := i.serve()
	old := connectTo(t, dsn)
	text, err := os.ReadFile(i.config)
	if err != nil {
		t.Fatal(err)
	}
	hangUp := func(proxy, awaited string) {
		t.Helper()
		changed := strings.Replace(string(text), "[proxy]\n", "[proxy]\n"+proxy+"\n", 1)
		if err := os.WriteFile(i.config, []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(processTimeout); !strings.Contains(p.output(), awaited); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) || p.ended() {
				t.Fatalf("the log has no %s:\n%s", awaited, p.output())
			}
		}
	}
	hangUp("max_connections = 1\nauth = \"scram\"\nmax_cancels = 5", `"changed":["proxy.max_connections"]`)
	if !strings.Contains(p.output(), `"keys":["proxy.auth","proxy.max_cancels"]`) {
		t.Errorf("the log does not name what needs a restart:\n%s", p.output())
	}
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pgx.ConnectConfig(t.Context(), cc); err == nil || !strings.Contains(err.Error(), "53300") {
		t.Errorf("beyond the new limit: %v", err)
	}
	hangUp("max_connections = 0", "everything stays as it was")
	hangUp("max_connection = 7", "unknown key proxy.max_connection")
	if got := ask1[string](t, old, "SELECT current_database()"); got != i.database {
		t.Errorf("the old session is in %s", got)
	}
	p.stop(syscall.SIGTERM)
}

// TestSeveralServers has the proxy choose among the servers of postgres.dsn and of proxy.upstream.
func TestSeveralServers(t *testing.T) {
	t.Parallel()
	c := defaultConfig()
	c.Postgres.DSN = "postgres://koldproxy@one,two:6000/app?target_session_attrs=read-write"
	pg, err := c.pgxConfig("")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.proxyConfig(pg).Upstream; got != "one:5432,two:6000" {
		t.Errorf("upstream is %q", got)
	}
	c.Proxy.Upstream = "three:5432"
	if got := c.proxyConfig(pg).Upstream; got != "three:5432" {
		t.Errorf("upstream is %q", got)
	}
	for address, want := range map[string][2]string{
		"/run/p/.s.PGSQL.6000": {"/run/p", "6000"},
		"/run/p/socket":        {"/run/p/socket", "5432"},
	} {
		if host, port := hostAndPort("unix", address); host != want[0] || port != want[1] {
			t.Errorf("%s: %s, %s", address, host, port)
		}
	}
}

// TestTargetSessionAttrsAskTheServer has the service role find out what the server is.
func TestTargetSessionAttrsAskTheServer(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, dsn := i.serveWith("--set", "proxy.target_session_attrs=primary")
	if got := ask1[string](t, connectTo(t, dsn), "SELECT current_database()"); got != i.database {
		t.Errorf("connected to %s", got)
	}
	p.stop(syscall.SIGTERM)
	p, dsn = i.serveWith("--set", "proxy.target_session_attrs=standby")
	if _, err := pgx.Connect(t.Context(), dsn); err == nil || !strings.Contains(err.Error(), "57P03") {
		t.Errorf("a session of a standby: %v", err)
	}
	p.stop(syscall.SIGTERM)
}
