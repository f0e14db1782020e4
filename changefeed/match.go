package changefeed

import (
	"slices"

	"github.com/koldproxy/koldproxy"
)

// placeColumns says which columns of its table the columns of a relation are, by their numbers. xid is the transaction of the
// first row that has them. It says false if that cannot be told for certain: a value under another column's name is worse than
// a stream that stops and says so.
//
// The log lists the columns that existed when a row was written in the order of their numbers, without the numbers. The
// shape in force (see [shape]) has both, if every ALTER TABLE puts one into the log.
func placeColumns(rel *koldproxy.Relation, tab *table, xid uint32, announced bool) ([]int, bool) {
	if announced && tab.inForce.agrees(rel) {
		return tab.inForce.numbers(), true
	}
	numbers := inferColumns(rel, tab, xid)
	return numbers, numbers != nil
}

// inferColumns tells which columns a relation has from what a table had before and has now. Columns may have come, gone and
// been renamed in between. Numbers only grow, and a dropped column keeps its row in pg_attribute. Hence
//
//	the least that a relation can have      what the shape in force had and the table still has
//	the most                                what the shape had and whatever was added since
//	if nothing of the most was dropped      the first of it, as many as the relation has
//
// In between, a relation that looks as the table does is taken for what it looks like if the transactions that dropped
// columns are older than xid. It returns nil if nothing fits.
func inferColumns(rel *koldproxy.Relation, tab *table, xid uint32) []int {
	var least, most, today []int
	last, dropped, young := 0, false, false
	for _, c := range tab.inForce {
		last = max(last, c.Number)
	}
	if last > len(tab.attributes) {
		return nil // the catalog is older than the log
	}
	for i := range tab.attributes {
		a, number := &tab.attributes[i], i+1
		if a.generated {
			continue // not in the log
		}
		if !a.dropped {
			today = append(today, number)
		}
		had := slices.ContainsFunc(tab.inForce, func(c shapeColumn) bool { return c.Number == number })
		if !had && number <= last {
			continue // dropped before
		}
		most = append(most, number)
		if a.dropped {
			dropped, young = true, young || !precedes(a.xmin, xid)
		} else if had {
			least = append(least, number)
		}
	}
	n := len(rel.Columns)
	switch {
	case n == len(most):
		return tab.ifTyped(rel, most)
	case n == len(least):
		return tab.ifTyped(rel, least)
	case !dropped && n > len(tab.inForce) && n < len(most) && tab.named(rel, most[:n], len(tab.inForce)):
		return tab.ifTyped(rel, most[:n])
	case !young && n == len(today) && tab.named(rel, today, 0):
		return tab.ifTyped(rel, today)
	}
	return nil
}

// named says whether a relation's columns, but for some first ones, have the names that these columns have today.
func (t *table) named(rel *koldproxy.Relation, numbers []int, but int) bool {
	for i := but; i < len(numbers); i++ {
		if t.attributes[numbers[i]-1].name != rel.Columns[i].Name {
			return false
		}
	}
	return true
}

// ifTyped returns the columns if the relation has them with the types of today.
func (t *table) ifTyped(rel *koldproxy.Relation, numbers []int) []int {
	for i, number := range numbers {
		if a := &t.attributes[number-1]; !a.dropped && a.typeOID != rel.Columns[i].TypeOID {
			return nil
		}
	}
	return numbers
}

// precedes compares transaction ids, which wrap around.
func precedes(a, b uint32) bool { return int32(a-b) < 0 }

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

// origins says for each column that the table has today where its value is in rows with these columns, or -1.
func (t *table) origins(numbers []int) []int {
	out := make([]int, len(t.columns))
	for i, a := range t.columns {
		out[i] = slices.Index(numbers, a+1)
	}
	return out
}

// values brings a row of a relation into the order of today's columns. A column that did not exist then has the value that
// PostgreSQL itself shows for rows of that time: its default when it was added, or NULL. Values of enums get the names that they
// have today.
func (t *table) values(row []koldproxy.Datum, origin []int) []koldproxy.Datum {
	if row == nil {
		return nil
	}
	if len(t.renamed) == 0 && inPlace(row, origin) {
		return row
	}
	out := make([]koldproxy.Datum, len(origin))
	for i, from := range origin {
		if from >= 0 {
			out[i] = row[from]
			if now, ok := t.renamed[t.columns[i]+1][row[from].Text]; ok && row[from].Kind == koldproxy.DatumText {
				out[i].Text = now
			}
		} else if missing := t.column(i).missing; missing != nil {
			out[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: *missing}
		}
	}
	return out
}

// inPlace says that a row has today's columns as they are, and nothing that would have to be filled in.
func inPlace(row []koldproxy.Datum, origin []int) bool {
	if len(row) != len(origin) {
		return false
	}
	for i, from := range origin {
		if from != i || row[i].Kind == koldproxy.DatumUnchanged {
			return false
		}
	}
	return true
}
