package localpg

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	dataName     = "data"
	logName      = "postgres.log"
	socketName   = "s"
	pollInterval = 5 * time.Millisecond
	// logLines is how much of the server's log goes into the error of a failed start.
	logLines = 20
	// maxLogBytes is the size from which a kept log is put aside at the next start.
	maxLogBytes = 8 << 20
	// portAttempts bounds the tries when a free port is taken by somebody else before the server has bound it.
	portAttempts = 5
)

// Cluster is a private PostgreSQL server. The fields are fixed once Start has returned; methods may be called from any
// goroutine.
type Cluster struct {
	// Host and Port are where the server listens on TCP.
	Host string
	Port int
	// SocketDir holds its Unix socket; it is a valid host for libpq and pgx.
	SocketDir string
	// Folder is a folder for the caller's own temporary things. It goes away with the cluster, also when the process is
	// killed; its mode lets everybody pass.
	Folder string
	// BinDir holds the binaries it runs from: psql, pg_dump and pgbench of the same version are there too.
	BinDir string
	// DataDir is the data directory.
	DataDir string
	// LogPath is the server's log.
	LogPath string
	// Major is the major version of the server.
	Major int

	cfg    Config
	acct   *account
	folder *runFolder
	kept   *os.File // lock of a kept Dir
	reaper *reaper

	mu      sync.Mutex
	proc    *process
	stopped bool
}

// Start makes a cluster, or continues the one in cfg.Dir, and returns when it accepts connections. ctx bounds the start
// only. A failure leaves nothing behind; its error ends with the last lines of the server's log.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	c := &Cluster{Host: cfg.Host, Port: cfg.Port, cfg: cfg}
	if err := c.start(ctx); err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", errors.Join(err, c.release()))
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	var err error
	if c.BinDir, err = FindBinaries(c.cfg.BinDir); err != nil {
		return err
	}
	if c.Major, err = majorVersion(ctx, c.BinDir); err != nil {
		return err
	}
	if c.Major < MinMajor {
		return fmt.Errorf("%s has version %d, %d or later is needed", c.BinDir, c.Major, MinMajor)
	}
	if c.acct, err = serverAccount(); err != nil {
		return err
	}
	if c.folder, err = newRunFolder(c.acct); err != nil {
		return err
	}
	c.Folder = c.folder.path
	home := c.folder.path
	if c.cfg.Dir != "" {
		if home, err = c.openKeptDir(); err != nil {
			return err
		}
	}
	c.DataDir = filepath.Join(home, dataName)
	c.LogPath = filepath.Join(home, logName)
	c.SocketDir = filepath.Join(c.folder.path, socketName)
	if err := c.makeOwnDir(c.SocketDir, 0o755); err != nil {
		return err
	}
	if c.reaper, err = startReaper(c.DataDir, c.folder.path); err != nil {
		return err
	}
	if err := evict(c.DataDir); err != nil {
		return err
	}
	if err := c.initialize(ctx); err != nil {
		return err
	}
	return c.launchOnFreePort(ctx)
}

// openKeptDir makes cfg.Dir if needed, locks it and returns its real path.
func (c *Cluster) openKeptDir() (string, error) {
	dir, err := filepath.Abs(c.cfg.Dir)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return "", err
	}
	if err := c.acct.canReach(dir); err != nil {
		return "", err
	}
	c.kept, err = lockFile(filepath.Join(dir, lockName))
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return "", fmt.Errorf("%s is in use by another process", dir)
	}
	return dir, err
}

func (c *Cluster) makeOwnDir(path string, mode os.FileMode) error {
	if err := os.Mkdir(path, mode); err != nil {
		return err
	}
	if err := os.Chmod(path, mode); err != nil { // past the umask
		return err
	}
	return c.acct.own(path)
}

// initialize runs initdb unless the data directory is complete already. A directory that a killed initdb left has no
// global/pg_control and is made anew.
func (c *Cluster) initialize(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(c.DataDir, "global", "pg_control")); err == nil {
		return c.checkDataVersion()
	}
	var problem error
	for _, locale := range []string{"C.UTF-8", "C"} { // not every system has the first
		if err := os.RemoveAll(c.DataDir); err != nil {
			return err
		}
		if problem = c.initdb(ctx, locale); problem == nil {
			return c.writeHBA()
		}
	}
	return problem
}

