package changefeed

import (
	"slices"

	"github.com/koldproxy/koldproxy"
)

// matchColumns says, for each column that a table has today, where its value is in the rows of a relation that the log
// announced, or -1. xid is the transaction of the first such row. The relation may be older than the table. What is known:
//
//   - The log lists columns in the order of their numbers, without the numbers, and without those that had been dropped.
//   - Numbers only grow, and a dropped column keeps its row in pg_attribute. So the relation's columns are the first of the
//     table's columns in order, less those that had been dropped by then; what is left over at the end was added since.
//
// Which columns had been dropped is the only question. The ids of the transactions that dropped them are strong evidence and
// no proof (a transaction may get its id long before it locks the table), so the names and types of all columns count as well:
// one name may be a coincidence, as of a column that was dropped and added anew, several are not.
func matchColumns(rel *koldproxy.Relation, tab *table, xid uint32) []int {
	if sameColumns(rel, tab) {
		return identity(len(tab.columns))
	}
	origin := alignColumns(rel, tab, xid)
	if origin == nil {
		origin = namedColumns(rel, tab) // the relation has more columns than there can have been; something else is going on
	}
	out := make([]int, len(tab.columns))
	for i, a := range tab.columns {
		out[i] = origin[a]
	}
	return out
}

// What one pair of a relation's column and a table's is worth; more is more likely.
const (
	sameName     = 3
	fitsDropping = 5
	sameType     = 1
	impossible   = -1 << 30
)

// alignColumns returns, for each attribute, the position in the relation or -1; nil if there is no way. best[i][j] is the worth
// of the best way to place columns i… on attributes j…
func alignColumns(rel *koldproxy.Relation, tab *table, xid uint32) []int {
	n, m := len(rel.Columns), len(tab.attributes)
	best := make([][]int, n+1)
	for i := range best {
		best[i] = make([]int, m+1)
	}
	for i := n - 1; i >= 0; i-- {
		best[i][m] = impossible
		for j := m - 1; j >= 0; j-- {
			best[i][j] = max(best[i+1][j+1]+placed(&rel.Columns[i], &tab.attributes[j], xid), best[i][j+1]+skipped(&tab.attributes[j], xid))
		}
	}
	if best[0][0] < 0 {
		return nil
	}
	origin := make([]int, m)
	i := 0
	for j := range m {
		origin[j] = -1
		if i < n && best[i][j] == best[i+1][j+1]+placed(&rel.Columns[i], &tab.attributes[j], xid) {
			origin[j] = i
			i++
		}
	}
	return origin
}

func placed(c *koldproxy.Column, a *attribute, xid uint32) (worth int) {
	switch {
	case a.generated:
		return impossible // those are not in the log
	case a.dropped:
		if !precedes(a.xmin, xid) {
			return fitsDropping
		}
		return 0
	}
	if a.name == c.Name {
		worth += sameName
	}
	if a.typeOID == c.TypeOID {
		worth += sameType
	}
	return worth
}

// skipped is what it is worth to say that an attribute was not there, while one with a higher number was.
func skipped(a *attribute, xid uint32) int {
	switch {
	case a.generated:
		return 0
	case !a.dropped:
		return impossible
	case precedes(a.xmin, xid):
		return fitsDropping
	}
	return 0
}

// precedes compares transaction ids, which wrap around.
func precedes(a, b uint32) bool { return int32(a-b) < 0 }

// namedColumns goes by names alone.
func namedColumns(rel *koldproxy.Relation, tab *table) []int {
	origin := make([]int, len(tab.attributes))
	for j := range origin {
		origin[j] = slices.IndexFunc(rel.Columns, func(c koldproxy.Column) bool {
			return !tab.attributes[j].dropped && c.Name == tab.attributes[j].name
		})
	}
	return origin
}

// sameColumns says whether a relation has the columns of a table as it is now.
func sameColumns(rel *koldproxy.Relation, tab *table) bool {
	if len(rel.Columns) != len(tab.columns) {
		return false
	}
	for i := range rel.Columns {
		if a := tab.column(i); a.name != rel.Columns[i].Name || a.typeOID != rel.Columns[i].TypeOID {
			return false
		}
	}
	return true
}

func identity(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// values brings a row of a relation into the order of today's columns. A column that did not exist then has the value that
// PostgreSQL itself shows for rows of that time: its default when it was added, or NULL.
func (t *table) values(row []koldproxy.Datum, origin []int) []koldproxy.Datum {
	if row == nil {
		return nil
	}
	out := make([]koldproxy.Datum, len(origin))
	for i, from := range origin {
		if from >= 0 {
			out[i] = row[from]
		} else if missing := t.column(i).missing; missing != nil {
			out[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: *missing}
		}
	}
	return out
}
