package mqtt

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) { localpg.Main(m) }

// password is every test role's.
const password = "correct horse"

// world is a broker in front of a database of its own, which is called "default" in topics. Streams are those of the
// tables source_<stream>; who may read the table may subscribe.
type world struct {
	t      testing.TB
	broker *Broker
	addr   string
	logs   *logBuffer
	stop   func() error // ends Serve and returns what it returned
	db     *pgxpool.Pool
	suffix string
}

// logBuffer collects log lines.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// newWorld starts PostgreSQL's part and the broker. Streams a and b exist.
func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	cluster := localpg.TestCluster(t)
	dsn := cluster.TestDatabase(t)
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	loginConfig, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, db: pool, logs: new(logBuffer), suffix: "_" + loginConfig.Database}
	w.exec(`CREATE SCHEMA koldstore;
		CREATE TABLE source_a (); CREATE TABLE source_b ();
		CREATE FUNCTION koldstore.may_subscribe(role name, schema name, stream name) RETURNS boolean LANGUAGE sql STABLE AS $$
			SELECT EXISTS (SELECT FROM pg_catalog.pg_roles r, pg_catalog.pg_class c
				WHERE r.rolname = $1 AND c.relnamespace = 'public'::regnamespace AND $2 = 'public' AND c.relname = 'source_' || $3
				AND pg_catalog.has_table_privilege(r.oid, c.oid, 'SELECT')) $$`)
	w.serve(NewPostgresAuth(loginConfig, map[string]*pgxpool.Pool{"default": pool}), change...)
	return w
}

// serve starts the broker with any Auth.
func (w *world) serve(auth Auth, change ...func(*Config)) {
	w.t.Helper()
	cfg := DefaultConfig()
	for _, f := range change {
		f(&cfg)
	}
	var err error
	w.broker, err = New(cfg, auth, zerolog.New(w.logs), prometheus.NewRegistry())
	if err != nil {
		w.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.addr = ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- w.broker.Serve(ctx, ln) }()
	w.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-result:
			return err
		case <-time.After(patience):
			return fmt.Errorf("Serve has not returned")
		}
	})
	w.t.Cleanup(func() {
		if err := w.stop(); err != nil {
			w.t.Errorf("Serve: %v", err)
		}
	})
}

func (w *world) exec(sql string) {
	w.t.Helper()
	if _, err := w.db.Exec(w.t.Context(), sql); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
}

// role makes a role that may read the given streams and returns its name.
func (w *world) role(name string, streams ...string) string {
	w.t.Helper()
	name += w.suffix // roles belong to the cluster, which other tests use too
	w.exec(fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'", name, password))
	w.t.Cleanup(func() {
		_, err := w.db.Exec(context.Background(), fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %s", name, name))
		if err != nil {
			w.t.Errorf("drop role %s: %v", name, err)
		}
	})
	for _, s := range streams {
		w.exec(fmt.Sprintf("GRANT SELECT ON source_%s TO %s", s, name))
	}
	return name
}

// reader logs in as a new role that may read the given streams.
func (w *world) reader(version byte, streams ...string) *client {
	w.t.Helper()
	return login(w.t, w.addr, version, w.role("r"+strings.Join(streams, "")+fmt.Sprint(version), streams...), password)
}

// dropped is the number of messages not delivered for a reason.
func (w *world) dropped(reason string) float64 {
	return testutil.ToFloat64(w.broker.metrics.dropped.WithLabelValues(reason))
}

// refused is the number of things refused.
func (w *world) refused(what string) float64 {
	return testutil.ToFloat64(w.broker.metrics.refused.WithLabelValues(what))
}

// eventually waits until something is true.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
	}
}
