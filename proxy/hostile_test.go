package proxy

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// bystander is a session of somebody who has nothing to do with an attack.
type bystander struct{ conn *pgx.Conn }

// pace is how long the bystander needs for a hundred queries.
func (b bystander) pace(t *testing.T) time.Duration {
	t.Helper()
	begun := time.Now()
	for range 100 {
		if _, err := b.conn.Exec(within(t), "SELECT 1"); err != nil {
			t.Fatalf("the bystander: %v", err)
		}
	}
	return time.Since(begun)
}

// Bounds of what an attack may do to others. They are generous: machines are busy, and an attack uses the same processors.
// What they tell apart is "slower" and "stuck".
const (
	slowdown  = 100
	leastPace = 100 * time.Millisecond
	maxGrowth = 96 << 20 // bytes of memory in use, after a collection
)

// attack runs f while a bystander goes on working, and checks that he does and that memory stays bounded.
func (p *proxied) attack(t *testing.T, f func()) {
	t.Helper()
	b := bystander{connect(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))}
	usual := max(b.pace(t), leastPace)
	before := inUse()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	for running := true; running; {
		if pace := b.pace(t); pace > slowdown*usual {
			t.Errorf("a bystander needs %s for what takes %s", pace, usual)
		}
		select {
		case <-done:
			running = false
		default:
		}
	}
	if growth := inUse() - before; growth > maxGrowth {
		t.Errorf("memory in use has grown by %d MB", growth>>20)
	}
	// A newcomer is served, too.
	conn := connect(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
	mustExec(t, conn, "SELECT 1")
	_ = conn.Close(within(t))
}

func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// crowd opens connections that stay open until the test ends.
func (p *proxied) crowd(t *testing.T, n int, say []byte) []net.Conn {
	t.Helper()
	var all []net.Conn
	for range n {
		conn, err := net.Dial("tcp", p.addr.String())
		if err != nil {
			t.Errorf("connection %d: %v", len(all), err)
			return all
		}
		t.Cleanup(func() { _ = conn.Close() })
		all = append(all, conn)
		_, _ = conn.Write(say) // it may have been thrown out already
	}
	return all
}

