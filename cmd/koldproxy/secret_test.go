package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// canary stands in every place where a secret may be. It must not come out anywhere.
const canary = "canary-7f3a9c51d2e8"

// TestSecretsStayInside runs koldproxy with a secret in each place of the configuration and looks for it in everything that comes out: the
// log at its most talkative, every page of the HTTP port, the command line, and what each command prints, when all is well and when it is not.
func TestSecretsStayInside(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	dsn := cluster.TestDatabase(t)
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	admin := connectTo(t, dsn)
	role := "canary_" + cc.Database
	do(t, admin, fmt.Sprintf("CREATE ROLE %s SUPERUSER LOGIN PASSWORD '%s'", role, canary))
	defer do(t, admin, fmt.Sprintf("DROP EVENT TRIGGER IF EXISTS koldproxy_drop, koldproxy_ddl; REASSIGN OWNED BY %s TO postgres; DROP OWNED BY %[1]s; DROP ROLE %[1]s", role))
	dir := reachableDir(t)
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	i := &installation{t: t, dsn: dsn, database: cc.Database, socket: filepath.Join(dir, ".s.PGSQL.6543")}
	i.config = file("koldproxy.toml", fmt.Sprintf(`
[postgres]
dsn = "host=%s port=%d user=%s password='%s' dbname=%s"
password_file = %q
databases = [%[5]q]
[proxy]
listen = "unix:%[7]s"
[cold]
url = "file://%[8]s/cold"
[mqtt]
url = "mqtt://relay:%[4]s@127.0.0.1:1"
[http]
listen = "127.0.0.1:0"
token_file = %[9]q
pprof = true
[log]
level = "debug"
`, cc.Host, cc.Port, role, canary, cc.Database, file("password", canary+"\n"), i.socket, dir, file("token", canary+"\n")))

	var seen strings.Builder
	look := func(where, text string) {
		t.Helper()
		if at := strings.Index(text, canary); at >= 0 {
			t.Errorf("%s shows a secret: …%s…", where, text[max(0, at-60):min(len(text), at+60)])
		}
		fmt.Fprintln(&seen, where)
	}
	command := func(line ...string) {
		t.Helper()
		var out, errOut bytes.Buffer
		execute(t.Context(), append(line, "--config", i.config), &out, &errOut)
		look(strings.Join(line, " "), out.String()+errOut.String())
	}

	p, through := i.serveWith("--set", "mqtt.prefix="+canary) // no secret; but it might be one
	conn := connectTo(t, through)
	do(t, conn, "CREATE TABLE notes (id int PRIMARY KEY, body text); CREATE STREAM s ON notes WHEN (id > 1); SELECT koldstore.manage_table('notes')")
	do(t, conn, "INSERT INTO notes VALUES (1, 'x'), (2, 'y')")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	base := "http://" + regexp.MustCompile(`"http":"([^"]+)"`).FindStringSubmatch(p.output())[1]
	for _, token := range []string{"", canary, "wrong-" + canary[1:]} {
		for _, path := range []string{
			"/", "/stream?db=" + cc.Database + "&schema=public&name=s", "/metrics", "/healthz", "/readyz", "/nothing", "/streams/" + cc.Database + "/s",
			"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/debug/pprof/allocs?debug=1", "/debug/pprof/threadcreate?debug=1",
		} {
			status, body, header := fetch(t, base+path, token)
			look(fmt.Sprintf("GET %s (%d)", path, status), body+header)
			if want := strings.HasPrefix(path, "/debug"); want && (status == http.StatusOK) != (token == canary) {
				t.Errorf("%s with token %q answers %d", path, token, status)
			}
		}
	}
	for _, line := range [][]string{
		{"config", "print"},
		{"config", "print", "--json"},
		{"check"},
		{"check", "--json"},
		{"status"},
		{"status", "--json"},
		{"migrate", "status"},
		{"flush", "notes", "--force"},
		{"segments", "notes"},
		{"verify", "notes"},
		{"check", "--set", "postgres.dsn=postgres://u:" + canary + "@127.0.0.1:1/d"},
		{"status", "--set", "postgres.dsn=postgres://u:" + canary + "@127.0.0.1:1/d"},
		{"status", "--set", "postgres.dsn=postgres://u:" + canary + "@h/d?sslmode=nonsense"},
		{"check", "--set", "mqtt.url=mqtt://u:" + canary + "@h h"},
		{"check", "--set", "cold.url=s3://key:" + canary + "@bucket"},
		{"serve", "--set", "postgres.dsn=host='" + canary},
	} {
		command(line...)
	}
	do(t, conn, "DROP STREAM s; SELECT koldstore.unmanage_table('notes')")
	p.stop(syscall.SIGTERM)
	look("the log", p.output())
	do(t, admin, fmt.Sprintf("ALTER ROLE %s PASSWORD 'another'", role))
	for _, line := range [][]string{{"check"}, {"status"}, {"migrate", "up"}} {
		command(line...)
	}
	p = start(t, "serve", "--config", i.config)
	p.says("the database cannot be used yet")
	p.says(`"message":"listening"`)
	base = "http://" + regexp.MustCompile(`"http":"([^"]+)"`).FindStringSubmatch(p.output())[1]
	for _, path := range []string{"/", "/readyz"} {
		_, body, _ := fetch(t, base+path, canary)
		look("GET "+path+" with a wrong password", body)
	}
	p.stop(syscall.SIGTERM)
	look("the log with a wrong password", p.output())
	if strings.Count(seen.String(), "\n") < 50 {
		t.Errorf("only this was looked at:\n%s", seen.String())
	}
}

// fetch asks for the beginning of a page, with a bearer token unless it is empty.
func fetch(t *testing.T, url, token string) (status int, body, header string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(answer.Body, 4<<20))
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(raw), fmt.Sprint(answer.Header)
}
