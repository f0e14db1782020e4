package proxy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

func TestPgx(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+"CREATE TABLE orders (id int PRIMARY KEY, total int)")
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			ctx := within(t)
			cfg, err := pgx.ParseConfig(p.dsn(t, direct))
			if err != nil {
				t.Fatal(err)
			}
			cfg.DefaultQueryExecMode = mode
			conn, err := pgx.ConnectConfig(ctx, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(ctx)
			for range 3 {
				rows, err := conn.Query(ctx, "SELECT n FROM koldstore.changes_since($1)", 2)
				if err != nil {
					t.Fatal(err)
				}
				got, err := pgx.CollectRows(rows, pgx.RowTo[int64])
				if err != nil || !slices.Equal(got, []int64{10, 11, 20, 21}) {
					t.Errorf("changes_since: %v, %v", got, err)
				}
			}
			err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
				var n int64
				if err := tx.QueryRow(ctx, "SELECT sum(n) FROM koldstore.changes_since($1)", 1).Scan(&n); err != nil || n != 21 {
					return fmt.Errorf("sum %d: %w", n, err)
				}
				tag, err := tx.Exec(ctx, "CREATE STREAM s ON orders WHEN (total > 1)")
				if err == nil && tag.String() != "CREATE STREAM" {
					err = fmt.Errorf("tag is %s", tag)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			if tag, err := conn.Exec(ctx, "DROP STREAM s"); err != nil || tag.String() != "DROP STREAM" {
				t.Errorf("%s, %v", tag, err)
			}
		})
	}
}

func mustExec(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(within(t), sql).ReadAll(); err != nil {
		t.Fatal(err)
	}
}

// psqlPath finds psql, which need not be where the server's binaries are.
func psqlPath(t *testing.T) string {
	t.Helper()
	if path, err := exec.LookPath("psql"); err == nil {
		return path
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/psql")
	if len(found) == 0 {
		t.Fatal("psql is not installed")
	}
	return found[len(found)-1]
}

func TestPsql(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	script := `CREATE TABLE t (i int, v text);
\copy t from stdin
1	one
2	two
\.
\copy t to stdout
SELECT n FROM koldstore.changes_since(1);
\bind 2
SELECT n FROM koldstore.changes_since($1) \g
CREATE STREAM s ON t WHEN (i > 1);
DROP STREAM s;
CREATE STREAM s ON t;
\d t
`
	cmd := exec.CommandContext(within(t), psqlPath(t), "-X", "-At", p.dsn(t, direct))
	cmd.Stdin = strings.NewReader(strings.ReplaceAll(script, "\\bind 2\nSELECT n FROM koldstore.changes_since($1) \\g\n", ""))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatal(err, string(out))
	}
	want := `CREATE TABLE
COPY 2
1	one
2	two
10
11
CREATE STREAM
DROP STREAM
ERROR:  WHEN is required in CREATE STREAM
LINE 1: CREATE STREAM s ON t;
                            ^
`
	if !strings.HasPrefix(string(out), want) {
		t.Errorf("got:\n%s\nwant:\n%s", out, want)
	}
}

// TestPipelineWithoutReading is the mutual block: a client that writes much before it reads.
func TestPipelineWithoutReading(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	w := dialWire(t, p.dsn(t, p.cluster.TestDatabase(t)))
	const statements = 50_000
	var batch []byte
	batch = appendParse(batch, "s", "SELECT repeat('x', 1000)")
	for range statements {
		batch = appendBind(batch, "", "s")
		batch = appendExecute(batch, "")
	}
	batch = appendSync(batch)
	var sent sync.WaitGroup
	sent.Go(func() { w.send(t, batch, 0) })
	rows := 0
	for {
		message, err := w.read()
		if err != nil {
			t.Fatal(err)
		}
		if message[0] == msgDataRow {
			rows++
		}
		if message[0] == msgReady {
			break
		}
	}
	sent.Wait()
	if rows != statements {
		t.Errorf("%d rows", rows)
	}
}

