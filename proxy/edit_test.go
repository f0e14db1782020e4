package proxy

import (
	"testing"

	"github.com/koldproxy/koldproxy/rewrite"
)

// A predicate that is not boolean is one of WHEN, which was typed, and not of the index that PostgreSQL has judged it in.
func TestPredicatesAreOfWHEN(t *testing.T) {
	t.Parallel()
	sql := "CREATE STREAM s ON t WHEN (id)"
	r := rewrite.Rewrite(sql, rewrite.Options{ConformingStrings: true, ClientEncoding: "UTF8"})
	o := origin{ordinal: r.Statements[0].Ordinal, text: &text{changed: true, positions: r.Positions, statements: r.Statements}}
	for message, want := range map[string]string{
		"C42804\x00Margument of WHERE must be type boolean, not type integer\x00":  "argument of WHEN must be type boolean, not type integer",
		"C42803\x00Maggregate functions are not allowed in index predicates\x00":   "aggregate functions are not allowed in index predicates",
		"C42703\x00Mcolumn \"no WHERE at all\" does not exist\x00":                 "column \"no WHERE at all\" does not exist",
		"C42804\x00Margument of CASE/WHEN must be type boolean, not type text\x00": "argument of CASE/WHEN must be type boolean, not type text",
	} {
		body := []byte("SERROR\x00" + message + "qCREATE INDEX i ON t ((1)) WHERE /*koldstore:when*/(id\n)\x00p52\x00\x00")
		fs, ok := parseFields(edit(msgError, body, o)[headerLen:])
		if !ok || fs.get(fieldMessage) != want || fs.get(fieldPosition) != "28" {
			t.Errorf("%q becomes %q at %s", message, fs.get(fieldMessage), fs.get(fieldPosition))
		}
	}
}
