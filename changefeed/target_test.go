package changefeed_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
)

const tableT = `CREATE TABLE t (id int PRIMARY KEY, v int, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL`

func TestStreamReportsPutExitAndDelete(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE orders (id int PRIMARY KEY, total int, status text)`, `INSERT INTO orders VALUES (1, 5000, 'paid')`)
	h.stream("big", "orders", "total > 1000 AND status <> 'draft'", "pre_image", "true")
	h.exec(
		`INSERT INTO orders VALUES (2, 10, 'paid'), (3, 2000, 'draft'), (4, 2000, 'paid')`,
		`UPDATE orders SET total = 6000 WHERE id = 1`, // was there before the stream
		`UPDATE orders SET status = 'paid' WHERE id = 3`,
		`UPDATE orders SET total = 1 WHERE id = 4`,
		`DELETE FROM orders WHERE id = 4`,
		`UPDATE orders SET status = NULL WHERE id = 3`,
		`DELETE FROM orders WHERE id IN (1, 2)`,
	)
	h.fence()
	h.expect(`SELECT op, k, doc, coalesce(old::text, '-') FROM _stream_big ORDER BY id`,
		`put 4 {"id": 4, "total": 2000, "status": "paid"} -`,
		`put 1 {"id": 1, "total": 6000, "status": "paid"} {"id": 1, "total": 5000, "status": "paid"}`,
		`put 3 {"id": 3, "total": 2000, "status": "paid"} {"id": 3, "total": 2000, "status": "draft"}`,
		`exit 4 {"id": 4, "total": 1, "status": "paid"} {"id": 4, "total": 2000, "status": "paid"}`,
		`exit 3 {"id": 3, "total": 2000, "status": null} {"id": 3, "total": 2000, "status": "paid"}`,
		`delete 1 {"id": 1, "total": 6000, "status": "paid"} {"id": 1, "total": 6000, "status": "paid"}`,
	)
	h.expect(`SELECT events, events_lost FROM koldstore.stream_status`, `6 0`)
}

// B1, B2: the value behind an unchanged TOAST pointer is what it was, in the log and in the mirror.
func TestUnchangedToastIsNeverNull(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "v > 0", "pre_image", "true")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 1, repeat('x', 9000))`, `UPDATE t SET v = 2 WHERE id = 1`)
	h.exec(`BEGIN`, `INSERT INTO t VALUES (2, 1, repeat('y', 9000))`, `UPDATE t SET v = 2 WHERE id = 2`, `UPDATE t SET id = 3 WHERE id = 2`, `COMMIT`)
	h.fence()
	h.expect(`SELECT op, k, length(doc ->> 'big'), length(old ->> 'big') FROM _stream_s ORDER BY id`,
		"put 1 9000 NULL", "put 1 9000 9000", "put 2 9000 NULL", "put 2 9000 9000", "delete 2 9000 9000", "put 3 9000 NULL")
	h.expect(`SELECT id, op, length(row_image ->> 'big') FROM koldstore.t__cl ORDER BY id`, "1 2 9000", "2 3 NULL", "3 1 9000")
}

