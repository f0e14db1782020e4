package rewrite

import "slices"

// The condition of AFTER selects the rows that ORDER BY puts strictly behind the row of the given values. PostgreSQL
// sorts NULL behind all values in ascending order and in front of them in descending order, unless NULLS FIRST or LAST
// says otherwise. So for one key k, direction by direction, and a value v that is not NULL:
//
//	ASC  NULLS LAST    k > v OR k IS NULL
//	ASC  NULLS FIRST   k > v
//	DESC NULLS FIRST   k < v
//	DESC NULLS LAST    k < v OR k IS NULL
//
// and when v is NULL: nothing (NULLS LAST) or k IS NOT NULL (NULLS FIRST). Further keys count where the ones before are
// equal, NULL being equal to NULL. That is the exact condition.
//
// # The index
//
// The exact condition defeats the index where it matters most. Up to version 18 PostgreSQL does not know that k IS NULL
// is false for a NOT NULL column when it stands in an OR, and then reads from the beginning of the index, or collects
// and sorts all the rest of the table. Measured on PostgreSQL 15, 500 rows from the middle of 100 000: 0.2 ms with k > v
// alone, 48 ms with OR k IS NULL, and more with each page. No condition on k alone is both: a B-tree finds k > v
// without NULLs or NULLs without k > v, but not the range of both; and a UNION ALL in FROM would lose row locks, system
// columns and row types.
//
// Therefore the NULL arm asks the server:
//
//	k > v OR (koldstore.key_may_be_null('t', 'k') AND k IS NULL)
//
// The function reads NOT NULL from the catalog. It is IMMUTABLE on purpose, so the planner calls it once with its constant
// arguments, puts false in its place, and what is left is k > v: an index condition. A cached plan stays right, because
// whatever changes the column's NOT NULL also invalidates every plan that reads the table. Where the rewriter cannot tell the
// key's table (joins, views, functions, sub-selects in FROM) the question is left out and the condition is the exact one.
//
// # Several keys
//
// Keys of one direction are compared as rows, ROW(a, b) > ROW(v, w), which a B-tree on (a, b) answers from one position.
// The exact condition is added for the case that a NULL takes part, and folds away with it. Keys of different directions get
// the exact condition together with one on the first key, a >= v, for the index.
//
// Values appear several times in the text; the first time always in a comparison with their key, so that a parameter
// gets the key's type.
//
// # The operators
//
// The comparison operators are found through the search path: naming pg_catalog would be wrong for types of extensions, such as
// citext. But whoever may create something in a schema of the path can put an operator there that fits better than PostgreSQL's own
// (a > of two varchars), and ORDER BY, which the user has written, does not run it. So the condition ends with
//
//	AND (TRUE OR ROW(k, 0) > ROW(v, 0))
//
// for each operator that it has: PostgreSQL compares rows by members of B-tree families alone, which only superusers make, and refuses
// the statement when it finds anything else. The planner takes this part away, before it is ever run.
//
// What the search path leads to may also be the operators of another type: those of text for citext, when the schema of the extension is
// not in the path or the value is a text. So for each key there is
//
//	AND koldstore.compares_keys(CASE WHEN FALSE THEN k END, CASE WHEN FALSE THEN v END)
//
// which the planner computes from the two types, and which is an error where the key's own operators are not the ones that were found.

// keyset writes the condition in parentheses. stored says that the text is kept for statements to come, in a view: what the server is asked
// here would be asked again then, about another search path.
func keyset(keys []orderKey, q *quoter, stored bool) []piece {
	w := &keysetWriter{keys: keys, quotes: q}
	w.text("(")
	switch {
	case len(keys) == 1:
		w.behind(keys[0], w.mayBeNull(keys[0]))
	case uniform(keys):
		w.rows()
		if guards, always := w.guards(); always {
			w.text(" OR ")
			w.exact()
		} else if len(guards) > 0 {
			w.text(" OR ((")
			for i, g := range guards {
				if i > 0 {
					w.text(" OR ")
				}
				w.pieces = append(w.pieces, g...)
			}
			w.text(") AND ")
			w.exact()
			w.text(")")
		}
	default:
		w.notBefore(keys[0])
		w.exact()
	}
	w.text(")")
	w.proof()
	if !stored {
		w.types()
	}
	return w.pieces
}

// proof writes that each operator which compare has written is one of a B-tree family. It comes last, when all parameters have
// their types.
func (w *keysetWriter) proof() {
	if len(w.compared) == 0 {
		return
	}
	w.text(" AND (TRUE")
	for _, c := range w.compared {
		w.text(" OR ROW(")
		w.key(w.keys[c.key])
		w.text(", 0)" + c.operator + "ROW(")
		w.value(w.keys[c.key])
		w.text(", 0)")
	}
	w.text(")")
}

// types writes that the operators are those of the keys' types.
func (w *keysetWriter) types() {
	for _, k := range w.keys {
		if k.isNull == alwaysNull {
			continue
		}
		w.text(" AND koldstore.compares_keys(CASE WHEN FALSE THEN ")
		w.key(k)
		w.text(" END, CASE WHEN FALSE THEN ")
		if k.literal { // it takes the type of the key
			w.key(k)
		} else {
			w.value(k)
		}
		w.text(" END)")
	}
}

