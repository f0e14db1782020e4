package changefeed

import (
	"slices"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy"
)

func TestMatchColumns(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what, relation, table string // a dropped column of the table is - if it was dropped before the row was written, + if since
		want                  []int  // for each column that exists
	}{
		{"the same", "a b c", "a b c", []int{0, 1, 2}},
		{"renamed", "a b c", "a x c", []int{0, 1, 2}},
		{"swapped", "a b c", "b a c", []int{0, 1, 2}},
		{"name given to another", "id a b", "id x a", []int{0, 1, 2}},
		{"name given to a new one", "id a b", "id x + a", []int{0, 1, -1}},
		{"dropped since", "a b c", "a + c", []int{0, 2}},
		{"dropped since, says the name; before, say the ids", "a b c", "a - c", []int{0, 2}},
		{"dropped before", "a c", "a - c", []int{0, 1}},
		{"dropped before, say the names; since, says the id", "a c d e", "a + c d e f", []int{0, 1, 2, 3, -1}},
		{"dropped since and added anew, another renamed", "a b c", "x b + c", []int{0, 1, -1}},
		{"looks like today", "a b c", "a b + c", []int{0, 1, 2}},
		{"added since", "a b", "a b c", []int{0, 1, -1}},
		{"added since, one was dropped before", "a c", "a - c d", []int{0, 1, -1}},
		{"dropped before, another renamed", "a c d", "a - x d", []int{0, 1, 2}},
		{"dropped since, another renamed", "a b c d", "a + x d", []int{0, 2, 3}},
		{"renamed between neighbours", "a b c d", "a x c d e", []int{0, 1, 2, 3, -1}},
		{"renamed and dropped at the end, added since", "a b c", "a x + d", []int{0, 1, -1}},
		{"dropped before, renamed at the end", "a b", "a - x", []int{0, 1}},
		{"all renamed", "a b", "x y", []int{0, 1}},
		{"more columns than there can have been", "a b c", "b x", []int{1, -1}},
		{"no columns", "", "", []int{}},
	} {
		if got := matchColumns(relationOf(c.relation), tableOf(c.table), 100); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q in %q: %v, want %v", c.what, c.relation, c.table, got, c.want)
		}
	}
}

func relationOf(columns string) *koldproxy.Relation {
	rel := &koldproxy.Relation{}
	for _, name := range strings.Fields(columns) {
		rel.Columns = append(rel.Columns, koldproxy.Column{Name: name})
	}
	return rel
}

func tableOf(columns string) *table {
	tab := &table{}
	for _, name := range strings.Fields(columns) {
		a := attribute{name: name, dropped: name == "-" || name == "+", xmin: 99}
		if name == "+" {
			a.xmin = 101
		}
		tab.add(a, -1)
	}
	return tab
}

func FuzzMatchColumns(f *testing.F) {
	f.Add("a b c", "a - c")
	f.Fuzz(func(t *testing.T, relation, columns string) {
		rel, tab := relationOf(relation), tableOf(columns)
		got := matchColumns(rel, tab, 100)
		if len(got) != len(tab.columns) {
			t.Fatalf("%d origins for %d columns", len(got), len(tab.columns))
		}
		for _, from := range got {
			if from < -1 || from >= len(rel.Columns) {
				t.Fatalf("origin %d of %d columns", from, len(rel.Columns))
			}
		}
	})
}

func TestRowLiteral(t *testing.T) {
	t.Parallel()
	text := func(s string) koldproxy.Datum { return koldproxy.Datum{Kind: koldproxy.DatumText, Text: s} }
	null := koldproxy.Datum{Kind: koldproxy.DatumNull}
	for _, c := range []struct {
		row  []koldproxy.Datum
		want string
	}{
		{nil, `()`},
		{[]koldproxy.Datum{null}, `()`},
		{[]koldproxy.Datum{text("")}, `("")`},
		{[]koldproxy.Datum{null, text(`a"b\c`), {}, text("ü,()")}, `(,"a""b\\c",,"ü,()")`},
	} {
		if got := rowLiteral(c.row); got != c.want {
			t.Errorf("%v: %s, want %s", c.row, got, c.want)
		}
	}
}
