package cold_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

var (
	benchRows     = flag.Int("cold.rows", 1_000_000, "rows of each table of BenchmarkCold")
	benchSegments = flag.String("cold.segments", "1,10,100", "into how many segments they are flushed, one run for each number")
)

const (
	narrow = "id bigint PRIMARY KEY, room integer, author text, body text, sent timestamptz, edited boolean"
	// narrowRows are messages of a chat: few authors, bodies of 20 to 120 characters that do not repeat.
	narrowRows = `INSERT INTO narrow SELECT i, i % 500, 'user-' || (i::bigint * 7919) % 2000,
		left(md5(i::text) || ' ' || md5((i * 3)::text) || ' ' || md5((i * 5)::text) || md5((i * 7)::text), 20 + i % 100), timestamptz '2026-01-01' + i * interval '37 s', i % 20 = 0 FROM generate_series(1, $1::int) i`
)

// wide is a table of 50 columns of the common types, and its rows.
func wide() (definition, rows string) {
	columns, values := []string{"id bigint PRIMARY KEY"}, []string{"i"}
	for c := range 49 {
		typ, value := "", ""
		switch c % 7 {
		case 0:
			typ, value = "integer", fmt.Sprintf("(i * %d) %% 100000", c+1)
		case 1:
			typ, value = "text", fmt.Sprintf("'value ' || (i * %d) %% 5000", c+1)
		case 2:
			typ, value = "numeric(12,2)", fmt.Sprintf("((i * %d) %% 1000000)::numeric / 100", c+1)
		case 3:
			typ, value = "timestamptz", fmt.Sprintf("timestamptz '2026-01-01' + i * interval '%d s'", c+1)
		case 4:
			typ, value = "boolean", fmt.Sprintf("i %% %d = 0", c+2)
		case 5:
			typ, value = "double precision", fmt.Sprintf("i * 0.%d::float8", c+1)
		case 6:
			typ, value = "text", fmt.Sprintf("CASE WHEN i %% 4 > 0 THEN left(md5((i + %d)::text), 12) END", c)
		}
		columns, values = append(columns, fmt.Sprintf("c%d %s", c, typ)), append(values, value)
	}
	return strings.Join(columns, ", "), "INSERT INTO wide SELECT " + strings.Join(values, ", ") + " FROM generate_series(1, $1::int) i"
}

// BenchmarkCold measures flushes, sizes and reading. `make bench-cold` runs it once; what it prints is for docs/benchmarks.md.
func BenchmarkCold(b *testing.B) {
	wideDefinition, wideRows := wide()
	for _, kind := range []struct{ name, definition, rows, random string }{{"narrow", narrow, narrowRows, "body"}, {"wide", wideDefinition, wideRows, "COLUMNS('^c(6|13|20|27|34|41|48)$')"}} {
		for n := range strings.SplitSeq(*benchSegments, ",") {
			segments, err := strconv.Atoi(n)
			ok(b, err)
			b.Run(fmt.Sprintf("%s/%d", kind.name, segments), func(b *testing.B) {
				f := newFixture(b, nil)
				f.ctx = context.Background()
				tab := f.manage(kind.name, kind.definition, fmt.Sprintf("max_rows_per_file = %d", (*benchRows+segments-1)/segments))
				f.exec(kind.rows, *benchRows)
				tab.capture("true")
				f.exec("CHECKPOINT")
				f.exec("VACUUM ANALYZE koldstore." + kind.name + "__cl")
				var mirrorBytes int64
				ok(b, f.pool.QueryRow(f.ctx, "SELECT pg_total_relation_size(mirror_oid) FROM koldstore.managed_table WHERE table_oid = $1", tab.oid).Scan(&mirrorBytes))
				debug.FreeOSMemory()
				resetPeak()
				before := peakMB()
				begin, own, server := time.Now(), ownCPU(), f.serverCPU()
				tab.mustFlush()
				took := time.Since(begin).Seconds()
				own, server = ownCPU()-own, f.serverCPU()-server
				peak := peakMB()
				f.exec("VACUUM koldstore." + kind.name + "__cl") // as autovacuum does soon
				cfg := coldstore.DefaultConfig()
				cfg.NoCompaction = true
				bucket, err := coldstore.OpenLocalBucket(f.folder)
				ok(b, err)
				f.openStore(bucket, cfg)
				_, err = f.store.RunJobs(f.ctx) // shrinks the mirror
				ok(b, err)
				var size, catalog, hot, hotIndexes int64
				ok(b, f.pool.QueryRow(f.ctx, `SELECT (SELECT sum(size_bytes) FROM koldstore.segment WHERE state = 'active'), pg_total_relation_size('koldstore.segment'),
					pg_total_relation_size(mirror_oid), pg_indexes_size(mirror_oid) FROM koldstore.managed_table WHERE table_oid = $1`, tab.oid).Scan(&size, &catalog, &hot, &hotIndexes))
				duck := duckSize(b, duckDB(b), tab, "*")
				random := int64(0)
				for _, columns := range []string{kind.random, "_ks_hash"} {
					random += duckSize(b, duckDB(b), tab, columns)
				}
				fmt.Printf("flush %-7s %3d segments: %7.0f rows/s %6.1f MB/s (mirror), CPU %.1f + %.1f µs/row (koldproxy, server), peak RSS %4.0f MB (%.0f before), %6.1f bytes/row, DuckDB %6.1f, ratio %.3f, hot+cold %.1f%% of the mirror (bytes/row: before %.1f, catalog %.1f, emptied mirror %.1f, its indexes %.1f; random texts and key hashes alone, as DuckDB writes them, %.1f, which are %.1f%%)\n",
					kind.name, segments, float64(*benchRows)/took, float64(mirrorBytes)/took/1e6, own*1e6/float64(*benchRows), server*1e6/float64(*benchRows), peak, before, float64(size)/float64(*benchRows), float64(duck)/float64(*benchRows),
					float64(size)/float64(duck), 100*float64(size+catalog+hot)/float64(mirrorBytes),
					float64(mirrorBytes)/float64(*benchRows), float64(catalog)/float64(*benchRows), float64(hot)/float64(*benchRows), float64(hotIndexes)/float64(*benchRows),
					float64(random)/float64(*benchRows), 100*float64(random)/float64(mirrorBytes))
				tab.reading("all alive")
				for _, round := range []struct{ state, condition string }{{"half changed", "id % 2 = 0"}, {"most changed", "id % 10 > 0"}} {
					if kind.name == "narrow" {
						tab.capture(round.condition)
						tab.mustFlush()
						tab.reading(round.state)
					}
				}
			})
		}
	}
}