// uniform reports whether all keys have the same direction.
func uniform(keys []orderKey) bool {
	for _, k := range keys {
		if k.desc != keys[0].desc {
			return false
		}
	}
	return true
}

type keysetWriter struct {
	keys     []orderKey
	quotes   *quoter
	pieces   []piece
	compared []comparison // each once
}

// comparison is an operator between a key, by its index, and its value.
type comparison struct {
	key      int
	operator string
}

func (w *keysetWriter) text(s string) { w.pieces = append(w.pieces, insert(s)) }

// key and value copy what the user typed.
func (w *keysetWriter) key(k orderKey) {
	w.pieces = append(w.pieces, copyOf(k.column.start, k.column.end))
}

func (w *keysetWriter) value(k orderKey) {
	w.text("(")
	w.pieces = append(w.pieces, copyOf(k.value.start, k.value.end))
	w.text(")")
}

// compare writes key, operator and value.
func (w *keysetWriter) compare(k orderKey, operator string) {
	c := comparison{slices.IndexFunc(w.keys, func(o orderKey) bool { return o.column == k.column && o.value == k.value }), operator}
	if !slices.Contains(w.compared, c) {
		w.compared = append(w.compared, c)
	}
	w.key(k)
	w.text(operator)
	w.value(k)
}

// direction is the operator of rows that come later.
func direction(k orderKey) string {
	if k.desc {
		return " < "
	}
	return " > "
}

// mayBeNull is the question whether a key can be NULL, followed by AND; empty where it has to be supposed.
func (w *keysetWriter) mayBeNull(k orderKey) string {
	if k.table == "" {
		return ""
	}
	return "koldstore.key_may_be_null(" + w.quotes.literal(k.table) + ", " + w.quotes.literal(k.name) + ") AND "
}

// behind writes that the key is behind its value; nullable stands in front of the arm for keys that are NULL.
func (w *keysetWriter) behind(k orderKey, nullable string) {
	w.compare(k, direction(k))
	switch {
	case k.nullsFirst && k.isNull == maybeNull:
		w.text(" OR (")
		w.value(k)
		w.text(" IS NULL AND ")
		w.key(k)
		w.text(" IS NOT NULL)")
	case k.nullsFirst && k.isNull == alwaysNull:
		w.text(" OR ")
		w.key(k)
		w.text(" IS NOT NULL")
	case !k.nullsFirst && k.isNull == maybeNull:
		w.text(" OR (" + nullable)
		w.key(k)
		w.text(" IS NULL AND ")
		w.value(k)
		w.text(" IS NOT NULL)")
	case !k.nullsFirst && k.isNull == neverNull:
		w.text(" OR (" + nullable)
		w.key(k)
		w.text(" IS NULL)")
	}
}

// equal writes that the key is level with its value.
func (w *keysetWriter) equal(k orderKey) {
	switch k.isNull {
	case neverNull:
		w.compare(k, " = ")
	case alwaysNull:
		w.key(k)
		w.text(" IS NULL")
	case maybeNull:
		w.text("(")
		w.compare(k, " = ")
		w.text(" OR (")
		w.key(k)
		w.text(" IS NULL AND ")
		w.value(k)
		w.text(" IS NULL))")
	}
}

// exact writes the exact condition: behind in the first key, or level in it and behind in the second, and so on.
func (w *keysetWriter) exact() {
	w.text("(")
	for i, k := range w.keys {
		w.behind(k, "")
		if i < len(w.keys)-1 {
			w.text(" OR (")
			w.equal(k)
			w.text(" AND (")
		}
	}
	for range w.keys[1:] {
		w.text("))")
	}
	w.text(")")
}

// rows writes the comparison of all keys as rows. It is not true where a NULL decides.
func (w *keysetWriter) rows() {
	w.text("ROW(")
	for i, k := range w.keys {
		if i > 0 {
			w.text(", ")
		}
		w.key(k)
	}
	w.text(")" + direction(w.keys[0]) + "ROW(")
	for i, k := range w.keys {
		if i > 0 {
			w.text(", ")
		}
		w.value(k)
	}
	w.text(")")
}

// guards are the conditions under which a NULL may decide what the comparison of rows does not see: a value that is
// NULL, or a key that is and comes last. (A key that comes first when NULL is never behind a value that is not.)
func (w *keysetWriter) guards() (guards [][]piece, always bool) {
	for _, k := range w.keys {
		switch k.isNull {
		case alwaysNull:
			return nil, true
		case maybeNull:
			guards = append(guards, []piece{insert("("), copyOf(k.value.start, k.value.end), insert(") IS NULL")})
		}
		if k.nullsFirst {
			continue
		}
		if k.table == "" {
			return nil, true
		}
		question := w.mayBeNull(k)
		guards = append(guards, []piece{insert(question[:len(question)-len(" AND ")])})
	}
	return guards, false
}

// notBefore writes that the first key is not before its value, for the index. It follows from the exact condition.
func (w *keysetWriter) notBefore(k orderKey) {
	if k.isNull == alwaysNull {
		return
	}
	w.text("(")
	w.compare(k, direction(k)[:2]+"= ")
	if !k.nullsFirst {
		w.text(" OR (" + w.mayBeNull(k))
		w.key(k)
		w.text(" IS NULL)")
	}
	if k.isNull == maybeNull {
		w.text(" OR ")
		w.value(k)
		w.text(" IS NULL")
	}
	w.text(") AND ")
}
