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
	benchRows     = flag.Int("cold.rows", 200_000, "rows of each table of BenchmarkCold")
	benchSegments = flag.String("cold.segments", "1,10,100", "into how many segments they are flushed, one run for each number")
)

const (
	narrow = "id bigint PRIMARY KEY, room integer, author text, body text, sent timestamptz, edited boolean"
	// narrowRows are messages of a chat: few authors, bodies of 20 to 120 characters that do not repeat.
	narrowRows = `INSERT INTO narrow SELECT i, i % 500, 'user-' || (i * 7919) % 2000,
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
	for _, kind := range []struct{ name, definition, rows string }{{"narrow", narrow, narrowRows}, {"wide", wideDefinition, wideRows}} {
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
				var size, raw int64
				ok(b, f.pool.QueryRow(f.ctx, "SELECT sum(size_bytes), sum(octet_length(key_hashes)) FROM koldstore.segment WHERE state = 'active'").Scan(&size, &raw))
				duck := duckSize(b, duckDB(b), tab)
				fmt.Printf("flush %-7s %3d segments: %7.0f rows/s %6.1f MB/s (mirror), CPU %.1f + %.1f µs/row (koldproxy, server), peak RSS %4.0f MB (%.0f before), %6.1f bytes/row, DuckDB %6.1f, ratio %.3f, hot+cold %.1f%% of the mirror\n",
					kind.name, segments, float64(*benchRows)/took, float64(mirrorBytes)/took/1e6, own*1e6/float64(*benchRows), server*1e6/float64(*benchRows), peak, before, float64(size)/float64(*benchRows), float64(duck)/float64(*benchRows),
					float64(size)/float64(duck), 100*float64(size+raw)/float64(mirrorBytes))
				tab.reading("all alive")
				if kind.name == "narrow" {
					f.exec("UPDATE narrow SET edited = NOT edited WHERE id % 2 = 0")
					tab.capture("id % 2 = 0")
					tab.mustFlush()
					tab.reading("half dead")
				}
			})
		}
	}
}

// duckSize is how large DuckDB's own file of the same rows is, all columns included.
func duckSize(b *testing.B, db *sql.DB, tab *table) int64 {
	b.Helper()
	name := filepath.Join(b.TempDir(), "duck.parquet")
	_, err := db.ExecContext(tab.ctx, fmt.Sprintf("COPY (SELECT * FROM read_parquet(%s)) TO '%s' (FORMAT parquet, COMPRESSION zstd)", list(tab.files()), name))
	ok(b, err)
	info, err := os.Stat(name)
	ok(b, err)
	return info.Size()
}

// reading measures a drain of all cold rows and pages at random places, straight from the store: what PostgreSQL and the proxy add is not
// in it.
func (t *table) reading(state string) {
	infos, err := t.store.Segments(t.ctx, t.oid)
	ok(t, err)
	ids := make([]uuid.UUID, len(infos))
	for i := range infos {
		ids[i] = infos[i].ID
	}
	rows, begin := 0, time.Now()
	for after, complete := koldproxy.Seq(0), false; !complete; {
		page, err := t.store.Page(t.ctx, coldstore.PageRequest{Table: t.oid, Segments: ids, Mode: coldstore.ModeForward, After: after, Limit: 1000})
		ok(t, err)
		rows, after, complete = rows+len(page.Rows), page.Through, page.Complete
	}
	drain := float64(rows) / time.Since(begin).Seconds()
	var times []time.Duration
	for i := range 200 {
		k := (i * 7919) % len(infos)
		after := infos[k].MinSeq + koldproxy.Seq(int64(i)*104729)%(infos[k].MaxSeq-infos[k].MinSeq+1)
		begin := time.Now()
		_, err := t.store.Page(t.ctx, coldstore.PageRequest{Table: t.oid, Segments: ids[k:], Mode: coldstore.ModeForward, After: after, Limit: 1000})
		ok(t, err)
		times = append(times, time.Since(begin))
	}
	slices.Sort(times)
	fmt.Printf("  %-30s drain %7.0f rows/s, random cold page of 1000: p50 %5.1f ms, p99 %5.1f ms (%d segments)\n", state, drain,
		times[len(times)/2].Seconds()*1000, times[len(times)*99/100].Seconds()*1000, len(infos))
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
