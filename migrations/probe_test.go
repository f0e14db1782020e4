package migrations_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// installedByPoor is installed with a service role that is no superuser. It returns connections of a superuser and of the
// owner of schema app, who may do nothing with the database but connect to it.
func installedByPoor(t *testing.T) (su, owner *pgx.Conn) {
	t.Helper()
	cluster := localpg.TestCluster(t)
	su = connect(t, cluster.TestDatabase(t))
	name := value[string](t, su, `SELECT current_database()`)
	exec(t, su, fmt.Sprintf(`
		DO $$ BEGIN CREATE ROLE koldproxy_eval NOLOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
		CREATE ROLE %[1]s_service LOGIN REPLICATION PASSWORD 'x'; CREATE ROLE %[1]s_owner LOGIN PASSWORD 'x'; GRANT %[1]s_owner, koldproxy_eval TO %[1]s_service;
		REVOKE ALL ON DATABASE %[1]s FROM PUBLIC; GRANT CONNECT ON DATABASE %[1]s TO PUBLIC; GRANT CREATE ON DATABASE %[1]s TO %[1]s_service;
		CREATE SCHEMA app AUTHORIZATION %[1]s_owner`, name))
	install(t, connect(t, cluster.DSN(name, name+"_service", "x")))
	return su, connect(t, cluster.DSN(name, name+"_owner", "x"))
}

// tried is what becomes of a predicate: PostgreSQL's reading of it, or its error.
func tried(t *testing.T, owner *pgx.Conn, predicate string) string {
	t.Helper()
	var pe *pgconn.PgError
	if _, err := owner.Exec(t.Context(), `CALL koldstore.create_stream('app', 's', 'app', 'Orders', $1)`, predicate); errors.As(err, &pe) {
		return pe.Code + " " + pe.Message
	} else if err != nil {
		t.Fatal(err)
	}
	defer exec(t, owner, `CALL koldstore.drop_stream('app', 's')`)
	return value[string](t, owner, `SELECT predicate FROM koldstore.show_streams() WHERE name IN ('s', 'app.s')`)
}

// Who may not create temporary tables creates streams all the same, judged in the same way, and nothing is left behind.
func TestStreamsNeedNoTemporaryTables(t *testing.T) {
	t.Parallel()
	su, owner := installedByPoor(t)
	exec(t, owner, `SET search_path = app; CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE DOMAIN positive AS int CHECK (value > 0);
		CREATE TABLE "Orders" (id int PRIMARY KEY, "Total" numeric(10, 2), note varchar(20) COLLATE "C", mood mood, n positive, doc jsonb);
		CREATE FUNCTION dear(numeric) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN $1 > 100;
		CREATE FUNCTION unsure(numeric) RETURNS boolean LANGUAGE sql VOLATILE RETURN random() > $1`)
	predicates := []string{
		`"Total" > 100`, `"Orders"."Total" > 100 AND note LIKE 'a%'`, `mood = 'bad'`, `n > 3`, `doc ->> 'a' = 'b'`, `dear("Total")`, `true`, `id IN (1, 2)`,
		`total > 100`, `app."Orders".id > 1`, `id`, `count(*) > 1`, `EXISTS (SELECT)`, `unsure("Total")`, `now() > '2020-01-01'`, `id > 1) OR (true`, `mood = 'ugly'`, `"Orders" IS NOT NULL`,
		`("Orders".*) IS NOT NULL`, `ROW(1, 1, 'a', 'good', 1, '{}')::"Orders" IS NOT NULL`, `ARRAY[n]::positive[] = '{1}'`, `id > $1`, ``,
	}
	var want []string
	database := value[string](t, su, `SELECT current_database()`)
	exec(t, su, fmt.Sprintf(`GRANT TEMPORARY ON DATABASE %s TO PUBLIC`, database))
	for _, p := range predicates {
		want = append(want, tried(t, owner, p))
	}
	exec(t, su, fmt.Sprintf(`REVOKE TEMPORARY ON DATABASE %s FROM PUBLIC`, database))
	nothingLeft := func() {
		t.Helper()
		if n := value[int](t, su, `SELECT count(*) FROM pg_namespace WHERE nspname ~ '^koldproxy_probe'`); n != 0 {
			t.Errorf("%d schemas are left", n)
		}
	}
	for i, p := range predicates {
		if got := tried(t, owner, p); got != want[i] {
			t.Errorf("%s gives %q, and %q with temporary tables", p, got, want[i])
		}
		nothingLeft()
	}
	exec(t, owner, `SET search_path = app`)

	// In a transaction block, twice, with constraints that do not wait.
	exec(t, owner, `BEGIN; SET CONSTRAINTS ALL IMMEDIATE; CALL koldstore.create_stream(NULL, 'one', NULL, 'Orders', 'id > 1'); CALL koldstore.create_stream(NULL, 'two', NULL, 'Orders', 'id > 2', options => '{"start": "earliest"}'); COMMIT`)
	if got := value[string](t, owner, `SELECT string_agg(name || ' ' || predicate, ', ' ORDER BY name) FROM koldstore.show_streams()`); got != "one (id > 1), two (id > 2)" {
		t.Error(got)
	}
	nothingLeft()

	// By hand it is of no use to anybody.
	const byHand = `INSERT INTO koldstore.command (verb, args) VALUES ('open_probe', jsonb_build_object('schema', 'app', 'table', '"Orders"'::regclass::oid))`
	exec(t, owner, byHand)
	nothingLeft()
	exec(t, owner, `BEGIN; `+byHand+`; DO $$ BEGIN EXECUTE format('CREATE TABLE koldproxy_probe_%s.mine ()', pg_backend_pid()); END $$; COMMIT`)
	nothingLeft()
	refused(t, owner, "42501", "permission denied for schema koldstore", strings.Replace(byHand, "'app'", "'koldstore'", 1))
	refused(t, owner, "42501", "permission denied for function", `SELECT koldstore.do_open_probe(current_user, '{}')`)

	exec(t, su, fmt.Sprintf(`REVOKE CREATE ON DATABASE %s FROM %[1]s_service`, database))
	pe := refused(t, owner, "42501", "may not create temporary tables", `CALL koldstore.create_stream('app', 's', 'app', 'Orders', 'true')`)
	grant, _, _ := strings.Cut(pe.Hint, ", or")
	exec(t, su, grant)
	if got := tried(t, owner, "true"); got != "true" {
		t.Errorf("after %s: %s", pe.Hint, got)
	}
}

