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
