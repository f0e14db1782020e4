package changefeed

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// item is an event as it is to be written to one place.
type item struct {
	*event
	verdict  string  // put, exit or delete; empty for a mirror
	doc      *string // the row as JSON; nil for a tombstone, and in a mirror for what is still to be painted
	oldImage *string // the row before, where the stream has it
}

// judgedBy says what an event is to a stream of its table.
//
//	insert   new row matches                                    put
//	update   new row matches                                    put
//	         new row does not, old row does                     exit
//	delete   old row matches                                    delete
//
// A predicate that is NULL does not match. lost is why the event cannot be written. noted is what is wrong with the old row of a change
// that is written all the same: an update without its old image, and as an exit if nobody can say whether the row had matched; a
// delete with the key alone if the row cannot be shown. An exit or a delete too many is harmless to a copy; one that is missing
// leaves a row in it for ever.
func (e *event) judgedBy(i int, tab *table, s *stream) (it item, write bool, lost, noted *pgconn.PgError) {
	if e.op == koldproxy.OpDelete {
		return e.deletionJudgedBy(i, tab, s)
	}
	row, before := e.newJudged, e.oldJudged
	switch {
	case row.failed == nil && row.failure[i] != nil:
		return it, false, row.failure[i], nil
	case row.failed != nil && (row.failure[i] != nil || row.matches[i]):
		return it, false, row.failed, nil
	}
	it = item{event: e, doc: row.image}
	if before != nil && s.preImage {
		it.oldImage = before.image
	}
	switch {
	case row.matches[i]:
		it.verdict, write = "put", true
		if before != nil && s.preImage {
			noted = before.failed
		}
	case before == nil:
	case before.failure[i] != nil:
		it.verdict, write, noted = "exit", true, before.failure[i]
	case before.matches[i]:
		it.verdict, write, noted = "exit", true, before.failed
	}
	if write && row.failed != nil {
		return it, false, row.failed, nil
	}
	return it, write, nil, noted
}

// plainlyNothing returns a quick answer to whether the event is nothing to a stream: with many streams it is to most. If it says false,
// judgedBy is to be asked.
func (e *event) plainlyNothing() func(i int) bool {
	clean := func(row *judged) bool { return row.failed == nil && len(row.failure) == 0 }
	row, before := e.newJudged, e.oldJudged
	if e.op == koldproxy.OpDelete {
		row, before = before, nil
	}
	switch {
	case e.problem != "" || !clean(row) || before != nil && !clean(before):
		return func(int) bool { return false }
	case before == nil:
		return func(i int) bool { return !row.matches[i] }
	default:
		return func(i int) bool { return !row.matches[i] && !before.matches[i] }
	}
}

// deletionJudgedBy is judgedBy for a delete.
func (e *event) deletionJudgedBy(i int, tab *table, s *stream) (it item, write bool, lost, noted *pgconn.PgError) {
	row := e.oldJudged
	failure := row.failure[i]
	switch {
	case row.failed != nil && (failure != nil || row.matches[i]):
		failure = row.failed
	case failure == nil && !row.matches[i]:
		return it, false, nil, nil
	}
	it = item{event: e, doc: row.image, verdict: "delete"}
	if s.preImage {
		it.oldImage = row.image
	}
	if it.doc == nil {
		it.doc = tab.keyImage(e.key)
	}
	if it.doc == nil {
		return it, false, failure, nil
	}
	return it, true, nil, failure
}

// streamSQL is the statement that appends events to a stream's log. Its parameters are arrays that run in parallel: ids, verdicts,
// commit times, documents and, if the stream has them, old images.
func streamSQL(tab *table, s *stream) string {
	old, oldValue, oldText := "", "", ""
	if s.preImage {
		old, oldValue, oldText = ", old", ", u.old::pg_catalog.jsonb AS old", ", unnest($5::text[]) AS old"
	}
	// As in plainRows, a function in FROM would keep all of its rows first.
	return fmt.Sprintf(`INSERT INTO %[1]s (id, op, k, ts, doc%[2]s)
  SELECT d.id, d.op, %[3]s, d.ts, d.doc%[2]s
  FROM (SELECT u.id, u.op, u.ts, u.doc::pg_catalog.jsonb AS doc%[4]s
        FROM (SELECT unnest($1::text[]) AS id, unnest($2::text[]) AS op, unnest($3::timestamptz[]) AS ts, unnest($4::text[]) AS doc%[5]s OFFSET 0) u
        OFFSET 0) d`,
		s.log, old, keyJSON(tab, "d.doc"), oldValue, oldText)
}

// countSQL adds to the counters of streams, all of them in one statement. It comes after everything else in a batch: whoever stores
// other things about a stream waits for its row until the transaction ends.
const countSQL = `UPDATE koldstore.stream_status t SET events = t.events + u.n
	FROM unnest($1::bigint[], $2::bigint[]) AS u(stream_id, n) WHERE t.stream_id = u.stream_id`

// keyJSON is the expression for the column k of a log: the key's value, or an object for several columns.
func keyJSON(tab *table, image string) string {
	value := func(i int) string { return image + " -> " + quoteLiteral(tab.column(tab.key[i]).name) }
	if len(tab.key) == 1 {
		return "(" + value(0) + ")"
	}
	return "pg_catalog.jsonb_build_object(" + list(len(tab.key), func(i int) string {
		return quoteLiteral(tab.column(tab.key[i]).name) + ", " + value(i)
	}) + ")"
}

// streamArgs are the parameters of streamSQL for some events.
func streamArgs(s *stream, items []item) []any {
	args := []any{
		column(items, func(it *item) string { return koldproxy.EventID(it.seq, it.lsn) }),
		column(items, func(it *item) string { return it.verdict }),
		column(items, func(it *item) time.Time { return it.at }),
		column(items, func(it *item) *string { return it.doc }),
	}
	if s.preImage {
		args = append(args, column(items, func(it *item) *string { return it.oldImage }))
	}
	return args
}