// The same when somebody took REPLICA IDENTITY FULL away: from an earlier change in the batch, from the mirror, from the
// table; and if it is nowhere any more, the change is in quarantine.
func TestUnchangedToastWithoutFullIdentity(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int, big text, list text[]); ALTER TABLE t ALTER big SET STORAGE EXTERNAL, ALTER list SET STORAGE EXTERNAL`)
	h.exec(`CREATE TABLE u (id int PRIMARY KEY, v int, big text); ALTER TABLE u ALTER big SET STORAGE EXTERNAL`)
	h.manage("t")
	h.stream("s", "u", "v > 0")
	h.exec(`INSERT INTO t VALUES (1, 1, repeat('a', 9000), ARRAY['p"q', NULL, repeat('b', 9000)])`)
	h.admin(`ALTER EVENT TRIGGER koldproxy_ddl DISABLE`) // as where koldproxy could not create it; it would break stream and mirror
	h.exec(`ALTER TABLE t REPLICA IDENTITY DEFAULT`, `ALTER TABLE u REPLICA IDENTITY DEFAULT`)
	h.fence()
	h.stopApplier()
	h.exec(`UPDATE t SET v = 2 WHERE id = 1`, `UPDATE t SET id = 7 WHERE id = 1`)
	h.exec(`BEGIN`, `INSERT INTO t VALUES (2, 1, repeat('c', 9000), '{}')`, `UPDATE t SET v = 2 WHERE id = 2`, `UPDATE t SET v = 3 WHERE id = 2`, `COMMIT`)
	h.exec(`INSERT INTO u VALUES (1, 0, repeat('d', 9000)), (2, 0, repeat('e', 9000))`)
	h.startApplier()
	h.fence()
	h.stopApplier()
	h.exec(`UPDATE u SET v = 1 WHERE id = 1`, `UPDATE u SET v = 1 WHERE id = 2`, `DELETE FROM u WHERE id = 2`)
	h.startApplier()
	h.fence()
	h.expect(`SELECT m.id, m.op, m.row_image = to_jsonb(t.*) FROM koldstore.t__cl m LEFT JOIN t USING (id) ORDER BY id`, "1 3 NULL", "2 2 t", "7 1 t")
	h.expect(`SELECT op, k, left(doc ->> 'big', 1) FROM _stream_s ORDER BY id`, "put 1 d")
	h.expect(`SELECT table_oid::regclass, stream_id, op, sqlstate FROM koldstore.quarantine`, "u 1 2 55000")
	h.expect(`SELECT events, events_lost FROM koldstore.stream_status`, "1 1")
}

// B4, B12, B14: key updates, delete and insert of one key, updates of nothing.
func TestKeysThatMoveAndReturn(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT)
	h.stream("s", "t", "v = 1")
	h.manage("t")
	h.exec(
		`INSERT INTO t VALUES (1, 1, NULL)`,
		`UPDATE t SET id = 5 WHERE id = 1`,
		`UPDATE t SET v = v`,
		`BEGIN; DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (5, 1, 'n'); COMMIT`,
		`BEGIN; INSERT INTO t VALUES (7, 1, ''); DELETE FROM t WHERE id = 7; COMMIT`,
		`BEGIN; UPDATE t SET v = 2 WHERE id = 5; UPDATE t SET id = 6 WHERE id = 5; COMMIT`,
	)
	h.fence()
	h.events("s", "put 1", "delete 1", "put 5", "put 5", "delete 5", "put 5", "put 7", "delete 7", "exit 5")
	h.expect(`SELECT id, op, row_image ->> 'big' FROM koldstore.t__cl ORDER BY id`, "1 3 NULL", "5 3 NULL", "6 1 n", "7 3 NULL")
	h.expect(`SELECT count(*) = count(DISTINCT id), bool_and(length(id) = 45) FROM _stream_s`, "t t")
	h.expect(`SELECT bool_and(m.seq > 0), max(m.seq) <= max(c.watermark) FROM koldstore.t__cl m, koldstore.checkpoint c`, "t t")
}

// B6: with REPLICA IDENTITY FULL every column is flagged as key; the key is that of the catalog, in the order of its index.
func TestKeyComesFromTheCatalog(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE c (v int, b text, a int, PRIMARY KEY (a, b) INCLUDE (v))`)
	h.stream("s", "c", "v > 0")
	h.manage("c")
	h.exec(`INSERT INTO c VALUES (1, 'x', 10)`, `UPDATE c SET v = v + 1`, `UPDATE c SET b = 'y'`)
	h.fence()
	h.events("s", `put {"a": 10, "b": "x"}`, `put {"a": 10, "b": "x"}`, `delete {"a": 10, "b": "x"}`, `put {"a": 10, "b": "y"}`)
	h.expect(`SELECT a, b, op FROM koldstore.c__cl ORDER BY seq`, "10 x 3", "10 y 1")
}

