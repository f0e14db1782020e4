package migrations_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// mallory returns a role that may create what it likes in a schema of its own, and that schema's name.
func mallory(t *testing.T, su *pgx.Conn, as func(string) *pgx.Conn) (*pgx.Conn, string) {
	t.Helper()
	m := as("mallory")
	exec(t, su, fmt.Sprintf(`CREATE SCHEMA mal AUTHORIZATION %q; GRANT USAGE ON SCHEMA mal TO PUBLIC`, value[string](t, m, `SELECT current_user`)))
	return m, "mal"
}

// Whatever stands in front of pg_catalog in the search path of a caller, guards and checks mean what they say.
func TestShadowedOperatorsChangeNothing(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE TABLE secret (id int PRIMARY KEY, s text); INSERT INTO secret VALUES (1, 'x')`)
	exec(t, su, `SELECT koldstore.manage_table('secret'); CALL koldstore.create_stream(NULL, 's', NULL, 'secret', 'true', options => '{"start": "earliest"}')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'; INSERT INTO koldstore.secret__cl VALUES (1, 99, 1, '{"id": 1, "s": "x"}')`)
	m, _ := mallory(t, su, as)
	exec(t, m, `
		CREATE TABLE mal.mine (id int PRIMARY KEY);
		CREATE FUNCTION mal.ne(name, name) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT false';
		CREATE OPERATOR mal.<> (LEFTARG = name, RIGHTARG = name, FUNCTION = mal.ne);
		CREATE FUNCTION mal.eq(name, name) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
		CREATE OPERATOR mal.= (LEFTARG = name, RIGHTARG = name, FUNCTION = mal.eq);
		CREATE FUNCTION mal.arrow(jsonb, text) RETURNS text LANGUAGE sql IMMUTABLE AS
			$$ SELECT CASE WHEN $2 = 'table' THEN 'mal.mine'::regclass::oid::text ELSE pg_catalog.jsonb_extract_path_text($1, $2) END $$;
		CREATE OPERATOR mal.->> (LEFTARG = jsonb, RIGHTARG = text, FUNCTION = mal.arrow);
		SET search_path = mal, pg_catalog, public`)
	for _, sql := range []string{
		`TRUNCATE public._stream_s`, `TRUNCATE koldstore.secret__cl`, `DELETE FROM public._stream_s`,
		`DO $$ BEGIN LOCK TABLE public._stream_s IN ACCESS EXCLUSIVE MODE; END $$`, `INSERT INTO public._stream_s (id, op, k, ts) VALUES ('x', 'put', '1', now())`,
		`SELECT * FROM public._stream_s`, `SELECT * FROM koldstore.secret__cl`, `SELECT * FROM koldstore.changes_since('secret')`,
	} {
		refused(t, m, "42501", "", sql)
	}
	for _, kind := range []string{"cold_page", "flush"} {
		if value[*string](t, m, `SELECT koldstore.demand_allowed(jsonb_build_object('kind', $1::text, 'table', 'public.secret'::regclass::oid::bigint))`, kind) != nil {
			t.Errorf("a stranger's %s demand is allowed", kind)
		}
	}
	exec(t, su, `SET search_path = mal, pg_catalog, public`)
	refused(t, su, "42809", "", `INSERT INTO public._stream_s (id, op, k, ts) VALUES ('x', 'put', '1', now())`)
	exec(t, su, `SET session_replication_role = replica`)
	refused(t, su, "42809", "", `DROP TABLE public._stream_s`)
	refused(t, su, "42809", "", `DELETE FROM public._stream_s`)
}

