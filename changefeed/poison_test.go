package changefeed_test

import "testing"

// B57: a row that cannot become JSON is in quarantine, counted, and everything around it goes on.
func TestPoisonRows(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE j (id int PRIMARY KEY, a json)`)
	h.stream("s", "j", "id > 0")
	h.stream("other", "j", "id = 3")
	h.manage("j")
	h.fence()
	h.stopApplier() // one batch
	h.exec(`INSERT INTO j SELECT i, '{"x": 1}' FROM generate_series(3, 60) i`)
	h.exec(`INSERT INTO j VALUES (1, '{"x": "\u0000"}'), (2, '{"x": 1}')`, `UPDATE j SET a = '"\u0000"' WHERE id = 30`, `DELETE FROM j WHERE id = 1`)
	h.startApplier()
	h.fence()
	h.expect(`SELECT op, count(*) FROM _stream_s GROUP BY op ORDER BY op`, "delete 1", "put 59")
	h.expect(`SELECT k, doc FROM _stream_s WHERE op = 'delete'`, `1 {"id": 1}`) // nobody can show more of it
	h.events("other", "put 3")
	h.expect(`SELECT s.name, u.events, u.events_lost FROM koldstore.stream s JOIN koldstore.stream_status u USING (stream_id) ORDER BY s.name`, "other 1 0", "s 60 2")
	h.expect(`SELECT table_oid::regclass, (row_text::j).id, op, sqlstate, stream_id IS NOT NULL FROM koldstore.quarantine ORDER BY seq, stream_id`,
		"j 1 1 22P05 t", "j 1 1 22P05 f", "j 30 2 22P05 t", "j 30 2 22P05 f", "j 1 3 22P05 t")
	// The mirror knows of the delete; of row 30 it knows what it was.
	h.expect(`SELECT id, op, row_image ->> 'a' FROM koldstore.j__cl WHERE id IN (1, 2, 30) ORDER BY id`, "1 3 NULL", `2 1 {"x": 1}`, `30 1 {"x": 1}`)
}

// A predicate that raises costs the event of that row in that stream, and nothing else.
func TestPredicateThatRaises(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "10 / v > 1")
	h.stream("ok", "t", "v IS NOT NULL")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 2, NULL), (2, 0, NULL), (3, 3, NULL)`, `UPDATE t SET v = 0 WHERE id = 1`, `UPDATE t SET v = 4 WHERE id = 2`, `DELETE FROM t WHERE id = 1`)
	h.fence()
	h.events("s", "put 1", "put 3", "put 2", "delete 1") // a copy has row 1 as it was before it could not be judged
	h.expect(`SELECT doc FROM _stream_s WHERE op = 'delete'`, `{"v": 0, "id": 1, "big": null}`)
	h.expect(`SELECT events_lost FROM koldstore.stream_status ORDER BY stream_id`, "2", "0")
	h.events("ok", "put 1", "put 2", "put 3", "put 1", "put 2", "delete 1")
	h.expect(`SELECT op, sqlstate, message FROM koldstore.quarantine ORDER BY seq`, "1 22012 division by zero", "2 22012 division by zero", "3 22012 the old row: division by zero")
	h.expect(`SELECT id, op FROM koldstore.t__cl ORDER BY id`, "1 3", "2 2", "3 1")
}

// B27: text that does not cast any more under today's catalog does not stop anything.
func TestOldTextNewCatalog(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TYPE e AS ENUM ('a', 'b')`, `CREATE DOMAIN d AS int`, `CREATE TABLE r (id int PRIMARY KEY, e e, d d)`)
	h.stream("s", "r", "id > 0")
	h.manage("r")
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO r VALUES (1, 'a', 20), (2, 'b', 5), (3, 'b', 20)`, `DELETE FROM r WHERE id = 2`, `ALTER TYPE e RENAME VALUE 'a' TO 'aa'`, `ALTER DOMAIN d ADD CHECK (VALUE > 9)`)
	h.startApplier()
	h.fence()
	h.events("s", "put 1", "put 3", "delete 2")
	h.expect(`SELECT op, sqlstate, count(*) FROM koldstore.quarantine GROUP BY op, sqlstate ORDER BY op, sqlstate`, "1 23514 2", "3 23514 1")
	h.expect(`SELECT id, op FROM koldstore.r__cl ORDER BY id`, "1 1", "2 3", "3 1") // a tombstone needs the key only
}