// Equal keys with different texts are one row of the mirror: 1.0 and 1.00, and what a collation calls equal.
func TestKeysThatAreEqualAndLookDifferent(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(
		`CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`,
		`CREATE TABLE n (id numeric PRIMARY KEY, v int)`, `CREATE TABLE w (id text COLLATE nocase PRIMARY KEY, v int)`,
	)
	h.manage("n")
	h.manage("w")
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO n VALUES (1.0, 1)`, `UPDATE n SET id = 1.00, v = 2`, `DELETE FROM n`, `INSERT INTO n VALUES (1, 3)`)
	h.exec(`INSERT INTO w VALUES ('Ab', 1)`, `UPDATE w SET id = 'aB', v = 2`)
	h.startApplier()
	h.fence()
	h.expect(`SELECT id = 1, op, row_image FROM koldstore.n__cl`, `t 1 {"v": 3, "id": 1}`)
	h.expect(`SELECT id, op, row_image FROM koldstore.w__cl`, `aB 1 {"v": 2, "id": "aB"}`)
	h.exec(`DELETE FROM n`, `DELETE FROM w`)
	h.fence()
	h.exec(`INSERT INTO n VALUES (1.000, 4)`, `INSERT INTO w VALUES ('AB', 3)`)
	h.fence()
	h.expect(`SELECT id, row_image FROM koldstore.n__cl`, `1.000 {"v": 4, "id": 1.000}`) // as the table spells it now
	h.expect(`SELECT id, row_image FROM koldstore.w__cl`, `AB {"v": 3, "id": "AB"}`)
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
}

// B9: NULL, the empty string and the word NULL are three things.
func TestNullAndEmpty(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE n (id int PRIMARY KEY, a text, b text)`)
	h.stream("s", "n", "true", "pre_image", "true")
	h.exec(`INSERT INTO n VALUES (1, NULL, '')`, `UPDATE n SET a = '', b = NULL`, `UPDATE n SET a = 'NULL', b = ' "\ ,()'`)
	h.fence()
	h.expect(`SELECT doc, coalesce(old::text, '-') FROM _stream_s ORDER BY id`,
		`{"a": null, "b": "", "id": 1} -`,
		`{"a": "", "b": null, "id": 1} {"a": null, "b": "", "id": 1}`,
		`{"a": "NULL", "b": " \"\\ ,()", "id": 1} {"a": "", "b": null, "id": 1}`)
}

// B11: one key in many transactions of one batch.
func TestOneKeyManyTimesInABatch(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT, `INSERT INTO t VALUES (1, 0, NULL)`)
	h.stream("s", "t", "true")
	h.manage("t")
	h.fence()
	h.stopApplier()
	for i := 1; i <= 50; i++ {
		h.exec(fmt.Sprintf(`UPDATE t SET v = %d WHERE id = 1`, i))
	}
	h.startApplier()
	h.fence()
	h.expect(`SELECT count(*), min((doc ->> 'v')::int), max((doc ->> 'v')::int) FROM _stream_s`, "50 1 50")
	h.expect(`SELECT bool_and(ordered) FROM (SELECT (doc ->> 'v')::int = row_number() OVER (ORDER BY id) AS ordered FROM _stream_s) x`, "t")
	h.expect(`SELECT op, row_image ->> 'v' FROM koldstore.t__cl`, "2 50")
	// The seq of the mirror's row is that of the last event.
	h.expect(`SELECT left(max(s.id), 28) = left(koldstore.event_id(max(m.seq), '0/0'), 28) FROM _stream_s s, koldstore.t__cl m`, "t")
}

// B15, B16, B19: who matched before is judged by the whole old row; NULL is no match.
func TestPredicateHasThreeValues(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(tableT, `INSERT INTO t VALUES (9, 6, NULL)`)
	h.stream("s", "t", "v > 5 OR big = 'a'")
	h.stream("neg", "t", "NOT (v > 5)")
	h.exec(
		`INSERT INTO t VALUES (1, NULL, 'a'), (2, NULL, 'b'), (3, 6, NULL)`,
		`UPDATE t SET v = NULL WHERE id = 3`,
		`DELETE FROM t WHERE id IN (2, 3)`,
		`UPDATE t SET v = 1 WHERE id = 9`,
		`DELETE FROM t WHERE id = 1`,
	)
	h.fence()
	h.events("s", "put 1", "put 3", "exit 3", "exit 9", "delete 1")
	h.events("neg", "put 9")
}

