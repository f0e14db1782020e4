package walapply_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

func TestOneOfTwoAppliersLeads(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var inside atomic.Int32
	whileLeading := func(c *walapply.Config) {
		c.TakeoverInterval = time.Second
		c.WhileLeading = func(ctx context.Context) error {
			if inside.Add(1) != 1 {
				t.Error("two leaders at a time")
			}
			defer inside.Add(-1)
			<-ctx.Done()
			return ctx.Err()
		}
	}
	first := d.startStreaming(&recorder{who: "first"}, whileLeading)
	second := d.start(&recorder{who: "second"}, whileLeading)
	d.exec(`INSERT INTO t VALUES (1)`)
	d.awaitApplied()
	if s := second.Status(); s.Leading || s.Err != nil {
		t.Errorf("second: %+v", s)
	}
	d.await("the first one's work", func() bool { return inside.Load() == 1 })

	begin := time.Now()
	first.stop()
	if s := first.Status(); s.Leading || s.Streaming {
		t.Errorf("first after its end: %+v", s)
	}
	d.exec(`INSERT INTO t VALUES (2)`)
	d.awaitApplied()
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("the change of leaders took %v", took)
	}
	if s := second.Status(); !s.Leading || s.Epoch != 2 {
		t.Errorf("second: %+v", s)
	}
	if got := query[string](d, `SELECT string_agg(who || ' ' || line, ', ' ORDER BY seq) FROM recorded`); got != "first INSERT t (1), second INSERT t (2)" {
		t.Error(got)
	}
}

func TestErrorOfWorkWhileLeadingGivesLeadershipUp(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	var runs atomic.Int32
	d.start(&recorder{}, func(c *walapply.Config) {
		c.WhileLeading = func(ctx context.Context) error {
			if runs.Add(1) == 1 {
				return errors.New("nothing to do")
			}
			<-ctx.Done()
			return nil
		}
	})
	d.await("a second reign", func() bool { return runs.Load() == 2 })
	if n := query[int](d, `SELECT epoch FROM koldstore.checkpoint`); n != 2 {
		t.Errorf("epoch %d", n)
	}
}

func TestFenceHoldsUntilTheEndOfItsTransaction(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	first := d.startStreaming(&recorder{who: "first"})
	conn, err := pgx.Connect(t.Context(), d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	d.exec(`INSERT INTO t VALUES (1)`)
	d.awaitApplied() // the fence does not stop applying

	first.stop()
	if err := first.Fence(t.Context(), tx); !errors.Is(err, walapply.ErrNotLeader) {
		t.Errorf("fence without leadership: %v", err)
	}
	second := d.startStreaming(&recorder{who: "second"})
	if _, err := tx.Exec(t.Context(), `INSERT INTO recorded (seq, line) VALUES (1, 'late')`); err == nil {
		t.Error("a transaction from before the change of leaders is still open")
	}
	if s := second.Status(); s.Epoch != 2 {
		t.Errorf("epoch %d", s.Epoch)
	}
}

// childDSN is set in the environment of a test binary that is to be runChild.
const childDSN = "KOLDPROXY_WALAPPLY_CHILD_DSN"

// runChild is an applier in a process of its own. It says "applying" when it is inside Apply with an open transaction, and goes on when it reads a line.
func runChild(dsn string) {
	in := bufio.NewReader(os.Stdin)
	cfg := walapply.DefaultConfig(dsn)
	rec := &recorder{who: "child", before: func(context.Context, []koldproxy.Change) error {
		fmt.Println("applying")
		_, err := in.ReadString('\n')
		return err
	}}
	a, err := walapply.New(cfg, rec, zerolog.New(os.Stderr), nil)
	if err == nil {
		err = a.Run(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// The connections of a stopped process stay open, so only its silence can tell.
func TestStoppedLeaderIsReplacedAndCannotWriteAfterwards(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	child := exec.CommandContext(ctx, os.Args[0])
	child.Env = append(os.Environ(), childDSN+"="+d.dsn)
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	lines := bufio.NewReader(out)
	d.await("the child to make the slot", func() bool { return query[bool](d, `SELECT system_identifier IS NOT NULL FROM koldstore.checkpoint`) })
	d.exec(`INSERT INTO t VALUES (1)`)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	second := d.start(&recorder{who: "second"}, func(c *walapply.Config) { c.TakeoverInterval = walapply.DefaultConfig(d.dsn).TakeoverInterval })
	begin := time.Now()
	if err := child.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	d.await("the second one to lead", func() bool { return second.Status().Leading })
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("replacing a stopped leader took %v", took)
	}
	d.awaitApplied()
	if err := child.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "go on\n"); err != nil {
		t.Fatal(err)
	}
	d.exec(`INSERT INTO t VALUES (2)`)
	d.awaitApplied()
	// The child has found out when it asks for the lock again: two leader sessions, one of which waits.
	d.await("the child to wait for its turn", func() bool {
		return query[int](d, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'koldproxy leader'`) == 2
	})
	if got := query[string](d, `SELECT string_agg(who || ' ' || line, ', ' ORDER BY seq) FROM recorded`); got != "second INSERT t (1), second INSERT t (2)" {
		t.Error(got)
	}
	if s := second.Status(); !s.Leading || s.Epoch != 2 {
		t.Errorf("second: %+v", s)
	}
}
