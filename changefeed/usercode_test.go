package changefeed_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/walapply"
)

// spy makes public.spy(), which code of the attacker calls. It tries to become a superuser, and to make the attacker one; where
// it runs as one it takes a lock that outlives the transaction.
func (h *host) spy() {
	h.t.Helper()
	h.exec(`CREATE FUNCTION strike() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
		BEGIN
			IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
				PERFORM pg_try_advisory_lock(4711);
				EXECUTE format('ALTER ROLE %I SUPERUSER', 'app_' || current_database());
			END IF;
		EXCEPTION WHEN OTHERS THEN NULL;
		END $$`,
		`CREATE FUNCTION spy() RETURNS void LANGUAGE plpgsql AS $$
		DECLARE
			attempt text;
		BEGIN
			PERFORM public.strike();
			FOREACH attempt IN ARRAY ARRAY['RESET ROLE', 'SET ROLE NONE', 'RESET SESSION AUTHORIZATION', 'SET SESSION AUTHORIZATION DEFAULT', 'SET ROLE postgres',
				'SET SESSION AUTHORIZATION postgres', 'SET transaction_read_only = off', 'CREATE TEMPORARY TABLE x (i int)', 'SET search_path = public, pg_catalog',
				'SET default_transaction_read_only = off', 'SET session_replication_role = replica'] LOOP
				BEGIN
					EXECUTE attempt;
				EXCEPTION WHEN OTHERS THEN NULL;
				END;
				PERFORM public.strike();
			END LOOP;
		END $$`)
}

// proveSpy fails the test if the attacker's code would not do harm where it can.
func (h *host) proveSpy() {
	h.t.Helper()
	tx, err := h.pool.Begin(h.t.Context())
	must(h.t, err)
	var super bool
	_, err = tx.Exec(h.t.Context(), `SELECT public.spy()`)
	must(h.t, err)
	must(h.t, tx.QueryRow(h.t.Context(), `SELECT rolsuper, pg_advisory_unlock_all() FROM pg_roles WHERE rolname = 'app_' || current_database()`).Scan(&super, nil))
	must(h.t, tx.Rollback(h.t.Context()))
	if !super {
		h.t.Fatal("the attack does not work where it should")
	}
}

