package proxy

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) {
	code := localpg.Run(m)
	if secure.cluster != nil {
		_ = secure.cluster.Stop(context.Background())
	}
	os.Exit(code)
}

// testTimeout bounds what a test waits for; it is long because machines are busy.
const testTimeout = 60 * time.Second

// proxied is a Server under test.
type proxied struct {
	cluster  *localpg.Cluster
	server   *Server
	addr     *net.TCPAddr
	stop     func() // drains and waits
	logged   *syncBuffer
	registry *prometheus.Registry
}

type option func(*Config, *Deps)

func startProxy(t testing.TB, options ...option) *proxied {
	t.Helper()
	cluster := localpg.TestCluster(t)
	cfg := DefaultConfig()
	cfg.Upstream = net.JoinHostPort(cluster.Host, strconv.Itoa(cluster.Port))
	cfg.DrainTimeout = 0
	if loops := os.Getenv("KOLDPROXY_TEST_EVENT_LOOPS"); loops != "" { // all tests with loops, or without: they are to agree
		var err error
		if cfg.EventLoops, err = strconv.Atoi(loops); err != nil {
			t.Fatal(err)
		}
	}
	registry, logged := prometheus.NewRegistry(), &syncBuffer{}
	deps := Deps{
		Metrics: NewMetrics(registry),
		Log:     zerolog.New(zerolog.MultiLevelWriter(zerolog.NewTestWriter(t), logged)).Level(zerolog.InfoLevel),
	}
	for _, o := range options {
		o(&cfg, &deps)
	}
	server, err := New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := Listen(context.Background(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, ln) }()
	stopped := false
	p := &proxied{cluster: cluster, server: server, addr: ln.Addr().(*net.TCPAddr), registry: registry, logged: logged}
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	}
	t.Cleanup(p.stop)
	return p
}

// upstream leads the proxy to another server.
func (p *proxied) upstream(t testing.TB, address string) {
	t.Helper()
	cfg := p.server.current().Config
	cfg.Upstream = address
	if _, err := p.server.Reload(cfg); err != nil {
		t.Fatal(err)
	}
}

// dsn turns a DSN of the cluster into one through the proxy.
func (p *proxied) dsn(t testing.TB, direct string) string {
	t.Helper()
	cfg, err := pgx.ParseConfig(direct)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("postgres://%s:%s@%s/%s?sslmode=disable", cfg.User, cfg.Password, p.addr, cfg.Database)
}

func connect(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

func mustExec(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(within(t), sql).ReadAll(); err != nil {
		t.Fatal(err)
	}
}

// prepare runs SQL directly, in a session of its own.
func (p *proxied) prepare(t testing.TB, direct, sql string) {
	t.Helper()
	conn := connect(t, direct)
	mustExec(t, conn, sql)
	_ = conn.Close(within(t))
}

// counted is the value of a counter with a certain label.
func (p *proxied) counted(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	families, err := p.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			slices.Sort(values)
			if slices.Sort(labels); slices.Equal(values, labels) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// syncBuffer keeps what is logged.
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
