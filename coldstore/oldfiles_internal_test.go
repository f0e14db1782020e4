package coldstore

import (
	"crypto/sha256"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy"
)

// oldLayout and oldRows are what testdata/format1.parquet was written from, by commit 5af27be: texts with their lengths in between, a Bloom filter
// on an ascending key, several pages and row groups, and values in _ks_exact, _ks_missing and _ks_key.
var oldLayout = layout{
	table: 16384, name: "app.messages", segment: "6f1c3d3e-9f53-4c7c-8a4e-0d5f1f3d7c11", key: []string{"id"},
	columns: []column{
		{Name: "id", Number: 1, Type: "bigint", Kind: kindInt8},
		{Name: "body", Number: 2, Type: "text", Kind: kindText},
		{Name: "price", Number: 4, Type: "numeric(10,2)", Kind: kindDecimal, Precision: 10, Scale: 2},
		{Name: "data", Number: 5, Type: "jsonb", Kind: kindJSON},
		{Name: "at", Number: 6, Type: "timestamp with time zone", Kind: kindTimestampTZ},
		{Name: "share", Number: 7, Type: "double precision", Kind: kindFloat8},
		{Name: "kind", Number: 8, Type: "text", Kind: kindText},
		{Name: "big", Number: 9, Type: "numeric(30,3)", Kind: kindDecimal, Precision: 30, Scale: 3},
	},
}

func oldRows() (rows []mirrorRow) {
	for i := 1; i <= 3000; i++ {
		pk := fmt.Sprintf(`{"id": %d}`, i)
		img := fmt.Sprintf(`{"at": "2026-01-%02dT%02d:00:00.%d+00:00", "id": %d, "big": -%d.125, "body": "%s %d", "data": {"n": %d.00}, "kind": "k%d", "price": %d.%02d, "share": %d.25}`,
			i%28+1, i%24, i%9+1, i, i, strings.Repeat("é", i%40), i*7919, i, i%3, i, i%100, i)
		switch {
		case i%97 == 0:
			rows = append(rows, image(i, 3, pk, ""))
			continue
		case i%101 == 0: // nulls, what columns cannot hold, and columns that are missing
			img = fmt.Sprintf(`{"at": "infinity", "id": %d, "body": null, "data": null, "gone": [1, 2], "price": "NaN", "share": "NaN"}`, i)
		case i%103 == 0:
			pk = fmt.Sprintf(`{"id": "%d"}`, i)
		}
		rows = append(rows, image(i, koldproxy.Op(1+i%2), pk, img))
	}
	return rows
}

func TestFilesOfOlderVersionsAreRead(t *testing.T) {
	t.Parallel()
	b, err := OpenLocalBucket("testdata")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("testdata/format1.parquet")
	if err != nil {
		t.Fatal(err)
	}
	rows := oldRows()
	sum := sha256.Sum256(data)
	f, err := openSegment(t.Context(), b, expected{
		object: "format1.parquet", size: int64(len(data)), sha256: sum[:], rows: int64(len(rows)), minSeq: rows[0].Seq, maxSeq: rows[len(rows)-1].Seq,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*f.layout, oldLayout) {
		t.Errorf("layout %+v, want %+v", *f.layout, oldLayout)
	}
	ordinals := make([]uint32, len(rows))
	for i := range ordinals {
		ordinals[i] = uint32(i)
	}
	got, err := f.rows(t.Context(), ordinals, false)
	if err != nil {
		t.Fatal(err)
	}
	hashes, err := f.hashes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range rows {
		if got[i].Seq != want.Seq || got[i].Op != want.Op || hashes[i] != want.hash || string(got[i].PK) != string(want.PK) || members(t, got[i].Image) != members(t, want.Image) {
			t.Fatalf("row %d: %d %d %s %s, want %d %d %s %s", i, got[i].Seq, got[i].Op, got[i].PK, got[i].Image, want.Seq, want.Op, want.PK, want.Image)
		}
	}
}