// TestHostileClients is not parallel with others: it measures.
func TestHostileClients(t *testing.T) { //nolint:paralleltest // memory is the whole process's
	user := func(p *proxied) string {
		cfg, err := pgx.ParseConfig(p.cluster.DSN("postgres", "", ""))
		if err != nil {
			t.Fatal(err)
		}
		return cfg.User
	}
	small := func(c *Config, _ *Deps) { c.MaxHandshakes = 200 }

	t.Run("two thousand connections that say nothing", func(t *testing.T) {
		p := startProxy(t, small)
		p.attack(t, func() { p.crowd(t, 2000, nil) })
		if got := p.counted(t, "koldproxy_proxy_refused_total", "handshakes"); got < 1000 {
			t.Errorf("%v made room for others", got)
		}
	})
	t.Run("slow startup packets", func(t *testing.T) {
		p := startProxy(t, small)
		p.attack(t, func() {
			packet := startupPacketFor("user", user(p), "database", "postgres")
			conns := p.crowd(t, 300, packet[:1])
			for i := 1; i < 20; i++ {
				for _, conn := range conns {
					_, _ = conn.Write(packet[i : i+1])
				}
			}
		})
	})
	t.Run("half-open handshakes with the server", func(t *testing.T) {
		p := startProxy(t, func(c *Config, _ *Deps) { c.MaxConnectionsPerAddress = 20 })
		p.attack(t, func() {
			p.crowd(t, 15, startupPacketFor("user", user(p), "database", "postgres")) // and never a password
		})
	})
	t.Run("huge lengths", func(t *testing.T) {
		p := startProxy(t)
		p.attack(t, func() {
			for _, length := range []uint32{0, 3, 4, 7, maxStartup + 1, 1 << 20, 1<<31 - 1, 1 << 31, 1<<32 - 1} {
				p.crowd(t, 20, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, length), 3<<16))
			}
			for _, kind := range "QPBDECFdfpHSXc?" {
				for _, length := range []uint32{0, 3, 1<<30 - 1, 1<<31 - 1, 1 << 31, 1<<32 - 1} {
					w := dialWire(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
					w.sendMore(binary.BigEndian.AppendUint32([]byte{byte(kind)}, length), 0)
					w.sendMore(make([]byte, 4096), 0)
					_ = w.conn.Close()
				}
			}
		})
	})
	t.Run("negative counts", func(t *testing.T) {
		p := startProxy(t)
		p.attack(t, func() {
			for _, body := range [][]byte{
				[]byte("\x00\x00\xff\xff\xff\xff"),                         // formats
				[]byte("\x00\x00\x00\x00\xff\xff"),                         // values
				[]byte("\x00\x00\x00\x00\x00\x01\xff\xff\xff\xfe\x00\x00"), // a value of -2 bytes
				[]byte("\x00\x00\x00\x00\x00\x01\x7f\xff\xff\xff\x00\x00"),
				[]byte("\x00\x00\x00\x00\x00\x00\xff\xff"),
			} {
				w := dialWire(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.send(t, joined(parseMessage(t, `P "" "SELECT $1::int"`), appendMessage(nil, 'B', body), parseMessage(t, "S")), 0)
				if got := w.until('Z', 1); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, `C="08P01"`) }) {
					t.Errorf("%x: %q", body, got)
				}
				_ = w.conn.Close()
			}
		})
	})
	t.Run("a flood of cancel requests", func(t *testing.T) {
		p := startProxy(t, func(c *Config, _ *Deps) { c.MaxCancels = 4 })
		p.attack(t, func() {
			var flood sync.WaitGroup
			for i := range 8 {
				flood.Go(func() {
					for j := range 250 {
						conn, err := net.Dial("tcp", p.addr.String())
						if err != nil {
							t.Error(err)
							return
						}
						_, _ = conn.Write(cancelRequest([4]byte{0, 0, byte(i), byte(j)}, []byte{1, 2, 3, 4}))
						_ = conn.Close()
					}
				})
			}
			flood.Wait()
		})
	})
	t.Run("results that nobody reads", func(t *testing.T) {
		p := startProxy(t)
		p.attack(t, func() {
			for range 10 {
				w := dialWire(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.send(t, parseMessage(t, `Q "SELECT repeat('x', 100000) FROM generate_series(1, 1000)"`), 0)
			}
		})
	})
	t.Run("statements without end", func(t *testing.T) {
		p := startProxy(t)
		p.attack(t, func() {
			for range 10 {
				w := dialWire(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.sendMore(binary.BigEndian.AppendUint32([]byte{'Q'}, 1<<29), 0)
				for range 100 {
					w.sendMore(make([]byte, 32<<10), 0)
				}
			}
		})
	})
	t.Run("duplicates in the startup packet", func(t *testing.T) {
		p := startProxy(t)
		p.attack(t, func() {
			var parameters []string
			for i := range 400 {
				parameters = append(parameters, "user", "nobody"+strconv.Itoa(i))
			}
			for range 10 {
				w, cfg := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.send(t, startupPacketFor(append(slices.Clone(parameters), "user", cfg.User, "database", "postgres")...), 0)
				w.login(t, cfg.Password) // the last one counts
				_ = w.conn.Close()
			}
		})
	})
}

// TestHostileTLS: what is wrong about TLS on either side ends one connection and is counted.
func TestHostileTLS(t *testing.T) {
	t.Parallel()
	pair := issued(t, "koldproxy")
	stranger, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := stranger.issue("scram_user")
	if err != nil {
		t.Fatal(err)
	}
	ca := writeFile(t, t.TempDir()+"/ca.pem", secure.ca.pem)
	p := startSecureProxy(t, clientTLSWith(t, pair), func(c *Config, _ *Deps) {
		c.ClientTLS, c.ClientCA, c.ClientCert = TLSRequire, ca, ClientCertVerifyFull
	})
	secureHello := func(certificates ...tls.Certificate) string {
		w, _ := dialOnly(t, p.dsnFor("scram_user", rolePassword))
		defer w.conn.Close()
		w.send(t, request(codeSSL), 0)
		if err := w.in.fill(1); err != nil {
			t.Fatal(err)
		}
		conn := tls.Client(w.conn, &tls.Config{InsecureSkipVerify: true, Certificates: certificates})
		if err := conn.Handshake(); err != nil {
			return "handshake"
		}
		if _, err := conn.Write(startupPacketFor("user", "scram_user", "database", "postgres")); err != nil {
			return "handshake"
		}
		in := newStream(conn)
		message, err := next(in, 64<<10, in.more(64<<10))
		if err != nil {
			return "handshake"
		}
		return showMessage(message)
	}
	keyPair := func(k keyPair) tls.Certificate {
		c, err := tls.X509KeyPair(k.cert, k.key)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if got := secureHello(keyPair(foreign)); got != "handshake" {
		t.Errorf("a certificate of a stranger: %s", got)
	}
	if got := secureHello(); !strings.Contains(got, `C="28000"`) {
		t.Errorf("no certificate: %s", got)
	}
	if got := secureHello(keyPair(issued(t, "another"))); !strings.Contains(got, `C="28000"`) {
		t.Errorf("another's certificate: %s", got)
	}
	if got := secureHello(keyPair(issued(t, "scram_user"))); got[0] != 'R' {
		t.Errorf("the right certificate: %s", got)
	}
	stuffed, _ := dialOnly(t, p.dsnFor("scram_user", rolePassword))
	stuffed.send(t, joined(request(codeSSL), []byte("x")), 0)
	_ = stuffed.until('?', 1)
	for reason, want := range map[string]float64{reasonTLS: 1, reasonPolicy: 2, reasonPlaintext: 1} {
		if got := p.counted(t, "koldproxy_proxy_refused_total", reason); got != want {
			t.Errorf("%s is counted %v times, want %v", reason, got, want)
		}
	}
}

// TestFailuresAreClassified: each failure is counted by the side that failed and what it was doing, and logged so.
func TestFailuresAreClassified(t *testing.T) {
	t.Parallel()
	accepted := "R\x00\x00\x00\x08\x00\x00\x00\x00Z\x00\x00\x00\x05I"
	for _, c := range []struct {
		name            string
		upstream        string
		options         option
		side, direction string
	}{
		{"nobody listens", deadAddress(t), nil, "server", "dial"},
		{"no TLS where it is required", scripted(t, accepted), serverTLSMode(ServerTLSRequire), "server", "handshake"},
		{"nothing is answered to the startup packet", scriptedEnd(t, ""), nil, "server", "read"},
		{"the server vanishes", scriptedEnd(t, accepted), nil, "server", "read"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, func(cfg *Config, d *Deps) {
				cfg.Upstream = c.upstream
				cfg.HandshakeTimeout = 5 * time.Second
				if c.options != nil {
					c.options(cfg, d)
				}
			})
			w, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
			w.send(t, startupPacketFor("user", "x"), 0)
			got := w.until('?', 1)
			if !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, `C="08006"`) }) {
				t.Errorf("the client got %q", got)
			}
			if n := p.counted(t, "koldproxy_proxy_errors_total", c.side, c.direction); n != 1 {
				t.Errorf("%s %s is counted %v times", c.side, c.direction, n)
			}
			if want := fmt.Sprintf(`"side":%q,"direction":%q`, c.side, c.direction); !strings.Contains(p.logged.String(), want) {
				t.Errorf("the log has no %s:\n%s", want, p.logged)
			}
		})
	}
	t.Run("clients that come to nothing", func(t *testing.T) {
		t.Parallel()
		p := startProxy(t, func(cfg *Config, _ *Deps) { cfg.HandshakeTimeout = time.Second })
		say := func(b []byte, close bool) {
			w, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
			w.send(t, b, 0)
			if close {
				_ = w.conn.Close()
				return
			}
			_ = w.until('?', 1)
		}
		say(nil, true)
		say([]byte{0, 0}, false)
		say([]byte("GET / HTTP/1.1\r\n\r\n"), false)
		say(joined(request(codeSSL), []byte("x")), false)
		say(cancelRequest([4]byte{1}, []byte{1, 2, 3, 4}), false)
		for ctx := within(t); ctx.Err() == nil; time.Sleep(5 * time.Millisecond) { // the last of them may still be on the way
			missing := ""
			for _, reason := range []string{reasonClosed, reasonTimeout, reasonStartup, reasonPlaintext, "cancel_key"} {
				if p.counted(t, "koldproxy_proxy_refused_total", reason) != 1 {
					missing += " " + reason
				}
			}
			if missing == "" {
				return
			}
		}
		t.Error("not every reason is counted once")
	})
}

