package walapply_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// newPoorDatabase is a database whose catalog and applier belong to a role that is no superuser; admin is of a superuser.
func newPoorDatabase(t *testing.T, cluster *localpg.Cluster) (d *database, admin string) {
	t.Helper()
	admin = cluster.TestDatabase(t)
	su := connectTo(t, admin, "setup")
	name := su.Config().Database
	role := "poor_" + name
	_, err := su.Exec(t.Context(), fmt.Sprintf(`
		DO $$ BEGIN CREATE ROLE koldproxy_eval NOLOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
		CREATE ROLE %[1]s LOGIN REPLICATION PASSWORD 'poor'; GRANT koldproxy_eval TO %[1]s; GRANT CREATE ON DATABASE %[2]s TO %[1]s; GRANT CREATE ON SCHEMA public TO %[1]s`, role, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = su.Exec(context.Background(), fmt.Sprintf(`REASSIGN OWNED BY %[1]s TO CURRENT_USER; DROP OWNED BY %[1]s CASCADE; DROP ROLE %[1]s`, role))
	})
	d = &database{t: t, dsn: cluster.DSN(name, role, "poor")}
	d.reconnect()
	t.Cleanup(func() { d.sql.Close(context.Background()) })
	d.install()
	return d, admin
}

func connectTo(t *testing.T, dsn, application string) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["application_name"] = application
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// Whoever keeps the applier from a lock is named, once; those who may be ended are, whoever else is in the way.
func TestBlockersAreNamedAndEndedIfThatIsAllowed(t *testing.T) {
	t.Parallel()
	d, admin := newPoorDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var log syncBuffer
	cfg := d.config()
	cfg.LockWait = 40 * time.Millisecond
	a, err := walapply.New(cfg, &recorder{}, zerolog.New(&log), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	defer func() { cancel(); <-done }()
	d.await("the applier to stream", func() bool { return a.Status().Streaming })

	// All of them at a time, so that it does not count who is looked at first.
	var poor []*pgx.Conn
	lock := func(dsn, application string) *pgx.Conn {
		conn := connectTo(t, dsn, application)
		if _, err := conn.Exec(t.Context(), `BEGIN; LOCK TABLE recorded IN SHARE MODE`); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	poor = append(poor, lock(d.dsn, "first"))
	strong := lock(admin, "nightly report")
	poor = append(poor, lock(d.dsn, "second"))
	d.exec(`INSERT INTO t VALUES (1)`)
	for _, conn := range poor {
		d.await("a blocker to be ended", func() bool {
			_, err := conn.Exec(t.Context(), `SELECT 1`)
			return err != nil
		})
	}
	named := func() (lines []string) {
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, fmt.Sprintf(`"pid":%d,`, strong.PgConn().PID())) {
				lines = append(lines, line)
			}
		}
		return lines
	}
	d.await("the other one to be named", func() bool { return len(named()) > 0 })
	for _, want := range []string{`"user":"` + strong.Config().User + `"`, `"application":"nightly report"`, `"relation":"public.recorded"`, `SQLSTATE 42501`} {
		if !strings.Contains(named()[0], want) {
			t.Errorf("nothing about %s in %s", want, named()[0])
		}
	}
	looks := func() int {
		return query[int](d, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'koldproxy watch' AND datname = current_database() AND state_change > $1`, time.Now())
	}
	d.await("a look", func() bool { return looks() > 0 })
	d.await("another look", func() bool { return looks() > 0 })
	if got := named(); len(got) != 1 {
		t.Errorf("it is named again at once:\n%s", strings.Join(got, ""))
	}
	if _, err := strong.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	d.awaitApplied()
}