func TestLargeMessages(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	big := strings.Repeat("y", 20<<20)
	var got string
	if err := conn.QueryRow(ctx, "SELECT $1::text", big).Scan(&got); err != nil || got != big {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := conn.QueryRow(ctx, "SELECT '"+big+"'", pgx.QueryExecModeSimpleProtocol).Scan(&got); err != nil || got != big {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	var count int
	args := make([]any, 65535)
	holders := make([]string, len(args))
	for i := range args {
		args[i], holders[i] = "1", fmt.Sprintf("$%d", i+1)
	}
	err := conn.QueryRow(ctx, "SELECT cardinality(ARRAY["+strings.Join(holders, ",")+"])", args...).Scan(&count)
	if err != nil || count != len(args) {
		t.Errorf("%d parameters, %v", count, err)
	}
}

// TestHeldAnswerTooLarge lets an answer go that cannot be held, and does not repeat the statement then.
func TestHeldAnswerTooLarge(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, d *Deps) { c.HoldBytes, d.Fulfiller = 100_000, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	ctx := within(t)
	for _, begin := range []string{"", "BEGIN"} {
		mustExec(t, conn, begin)
		var rows, size int
		err := conn.QueryRow(ctx, `SELECT count(*), sum(length(v)) FROM (SELECT repeat('x', 1000) AS v FROM generate_series(1, 1000)
			UNION ALL SELECT n::text FROM koldstore.changes_since(1)) x`).Scan(&rows, &size)
		if err != nil || rows != 1002 {
			t.Errorf("%d rows, %v", rows, err)
		}
		result, err := conn.PgConn().Exec(ctx, "SELECT repeat('x', 1000) FROM generate_series(1, 1000) UNION ALL SELECT 'koldstore.changes_since()'; SELECT koldstore.changes_since(0)").ReadAll()
		if err != nil || len(result) != 2 || len(result[0].Rows) != 2 && len(result[0].Rows) != 1001 {
			t.Errorf("a large answer: %v", err)
		}
		_, err = conn.PgConn().Exec(ctx, "SELECT repeat('x', 1000) FROM generate_series(1, 1000); SELECT koldstore.changes_since(1)").ReadAll()
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded {
			t.Errorf("a demand behind a large answer: %v", err)
		}
		if status := conn.PgConn().TxStatus(); begin != "" && status != 'E' || begin == "" && status != 'I' {
			t.Errorf("transaction status %c", status)
		}
	}
}

func TestDemandsWithoutEnd(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	for i, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1000)", mode)
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded {
			t.Errorf("%v", err)
		}
		if got := f.count(); got != (i+1)*maxRounds {
			t.Errorf("%d demands", got)
		}
	}
}

// TestHugeError: an error that cannot be held goes through, and the session goes on.
func TestHugeError(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, d *Deps) { c.HoldBytes, d.Fulfiller = 100_000, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+`CREATE FUNCTION huge() RETURNS int LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION '%', repeat('x', 1000000) USING ERRCODE = 'KS003', DETAIL = '{"kind":"cold_page"}'; END $$`)
	conn := connect(t, p.dsn(t, direct))
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		_, err := conn.Exec(within(t), "SELECT huge() FROM koldstore.changes_since(0) RIGHT JOIN (SELECT 1) x ON true", mode)
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || len(e.Message) != 1_000_000 {
			t.Errorf("%.200v", err)
		}
		mustExec(t, conn, "SELECT 1")
	}
}

func TestNoFulfillerMeansAClearError(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1)")
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded || e.Hint == "" {
		t.Errorf("%v", err)
	}
}

func TestOtherDatabasesArePassedThrough(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.Databases = []string{"another"} })
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	_, err := conn.Exec(within(t), "CREATE STREAM s ON t")
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Message != `syntax error at or near "STREAM"` {
		t.Errorf("%v", err)
	}
}