// unharmed fails the test if the attacker has become a superuser, or has ever run as one.
func (h *host) unharmed() {
	h.t.Helper()
	h.expect(`SELECT rolsuper FROM pg_roles WHERE rolname = 'app_'||current_database()`, "f")
	h.expect(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711`, "0")
}

// C1: code of a table's owner runs in the eval session or nowhere, and has no rights of the service role there.
func TestCodeOfUsersHasNoRights(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.spy()
	h.proveSpy()
	h.exec(
		`CREATE TYPE en AS ENUM ('a', 'b')`,
		`CREATE FUNCTION check_it(text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN PERFORM public.spy(); RETURN true; END'`,
		`CREATE DOMAIN d AS text CHECK (public.check_it(VALUE))`,
		`CREATE DOMAIN dk AS int CHECK (public.check_it(VALUE::text))`,
		`CREATE TYPE r AS RANGE (subtype = d)`,
		`CREATE TABLE t (e en, id dk, x d, y en[], z d[], PRIMARY KEY (e, id))`,
		`CREATE FUNCTION to_json(en) RETURNS json LANGUAGE plpgsql AS 'BEGIN PERFORM public.spy(); RETURN format(''"%s"'', $1)::json; END'`,
		`CREATE FUNCTION to_text(en) RETURNS text LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN 'a'; END$$`,
		`CREATE FUNCTION from_text(text) RETURNS en LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN NULL; END$$`,
		`CREATE FUNCTION row_text(t) RETURNS text LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN '()'; END$$`,
		`CREATE FUNCTION row_json(t) RETURNS json LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN '{}'; END$$`,
		`CREATE FUNCTION row_in(text) RETURNS t LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN NULL; END$$`,
		`CREATE FUNCTION same(en, en) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN true; END$$`,
		`CREATE OPERATOR = (LEFTARG = en, RIGHTARG = en, FUNCTION = same)`,
		`CREATE OPERATOR > (LEFTARG = en, RIGHTARG = en, FUNCTION = same)`,
		`CREATE FUNCTION unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN; END$$`,
		`CREATE FUNCTION pred(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN PERFORM public.spy(); RETURN true; END'`,
		`INSERT INTO t SELECT 'a', i, 'x', '{a,b}', '{p}' FROM generate_series(1, 5) i`,
		`CREATE CAST (en AS json) WITH FUNCTION to_json(en) AS IMPLICIT`,
		`CREATE CAST (en AS text) WITH FUNCTION to_text(en) AS IMPLICIT`,
		`CREATE CAST (text AS en) WITH FUNCTION from_text(text) AS IMPLICIT`,
		`CREATE CAST (t AS text) WITH FUNCTION row_text(t) AS IMPLICIT`,
		`CREATE CAST (t AS json) WITH FUNCTION row_json(t) AS IMPLICIT`,
		`CREATE CAST (text AS t) WITH FUNCTION row_in(text) AS IMPLICIT`,
	)
	h.stopApplier()
	h.config.SeedRows = 2
	h.startApplier()
	h.manage("t")
	h.stream("s", "t", "pred(x)", "pre_image", "true")
	h.exec(`INSERT INTO t VALUES ('b', 6, 'y', '{}', '{}')`, `UPDATE t SET x = 'z' WHERE id = 6`, `UPDATE t SET id = 7 WHERE id = 6`, `DELETE FROM t WHERE id = 1`)
	h.fence()
	h.events("s", `put {"e": "b", "id": 6}`, `put {"e": "b", "id": 6}`, `delete {"e": "b", "id": 6}`, `put {"e": "b", "id": 7}`, `delete {"e": "a", "id": 1}`)
	h.exec(`TRUNCATE t`)
	h.fence()
	h.expect(`SELECT op, count(*) FROM koldstore.t__cl GROUP BY op`, "3 7")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
	h.expect(`SELECT state FROM koldstore.stream UNION ALL SELECT state FROM koldstore.managed_table`, "active", "active")
	h.unharmed()
}

// What code of users leaves behind in the eval session does no harm: settings, prepared statements, locks, deferred triggers.
func TestCodeOfUsersLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.spy()
	h.proveSpy()
	h.exec(
		`CREATE TABLE trap (i int)`,
		`CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM public.spy(); RETURN NULL; END'`,
		`CREATE CONSTRAINT TRIGGER trap AFTER INSERT ON trap DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION trap()`,
		`CREATE FUNCTION try(text) RETURNS void LANGUAGE plpgsql AS 'BEGIN EXECUTE $1; EXCEPTION WHEN OTHERS THEN NULL; END'`,
		`CREATE FUNCTION jsonb_out(text) RETURNS text LANGUAGE plpgsql AS $$BEGIN PERFORM public.spy(); RETURN ''; END$$`,
		`CREATE FUNCTION leave(int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE SET search_path = public, pg_catalog AS $$
		BEGIN
			PERFORM public.try('INSERT INTO public.trap VALUES (1)');
			PERFORM public.try('SET SESSION search_path = public, pg_catalog');
			PERFORM public.try('SET SESSION statement_timeout = 0');
			PERFORM public.try('PREPARE stmtcache_1 AS SELECT public.spy()');
			PERFORM public.try('PREPARE stmt AS SELECT public.spy()');
			PERFORM public.try('DECLARE c CURSOR WITH HOLD FOR SELECT public.spy()');
			PERFORM public.try('LISTEN x');
			RETURN true;
		END $$`,
		tableT)
	h.stream("s", "t", "leave(v)")
	for i := range 5 {
		h.exec(fmt.Sprintf(`INSERT INTO t VALUES (%d, 1, NULL)`, i))
		h.fence()
	}
	h.events("s", "put 0", "put 1", "put 2", "put 3", "put 4")
	h.expect(`SELECT count(*) FROM trap`, "0")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
	h.unharmed()
}

