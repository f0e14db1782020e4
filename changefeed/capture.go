package changefeed

import (
	"fmt"
	"time"

	"github.com/koldproxy/koldproxy"
)

// streamSQL is the statement that appends to a stream's log what the predicate makes of some events, and counts it. Its
// parameters are arrays that run in parallel: ids, ops, commit times, old rows and new rows (literals, NULL where there is
// none). It returns the number of events it wrote.
//
//	insert   new row matches                                    put
//	update   new row matches                                    put
//	         new row does not, old row does                     exit
//	delete   old row matches                                    delete
//
// A predicate that is NULL does not match. OFFSET 0 keeps PostgreSQL from casting a row once for each use.
func streamSQL(tab *table, s *stream) string {
	old, oldValue := "", ""
	if s.preImage {
		old, oldValue = ", old", ", pg_catalog.to_jsonb(d.o)"
	}
	return fmt.Sprintf(`WITH written AS (
  INSERT INTO %[1]s (id, op, k, ts, doc%[2]s)
  SELECT d.id, d.verdict, %[3]s, d.ts, pg_catalog.to_jsonb(d.r)%[4]s
  FROM (SELECT c.id, c.ts, c.o, CASE WHEN c.op = 3 THEN c.o ELSE c.n END AS r,
               CASE WHEN c.op <> 3 AND %[5]s(c.n) THEN 'put'
                    WHEN c.op = 2 AND c.has_old AND %[5]s(c.o) THEN 'exit'
                    WHEN c.op = 3 AND %[5]s(c.o) THEN 'delete' END AS verdict
        FROM (SELECT u.id, u.op, u.ts, u.old IS NOT NULL AS has_old, u.old::%[6]s AS o, u.new::%[6]s AS n
              FROM unnest($1::text[], $2::smallint[], $3::timestamptz[], $4::text[], $5::text[]) AS u(id, op, ts, old, new)
              OFFSET 0) c
        OFFSET 0) d
  WHERE d.verdict IS NOT NULL
  RETURNING 1),
total AS (SELECT count(*) AS n FROM written),
counted AS (UPDATE koldstore.stream_status t SET events = t.events + total.n FROM total WHERE t.stream_id = %[7]d AND total.n > 0)
SELECT n FROM total`,
		s.log, old, keyJSON(tab, "(d.r)"), oldValue, s.predicate, tab.name, s.id)
}

// keyJSON is the expression for the column k of a log: the key's value, or an object for several columns.
func keyJSON(tab *table, row string) string {
	value := func(i int) string { return row + "." + ident(tab.column(tab.key[i]).name) }
	if len(tab.key) == 1 {
		return "pg_catalog.to_jsonb(" + value(0) + ")"
	}
	return "pg_catalog.jsonb_build_object(" + list(len(tab.key), func(i int) string {
		return quoteLiteral(tab.column(tab.key[i]).name) + ", " + value(i)
	}) + ")"
}

// streamArgs are the parameters of streamSQL for some events.
func streamArgs(events []*event) []any {
	n := len(events)
	ids, ops, times := make([]string, n), make([]int16, n), make([]time.Time, n)
	old, now := make([]*string, n), make([]*string, n)
	for i, e := range events {
		ids[i], ops[i], times[i] = koldproxy.EventID(e.seq, e.lsn), int16(e.op), e.at
		old[i], now[i] = e.oldLiteral(), e.newLiteral()
	}
	return []any{ids, ops, times, old, now}
}
