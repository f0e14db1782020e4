package changefeed

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// A value that jsonb cannot hold is judged without anybody being asked, and the judgement says how large it is.
func TestValuesThatCannotFit(t *testing.T) {
	t.Parallel()
	tab := &table{
		attributes: []attribute{{name: "id", typeOID: pgtype.Int4OID, base: pgtype.Int4OID}, {name: "a b", typeOID: pgtype.TextOID, base: pgtype.TextOID}},
		columns:    []int{0, 1},
		streams:    []*stream{{}, {}},
	}
	row := func(n int) []koldproxy.Datum {
		return []koldproxy.Datum{{Kind: koldproxy.DatumText, Text: "1"}, {Kind: koldproxy.DatumText, Text: strings.Repeat("r", n)}}
	}
	var fits, not judged
	if tab.cannotFit(row(maxJSONString), &fits) || fits.failed != nil {
		t.Error("the longest string does not fit")
	}
	if !tab.cannotFit(row(maxJSONString+1), &not) || not.failed.Code != "54000" || not.failure[0] != not.failed || not.failure[1] != not.failed {
		t.Fatalf("%+v", not)
	}
	if want := `the value of column "a b" has 268435456 bytes, and a string in jsonb can have 268435455`; not.failed.Message != want {
		t.Errorf("%s, want %s", not.failed.Message, want)
	}
}