func (c *Cluster) initdb(ctx context.Context, locale string) error {
	if err := c.makeOwnDir(c.DataDir, 0o700); err != nil {
		return err
	}
	pwfile := filepath.Join(c.folder.path, "password")
	if err := os.WriteFile(pwfile, []byte(c.cfg.Password+"\n"), 0o600); err != nil {
		return err
	}
	defer os.Remove(pwfile) //nolint:errcheck // goes with the folder at the latest
	if err := c.acct.own(pwfile); err != nil {
		return err
	}
	args := []string{
		"-D", c.DataDir, "-U", c.cfg.Superuser, "--pwfile", pwfile, "--auth", "scram-sha-256",
		"--encoding", "UTF8", "--locale", locale,
	}
	if !c.cfg.Durable {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(c.BinDir, "initdb"), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.acct.credential()}
	cmd.Dir = c.folder.path
	cmd.Env = serverEnv()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (c *Cluster) checkDataVersion() error {
	raw, err := os.ReadFile(filepath.Join(c.DataDir, "PG_VERSION"))
	if err != nil {
		return err
	}
	if v := strings.TrimSpace(string(raw)); v != strconv.Itoa(c.Major) {
		return fmt.Errorf("%s was made by PostgreSQL %s, the binaries in %s are version %d", c.DataDir, v, c.BinDir, c.Major)
	}
	return c.writeHBA()
}

func (c *Cluster) writeHBA() error {
	lines := append(slices.Clone(c.cfg.HBA),
		"local all,replication all scram-sha-256",
		"host all,replication all all scram-sha-256",
	)
	path := filepath.Join(c.DataDir, "pg_hba.conf")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	return c.acct.own(path)
}

// launchOnFreePort starts the server; without a fixed port it tries again when somebody took the free one meanwhile.
func (c *Cluster) launchOnFreePort(ctx context.Context) error {
	var problem error
	for range portAttempts {
		if c.cfg.Port == 0 {
			port, err := freePort(ctx, c.Host)
			if err != nil {
				return err
			}
			c.Port = port
		}
		problem = c.launch(ctx)
		if problem == nil || c.cfg.Port != 0 || !strings.Contains(problem.Error(), "could not create any TCP/IP sockets") {
			return problem
		}
	}
	return problem
}

// Ports are picked below those that the kernel gives to outgoing connections (32768 and up on Linux): one of these could take
// a server's port while it restarts.
const (
	firstPort, lastPort = 10_000, 32_000
	portProbes          = 200
)

func freePort(ctx context.Context, host string) (int, error) {
	var problem error
	for range portProbes {
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // no secret
		var ln net.Listener
		if ln, problem = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port))); problem == nil {
			return port, ln.Close()
		}
	}
	return 0, fmt.Errorf("find a free port: %w", problem)
}

// launch starts the server process and waits until it accepts connections. The caller holds c.mu or is Start.
func (c *Cluster) launch(ctx context.Context) error {
	if info, err := os.Stat(c.LogPath); err == nil && info.Size() > maxLogBytes {
		if err := os.Rename(c.LogPath, c.LogPath+".1"); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(c.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the server has its own descriptor

	// Not bound to ctx: it limits the start, and a cancelled CommandContext would SIGKILL the server.
	cmd := exec.Command(filepath.Join(c.BinDir, "postgres"), c.serverArgs()...)
	cmd.SysProcAttr = serverAttr(c.acct)
	cmd.Dir = c.folder.path
	cmd.Env = serverEnv()
	cmd.Stdout, cmd.Stderr = log, log
	proc, err := startProcess(cmd)
	if err != nil {
		return fmt.Errorf("run the server: %w", err)
	}
	pid := []byte(strconv.Itoa(proc.cmd.Process.Pid))
	if err := os.WriteFile(filepath.Join(c.folder.path, serverPIDName), pid, 0o600); err != nil {
		return errors.Join(err, halt(context.Background(), proc, syscall.SIGQUIT)) //nolint:contextcheck // must end even so
	}
	if err := c.awaitReady(ctx, proc); err != nil {
		err = fmt.Errorf("%w; end of %s:\n%s", err, c.LogPath, tail(c.LogPath, logLines))
		return errors.Join(err, halt(context.Background(), proc, syscall.SIGQUIT)) //nolint:contextcheck // must end even so
	}
	c.proc = proc
	return nil
}

func (c *Cluster) serverArgs() []string {
	host := c.Host
	if c.cfg.SocketOnly {
		host = ""
	}
	settings := map[string]string{
		"listen_addresses":           host,
		"port":                       strconv.Itoa(c.Port),
		"unix_socket_directories":    c.SocketDir,
		"wal_level":                  "logical",
		"max_wal_senders":            "20",
		"max_replication_slots":      "20",
		"max_connections":            "200",
		"password_encryption":        "scram-sha-256",
		"logging_collector":          "off",
		"log_destination":            "stderr",
		"max_prepared_transactions":  "20",
		"timezone":                   "UTC",
		"dynamic_shared_memory_type": "posix",
	}
	if !c.cfg.Durable {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	for name, value := range c.cfg.Settings {
		settings[name] = value
	}
	args := []string{"-D", c.DataDir}
	for name, value := range settings {
		args = append(args, "-c", name+"="+value)
	}
	return args
}

// serverEnv is the caller's environment without what would change how the server behaves.
func serverEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	})
	return append(env, "LC_ALL=C")
}

