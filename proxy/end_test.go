package proxy

import (
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// backends waits until a database has n sessions.
func (p *proxied) backends(t testing.TB, direct string, n int) {
	t.Helper()
	p.await(t, direct, "true", n)
}

// await waits until n sessions of a database meet a condition.
func (p *proxied) await(t testing.TB, direct, condition string, n int) {
	t.Helper()
	cfg, err := pgx.ParseConfig(direct)
	if err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	conn := connect(t, p.cluster.DSN("postgres", "", ""))
	var got int
	for ctx.Err() == nil {
		err := conn.QueryRow(ctx, "SELECT count(*), pg_sleep(0.01) FROM pg_stat_activity WHERE datname = $1 AND "+condition, cfg.Database).Scan(&got, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got == n {
			return
		}
	}
	t.Errorf("%d sessions, want %d", got, n)
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
	p.await(t, direct, "state = 'active'", 2) // a cancel request that comes before its statement is lost
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
