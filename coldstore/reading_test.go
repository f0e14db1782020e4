package coldstore_test

import (
	"context"
	"io"
	"maps"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy/coldstore"
)

// TestDecodedBatchesAreForEveryGeneration reads a table from page to page as it is and as it was before half of its rows changed, in both
// orders: a batch is decoded without the rows that are dead by then, and who read it before they died wants them.
func TestDecodedBatchesAreForEveryGeneration(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	write := func(condition, v string) {
		f.exec("INSERT INTO "+tab.mirror+` SELECT i, $1::bigint + i, 1, jsonb_build_object('id', i, 'v', $2::text) FROM generate_series(1, 6000) i WHERE `+condition, tab.seq, v)
		tab.seq += 6000
	}
	write("true", "old")
	tab.mustFlush(6000, 1)
	before, err := tab.snapshot(t.Context())
	ok(t, err)
	write("i % 2 = 0 OR i BETWEEN 2100 AND 4900", "new")
	tab.mustFlush(4400, 1)
	after, err := tab.snapshot(t.Context())
	ok(t, err)
	want := map[int64]map[string]version{}
	for _, s := range []snapshot{before, after} { // in small pages, by stores that decode single rows
		want[s.generation], err = tab.drainSnapshot(t.Context(), f.newStore(), s, 300)
		ok(t, err)
	}
	if len(want[before.generation]) != 6000 || len(want[after.generation]) != 6000 || maps.Equal(want[before.generation], want[after.generation]) {
		t.Fatalf("%d and %d rows", len(want[before.generation]), len(want[after.generation]))
	}
	for _, order := range [][]snapshot{{before, after, before}, {after, before, after}} {
		store := f.newStore()
		for _, s := range order {
			got, err := tab.drainSnapshot(t.Context(), store, s, 900)
			ok(t, err)
			if !maps.Equal(got, want[s.generation]) {
				t.Errorf("the feed as of generation %d is another one in larger pages", s.generation)
			}
		}
		ok(t, store.Close())
	}
}

// wholeReads counts how often an object is read from end to end.
type wholeReads struct {
	coldstore.Bucket
	n atomic.Int64
}

func (w *wholeReads) Get(ctx context.Context, key string) (io.ReadCloser, coldstore.ObjectInfo, error) {
	w.n.Add(1)
	return w.Bucket.Get(ctx, key)
}

// TestAFileThatHadToGiveWayIsNotVerifiedAgain reads two files in turn, of which only one can be open.
func TestAFileThatHadToGiveWayIsNotVerifiedAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.CacheBytes = 20_000 })
	tab := f.messages("")
	for i := range 2 {
		tab.put(i, "x")
		tab.mustFlush(1, 1)
	}
	reads := &wholeReads{Bucket: f.bucket.Bucket}
	f.bucket.Bucket = reads
	store := f.newStore()
	turn := func() {
		t.Helper()
		for _, id := range tab.ids() {
			page, err := store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: []uuid.UUID{id}, Mode: coldstore.ModeForward, Limit: 1})
			ok(t, err)
			if len(page.Rows) != 1 {
				t.Fatalf("%d rows of segment %s", len(page.Rows), id)
			}
		}
	}
	for range 3 {
		turn()
	}
	if n := reads.n.Load(); n != 2 {
		t.Errorf("two objects were read from end to end %d times", n)
	}
}