// The owner of a table is told when it is koldproxy that lacks a right, and which.
func TestTablesOfOwnersThatKoldproxyIsNoMemberOf(t *testing.T) {
	t.Parallel()
	su, owner := installedByPoor(t)
	exec(t, owner, `CREATE TABLE app.t (id int PRIMARY KEY)`)
	name := value[string](t, su, `SELECT current_database()`)
	exec(t, su, fmt.Sprintf(`REVOKE %[1]s_owner FROM %[1]s_service; GRANT USAGE, CREATE ON SCHEMA app TO %[1]s_service`, name))
	for _, sql := range []string{`CALL koldstore.create_stream('app', 's', 'app', 't', 'true')`, `SELECT koldstore.manage_table('app.t')`} {
		pe := refused(t, owner, "42501", `koldproxy may not capture changes of table "t"`, sql)
		exec(t, su, pe.Hint)
		exec(t, owner, sql)
		exec(t, su, fmt.Sprintf(`REVOKE %[1]s_owner FROM %[1]s_service`, name))
	}
}

// A stream that is dropped while SHOW STREAMS reads the catalog is shown as it was.
func TestStreamsAreShownBesideDropStream(t *testing.T) {
	t.Parallel()
	_, owner := installedByPoor(t)
	other := connectWithNotices(t, owner, func(string) {})
	exec(t, owner, `CREATE TABLE app.t (id int PRIMARY KEY)`)
	for _, name := range []string{"kept", "gone"} {
		exec(t, owner, `CALL koldstore.create_stream('app', $1, 'app', 't', 'id > 1')`, name)
	}
	exec(t, other, `SET standard_conforming_strings = off; SET escape_string_warning = off`)
	exec(t, other, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM koldstore.visible_stream`)
	exec(t, owner, `CALL koldstore.drop_stream('app', 'gone')`)
	if got := value[string](t, other, `SELECT string_agg(name || ' ' || predicate, ', ' ORDER BY name) FROM koldstore.show_streams()`); got != "app.gone (id > 1), app.kept (id > 1)" {
		t.Error(got)
	}
	exec(t, other, `COMMIT`)
	if got := value[string](t, other, `SELECT string_agg(name, ', ') FROM koldstore.show_streams()`); got != "app.kept" {
		t.Error(got)
	}
}
