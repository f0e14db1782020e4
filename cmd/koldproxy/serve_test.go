package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
)

// installation is a database on the test cluster and a configuration file for it.
type installation struct {
	t        *testing.T
	dsn      string // of the superuser, direct
	database string
	config   string
	socket   string // of the proxy
}

func install(t *testing.T) *installation {
	t.Helper()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	dir := reachableDir(t)
	i := &installation{t: t, dsn: dsn, database: cc.Database, socket: filepath.Join(dir, ".s.PGSQL.6543")}
	i.config = writeConfig(t, fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [%q]\n[proxy]\nlisten = \"unix:%s\"\n[cold]\nurl = \"file://%s/cold\"\n[http]\nlisten = \"\"\n",
		dsn, cc.Database, i.socket, dir))
	return i
}

// koldproxy runs a command line and returns its exit code and stdout.
func (i *installation) koldproxy(line ...string) (int, string) {
	i.t.Helper()
	var out, errOut bytes.Buffer
	code := execute(i.t.Context(), append(line, "--config", i.config), &out, &errOut)
	if errOut.Len() > 0 {
		i.t.Logf("koldproxy %s: %s", strings.Join(line, " "), errOut.String())
	}
	return code, out.String()
}

func (i *installation) must(line ...string) string {
	i.t.Helper()
	code, out := i.koldproxy(line...)
	if code != exitFine {
		i.t.Fatalf("koldproxy %s: exit code %d\n%s", strings.Join(line, " "), code, out)
	}
	return out
}

// serve starts koldproxy and returns the DSN through it.
func (i *installation) serve() (*process, string) {
	i.t.Helper()
	return i.serveWith()
}

// serveWith is serve with more arguments.
func (i *installation) serveWith(args ...string) (*process, string) {
	i.t.Helper()
	p := start(i.t, append([]string{"serve", "--config", i.config}, args...)...)
	for end := time.Now().Add(processTimeout); !strings.Contains(p.output(), `"message":"ready"`); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) || p.ended() {
			i.t.Fatalf("serve is not ready:\n%s", p.output())
		}
	}
	return p, i.through()
}

// through is the DSN of the superuser through koldproxy.
func (i *installation) through() string {
	i.t.Helper()
	cc, err := pgx.ParseConfig(i.dsn)
	if err != nil {
		i.t.Fatal(err)
	}
	return fmt.Sprintf("host=%s port=6543 user=%s password=%s dbname=%s", filepath.Dir(i.socket), cc.User, cc.Password, cc.Database)
}

func (p *process) ended() bool {
	select {
	case <-p.seen:
		return true
	default:
		return false
	}
}

func TestMigrateUpDownStatus(t *testing.T) {
	t.Parallel()
	i := install(t)
	status := func() string {
		var states map[string]struct{ Version, Newest int }
		if err := json.Unmarshal([]byte(i.must("migrate", "status", "--json")), &states); err != nil {
			t.Fatal(err)
		}
		s := states[i.database]
		switch s.Version {
		case 0:
			return "nothing"
		case s.Newest:
			return "newest"
		}
		return fmt.Sprint(s.Version)
	}
	if got := status(); got != "nothing" {
		t.Errorf("at first: %s", got)
	}
	i.must("migrate", "up")
	i.must("migrate", "up")
	if got := status(); got != "newest" {
		t.Errorf("after up: %s", got)
	}
	i.must("migrate", "down", "--to", "1")
	if got := status(); got != "1" {
		t.Errorf("after down to 1: %s", got)
	}
	i.must("migrate", "down", "--to", "0")
	if got := status(); got != "nothing" {
		t.Errorf("after down to 0: %s", got)
	}
}

