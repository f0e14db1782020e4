package changefeed

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// mirrorStatements are the statements that bring a mirror up to date, with parameters from mirrorArgs.
type mirrorStatements struct {
	// any takes any events; at most one for each key if keys are plain.
	any string
	// The others are for plain keys, and empty for others. standing is for keys that the mirror has, and leaves out those that it does
	// not have; missing is any for those that standing has left out. copy is COPY of a copyStream for keys that it does not have; it
	// fails if it has one.
	standing, missing, copy string
}

func newMirrorStatements(tab *table) mirrorStatements {
	m := tab.mirror
	if !m.plainKey() {
		return mirrorStatements{any: anyMirrorSQL(tab)}
	}
	keys := strings.Join(m.keys, ", ")
	same := strings.ReplaceAll(list(len(m.keys), func(i int) string { return "m." + m.keys[i] + " OPERATOR(pg_catalog.=) d." + m.keys[i] }), ", ", " AND ")
	insert := fmt.Sprintf(`WITH d AS MATERIALIZED (%[1]s)
INSERT INTO %[2]s (%[3]s, seq, op, row_image) SELECT %[3]s, seq, op, row_image FROM d%%s
ON CONFLICT (%[3]s) DO UPDATE SET seq = EXCLUDED.seq, op = EXCLUDED.op, row_image = EXCLUDED.row_image`, m.plainRows(), m.name, keys)
	return mirrorStatements{
		any: fmt.Sprintf(insert, ""),
		// An INSERT that finds its key locks the row first, which is one more record in the log.
		standing: fmt.Sprintf(`UPDATE %s m SET seq = d.seq, op = d.op, row_image = d.row_image FROM (%s) d WHERE %s`, m.name, m.plainRows(), same),
		missing:  fmt.Sprintf(insert, fmt.Sprintf(" WHERE NOT EXISTS (SELECT FROM %s m WHERE %s AND m.seq OPERATOR(pg_catalog.=) d.seq)", m.name, same)),
		copy:     fmt.Sprintf(`COPY %s (%s, seq, op, row_image) FROM STDIN (FORMAT binary)`, m.name, keys),
	}
}

// plainKeys are types of PostgreSQL's own whose values are equal exactly if their texts are; textKeys are, too, if the collation
// compares bytes.
var (
	plainKeys = []uint32{
		pgtype.BoolOID, pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID, pgtype.OIDOID, pgtype.UUIDOID, pgtype.ByteaOID,
		pgtype.DateOID, pgtype.TimestampOID, pgtype.TimestamptzOID,
	}
	textKeys = []uint32{pgtype.TextOID, pgtype.VarcharOID}
	// The database's own, "C" and "POSIX": no others are known to be deterministic.
	byteCollations = []uint32{100, 950, 951}
)

// plainKey says that two keys are equal exactly if their texts are. Then the last event of each key is found without the
// server's help.
func (m *mirror) plainKey() bool {
	for i := range m.key {
		k := &m.key[i]
		if !slices.Contains(plainKeys, k.typeOID) && (!slices.Contains(textKeys, k.typeOID) || !slices.Contains(byteCollations, k.collation)) {
			return false
		}
	}
	return true
}

// plainRows is a query for the parameters as rows, in their order. Texts become keys by the input functions of PostgreSQL's own types.
// Arrays are taken apart in the list of what is selected, since a function in FROM would keep all of its rows first.
func (m *mirror) plainRows() string {
	n := len(m.keys)
	return fmt.Sprintf(`
  SELECT %[1]s, u.seq, u.op, u.image::pg_catalog.jsonb AS row_image
  FROM (SELECT %[2]s, unnest($%[3]d::bigint[]) AS seq, unnest($%[4]d::smallint[]) AS op, unnest($%[5]d::text[]) AS image OFFSET 0) u
  OFFSET 0`,
		list(n, func(i int) string { return fmt.Sprintf("u.k%d::%s AS %s", i+1, m.key[i].typeName, m.keys[i]) }),
		list(n, func(i int) string { return fmt.Sprintf("unnest($%d::text[]) AS k%[1]d", i+1) }), n+1, n+2, n+3)
}

