package coldstore_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

// TestDamagedStorageIsKS002 damages one of two segments in every way and reads a page over both: with a store that has
// read it before, and with one that has not.
func TestDamagedStorageIsKS002(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("max_rows_per_file = 50")
	for i := range 100 {
		tab.put(i, strings.Repeat("x", i))
	}
	tab.mustFlush(100, 2)
	// So few rows at a time that none of them is kept: those would be shown without a look at the file.
	want, err := tab.drain(t.Context(), f.store, 10)
	ok(t, err)
	victim := tab.segments()[1]
	name := filepath.Join(f.folder, victim.Object)
	whole, err := os.ReadFile(name)
	ok(t, err)
	restore := func() { write(t, name, string(whole)) }
	flipped := []byte(string(whole))
	flipped[len(flipped)/3] ^= 1
	for _, c := range []struct {
		name    string
		damage  func() error
		corrupt bool
	}{
		{"a flipped bit", func() error { return os.WriteFile(name, flipped, 0o600) }, true},
		{"a missing file", func() error { return os.Remove(name) }, false},
		{"a truncated file", func() error { return os.Truncate(name, int64(len(whole)/2)) }, true},
		{"an empty file", func() error { return os.Truncate(name, 0) }, true},
		{"a folder instead of the file", func() error { return errors.Join(os.Remove(name), os.Mkdir(name, 0o700)) }, false},
		{"no storage at all", func() error { return os.Rename(f.folder, f.folder+"-away") }, false},
	} {
		ok(t, c.damage())
		for when, store := range map[string]*coldstore.Store{"read before": f.store, "fresh": f.newStore()} {
			page, err := store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 1000})
			var client *koldproxy.Error
			if !errors.As(err, &client) || client.Code != koldproxy.CodeColdUnreadable || len(page.Rows) != 0 {
				t.Fatalf("%s, %s: %d rows and %v", c.name, when, len(page.Rows), err)
			}
			if c.name != "no storage at all" && (!strings.Contains(client.Message, victim.ID.String()) || !strings.Contains(client.Message, victim.Object)) {
				t.Errorf("%s: the message does not name the segment: %s", c.name, client.Message)
			}
			if strings.Contains(client.Message+client.Detail+client.Hint, f.folder) {
				t.Errorf("%s: shows the folder: %s %s", c.name, client.Message, client.Detail)
			}
			if coldstore.IsCorrupt(err) != c.corrupt {
				t.Errorf("%s: corrupt is %v: %v", c.name, !c.corrupt, err)
			}
			if c.name == "a missing file" && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", c.name, err)
			}
			// A page that does not need the damaged segment is served.
			if _, err := store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids()[:1], Mode: coldstore.ModeForward, Limit: 10}); err != nil && c.name != "no storage at all" {
				t.Errorf("%s: the other segment: %v", c.name, err)
			}
			report, err := store.Verify(t.Context(), tab.oid)
			if err != nil || report.OK {
				t.Errorf("%s: verify: %+v, %v", c.name, report, err)
			}
		}
		switch c.name {
		case "no storage at all":
			ok(t, os.Rename(f.folder+"-away", f.folder))
		case "a folder instead of the file":
			ok(t, os.Remove(name))
		}
		restore()
		if got, err := tab.drain(t.Context(), f.store, 10); err != nil || len(got) != len(want) {
			t.Fatalf("%s: after restoring: %v", c.name, err)
		}
		tab.verified()
	}
}

// A flush whose keys may be in a damaged segment must not guess: it fails, and the mirror stays.
func TestAFlushOverADamagedSegmentKeepsTheMirror(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.put(1, "a")
	tab.mustFlush(1, 1)
	ok(t, os.Remove(filepath.Join(f.folder, tab.segments()[0].Object)))
	tab.put(1, "b")
	if r := tab.flush(f.newStore(), true); r.Status != "error" || r.Error == nil || !strings.Contains(*r.Error, "KS002") || tab.hot() != 1 {
		t.Errorf("%+v", r)
	}
	tab.put(2, "another key")
	f.exec("DELETE FROM " + tab.mirror + " WHERE id = 1")
	tab.mustFlush(1, 1) // no key of this one is in the damaged segment
}

func TestPagesOfWhatIsNotThere(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.MaxPageBytes = 300 })
	tab := f.messages("")
	for i := range 10 {
		tab.put(i, strings.Repeat("x", 100))
	}
	tab.mustFlush(10, 1)
	for _, c := range []struct {
		req  coldstore.PageRequest
		code string
	}{
		{coldstore.PageRequest{Table: tab.oid, Segments: []uuid.UUID{uuid.New()}, Mode: coldstore.ModeForward, Limit: 1}, koldproxy.CodeColdUnreadable},
		{coldstore.PageRequest{Table: tab.oid + 1, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 1}, koldproxy.CodeColdUnreadable},
		{coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: "sideways", Limit: 1}, koldproxy.CodeInvalidParameter},
		{coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward}, koldproxy.CodeInvalidParameter},
		{coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, After: -1, Limit: 1}, koldproxy.CodeInvalidParameter},
		{coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 10}, "54000"},
		{coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeLast, Limit: 10}, "54000"},
	} {
		_, err := f.store.Page(t.Context(), c.req)
		var client *koldproxy.Error
		if !errors.As(err, &client) || client.Code != c.code {
			t.Errorf("%+v: %v, want %s", c.req, err, c.code)
		}
	}
	tab.put(10, strings.Repeat("x", 1000)) // which is larger than a page, and the only one of its page
	tab.mustFlush(1, 1)
	for _, req := range []coldstore.PageRequest{
		{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, After: tab.seq - 1, Limit: 1},
		{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeLast, Limit: 1},
	} {
		if page, err := f.store.Page(t.Context(), req); err != nil || len(page.Rows) != 1 {
			t.Errorf("%+v of one large row: %d rows, %v", req, len(page.Rows), err)
		}
	}
	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Mode: coldstore.ModeForward, After: 5, Limit: 10})
	if err != nil || !page.Complete || page.Through != 5 || len(page.Rows) != 0 {
		t.Errorf("no segments: %+v, %v", page, err)
	}
}
