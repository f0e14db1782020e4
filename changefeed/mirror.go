package changefeed

import (
	"fmt"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// mirrorSQL is the statement that brings a mirror up to date. Its parameters are arrays that run in parallel: one of text for
// each key column, then seqs, ops and rows (literals, NULL for a delete). It may meet several events for one key; the last
// one wins. Equal is what PostgreSQL calls equal: 1.0 and 1.00 are one numeric key, and a key column may have its own
// collation.
func mirrorSQL(tab *table) string {
	n := len(tab.key)
	keys := strings.Join(tab.mirror.keys, ", ")
	k := func(i int) string { return fmt.Sprintf("k%d", i+1) }
	return fmt.Sprintf(`INSERT INTO %s (%s, seq, op, row_image)
SELECT DISTINCT ON (%s) %s, c.seq, c.op, pg_catalog.to_jsonb(c.lit::%s)
FROM (SELECT %s, u.seq, u.op, u.lit
      FROM unnest(%s, $%d::bigint[], $%d::smallint[], $%d::text[]) AS u(%s, seq, op, lit)) c
ORDER BY %s, c.seq DESC
ON CONFLICT (%s) DO UPDATE SET seq = EXCLUDED.seq, op = EXCLUDED.op, row_image = EXCLUDED.row_image`,
		tab.mirror.name, keys,
		list(n, func(i int) string { return "c." + k(i) }), list(n, func(i int) string { return "c." + k(i) }), tab.name,
		list(n, func(i int) string {
			return "(u." + k(i) + "::" + tab.keyType(i) + ")" + tab.keyCollation(i) + " AS " + k(i)
		}),
		list(n, func(i int) string { return fmt.Sprintf("$%d::text[]", i+1) }), n+1, n+2, n+3,
		list(n, k),
		list(n, func(i int) string { return "c." + k(i) }),
		keys)
}

func (t *table) keyType(i int) string { return t.column(t.key[i]).typeName }

func (t *table) keyCollation(i int) string {
	if c := t.column(t.key[i]).collation; c != "" {
		return " COLLATE " + c
	}
	return ""
}

// mirrorArgs are the parameters of mirrorSQL for some events.
func mirrorArgs(tab *table, events []*event) []any {
	keys := make([][]string, len(tab.key))
	for i := range keys {
		keys[i] = make([]string, len(events))
	}
	seqs, ops, rows := make([]int64, len(events)), make([]int16, len(events)), make([]*string, len(events))
	for i, e := range events {
		for j := range keys {
			keys[j][i] = e.key[j]
		}
		seqs[i], ops[i] = int64(e.seq), int16(e.op)
		if e.op != koldproxy.OpDelete {
			rows[i] = e.newLiteral()
		}
	}
	args := make([]any, 0, len(keys)+3)
	for _, k := range keys {
		args = append(args, k)
	}
	return append(args, seqs, ops, rows)
}

// lastOfEachKey leaves out events that a later one of the same key makes invisible.
func lastOfEachKey(events []*event) []*event {
	last := make(map[string]int, len(events))
	for i, e := range events {
		last[e.keyText] = i
	}
	if len(last) == len(events) {
		return events
	}
	out := make([]*event, 0, len(last))
	for i, e := range events {
		if last[e.keyText] == i {
			out = append(out, e)
		}
	}
	return out
}
