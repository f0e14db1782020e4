package main

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func TestDemoServesUntilItIsTold(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	dsn, _, base := p.ready()

	demo := connectTo(t, dsn)
	if got := ask1[string](t, demo, "SELECT current_user || ' ' || current_database()"); got != "demo default" {
		t.Errorf("the psql line leads to %s", got)
	}
	if ask1[bool](t, demo, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Error("demo is a superuser")
	}
	if !ask1[bool](t, demo, "SELECT pg_get_userbyid(datdba) = 'demo' FROM pg_database WHERE datname = current_database()") {
		t.Error("demo does not own the database")
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("postgres", "postgres")
	if !ask1[bool](t, connectTo(t, u.String()), "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Error("postgres is no superuser")
	}
	u.User = url.UserPassword("demo", "wrong")
	var pgErr *pgconn.PgError
	if _, err := pgconn.Connect(t.Context(), u.String()); !errors.As(err, &pgErr) || pgErr.Code != "28P01" {
		t.Errorf("a wrong password: %v, want SQLSTATE 28P01", err)
	}
	for path, want := range map[string]string{
		"/healthz": "ok", "/readyz": "ok", "/metrics": `koldproxy_walapply_leading{db="default"} 1`,
	} {
		if status, body := get(t, base+path); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: status %d, no %q in\n%s", path, status, want, body)
		}
	}
	folder := filepath.Dir(ask1[string](t, connectTo(t, strings.Replace(u.String(), "demo:wrong", "postgres:postgres", 1)), "SHOW data_directory"))

	p.stop(os.Interrupt) // two sessions are open and idle
	if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there", folder)
	}
}

func TestDemoEndsWithATransactionOpen(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	dsn, _, _ := p.ready()
	conn := connectTo(t, dsn)
	do(t, conn, "BEGIN")
	p.stop(syscall.SIGTERM)
}

// Neither a fence nor the applier can go on, because somebody has locked the catalog.
func TestDemoEndsWithAFenceThatHangs(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	dsn, _, _ := p.ready()
	conn, waiting := connectTo(t, dsn), connectTo(t, dsn)
	do(t, conn, "CREATE TABLE t (id int PRIMARY KEY)")
	do(t, conn, "SELECT koldstore.manage_table('t')")
	super := connectTo(t, strings.Replace(dsn, "demo:demo", "postgres:postgres", 1))
	do(t, super, "BEGIN")
	do(t, super, "LOCK TABLE koldstore.checkpoint")
	do(t, conn, "INSERT INTO t VALUES (1)")
	hung := make(chan error, 1)
	go func() {
		_, err := waiting.Exec(t.Context(), "SELECT koldstore.wait_for_async_mirror()")
		hung <- err
	}()
	for ask1[int](t, super, "SELECT count(*) FROM pg_locks WHERE relation = 'koldstore.checkpoint'::regclass AND NOT granted") < 2 {
		time.Sleep(5 * time.Millisecond)
	}
	p.stop(syscall.SIGTERM)
	if err := <-hung; err == nil {
		t.Error("the fence returned")
	}
}

func TestDemoIsToldWhileItStarts(t *testing.T) {
	t.Parallel()
	for _, after := range []time.Duration{0, time.Millisecond, 200 * time.Millisecond, 700 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			p := start(t, demoArgs()...)
			if after > 0 {
				p.starts()
				time.Sleep(after) // the moment is what is tested, not waited for
				p.stop(syscall.SIGTERM)
				return
			}
			_ = p.cmd.Process.Signal(syscall.SIGTERM) // before main has a handler: any exit is right, if it comes
			p.wait()
		})
	}
}

func TestTourIsInterrupted(t *testing.T) {
	t.Parallel()
	for _, after := range []time.Duration{time.Millisecond, 500 * time.Millisecond, 0} {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			p := start(t, demoArgs("--tour")...)
			if after > 0 {
				p.starts()
				time.Sleep(after) // the moment is what is tested, not waited for
			} else {
				p.line("-- right") // in the middle of the tour
			}
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			code := p.wait()
			p.mu.Lock()
			defer p.mu.Unlock()
			said := ""
			for line := range strings.Lines(p.stderr.String()) {
				if !strings.HasPrefix(line, "{") { // which is the log
					said += line
				}
			}
			if code != exitFailed || said != "koldproxy: the tour was interrupted\n" {
				t.Errorf("exit code %d, and it says %q", code, said)
			}
		})
	}
}