// A predicate that takes too long costs its row, also one that does not let itself be cancelled; one that does so again and
// again costs its stream. Nobody else is kept waiting for long.
func TestPredicateThatSleeps(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.config.EvalTimeout = 300 * time.Millisecond
	h.startApplier()
	h.exec(tableT,
		`CREATE FUNCTION doze(int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN IF $1 = 13 THEN PERFORM pg_sleep(1000); END IF; RETURN true; END'`,
		`CREATE FUNCTION stubborn(int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
		BEGIN
			WHILE $1 = 13 LOOP
				BEGIN PERFORM pg_sleep(1000); EXCEPTION WHEN query_canceled THEN NULL; END;
			END LOOP;
			RETURN true;
		END $$`)
	h.stream("doze", "t", "doze(v)")
	h.stream("calm", "t", "true")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 1, NULL), (2, 13, NULL), (3, 1, NULL)`)
	h.fence()
	h.events("doze", "put 1", "put 3")
	h.events("calm", "put 1", "put 2", "put 3")
	h.expect(`SELECT op, sqlstate, row_text FROM koldstore.quarantine`, `1 57014 ("2","13",)`)
	h.exec(`CALL koldstore.drop_stream(NULL, 'doze')`)
	h.stream("stubborn", "t", "stubborn(v)")
	h.exec(`INSERT INTO t VALUES (4, 13, NULL), (5, 1, NULL)`)
	h.fence()
	h.events("stubborn", "put 5")
	h.exec(`INSERT INTO t SELECT i, 13, NULL FROM generate_series(6, 9) i`)
	h.fence()
	h.expect(`SELECT name, state, reason FROM koldstore.stream ORDER BY name`, "calm active NULL", "stubborn broken evaluating a single row has taken longer than 300ms, 3 times")
	h.expect(`SELECT count(*) FROM koldstore.t__cl`, "9")
	h.eventually("nothing of it runs any more", func() bool {
		return h.rows(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'koldproxy eval' AND state = 'active'`)[0] == "0"
	})
}

// A table that is locked for longer than a row may take is waited for, as ever.
func TestLockedTableIsNotAPoisonRow(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.config.EvalTimeout = 2 * time.Second
	h.startApplier()
	ctx := t.Context()
	h.exec(tableT)
	h.stream("s", "t", "v > 0")
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`)
	other, err := pgx.ConnectConfig(ctx, h.app.Config())
	must(t, err)
	defer other.Close(ctx)
	_, err = other.Exec(ctx, `BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	h.startApplier()
	begun, waits := time.Now(), 0
	h.eventually("the eval session has waited for longer than that", func() bool {
		if h.rows(`SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted`)[0] != "0" {
			waits++
		}
		return waits > 0 && time.Since(begun) > h.config.EvalTimeout
	})
	_, err = other.Exec(ctx, `COMMIT`)
	must(t, err)
	h.fence()
	h.events("s", "put 1")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// Whoever holds such a lock may want the mirror next. What was written to it while the predicates were judged does not keep it from him.
func TestLockedTableGivesTheMirrorWay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "v > 0")
	h.manage("t")
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`, `UPDATE t SET v = 2`)
	other, err := pgx.ConnectConfig(t.Context(), h.app.Config())
	must(t, err)
	defer other.Close(t.Context())
	_, err = other.Exec(t.Context(), `BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	h.startApplier()
	h.eventually("the eval session waits", func() bool {
		return h.rows(`SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted`)[0] != "0"
	})
	_, err = other.Exec(t.Context(), `SELECT koldstore.unmanage_table('t'); COMMIT`)
	must(t, err)
	h.fence()
	h.events("s", "put 1", "put 1")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// M2: the old row of an update cannot be read any more. The update is written all the same, and copies stay right.
