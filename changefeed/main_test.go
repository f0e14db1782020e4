package changefeed_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
	"github.com/koldproxy/koldproxy/walapply"
)

func TestMain(m *testing.M) { localpg.Main(m) }

// host is a database with koldproxy's catalog, an applier that can be started and stopped, and an application's session.
type host struct {
	t      *testing.T
	dsn    string
	name   string
	pool   *pgxpool.Pool // the service role
	app    *pgx.Conn     // an ordinary role that owns schema public
	config changefeed.Config
	counts *changefeed.Metrics // nil to count into the void
	change func(*walapply.Config)

	applier *walapply.Applier
	stop    func()
}

// migrated makes the database that those of all hosts are copies of.
var migrated struct {
	once sync.Once
	err  error
}

func migrate(cluster *localpg.Cluster) error {
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, cluster.DSN("postgres", "", ""))
	if err != nil {
		return err
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, `CREATE DATABASE migrated`); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, cluster.DSN("migrated", "", ""))
	if err != nil {
		return err
	}
	err = migrations.Up(ctx, conn)
	return errors.Join(err, conn.Close(ctx))
}

// newHost makes a host whose applier has run once, so that the slot exists, and runs.
func newHost(t *testing.T) *host {
	t.Helper()
	cluster := localpg.TestCluster(t)
	migrated.once.Do(func() { migrated.err = migrate(cluster) })
	must(t, migrated.err)
	dsn := cluster.TestDatabaseLike(t, "migrated")
	ctx := t.Context()
	admin, err := pgx.Connect(ctx, dsn)
	must(t, err)
	defer admin.Close(context.Background())
	name := admin.Config().Database
	for _, sql := range []string{
		`UPDATE koldstore.checkpoint SET slot_name = 'koldproxy_' || (SELECT oid FROM pg_database WHERE datname = current_database())`, // a copy has that of the original
		fmt.Sprintf(`CREATE ROLE app_%s LOGIN PASSWORD 'app'`, name),
		fmt.Sprintf(`ALTER SCHEMA public OWNER TO app_%s`, name),
		fmt.Sprintf(`GRANT CREATE ON DATABASE %s TO app_%s`, name, name),
	} {
		_, err := admin.Exec(ctx, sql)
		must(t, err)
	}
	pool, err := pgxpool.New(ctx, dsn)
	must(t, err)
	app, err := pgx.Connect(ctx, cluster.DSN(name, "app_"+name, "app"))
	must(t, err)
	h := &host{t: t, dsn: dsn, name: name, pool: pool, app: app, config: changefeed.DefaultConfig(name)}
	h.config.DSN = dsn
	t.Cleanup(func() {
		h.stopApplier()
		ctx := context.Background()
		app.Close(ctx)
		_, _ = pool.Exec(ctx, fmt.Sprintf(`REASSIGN OWNED BY app_%[1]s TO CURRENT_USER; DROP OWNED BY app_%[1]s CASCADE; DROP ROLE app_%[1]s`, name))
		pool.Close()
	})
	h.startApplier()
	return h
}

// startApplier runs an applier and waits until it streams.
func (h *host) startApplier() {
	h.t.Helper()
	h.run()
	h.eventually("the applier streams", func() bool { return h.applier.Status().Streaming })
}

// run runs an applier, which may have reasons not to stream.
func (h *host) run() *walapply.Applier {
	h.t.Helper()
	log := zerolog.Nop()
	if os.Getenv("KOLDPROXY_TEST_LOG") != "" {
		log = zerolog.New(zerolog.NewTestWriter(h.t))
	}
	var applier *walapply.Applier
	h.config.Wake = func() { applier.Poke() }
	target, err := changefeed.NewTarget(h.config, log, h.counts)
	must(h.t, err)
	cfg := walapply.DefaultConfig(h.dsn)
	cfg.TakeoverInterval = 20 * time.Millisecond
	cfg.RetryMin = 10 * time.Millisecond
	if h.change != nil {
		h.change(&cfg)
	}
	applier, err = walapply.New(cfg, target, log, nil)
	must(h.t, err)
	h.applier = applier
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.applier.Run(ctx); err != nil {
			h.t.Errorf("applier: %v", err)
		}
	}()
	h.stop = sync.OnceFunc(func() { cancel(); <-done })
	return h.applier
}

func (h *host) stopApplier() {
	if h.stop != nil {
		h.stop()
	}
}

// eventually polls; tests wait for what they expect, not for time to pass.
func (h *host) eventually(what string, ok func() bool) {
	h.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			h.t.Fatalf("timeout waiting until %s; applier: %+v", what, h.applier.Status())
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// exec runs statements of the application, each in a transaction of its own.
func (h *host) exec(statements ...string) {
	h.t.Helper()
	for _, sql := range statements {
		_, err := h.app.Exec(h.t.Context(), sql)
		if err != nil {
			h.t.Fatalf("%s: %v", sql, err)
		}
	}
}

// admin runs statements of the service role.
func (h *host) admin(statements ...string) {
	h.t.Helper()
	for _, sql := range statements {
		_, err := h.pool.Exec(h.t.Context(), sql)
		if err != nil {
			h.t.Fatalf("%s: %v", sql, err)
		}
	}
}

func (h *host) fence() {
	h.t.Helper()
	h.exec(`SELECT koldstore.wait_for_async_mirror('30 s')`)
}

func (h *host) stream(name, table, predicate string, options ...string) {
	h.t.Helper()
	pairs := map[string]string{}
	for i := 0; i < len(options); i += 2 {
		pairs[options[i]] = options[i+1]
	}
	opts, err := json.Marshal(pairs)
	must(h.t, err)
	_, err = h.app.Exec(h.t.Context(), `CALL koldstore.create_stream(NULL, $1, NULL, $2, $3, false, $4::jsonb)`, name, table, predicate, string(opts))
	must(h.t, err)
}

func (h *host) manage(table string) {
	h.t.Helper()
	h.exec(fmt.Sprintf(`SELECT koldstore.manage_table('%s'::regclass)`, table))
}

// rows runs a query of the service role and renders each row as its values with blanks between.
func (h *host) rows(sql string, args ...any) []string {
	h.t.Helper()
	rows, err := h.pool.Query(h.t.Context(), sql, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
	must(h.t, err)
	defer rows.Close()
	var out []string
	for rows.Next() {
		var parts []string
		for _, v := range rows.RawValues() {
			if v == nil {
				parts = append(parts, "NULL")
			} else {
				parts = append(parts, string(v))
			}
		}
		out = append(out, strings.Join(parts, " "))
	}
	must(h.t, rows.Err())
	return out
}

// expect compares the result of a query.
func (h *host) expect(sql string, want ...string) {
	h.t.Helper()
	if got := h.rows(sql); strings.Join(got, "\n") != strings.Join(want, "\n") {
		h.t.Errorf("%s\n got:\n  %s\nwant:\n  %s", sql, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// events compares the op and k (and whatever else is named) of a stream's log.
func (h *host) events(stream string, want ...string) {
	h.t.Helper()
	h.expect(`SELECT op, k FROM "_stream_`+stream+`" ORDER BY id`, want...)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