// TestCancelHitsOnlyWhatItWasSentFor: once the cancel connection is closed, the next query must be safe.
func TestCancelHitsOnlyWhatItWasSentFor(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	for i := range 100 {
		done := make(chan error, 1)
		go func() { done <- conn.PgConn().CancelRequest(ctx) }()
		_, err := conn.Exec(ctx, fmt.Sprintf("SELECT pg_sleep(%g)", float64(i%3)*0.01))
		if e, ok := errors.AsType[*pgconn.PgError](err); err != nil && (!ok || e.Code != koldproxy.CodeQueryCanceled) {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(ctx, "SELECT 1"); err != nil {
			t.Fatalf("the query after cancel request %d: %v", i, err)
		}
	}
}

func TestCancelStormWithWrongKeys(t *testing.T) {
	t.Parallel()
	for _, forward := range []bool{false, true} {
		p := startProxy(t, func(c *Config, _ *Deps) { c.ForwardUnknownCancels, c.MaxCancels = forward, 4 })
		var storm sync.WaitGroup
		for i := range 100 {
			storm.Go(func() {
				w, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.send(t, cancelRequest([4]byte{0, 0, 1, byte(i)}, []byte{1, 2, 3, byte(i)}), 0)
				if err := w.in.fill(bufferSize); err == nil || len(w.in.buffered()) > 0 {
					t.Errorf("a cancel request was answered with %q", w.in.buffered())
				}
			})
		}
		storm.Wait()
		mustExec(t, connect(t, p.dsn(t, p.cluster.DSN("postgres", "", ""))), "SELECT 1")
	}
}

func TestCancelWhileADemandIsBeingFulfilled(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{block: make(chan struct{})}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	ctx := within(t)
	conn := connect(t, p.dsn(t, direct))
	for _, begin := range []string{"", "BEGIN"} {
		mustExec(t, conn, begin)
		cancelled := make(chan error, 1)
		go func() {
			<-f.block
			cancelled <- conn.PgConn().CancelRequest(ctx)
		}()
		_, err := conn.Exec(ctx, "SELECT koldstore.changes_since(1)")
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled {
			t.Errorf("got %v", err)
		}
		if err := <-cancelled; err != nil {
			t.Error(err)
		}
		if begin == "" {
			mustExec(t, conn, "SELECT 1")
		} else if conn.PgConn().TxStatus() != 'E' {
			t.Errorf("transaction status %c", conn.PgConn().TxStatus())
		}
	}
}

// backends waits until a database has n sessions.
func (p *proxied) backends(t testing.TB, direct string, n int) {
	t.Helper()
	cfg, err := pgx.ParseConfig(direct)
	if err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	conn := connect(t, p.cluster.DSN("postgres", "", ""))
	var got int
	for ctx.Err() == nil {
		err := conn.QueryRow(ctx, "SELECT count(*), pg_sleep(0.01) FROM pg_stat_activity WHERE datname = $1", cfg.Database).Scan(&got, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got == n {
			return
		}
	}
	t.Errorf("%d sessions, want %d", got, n)
}

// prepare runs SQL directly, in a session of its own.
func (p *proxied) prepare(t testing.TB, direct, sql string) {
	t.Helper()
	conn := connect(t, direct)
	mustExec(t, conn, sql)
	_ = conn.Close(within(t))
}

func TestClientsThatVanish(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{block: make(chan struct{})}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	abrupt := func(w *wire) {
		_ = w.conn.(*net.TCPConn).SetLinger(0) // RST, as after kill -9 with unread data
		_ = w.conn.Close()
	}
	t.Run("in a transaction", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, parseMessage(t, `Q "BEGIN"`), 0)
		w.until('Z', 1)
		abrupt(w)
		p.backends(t, direct, 0)
	})
	t.Run("politely in a transaction", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, joined(parseMessage(t, `Q "BEGIN"`), parseMessage(t, "X")), 0)
		p.backends(t, direct, 0)
	})
	t.Run("in the middle of a message", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, parseMessage(t, `Q "SELECT 1"`)[:8], 0)
		abrupt(w)
		p.backends(t, direct, 0)
	})
	t.Run("with a result under way", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, parseMessage(t, `Q "SELECT repeat('x', 1000) FROM generate_series(1, 1000000)"`), 0)
		if _, err := w.read(); err != nil {
			t.Fatal(err)
		}
		abrupt(w)
		p.backends(t, direct, 0)
	})
	t.Run("while a demand is being fulfilled", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, parseMessage(t, `Q "SELECT koldstore.changes_since(1)"`), 0)
		<-f.block
		abrupt(w)
		p.backends(t, direct, 0)
	})
	t.Run("statements sent ahead of the goodbye are carried out", func(t *testing.T) {
		w := dialWire(t, p.dsn(t, direct))
		w.send(t, joined(parseMessage(t, `Q "SELECT pg_sleep(0.2); CREATE TABLE kept (i int)"`), parseMessage(t, "X")), 0)
		_ = w.conn.Close()
		p.backends(t, direct, 0)
		p.prepare(t, direct, "SELECT FROM kept")
	})
}

