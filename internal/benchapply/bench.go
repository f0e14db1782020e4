package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// bench is a server to measure on. It belongs to one goroutine.
type bench struct {
	options
	cluster *localpg.Cluster
	made    int // databases so far
}

func newBench(ctx context.Context, o options) (*bench, error) {
	binary, err := filepath.Abs(o.binary)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(binary); err != nil {
		return nil, fmt.Errorf("%w (make build)", err)
	}
	o.binary = binary
	cluster, err := localpg.Start(ctx, localpg.Config{Settings: map[string]string{
		"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "logical_decoding_work_mem": "64MB",
	}})
	if err != nil {
		return nil, err
	}
	return &bench{options: o, cluster: cluster}, nil
}

func (b *bench) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return b.cluster.Stop(ctx)
}

// database is a source database with koldproxy's catalog, the subscriber's database next to it, and a session in each.
type database struct {
	b            *bench
	name         string
	source, copy *pgx.Conn
	proxyAddr    string
	mqttAddr     string // empty: no broker
	serving      *exec.Cmd
	log          string // what koldproxy writes
}

func (b *bench) newDatabase(ctx context.Context) (*database, error) {
	b.made++
	d := &database{b: b, name: fmt.Sprintf("bench%d", b.made)}
	admin, err := pgx.Connect(ctx, b.cluster.DSN("postgres", "", ""))
	if err != nil {
		return nil, err
	}
	defer admin.Close(ctx)
	for _, name := range []string{d.name, d.name + "_copy"} {
		if _, err := admin.Exec(ctx, `CREATE DATABASE `+name); err != nil {
			return nil, err
		}
	}
	if d.source, err = pgx.Connect(ctx, b.cluster.DSN(d.name, "", "")); err != nil {
		return nil, err
	}
	if d.copy, err = pgx.Connect(ctx, b.cluster.DSN(d.name+"_copy", "", "")); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, b.binary, d.arguments("migrate", "up")...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("migrate: %w\n%s", err, out)
	}
	d.log = filepath.Join(b.cluster.Folder, d.name+".log")
	return d, nil
}

func (d *database) arguments(command ...string) []string {
	if d.mqttAddr != "" {
		command = append(command, "--set", "mqtt.enabled=true", "--set", "mqtt.listen="+d.mqttAddr)
	}
	return append(command,
		"--set", "postgres.dsn="+d.b.cluster.DSN(d.name, "", ""), "--set", "postgres.databases="+d.name,
		"--set", "cold.url=file://"+filepath.Join(d.b.cluster.Folder, "cold"), "--set", "http.listen=", "--set", "proxy.listen="+d.proxyAddr)
}

// drop ends everything that has to do with d and removes it.
func (d *database) drop(ctx context.Context) error {
	if err := d.stop(); err != nil {
		return err
	}
	_ = d.source.Close(ctx)
	_ = d.copy.Close(ctx)
	admin, err := pgx.Connect(ctx, d.b.cluster.DSN("postgres", "", ""))
	if err != nil {
		return err
	}
	defer admin.Close(ctx)
	for _, sql := range []string{
		`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '` + d.name + `'`,
		`DROP DATABASE ` + d.name + ` WITH (FORCE)`,
		`CHECKPOINT`,
	} {
		if _, err := admin.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// startedSQL says whether koldproxy has its slot: one that is still being made is active as well, and no stream can begin yet.
const startedSQL = `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE active AND confirmed_flush_lsn IS NOT NULL AND database = current_database())`

// serve starts koldproxy.
func (d *database) serve(ctx context.Context) error {
	if d.proxyAddr == "" {
		var err error
		if d.proxyAddr, err = freeAddress(ctx); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()                                             //nolint:errcheck // the child has its own descriptor
	d.serving = exec.Command(d.b.binary, d.arguments("serve")...) //nolint:noctx // stop ends it
	d.serving.Stdout, d.serving.Stderr = log, log
	d.serving.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return d.serving.Start()
}

// freeAddress is one that nobody listens on.
func freeAddress(ctx context.Context) (string, error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return ln.Addr().String(), ln.Close()
}

// stop ends koldproxy if it runs.
func (d *database) stop() error {
	if d.serving == nil {
		return nil
	}
	err := d.serving.Process.Signal(syscall.SIGTERM)
	_ = d.serving.Wait()
	d.serving = nil
	return err
}

// peakBytes is how much memory koldproxy has held at most.
func (d *database) peakBytes() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.serving.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, errors.New("no VmHWM in the status of the process")
}

// exec runs statements in a session.
func exec1(ctx context.Context, conn *pgx.Conn, statements ...string) error {
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%.200s: %w", sql, err)
		}
	}
	return nil
}

