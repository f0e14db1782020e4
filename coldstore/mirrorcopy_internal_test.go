package coldstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
)

// copied is a binary copy of rows with a bigint and a text as their key.
func copied(rows ...[][]byte) []byte {
	out := append(slices.Clone(copySignature), make([]byte, 8)...)
	for _, fields := range rows {
		out = binary.BigEndian.AppendUint16(out, uint16(len(fields)))
		for _, f := range fields {
			if f == nil {
				out = binary.BigEndian.AppendUint32(out, 0xffffffff)
				continue
			}
			out = append(binary.BigEndian.AppendUint32(out, uint32(len(f))), f...)
		}
	}
	return append(out, 0xff, 0xff)
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

var copiedKey = []keyColumn{
	newKeyColumn("id", "m.id", typeInfo{name: "int8", builtin: true}),
	newKeyColumn("name", "m.name", typeInfo{name: "text", builtin: true}),
}

// taken is what copiedRows makes of pieces.
func taken(pieces ...[]byte) (rows []string, err error) {
	c := copiedRows{keys: copiedKey, fn: func(row *mirrorRow) (bool, error) {
		rows = append(rows, fmt.Sprintf("%d %d %d %s %s", row.Seq, row.Op, row.hash, row.PK, row.Image))
		return len(rows) == 3, nil
	}}
	for _, p := range pieces {
		if n, err := c.Write(p); err != nil || n != len(p) {
			return nil, fmt.Errorf("%d of %d bytes taken: %w", n, len(p), err)
		}
	}
	return rows, c.err
}

func FuzzCopiedRows(f *testing.F) {
	image := append([]byte{jsonbVersion}, `{"id": 1}`...)
	good := copied([][]byte{number(7), {0, 1}, number(9), image, number(1), []byte("a\"b")}, [][]byte{number(8), {0, 3}, number(9), nil, number(1<<64 - 1), {}})
	rows, err := taken(good)
	if want := []string{`7 1 9 {"id": 1, "name": "a\"b"} {"id": 1}`, `8 3 9 {"id": -1, "name": ""} `}; err != nil || !slices.Equal(rows, want) {
		f.Fatalf("%q, %v; want %q", rows, err, want)
	}
	f.Add(good, 1)
	f.Add(good, 40)
	f.Add(copied([][]byte{number(7)}), 3)
	f.Add(copied([][]byte{number(7), {0, 1}, number(9), {2}, number(1), nil}), 3)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		whole, wholeErr := taken(data)
		if size < 1 {
			return
		}
		cut, cutErr := taken(slices.Collect(slices.Chunk(bytes.Clone(data), size))...)
		if !slices.Equal(whole, cut) || (wholeErr == nil) != (cutErr == nil) {
			t.Fatalf("in pieces of %d: %q, %v; at once: %q, %v", size, cut, cutErr, whole, wholeErr)
		}
	})
}
