package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// process is a koldproxy that runs as a process of its own.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	mu     sync.Mutex
	stdout bytes.Buffer
	stderr bytes.Buffer
	seen   chan struct{} // closed when stdout has ended
	lines  chan string   // of stdout
}

// start runs koldproxy with args. It is killed at the end of the test at the latest.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startCommand(t, exec.Command(os.Args[0], args...))
}

// startCommand is start for a command that may have an environment and files of its own.
func startCommand(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, seen: make(chan struct{}), lines: make(chan string, 10_000)}
	p.cmd.Env = append(append(os.Environ(), mainEnv+"=1"), cmd.Env...)
	p.cmd.SysProcAttr = dieWithParent()
	p.cmd.Stderr = &locked{mu: &p.mu, w: &p.stderr}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error)
	go func() {
		// The kernel takes the end of this thread for the death of the parent.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.seen)
		defer close(p.lines)
		err := p.cmd.Start()
		if started <- err; err != nil {
			return
		}
		for scan := bufio.NewScanner(out); scan.Scan(); {
			p.mu.Lock()
			p.stdout.WriteString(scan.Text() + "\n")
			p.mu.Unlock()
			p.lines <- scan.Text()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.seen
		_ = p.cmd.Wait()
	})
	return p
}

type locked struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l *locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stdout.String() + p.stderr.String()
}

// processTimeout is for what takes seconds; only a failing test waits that long.
const processTimeout = 2 * time.Minute

// line waits for a line on stdout that begins with prefix and returns the rest of it.
func (p *process) line(prefix string) string {
	p.t.Helper()
	timeout := time.After(processTimeout)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("koldproxy ended without saying %q:\n%s", prefix, p.output())
			}
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest
			}
		case <-timeout:
			p.t.Fatalf("koldproxy does not say %q:\n%s", prefix, p.output())
		}
	}
}

// starts waits until a demo has begun to work: before main has a handler, a signal just ends the process.
func (p *process) starts() {
	p.t.Helper()
	p.says("demo starts")
}

// says waits for a text on stdout or stderr, and takes nothing from what line returns.
func (p *process) says(text string) {
	p.t.Helper()
	for end := time.Now().Add(processTimeout); !strings.Contains(p.output(), text); time.Sleep(time.Millisecond) {
		if time.Now().After(end) || p.ended() {
			p.t.Fatalf("koldproxy does not say %q:\n%s", text, p.output())
		}
	}
}

// stop sends a signal and expects exit code 0 within five seconds.
func (p *process) stop(sig os.Signal) {
	p.t.Helper()
	begin := time.Now()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
	if code := p.wait(); code != 0 {
		p.t.Errorf("exit code %d after %v:\n%s", code, sig, p.output())
	}
	if took := time.Since(begin); took > 5*time.Second {
		p.t.Errorf("%v took %v", sig, took)
	}
}

func (p *process) wait() int {
	p.t.Helper()
	timer := time.AfterFunc(processTimeout, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	<-p.seen
	_ = p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode()
}

// demoArgs are a demo on free ports.
func demoArgs(more ...string) []string {
	return append([]string{
		"demo", "--listen", "127.0.0.1:0", "--pg-listen", "127.0.0.1:0", "--mqtt-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
	}, more...)
}

// ready waits until a demo is ready and returns how to reach it.
func (p *process) ready() (dsn, broker, httpURL string) {
	p.t.Helper()
	p.line("koldproxy ready")
	dsn = p.psqlLine()
	match := regexp.MustCompile(`^-h (\S+) -p (\S+) `).FindStringSubmatch(p.line("mosquitto_sub "))
	if match == nil {
		p.t.Fatalf("no broker:\n%s", p.output())
	}
	return dsn, match[1] + ":" + match[2], strings.TrimSuffix(p.line("curl "), "/metrics")
}

// psqlLine is the DSN that the demo's psql line names.
func (p *process) psqlLine() string { return strings.Trim(p.line("psql "), "'") }

func connectTo(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func ask1[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func do(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// reachableDir is a folder that the server's own user can reach, which t.TempDir is not everywhere.
func reachableDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "koldproxy-test-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Clean(dir)
}
