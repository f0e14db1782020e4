package coldstore_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy/coldstore"
)

// TestCopiesOfADatabaseKeepEachOthersObjects has two leaders with one catalog and one bucket, as a server and one that was started
// from its disk would have. While both live neither removes an object; who is left does, after the grace.
func TestCopiesOfADatabaseKeepEachOthersObjects(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := newFixture(t, func(cfg *coldstore.Config) {
		cfg.NoCompaction = true
		cfg.Now = func() time.Time { return now }
	})
	tab := f.messages("")
	tab.put(1, "x")
	tab.mustFlush(1, 1)
	object := filepath.Join(f.folder, tab.segments()[0].Object)
	f.exec("UPDATE koldstore.segment SET state = 'deleted', ended_at = clock_timestamp() - interval '1 day'")

	const grace = time.Hour
	f.cfg.DeleteGrace = grace
	one, other := f.newStore(), f.newStore()
	there := func() bool { _, err := os.Stat(object); return err == nil }
	signs := func() int {
		found, err := filepath.Glob(filepath.Join(f.folder, "presence", "*", "*"))
		ok(t, err)
		return len(found)
	}
	for range 20 { // five times the grace
		f.runJobs(one)
		now = now.Add(grace / 8)
		f.runJobs(other)
		now = now.Add(grace / 8)
		if !there() {
			t.Fatal("an object was removed that the other may read")
		}
	}
	if n := signs(); n > 4 {
		t.Errorf("%d signs of two have gathered", n)
	}
	for range 4 { // the other is silent, but not yet for the grace
		f.runJobs(one)
		now = now.Add(grace / 5)
		if !there() {
			t.Fatal("an object was removed soon after somebody else was seen")
		}
	}
	for range 4 {
		f.runJobs(one)
		now = now.Add(grace / 2)
	}
	if there() {
		t.Error("the object is still there, though nobody else is")
	}
	if n := signs(); n != 1 {
		t.Errorf("%d signs are left of one", n)
	}
}
