package localpg

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a running server. Its thread is its own: see hold.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the server has ended and been reaped
	err  error         // how it ended; set before done is closed
}

// startProcess starts cmd on a thread that lives as long as the server.
func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go p.hold(started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// hold forks the server and waits for it. The kernel's parent-death signal goes out when the forking thread ends, not when
// the process does, and Go ends idle threads as it likes; so this goroutine keeps its thread until the server is gone.
func (p *process) hold(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	p.err = p.cmd.Wait()
	close(p.done)
}

func (p *process) signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal the server: %w", err)
	}
	return nil
}

func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// pidFile is what a server says about itself in postmaster.pid.
type pidFile struct {
	pid   int
	ready bool
}

// readPIDFile reads data/postmaster.pid: the process id on line 1 (negative for a single-user server) and, once the server
// is up, its state on line 8. The server rewrites the file in place, so an unfinished one reads as not ready.
func readPIDFile(data string) (pidFile, error) {
	raw, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return pidFile{}, err
	}
	lines := strings.Split(string(raw), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(lines[0]))
	if err != nil {
		return pidFile{}, fmt.Errorf("read postmaster.pid: no process id in its first line")
	}
	up := []string{"ready", "standby"}
	return pidFile{pid: max(pid, -pid), ready: len(lines) >= 8 && slices.Contains(up, strings.TrimSpace(lines[7]))}, nil
}

// evictTimeout bounds how long a leftover server may take to go after each of the two signals.
const evictTimeout = 10 * time.Second

// evict makes sure that no server runs on data and that no postmaster.pid says so wrongly. The caller holds the folder's
// lock, so a server found here has lost its owner.
func evict(data string) error {
	state, err := readPIDFile(data)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !serves(state.pid, data) {
		return removePIDFile(data)
	}
	for _, sig := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGKILL} {
		if err := syscall.Kill(state.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("stop the old server, process %d: %w", state.pid, err)
		}
		for end := time.Now().Add(evictTimeout); time.Now().Before(end); time.Sleep(pollInterval) {
			if !serves(state.pid, data) {
				return removePIDFile(data)
			}
		}
	}
	return fmt.Errorf("the old server, process %d, does not stop", state.pid)
}

// serves says whether pid is a server on data. A server's working directory is its data directory; where that cannot be
// seen (no /proc), being alive has to do.
func serves(pid int, data string) bool {
	if _, err := os.Stat("/proc/self/cwd"); err != nil {
		return syscall.Kill(pid, 0) == nil
	}
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return false
	}
	real, err := filepath.EvalSymlinks(data)
	return err == nil && cwd == real
}

// removePIDFile removes what a dead server left. PostgreSQL would do it itself unless the number has meanwhile been given
// to another process, as happens all the time in containers.
func removePIDFile(data string) error {
	err := os.Remove(filepath.Join(data, "postmaster.pid"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// tail returns the last lines of a log file for an error message.
func tail(path string, lines int) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	raw = bytes.TrimSpace(raw)
	all := bytes.Split(raw, []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}
