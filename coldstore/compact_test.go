package coldstore_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

// flushes makes several small segments that supersede rows of each other.
func (tab *table) flushes(n int) {
	tab.t.Helper()
	for i := range n {
		for k := range 4 {
			tab.put((i*3+k)%9, fmt.Sprintf("%d-%d", i, k))
		}
		tab.remove(i % 3)
		if r := tab.flush(tab.store, true); r.Status != "completed" {
			tab.t.Fatalf("flush: %+v", r)
		}
	}
}

// compactAll compacts until nothing is worth it.
func (tab *table) compactAll(store *coldstore.Store) (steps int) {
	tab.t.Helper()
	for ; ; steps++ {
		worked, err := store.Compact(tab.t.Context(), tab.oid)
		ok(tab.t, err)
		if !worked {
			return steps
		}
	}
}

func TestCompactionKeepsTheFeedAndItsSeqs(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.flushes(8)
	want, err := tab.drain(t.Context(), f.store, 3)
	ok(t, err)
	if steps := tab.compactAll(f.store); steps == 0 {
		t.Fatal("nothing was compacted")
	}
	segments := tab.segments()
	if len(segments) > 3 {
		t.Errorf("%d segments are left of 8", len(segments))
	}
	got, err := tab.drain(t.Context(), f.newStore(), 3)
	ok(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("drained %v, want %v", got, want)
	}
	tab.verified()
	tab.noLeftovers()
}

// TestNothingIsLostWhicheverStepOfACompactionFails makes the n-th step of a compaction fail, for every n, and the n-th operation on the
// bucket, with and without its effect.
func TestNothingIsLostWhicheverStepOfACompactionFails(t *testing.T) {
	t.Parallel()
	for kind, arm := range faultKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, nil)
			tab := f.messages("")
			first, stride := places(t)
			for n := first; ; n += stride {
				f.exec("UPDATE koldstore.segment SET state = 'deleted', ended_at = now() WHERE state = 'active'")
				tab.flushes(4)
				want, err := tab.drain(t.Context(), f.store, 5)
				ok(t, err)
				store := f.newStore() // nothing cached, so that reading fails as well
				disarm := arm(f, n)
				worked, compactErr := store.Compact(t.Context(), tab.oid)
				fired := disarm()
				if got, err := tab.drain(t.Context(), f.newStore(), 5); err != nil || !maps.Equal(got, want) {
					t.Fatalf("fault %d: the feed has changed: %v", n, err)
				}
				if !fired {
					if compactErr != nil || !worked {
						t.Fatalf("without a fault: %v %v", worked, compactErr)
					}
					t.Logf("fewer than %d places to fail", n)
					return
				}
				tab.compactAll(f.newStore())
				if got, err := tab.drain(t.Context(), f.newStore(), 5); err != nil || !maps.Equal(got, want) {
					t.Fatalf("fault %d: after the next compaction: %v", n, err)
				}
				tab.verified()
				tab.noLeftovers()
			}
		})
	}
}

// TestRowsThatDieDuringACompactionStayDead changes rows and flushes them while their older versions are being merged (iceberg 10312).
func TestRowsThatDieDuringACompactionStayDead(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.flushes(4)
	other := f.newStore()
	var want map[string]version
	f.failpoint(func(step string) error {
		if step != "compaction encoded" {
			return nil
		}
		f.failpoint(nil)
		tab.put(1, "newest")
		tab.remove(4)
		if r := tab.flush(other, true); r.Status != "completed" {
			return errors.New("the flush in between failed")
		}
		var err error
		want, err = tab.drain(t.Context(), other, 5)
		return err
	})
	worked, err := f.store.Compact(t.Context(), tab.oid)
	ok(t, err)
	if !worked || want == nil {
		t.Fatal("nothing was compacted, or nothing happened meanwhile")
	}
	got, err := tab.drain(t.Context(), f.store, 5)
	ok(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("drained %v, want %v", got, want)
	}
	if got[`{"id": 4}`].Op != koldproxy.OpDelete {
		t.Errorf("the deleted row is %+v", got[`{"id": 4}`])
	}
	tab.verified()
}

func TestReadersSurviveACompaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.DeleteGrace = time.Hour })
	tab := f.messages("")
	tab.flushes(6)
	s, err := tab.snapshot(t.Context())
	ok(t, err)
	want, err := tab.drainSnapshot(t.Context(), f.store, s, 3)
	ok(t, err)
	tab.compactAll(f.store)
	tab.put(1, "later")
	tab.mustFlush(1, 1)
	f.runJobs(f.store)
	got, err := tab.drainSnapshot(t.Context(), f.newStore(), s, 3)
	ok(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("as of then: %v, want %v", got, want)
	}
}

func TestSegmentsWithoutLiveRowsGoWithoutTheFloor(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	for v := range 2 {
		for id := range 5 {
			tab.put(id, fmt.Sprint(v))
		}
		tab.mustFlush(5, 1)
	}
	want, err := tab.drain(t.Context(), f.store, 3)
	ok(t, err)
	before, _ := tab.floor()
	tab.compactAll(f.store)
	if n := len(tab.segments()); n != 1 {
		t.Errorf("%d segments", n)
	}
	if after, _ := tab.floor(); after != before {
		t.Errorf("the floor went from %d to %d", before, after)
	}
	got, err := tab.drain(t.Context(), f.store, 3)
	ok(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("drained %v, want %v", got, want)
	}
}

// TestForgottenDeletesRaiseTheFloor keeps a consumer that has not seen a delete from never hearing of it (scylla 1745).
func TestForgottenDeletesRaiseTheFloor(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Now = func() time.Time { return now } })
	tab := f.messages("tombstone_retention = '1 hour'")
	tab.put(1, "first")
	cursor := tab.seq
	tab.mustFlush(1, 1)
	tab.remove(1)
	tab.mustFlush(1, 1)
	tab.compactAll(f.store)
	if state, err := tab.drain(t.Context(), f.store, 3); err != nil || state[`{"id": 1}`].Op != koldproxy.OpDelete {
		t.Fatalf("the delete is too young to be forgotten: %v %v", state, err)
	}
	now = now.Add(2 * time.Hour)
	tab.compactAll(f.store)
	state, err := tab.drain(t.Context(), f.store, 3)
	ok(t, err)
	if len(state) != 0 {
		t.Errorf("left: %v", state)
	}
	if floor, _ := tab.floor(); floor != tab.seq || floor <= cursor {
		t.Errorf("the floor is %d, the delete was %d", floor, tab.seq)
	}
	_, err = f.pool.Exec(t.Context(), "SELECT * FROM koldstore.changes_since($1::oid::regclass, $2)", tab.oid, cursor)
	if err == nil || sqlstate(err) != koldproxy.CodeRetentionGap {
		t.Errorf("a cursor from before the delete: %v", err)
	}
	// Without segments the mirror itself forgets.
	tab.put(2, "x")
	tab.remove(2)
	now = now.Add(100 * time.Hour)
	f.runJobs(f.store)
	if floor, _ := tab.floor(); tab.hot() != 0 || floor != tab.seq {
		t.Errorf("%d rows in the mirror, floor %d, want %d", tab.hot(), floor, tab.seq)
	}
}

// TestRowsInFrontOfForgottenDeletesMove reads a feed from its beginning in pages of one row after deletes behind some of its rows were
// forgotten: no cursor of such a reader may be below the floor.
func TestRowsInFrontOfForgottenDeletesMove(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Now = func() time.Time { return now } })
	tab := f.messages("tombstone_retention = '1 hour'")
	for id := range 6 {
		tab.put(id, "stays")
	}
	tab.remove(10)
	tab.put(11, "stays") // without a gap, so it has to move as well
	for id := range 4 {
		tab.remove(12 + id)
	}
	deleted := tab.seq
	tab.mustFlush(12, 1)
	now = now.Add(2 * time.Hour)
	tab.seq = koldproxy.SeqAt(now) // which leaves a gap
	tab.put(20, "later")
	tab.mustFlush(1, 1)
	tab.compactAll(f.store)
	if s := tab.segments(); s[0].Tombstones != 0 || s[0].MinSeq < deleted {
		t.Fatalf("segments: %+v", s)
	}
	if floor, _ := tab.floor(); floor != deleted {
		t.Errorf("the floor is %d, the last delete was %d", floor, deleted)
	}
	tab.pagesFromTheBeginning([]int{0, 1, 2, 3, 4, 5, 11, 20})
	tab.verified()
	var good bool
	f.scan("SELECT (koldstore.verify_table_integrity('messages') ->> 'ok')::boolean", nil, &good)
	if !good {
		t.Error("verify_table_integrity complains")
	}
}

