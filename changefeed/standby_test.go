package changefeed_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// synchronous_standby_names = '*' counts the applier's walsender as a standby: commits wait for it, so it must not wait for
// them.
func TestApplierCountedAsStandby(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cluster, err := localpg.Start(ctx, localpg.Config{})
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		must(t, cluster.Stop(ctx))
	})
	dsn := cluster.DSN("postgres", "", "")
	app, err := pgx.Connect(ctx, dsn)
	must(t, err)
	t.Cleanup(func() { app.Close(context.Background()) })
	must(t, migrations.Up(ctx, app))
	pool, err := pgxpool.New(ctx, dsn)
	must(t, err)
	t.Cleanup(pool.Close)
	h := &host{t: t, dsn: dsn, name: "postgres", pool: pool, app: app, config: changefeed.DefaultConfig("postgres")}
	h.config.DSN = dsn
	t.Cleanup(func() { h.stopApplier() })
	h.startApplier()
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	h.fence()
	h.exec(`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`)
	h.eventually("the applier counts as a standby", func() bool {
		return h.rows(`SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'`)[0] == "1"
	})
	for range 3 {
		h.exec(`INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t`)
	}
	h.events("s", "put 1", "put 2", "put 3") // commits return after the event is there
	h.exec(`ALTER SYSTEM RESET synchronous_standby_names`, `SELECT pg_reload_conf()`)
}