// Checks of domains, casts and functions of predicates run while a stream is created; never with koldproxy's rights.
func TestCodeOfUsersHasNoRights(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	m, _ := mallory(t, su, as)
	service := value[string](t, su, `SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'koldstore'`)
	exec(t, m, `
		CREATE FUNCTION mal.spy(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
		BEGIN
			RAISE NOTICE '% runs as %', $1, current_user;
			PERFORM set_config('search_path', 'mal, pg_catalog', false);
			RETURN true;
		END $$;
		CREATE FUNCTION mal.plus(bigint, bigint) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE NOTICE 'plus runs as %', current_user; RETURN 0; END $$;
		CREATE OPERATOR mal.+ (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = mal.plus);
		CREATE DOMAIN mal.d AS int CHECK (mal.spy('domain'));
		CREATE TYPE mal.en AS ENUM ('a');
		CREATE FUNCTION mal.en2j(mal.en) RETURNS json LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM mal.spy('cast'); RETURN '"cast"'; END $$;
		CREATE CAST (mal.en AS json) WITH FUNCTION mal.en2j(mal.en);
		CREATE TABLE mal.t (id int PRIMARY KEY, n mal.d, e mal.en);
		CREATE FUNCTION mal.t2t(mal.t) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM mal.spy('row cast'); RETURN '(7,7,a)'; END $$;
		CREATE CAST (mal.t AS text) WITH FUNCTION mal.t2t(mal.t);
		INSERT INTO mal.t VALUES (1, 1, 'a'), (2, 2, 'a')`)
	var seen []string
	conn := connectWithNotices(t, m, func(text string) { seen = append(seen, text) })
	if _, err := conn.Exec(t.Context(), `SELECT; CALL koldstore.create_stream('mal', 's', 'mal', 't', 'mal.spy(''predicate'') AND n < 2', options => '{"start": "earliest"}')`); err != nil {
		t.Fatal(err)
	}
	all := strings.Join(seen, "\n")
	for _, want := range []string{"predicate runs as", "domain runs as", "cast runs as"} {
		if !strings.Contains(all, want) {
			t.Errorf("nothing saw that %s", want)
		}
	}
	if strings.Contains(all, service) || strings.Contains(all, "plus runs") {
		t.Errorf("code of users ran with koldproxy's rights:\n%s", all)
	}
	if got := pages(t, m, `SELECT k::text || ' ' || doc::text FROM mal._stream_s`); len(got) != 1 || got[0] != `1 {"e": "cast", "n": 1, "id": 1}` {
		t.Errorf("the backfill is %v", got)
	}
	refused(t, m, "42501", "permission denied for function", `SELECT * FROM koldstore.eval_rows(0, NULL, NULL)`)
	refused(t, m, "42501", "permission denied for schema", `CREATE OR REPLACE FUNCTION koldstore.eval_rows(row_type oid, literals text[], predicates oid[]) RETURNS TABLE (ord bigint, image jsonb, matches boolean[]) LANGUAGE sql AS 'SELECT 1, NULL, NULL'`)
}

// To plan a query is to run constant parts of expressions of indexes. The backfill lets the owner plan it.
func TestIndexesOfUsersHaveNoRights(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	m, _ := mallory(t, su, as)
	service := value[string](t, su, `SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'koldstore'`)
	exec(t, m, `
		CREATE FUNCTION mal.note(int) RETURNS int LANGUAGE plpgsql VOLATILE AS $$ BEGIN RAISE NOTICE 'planned as %', current_user; RETURN $1; END $$;
		CREATE FUNCTION mal.planned(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN mal.note($1); END $$;
		CREATE TABLE mal.t (id int PRIMARY KEY, v int);
		INSERT INTO mal.t SELECT g, g FROM generate_series(1, 2500) g;
		CREATE INDEX ON mal.t ((v + mal.planned(1)))`)
	var seen []string
	conn := connectWithNotices(t, m, func(text string) { seen = append(seen, text) })
	if _, err := conn.Exec(t.Context(), `SELECT; CALL koldstore.create_stream('mal', 's', 'mal', 't', 'id > 0', options => '{"start": "earliest"}')`); err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(seen, "\n"); strings.Contains(all, service) {
		t.Errorf("an index was planned with koldproxy's rights:\n%s", all)
	}
	if got := value[string](t, m, `SELECT count(*) || ' ' || bool_and(k::text::int = n) FROM (SELECT k, row_number() OVER (ORDER BY id) AS n FROM mal._stream_s) x`); got != "2500 true" {
		t.Errorf("the backfill is %s", got)
	}
	if n := value[int](t, su, `SELECT count(*) FROM pg_proc WHERE proname ~ '^reader_'`); n != 0 {
		t.Error("the reader is left behind")
	}
}

