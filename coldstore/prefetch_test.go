package coldstore_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

// TestWhoReadsOnFindsTheNextPageDecoded takes the object away once the batch behind the second page is in the cache: the third page is
// there all the same.
func TestWhoReadsOnFindsTheNextPageDecoded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.Registerer = registry })
	tab := f.messages("")
	f.exec("INSERT INTO "+tab.mirror+" SELECT i, $1::bigint + i, 1, jsonb_build_object('id', i, 'v', 'x') FROM generate_series(10001, 15000) i", tab.seq)
	tab.mustFlush(5000, 1)
	cached := func() (bytes float64) {
		families, err := registry.Gather()
		ok(t, err)
		for _, family := range families {
			if family.GetName() == "koldproxy_coldstore_cache_bytes" {
				bytes = family.GetMetric()[0].GetGauge().GetValue()
			}
		}
		return bytes
	}
	after := koldproxy.Seq(0)
	size := 0.0 // of a page in memory
	next := func() int {
		t.Helper()
		page, err := tab.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, After: after, Limit: 1000})
		ok(t, err)
		after, size = page.Through, 0
		for _, r := range page.Rows {
			size += float64(len(r.PK) + len(r.Image))
		}
		return len(page.Rows)
	}
	next()
	first := cached() // the file
	next()
	deadline := time.Now().Add(10 * time.Second)
	// Two batches of 2048 rows, all as long as those of the page: the one that it ends in, and the one behind. The cache counts 64 bytes
	// for a row besides its content.
	want := first + 2*2048*(size/1000+64)
	for cached() < want {
		if time.Now().After(deadline) {
			t.Fatalf("%.0f bytes are cached, want %.0f: nothing was decoded ahead", cached(), want)
		}
		time.Sleep(time.Millisecond)
	}
	for _, s := range tab.segments() {
		ok(t, os.Remove(filepath.Join(f.folder, s.Object)))
	}
	if n := next(); n != 1000 {
		t.Errorf("%d rows", n)
	}
	ok(t, f.store.Close())
}
