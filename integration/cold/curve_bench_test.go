package cold_test

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

var (
	curve     = flag.String("cold.curve", "10,100,1000,5000", "numbers of segments of BenchmarkColdCurve")
	curveRows = flag.Int("cold.curverows", 500, "rows of each of its segments: few, so that a page needs some of them and thousands can be made")
)

// BenchmarkColdCurve measures pages at random places against the number of segments and the share of rows in them that are dead. Pages
// begin in the oldest segments, which all have that share; what has superseded their rows is behind. Naming the segments, which
// koldstore.changes_since does by the catalog, is measured on its own. Nothing is compacted, which would rewrite what is a third dead.
func BenchmarkColdCurve(b *testing.B) {
	for n := range strings.SplitSeq(*curve, ",") {
		segments, err := strconv.Atoi(n)
		ok(b, err)
		b.Run(n, func(b *testing.B) {
			f := newFixture(b, nil)
			f.ctx = context.Background()
			tab := f.manage("narrow", narrow, fmt.Sprintf("max_rows_per_file = %d", *curveRows))
			f.exec(narrowRows, segments**curveRows)
			tab.capture("true")
			f.exec("VACUUM ANALYZE koldstore.narrow__cl")
			tab.mustFlush()
			f.exec("VACUUM ANALYZE koldstore.segment")
			f.exec("UPDATE koldstore.managed_table SET max_rows_per_file = 100000")
			tab.curvePoint(segments)
			for _, condition := range []string{"id % 2 = 1", "id % 2 = 0 AND id % 10 > 0"} { // half, and four tenths more
				tab.capture(condition)
				tab.mustFlush()
				f.exec("VACUUM ANALYZE koldstore.segment")
				tab.curvePoint(segments)
			}
		})
	}
}

// curvePoint measures pages that begin in the first n segments, with a store that has opened nothing yet and with one that has been
// through all of them.
func (t *table) curvePoint(n int) {
	t.Helper()
	infos, err := t.store.Segments(t.ctx, t.oid)
	ok(t, err)
	infos = infos[:n]
	dead, rows := int64(0), int64(0)
	for i := range infos {
		dead, rows = dead+infos[i].Dead, rows+infos[i].Rows
	}
	const pages = 400
	var (
		after [pages]koldproxy.Seq
		named [pages][]uuid.UUID
		got   int
	)
	for i := range after {
		s := &infos[(i*7919)%n]
		after[i] = s.MinSeq + koldproxy.Seq(int64(i)*104729)%(s.MaxSeq-s.MinSeq+1)
	}
	naming50, naming99 := percentiles(pages, func(i int) {
		ok(t, t.pool.QueryRow(t.ctx, "SELECT array_agg(s::uuid ORDER BY n) FROM jsonb_array_elements_text(koldstore.segments_for($1, 'forward', $2, $3)) WITH ORDINALITY e(s, n)", t.oid, after[i], pageLimit).
			Scan(&named[i]))
	})
	read := func(i int) { got += len(t.page(named[i], after[i]).Rows) }
	bucket, err := coldstore.OpenLocalBucket(t.folder)
	ok(t, err)
	t.openStore(bucket, coldstore.DefaultConfig())
	first50, first99 := percentiles(pages, read)
	for i := range infos {
		t.page([]uuid.UUID{infos[i].ID}, infos[i].MaxSeq-1)
	}
	own := ownCPU()
	p50, p99 := percentiles(pages, read)
	own = (ownCPU() - own) * 1e3 / pages
	fmt.Printf("curve: %4d segments of %d rows, %2.0f %% dead: naming them p50 %5.2f ms, p99 %5.2f ms; page of %d p50 %5.2f ms, p99 %5.2f ms, CPU %.2f ms; segments not opened before p50 %5.2f ms, p99 %5.2f ms (%.0f rows a page)\n",
		n, *curveRows, 100*float64(dead)/float64(rows), naming50, naming99, pageLimit, p50, p99, own, first50, first99, float64(got)/(2*pages))
}
