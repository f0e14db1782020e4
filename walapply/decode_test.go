package walapply

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/koldproxy/koldproxy"
)

// wire writes pgoutput messages.
type wire []byte

func (w wire) u8(b ...byte) wire  { return append(w, b...) }
func (w wire) u16(n uint16) wire  { return binary.BigEndian.AppendUint16(w, n) }
func (w wire) u32(n uint32) wire  { return binary.BigEndian.AppendUint32(w, n) }
func (w wire) u64(n uint64) wire  { return binary.BigEndian.AppendUint64(w, n) }
func (w wire) cstr(s string) wire { return append(append(w, s...), 0) }
func (w wire) text(s string) wire { return append(w.u8('t').u32(uint32(len(s))), s...) }
func (w wire) add(parts ...wire) (r wire) {
	r = w
	for _, p := range parts {
		r = append(r, p...)
	}
	return r
}

var (
	beginMessage    = wire{'B'}.u64(100).u64(1_000_000).u32(7)
	commitMessage   = wire{'C'}.u8(0).u64(100).u64(140).u64(1_000_000)
	relationMessage = wire{'R'}.u32(5).cstr("s").cstr("t").u8('d').u16(2).
			u8(1).cstr("id").u32(23).u32(0xffffffff).
			u8(0).cstr("v").u32(25).u32(0xffffffff)
	newRow = wire{'N'}.u16(2).text("1").u8('n')
	keyRow = wire{'K'}.u16(2).text("1").u8('n')
	oldRow = wire{'O'}.u16(2).text("1").u8('u')

	insertMessage   = wire{'I'}.u32(5).add(newRow)
	truncateMessage = wire{'T'}.u32(2).u8(3).u32(5).u32(5)
)

func TestDecoderReadsEveryMessage(t *testing.T) {
	t.Parallel()
	d := newDecoder()
	var out []message
	for _, m := range []wire{
		beginMessage, relationMessage,
		wire{'Y'}.u32(9).cstr("s").cstr("ty"), wire{'O'}.u64(1).cstr("origin"), wire{'M'}.u8(1).u64(2).cstr("p").u32(1).u8('x'),
		insertMessage,
		wire{'U'}.u32(5).add(newRow), wire{'U'}.u32(5).add(keyRow, newRow), wire{'U'}.u32(5).add(oldRow, newRow),
		wire{'D'}.u32(5).add(keyRow), wire{'D'}.u32(5).add(oldRow),
		truncateMessage, commitMessage,
	} {
		var err error
		if out, err = d.decode(out, m); err != nil {
			t.Fatal(err)
		}
	}
	if len(out) != 10 || out[0].kind != messageBegin || out[0].lsn != 100 || out[9].kind != messageCommit || out[9].lsn != 140 {
		t.Fatalf("got %d messages: %+v", len(out), out)
	}
	text, null := koldproxy.Datum{Kind: koldproxy.DatumText, Text: "1"}, koldproxy.Datum{Kind: koldproxy.DatumNull}
	missing, unchanged := koldproxy.Datum{Kind: koldproxy.DatumMissing}, koldproxy.Datum{Kind: koldproxy.DatumUnchanged}
	for i, want := range []struct {
		op       koldproxy.Op
		old, new []koldproxy.Datum
	}{
		{koldproxy.OpInsert, nil, []koldproxy.Datum{text, null}},
		{koldproxy.OpUpdate, nil, []koldproxy.Datum{text, null}},
		{koldproxy.OpUpdate, []koldproxy.Datum{text, missing}, []koldproxy.Datum{text, null}},
		{koldproxy.OpUpdate, []koldproxy.Datum{text, unchanged}, []koldproxy.Datum{text, null}},
		{koldproxy.OpDelete, []koldproxy.Datum{text, missing}, nil},
		{koldproxy.OpDelete, []koldproxy.Datum{text, unchanged}, nil},
		{koldproxy.OpTruncate, nil, nil},
		{koldproxy.OpTruncate, nil, nil},
	} {
		c := out[i+1].change
		if c.Op != want.op || !same(c.Old, want.old) || !same(c.New, want.new) {
			t.Errorf("change %d: %+v", i, c)
		}
		if c.CommitLSN != 100 || c.XID != 7 || !c.CommitTime.Equal(time.Date(2000, 1, 1, 0, 0, 1, 0, time.UTC)) {
			t.Errorf("change %d: transaction %v %d %v", i, c.CommitLSN, c.XID, c.CommitTime)
		}
		if c.Relation.OID != 5 || c.Relation.Namespace != "s" || c.Relation.Name != "t" || c.Relation.Columns[1] != (koldproxy.Column{Name: "v", TypeOID: 25, TypeMod: -1}) {
			t.Errorf("change %d: relation %+v", i, c.Relation)
		}
	}
}