// B25: TRUNCATE is a delete or a tombstone for each live key, in front of what the same transaction inserts.
func TestTruncate(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE p (id int PRIMARY KEY, v int)`, `CREATE TABLE child (id int PRIMARY KEY REFERENCES p)`)
	h.stream("s", "p", "v = 1", "pre_image", "true")
	h.manage("p")
	h.exec(
		`INSERT INTO p VALUES (10, 1), (2, 1), (3, 2), (4, 1), (5, 1)`,
		`DELETE FROM p WHERE id = 4`,
		`UPDATE p SET v = 2 WHERE id = 5`,
		`BEGIN; INSERT INTO p VALUES (6, 1); TRUNCATE p CASCADE; INSERT INTO p VALUES (2, 1); COMMIT`,
	)
	h.fence()
	h.expect(`SELECT op, k, doc, coalesce(old::text, '-') FROM _stream_s ORDER BY id OFFSET 6`,
		`put 6 {"v": 1, "id": 6} -`,
		`delete 2 {"v": 1, "id": 2} {"v": 1, "id": 2}`,
		`delete 6 {"v": 1, "id": 6} {"v": 1, "id": 6}`,
		`delete 10 {"v": 1, "id": 10} {"v": 1, "id": 10}`,
		`put 2 {"v": 1, "id": 2} -`)
	h.expect(`SELECT id, op, row_image FROM koldstore.p__cl ORDER BY seq`,
		"4 3 NULL", "3 3 NULL", "5 3 NULL", "6 3 NULL", "10 3 NULL", `2 1 {"v": 1, "id": 2}`)
	h.expect(`SELECT count(*) = max(u.events) FROM _stream_s, koldstore.stream_status u`, "t")
}

// B31: a writer that is in the middle of a transaction when the stream is created is waited for.
func TestWriterInFlightAtCreation(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ctx := t.Context()
	h.exec(`CREATE TABLE u (id int PRIMARY KEY)`)
	other, err := pgx.ConnectConfig(ctx, h.app.Config())
	must(t, err)
	defer other.Close(ctx)
	_, err = other.Exec(ctx, `BEGIN`)
	must(t, err)
	_, err = other.Exec(ctx, `INSERT INTO u VALUES (1)`)
	must(t, err)
	created := make(chan error, 1)
	go func() {
		_, err := h.app.Exec(ctx, `CALL koldstore.create_stream(NULL, 's', NULL, 'u', 'true', false, '{"start": "earliest"}')`)
		created <- err
	}()
	h.eventually("CREATE STREAM waits for the writer", func() bool {
		return h.rows(`SELECT count(*) FROM pg_locks WHERE relation = 'u'::regclass AND NOT granted`)[0] == "1"
	})
	_, err = other.Exec(ctx, `INSERT INTO u VALUES (2)`)
	must(t, err)
	_, err = other.Exec(ctx, `COMMIT`)
	must(t, err)
	must(t, <-created)
	_, err = other.Exec(ctx, `INSERT INTO u VALUES (3)`)
	must(t, err)
	h.fence()
	h.events("s", "put 1", "put 2", "put 3")
}

// A stream begins at its place inside the transaction that creates it, and what that transaction writes afterwards is in it.
func TestStreamBeginsWhereItIsCreated(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE u (id int PRIMARY KEY)`)
	h.manage("u")
	h.exec(`BEGIN`, `INSERT INTO u VALUES (1)`)
	h.stream("s", "u", "true")
	h.exec(`INSERT INTO u VALUES (2)`, `COMMIT`, `INSERT INTO u VALUES (3)`)
	h.exec(`BEGIN`)
	h.stream("gone", "u", "true")
	h.exec(`INSERT INTO u VALUES (4)`, `ROLLBACK`)
	h.fence()
	h.events("s", "put 2", "put 3")
	h.expect(`SELECT id FROM koldstore.u__cl ORDER BY seq`, "1", "2", "3")
}

// Streams and mirrors that are dropped and made again while the applier is behind begin at their second creation.
func TestDroppedAndCreatedAgainWhileBehind(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE u (id int PRIMARY KEY)`)
	h.stream("s", "u", "true")
	h.manage("u")
	h.exec(`INSERT INTO u VALUES (1)`)
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO u VALUES (2)`, `CALL koldstore.drop_stream(NULL, 's')`, `SELECT koldstore.unmanage_table('u')`, `INSERT INTO u VALUES (3)`)
	h.stream("s", "u", "true")
	h.manage("u")
	h.exec(`INSERT INTO u VALUES (4)`, `DELETE FROM u WHERE id = 2`)
	h.startApplier()
	h.fence()
	h.events("s", "put 4", "delete 2")
	h.expect(`SELECT id, op FROM koldstore.u__cl ORDER BY id`, "1 1", "2 3", "3 1", "4 1")
	h.expect(`SELECT state FROM koldstore.stream UNION ALL SELECT state FROM koldstore.managed_table`, "active", "active")
}