// scriptedEnd is scripted, but the server goes away after its answer.
func scriptedEnd(t *testing.T, answer string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			in := newStream(conn)
			if _, err := readStartupPacket(in); err == nil {
				_, _ = conn.Write([]byte(answer))
			}
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// TestProtocol32 has a server speak protocol 3.2: what it negotiates passes, and a cancel key of the greatest length works.
func TestProtocol32(t *testing.T) {
	t.Parallel()
	key := make([]byte, 256)
	for i := range key {
		key[i] = byte(i)
	}
	negotiate := appendMessage(nil, 'v', binary.BigEndian.AppendUint32(nil, 3<<16|2), []byte{0, 0, 0, 1}, zeroTerminated("_pq_.test_protocol_negotiation"))
	keyData := appendMessage(nil, 'K', []byte{0, 0, 1, 2}, key)
	cancelled := make(chan []byte, 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			server.Go(func() {
				defer conn.Close()
				in := newStream(conn)
				packet, err := readStartupPacket(in)
				if err != nil {
					return
				}
				if binary.BigEndian.Uint32(packet[4:]) == codeCancel {
					cancelled <- packet
					return
				}
				_, _ = conn.Write(joined(negotiate, []byte("R\x00\x00\x00\x08\x00\x00\x00\x00"), keyData, []byte("Z\x00\x00\x00\x05I")))
				for in.fill(bufferSize) == nil {
					in.r = in.w
				}
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); server.Wait() })
	p := startProxy(t, func(c *Config, _ *Deps) { c.Upstream = ln.Addr().String() })
	w, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
	w.send(t, withVersion(startupPacketFor("user", "x", "_pq_.test_protocol_negotiation", ""), 3<<16|9999), 1)
	want := []string{showMessage(negotiate), "R 00000000", showMessage(keyData), "Z I"}
	if got := w.until('Z', 1); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	request := cancelRequest([4]byte{0, 0, 1, 2}, key)
	for _, wrong := range [][]byte{cancelRequest([4]byte{0, 0, 1, 2}, key[:255]), cancelRequest([4]byte{0, 0, 1, 2}, append(slices.Clone(key[:255]), 0)), request} {
		c, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
		c.send(t, wrong, 0)
		_ = c.until('?', 1)
	}
	if got := <-cancelled; !slices.Equal(got, request) {
		t.Errorf("the server got %x", got)
	}
}

// TestHandOver replaces one server by another on the same address while clients come and go.
func TestHandOver(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		if _, err := ListenShared(t.Context(), "127.0.0.1:0"); err == nil {
			t.Error("it works here, too: test it")
		}
		return
	}
	if _, err := ListenShared(t.Context(), "unix:"+t.TempDir()+"/s"); err == nil {
		t.Error("a Unix socket is shared")
	}
	p := startProxy(t)
	cfg := p.server.current().Config
	cfg.DrainTimeout = testTimeout
	serve := func(address string) (net.Addr, func()) {
		ln, err := ListenShared(t.Context(), address)
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		served := make(chan error, 1)
		server, err := New(cfg, Deps{Metrics: NewMetrics(nil)})
		if err != nil {
			t.Fatal(err)
		}
		go func() { served <- server.Serve(ctx, ln) }()
		return ln.Addr(), func() {
			stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
		}
	}
	address, stop := serve("127.0.0.1:0")
	probe, err := ListenShared(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, unfiltered := handOver(probe) // an error where the kernel has no filters for sockets
	_ = probe.Close()
	dsn := strings.Replace(p.dsn(t, p.cluster.DSN("postgres", "", "")), p.addr.String(), address.String(), 1)
	done := make(chan struct{})
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				conn, err := pgconn.Connect(within(t), dsn)
				if unfiltered != nil && errors.Is(err, syscall.ECONNRESET) {
					continue
				}
				if err != nil {
					t.Errorf("a client is refused: %v", err)
					return
				}
				_ = conn.Close(within(t)) // its first statement may meet the end of the old server, as that of any old session
			}
		})
	}
	for range 3 {
		_, next := serve(address.String())
		time.Sleep(100 * time.Millisecond) // clients reach both
		stop()
		stop = next
	}
	close(done)
	clients.Wait()
	stop()
}