// Every way that was found to make koldproxy run somebody's code with its own rights.
func TestNobodyBorrowsTheServiceRole(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	m, _ := mallory(t, su, as)
	me := value[string](t, m, `SELECT current_user`)
	exec(t, m, fmt.Sprintf(`
		CREATE FUNCTION mal.grab(text) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $f$
		BEGIN
			IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN EXECUTE 'ALTER ROLE %[1]q SUPERUSER'; END IF;
			IF current_user = 'koldproxy_eval' THEN ALTER FUNCTION koldstore.eval_rows(oid, text[], oid[]) SECURITY INVOKER; END IF;
			RETURN true;
		END $f$;
		CREATE DOMAIN mal.d AS int CHECK (mal.grab('domain'));
		CREATE TYPE mal.pair AS (a mal.d, b int);
		CREATE TYPE mal.rng AS RANGE (SUBTYPE = mal.d);
		CREATE TYPE mal.mood AS ENUM ('sad', 'glad');
		CREATE TABLE mal.arr (id int PRIMARY KEY, a mal.d[], r mal.rng, c mal.pair, e mal.mood, es mal.mood[]);
		CREATE TABLE mal.t (id int PRIMARY KEY, a mal.d);
		INSERT INTO mal.t VALUES (1, 1);
		CREATE FUNCTION mal.evil() RETURNS text LANGUAGE plpgsql AS $f$ BEGIN PERFORM mal.grab('view'); RETURN 'x'; END $f$;
		CREATE VIEW mal.v AS SELECT mal.evil() AS id, now() - interval '1 year' AS ts`, me))
	// A record that names another relation as a log.
	refused(t, m, "42883", "does not exist", `SELECT koldstore.expired(s) FROM (SELECT jsonb_populate_record(NULL::koldstore.stream,
		jsonb_build_object('log_oid', 'mal.v'::regclass::oid::bigint, 'retention', '1 second')) AS s) x`)
	// Constants whose input functions run checks.
	for _, predicate := range []string{`a = '{1,2}'::mal.d[]`, `r @> '[3,4]'::mal.rng`, `c = '(7,1)'::mal.pair`} {
		refused(t, m, "0A000", "domain", `CALL koldstore.create_stream('mal', 'x', 'mal', 'arr', $1)`, predicate)
	}
	exec(t, m, `CALL koldstore.create_stream('mal', 'fine', 'mal', 'arr', $1)`, `e IN ('sad', 'glad') AND es = '{sad}'::mal.mood[] AND id = ANY ('{1,2}')`)
	// What belongs to others in koldproxy's schema stays as it is.
	fn := value[string](t, su, `SELECT predicate_fn::regprocedure::text FROM koldstore.stream WHERE name = 'fine'`)
	for _, sql := range []string{`ALTER FUNCTION %s SECURITY INVOKER`, `ALTER FUNCTION %s SET search_path = mal`, `ALTER ROUTINE %s RENAME TO other`, `DROP FUNCTION %s`} {
		refused(t, m, "42501", "", fmt.Sprintf(sql, fn))
	}
	// A backfill runs checks as a role that owns eval_rows, in a transaction that only reads.
	refused(t, m, "25006", "read-only", `SELECT; CALL koldstore.create_stream('mal', 's', 'mal', 't', 'id > 0', options => '{"start": "earliest"}')`)
	exec(t, su, `DROP TABLE mal.arr CASCADE`)
	if !value[bool](t, su, `SELECT bool_and(prosecdef) FROM pg_proc WHERE pronamespace = 'koldstore'::regnamespace AND proname ~ '^(eval|predicate)_'`) {
		t.Error("a function of koldproxy's runs with its caller's rights now")
	}
	if value[bool](t, su, `SELECT rolsuper FROM pg_roles WHERE rolname = $1`, me) {
		t.Error("mallory is a superuser")
	}
}

// What PostgreSQL would refuse the application because its table is published is noticed when the table is altered.
func TestAlteringATableNeverHurtsItsWriters(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, `GRANT CREATE ON SCHEMA public TO PUBLIC`)
	for name, alter := range map[string]string{
		"nothing_":  `ALTER TABLE %s REPLICA IDENTITY NOTHING`,
		"default_":  `ALTER TABLE %s REPLICA IDENTITY DEFAULT`,
		"dropped":   `ALTER TABLE %s DROP CONSTRAINT %[1]s_pkey`,
		"retyped":   `ALTER TABLE %s ALTER id TYPE bigint`,
		"generated": `ALTER TABLE %s ADD g int GENERATED ALWAYS AS (n * 2) STORED`,
	} {
		exec(t, owner, fmt.Sprintf(`CREATE TABLE %[1]s (id int PRIMARY KEY, n int); INSERT INTO %[1]s VALUES (1, 1); SELECT koldstore.manage_table('%[1]s')`, name))
		exec(t, owner, fmt.Sprintf(`CALL koldstore.create_stream(NULL, '%s', NULL, '%[1]s', 'n > 1')`, name))
		exec(t, owner, fmt.Sprintf(alter, name))
		exec(t, owner, fmt.Sprintf(`UPDATE %s SET n = 7; DELETE FROM %[1]s`, name))
		if got := value[string](t, owner, `SELECT s.state || ' ' || m.state || ' ' || (s.reason = m.reason) FROM koldstore.visible_stream s JOIN koldstore.visible_managed_table m USING (table_oid) WHERE s.name = $1`, name); got != "broken broken true" {
			t.Errorf("%s: stream and feed are %s", name, got)
		}
		exec(t, owner, fmt.Sprintf(`CALL koldstore.drop_stream(NULL, '%s'); SELECT koldstore.unmanage_table('%[1]s')`, name))
	}
}

