package coldstore

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/parquet/file"
	"pgregory.net/rapid"

	"github.com/koldproxy/koldproxy"
)

var testLayout = layout{
	table: 16384, name: "app.messages", segment: "s", key: []string{"id"},
	columns: []column{
		{Name: "id", Number: 1, Type: "bigint", Kind: kindInt8},
		{Name: "body", Number: 2, Type: "text", Kind: kindText},
		{Name: "price", Number: 4, Type: "numeric(10,2)", Kind: kindDecimal, Precision: 10, Scale: 2},
		{Name: `we"ird.né`, Number: 5, Type: "jsonb", Kind: kindJSON},
	},
}

// store writes rows into a file in a new bucket and opens it.
func store(t *testing.T, l *layout, rows []mirrorRow, limits rowGroupLimits) (*segmentFile, *LocalBucket, expected) {
	t.Helper()
	var buf bytes.Buffer
	w, err := newSegmentWriter(&buf, l, limits)
	if err != nil {
		t.Fatal(err)
	}
	for i := range rows {
		if err := w.add(&rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	sum, err := w.close()
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(buf.Bytes())
	want := expected{
		object: "16384/s.parquet", size: int64(buf.Len()), sha256: hash[:], rows: sum.rows, minSeq: sum.minSeq, maxSeq: sum.maxSeq,
	}
	b, err := OpenLocalBucket(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.PutIfAbsent(t.Context(), want.object, &buf, want.size); err != nil {
		t.Fatal(err)
	}
	f, err := openSegment(t.Context(), b, want)
	if err != nil {
		t.Fatal(err)
	}
	return f, b, want
}

func image(seq int, op koldproxy.Op, pk, img string) mirrorRow {
	r := mirrorRow{Row: Row{Seq: koldproxy.Seq(seq), Op: op, PK: []byte(pk)}, hash: int64(seq) * 7}
	if img != "" {
		r.Image = []byte(img)
	}
	return r
}

func TestRowsComeBackFromAFileAsTheyWent(t *testing.T) {
	t.Parallel()
	rows := []mirrorRow{
		image(1, 1, `{"id": 1}`, `{"id": 1, "body": "a", "price": 1.50, "we\"ird.né": null}`),
		image(2, 2, `{"id": 2}`, `{"id": 2, "body": null, "price": "NaN", "we\"ird.né": {"n": 9007199254740993.000}}`),
		image(3, 3, `{"id": 3}`, ``),
		image(4, 1, `{"id": 4}`, `{"id": 4, "price": 1.5, "we\"ird.né": "123"}`), // no body; a scale that is not the column's
		image(5, 1, `{"id": 5}`, `{"id": 5, "body": "", "gone": [1, 2], "price": null, "we\"ird.né": "null"}`),
		image(6, 1, `{"id": "six"}`, `{"id": 6, "body": "x"}`),                  // a key that does not follow from the image
		image(7, 3, `{"id": 99999999999999999999}`, ``),                         // a key that its column cannot hold
		image(9, 1, `{"id": 9}`, `{"body": "renamed key column", "old id": 9}`), // the image does not know the key's name
	}
	for _, limits := range []rowGroupLimits{{rows: 1000, bytes: 1 << 20}, {rows: 1, bytes: 1 << 20}, {rows: 3, bytes: 1 << 20}, {rows: 9, bytes: 1}} {
		f, _, _ := store(t, &testLayout, rows, limits)
		ordinals := []uint32{0, 1, 2, 3, 4, 5, 6, 7}
		got, err := f.rows(t.Context(), ordinals, false)
		if err != nil {
			t.Fatal(err)
		}
		keys, err := f.rows(t.Context(), ordinals, true)
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range rows {
			if got[i].Seq != want.Seq || got[i].Op != want.Op || string(got[i].PK) != string(want.PK) || members(t, got[i].Image) != members(t, want.Image) {
				t.Errorf("row %d: %d %d %s %s, want %d %d %s %s", i, got[i].Seq, got[i].Op, got[i].PK, got[i].Image, want.Seq, want.Op, want.PK, want.Image)
			}
			if (got[i].Image == nil) != (want.Image == nil) || string(keys[i].PK) != string(want.PK) || keys[i].Image != nil {
				t.Errorf("row %d: key alone %s %s", i, keys[i].PK, keys[i].Image)
			}
		}
	}
}

// members is an object in an order that does not depend on how it was written.
func members(t *testing.T, object []byte) string {
	t.Helper()
	if object == nil {
		return ""
	}
	var all []string
	if err := eachMember(object, func(key, value []byte) error {
		all = append(all, string(key)+"="+string(value))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return strings.Join(all, ";")
}

func TestAnyRowsOfAFileCanBeReadByOrdinal(t *testing.T) {
	t.Parallel()
	var rows []mirrorRow
	for i := range 5000 {
		body := "null"
		if i%7 != 0 {
			body = fmt.Sprintf(`"%d %s"`, i, strings.Repeat("x", i%300))
		}
		rows = append(rows, image(i+1, 1, fmt.Sprintf(`{"id": %d}`, i), fmt.Sprintf(`{"id": %d, "body": %s, "price": %d.25, "we\"ird.né": [%d]}`, i, body, i, i)))
	}
	f, _, _ := store(t, &testLayout, rows, rowGroupLimits{rows: 1700, bytes: 1 << 30})
	rapid.Check(t, func(rt *rapid.T) {
		ordinals := slices.Sorted(slices.Values(rapid.SliceOfNDistinct(rapid.Uint32Range(0, 4999), 0, 60, rapid.ID[uint32]).Draw(rt, "ordinals")))
		if rapid.Bool().Draw(rt, "range") && len(ordinals) > 1 {
			from, to := ordinals[0], ordinals[1]
			for ordinals = nil; from <= to; from++ {
				ordinals = append(ordinals, from)
			}
		}
		got, err := f.rows(t.Context(), ordinals, false)
		if err != nil {
			rt.Fatal(err)
		}
		for i, ordinal := range ordinals {
			if want := rows[ordinal]; got[i].Seq != want.Seq || members(t, got[i].Image) != members(t, want.Image) {
				rt.Fatalf("row %d: %s, want %s", ordinal, got[i].Image, want.Image)
			}
		}
	})
}

// TestNumbersOfAnySizeComeBack fills columns whose values hardly ever repeat, and which are therefore kept as differences: from
// one end of the type to the other, with gaps, over several batches, pages and row groups.
func TestNumbersOfAnySizeComeBack(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	l := testLayout
	l.columns = append(slices.Clone(l.columns), column{Name: "n", Number: 9, Kind: kindInt4}, column{Name: "at", Number: 10, Kind: kindTimestamp})
	value := func(bits int) string {
		switch random.IntN(8) {
		case 0:
			return "null"
		case 1:
			return fmt.Sprint(int64(math.MinInt64) >> (64 - bits))
		case 2:
			return fmt.Sprint(int64(math.MaxInt64) >> (64 - bits))
		}
		return fmt.Sprint(int64(random.Uint64()) >> (64 - bits) >> random.IntN(bits))
	}
	var rows []mirrorRow
	for i := range 40_000 {
		id, n := value(64), value(32)
		if i > 15_000 && i < 30_000 {
			n = "null"
		}
		rows = append(rows, image(i+1, 1, fmt.Sprintf(`{"id": %s}`, id), fmt.Sprintf(`{"n": %s, "id": %s, "body": "%s"}`, n, id, value(60))))
	}
	f, _, _ := store(t, &l, rows, rowGroupLimits{rows: 25_000, bytes: 1 << 30})
	for from := 0; from < len(rows); from += 1000 {
		ordinals := make([]uint32, 1000)
		for i := range ordinals {
			ordinals[i] = uint32(from + i)
		}
		got, err := f.rows(t.Context(), ordinals, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if want := rows[from+i]; members(t, got[i].Image) != members(t, want.Image) || string(got[i].PK) != string(want.PK) {
				t.Fatalf("row %d: %s, want %s", from+i, got[i].Image, want.Image)
			}
		}
	}
}

// TestNullsAfterNumbers has a column of differences end at every place where a page might, with nothing but nulls behind it.
func TestNullsAfterNumbers(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	for _, last := range []int{batchSize, pageRows, 2 * pageRows, sampleTimes * batchSize, 17 << 10, 18 << 10, 20 << 10} {
		var rows []mirrorRow
		for i := range 22 << 10 {
			id := "null"
			if i < last {
				id = fmt.Sprint(random.Int64())
			}
			rows = append(rows, image(i+1, 1, fmt.Sprintf(`{"id": %s}`, id), fmt.Sprintf(`{"id": %s}`, id)))
		}
		f, _, _ := store(t, &testLayout, rows, rowGroupLimits{rows: 1 << 20, bytes: 1 << 30})
		for _, i := range []int{0, last - 1, last, len(rows) - 1} {
			got, err := f.rows(t.Context(), []uint32{uint32(i)}, false)
			if err != nil || members(t, got[0].Image) != members(t, rows[i].Image) {
				t.Fatalf("%d numbers: row %d: %v, %v", last, i, got, err)
			}
		}
	}
}

func TestTheWriterRefusesRowsThatCannotBeRight(t *testing.T) {
	t.Parallel()
	good := image(5, 1, `{"id": 1}`, `{"id": 1}`)
	for name, row := range map[string]mirrorRow{
		"a seq that does not ascend": image(5, 1, `{"id": 2}`, `{"id": 2}`),
		"an unknown op":              image(6, 4, `{"id": 2}`, `{"id": 2}`),
		"no image":                   image(6, 1, `{"id": 2}`, ``),
		"an image that is no object": image(6, 1, `{"id": 2}`, `[1]`),
		"a broken image":             image(6, 1, `{"id": 2}`, `{"id": `),
		"no key":                     image(6, 1, `{}`, `{"id": 2}`),
		"another key":                image(6, 1, `{"x": 2}`, `{"id": 2}`),
		"a broken key":               image(6, 3, `{"id": 2`, ``),
	} {
		w, err := newSegmentWriter(&bytes.Buffer{}, &testLayout, rowGroupLimits{rows: 10, bytes: 1000})
		if err != nil {
			t.Fatal(err)
		}
		first := good
		if err := w.add(&first); err != nil {
			t.Fatal(err)
		}
		if err := w.add(&row); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestFilesCarryPageIndexBloomFilterAndFieldIDs(t *testing.T) {
	t.Parallel()
	f, b, want := store(t, &testLayout, []mirrorRow{image(1, 1, `{"id": 2}`, `{"id": 2}`), image(2, 1, `{"id": 1}`, `{"id": 1}`)}, rowGroupLimits{rows: 10, bytes: 1000})
	chunk, err := f.footer.RowGroup(0).ColumnChunk(systemColumns)
	if err != nil {
		t.Fatal(err)
	}
	if chunk.BloomFilterOffset() <= 0 {
		t.Error("no Bloom filter on the key")
	}
	if err := f.with(t.Context(), func(r *file.Reader) error {
		index, err := r.GetPageIndexReader().RowGroup(0)
		if err != nil {
			return err
		}
		offsets, err := index.GetOffsetIndex(colSeq)
		if offsets == nil {
			t.Error("no page index")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for i := range f.layout.columns {
		if id := f.footer.Schema.Column(systemColumns + i).SchemaNode().FieldID(); id != int32(f.layout.columns[i].Number) {
			t.Errorf("column %d has field id %d", i, id)
		}
	}
	if _, err := file.OpenParquetFile(b.base+"/"+want.object, false); err != nil {
		t.Error(err)
	}
}

func TestDamageIsNoticedWhereverItIs(t *testing.T) {
	t.Parallel()
	rows := []mirrorRow{image(1, 1, `{"id": 1}`, `{"id": 1, "body": "abc"}`), image(2, 3, `{"id": 2}`, ``)}
	_, b, want := store(t, &testLayout, rows, rowGroupLimits{rows: 10, bytes: 1000})
	data, err := b.GetRange(t.Context(), want.object, "", 0, want.size)
	if err != nil {
		t.Fatal(err)
	}
	for i := range data {
		damaged := slices.Clone(data)
		damaged[i] ^= 0x40
		replace(t, b, want.object, damaged)
		if _, err := openSegment(t.Context(), b, want); !IsCorrupt(err) {
			t.Fatalf("byte %d: %v", i, err)
		}
		// Even if the checksum were right for it, damage must not take the process down.
		trusting := want
		sum := sha256.Sum256(damaged)
		trusting.sha256 = sum[:]
		if f, err := openSegment(t.Context(), b, trusting); err == nil {
			_, _ = f.rows(t.Context(), []uint32{0, 1}, false)
		}
	}
	for n := range data {
		replace(t, b, want.object, data[:n])
		if _, err := openSegment(t.Context(), b, want); !IsCorrupt(err) {
			t.Fatalf("truncated at %d: %v", n, err)
		}
	}
}

// replace overwrites an object in place, as decay does.
func replace(t *testing.T, b *LocalBucket, key string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(b.base, key), data, 0o600); err != nil {
		t.Fatal(err)
	}
}
