package changefeed

import (
	"fmt"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// mirrorSQL is the statement that brings a mirror up to date. Its parameters are arrays that run in parallel: keys as
// literals of the mirror's row type (see literal), seqs, ops and images (JSON, NULL for a delete). It may meet several events
// for one key; the last one wins. Equal is what PostgreSQL calls equal: 1.0 and 1.00 are one numeric key, and a key column may
// have its own collation.
//
// A literal is read by the input functions of the columns' types and by nothing else: a cast from text to a type of
// its own is code of whoever made the type.
func mirrorSQL(tab *table) string {
	m := tab.mirror
	keys := strings.Join(m.keys, ", ")
	of := func(alias string) string { return list(len(m.keys), func(i int) string { return alias + m.keys[i] }) }
	return fmt.Sprintf(`INSERT INTO %[1]s (%[2]s, seq, op, row_image)
SELECT DISTINCT ON (%[3]s) %[3]s, d.seq, d.op, d.image
FROM (SELECT u.key::%[1]s AS row, u.seq, u.op, u.image::pg_catalog.jsonb AS image
      FROM unnest($1::text[], $2::bigint[], $3::smallint[], $4::text[]) AS u(key, seq, op, image)
      OFFSET 0) d
ORDER BY %[3]s, d.seq DESC
ON CONFLICT (%[2]s) DO UPDATE SET seq = EXCLUDED.seq, op = EXCLUDED.op, row_image = EXCLUDED.row_image`,
		m.name, keys, of("(d.row)."))
}

// literal is a primary key as a literal of the mirror's row type, without the mirror's other columns.
func (m *mirror) literal(values []string) string {
	row := make([]koldproxy.Datum, m.columns)
	for i, v := range values {
		row[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: v}
	}
	return rowLiteral(row)
}

// mirrorArgs are the parameters of mirrorSQL for some events.
func mirrorArgs(m *mirror, items []item) []any {
	n := len(items)
	keys, seqs, ops, images := make([]string, n), make([]int64, n), make([]int16, n), make([]*string, n)
	for i, it := range items {
		keys[i], seqs[i], ops[i], images[i] = m.literal(it.key), int64(it.seq), int16(it.op), it.doc
	}
	return []any{keys, seqs, ops, images}
}

// lastOfEachKey leaves out events that a later one of the same key makes invisible.
func lastOfEachKey(items []item) []item {
	last := make(map[string]int, len(items))
	for i, it := range items {
		last[it.keyText] = i
	}
	if len(last) == len(items) {
		return items
	}
	out := make([]item, 0, len(last))
	for i, it := range items {
		if last[it.keyText] == i {
			out = append(out, it)
		}
	}
	return out
}