func same(a, b []koldproxy.Datum) bool {
	if len(a) != len(b) || (a == nil) != (b == nil) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestEachRelationMessageIsANewVersion(t *testing.T) {
	t.Parallel()
	d := newDecoder()
	var out []message
	for _, m := range []wire{beginMessage, relationMessage, insertMessage, relationMessage, insertMessage} {
		out, _ = d.decode(out, m)
	}
	if a, b := out[1].change.Relation, out[2].change.Relation; a == b {
		t.Error("both rows have the same version")
	}
}

func TestDecodedRowsAreIndependentOfTheBuffer(t *testing.T) {
	t.Parallel()
	d := newDecoder()
	for _, m := range []wire{beginMessage, relationMessage} {
		if _, err := d.decode(nil, m); err != nil {
			t.Fatal(err)
		}
	}
	buf := append(wire(nil), insertMessage...)
	out, err := d.decode(nil, buf)
	if err != nil {
		t.Fatal(err)
	}
	clear(buf)
	if got := out[0].change.New[0].Text; got != "1" {
		t.Errorf("row became %q", got)
	}
}

func TestDecoderRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, want string
		in         []wire
	}{
		{"nothing", "empty", []wire{{}}},
		{"unknown kind", "unknown kind", []wire{{'?'}}},
		{"streamed transactions", "unknown kind", []wire{{'S', 0, 0, 0, 1, 1}}},
		{"left over", "left over", []wire{beginMessage.u8(0)}},
		{"short begin", "shorter", []wire{beginMessage[:20]}},
		{"begin twice", "inside", []wire{beginMessage, beginMessage}},
		{"commit alone", "does not fit", []wire{commitMessage}},
		{"commit of another", "does not fit", []wire{beginMessage, wire{'C'}.u8(0).u64(99).u64(140).u64(0)}},
		{"change alone", "outside", []wire{relationMessage, insertMessage}},
		{"unknown relation", "not been announced", []wire{beginMessage, insertMessage}},
		{"short relation", "shorter", []wire{wire{'R'}.u32(5).cstr("s").cstr("t").u8('d').u16(60000)}},
		{"other width", "columns", []wire{beginMessage, relationMessage, wire{'I'}.u32(5).u8('N').u16(3).u8('n', 'n', 'n')}},
		{"binary column", "column of kind", []wire{beginMessage, relationMessage, wire{'I'}.u32(5).u8('N').u16(2).u8('b', 'n')}},
		{"long column", "shorter", []wire{beginMessage, relationMessage, wire{'I'}.u32(5).u8('N').u16(2).u8('n', 't').u32(1 << 31)}},
		{"insert of an old row", "kind", []wire{beginMessage, relationMessage, wire{'I'}.u32(5).add(oldRow)}},
		{"delete of a new row", "kind", []wire{beginMessage, relationMessage, wire{'D'}.u32(5).add(newRow)}},
		{"update of nothing", "kind", []wire{beginMessage, relationMessage, wire{'U'}.u32(5).add(oldRow)}},
		{"truncate of many", "number", []wire{beginMessage, relationMessage, wire{'T'}.u32(1 << 30).u8(0).u32(5)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newDecoder()
			var err error
			for _, m := range tt.in {
				if err != nil {
					t.Fatalf("early: %v", err)
				}
				_, err = d.decode(nil, m)
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// FuzzDecode feeds messages, cut at any place, to one decoder: none may panic or take more memory than it is worth.
func FuzzDecode(f *testing.F) {
	for _, m := range []wire{
		beginMessage, relationMessage, insertMessage, truncateMessage, commitMessage,
		wire{'U'}.u32(5).add(keyRow, newRow), wire{'D'}.u32(5).add(oldRow),
	} {
		f.Add([]byte(m), uint(len(m)/2))
	}
	f.Fuzz(func(t *testing.T, data []byte, cut uint) {
		at := int(cut % uint(len(data)+1))
		d := newDecoder()
		for _, m := range [][]byte{beginMessage, relationMessage, data[:at], data[at:], insertMessage, commitMessage, data} {
			out, err := d.decode(nil, m)
			if err != nil && len(out) > 0 {
				t.Fatalf("messages beside an error: %v", err)
			}
			for _, o := range out {
				if o.kind == messageChange && (o.change.Relation == nil || o.change.CommitLSN != o.lsn) {
					t.Fatalf("incomplete change %+v", o.change)
				}
				// A column costs at least a byte on the wire, a relation in a truncate four.
				datum := int(unsafe.Sizeof(koldproxy.Datum{}))
				if o.bytes > messageBytes+len(m)*(1+datum) {
					t.Fatalf("%d bytes out of %d", o.bytes, len(m))
				}
			}
		}
	})
}
