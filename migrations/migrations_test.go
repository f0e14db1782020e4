package migrations_test

import (
	"context"
	"sort"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

func TestMain(m *testing.M) { localpg.Main(m) }

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// connectWithNotices opens another session of conn's role and hands it the texts of notices.
func connectWithNotices(t *testing.T, conn *pgx.Conn, notice func(string)) *pgx.Conn {
	t.Helper()
	cfg := conn.Config().Copy()
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notice(n.Message) }
	c, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// schemaOf lists every object of a database that migrations could leave behind or forget, so that two states can be compared.
func schemaOf(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		SELECT pg_catalog.pg_describe_object(classid, objid, 0) FROM (
			SELECT 'pg_class'::regclass AS classid, oid AS objid FROM pg_class WHERE relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace, 'pg_toast'::regnamespace)
			UNION ALL SELECT 'pg_proc'::regclass, oid FROM pg_proc WHERE pronamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
			UNION ALL SELECT 'pg_namespace'::regclass, oid FROM pg_namespace WHERE nspname !~ '^pg_'
			UNION ALL SELECT 'pg_publication'::regclass, oid FROM pg_publication
			UNION ALL SELECT 'pg_event_trigger'::regclass, oid FROM pg_event_trigger
			UNION ALL SELECT 'pg_policy'::regclass, oid FROM pg_policy
			UNION ALL SELECT 'pg_trigger'::regclass, oid FROM pg_trigger WHERE NOT tgisinternal) x`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(list)
	return strings.Join(list, "\n")
}

func TestUpDownUp(t *testing.T) {
	t.Parallel()
	conn := connect(t, localpg.TestCluster(t).TestDatabase(t))
	ctx := t.Context()
	before := schemaOf(t, conn)

	if err := migrations.Up(ctx, conn); err != nil {
		t.Fatal(err)
	}
	full := schemaOf(t, conn)
	state, err := migrations.Status(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	if state.Version != state.Newest || state.Newest == 0 {
		t.Fatalf("after Up the state is %+v", state)
	}
	if err := migrations.Up(ctx, conn); err != nil {
		t.Fatalf("Up twice: %v", err)
	}

	// Step by step down and up again: every step undoes itself.
	seen := map[int32]string{state.Newest: full}
	named := map[int32][]string{state.Newest: namedBy(t, conn)}
	for v := state.Newest - 1; v > 0; v-- {
		if err := migrations.Down(ctx, conn, v); err != nil {
			t.Fatalf("down to %d: %v", v, err)
		}
		seen[v], named[v] = schemaOf(t, conn), namedBy(t, conn)
	}
	checkSteps(t, named)
	if err := migrations.Up(ctx, conn); err != nil {
		t.Fatal(err)
	}
	if got := schemaOf(t, conn); got != full {
		t.Errorf("down to 1 and up again gives another schema:\n%s", got)
	}
	for v := state.Newest - 1; v > 0; v-- {
		if err := migrations.Down(ctx, conn, v); err != nil {
			t.Fatal(err)
		}
		if got := schemaOf(t, conn); got != seen[v] {
			t.Errorf("version %d differs the second time:\n%s", v, got)
		}
	}
	if err := migrations.Down(ctx, conn, 0); err != nil {
		t.Fatal(err)
	}
	if got := schemaOf(t, conn); got != before {
		t.Errorf("down to 0 leaves:\n%s", got)
	}
}

func TestDownRemovesStreamsAndMirrors(t *testing.T) {
	t.Parallel()
	conn := connect(t, localpg.TestCluster(t).TestDatabase(t))
	ctx := t.Context()
	before := schemaOf(t, conn)
	install(t, conn)
	exec(t, conn, `CREATE TABLE t (id int PRIMARY KEY, v int)`)
	exec(t, conn, `SELECT koldstore.manage_table('t')`)
	exec(t, conn, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1')`)
	full := schemaOf(t, conn)
	if err := migrations.Down(ctx, conn, migrations.FirstWhole-1); err == nil || !strings.Contains(err.Error(), "cannot hold the streams and feeds that there are") {
		t.Errorf("down to where there is no place for them: %v", err)
	}
	if got := schemaOf(t, conn); got != full {
		t.Errorf("that has changed something:\n%s", got)
	}
	if err := migrations.Down(ctx, conn, 0); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, `DROP TABLE t`)
	if got := schemaOf(t, conn); got != before {
		t.Errorf("down to 0 leaves:\n%s", got)
	}
}

func TestConcurrentUp(t *testing.T) {
	t.Parallel()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	errs := make(chan error)
	for range 4 {
		conn := connect(t, dsn)
		go func() { errs <- migrations.Up(context.Background(), conn) }()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// install migrates and creates the slot that commands ask for, which is the applier's work in the real life of a database.
func install(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	if err := migrations.Up(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	// In a statement of its own: decoding within a scan upsets PostgreSQL's bookkeeping of buffers now and then.
	slot := value[string](t, conn, `SELECT slot_name FROM koldstore.checkpoint`)
	exec(t, conn, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, slot)
	t.Cleanup(func() {
		_, _ = conn.Exec(context.Background(), `SELECT pg_drop_replication_slot('koldproxy_' || oid) FROM pg_database WHERE datname = current_database()`)
	})
}

func exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
