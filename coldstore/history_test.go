package coldstore_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

// histories bounds the number of histories: each one waits for the disk many times.
func histories() int {
	if os.Getenv("KOLDPROXY_TEST_LONG") != "" {
		return 30
	}
	return 8
}

// TestDrainIsTheLatestStateAfterAnyHistory writes random histories of changes, flushes and compactions and compares the drained feed with
// a map. Snapshots taken on the way must drain to what was true then, however much is flushed and merged in between.
func TestDrainIsTheLatestStateAfterAnyHistory(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.RowGroupRows = 7 })
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		if run++; run > histories() {
			return
		}
		name := fmt.Sprintf("t%d", run)
		tab := f.manage(name, "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", fmt.Sprintf("max_rows_per_file = %d", rapid.IntRange(1, 12).Draw(rt, "file")))
		want := map[string]version{}
		type remembered struct {
			snapshot
			want map[string]version
		}
		var old []remembered
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				id, v := rapid.IntRange(1, 15).Draw(rt, "id"), rapid.SampledFrom([]string{"", "a", `"`, "é"}).Draw(rt, "v")
				tab.put(id, v)
				key := fmt.Sprintf(`{"id": %d}`, id)
				var state version
				f.scan("SELECT seq, op, row_image::text FROM "+tab.mirror+" WHERE id = $1", []any{id}, &state.Seq, &state.Op, &state.Image)
				want[key] = state
			},
			"remove": func(rt *rapid.T) {
				id := rapid.IntRange(1, 15).Draw(rt, "id")
				tab.remove(id)
				want[fmt.Sprintf(`{"id": %d}`, id)] = version{tab.seq, koldproxy.OpDelete, ""}
			},
			"flush": func(*rapid.T) {
				if r := tab.flush(f.store, true); r.Status != "completed" {
					rt.Fatalf("%+v", r)
				}
				if tab.hot() != 0 {
					rt.Fatal("rows left in the mirror")
				}
			},
			"compact": func(rt *rapid.T) {
				_, err := f.store.Compact(t.Context(), tab.oid)
				ok(rt, err)
			},
			"remember": func(*rapid.T) {
				s, err := tab.snapshot(t.Context())
				ok(rt, err)
				old = append(old, remembered{s, maps.Clone(want)})
			},
			"drain": func(rt *rapid.T) {
				limit := rapid.IntRange(1, 20).Draw(rt, "limit")
				got, err := tab.drain(t.Context(), f.store, limit)
				ok(rt, err)
				if !maps.Equal(got, want) {
					rt.Fatalf("drained %v, want %v", got, want)
				}
				for _, o := range old {
					got, err := tab.drainSnapshot(t.Context(), f.store, o.snapshot, limit)
					ok(rt, err)
					if !maps.Equal(got, o.want) {
						rt.Fatalf("as of generation %d: drained %v, want %v", o.generation, got, o.want)
					}
				}
				checkLast(rt, t, tab, limit)
			},
		})
		report, err := f.store.Verify(t.Context(), tab.oid)
		ok(rt, err)
		if !report.OK {
			rt.Fatalf("%+v", report.Problems)
		}
	})
}

// checkLast compares the newest cold rows with the end of all cold rows.
func checkLast(rt *rapid.T, t *testing.T, tab *table, limit int) {
	ids := tab.ids()
	if len(ids) == 0 {
		return
	}
	slices.Reverse(ids) // the order in which segments are named does not matter
	all, err := tab.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: ids, Mode: coldstore.ModeForward, Limit: 1000})
	ok(rt, err)
	last, err := tab.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: ids, Mode: coldstore.ModeLast, Limit: limit})
	ok(rt, err)
	want := all.Rows[max(0, len(all.Rows)-limit):]
	if !slices.EqualFunc(last.Rows, want, func(a, b coldstore.Row) bool { return a.Seq == b.Seq && string(a.Image) == string(b.Image) }) {
		rt.Fatalf("last %d: %v, want %v", limit, last.Rows, want)
	}
	if last.Complete != (len(all.Rows) <= limit) {
		rt.Fatalf("last %d of %d: complete is %v", limit, len(all.Rows), last.Complete)
	}
	// A page read row by row says where it is complete up to, and what it says is true.
	for after := koldproxy.Seq(0); ; {
		page, err := tab.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: ids, Mode: coldstore.ModeForward, After: after, Limit: limit})
		ok(rt, err)
		for _, r := range all.Rows {
			inPage := slices.ContainsFunc(page.Rows, func(p coldstore.Row) bool { return p.Seq == r.Seq })
			if should := r.Seq > after && r.Seq <= page.Through; inPage != should {
				rt.Fatalf("page after %d through %d: row %d in it is %v", after, page.Through, r.Seq, inPage)
			}
		}
		if page.Complete {
			return
		}
		after = page.Through
	}
}
