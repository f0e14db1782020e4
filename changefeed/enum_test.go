package changefeed_test

import (
	"testing"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// The write-ahead log shows the names that values of enums had then. Each row is judged and shown as what it is today, and the feed
// is compared with its table.
func TestRenamedEnumValues(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, columns, predicate string
		statements               []string
		events                   []string // op, key and document of those from key 10 on
		gaps                     string
	}{
		{"in one transaction", "id int PRIMARY KEY, e mood", "e <> 'c'", []string{
			`BEGIN; INSERT INTO t VALUES (10, 'b'), (11, 'c'); ALTER TYPE mood RENAME VALUE 'b' TO 'x'; INSERT INTO t VALUES (12, 'x'); COMMIT`,
		}, []string{`put 10 {"e": "x", "id": 10}`, `put 12 {"e": "x", "id": 12}`}, "0"},
		{"names swapped", "id int PRIMARY KEY, e mood", "e = 'b'", []string{
			`INSERT INTO t VALUES (10, 'b'), (11, 'c')`,
			`BEGIN; INSERT INTO t VALUES (12, 'b'); ALTER TYPE mood RENAME VALUE 'b' TO 'x'; ALTER TYPE mood RENAME VALUE 'c' TO 'b'; INSERT INTO t VALUES (13, 'b'), (14, 'x'); COMMIT`,
			`UPDATE t SET e = 'b' WHERE id = 10`,
		}, []string{`put 10 {"e": "x", "id": 10}`, `put 12 {"e": "x", "id": 12}`, `put 14 {"e": "x", "id": 14}`, `exit 10 {"e": "b", "id": 10}`}, "0"},
		{"in the key", "id int, e mood, PRIMARY KEY (id, e)", "id > 0", []string{
			`INSERT INTO t VALUES (10, 'b'), (11, 'a')`, `ALTER TYPE mood RENAME VALUE 'b' TO 'x'`, `DELETE FROM t WHERE id = 10`,
		}, []string{`put {"e": "x", "id": 10} {"e": "x", "id": 10}`, `put {"e": "a", "id": 11} {"e": "a", "id": 11}`, `delete {"e": "x", "id": 10} {"e": "x", "id": 10}`}, "0"},
		{"of a domain", "id int PRIMARY KEY, e likes", "e::mood = 'b'", []string{
			`INSERT INTO t VALUES (10, 'b'), (11, 'a')`, `ALTER TYPE mood RENAME VALUE 'b' TO 'x'`, `DELETE FROM t WHERE id = 10`,
		}, []string{`put 10 {"e": "x", "id": 10}`, `delete 10 {"e": "x", "id": 10}`}, "0"},
		{"a value is added", "id int PRIMARY KEY, e mood", "e <> 'c'", []string{
			`INSERT INTO t VALUES (10, 'b')`, `ALTER TYPE mood ADD VALUE 'd' BEFORE 'a'`, `INSERT INTO t VALUES (11, 'd')`,
		}, []string{`put 10 {"e": "b", "id": 10}`, `put 11 {"e": "d", "id": 11}`}, "0"},
		{"part of an array", "id int PRIMARY KEY, e mood[]", "id > 0", []string{
			`ALTER TYPE mood RENAME VALUE 'b' TO 'x'`, `INSERT INTO t VALUES (10, '{x,a}')`,
		}, []string{`put 10 {"e": ["x", "a"], "id": 10}`}, "1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.exec(`CREATE TYPE mood AS ENUM ('a', 'b', 'c')`, `CREATE DOMAIN likes AS mood`, `CREATE TABLE t (`+c.columns+`)`)
			h.stream("s", "t", c.predicate)
			h.manage("t")
			h.fence()
			h.stopApplier()
			h.exec(c.statements...)
			h.startApplier()
			h.fence()
			h.expect(`SELECT op, k, doc FROM _stream_s ORDER BY id`, c.events...)
			h.expect(`SELECT gaps, state, events_lost FROM koldstore.stream JOIN koldstore.stream_status USING (stream_id)`, c.gaps+" active 0")
			key := "jsonb_build_object('id', t.id)"
			if c.name == "in the key" {
				key = "jsonb_build_object('id', t.id, 'e', t.e)"
			}
			must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", key, 7, nil))
		})
	}
}

// A row that was written before a rename may come behind it.
func TestRenamedEnumValueOfAnOpenTransaction(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TYPE mood AS ENUM ('a', 'b')`, `CREATE TABLE t (id int PRIMARY KEY, e mood)`)
	h.stream("s", "t", "e = 'b'")
	h.manage("t")
	tx, err := h.pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO t VALUES (1, 'b')`)
	must(t, err)
	h.exec(`ALTER TYPE mood RENAME VALUE 'b' TO 'x'`, `INSERT INTO t VALUES (2, 'x')`)
	must(t, tx.Commit(t.Context()))
	h.fence()
	h.expect(`SELECT op, k, doc FROM _stream_s ORDER BY id`, `put 2 {"e": "x", "id": 2}`, `put 1 {"e": "x", "id": 1}`)
	must(t, feedtest.CheckFeed(t.Context(), h.pool, "t", "jsonb_build_object('id', t.id)", 7, nil))
}
