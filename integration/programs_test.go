package integration_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// outcome is what a program did.
type outcome struct {
	stdout, stderr string
	code           int
}

func (o outcome) String() string {
	return fmt.Sprintf("exit code %d\nstdout:\n%s\nstderr:\n%s", o.code, o.stdout, o.stderr)
}

// program is a client program to run: psql, pgbench, mosquitto_sub, an interpreter with a script.
type program struct {
	name  string // as found in PATH, or among PostgreSQL's binaries
	args  []string
	env   []string
	stdin string
	limit time.Duration // what it may take; zero means testTimeout
}

// run runs a program in a clean environment and returns what it did; it must end within the time of a test.
func (p program) run(t *testing.T) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), cmp.Or(p.limit, testTimeout))
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, findProgram(t, p.name), p.args...)
	cmd.Env = append(cleanEnv(), p.env...)
	cmd.Dir = t.TempDir()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(p.stdin), &stdout, &stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("run %s %s: %v\n%s%s", p.name, strings.Join(p.args, " "), err, stdout.String(), stderr.String())
	}
	return outcome{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// mustRun is run for programs that have to succeed.
func (p program) mustRun(t *testing.T) outcome {
	t.Helper()
	o := p.run(t)
	if o.code != 0 {
		t.Fatalf("%s %s: %v", p.name, strings.Join(p.args, " "), o)
	}
	return o
}

// findProgram prefers the programs of the PostgreSQL under test.
func findProgram(t *testing.T, name string) string {
	t.Helper()
	if dir, err := localpg.FindBinaries(""); err == nil {
		dirs := []string{dir}
		if server, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres")); err == nil { // dir may hold links to some of them
			dirs = append(dirs, filepath.Dir(server))
		}
		for _, dir := range dirs {
			if path := filepath.Join(dir, name); isProgram(path) {
				return path
			}
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v; `make setup-test` installs what the tests need", err)
	}
	return path
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// cleanEnv is the environment without what libpq and localized programs would pick up.
func cleanEnv() []string {
	env := []string{noRaceSleep, "LC_ALL=C.UTF-8", "PGPASSFILE=/dev/null", "PGSERVICEFILE=/dev/null", "PGCONNECT_TIMEOUT=20", "PSQLRC=/dev/null", "PSQL_HISTORY=/dev/null"}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PG") && !strings.HasPrefix(kv, "LC_") && !strings.HasPrefix(kv, "LANG") {
			env = append(env, kv)
		}
	}
	return env
}
