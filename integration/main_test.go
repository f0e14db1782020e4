package integration_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// longTests says that `make test-long` is running: the same tests with more rounds.
var longTests = os.Getenv("KOLDPROXY_TEST_LONG") != ""

// noRaceSleep takes away the second for which the race detector makes a program wait at its end, for races that it could still find.
const noRaceSleep = "GORACE=atexit_sleep_ms=0"

// binary is the koldproxy under test; workDir the folder for what the tests write.
var binary, workDir string

func TestMain(m *testing.M) { localpg.Main(suite{m}) }

// suite surrounds the tests with building the binary and ending the shared instance.
type suite struct{ m *testing.M }

func (s suite) Run() int {
	code := 1
	if err := s.prepare(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = s.m.Run()
	}
	if err := endShared(code != 0); err != nil {
		fmt.Fprintln(os.Stderr, "the shared instance:", err)
		code = 1
	}
	if err := os.RemoveAll(workDir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

func (s suite) prepare() error {
	var err error
	if workDir, err = newFolder(); err != nil {
		return err
	}
	binary = filepath.Join(workDir, "koldproxy")
	args := append(append([]string{"build"}, buildFlags...), "-o", binary, "../cmd/koldproxy")
	build := exec.Command("go", args...)
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build koldproxy: %w", err)
	}
	return nil
}

// newFolder makes a folder that PostgreSQL's own account may pass through and whose path is short enough for Unix sockets.
func newFolder() (string, error) {
	dir, err := os.MkdirTemp("", "kpt-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

var sharedDemo struct {
	once sync.Once
	inst *instance
	err  error
}

// shared returns the demo instance that tests share; the first call starts it.
func shared(t *testing.T) *instance {
	t.Helper()
	sharedDemo.once.Do(func() { sharedDemo.inst, sharedDemo.err = startInstance(demo, nil) })
	if sharedDemo.err != nil {
		t.Fatalf("the shared instance: %v", sharedDemo.err)
	}
	return sharedDemo.inst
}

// endShared stops the shared instance, if there is one, and shows its log when tests failed.
func endShared(failed bool) error {
	inst := sharedDemo.inst
	if inst == nil {
		return nil
	}
	err := errors.Join(inst.stop(syscall.SIGTERM), inst.checkFolder(), os.RemoveAll(inst.home))
	if failed || err != nil {
		fmt.Fprintf(os.Stderr, "log of the shared instance:\n%s\n", inst.logTail())
	}
	return err
}