func TestReload(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	direct := p.cluster.DSN("postgres", "", "")
	old := connect(t, p.dsn(t, direct))
	cfg := p.server.current().Config
	cfg.MaxConnections, cfg.InspectBytes, cfg.Auth = 1, 5, AuthSCRAM
	needRestart, err := p.server.Reload(cfg)
	if err != nil || !slices.Equal(needRestart, []string{"proxy.auth", "proxy.inspect_bytes"}) {
		t.Errorf("a restart is needed for %q, %v", needRestart, err)
	}
	mustExec(t, old, "SELECT 1")
	if _, err := pgconn.Connect(within(t), p.dsn(t, direct)); err == nil || !strings.Contains(err.Error(), "53300") {
		t.Errorf("beyond the new limit: %v", err)
	}
	for name, spoil := range map[string]func(*Config){
		"a limit that is none":     func(c *Config) { c.MaxHandshakes = 0 },
		"a file that is not there": func(c *Config) { c.ClientTLS, c.TLSCert, c.TLSKey = TLSAllow, "/nowhere", "/nowhere" },
		"attrs without a prober":   func(c *Config) { c.TargetSessionAttrs = SessionPrimary },
	} {
		bad := p.server.current().Config
		bad.MaxConnections = 99
		spoil(&bad)
		if _, err := p.server.Reload(bad); err == nil {
			t.Errorf("%s is accepted", name)
		}
		if got := p.server.current().MaxConnections; got != 1 {
			t.Errorf("after %s the limit is %d", name, got)
		}
	}
}