// value asks for one value.
func value[T any](ctx context.Context, conn *pgx.Conn, sql string, args ...any) (v T, err error) {
	if err = conn.QueryRow(ctx, sql, args...).Scan(&v); err != nil {
		err = fmt.Errorf("%.200s: %w", sql, err)
	}
	return v, err
}

// patience bounds every wait.
const patience = 5 * time.Minute

// await polls until a query says true.
func await(ctx context.Context, conn *pgx.Conn, pause time.Duration, sql string, args ...any) error {
	for end := time.Now().Add(patience); ; time.Sleep(pause) {
		ok, err := value[bool](ctx, conn, sql, args...)
		if err != nil || ok {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("waited in vain for %.200s", sql)
		}
	}
}

// manage gives tables a mirror and waits until it is seeded. koldproxy must run.
func (d *database) manage(ctx context.Context, tables int) error {
	for i := range tables {
		if err := exec1(ctx, d.source, fmt.Sprintf(`SELECT koldstore.manage_table('t%d')`, i)); err != nil {
			return err
		}
	}
	return await(ctx, d.source, 20*time.Millisecond, `SELECT bool_and(state = 'active') FROM koldstore.managed_table`)
}

// stream makes n streams on t0, through the proxy; each row matches one of n.
func (d *database) stream(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	conn, err := d.proxied(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for i := range n {
		if err := exec1(ctx, conn, fmt.Sprintf(`CREATE STREAM s%[1]d ON t0 WHEN (bucket %% %[2]d = %[1]d AND amount >= 0)`, i, n)); err != nil {
			return err
		}
	}
	return await(ctx, d.source, 20*time.Millisecond, `SELECT bool_and(state = 'active') FROM koldstore.stream`)
}

// proxied is a session that passes through koldproxy, which must run.
func (d *database) proxied(ctx context.Context) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(d.b.cluster.DSN(d.name, "", ""))
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(d.proxyAddr)
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, err
	}
	cfg.TLSConfig, cfg.Fallbacks = nil, nil // which would lead past the proxy
	cfg.Host, cfg.Port = host, uint16(number)
	return pgx.ConnectConfig(ctx, cfg)
}

// program is where a program of PostgreSQL's is. Not everybody installs those for clients next to the server.
func (b *bench) program(name string) string {
	path := filepath.Join(b.cluster.BinDir, name)
	if _, err := os.Stat(path); err != nil {
		return name
	}
	return path
}

// pgbench runs a script with some clients, for a number of transactions each or for a time. It returns transactions per second.
func (d *database) pgbench(ctx context.Context, script string, args ...string) (float64, error) {
	path := filepath.Join(d.b.cluster.Folder, "script.sql")
	if script != "" {
		if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
			return 0, err
		}
		args = append(args, "-f", path)
	}
	cmd := exec.CommandContext(ctx, d.b.program("pgbench"), append([]string{"-n"}, append(args, d.b.cluster.DSN(d.name, "", ""))...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("pgbench: %w\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if rest, ok := strings.CutPrefix(line, "tps = "); ok {
			number, _, _ := strings.Cut(rest, " ")
			return strconv.ParseFloat(number, 64)
		}
	}
	return 0, fmt.Errorf("pgbench says no tps:\n%s", out)
}