func TestAFeedBeginsAnew(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY)`)
	asService(t, su, `UPDATE koldstore.checkpoint SET watermark = 1000`)
	exec(t, su, `SELECT koldstore.manage_table('t')`)
	refused(t, su, "55000", "still being seeded", `SELECT * FROM koldstore.changes_since('t')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'`)
	exec(t, su, `SELECT * FROM koldstore.changes_since('t')`)
	// The newest position there was belongs to the feed that ended.
	refused(t, su, "KS001", "before sequence 1001", `SELECT * FROM koldstore.changes_since('t', 1000)`)
}

func TestKeysOfOddTypes(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `
		CREATE DOMAIN code AS varchar(5) CHECK (VALUE <> ''); CREATE DOMAIN code2 AS code;
		CREATE TYPE pair AS (a int, b int); CREATE TYPE mood AS ENUM ('sad', 'glad');
		CREATE TABLE ok (a code2, b mood, c int4range, d text COLLATE "C", PRIMARY KEY (a, b, c, d));
		CREATE TABLE comp (a pair PRIMARY KEY); CREATE TABLE arr (a code[] PRIMARY KEY);
		CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)`)
	exec(t, su, `SELECT koldstore.manage_table('ok')`)
	if got := value[string](t, su, `SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'koldstore.ok__cl'::regclass AND attnum BETWEEN 1 AND 4`); got != "a character varying(5), b mood, c int4range, d text" {
		t.Errorf("the mirror's key is %s", got)
	}
	refused(t, su, "55000", "composite", `SELECT koldstore.manage_table('comp')`)
	refused(t, su, "55000", "composite", `SELECT koldstore.manage_table('arr')`)
	refused(t, su, "55000", "inherits", `SELECT koldstore.manage_table('parent')`)
	refused(t, su, "55000", "inherits", `SELECT koldstore.manage_table('child')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'; INSERT INTO koldstore.ok__cl VALUES ('x', 'glad', '[1,3)', 'é', 9223372036854775000, 3, NULL)`)
	if got := value[string](t, su, `SELECT pk::text FROM koldstore.changes_since('ok')`); got != `{"a": "x", "b": "glad", "c": "[1,3)", "d": "é"}` {
		t.Errorf("pk is %s", got)
	}
}

// What PostgreSQL's log does not tell, the order of columns and who they are, is put into it.
func TestShapesAreInTheLog(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY, v int, pad int)`)
	exec(t, su, `SELECT koldstore.manage_table('t')`)
	exec(t, su, `ALTER TABLE t DROP pad; ALTER TABLE t ADD other int, ALTER v SET DEFAULT 3; ALTER TABLE t RENAME v TO w; ALTER TABLE t ADD CHECK (w > 0)`)
	got := pages(t, su, `SELECT kind || ' ' || coalesce((SELECT string_agg((c ->> 'attnum') || (c ->> 'name'), ' ') FROM jsonb_array_elements(details) c), '') FROM koldstore.wal_marker ORDER BY marker_id`)
	if want := "shape 1id 2v 3pad|table |shape 1id 2v|shape 1id 2v 4other|shape 1id 2w 4other"; strings.Join(got, "|") != want {
		t.Errorf("markers are %s, want %s", strings.Join(got, "|"), want)
	}
}

func TestThePublicationStaysAsItIs(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY); CREATE PUBLICATION mine FOR TABLE u`)
	exec(t, su, `SELECT koldstore.manage_table('t')`)
	for _, sql := range []string{
		`ALTER PUBLICATION koldproxy DROP TABLE t`, `ALTER PUBLICATION koldproxy ADD TABLE u`, `ALTER PUBLICATION koldproxy SET TABLE t WHERE (id > 5)`,
		`ALTER PUBLICATION koldproxy SET (publish = 'insert')`, `DROP PUBLICATION koldproxy`, `ALTER PUBLICATION koldproxy RENAME TO other`,
	} {
		refused(t, su, "42809", "publication", sql)
	}
	exec(t, su, `ALTER PUBLICATION mine ADD TABLE t; ALTER PUBLICATION mine SET (publish = 'insert'); DROP PUBLICATION mine; DROP TABLE t`)
	exec(t, su, `CREATE TABLE t2 (id int PRIMARY KEY)`)
	exec(t, su, `SELECT koldstore.manage_table('t2')`)
	asService(t, su, `ALTER PUBLICATION koldproxy DROP TABLE t2`)
	exec(t, su, `SELECT koldstore.unmanage_table('t2')`)
}
