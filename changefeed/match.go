package changefeed

import (
	"slices"

	"github.com/koldproxy/koldproxy"
)

// matchColumns says, for each column that a table has today, where its value is in rows of a relation that the write-ahead
// log announced, or -1. The relation may be older than the table: columns come in the order of their numbers, without the
// numbers, and without those that had been dropped by then.
//
// As many columns as there are numbers today is the certain case: none was missing, so order decides, and names may have
// been given away and swapped. Otherwise names decide first; what is left between two columns that were found by name is
// matched in order if it cannot be anything else, that is if the relation has as many columns there as there are numbers.
func matchColumns(rel *koldproxy.Relation, tab *table) []int {
	if len(rel.Columns) == len(tab.attributes) {
		return slices.Clone(tab.columns)
	}
	byName := make(map[string]int, len(tab.columns))
	for _, a := range tab.columns {
		byName[tab.attributes[a].name] = a
	}
	origin := make([]int, len(tab.attributes)) // where an attribute's value is
	for i := range origin {
		origin[i] = -1
	}
	lastColumn, lastAttribute := -1, -1
	fill := func(column, attribute int) { // both are matched; look at what lies between them and the last pair
		if column-lastColumn == attribute-lastAttribute {
			for i := 1; i < column-lastColumn; i++ {
				origin[lastAttribute+i] = lastColumn + i
			}
		}
		lastColumn, lastAttribute = column, attribute
	}
	for i := range rel.Columns {
		a, ok := byName[rel.Columns[i].Name]
		if !ok {
			continue
		}
		origin[a] = i
		if a > lastAttribute { // a name that moved to an earlier number tells nothing about its neighbours
			fill(i, a)
		}
	}
	// Behind the last pair there may be columns that were added since, so that only the exact count is certain.
	fill(len(rel.Columns), len(tab.attributes))

	out := make([]int, len(tab.columns))
	for i, a := range tab.columns {
		out[i] = origin[a]
	}
	return out
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
