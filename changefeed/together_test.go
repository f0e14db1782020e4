package changefeed_test

import (
	"fmt"
	"testing"
)

// TestPredicatesAreJudgedTogether has predicates in one query that know the same column by different names, different columns by the
// same name, the table by two names, that call code of users, and that are more than fit into one word.
func TestPredicatesAreJudgedTogether(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE r (id int PRIMARY KEY, a int, b int)`,
		`CREATE FUNCTION positive(int) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$ SELECT $1 > 0 $$`)
	h.stream("first", "r", "a > 0")
	h.exec(`ALTER TABLE r RENAME a TO c`, `ALTER TABLE r RENAME b TO a`)
	h.stream("second", "r", "a > 0")
	h.stream("called", "r", "positive(c)")
	h.exec(`ALTER TABLE r RENAME TO "x FROM (SELECT"`)
	h.stream("both", "x FROM (SELECT", "a > 0 AND c > 0")
	h.stream("always", "x FROM (SELECT", "true")
	for i := range 62 {
		h.stream(fmt.Sprintf("n%d", i), "x FROM (SELECT", fmt.Sprintf("id = %d", i))
	}
	h.fence()
	h.exec(`INSERT INTO "x FROM (SELECT" VALUES (1, 1, -1), (2, -1, 1), (61, 1, 1)`,
		`UPDATE "x FROM (SELECT" SET a = -1 WHERE id = 61`,
		`UPDATE "x FROM (SELECT" SET c = NULL`)
	h.fence()
	h.events("first", "put 1", "put 61", "put 61", "exit 1", "exit 61")
	h.events("second", "put 2", "put 61", "exit 61", "put 2")
	h.events("called", "put 1", "put 61", "put 61", "exit 1", "exit 61")
	h.events("both", "put 61", "exit 61")
	h.events("always", "put 1", "put 2", "put 61", "put 61", "put 1", "put 2", "put 61")
	h.events("n1", "put 1", "put 1")
	h.events("n3")
	h.events("n61", "put 61", "put 61", "put 61")
}

// Whatever raises for some rows, for all of them, or has none of its rows shown, costs nobody else an event.
func TestOneBadPredicateAmongMany(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int, j json)`)
	h.stopApplier() // one batch
	predicates := []string{"1 / (v - 7) <> 5", "v / 0 = 1", "true", "sqrt(v - 30) >= 0", "j IS NULL"}
	for i := range 5 {
		predicates = append(predicates, fmt.Sprintf("v %% 5 = %d", i))
	}
	for i, predicate := range predicates {
		h.stream(fmt.Sprintf("s%d", i), "t", predicate)
	}
	h.exec(`INSERT INTO t SELECT i, i % 60, CASE WHEN i % 20 = 0 THEN '"\u0000"'::json END FROM generate_series(1, 60) i`)
	h.startApplier()
	h.fence()
	for i, predicate := range predicates {
		if judged := map[int]string{0: "v <> 7", 1: "false", 3: "v >= 30"}[i]; judged != "" { // the rows for which it does not raise
			predicate = judged
		}
		h.events(fmt.Sprintf("s%d", i), h.rows(`SELECT 'put ' || id FROM t WHERE j IS NULL AND (`+predicate+`) ORDER BY id`)...)
	}
	h.expect(`SELECT s.name, s.state, u.events_lost FROM koldstore.stream s JOIN koldstore.stream_status u USING (stream_id) WHERE s.name IN ('s0', 's1', 's2', 's3', 's4') ORDER BY 1`,
		"s0 active 4", "s1 active 60", "s2 active 3", "s3 active 31", "s4 active 0")
}