// duckSize is how large DuckDB's own file of some columns of the same rows is. That of random texts and of key hashes shows what no file
// can be smaller than by much.
func duckSize(b *testing.B, db *sql.DB, tab *table, columns string) int64 {
	b.Helper()
	name := filepath.Join(b.TempDir(), "duck.parquet")
	_, err := db.ExecContext(tab.ctx, fmt.Sprintf("COPY (SELECT %s FROM read_parquet(%s)) TO '%s' (FORMAT parquet, COMPRESSION zstd)", columns, list(tab.files()), name))
	ok(b, err)
	info, err := os.Stat(name)
	ok(b, err)
	return info.Size()
}

// reading measures a drain of all cold rows and pages at random places, straight from the store, with the segments that PostgreSQL would name
// for each; what PostgreSQL and the proxy add is not in it. DuckDB reads the same pages from the same files, and the rows that are dead as
// well, which it does not know of.
func (t *table) reading(state string) {
	infos, err := t.store.Segments(t.ctx, t.oid)
	ok(t, err)
	dead, rows := int64(0), int64(0)
	for i := range infos {
		dead, rows = dead+infos[i].Dead, rows+infos[i].Rows
	}
	read := func(after koldproxy.Seq) coldstore.Page { return t.page(needed(infos, after, pageLimit), after) }
	random := func(i int) koldproxy.Seq {
		k := (i * 7919) % len(infos)
		return infos[k].MinSeq + koldproxy.Seq(int64(i)*104729)%(infos[k].MaxSeq-infos[k].MinSeq+1)
	}
	const pages = 200
	bucket, err := coldstore.OpenLocalBucket(t.folder)
	ok(t, err)
	t.openStore(bucket, coldstore.DefaultConfig()) // nothing is open or decoded
	own := ownCPU()
	new50, new99 := percentiles(pages, func(i int) { read(random(i)) })
	newCPU := (ownCPU() - own) * 1e3 / pages
	drained, begin, own := 0, time.Now(), ownCPU()
	for after := koldproxy.Seq(0); after < infos[len(infos)-1].MaxSeq; {
		page := read(after)
		drained, after = drained+len(page.Rows), page.Through
	}
	drain := float64(drained) / time.Since(begin).Seconds()
	own = (ownCPU() - own) * 1e6 / float64(drained)
	p50, p99 := percentiles(pages, func(i int) { read(random(i)) })
	db, files := duckDB(t), list(t.files())
	duck50, duck99 := percentiles(20, func(i int) {
		rows, err := db.QueryContext(t.ctx, fmt.Sprintf("SELECT * FROM read_parquet(%s) WHERE _ks_seq > %d ORDER BY _ks_seq LIMIT %d", files, random(i), pageLimit))
		ok(t, err)
		for rows.Next() {
		}
		ok(t, rows.Err())
		ok(t, rows.Close())
	})
	fmt.Printf("  %-12s %4d segments, %2.0f %% dead: drain %7.0f rows/s (CPU %.1f µs/row), page of %d at random: p50 %5.1f ms, p99 %5.1f ms (before the drain %5.1f, %5.1f, CPU %.1f ms); DuckDB p50 %5.1f ms, p99 %5.1f ms\n", state, len(infos),
		100*float64(dead)/float64(rows), drain, own, pageLimit, p50, p99, new50, new99, newCPU, duck50, duck99)
}

