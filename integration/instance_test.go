package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// readyLine is what demo prints, readyEntry what serve logs.
	readyLine  = "koldproxy ready"
	readyEntry = `"message":"ready"`
	// readyTimeout covers initdb, or crash recovery, on a busy machine with the race detector.
	readyTimeout = 90 * time.Second
	// stopTimeout is the contract: SIGTERM and SIGINT end koldproxy within five seconds.
	stopTimeout = 5 * time.Second
	// goneTimeout bounds how long the processes of a killed koldproxy may take to notice.
	goneTimeout = 20 * time.Second
	logTailSize = 16 << 10
)

// instance is a koldproxy process and what belongs to it. Its methods are for one goroutine at a time.
type instance struct {
	home  string // everything it writes is below it; TMPDIR of the process
	args  []string
	ports ports

	cmd    *exec.Cmd
	done   chan struct{} // closed when the process has ended
	err    error         // what Wait said; valid once done is closed
	killed bool
	family []process // the processes below it as of the last look
	stdout *lineBuffer
	stderr *lineBuffer
}

// ports are where an instance listens.
type ports struct{ proxy, pg, mqtt, http int }

// command makes the arguments of a koldproxy in a folder.
type command func(home string, p ports) ([]string, error)

// demo is `koldproxy demo` with every listener on, the proxy on a Unix socket too.
func demo(home string, p ports) ([]string, error) {
	return []string{
		"demo",
		"--listen", fmt.Sprintf("127.0.0.1:%d,unix:%s", p.proxy, socketPath(home, p.proxy)),
		"--pg-listen", fmt.Sprintf("127.0.0.1:%d", p.pg),
		"--mqtt-listen", fmt.Sprintf("127.0.0.1:%d", p.mqtt),
		"--http-listen", fmt.Sprintf("127.0.0.1:%d", p.http),
	}, nil
}

// keptDemo is demo with a --data folder, below home, that outlives the process.
func keptDemo(home string, p ports) ([]string, error) {
	args, err := demo(home, p)
	return append(args, "--data", filepath.Join(home, keptName)), err
}

const keptName = "kept"

// socketPath is where libpq looks for a server with the given port when its host is dir.
func socketPath(dir string, port int) string {
	return filepath.Join(dir, fmt.Sprintf(".s.PGSQL.%d", port))
}

// startInstance makes a folder, picks ports, runs koldproxy there and returns when it is ready.
func startInstance(c command, env []string) (*instance, error) {
	home, err := newFolder()
	if err != nil {
		return nil, err
	}
	i := &instance{home: home, stdout: &lineBuffer{}, stderr: &lineBuffer{}}
	if i.ports, err = pickPorts(); err == nil {
		i.args, err = c(home, i.ports)
	}
	if err == nil {
		err = i.start(env)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(home))
	}
	return i, nil
}

// newInstance is startInstance for one test: at its end the instance is stopped, if it still runs, and its folder must be
// empty. The log is shown if the test failed.
func newInstance(t *testing.T, c command) *instance {
	t.Helper()
	i, err := startInstance(c, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if i.running() {
			if err := i.stop(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
		if err := i.checkFolder(); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(i.home); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of koldproxy:\n%s", i.logTail())
		}
	})
	return i
}

// get asks the HTTP port. Its connection does not outlive the answer.
func (i *instance) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", i.ports.http, path), nil)
	must(t, err)
	r.Close = true
	answer, err := http.DefaultClient.Do(r)
	must(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	must(t, err)
	return answer.StatusCode, string(text)
}

// start runs the process and waits for its ready line. Restarting is calling it again.
func (i *instance) start(env []string) error {
	i.cmd = exec.Command(binary, i.args...)
	i.cmd.Env = append(os.Environ(), "TMPDIR="+i.home, "PGPASSFILE=/dev/null", "PGSERVICEFILE=/dev/null", noRaceSleep)
	i.cmd.Env = append(i.cmd.Env, env...)
	ready := make(chan struct{})
	isReady := sync.OnceFunc(func() { close(ready) })
	i.stdout.notify(readyLine, isReady)
	i.stderr.notify(readyEntry, isReady)
	i.cmd.Stdout, i.cmd.Stderr = i.stdout, i.stderr
	i.done, i.killed = make(chan struct{}), false
	started := make(chan error, 1)
	go i.hold(started)
	if err := <-started; err != nil {
		return err
	}
	timeout := time.NewTimer(readyTimeout)
	defer timeout.Stop()
	select {
	case <-ready:
		i.family = descendants(i.cmd.Process.Pid)
		return nil
	case <-i.done:
		return fmt.Errorf("koldproxy %s ended before it was ready: %w\n%s", strings.Join(i.args, " "), i.err, i.logTail())
	case <-timeout.C:
		return errors.Join(fmt.Errorf("koldproxy %s is not ready after %v\n%s", strings.Join(i.args, " "), readyTimeout, i.logTail()), i.kill())
	}
}

// hold runs the process on a thread of its own, because the kernel kills it (also when the tests are killed) as soon as
// the thread that started it ends.
func (i *instance) hold(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	i.cmd.SysProcAttr = dieWithParent()
	err := i.cmd.Start()
	started <- err
	if err == nil {
		i.err = i.cmd.Wait()
	}
	close(i.done)
}

func (i *instance) running() bool {
	select {
	case <-i.done:
		return false
	default:
		return true
	}
}

