package localpg_test

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) {
	if dir, ok := os.LookupEnv(ownerEnv); ok {
		owner(dir)
	}
	localpg.Main(m)
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	return conn
}

func queryString(t *testing.T, dsn, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var s string
	if err := conn.QueryRow(t.Context(), sql).Scan(&s); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return s
}

func exec1(t *testing.T, dsn, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestSharedClusterIsReadyForLogicalReplication(t *testing.T) {
	t.Parallel()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	for setting, want := range map[string]string{
		"wal_level": "logical", "max_wal_senders": "20", "max_replication_slots": "20",
		"password_encryption": "scram-sha-256", "server_encoding": "UTF8",
	} {
		if got := queryString(t, dsn, "SELECT current_setting('"+setting+"')"); got != want {
			t.Errorf("%s is %s, want %s", setting, got, want)
		}
	}
}

func TestEachDatabaseIsFreshAndDropsItsSlots(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	var dsn string
	t.Run("in use by a slot and a connection", func(t *testing.T) {
		dsn = cluster.TestDatabase(t)
		conn := connect(t, dsn)
		if _, err := conn.Exec(t.Context(), "SELECT pg_create_logical_replication_slot('localpg_fresh', 'pgoutput')"); err != nil {
			t.Fatal(err)
		}
	})
	_, err := pgx.Connect(t.Context(), dsn)
	if err == nil || !strings.Contains(err.Error(), "3D000") {
		t.Errorf("connecting to a dropped database: %v, want SQLSTATE 3D000", err)
	}
	n := queryString(t, cluster.DSN("postgres", "", ""), "SELECT count(*)::text FROM pg_replication_slots WHERE slot_name = 'localpg_fresh'")
	if n != "0" {
		t.Errorf("the slot is still there")
	}
}

func TestWrongPasswordIsRefusedOnEveryWayIn(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	socket := "host=" + cluster.SocketDir + " port=" + strconv.Itoa(cluster.Port) + " user=postgres password=wrong dbname=postgres"
	for _, dsn := range []string{cluster.DSN("postgres", "postgres", "wrong"), socket} {
		if _, err := pgx.Connect(t.Context(), dsn); err == nil || !strings.Contains(err.Error(), "28P01") {
			t.Errorf("connect with a wrong password: %v, want SQLSTATE 28P01", err)
		}
	}
}

func TestServerIsNotRoot(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	info, err := os.Stat(cluster.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid == 0 {
		t.Errorf("the data directory belongs to root")
	}
}

func TestKillAndRestartKeepPortAndCommittedRows(t *testing.T) {
	t.Parallel()
	cluster, err := localpg.Start(t.Context(), localpg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	})
	dsn := cluster.DSN("postgres", "", "")
	exec1(t, dsn, "CREATE TABLE kept AS SELECT 'before'::text AS v")
	if err := cluster.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-cluster.Exited()
	if err := cluster.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := queryString(t, dsn, "SELECT v FROM kept"); got != "before" {
		t.Errorf("after a kill the row is %q", got)
	}
	if err := cluster.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := queryString(t, dsn, "SELECT v FROM kept"); got != "before" {
		t.Errorf("after a restart the row is %q", got)
	}
}

func TestSocketOnlyClusterHasNoTCPPort(t *testing.T) {
	t.Parallel()
	cluster, err := localpg.Start(t.Context(), localpg.Config{SocketOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Stop(t.Context())
	if got := queryString(t, cluster.DSN("postgres", "", ""), "SELECT current_setting('listen_addresses')"); got != "" {
		t.Errorf("listen_addresses is %q", got)
	}
}

func TestStopRemovesTheFolderAndMayBeRepeated(t *testing.T) {
	t.Parallel()
	cluster, err := localpg.Start(t.Context(), localpg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := cluster.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Dir(cluster.DataDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
	if err := cluster.Restart(t.Context()); err == nil {
		t.Error("a stopped cluster restarted")
	}
}

func TestKeptDirContinuesWhereItStoppedAndHasOneUser(t *testing.T) {
	t.Parallel()
	cfg := localpg.Config{Dir: keptDir(t), Password: "secret", Durable: true}
	first, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	exec1(t, first.DSN("postgres", "", ""), "CREATE TABLE kept AS SELECT 'still here'::text AS v")
	if _, err := localpg.Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second start on the same folder: %v, want an error that says it is in use", err)
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Stop(t.Context())
	if got := queryString(t, second.DSN("postgres", "", ""), "SELECT v FROM kept"); got != "still here" {
		t.Errorf("the kept row is %q", got)
	}
}

func TestFailedStartShowsTheLogAndLeavesNothing(t *testing.T) {
	t.Parallel()
	_, err := localpg.Start(t.Context(), localpg.Config{Settings: map[string]string{"shared_buffers": "nonsense"}})
	if err == nil || !strings.Contains(err.Error(), `"nonsense"`) {
		t.Fatalf("the error of a failed start is %v, want the server's own words in it", err)
	}
}

func TestKeptDirNeedsAPassword(t *testing.T) {
	t.Parallel()
	if _, err := localpg.Start(t.Context(), localpg.Config{Dir: t.TempDir()}); err == nil {
		t.Error("a kept cluster without a password started")
	}
}

func TestFindBinaries(t *testing.T) {
	t.Parallel()
	if _, err := localpg.FindBinaries(t.TempDir()); !errors.Is(err, localpg.ErrNoBinaries) {
		t.Errorf("an empty directory: %v, want ErrNoBinaries", err)
	}
	dir := t.TempDir()
	for _, name := range []string{"postgres", "initdb"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := localpg.FindBinaries(dir); err != nil || got != dir {
		t.Errorf("FindBinaries(%q) = %q, %v", dir, got, err)
	}
}

// keptDir is a folder that an unprivileged server can reach, which t.TempDir is not everywhere.
func keptDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "koldproxy-kept-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// ownerEnv makes this test binary start a cluster, print where it is, and wait to be killed. Its value is the folder to
// keep; empty for a temporary one.
const ownerEnv = "LOCALPG_TEST_OWNER"

func owner(dir string) {
	cfg := localpg.Config{Dir: dir, Password: "secret"}
	cluster, err := localpg.Start(context.Background(), cfg)
	if err != nil {
		os.Stdout.WriteString("error " + strings.ReplaceAll(err.Error(), "\n", " ") + "\n")
		os.Exit(1)
	}
	os.Stdout.WriteString(cluster.DataDir + "\n" + cluster.SocketDir + "\n" + cluster.DSN("postgres", "", "") + "\n")
	select {}
}

type abandoned struct {
	dataDir, socketDir, dsn string
	pid                     int
}

// abandon starts a cluster in another process and kills that process with SIGKILL.
func abandon(t *testing.T, dir string, use func(dsn string)) abandoned {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for scan := bufio.NewScanner(out); len(lines) < 3 && scan.Scan(); {
		lines = append(lines, scan.Text())
	}
	if len(lines) < 3 {
		t.Fatalf("the owner process says %q", lines)
	}
	raw, err := os.ReadFile(filepath.Join(lines[0], "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.SplitN(string(raw), "\n", 2)[0])
	if err != nil {
		t.Fatal(err)
	}
	use(lines[2])
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return abandoned{dataDir: lines[0], socketDir: lines[1], dsn: lines[2], pid: pid}
}

// eventually polls, since nobody is left who could report.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 seconds: %s", what)
		}
	}
}

func TestKilledOwnerLeavesNoServerAndNoFolder(t *testing.T) {
	t.Parallel()
	old := abandon(t, "", func(string) {})
	eventually(t, "the server ends", func() bool { return syscall.Kill(old.pid, 0) != nil })
	eventually(t, "the folder goes", func() bool {
		_, err := os.Stat(filepath.Dir(old.dataDir))
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestKeptDirStartsAgainRightAfterItsOwnerWasKilled(t *testing.T) {
	t.Parallel()
	dir := keptDir(t)
	old := abandon(t, dir, func(dsn string) { exec1(t, dsn, "CREATE TABLE kept AS SELECT 'survived'::text AS v") })
	cluster, err := localpg.Start(t.Context(), localpg.Config{Dir: dir, Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Stop(t.Context())
	if got := queryString(t, cluster.DSN("postgres", "", ""), "SELECT v FROM kept"); got != "survived" {
		t.Errorf("the kept row is %q", got)
	}
	eventually(t, "the old socket folder goes", func() bool {
		_, err := os.Stat(old.socketDir)
		return errors.Is(err, os.ErrNotExist)
	})
}

// TestReaperOfADeadOwnerSparesTheNextServer: the reaper may wake up long after the owner's death.
func TestReaperOfADeadOwnerSparesTheNextServer(t *testing.T) {
	t.Parallel()
	dir := keptDir(t)
	var reaper int
	old := abandon(t, dir, func(string) { reaper = stopReaper(t, dir) })
	cluster, err := localpg.Start(t.Context(), localpg.Config{Dir: dir, Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Stop(t.Context())
	if err := syscall.Kill(reaper, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the reaper has done its work", func() bool {
		_, err := os.Stat(filepath.Dir(old.socketDir))
		return errors.Is(err, os.ErrNotExist)
	})
	select {
	case <-cluster.Exited():
		t.Error("the next server is gone as well")
	default:
	}
	if got := queryString(t, cluster.DSN("postgres", "", ""), "SELECT 'alive'"); got != "alive" {
		t.Errorf("the next server says %q", got)
	}
}

// stopReaper finds the reaper that watches over a folder and suspends it.
func stopReaper(t *testing.T, dir string) int {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range lines {
		raw, err := os.ReadFile(line)
		if err != nil || !strings.HasPrefix(string(raw), "/bin/sh\x00") || !strings.Contains(string(raw), filepath.Join(dir, "data")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(line)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	t.Fatal("there is no reaper")
	return 0
}

func TestStalePIDFileOfAnotherProcessDoesNotStopAStart(t *testing.T) {
	t.Parallel()
	cfg := localpg.Config{Dir: keptDir(t), Password: "secret"}
	first, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The number of a process that lives and is no server, as after a restart of a container.
	stale := strconv.Itoa(os.Getpid()) + "\n" + first.DataDir + "\n1\n5432\n\n\n0 0\nready   \n"
	if err := os.WriteFile(filepath.Join(first.DataDir, "postmaster.pid"), []byte(stale), 0o600); err != nil {
		t.Fatal(err)
	}
	second, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}