const pageLimit = 1000

// page reads the rows above a position from the segments that were named for it.
func (t *table) page(segments []uuid.UUID, after koldproxy.Seq) coldstore.Page {
	t.Helper()
	page, err := t.store.Page(t.ctx, coldstore.PageRequest{Table: t.oid, Segments: segments, Mode: coldstore.ModeForward, After: after, Limit: pageLimit})
	ok(t, err)
	return page
}

// needed are the segments that koldstore.segments_for names for a page.
func needed(infos []coldstore.SegmentInfo, after koldproxy.Seq, limit int64) (ids []uuid.UUID) {
	before := int64(0) // rows of the segments in front that are surely above the position
	for _, s := range infos {
		if s.MaxSeq <= after || before >= limit {
			continue
		}
		ids = append(ids, s.ID)
		if s.MinSeq > after {
			before += s.Rows - s.Dead
		}
	}
	return ids
}

// percentiles are the median and the 99th of how long fn takes, in milliseconds.
func percentiles(n int, fn func(i int)) (p50, p99 float64) {
	times := make([]time.Duration, n)
	for i := range times {
		begin := time.Now()
		fn(i)
		times[i] = time.Since(begin)
	}
	slices.Sort(times)
	return times[n/2].Seconds() * 1000, times[n*99/100].Seconds() * 1000
}

// ownCPU is how many seconds of processor time this process has had.
func ownCPU() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// serverCPU is how many seconds the database's backends have had that are there now; 0 where the system does not say.
func (f *fixture) serverCPU() (seconds float64) {
	rows, err := f.pool.Query(f.ctx, "SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
	ok(f, err)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	ok(f, err)
	for _, pid := range pids {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, rest, _ := strings.Cut(string(stat), ") ")
		if fields := strings.Fields(rest); len(fields) > 12 {
			user, _ := strconv.ParseFloat(fields[11], 64)
			system, _ := strconv.ParseFloat(fields[12], 64)
			seconds += (user + system) / 100 // clock ticks
		}
	}
	return seconds
}

// resetPeak makes the kernel count the peak of memory anew.
func resetPeak() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0o600) }

// peakMB is the most memory that this process has had since, or 0 where the system does not say.
func peakMB() float64 {
	status, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kb, _ := strconv.ParseFloat(strings.Fields(rest + " 0")[0], 64)
	return kb / 1024
}

// BenchmarkSmallFlushes measures what a flush of 1000 new rows costs beside so many that are in cold storage already, whose key hashes it is
// compared with: by a leader that has them in memory, and by one that has to read them from the catalog.
func BenchmarkSmallFlushes(b *testing.B) {
	f := newFixture(b, nil)
	f.ctx = context.Background()
	tab := f.manage("narrow", narrow, "")
	const few, times = 1000, 10
	have := 0
	for _, want := range []int{*benchRows, 4 * *benchRows} {
		f.exec(strings.Replace(narrowRows, "generate_series(1, $1::int)", "generate_series($1::int, $2::int)", 1), have+1, want)
		tab.capture(fmt.Sprintf("id > %d", have))
		tab.mustFlush()
		have = want
		for _, restart := range []bool{false, true} {
			own, server := 0.0, 0.0
			for range times {
				f.exec(strings.Replace(narrowRows, "generate_series(1, $1::int)", "generate_series($1::int, $2::int)", 1), have+1, have+few)
				tab.capture(fmt.Sprintf("id > %d", have))
				have += few
				if restart {
					bucket, err := coldstore.OpenLocalBucket(f.folder)
					ok(b, err)
					f.openStore(bucket, coldstore.DefaultConfig())
				}
				ownBefore, serverBefore := ownCPU(), f.serverCPU()
				tab.mustFlush()
				own, server = own+ownCPU()-ownBefore, server+f.serverCPU()-serverBefore
			}
			fmt.Printf("flush of %d rows beside %8d, hashes in memory %-5t: CPU %5.1f + %5.1f ms (koldproxy, server)\n", few, have, !restart, own*1e3/times, server*1e3/times)
		}
	}
}
