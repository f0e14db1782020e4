package coldstore_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/koldproxy/koldproxy/coldstore"
)

var errInjected = errors.New("injected")

// faultKinds arm a fault and return what disarms it and says whether it came.
var faultKinds = map[string]func(f *fixture, n int) (disarm func() (fired bool)){
	"step": func(f *fixture, n int) func() bool {
		left := n
		f.failpoint(func(step string) error {
			if left--; left == 0 {
				return errInjected
			}
			return nil
		})
		return func() bool { f.failpoint(nil); return left <= 0 }
	},
	"bucket": func(f *fixture, n int) func() bool {
		f.bucket.FailAt(n, false)
		return func() bool { fired := !f.bucket.Pending(); f.bucket.FailAt(0, false); return fired }
	},
	"bucket answer": func(f *fixture, n int) func() bool {
		f.bucket.FailAt(n, true)
		return func() bool { fired := !f.bucket.Pending(); f.bucket.FailAt(0, false); return fired }
	},
}

// TestNothingIsLostWhicheverStepFails makes the n-th step of a flush fail, for every n, and the n-th operation on the bucket,
// with and without its effect. After each failure the feed is unchanged, and the next flush makes up for it.
func TestNothingIsLostWhicheverStepFails(t *testing.T) {
	t.Parallel()
	for kind, arm := range faultKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, nil)
			tab := f.messages("max_rows_per_file = 4")
			next := 0
			first, stride := places(t)
			for n := first; ; n += stride {
				// Each round has cold rows, and a flush of two files that supersedes some of them.
				f.exec("UPDATE koldstore.segment SET state = 'deleted', ended_at = now()")
				for part := range 2 {
					for range 4 {
						next++
						tab.put(next%6, fmt.Sprint(next))
					}
					tab.remove(next % 5)
					if part == 0 {
						tab.mustFlush(tab.hot(), (tab.hot()+3)/4)
					}
				}
				want, err := tab.drain(t.Context(), f.store, 5)
				ok(t, err)
				store := f.newStore() // nothing cached, so that reading fails as well
				disarm := arm(f, n)
				r, flushErr := flushOnce(tab, store)
				fired := disarm()
				if got, err := tab.drain(t.Context(), f.store, 5); err != nil || !maps.Equal(got, want) {
					t.Fatalf("fault %d: the feed has changed: %v", n, err)
				}
				if !fired {
					if flushErr != nil || r.Status != "completed" {
						t.Fatalf("without a fault: %+v %v", r, flushErr)
					}
					t.Logf("fewer than %d places to fail", n)
					break
				}
				if flushErr == nil && r.Status == "completed" && tab.hot() > 0 {
					t.Fatalf("fault %d: completed with rows left", n)
				}
				// The next process takes up what is left and completes it.
				for worked := true; worked; {
					worked, err = store.RunJobs(t.Context())
					ok(t, err)
				}
				if r := tab.flush(f.newStore(), true); r.Status != "completed" || tab.hot() != 0 {
					t.Fatalf("fault %d: the next flush: %+v", n, r)
				}
				if got, err := tab.drain(t.Context(), f.store, 5); err != nil || !maps.Equal(got, want) {
					t.Fatalf("fault %d: after the next flush: %v", n, err)
				}
				tab.verified()
				tab.noLeftovers()
			}
		})
	}
}

func flushOnce(tab *table, store *coldstore.Store) (coldstore.Result, error) {
	queued, err := store.Enqueue(tab.t.Context(), tab.oid, true)
	if err != nil {
		return queued, err
	}
	// RunJobs and not Flush: the latter would wait for a job whose end could not be recorded.
	if _, err := store.RunJobs(tab.t.Context()); err != nil {
		return queued, err
	}
	return store.Flush(tab.t.Context(), queued.JobID)
}

// noLeftovers sweeps and compares the bucket with the catalog.
func (tab *table) noLeftovers() {
	tab.t.Helper()
	for worked := true; worked; {
		var err error
		worked, err = tab.store.RunJobs(tab.t.Context())
		ok(tab.t, err)
	}
	objects, err := tab.bucket.List(tab.t.Context(), "")
	ok(tab.t, err)
	known := map[string]bool{}
	for _, s := range tab.segments() {
		known[s.Object] = true
	}
	for _, o := range objects {
		if !known[o.Key] {
			tab.t.Errorf("object %s belongs to no segment", o.Key)
		}
		delete(known, o.Key)
	}
	if len(known) > 0 {
		tab.t.Errorf("segments without objects: %v", known)
	}
	var other int
	if tab.scan("SELECT count(*) FROM koldstore.segment WHERE state <> 'active'", nil, &other); other != 0 {
		tab.t.Errorf("%d segments that are not active are left", other)
	}
}

// places says at which operations a sweep fails: at every one in long tests, otherwise at every third from a random one on,
// so that a few runs meet all.
func places(t *testing.T) (first, stride int) {
	t.Helper()
	if os.Getenv("KOLDPROXY_TEST_LONG") != "" {
		return 1, 1
	}
	first = 1 + rand.IntN(3)
	t.Logf("failing at operation %d and every third from there", first)
	return first, 3
}