// pagesFromTheBeginning reads a feed in pages of one row, from seq zero on, each from where the one before ended, if the floor lets it.
func (tab *table) pagesFromTheBeginning(want []int) {
	tab.t.Helper()
	var got []int
	for after := koldproxy.Seq(0); ; {
		if floor, _ := tab.floor(); after > 0 && after < floor {
			tab.t.Fatalf("after %v the cursor %d is below the floor %d", got, after, floor)
		}
		page, err := tab.store.Page(tab.t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, After: after, Limit: 1})
		ok(tab.t, err)
		for _, r := range page.Rows {
			var key struct{ ID int }
			ok(tab.t, json.Unmarshal(r.PK, &key))
			got, after = append(got, key.ID), r.Seq
		}
		if page.Complete {
			break
		}
	}
	if !slices.Equal(got, want) {
		tab.t.Errorf("pages have %v, want %v", got, want)
	}
}

// TestDeletesWithoutRoomBehindThemStay: rows in front of them could not move, since the next segment follows at once. Trying is given up, and
// made up for when that segment is merged as well.
func TestDeletesWithoutRoomBehindThemStay(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Now = func() time.Time { return now } })
	tab := f.messages("tombstone_retention = '1 hour'")
	tab.put(1, "stays")
	tab.put(2, "stays")
	tab.remove(3)
	tab.mustFlush(3, 1)
	tab.put(4, "follows at once")
	tab.mustFlush(1, 1)
	floor, _ := tab.floor()
	now = now.Add(2 * time.Hour)
	tab.compactAll(f.store)
	if s := tab.segments(); len(s) != 2 || s[0].Tombstones != 1 {
		t.Fatalf("segments: %+v", s)
	}
	if after, _ := tab.floor(); after != floor {
		t.Errorf("the floor went from %d to %d", floor, after)
	}
	tab.seq = koldproxy.SeqAt(now)
	for id := range 2 {
		tab.put(10+id, "later")
		tab.mustFlush(1, 1)
	}
	tab.compactAll(f.store)
	if s := tab.segments(); len(s) != 1 || s[0].Tombstones != 0 {
		t.Fatalf("segments: %+v", s)
	}
	tab.pagesFromTheBeginning([]int{1, 2, 4, 10, 11})
	tab.verified()
}

// TestTheMirrorForgetsDeletesInFrontOnly: a delete that rows are in front of waits for a flush and a compaction.
func TestTheMirrorForgetsDeletesInFrontOnly(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Now = func() time.Time { return now } })
	tab := f.messages("tombstone_retention = '1 hour'")
	tab.remove(1)
	first := tab.seq
	tab.put(2, "stays")
	tab.remove(3)
	now = now.Add(2 * time.Hour)
	f.runJobs(f.store)
	if floor, _ := tab.floor(); tab.hot() != 2 || floor != first {
		t.Errorf("%d rows in the mirror, floor %d, want 2 and %d", tab.hot(), floor, first)
	}
}

func TestRetentionByBytesKeepsTheNewest(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	for i := range 3 {
		tab.put(i, "x")
		tab.mustFlush(1, 1)
	}
	segments := tab.segments()
	f.exec("UPDATE koldstore.managed_table SET retention_bytes = $2 WHERE table_oid = $1", tab.oid, segments[1].SizeBytes+segments[2].SizeBytes)
	f.runJobs(f.store)
	left := tab.segments()
	if len(left) != 2 || left[0].ID != segments[1].ID {
		t.Errorf("left: %+v", left)
	}
	if floor, _ := tab.floor(); floor != segments[0].MaxSeq {
		t.Errorf("the floor is %d, want %d", floor, segments[0].MaxSeq)
	}
	tab.noLeftovers()
}

func TestADroppedTableLeavesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "x")
	tab.mustFlush(1, 1)
	f.exec("DROP TABLE messages")
	f.runJobs(f.store)
	objects, err := f.bucket.List(t.Context(), "")
	ok(t, err)
	var managed, mirrors, segments int
	f.scan(`SELECT (SELECT count(*) FROM koldstore.managed_table), (SELECT count(*) FROM pg_class WHERE relname = 'messages__cl'), (SELECT count(*) FROM koldstore.segment)`,
		nil, &managed, &mirrors, &segments)
	if len(objects)+managed+mirrors+segments != 0 {
		t.Errorf("left: %v, %d feeds, %d mirrors, %d segments", objects, managed, mirrors, segments)
	}
}

func sqlstate(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}