func TestOldRowThatCannotBeRead(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE j (id int PRIMARY KEY, v int, a json)`)
	h.stream("plain", "j", "v > 0")
	h.stream("pre", "j", "v > 0", "pre_image", "true")
	h.exec(`CREATE FUNCTION f(json) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$ SELECT ($1 ->> 'x') IS NOT NULL $$`)
	h.stream("unknown", "j", "f(a)")
	h.fence()
	h.exec(`INSERT INTO j VALUES (1, 1, '{"x": "\u0000"}'), (2, 0, '{"x": "\u0000"}'), (3, 1, '{"x": "\u0000"}')`)
	h.fence()
	h.admin(`TRUNCATE koldstore.quarantine`)
	h.exec(`UPDATE j SET a = '{"x": 1}' WHERE id < 3`, `UPDATE j SET v = -1, a = '{}' WHERE id = 3`, `UPDATE j SET v = 5 WHERE id = 2`)
	h.fence()
	h.expect(`SELECT op, k, doc FROM _stream_plain ORDER BY id`, `put 1 {"a": {"x": 1}, "v": 1, "id": 1}`, `exit 3 {"a": {}, "v": -1, "id": 3}`, `put 2 {"a": {"x": 1}, "v": 5, "id": 2}`)
	h.expect(`SELECT op, k, old FROM _stream_pre ORDER BY id`, `put 1 NULL`, `exit 3 NULL`, `put 2 {"a": {"x": 1}, "v": 0, "id": 2}`)
	h.events("unknown", "put 1", "put 2", "exit 3", "put 2") // nobody can say whether row 3 had matched
	h.expect(`SELECT s.name, q.op, q.sqlstate, (q.row_text::j).id FROM koldstore.quarantine q JOIN koldstore.stream s USING (stream_id) ORDER BY 1, 4`,
		"plain 2 22P05 3", "pre 2 22P05 1", "pre 2 22P05 3", "unknown 2 22P05 3")
}

// H4: a mirror was made for a primary key; when that changes, it says so at once.
func TestPrimaryKeyChanges(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.admin(`ALTER EVENT TRIGGER koldproxy_ddl DISABLE`) // which sees some of this first, where koldproxy could create it
	for table, change := range map[string]struct{ ddl, reason string }{
		"renamed":   {`RENAME id TO nr`, `column "id" of the primary key has been renamed to "nr"`},
		"retyped":   {`ALTER id TYPE bigint`, `column "id" of the primary key has changed its type`},
		"reordered": {`DROP CONSTRAINT reordered_pkey, ADD PRIMARY KEY (b, id)`, `the primary key of the table has changed: it has column "b" where it had "id"`},
		"shorter":   {`DROP CONSTRAINT shorter_pkey, ADD PRIMARY KEY (id)`, `the primary key of the table has changed`},
	} {
		h.exec(fmt.Sprintf(`CREATE TABLE %s (id int, b int, PRIMARY KEY (id, b))`, table))
		h.manage(table)
		h.exec(fmt.Sprintf(`INSERT INTO %s VALUES (1, 1)`, table))
		h.fence()
		h.exec(fmt.Sprintf(`ALTER TABLE %s %s`, table, change.ddl), fmt.Sprintf(`INSERT INTO %s VALUES (2, 2)`, table))
		h.fence()
		h.expect(fmt.Sprintf(`SELECT state, reason FROM koldstore.managed_table WHERE table_name = '%s'`, table), "broken "+change.reason)
	}
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// C4a: a session that locks a log does not hold everybody up for ever.
func TestSessionThatLocksALog(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.stopApplier()
	h.change = func(c *walapply.Config) { c.LockWait = 200 * time.Millisecond }
	h.startApplier()
	ctx := t.Context()
	h.exec(tableT)
	h.stream("s", "t", "v > 0")
	h.fence()
	other, err := pgx.ConnectConfig(ctx, h.app.Config())
	must(t, err)
	defer other.Close(ctx)
	_, err = other.Exec(ctx, `BEGIN; LOCK TABLE _stream_s IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`)
	h.fence()
	h.events("s", "put 1")
	if err := other.Ping(ctx); err == nil {
		t.Error("the session that held the lock is still there")
	}
}

// The planner evaluates what is constant in the expressions of indexes and statistics, with the rights of whoever reads a
// table. Such a table is not read by the service role.
func TestIndexesWithCodeOfUsers(t *testing.T) {
	t.Parallel()
	for _, trap := range []string{
		`CREATE INDEX ON t ((v + planned(1)))`, `CREATE INDEX ON t (id) WHERE planned(2) > 0`, `CREATE STATISTICS x ON (v + planned(3)), id FROM t`,
	} {
		t.Run(trap, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.spy()
			h.exec(tableT, `CREATE TABLE fine (id int PRIMARY KEY, v text)`, `CREATE INDEX ON fine (lower(v))`, `INSERT INTO t SELECT i, i FROM generate_series(1, 100) i`,
				`CREATE FUNCTION volatile_spy() RETURNS int LANGUAGE plpgsql AS 'BEGIN PERFORM public.spy(); RETURN 1; END'`,
				`CREATE FUNCTION planned(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN (SELECT public.volatile_spy()); END'`, trap)
			h.manage("t")
			h.manage("fine")
			h.eventually("the jobs end", func() bool {
				return h.rows(`SELECT count(*) FROM koldstore.job WHERE status IN ('queued', 'running')`)[0] == "0"
			})
			h.expect(`SELECT table_name, state, reason LIKE 'seeding it failed: % uses function %planned(integer), %' FROM koldstore.managed_table ORDER BY 1`, "fine active NULL", "t broken t")
			h.unharmed()
		})
	}
}
