package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// eventually asks until the answer is right, and shows the last one otherwise.
func (p *process) eventually(what string, ask func() (answer string, right bool)) {
	p.t.Helper()
	for end := time.Now().Add(processTimeout); ; time.Sleep(10 * time.Millisecond) {
		answer, right := ask()
		if right {
			return
		}
		if time.Now().After(end) || p.ended() {
			p.t.Fatalf("%s: %s\n%s", what, answer, p.output())
		}
	}
}

// TestServeStartsBeforeTheServer and without one of its databases: whatever is wrong with the server at the start, koldproxy listens and
// forwards at once, says so to systemd, and each database comes in by itself when it can.
func TestServeStartsBeforeTheServer(t *testing.T) {
	t.Parallel()
	cluster := localpg.OwnCluster(t, localpg.Config{})
	admin := connectTo(t, cluster.DSN("postgres", "", ""))
	do(t, admin, "CREATE DATABASE app")
	if err := cluster.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}

	dir := reachableDir(t)
	i := &installation{t: t, dsn: cluster.DSN("app", "", ""), database: "app", socket: filepath.Join(dir, ".s.PGSQL.6543")}
	i.config = writeConfig(t, fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [\"app\", \"late\"]\n[proxy]\nlisten = \"unix:%s\"\n[cold]\nurl = \"file://%s/cold\"\n[http]\nlisten = \"127.0.0.1:0\"\n",
		i.dsn, i.socket, dir))
	manager := playSystemd(t)
	cmd := exec.Command(os.Args[0], "serve", "--config", i.config)
	cmd.Env = []string{"NOTIFY_SOCKET=" + manager.LocalAddr().String()}
	p := startCommand(t, cmd)
	told(p, manager, "READY=1\nSTATUS=forwarding sessions")
	p.says(`"message":"listening"`)
	base := "http://" + regexp.MustCompile(`"http":"([^"]+)"`).FindStringSubmatch(p.output())[1]
	readyz := func(status int, texts ...string) {
		t.Helper()
		p.eventually("/readyz", func() (string, bool) {
			got, body := get(t, base+"/readyz")
			right := got == status
			for _, text := range texts {
				right = right && strings.Contains(body, text)
			}
			return fmt.Sprint(got, body), right
		})
	}

	// The server is down.
	told(p, manager, "connection refused")
	readyz(http.StatusServiceUnavailable, "database app: ", "database late: ", "connection refused")
	if status, _ := get(t, base+"/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d", status)
	}
	if _, body := get(t, base+"/"); !strings.Contains(body, "connect to database app: ") || !strings.Contains(body, "connect to database late: ") {
		t.Errorf("the status page does not say of both databases what is wrong:\n%s", body)
	}
	var refused *pgconn.PgError
	if _, err := pgx.Connect(t.Context(), i.through()); !errors.As(err, &refused) || refused.Code != "08006" {
		t.Errorf("a client while the server is down: %v", err)
	}

	// It comes up as a standby.
	signal := filepath.Join(cluster.DataDir, "standby.signal")
	if err := os.WriteFile(signal, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	readyz(http.StatusServiceUnavailable, "database app: the server is a standby")
	told(p, manager, "the server is a standby")
	conn := connectTo(t, i.through())
	if !ask1[bool](t, conn, "SELECT pg_is_in_recovery()") {
		t.Error("the standby is none")
	}
	if code, out := i.koldproxy("migrate", "up"); code != exitFailed {
		t.Errorf("migrate up on a standby: exit code %d\n%s", code, out)
	}

	// It is promoted. One database still does not exist, and keeps nobody else from anything.
	do(t, connectTo(t, i.dsn), "SELECT pg_promote()")
	p.eventually("app is applied", func() (string, bool) {
		_, body := get(t, base+"/readyz")
		return body, !strings.Contains(body, "database app: ")
	})
	readyz(http.StatusServiceUnavailable, `database late: `, `database "late" does not exist`)
	do(t, conn, "CREATE TABLE notes (id int PRIMARY KEY); CREATE STREAM s ON notes WHEN (id > 1); SELECT koldstore.manage_table('notes')")
	do(t, conn, "INSERT INTO notes VALUES (1), (2)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	if got := ask1[string](t, conn, "SELECT string_agg(op || ' ' || k, ', ') FROM _stream_s"); got != "put 2" {
		t.Errorf("the stream has %s", got)
	}
	if got := ask1[string](t, conn, "SELECT koldstore.flush_table('notes', wait => true, force => true) ->> 'status'"); got != "completed" {
		t.Errorf("the flush says %s", got)
	}
	if strings.Contains(p.output(), `"message":"ready"`) {
		t.Error("koldproxy calls itself ready while a database is missing")
	}

	do(t, connectTo(t, i.dsn), "CREATE DATABASE late")
	told(p, manager, "STATUS=forwarding sessions; changes of every database are applied")
	readyz(http.StatusOK)
	p.says(`"message":"ready"`)
	if log := p.output(); !strings.Contains(log, "the database can be used now") || !strings.Contains(log, `CREATE DATABASE \"late\"; or correct postgres.databases`) {
		t.Errorf("the log does not say what was wrong, and when it was over:\n%s", log)
	}
	_ = conn.Close(t.Context())
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	told(p, manager, "STOPPING=1")
	if code := p.wait(); code != exitFine {
		t.Errorf("exit code %d", code)
	}
}

// A catalog of a newer koldproxy is left alone, and nothing is answered from it.
func TestServeBesideANewerCatalog(t *testing.T) {
	t.Parallel()
	i := install(t)
	i.must("migrate", "up")
	direct := connectTo(t, i.dsn)
	do(t, direct, "UPDATE koldstore.schema_version SET version = version + 1")
	p := start(t, "serve", "--config", i.config)
	p.says("which a newer koldproxy has installed")
	conn := connectTo(t, i.through())
	if got := ask1[string](t, conn, "SELECT current_database()"); got != i.database {
		t.Errorf("connected to %s", got)
	}
	if n := ask1[int](t, direct, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"); n != 0 {
		t.Error("it applies changes")
	}
	do(t, direct, "UPDATE koldstore.schema_version SET version = version - 1")
	p.says(`"message":"ready"`)
	p.stop(syscall.SIGTERM)
}

// What can never work ends the process at once, and says what it is.
func TestServeEndsWithoutItsSockets(t *testing.T) {
	t.Parallel()
	i := install(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	noCertificate := writeConfig(t, "no certificate")
	for set, want := range map[string]string{
		"proxy.listen=" + taken.Addr().String():                  "proxy.listen",
		"http.listen=" + taken.Addr().String():                   "http.listen",
		"mqtt.enabled=true mqtt.listen=" + taken.Addr().String(): "mqtt.listen",
		"proxy.client_tls=require proxy.auth=scram proxy.tls_cert=" + noCertificate + " proxy.tls_key=" + noCertificate: "proxy.tls_cert",
	} {
		line := []string{"serve", "--config", i.config}
		for one := range strings.FieldsSeq(set) {
			line = append(line, "--set", one)
		}
		var out, errOut strings.Builder
		ctx, cancel := context.WithTimeout(t.Context(), processTimeout)
		if code := execute(ctx, line, &out, &errOut); code == exitFine || !strings.Contains(errOut.String(), want) {
			t.Errorf("%s: exit code %d, %s", set, code, errOut.String())
		}
		cancel()
	}
}