func TestCheckSaysWhatToDo(t *testing.T) {
	t.Parallel()
	i := install(t)
	if out := i.must("check"); !strings.Contains(out, "is not there yet") || !strings.Contains(out, "koldproxy migrate up") {
		t.Errorf("before the catalog is there:\n%s", out)
	}
	i.must("migrate", "up")
	i.must("migrate", "down", "--to", "10")
	if code, out := i.koldproxy("check"); code != exitFailed || !strings.Contains(out, "koldproxy migrate up") {
		t.Errorf("with an older catalog: exit code %d\n%s", code, out)
	}
	i.must("migrate", "up")
	if out := i.must("check"); strings.Contains(out, "PROBLEM") {
		t.Errorf("a good server has a problem:\n%s", out)
	}
	var findings []finding
	if err := json.Unmarshal([]byte(i.must("check", "--json")), &findings); err != nil || len(findings) < 8 {
		t.Errorf("%d findings, %v", len(findings), err)
	}
	blocked := filepath.Join(filepath.Dir(i.socket), "file")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := i.koldproxy("check", "--set", "cold.url=file://"+blocked); code != exitFailed || !strings.Contains(out, blocked) {
		t.Errorf("a cold store that is a file: exit code %d\n%s", code, out)
	}
}

func TestServeAndItsAdminCommands(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, dsn := i.serve()
	conn := connectTo(t, dsn)
	do(t, conn, `CREATE TABLE notes (id int PRIMARY KEY, body text NOT NULL);
		CREATE STREAM long_notes ON notes WHEN (length(body) > 5);
		SELECT koldstore.manage_table('notes', min_flush_rows => 1)`)
	do(t, conn, "INSERT INTO notes SELECT n, 'note number ' || n FROM generate_series(1, 20) n")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")

	if out := i.must("status"); !strings.Contains(out, "running") || !strings.Contains(out, "notes") || !strings.Contains(out, "public.long_notes") {
		t.Errorf("status says\n%s", out)
	}
	var status []databaseStatus
	if err := json.Unmarshal([]byte(i.must("status", "--json")), &status); err != nil || len(status) != 1 || len(status[0].Tables) != 1 || len(status[0].Streams) != 1 {
		t.Errorf("status --json: %v, %+v", err, status)
	}
	if out := i.must("flush", "notes", "--force", "--wait"); !strings.Contains(out, "completed, rows flushed 20, segments 1") {
		t.Errorf("flush says %s", out)
	}
	if out := i.must("flush", "notes"); !strings.HasPrefix(out, "notes: not_due") || strings.Contains(out, "-") {
		t.Errorf("a second flush says %s", out)
	}
	for line, want := range map[string]string{"flush": "public.notes", "check": "notes", "tail": "public.long_notes", "tail --set": "proxy.listen="} {
		var out bytes.Buffer
		words := append([]string{"__complete", "--config", i.config}, strings.Fields(line)...)
		if code := execute(t.Context(), append(words, ""), &out, &bytes.Buffer{}); code != exitFine || !strings.Contains(out.String(), want+"\n") {
			t.Errorf("the shell suggests after %s, exit code %d:\n%s", line, code, out.String())
		}
	}
	var segments []segmentRow
	if err := json.Unmarshal([]byte(i.must("segments", "notes", "--json")), &segments); err != nil || len(segments) != 1 || segments[0].Rows != 20 {
		t.Errorf("segments: %v, %+v", err, segments)
	}
	if n := ask1[int](t, conn, "SELECT count(*) FROM koldstore.changes_since('notes') WHERE source = 'cold'"); n != 20 {
		t.Errorf("%d cold rows come through the proxy, want 20", n)
	}
	i.must("retention", "notes", "30 days")
	if got := ask1[string](t, conn, "SELECT koldstore.table_status('notes') ->> 'retention'"); !strings.Contains(got, "30 days") {
		t.Errorf("retention is %s", got)
	}
	i.must("retention", "notes", "none")

	if out := i.must("verify", "notes"); !strings.Contains(out, "notes: 1 segments, 20 rows, no problem") {
		t.Errorf("verify says %s", out)
	}
	damage(t, filepath.Join(filepath.Dir(i.socket), "cold"))
	if code, out := i.koldproxy("verify", "notes"); code != exitFailed || !strings.Contains(out, segments[0].Segment) {
		t.Errorf("verify of a damaged segment: exit code %d, %s", code, out)
	}

	for _, wrong := range [][]string{
		{"flush", "nowhere"},
		{"segments", "nowhere"},
		{"segments", "pg_class"},
		{"retention", "notes", "0 days"},
		{"tail", "nowhere"},
		{"verify", "nowhere"},
	} {
		if code, _ := i.koldproxy(wrong...); code != exitFailed {
			t.Errorf("%q: exit code %d, want %d", wrong, code, exitFailed)
		}
	}
	p.stop(syscall.SIGTERM)
}