// A stream whose predicate is gone is broken, loudly; its neighbours go on.
func TestBrokenDefinitions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT, `CREATE FUNCTION f(int) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 > 0'`)
	h.stream("s", "t", "f(v)")
	h.stream("other", "t", "v > 0")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`)
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (2, 1, NULL)`,
		`CREATE FUNCTION g(int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN no_such_thing($1); END'`,
		`CREATE OR REPLACE FUNCTION f(int) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT public.g($1)'`)
	h.startApplier()
	h.fence()
	h.events("s", "put 1")
	h.events("other", "put 1", "put 2")
	h.expect(`SELECT name, state, reason LIKE '%no_such_thing%' FROM koldstore.stream ORDER BY name`, "other active NULL", "s broken t")
	h.expect(`SELECT id, op FROM koldstore.t__cl ORDER BY id`, "1 1", "2 1")
}

// Losing the primary key ends captures; so does losing the table. Somebody who waits for a seed of it does not wait for ever.
func TestTableLosesItsKeyOrItself(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT, `CREATE TABLE u (id int PRIMARY KEY)`, `INSERT INTO u SELECT generate_series(1, 10)`)
	h.stream("s", "t", "v > 0")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`)
	h.fence()
	h.stopApplier()
	h.exec(`ALTER TABLE t DROP CONSTRAINT t_pkey`, `INSERT INTO t VALUES (1, 2, NULL)`)
	h.manage("u")
	h.exec(`DROP TABLE u`)
	h.startApplier()
	h.fence()
	h.eventually("the jobs end", func() bool {
		return h.rows(`SELECT count(*) FROM koldstore.job WHERE status IN ('queued', 'running')`)[0] == "0"
	})
	h.events("s", "put 1")
	h.expect(`SELECT state FROM koldstore.stream UNION ALL SELECT state FROM koldstore.managed_table`, "broken", "broken", "broken")
	h.exec(`UPDATE t SET v = 3`) // nothing stands in the application's way
}

// Somebody who holds locks on the catalog row of a table delays its seed and nothing else.
func TestSeedWaitsForALockedRow(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT, `CREATE TABLE u (id int PRIMARY KEY)`, `INSERT INTO u SELECT generate_series(1, 10)`)
	h.stream("s", "t", "v > 0")
	h.fence()
	h.stopApplier()
	h.manage("u")
	ctx := t.Context()
	h.exec(`INSERT INTO t VALUES (1, 1, NULL)`)
	tx, err := h.pool.Begin(ctx)
	must(t, err)
	h.startApplier()
	h.eventually("the seed has begun", func() bool { return h.rows(`SELECT state FROM koldstore.managed_table`)[0] != "pending" })
	_, err = tx.Exec(ctx, `SELECT FROM koldstore.managed_table FOR UPDATE`)
	must(t, err)
	for i := range 5 {
		h.exec(`INSERT INTO t VALUES (` + string(rune('2'+i)) + `, 1, NULL)`)
	}
	h.eventually("changes go on", func() bool { return h.rows(`SELECT count(*) FROM _stream_s`)[0] == "6" })
	must(t, tx.Rollback(ctx))
	h.fence()
	h.expect(`SELECT count(*) FROM koldstore.u__cl`, "10")
}

// Values raise errors of the kinds that definitions raise: what is to blame is whatever cannot be judged, not the stream.
func TestValuesThatLookLikeBrokenDefinitions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, n numeric, s text, a int[])`,
		`CREATE FUNCTION moody(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN IF $1 = 'bad' THEN PERFORM no_such_thing(); END IF; RETURN true; END $$`)
	h.stream("cast", "t", "n::int = 1")
	h.stream("query", "t", "'cat'::tsvector @@ s::tsquery")
	h.stream("path", "t", "(s::jsonpath)::text = '$'")
	h.stream("position", "t", "array_position(a, 1) = 1")
	h.stream("moody", "t", "moody(s)")
	h.exec(`INSERT INTO t VALUES (1, 'NaN', 'cat', '{1}'), (2, 1, 'bad', '{1}'), (3, 1, 'cat', '{{1}}'), (4, 1, 'cat &', '{1}'), (5, 1, '$', '{1}')`)
	h.fence()
	h.events("cast", "put 2", "put 3", "put 4", "put 5")
	h.events("query", "put 1", "put 3")
	h.events("path", "put 5")
	h.events("position", "put 1", "put 2", "put 4", "put 5")
	h.events("moody", "put 1", "put 3", "put 4", "put 5")
	h.expect(`SELECT s.name, s.state, u.events_lost, array_agg(DISTINCT q.sqlstate) FROM koldstore.stream s JOIN koldstore.stream_status u USING (stream_id)
		JOIN koldstore.quarantine q USING (stream_id) GROUP BY 1, 2, 3 ORDER BY 1`,
		"cast active 1 {0A000}", "moody active 1 {42883}", "path active 4 {42601}", "position active 1 {0A000}", "query active 1 {42601}")
}
