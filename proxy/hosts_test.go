package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestSessionAttrs(t *testing.T) {
	t.Parallel()
	primary, readOnly, standby := ServerState{}, ServerState{DefaultReadOnly: true}, ServerState{HotStandby: true}
	for attrs, want := range map[SessionAttrs][3]bool{ // as libpq's documentation of target_session_attrs has it
		SessionAny:       {true, true, true},
		SessionReadWrite: {true, false, false},
		SessionReadOnly:  {false, true, true},
		SessionPrimary:   {true, true, false},
		SessionStandby:   {false, false, true},
	} {
		for i, state := range []ServerState{primary, readOnly, standby} {
			if got := attrs.accepts(state); got != want[i] {
				t.Errorf("%s accepts %+v: %t", attrs, state, got)
			}
		}
	}
	if got := SessionPreferStandby.passes(); !slices.Equal(got, []SessionAttrs{SessionStandby, SessionAny}) {
		t.Errorf("prefer-standby looks for %v", got)
	}
}

func TestParseEndpoints(t *testing.T) {
	t.Parallel()
	got, err := parseEndpoints("a:1, [::1]:2,unix:/s")
	if want := []endpoint{{"tcp", "a:1", "a"}, {"tcp", "[::1]:2", "::1"}, {"unix", "/s", ""}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "a:1,", "a:1,a:1", "a", "unix:", "a:"} {
		if _, err := parseEndpoints(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// probing is a Prober as the real one: it logs in as the superuser of the test clusters.
type probing struct {
	password string
	mu       sync.Mutex
	asked    map[string]int
}

func (p *probing) Probe(ctx context.Context, network, address, _ string) (ServerState, error) {
	p.mu.Lock()
	if p.asked == nil {
		p.asked = map[string]int{}
	}
	p.asked[address]++
	p.mu.Unlock()
	cfg, err := pgconn.ParseConfig(fmt.Sprintf("postgres://postgres:%s@%s/postgres?sslmode=disable", p.password, address))
	if err != nil {
		return ServerState{}, err
	}
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return ServerState{}, err
	}
	defer conn.Close(ctx)
	return ServerState{
		HotStandby:      conn.ParameterStatus("in_hot_standby") == "on",
		DefaultReadOnly: conn.ParameterStatus("default_transaction_read_only") == "on",
	}, nil
}

// standbyCluster is a server in recovery: one that was stopped and told that it is a standby, whose primary never comes.
func standbyCluster(t *testing.T, password string) *localpg.Cluster {
	t.Helper()
	dir, err := os.MkdirTemp("", "kp-standby-") //nolint:usetesting // the server's own user has to reach it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	kept := localpg.Config{Dir: dir, Password: password}
	first, err := localpg.Start(ctx, kept)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(first.DataDir, "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cluster, err := localpg.Start(ctx, kept)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Stop(context.Background()) })
	return cluster
}

func addressOf(c *localpg.Cluster) string { return net.JoinHostPort(c.Host, strconv.Itoa(c.Port)) }

// deadAddress is one where nobody listens.
func deadAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// scripted is a server that answers each startup packet with the same bytes and keeps the connection until the client ends it.
func scripted(t testing.TB, answer string) string {
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
			wg.Go(func() {
				defer conn.Close()
				in := newStream(conn)
				if _, err := readStartupPacket(in); err != nil {
					return
				}
				_, _ = conn.Write([]byte(answer))
				for in.fill(bufferSize) == nil {
					in.r = in.w
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

func TestTheNextServerIsTried(t *testing.T) {
	t.Parallel()
	direct := startProxy(t).cluster
	notYet := scripted(t, string(fatal("57P03", "the database system is starting up")))
	stuck := scripted(t, "") // a postmaster that was stopped, say: the kernel takes its connections
	full := scripted(t, string(fatal("53300", "sorry, too many clients already")))
	for _, c := range []struct {
		name     string
		upstream []string
		want     string // part of the error; empty: it works
	}{
		{"behind one that is away and one that starts up", []string{deadAddress(t), notYet, addressOf(direct)}, ""},
		{"behind one that says nothing", []string{stuck, addressOf(direct)}, ""},
		{"the last one says nothing", []string{deadAddress(t), stuck}, "lost the connection to the PostgreSQL server"},
		{"one that refuses for another reason is final", []string{full, addressOf(direct)}, "too many clients already"},
		{"what the last one says is final", []string{deadAddress(t), notYet}, "starting up"},
		{"nobody is there", []string{deadAddress(t), deadAddress(t)}, "cannot connect to the PostgreSQL server"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, func(cfg *Config, _ *Deps) {
				cfg.Upstream = strings.Join(c.upstream, ",")
				if slices.Contains(c.upstream, stuck) {
					cfg.ConnectTimeout, cfg.HandshakeTimeout = time.Second, 15*time.Second
				}
				if c.upstream[len(c.upstream)-1] == stuck {
					cfg.HandshakeTimeout = time.Second
				}
			})
			conn, err := pgconn.Connect(within(t), p.dsn(t, p.cluster.DSN("postgres", "", "")))
			if err == nil {
				_ = conn.Close(within(t))
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestTargetSessionAttrs(t *testing.T) {
	t.Parallel()
	primary := startProxy(t).cluster
	cc, err := pgx.ParseConfig(primary.DSN("postgres", "", ""))
	if err != nil {
		t.Fatal(err)
	}
	standby := standbyCluster(t, cc.Password)
	dead := deadAddress(t)
	for _, c := range []struct {
		attrs    SessionAttrs
		upstream []string
		recovery bool
		want     string // part of the error
	}{
		{SessionAny, []string{addressOf(standby), addressOf(primary)}, true, ""},
		{SessionReadWrite, []string{dead, addressOf(standby), addressOf(primary)}, false, ""},
		{SessionReadOnly, []string{addressOf(primary), addressOf(standby)}, true, ""},
		{SessionPrimary, []string{addressOf(standby), addressOf(primary)}, false, ""},
		{SessionStandby, []string{addressOf(primary), addressOf(standby)}, true, ""},
		{SessionPreferStandby, []string{addressOf(primary), addressOf(standby)}, true, ""},
		{SessionPreferStandby, []string{addressOf(primary), dead}, false, ""},
		{SessionReadWrite, []string{addressOf(standby)}, false, "no server for this session"},
		{SessionStandby, []string{addressOf(primary), dead}, false, "no server for this session"},
	} {
		t.Run(fmt.Sprintf("%s of %d", c.attrs, len(c.upstream)), func(t *testing.T) {
			t.Parallel()
			asked := &probing{password: cc.Password}
			p := startProxy(t, func(cfg *Config, d *Deps) {
				cfg.Upstream, cfg.TargetSessionAttrs, d.Prober = strings.Join(c.upstream, ","), c.attrs, asked
			})
			for range 3 {
				conn, err := pgx.Connect(within(t), p.dsn(t, p.cluster.DSN("postgres", "", "")))
				if c.want != "" {
					if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "57P03" || !strings.Contains(e.Message, c.want) {
						t.Errorf("got %v, want %q", err, c.want)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				var recovery bool
				if err := conn.QueryRow(within(t), "SELECT pg_is_in_recovery()").Scan(&recovery); err != nil || recovery != c.recovery {
					t.Errorf("in recovery: %t, %v", recovery, err)
				}
				// A cancel request has to find the server of the session.
				cancelled := make(chan error, 1)
				go func() { _, err := conn.Exec(within(t), "SELECT pg_sleep(60)"); cancelled <- err }()
				for open := true; open; {
					if err := conn.PgConn().CancelRequest(within(t)); err != nil {
						t.Fatal(err)
					}
					select {
					case err := <-cancelled:
						if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "57014" {
							t.Errorf("cancelled: %v", err)
						}
						open = false
					case <-time.After(20 * time.Millisecond):
					}
				}
				_ = conn.Close(within(t))
			}
		})
	}
}

// TestAServerThatHasChanged: what a probe found out is old, and the session itself shows it.
func TestAServerThatHasChanged(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(cfg *Config, d *Deps) {
		cfg.TargetSessionAttrs, d.Prober = SessionStandby, lying{}
	})
	_, err := pgconn.Connect(within(t), p.dsn(t, p.cluster.DSN("postgres", "", "")))
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "57P03" {
		t.Errorf("got %v", err)
	}
	p.server.states.mu.Lock()
	defer p.server.states.mu.Unlock()
	if len(p.server.states.known) > 0 {
		t.Error("the answer is still believed")
	}
}

type lying struct{}

func (lying) Probe(context.Context, string, string, string) (ServerState, error) {
	return ServerState{HotStandby: true}, nil
}

func TestRandomOrder(t *testing.T) {
	t.Parallel()
	s := &settings{endpoints: []endpoint{{address: "a"}, {address: "b"}}}
	s.LoadBalanceHosts = LoadBalanceRandom
	first := map[string]bool{}
	for range 100 {
		order := s.inOrder()
		first[order[0].address] = true
	}
	if len(first) != 2 || s.endpoints[0].address != "a" {
		t.Errorf("first are %v of %v", first, s.endpoints)
	}
}

// TestUnixSocketsWithoutProof: over a Unix socket peer and trust say nothing about the client.
func TestUnixSocketsWithoutProof(t *testing.T) {
	t.Parallel()
	cluster := secureCluster(t)
	socket := fmt.Sprintf("unix:%s/.s.PGSQL.%d", cluster.SocketDir, cluster.Port)
	client, err := secure.ca.issue("trust_user")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key := client.files(t, dir)
	ca := writeFile(t, filepath.Join(dir, "ca.pem"), secure.ca.pem)
	withCertificates := func(c *Config, _ *Deps) {
		c.ClientTLS, c.ClientCA, c.ClientCert = TLSRequire, ca, ClientCertVerifyFull
	}
	for _, c := range []struct {
		name    string
		user    string
		options []option
		shown   []string // parameters of the DSN
		allowed bool
	}{
		{"trust", "trust_user", nil, nil, false},
		{"trust, forced", "trust_user", []option{func(c *Config, _ *Deps) { c.AllowPeer = true }}, nil, true},
		{"a password is a proof", "scram_user", nil, nil, true},
		{
			"so is a certificate", "trust_user",
			[]option{clientTLSWith(t, issued(t, "koldproxy")), withCertificates},
			[]string{"sslmode", "require", "sslcert", cert, "sslkey", key},
			true,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startSecureProxy(t, append([]option{func(cfg *Config, _ *Deps) { cfg.Upstream = socket }}, c.options...)...)
			conn, err := pgconn.Connect(within(t), p.dsnFor(c.user, rolePassword, append([]string{"sslmode", "disable"}, c.shown...)...))
			if err == nil {
				_ = conn.Close(within(t))
			}
			if c.allowed {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e, ok := errors.AsType[*pgconn.PgError](err)
			if !ok || e.Code != "28000" || !strings.Contains(e.Hint, "proxy.allow_peer") {
				t.Errorf("got %v", err)
			}
			if got := p.counted(t, "koldproxy_proxy_refused_total", "peer"); got != 1 {
				t.Errorf("counted %v", got)
			}
		})
	}
}
