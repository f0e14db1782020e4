package integration_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// TestSignalsEndTheDemo: SIGTERM and Ctrl-C, with sessions in every state. How soon, with which exit code and what is left
// behind is judged by instance.stop and by the cleanup of newInstance.
func TestSignalsEndTheDemo(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			inst := newInstance(t, demo)
			idle := inst.connect(t, "demo", nil)
			inTransaction := inst.connect(t, "demo", nil)
			busy := inst.connect(t, "demo", nil)
			inTransaction.exec("CREATE TABLE t (id int PRIMARY KEY)")
			inTransaction.exec("SELECT koldstore.manage_table('t')")
			inTransaction.exec("BEGIN")
			inTransaction.exec("INSERT INTO t VALUES (1)")
			sub := inst.subscribe(t, "demo", "demo", "$stream/#")
			if _, ok := sub.await("Subscribed"); !ok {
				t.Fatal("not subscribed")
			}
			result := make(chan error, 1)
			go func() {
				_, err := busy.Exec(busy.ctx, "SELECT pg_sleep(600)")
				result <- err
			}()
			await(t, "the long statement to run", func() bool { // not within a transaction, which sees one state of the view
				return idle.text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'") == "1"
			})
			stopped := make(chan error, 1)
			go func() { stopped <- inst.stop(sig) }()
			wantFarewell(t, idle)
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			if err := <-result; err == nil {
				t.Error("the long statement ended well")
			}
		})
	}
}

// wantFarewell waits for the last message to an idle session: an error that says the server goes away.
func wantFarewell(t *testing.T, c *client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(c.ctx, 2*stopTimeout)
	defer cancel()
	err := c.PgConn().WaitForNotification(ctx)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "57P01" || pg.Severity != "FATAL" {
		t.Errorf("the idle session saw %v, want FATAL 57P01", err)
	}
}

// TestDrainLetsTransactionsEnd: after SIGTERM an open transaction may go on for the drain time, newcomers may not come in, and the instance
// says that it is not ready.
func TestDrainLetsTransactionsEnd(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, keptDemo)
	idle := inst.connect(t, "demo", nil)
	c := inst.connect(t, "demo", nil)
	c.exec("CREATE TABLE t (id int PRIMARY KEY)")
	c.exec("BEGIN")
	c.exec("INSERT INTO t VALUES (1)")
	stopped := make(chan error, 1)
	go func() { stopped <- inst.stop(syscall.SIGTERM) }()
	wantFarewell(t, idle) // draining has begun
	if status, body := inst.get(t, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "shutting down") {
		t.Errorf("/readyz during the drain: %d %s", status, body)
	}
	if status, body := inst.get(t, "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz during the drain: %d %s", status, body)
	}
	c.exec("INSERT INTO t VALUES (2)")
	c.exec("COMMIT")
	wantFarewell(t, c)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}

	if err := inst.start(nil); err != nil {
		t.Fatal(err)
	}
	if got := inst.connect(t, "demo", nil).text("SELECT count(*) FROM t"); got != "2" {
		t.Errorf("%s rows after the restart", got)
	}
}

// TestKeptData: streams, feeds and cold segments are there after a restart, and the cursors go on.
func TestKeptData(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, keptDemo)
	c := inst.connect(t, "demo", nil)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, total int); CREATE STREAM big ON orders WHEN (total > 10)")
	c.exec("SELECT koldstore.manage_table('orders')")
	c.exec("INSERT INTO orders SELECT i, i FROM generate_series(1, 20) i")
	c.flush("orders")
	before := c.drain("orders", 0, 7)
	events, err := c.readLog("big", "", 3)
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []func() error{func() error { return inst.stop(syscall.SIGTERM) }, inst.kill} {
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if err := inst.start(nil); err != nil {
			t.Fatal(err)
		}
		c = inst.connect(t, "demo", nil)
		if after := c.drain("orders", 0, 7); !slices.Equal(after, before) {
			t.Errorf("the feed after a restart: %s", firstDifference(after, before))
		}
		again, err := c.readLog("big", "", 100)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(again, events) {
			t.Errorf("the log after a restart: %s", firstDifference(again, events))
		}
	}
	c.exec("UPDATE orders SET total = total + 1")
	c.fence()
	if feed := c.drain("orders", before[len(before)-1].seq, 100); len(feed) != 20 || feed[0].source != "hot" {
		t.Errorf("changes after the restarts: %v", feed)
	}
	c.checkFold("big", "orders", "total > 10")
	c.checkFeed("orders")
}

// TestAKilledDemoLeavesNothingBehind: without --data everything is temporary, kill -9 included.
func TestAKilledDemoLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, demo) // the cleanup looks at the folder
	inst.connect(t, "demo", nil).exec("CREATE TABLE t (id int PRIMARY KEY)")
	if err := inst.kill(); err != nil {
		t.Error(err)
	}
}

// TestWrongUsage: exit code 2, and a message that names what is wrong.
func TestWrongUsage(t *testing.T) {
	t.Parallel()
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "koldproxy.toml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const dsn = "[postgres]\ndsn = \"postgres://nobody@127.0.0.1:1/x\"\n"
	for _, test := range []struct {
		name string
		args []string
		says string
	}{
		{"an unknown section", []string{"serve", "--config", write(dsn + "[colour]\nred = 1\n")}, "colour"},
		{"an unknown key", []string{"serve", "--config", write(dsn + "[proxy]\nlisten = \"127.0.0.1:0\"\nlisen = \"x\"\n")}, "proxy.lisen"},
		{"a value of the wrong type", []string{"serve", "--config", write(dsn + "[storage]\nttl_reclaim_interval_secs = \"soon\"\n")}, "koldproxy.toml:4"},
		{"a negative interval", []string{"serve", "--config", write(dsn + "[storage]\nttl_reclaim_interval_secs = -1\n")}, "storage.ttl_reclaim_interval_secs"},
		{"no dsn", []string{"serve", "--config", write("[proxy]\nlisten = \"127.0.0.1:0\"\n")}, "postgres.dsn"},
		{"no file", []string{"serve", "--config", "/nonexistent/koldproxy.toml"}, "/nonexistent/koldproxy.toml"},
		{"an unknown flag", []string{"demo", "--colour"}, "--colour"},
		{"an unknown command", []string{"frobnicate"}, "frobnicate"},
		{"an argument too many", []string{"demo", "now"}, "now"},
		{"a bad port", []string{"demo", "--pg-listen", "127.0.0.1:x"}, "--pg-listen"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := program{name: binary, args: test.args}.run(t)
			if o.code != 2 || !strings.Contains(o.stderr, test.says) {
				t.Errorf("%v\nwant exit code 2 and a message with %q", o, test.says)
			}
		})
	}
	t.Run("a port in use", func(t *testing.T) {
		t.Parallel()
		inst := shared(t)
		began := time.Now()
		home := t.TempDir()
		o := program{name: binary, args: inst.args, env: []string{"TMPDIR=" + home}}.run(t)
		if o.code != 1 || !strings.Contains(o.stderr, "address already in use") && !strings.Contains(o.stderr, "Address already in use") {
			t.Errorf("after %v: %v", time.Since(began), o)
		}
	})
}