func TestKeptDemoGoesOnAfterKill(t *testing.T) {
	t.Parallel()
	dir := reachableDir(t)
	p := start(t, demoArgs("--data", dir)...)
	dsn, _, _ := p.ready()
	conn := connectTo(t, dsn)
	do(t, conn, "CREATE TABLE t (id int PRIMARY KEY); CREATE STREAM s ON t WHEN (id > 1)")
	do(t, conn, "INSERT INTO t VALUES (1), (2)")
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.wait()

	p = start(t, demoArgs("--data", dir)...)
	dsn, _, _ = p.ready()
	conn = connectTo(t, dsn)
	do(t, conn, "INSERT INTO t VALUES (3)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	if got := ask1[string](t, conn, "SELECT string_agg(k::text, ',' ORDER BY id) FROM _stream_s"); got != "2,3" {
		t.Errorf("the stream has %s, want 2,3", got)
	}
	config := filepath.Join(dir, "koldproxy.toml")
	if info, err := os.Stat(config); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v, want mode 0600", config, info, err)
	}
	var out, errOut bytes.Buffer
	if code := execute(t.Context(), []string{"status", "--config", config}, &out, &errOut); code != exitFine || !strings.Contains(out.String(), "public.s") {
		t.Errorf("status: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	p.stop(syscall.SIGTERM)
	if _, err := os.Stat(filepath.Join(dir, "postgres", "data")); err != nil {
		t.Errorf("the kept data: %v", err)
	}
}

func TestKilledDemoLeavesNothing(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	dsn, _, _ := p.ready()
	conn := connectTo(t, strings.Replace(dsn, "demo:demo", "postgres:postgres", 1))
	folder := filepath.Dir(ask1[string](t, conn, "SHOW data_directory"))
	if _, err := os.Stat(filepath.Join(folder, "cold")); err != nil {
		t.Errorf("the cold store is elsewhere: %v", err)
	}
	raw, err := os.ReadFile(filepath.Join(folder, "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid := firstNumber(t, raw)
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.wait()
	for end := time.Now().Add(processTimeout); ; time.Sleep(5 * time.Millisecond) {
		_, err := os.Stat(folder)
		if errors.Is(err, os.ErrNotExist) && syscall.Kill(pid, 0) != nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s or process %d is still there", folder, pid)
		}
	}
}

func firstNumber(t *testing.T, postmasterPID []byte) int {
	t.Helper()
	line, _, _ := strings.Cut(string(postmasterPID), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestDemoNamesAPortThatIsTaken(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	_, broker, _ := p.ready()
	second := start(t, demoArgs("--mqtt-listen", broker)...)
	if code := second.wait(); code != exitFailed || !strings.Contains(second.output(), "mqtt.listen") {
		t.Errorf("exit code %d:\n%s", code, second.output())
	}
	p.stop(os.Interrupt)
}

func TestDemoWithEveryListenerButTheProxyTurnedOff(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(reachableDir(t), ".s.PGSQL.6543")
	p := start(t, "demo", "--listen", "unix:"+socket, "--pg-listen", "", "--mqtt-listen", "", "--http-listen", "")
	p.line("koldproxy ready")
	conn := connectTo(t, p.psqlLine())
	if got := ask1[string](t, conn, "SHOW listen_addresses"); got != "" {
		t.Errorf("PostgreSQL listens at %q", got)
	}
	p.stop(syscall.SIGTERM)
}

func TestDemoEndsWhenPostgreSQLDoes(t *testing.T) {
	t.Parallel()
	dir := reachableDir(t)
	p := start(t, demoArgs("--data", dir)...)
	p.ready()
	raw, err := os.ReadFile(filepath.Join(dir, "postgres", "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(firstNumber(t, raw), syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	if code := p.wait(); code != exitFailed || !strings.Contains(p.output(), "PostgreSQL has ended") {
		t.Errorf("exit code %d:\n%s", code, p.output())
	}
}

func TestTourIsRightAndNoticesWhatIsWrong(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs()...)
	dsn, broker, _ := p.ready()
	takeTour := func(text string) (string, error) {
		var out bytes.Buffer
		err := (&tour{dsn: dsn, broker: broker, out: &out}).run(t.Context(), text)
		return out.String(), err
	}
	if out, err := takeTour(tourText); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, change := range [][2]string{
		{"put    | 2 | 4800.00", "put    | 2 | 4800.01"},
		{"CREATE STREAM\n```", "CREATE TABLE\n```"},
		{"\n exit   | 3\n delete | 2\n(2 rows)", "\n delete | 2\n exit   | 3\n(2 rows)"},
		{`"op":"exit","k":3`, `"op":"put","k":3`},
		{"| yes, and cake | hot", "| yes, and cake | cold"},
		{"\n        4\n(1 row)", "\n        3\n(1 row)"},
	} {
		if strings.Count(tourText, change[0]) != 1 {
			t.Fatalf("the tour has %q %d times", change[0], strings.Count(tourText, change[0]))
		}
		if out, err := takeTour(strings.Replace(tourText, change[0], change[1], 1)); err == nil || !strings.Contains(out, "WRONG") {
			t.Errorf("with %q expected: %v\n%s", change[1], err, out)
		}
	}
	p.stop(syscall.SIGTERM)
}

func TestDemoTourExitsZero(t *testing.T) {
	t.Parallel()
	p := start(t, demoArgs("--tour")...)
	if code := p.wait(); code != exitFine || !strings.Contains(p.output(), "steps are right") {
		t.Errorf("exit code %d:\n%s", code, p.output())
	}
}