// awaitReady waits for the word "ready" (or "standby") in postmaster.pid, as pg_ctl does.
func (c *Cluster) awaitReady(ctx context.Context, proc *process) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		state, err := readPIDFile(c.DataDir)
		if err == nil && state.pid == proc.cmd.Process.Pid && state.ready {
			return nil
		}
		select {
		case <-proc.done:
			return fmt.Errorf("the server ended at once (%w)", proc.err)
		case <-ctx.Done():
			return fmt.Errorf("wait for the server: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// DSN is a connection URL, over TCP unless that is turned off. An empty user means the superuser with its password.
func (c *Cluster) DSN(dbname, user, password string) string {
	if user == "" {
		user, password = c.cfg.Superuser, c.cfg.Password
	}
	u := url.URL{Scheme: "postgres", User: url.UserPassword(user, password), Path: "/" + dbname}
	if c.cfg.SocketOnly {
		u.RawQuery = url.Values{"host": {c.SocketDir}, "port": {strconv.Itoa(c.Port)}}.Encode()
	} else {
		u.Host = net.JoinHostPort(c.Host, strconv.Itoa(c.Port))
	}
	return u.String()
}

// Exited is closed when the server process that runs now has ended, for whatever reason. After Kill or Stop it is closed;
// after Restart there is a new one.
func (c *Cluster) Exited() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.proc.done
}

// Kill stops the server at once, without a checkpoint, as a crash would (SIGQUIT). Data and port stay for Restart.
func (c *Cluster) Kill(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return halt(ctx, c.proc, syscall.SIGQUIT)
}

// Restart stops the server if it runs (fast: open transactions are rolled back) and starts it again on the same port. It
// also starts a server that Kill has stopped.
func (c *Cluster) Restart(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return errors.New("restart PostgreSQL: the cluster has been stopped for good")
	}
	if err := halt(ctx, c.proc, syscall.SIGINT); err != nil {
		return err
	}
	if err := c.launch(ctx); err != nil {
		return fmt.Errorf("restart PostgreSQL: %w", err)
	}
	return nil
}

// Stop stops the server for good (fast: open transactions are rolled back; at once when ctx ends) and removes what is
// temporary. It may be called more than once.
func (c *Cluster) Stop(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil
	}
	c.stopped = true
	if err := halt(ctx, c.proc, syscall.SIGINT); err != nil {
		return errors.Join(err, c.release())
	}
	return c.release()
}

// release gives back everything but the server.
func (c *Cluster) release() error {
	var errs []error
	if c.reaper != nil {
		errs = append(errs, c.reaper.stop())
	}
	if c.folder != nil {
		errs = append(errs, c.folder.remove())
	}
	if c.kept != nil {
		errs = append(errs, c.kept.Close())
	}
	return errors.Join(errs...)
}

// killGrace is how long an immediate shutdown may take before SIGKILL follows.
const killGrace = 5 * time.Second

// halt sends sig to the server and waits for its end; when ctx ends first it goes on with SIGQUIT, then SIGKILL.
func halt(ctx context.Context, proc *process, sig syscall.Signal) error {
	if proc.exited() {
		return nil
	}
	if err := proc.signal(sig); err != nil {
		return err
	}
	select {
	case <-proc.done:
		return nil
	case <-ctx.Done():
	}
	for _, harder := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGKILL} {
		if err := proc.signal(harder); err != nil {
			return err
		}
		select {
		case <-proc.done:
			return nil
		case <-time.After(killGrace):
		}
	}
	return errors.New("the server does not stop")
}
