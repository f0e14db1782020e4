package coldstore

import (
	"testing"
	"time"

	"github.com/RoaringBitmap/roaring/v2"
	"pgregory.net/rapid"
)

func TestHowManyRowsAreDue(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ excess, minFlush, maxPerFile, want int64 }{
		// The reference: a limit of 10000 and chunks of 1000.
		{505, 1000, 100_000, 0},
		{1000, 1000, 100_000, 1000},
		{1250, 1000, 100_000, 1000},
		{1500, 1000, 100_000, 1500},
		{1999, 1000, 100_000, 1500},
		{0, 1000, 100_000, 0},
		{-5, 1, 1, 0},
		{7, 1, 100_000, 7},
		{150, 1000, 100, 100}, // a full file is worth it
		{2500, 1000, 100, 2500},
		{3, 3, 10, 3},
		{5, 3, 10, 5},
	} {
		if got := dueRows(c.excess, c.minFlush, c.maxPerFile); got != c.want {
			t.Errorf("excess %d, min %d, file %d: %d, want %d", c.excess, c.minFlush, c.maxPerFile, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		excess, minFlush := rapid.Int64Range(0, 1e6).Draw(t, "excess"), rapid.Int64Range(1, 1e4).Draw(t, "min")
		maxPerFile := rapid.Int64Range(1, 1e5).Draw(t, "max")
		n := dueRows(excess, minFlush, maxPerFile)
		if n < 0 || n > excess || n == 0 && excess >= min(minFlush, maxPerFile) {
			t.Fatalf("%d of %d", n, excess)
		}
	})
}

func TestDeadRowsAreKnownAsOfEachGeneration(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var (
			d     deadRows
			now   = time.UnixMilli(1_700_000_000_000)
			want  = map[int64]*roaring.Bitmap{0: roaring.New()}
			times = map[int64]time.Time{}
			all   = roaring.New()
		)
		last := rapid.Int64Range(1, 12).Draw(t, "generations")
		for g := int64(1); g <= last; g++ {
			now = now.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "minutes")) * time.Minute)
			died := roaring.BitmapOf(rapid.SliceOfN(rapid.Uint32Range(0, 200), 1, 20).Draw(t, "died")...)
			d = d.with(g, died, now, now.Add(-time.Hour))
			all.Or(died)
			want[g], times[g] = all.Clone(), now
			encoded, err := d.encode()
			if err != nil {
				t.Fatal(err)
			}
			if d, err = decodeDead(encoded); err != nil {
				t.Fatal(err)
			}
		}
		for g, rows := range want {
			got, err := d.asOf(g)
			// What was true within the last hour must be known; what is older may be, and is never wrong.
			recent := g == last || now.Sub(times[g+1]) <= time.Hour && g > 0
			if err != nil && recent || err == nil && !got.Equals(rows) {
				t.Fatalf("generation %d of %d: %v %v, want %v", g, last, got, err, rows)
			}
		}
		if !d.all().Equals(all) {
			t.Fatal("not all")
		}
	})
}

func FuzzDecodeDead(f *testing.F) {
	encoded, err := deadRows{}.with(3, roaring.BitmapOf(1, 2, 70_000), time.UnixMilli(1), time.UnixMilli(0)).encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(encoded)
	f.Add([]byte{})
	f.Add([]byte{2})
	f.Add(encoded[:len(encoded)-1])
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := decodeDead(data)
		if err != nil {
			return
		}
		again, err := d.encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decodeDead(again); err != nil || !back.all().Equals(d.all()) {
			t.Fatalf("%v: %v, %v", d, back, err)
		}
	})
}
