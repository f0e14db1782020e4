package changefeed

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy"
)

func TestPlaceColumns(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		// A dropped column of the table is - if a transaction older than the row's dropped it, otherwise +. Columns of the shape
		// are name and number; those of the relation have the type that is after their name, if any.
		what, shape, relation, table string
		announced                    bool
		want                         string // the numbers; empty: nobody knows
	}{
		{"the shape says it", "id1 v2 pad3", "id v pad", "id v + - other", true, "1 2 3"},
		{"swapped since", "id1 a2 b3", "id a b", "id b a", true, "1 2 3"},
		{"added anew under the same name", "id1 v2", "id v", "id + v", true, "1 2"},
		{"added anew under the same name, and announced", "id1 v3", "id v", "id + v", true, "1 3"},
		{"nothing changed", "id1 v2", "id v", "id v", false, "1 2"},
		{"renamed", "id1 v2", "id w", "id w", false, "1 2"},
		{"swapped, nobody said when", "id1 a2 b3", "id a b", "id b a", false, "1 2 3"},
		{"added", "id1 v2", "id v w", "id v w", false, "1 2 3"},
		{"one of two was added", "id1 v2", "id v w", "id v w x", false, "1 2 3"},
		{"one of two was added and had another name", "id1 v2", "id v y", "id v w x", false, ""},
		{"dropped since", "id1 v2", "id v", "id +", false, "1 2"},
		{"dropped before", "id1 v2 w3", "id w", "id + w", false, "1 3"},
		{"one of two was dropped", "id1 v2 w3", "id w", "id + +", false, ""},
		{"one was dropped before the shape", "id1 w3", "id w x", "id - w x", false, "1 3 4"},
		{"added and dropped", "id1 v2", "id v", "id v +", false, "1 2"},
		{"added, and another dropped since or before", "id1 pad2", "id pad", "id + pad", false, ""},
		{"added, and another dropped before", "id1 pad2", "id pad", "id - pad", false, "1 3"},
		{"added under another name, another dropped", "id1 pad2", "id pad", "id - other", false, ""},
		{"no shape, nothing dropped", "", "id v", "id v w", false, "1 2"},
		{"no shape, one dropped before", "", "id w", "id - w", false, "1 3"},
		{"no shape, one dropped since", "", "id v", "id + w", false, ""},
		{"not announced although it should be", "id1 v2 w3", "id w", "id - w", true, "1 3"},
		{"too many columns", "id1", "id a b", "id a", true, ""},
		{"another type", "id1 v2", "id v9", "id v", true, ""},
		{"a newer shape than the catalog", "id1 v2 w3", "id v", "id v", false, ""},
		{"generated columns are not in the log", "id1 v3", "id v", "id g: v", false, "1 3"},
	} {
		tab := tableOf(c.table)
		tab.inForce = shapeOf(t, c.shape)
		got, ok := placeColumns(relationOf(c.relation), tab, 100, c.announced)
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != c.want || ok != (c.want != "") {
			t.Errorf("%s: %q as %q in %q: %s %v, want %s", c.what, c.relation, c.shape, c.table, text, ok, c.want)
		}
	}
}

func relationOf(columns string) *koldproxy.Relation {
	rel := &koldproxy.Relation{}
	for _, name := range strings.Fields(columns) {
		short := strings.TrimRight(name, "0123456789")
		number, _ := strconv.ParseUint(name[len(short):], 10, 32)
		rel.Columns = append(rel.Columns, koldproxy.Column{Name: short, TypeOID: uint32(number)})
	}
	return rel
}

func shapeOf(t *testing.T, columns string) (s shape) {
	t.Helper()
	for i, c := range relationOf(columns).Columns {
		s = append(s, shapeColumn{Name: c.Name, Number: int(c.TypeOID)})
		if i > 0 && s[i-1].Number >= s[i].Number {
			t.Fatalf("shape %q is out of order", columns)
		}
	}
	return s
}

func tableOf(columns string) *table {
	tab := &table{}
	for _, name := range strings.Fields(columns) {
		short, generated := strings.CutSuffix(name, ":")
		a := attribute{name: short, generated: generated, dropped: name == "-" || name == "+", xmin: 99}
		if name == "+" {
			a.xmin = 101
		}
		tab.add(a, -1)
	}
	return tab
}

// FuzzInferColumns: whatever happened to a table, what is inferred is true. History is a sequence of letters: a adds a column, d
// drops the oldest one, r renames the newest one; up to the place row it is what the relation knows of, after the place noted
// it is not in the shape. Names are always new, and the ids of transactions say nothing.
func FuzzInferColumns(f *testing.F) {
	f.Add("aaadrad", 3, 5)
	f.Fuzz(func(t *testing.T, history string, noted, row int) {
		if len(history) > 64 || noted < 0 || row < noted || row > len(history) {
			return
		}
		tab := &table{}
		rel := &koldproxy.Relation{}
		var inRow []int
		for step := 0; ; step++ {
			live := func(each func(number int, a *attribute)) {
				for i := range tab.attributes {
					if !tab.attributes[i].dropped {
						each(i+1, &tab.attributes[i])
					}
				}
			}
			if step == noted {
				live(func(n int, a *attribute) { tab.inForce = append(tab.inForce, shapeColumn{Number: n, Name: a.name}) })
			}
			if step == row {
				live(func(n int, a *attribute) {
					inRow = append(inRow, n)
					rel.Columns = append(rel.Columns, koldproxy.Column{Name: a.name})
				})
			}
			if step == len(history) {
				break
			}
			switch history[step] {
			case 'a':
				tab.attributes = append(tab.attributes, attribute{name: fmt.Sprint("c", step)})
			case 'd', 'D':
				victim := -1
				live(func(n int, _ *attribute) {
					if victim < 0 || history[step] == 'D' {
						victim = n
					}
				})
				if victim > 0 {
					tab.attributes[victim-1] = attribute{dropped: true}
				}
			case 'r':
				live(func(_ int, a *attribute) { a.name += "r" })
			}
		}
		if len(tab.inForce) == 0 {
			return // no table without a key has a shape
		}
		if got, ok := placeColumns(rel, tab, 1, false); ok && !slices.Equal(got, inRow) {
			t.Errorf("%s noted at %d, row at %d: %v, want %v", history, noted, row, got, inRow)
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