func TestServerThatIsAway(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	away := ln.Addr().String()
	_ = ln.Close()
	p := startProxy(t, func(c *Config, _ *Deps) { c.Upstream = away })
	w, cfg := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
	w.send(t, startupPacketFor("user", cfg.User), 0)
	want := []string{`E S="FATAL" V="FATAL" C="08006" M="koldproxy cannot connect to the PostgreSQL server"`, "EOF"}
	if got := w.until('Z', 1); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// TestServerThatVanishes lets a server die without a word: between two messages and in the middle of one.
func TestServerThatVanishes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, last string
		want       []string
	}{
		{"between messages", "Z\x00\x00\x00\x05I", []string{"Z I", `E S="FATAL" V="FATAL" C="08006" M="koldproxy has lost the connection to the PostgreSQL server"`, "EOF"}},
		{"in a message", "Z\x00\x00\x00\x05ID\x00\x00\x00\xff\x00\x01", []string{"Z I", "EOF"}},
		{"after an error", "E\x00\x00\x00\x0fC57P01\x00Mx\x00\x00", []string{`E C="57P01" M="x"`, "EOF"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			vanish := make(chan struct{})
			var server sync.WaitGroup
			defer server.Wait()
			server.Go(func() {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				in := newStream(conn)
				if _, err := readStartupPacket(in); err != nil {
					return
				}
				_, _ = conn.Write([]byte("R\x00\x00\x00\x08\x00\x00\x00\x00" + c.last))
				<-vanish
			})
			p := startProxy(t, func(cfg *Config, _ *Deps) { cfg.Upstream = ln.Addr().String() })
			w, cfg := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
			w.send(t, startupPacketFor("user", cfg.User), 0)
			w.until('R', 1)
			if c.name == "after an error" {
				close(vanish)
			} else {
				time.AfterFunc(50*time.Millisecond, func() { close(vanish) })
			}
			if got := w.until('?', 1); !slices.Equal(got, c.want) {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.DrainTimeout = testTimeout })
	direct := p.cluster.TestDatabase(t)
	idle := dialWire(t, p.dsn(t, direct))
	busy := dialWire(t, p.dsn(t, direct))
	busy.send(t, parseMessage(t, `Q "BEGIN"`), 0)
	busy.until('Z', 1)
	stopped := make(chan struct{})
	go func() { defer close(stopped); p.stop() }()
	farewell := []string{`E S="FATAL" V="FATAL" C="57P01" M="terminating connection because koldproxy is shutting down"`, "EOF"}
	if got := idle.until('Z', 1); !slices.Equal(got, farewell) {
		t.Errorf("the idle session got %q", got)
	}
	newcomer, cfg := dialOnly(t, p.dsn(t, direct))
	newcomer.send(t, startupPacketFor("user", cfg.User, "database", cfg.Database), 0)
	if got := newcomer.until('Z', 1); !slices.Equal(got, []string{`E S="FATAL" V="FATAL" C="57P03" M="koldproxy is shutting down"`, "EOF"}) {
		t.Errorf("a newcomer got %q", got)
	}
	busy.send(t, parseMessage(t, `Q "SELECT 1"`), 0)
	if got := busy.until('Z', 1); got[len(got)-1] != "Z T" {
		t.Errorf("the transaction got %q", got)
	}
	select {
	case <-stopped:
		t.Error("Serve has returned with a transaction open")
	default:
	}
	busy.send(t, parseMessage(t, `Q "COMMIT"`), 0)
	if got := busy.until('?', 1); !slices.Equal(got, append([]string{`C "COMMIT"`, "Z I"}, farewell...)) {
		t.Errorf("the end of the transaction got %q", got)
	}
	<-stopped
	p.backends(t, direct, 0)
}

func TestDrainCutsWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{block: make(chan struct{})}
	p := startProxy(t, func(c *Config, d *Deps) { c.DrainTimeout, d.Fulfiller = 0, f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	through := p.dsn(t, direct)
	sleeping, open, demanding, silent := dialWire(t, through), dialWire(t, through), dialWire(t, through), dialWire(t, through)
	sleeping.send(t, parseMessage(t, `Q "SELECT pg_sleep(1000)"`), 0)
	open.send(t, parseMessage(t, `Q "BEGIN"`), 0)
	open.until('Z', 1)
	demanding.send(t, parseMessage(t, `Q "SELECT koldstore.changes_since(1)"`), 0)
	<-f.block
	silent.send(t, parseMessage(t, `Q "SELECT repeat('x', 1000) FROM generate_series(1, 10000000)"`), 0) // never read
	shaking, _ := dialOnly(t, through)
	begun := time.Now()
	p.stop()
	if took := time.Since(begun); took > 3*cutGrace {
		t.Errorf("cutting took %s", took)
	}
	for name, w := range map[string]*wire{"sleeping": sleeping, "open": open, "demanding": demanding} {
		got := w.until('?', 1)
		if !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, `C="57P01"`) }) {
			t.Errorf("the %s session got %q", name, got)
		}
	}
	if got := shaking.until('Z', 1); !slices.Equal(got, []string{"EOF"}) {
		t.Errorf("the client without a startup packet got %q", got)
	}
	p.backends(t, direct, 0)
}