// anyMirrorSQL is for keys of any type. Its parameters are arrays that run in parallel: keys as
// literals of the mirror's row type (see literal), seqs, ops and images (JSON, NULL for a delete). It may meet several events
// for one key; the last one wins. Equal is what PostgreSQL calls equal: 1.0 and 1.00 are one numeric key, and a key column may
// have its own collation. The mirror spells a key as its last event does, and so as the image.
//
// A literal is read by the input functions of the columns' types and by nothing else: a cast from text to a type of
// its own is code of whoever made the type.
func anyMirrorSQL(tab *table) string {
	m := tab.mirror
	keys := strings.Join(m.keys, ", ")
	of := func(alias string) string { return list(len(m.keys), func(i int) string { return alias + m.keys[i] }) }
	return fmt.Sprintf(`INSERT INTO %[1]s (%[2]s, seq, op, row_image)
SELECT DISTINCT ON (%[3]s) %[3]s, d.seq, d.op, d.image
FROM (SELECT u.key::%[1]s AS row, u.seq, u.op, u.image::pg_catalog.jsonb AS image
      FROM unnest($1::text[], $2::bigint[], $3::smallint[], $4::text[]) AS u(key, seq, op, image)
      OFFSET 0) d
ORDER BY %[3]s, d.seq DESC
ON CONFLICT (%[2]s) DO UPDATE SET (%[2]s, seq, op, row_image) = ROW(%[4]s, EXCLUDED.seq, EXCLUDED.op, EXCLUDED.row_image)`,
		m.name, keys, of("(d.row)."), of("EXCLUDED."))
}

// literal is a primary key as a literal of the mirror's row type, without the mirror's other columns.
func (m *mirror) literal(values []string) string {
	row := make([]koldproxy.Datum, m.columns)
	for i, v := range values {
		row[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: v}
	}
	return rowLiteral(row)
}

// mirrorArgs are the parameters of mirrorStatements for some events.
func mirrorArgs(m *mirror, items []item) []any {
	var args []any
	if m.standing != "" {
		items = slices.Clone(items)
		slices.SortFunc(items, m.nearby)
		for k := range m.keys {
			args = append(args, column(items, func(it *item) string { return it.key[k] }))
		}
	} else {
		args = append(args, column(items, func(it *item) string { return m.literal(it.key) }))
	}
	return append(args,
		column(items, func(it *item) int64 { return int64(it.seq) }),
		column(items, func(it *item) int16 { return int16(it.op) }),
		column(items, m.image))
}

// image is what the mirror shows of an event: nothing of a delete.
func (m *mirror) image(it *item) *string {
	if it.doc != nil || it.op == koldproxy.OpDelete {
		return it.doc
	}
	image := m.painter.image(it.new)
	return &image
}

// nearby orders events so that neighbours in the index of plain keys are changed one after the other. That is about the order of the
// index: where it is another one, pages are looked for again.
func (m *mirror) nearby(a, b item) int {
	for i := range a.key {
		order := cmp.Compare(a.key[i], b.key[i])
		if slices.Contains(numberKeys, m.key[i].typeOID) {
			order = cmp.Or(cmp.Compare(len(a.key[i]), len(b.key[i])), order)
		}
		if order != 0 {
			return order
		}
	}
	return 0
}

// numberKeys are plain keys that are numbers.
var numberKeys = []uint32{pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID, pgtype.OIDOID}

// column is a field of each item, to be a parameter.
func column[T any](items []item, field func(it *item) T) []T {
	out := make([]T, len(items))
	for i := range items {
		out[i] = field(&items[i])
	}
	return out
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

// likelyStanding sorts events, the last of each key, by whether the mirror is likely to have their keys: not if the first event of a
// key was its insert.
func likelyStanding(items []item) (fresh, standing []item) {
	type span struct {
		last   int
		insert bool
	}
	spans := make(map[string]span, len(items))
	for i, it := range items {
		s, seen := spans[it.keyText]
		spans[it.keyText] = span{i, seen && s.insert || !seen && it.op == koldproxy.OpInsert}
	}
	for i, it := range items {
		switch s := spans[it.keyText]; {
		case s.last != i:
		case s.insert:
			fresh = append(fresh, it)
		default:
			standing = append(standing, it)
		}
	}
	return fresh, standing
}