// damage changes one byte in the middle of the only object of a cold store.
func damage(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		raw[len(raw)/2] ^= 1
		if err := os.Chmod(path, 0o600); err != nil {
			return err
		}
		return os.WriteFile(path, raw, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestTailPrintsOldAndNewEvents(t *testing.T) {
	t.Parallel()
	i := install(t)
	served, dsn := i.serve()
	conn := connectTo(t, dsn)
	do(t, conn, "CREATE TABLE t (id int PRIMARY KEY); CREATE STREAM s ON t WHEN (id > 1)")
	do(t, conn, "INSERT INTO t VALUES (1), (2), (3)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")

	p := start(t, "tail", "s", "--from", "earliest", "--json", "--config", i.config)
	first := event(t, p.line(""))
	if first.Op != "put" || string(first.K) != "2" {
		t.Errorf("the first event is %+v", first)
	}
	event(t, p.line(""))
	do(t, conn, "DELETE FROM t WHERE id = 2")
	if last := event(t, p.line("")); last.Op != "delete" || string(last.K) != "2" {
		t.Errorf("the new event is %+v", last)
	}
	p.stop(syscall.SIGINT)

	for _, garbage := range []string{"garbage", "", strings.Repeat("f", len(first.ID))} {
		if code, _ := i.koldproxy("tail", "s", "--from", garbage); code != exitUsage {
			t.Errorf("--from %q: exit code %d", garbage, code)
		}
	}
	p = start(t, "tail", "s", "--from", koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(time.Hour)), 1), "--json", "--config", i.config)
	p.says("is an id of the future")
	do(t, conn, "INSERT INTO t VALUES (4)")
	if next := event(t, p.line("")); next.Op != "put" || string(next.K) != "4" {
		t.Errorf("behind an id of the future comes %+v", next)
	}
	p.stop(syscall.SIGINT)

	p = start(t, "tail", "public.s", "--from", first.ID, "--config", i.config)
	if line := p.line(""); !strings.Contains(line, "put") || !strings.Contains(line, `{"id": 3}`) {
		t.Errorf("behind the first event comes %s", line)
	}
	for _, want := range []string{`{"id": 2}`, `{"id": 4}`} {
		if line := p.line(""); !strings.Contains(line, want) {
			t.Errorf("then comes %s", line)
		}
	}
	// It outlives its connections, and misses nothing.
	do(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'")
	do(t, conn, "INSERT INTO t VALUES (5)")
	p.says("lost the server")
	if line := p.line(""); !strings.Contains(line, `{"id": 5}`) {
		t.Errorf("after its connection was ended comes %s", line)
	}
	// What has expired is neither printed nor passed over in silence, although the service role may read it.
	do(t, conn, "ALTER STREAM s SET (retention = '1s')")
	do(t, conn, "SELECT pg_sleep(1.1)")
	do(t, conn, "INSERT INTO t VALUES (6)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	q := start(t, "tail", "s", "--from", first.ID, "--config", i.config)
	q.says("past its retention")
	if line := q.line(""); !strings.Contains(line, `{"id": 6}`) {
		t.Errorf("of expired events it prints %s", line)
	}
	q.stop(syscall.SIGTERM)
	do(t, conn, "DROP STREAM s")
	p.says("was dropped")
	if code := p.wait(); code != exitFailed {
		t.Errorf("exit code %d after the stream was dropped", code)
	}
	served.stop(syscall.SIGTERM)
}

func event(t *testing.T, line string) tailRow {
	t.Helper()
	var r tailRow
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return r
}

func TestServeSurvivesHangup(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, dsn := i.serve()
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(processTimeout); !strings.Contains(p.output(), "SIGHUP: reloading"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) || p.ended() {
			t.Fatalf("no answer to SIGHUP:\n%s", p.output())
		}
	}
	if got := ask1[string](t, connectTo(t, dsn), "SELECT current_database()"); got != i.database {
		t.Errorf("connected to %s", got)
	}
	p.stop(syscall.SIGTERM)
}