// stop sends a signal and checks the end: within five seconds, exit code 0, no process left, nothing bad in the log.
func (i *instance) stop(sig os.Signal) error {
	i.family = descendants(i.cmd.Process.Pid)
	began := time.Now()
	if err := i.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("signal koldproxy: %w", err)
	}
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-i.done:
	case <-timeout.C:
		stacks := i.quit()
		return fmt.Errorf("koldproxy runs %v after %v; its goroutines:\n%s", time.Since(began), sig, stacks)
	}
	var errs []error
	if i.err != nil {
		errs = append(errs, fmt.Errorf("after %v koldproxy ended with: %w", sig, i.err))
	}
	return errors.Join(append(errs, awaitGone(i.family, time.Second), i.checkLog())...)
}

// quit ends a process that does not want to, and returns the stacks that the Go runtime prints.
func (i *instance) quit() string {
	i.stderr.reset()
	_ = i.cmd.Process.Signal(syscall.SIGQUIT) // it may have ended meanwhile
	select {
	case <-i.done:
	case <-time.After(stopTimeout):
		_ = i.cmd.Process.Kill()
		<-i.done
	}
	return i.stderr.String()
}

// kill ends the process with SIGKILL and waits until the processes that it had are gone too.
func (i *instance) kill() error {
	i.family = descendants(i.cmd.Process.Pid)
	_ = i.cmd.Process.Kill() // it may have ended
	<-i.done
	i.killed = true
	return errors.Join(awaitGone(i.family, goneTimeout), i.checkLog())
}

// checkLog reports what must never be in a log.
func (i *instance) checkLog() error {
	log := i.stderr.String()
	var errs []error
	for _, bad := range []string{"WARNING: DATA RACE", "panic:", "fatal error:", "goroutine leak"} {
		if at := strings.Index(log, bad); at >= 0 {
			errs = append(errs, fmt.Errorf("in the log of koldproxy: %s", log[at:min(len(log), at+4<<10)]))
		}
	}
	return errors.Join(errs...)
}

// checkFolder reports files that the ended process left in its folder, apart from kept data. A killed process cannot remove
// its socket; the next one that listens there does.
func (i *instance) checkFolder() error {
	entries, err := os.ReadDir(i.home)
	if err != nil {
		return err
	}
	var left []string
	for _, e := range entries {
		socket := e.Type()&os.ModeSocket != 0 && i.killed
		if e.Name() != keptName && e.Name() != configName && !socket {
			left = append(left, e.Name())
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("koldproxy left behind: %v", left)
	}
	return nil
}

func (i *instance) logTail() string {
	log := i.stdout.String() + i.stderr.String()
	return log[max(0, len(log)-logTailSize):]
}

// lineBuffer keeps what a process prints and tells when a certain line has come.
type lineBuffer struct {
	mu    sync.Mutex
	text  bytes.Buffer
	from  int // where to look for the awaited text
	word  string
	found func()
}

func (b *lineBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text.Write(p)
	if b.found != nil && bytes.Contains(b.text.Bytes()[b.from:], []byte(b.word)) {
		b.found()
		b.found = nil
	}
	return len(p), nil
}

// notify calls found when text containing word is written from now on.
func (b *lineBuffer) notify(word string, found func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.from, b.word, b.found = b.text.Len(), word, found
}

func (b *lineBuffer) reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text.Reset()
}

func (b *lineBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// pickPorts finds four free ports below the range from which the system hands out its own.
func pickPorts() (ports, error) {
	var free []int
	for range 1000 {
		port := 20000 + rand.IntN(12000)
		ln, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil || slices.Contains(free, port) {
			continue
		}
		if err := ln.Close(); err != nil {
			return ports{}, err
		}
		if free = append(free, port); len(free) == 4 {
			return ports{proxy: free[0], pg: free[1], mqtt: free[2], http: free[3]}, nil
		}
	}
	return ports{}, errors.New("no free ports")
}

// process is told from a later one with the same id by the time it started.
type process struct {
	pid     int
	started string
	name    string
}

// descendants lists the processes below one, as /proc shows them.
func descendants(root int) []process {
	children := map[int][]process{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil
	}
	for _, path := range stats {
		if p, parent, ok := readStat(path); ok {
			children[parent] = append(children[parent], p)
		}
	}
	var list []process
	for queue := []int{root}; len(queue) > 0; queue = queue[1:] {
		for _, child := range children[queue[0]] {
			list = append(list, child)
			queue = append(queue, child.pid)
		}
	}
	return list
}

// readStat reads a process's id, start time, name and parent. A zombie counts as ended.
func readStat(path string) (p process, parent int, ok bool) {
	f, err := os.Open(path)
	if err != nil {
		return p, 0, false
	}
	defer f.Close()
	raw, err := bufio.NewReader(io.LimitReader(f, 4<<10)).ReadString('\n')
	if err != nil {
		return p, 0, false
	}
	open, end := strings.IndexByte(raw, '('), strings.LastIndexByte(raw, ')') // a name may hold anything
	fields := strings.Fields(raw[end+1:])
	if open < 0 || end < open || len(fields) < 20 || fields[0] == "Z" {
		return p, 0, false
	}
	p.name, p.started = raw[open+1:end], fields[19]
	p.pid, err = strconv.Atoi(strings.TrimSpace(raw[:open]))
	if err != nil {
		return p, 0, false
	}
	parent, err = strconv.Atoi(fields[1])
	return p, parent, err == nil
}

// awaitGone waits until none of the processes runs any more.
func awaitGone(family []process, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		var alive []string
		for _, p := range family {
			if now, _, ok := readStat(fmt.Sprintf("/proc/%d/stat", p.pid)); ok && now.started == p.started {
				alive = append(alive, fmt.Sprintf("%s (%d)", now.name, p.pid))
			}
		}
		if len(alive) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes left behind: %s", strings.Join(alive, ", "))
		}
		time.Sleep(5 * time.Millisecond) // polls /proc, which has no events
	}
}