func TestLimits(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.MaxConnections, c.HandshakeTimeout = 1, time.Second })
	direct := p.cluster.DSN("postgres", "", "")
	first := dialWire(t, p.dsn(t, direct))
	second, cfg := dialOnly(t, p.dsn(t, direct))
	second.send(t, startupPacketFor("user", cfg.User), 0)
	if got := second.until('Z', 1); !strings.Contains(got[0], `C="53300"`) {
		t.Errorf("one too many got %q", got)
	}
	slow, _ := dialOnly(t, p.dsn(t, direct))
	slow.send(t, []byte{0, 0}, 0)
	if got := slow.until('Z', 1); !slices.Equal(got, []string{"EOF"}) {
		t.Errorf("a slow client got %q", got)
	}
	first.send(t, parseMessage(t, `Q "SELECT 1"`), 0) // its deadline has passed with the handshake
	if got := first.until('Z', 1); got[len(got)-1] != "Z I" {
		t.Errorf("the session got %q", got)
	}
}

func TestUnixSockets(t *testing.T) {
	t.Parallel()
	cluster := startProxy(t).cluster
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.Upstream = fmt.Sprintf("unix:%s/.s.PGSQL.%d", cluster.SocketDir, cluster.Port)
	})
	dir := t.TempDir()
	path := filepath.Join(dir, ".s.PGSQL.1")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	_ = stale.Close()
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := Listen(ctx, "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(ctx, "unix:"+path); err == nil {
		t.Error("a socket in use was taken over")
	}
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(ctx, ln) }()
	cfg, err := pgx.ParseConfig(cluster.DSN("postgres", "", ""))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Host, cfg.Port = dir, 1
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, conn, "SELECT 1")
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	_ = conn.Close(context.Background())
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestClientTLS(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	p := startProxy(t, func(c *Config, _ *Deps) { c.ClientTLS, c.TLSCert, c.TLSKey = TLSRequire, cert, key })
	direct := p.cluster.DSN("postgres", "", "")
	_, err := pgconn.Connect(within(t), p.dsn(t, direct))
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "28000" {
		t.Errorf("a plain session: %v", err)
	}
	conn := connect(t, strings.Replace(p.dsn(t, direct), "sslmode=disable", "sslmode=require", 1))
	var size int
	if err := conn.QueryRow(within(t), "SELECT length(repeat('x', 1000000))").Scan(&size); err != nil {
		t.Error(err)
	}
	if err := conn.PgConn().CancelRequest(within(t)); err != nil {
		t.Errorf("cancel over TLS: %v", err)
	}
	w, cfg := dialOnly(t, p.dsn(t, direct))
	w.send(t, joined(request(codeSSL), startupPacketFor("user", cfg.User)), 0)
	if err := w.in.fill(bufferSize); err != nil || w.in.buffered()[0] != 'S' {
		t.Fatal("SSLRequest is not answered with S")
	}
	w.in.r++
	if got := w.until('Z', 1); !strings.Contains(got[0], `C="08P01"`) {
		t.Errorf("bytes stuffed before TLS got %q", got)
	}
}

func selfSigned(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, typ string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", keyDER)
}

// TestRoles: what the server does for walsenders is not looked at.
func TestReplicationSessionsPass(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	dsn := p.dsn(t, p.cluster.TestDatabase(t)) + "&replication=database"
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	results, err := conn.Exec(ctx, "IDENTIFY_SYSTEM").ReadAll()
	if err != nil || len(results[0].Rows) != 1 {
		t.Errorf("%v", err)
	}
	if _, err := conn.Exec(ctx, "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput").ReadAll(); err != nil {
		t.Error(err)
	}
}

func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err == nil {
		t.Error("the zero Config is valid")
	}
	cfg := DefaultConfig()
	cfg.Upstream = "localhost"
	cfg.ServerTLS = TLSRequire
	cfg.ClientTLS = "sometimes"
	cfg.MaxConnections = 0
	err := cfg.Validate()
	for _, name := range []string{"proxy.upstream", "proxy.server_tls", "proxy.client_tls", "proxy.max_connections"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not reported: %v", name, err)
		}
	}
	cfg = DefaultConfig()
	cfg.Upstream = "unix:/tmp/.s.PGSQL.5432"
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}

func TestCancelRequestLayout(t *testing.T) {
	t.Parallel()
	got := cancelRequest([4]byte{1, 2, 3, 4}, bytes.Repeat([]byte{9}, 256))
	if binary.BigEndian.Uint32(got) != uint32(len(got)) || len(got) != 268 {
		t.Errorf("length %d", len(got))
	}
}
