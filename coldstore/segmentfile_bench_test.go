package coldstore

import (
	"bytes"
	"crypto/md5"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy"
)

// The tables of `make bench-cold`, without PostgreSQL: what a file costs to write and to read.

func narrowTable() (*layout, func(i int) string) {
	l := &layout{table: 1, name: "narrow", key: []string{"id"}, columns: []column{
		{Name: "id", Number: 1, Kind: kindInt8},
		{Name: "room", Number: 2, Kind: kindInt4},
		{Name: "author", Number: 3, Kind: kindText},
		{Name: "body", Number: 4, Kind: kindText},
		{Name: "sent", Number: 5, Kind: kindTimestampTZ},
		{Name: "edited", Number: 6, Kind: kindBool},
	}}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return l, func(i int) string {
		body := (hash(i) + " " + hash(3*i) + " " + hash(5*i) + hash(7*i))[:20+i%100]
		return fmt.Sprintf(`{"id": %d, "body": "%s", "room": %d, "sent": "%s+00:00", "author": "user-%d", "edited": %t}`,
			i, body, i%500, start.Add(time.Duration(i)*37*time.Second).Format("2006-01-02T15:04:05"), i*7919%2000, i%20 == 0)
	}
}

func hash(i int) string {
	sum := md5.Sum([]byte(fmt.Sprint(i)))
	return hex.EncodeToString(sum[:])
}

func wideTable() (*layout, func(i int) string) {
	l := &layout{table: 2, name: "wide", key: []string{"id"}, columns: []column{{Name: "id", Number: 1, Kind: kindInt8}}}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	values := []func(i int) string{func(i int) string { return fmt.Sprint(i) }}
	for c := range 49 {
		col := column{Name: fmt.Sprintf("c%d", c), Number: int16(c + 2)}
		var value func(i int) string
		switch c % 7 {
		case 0:
			col.Kind, value = kindInt4, func(i int) string { return fmt.Sprint(i * (c + 1) % 100000) }
		case 1:
			col.Kind, value = kindText, func(i int) string { return fmt.Sprintf(`"value %d"`, i*(c+1)%5000) }
		case 2:
			col.Kind, col.Precision, col.Scale = kindDecimal, 12, 2
			value = func(i int) string { n := i * (c + 1) % 1000000; return fmt.Sprintf("%d.%02d", n/100, n%100) }
		case 3:
			col.Kind, value = kindTimestampTZ, func(i int) string {
				return `"` + start.Add(time.Duration(i*(c+1))*time.Second).Format("2006-01-02T15:04:05") + `+00:00"`
			}
		case 4:
			col.Kind, value = kindBool, func(i int) string { return fmt.Sprint(i%(c+2) == 0) }
		case 5:
			factor, err := strconv.ParseFloat(fmt.Sprintf("0.%d", c+1), 64)
			if err != nil {
				panic(err)
			}
			col.Kind, value = kindFloat8, func(i int) string { return string(formatFloat[float64](64)(nil, float64(i)*factor)) }
		case 6:
			col.Kind, value = kindText, func(i int) string {
				if i%4 == 0 {
					return "null"
				}
				return `"` + hash(i + c)[:12] + `"`
			}
		}
		l.columns, values = append(l.columns, col), append(values, value)
	}
	order := make([]int, len(l.columns))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return compareNames(l.columns[a].Name, l.columns[b].Name) })
	return l, func(i int) string {
		var b objectWriter
		for _, k := range order {
			b.add(appendString(nil, l.columns[k].Name), []byte(values[k](i)))
		}
		return string(b.finish())
	}
}

func benchRows(image func(i int) string, n int) []mirrorRow {
	rows := make([]mirrorRow, n)
	for i := range rows {
		h := sha256.Sum256(fmt.Append(nil, i))
		rows[i] = mirrorRow{
			Row:  Row{Seq: koldproxy.Seq(1<<40 + i), Op: koldproxy.OpInsert, PK: fmt.Appendf(nil, `{"id": %d}`, i+1), Image: []byte(image(i + 1))},
			hash: int64(h[0]) | int64(h[1])<<8 | int64(h[2])<<16 | int64(h[3])<<24 | int64(h[4])<<32 | int64(h[5])<<40 | int64(h[6])<<48 | int64(h[7])<<56,
		}
	}
	return rows
}

var benchLimits = rowGroupLimits{rows: DefaultConfig().RowGroupRows, bytes: DefaultConfig().RowGroupBytes}

var benchTables = []struct {
	name  string
	table func() (*layout, func(i int) string)
}{{"narrow", narrowTable}, {"wide", wideTable}}

func BenchmarkWriteFile(b *testing.B) {
	for _, t := range benchTables {
		l, image := t.table()
		rows := benchRows(image, 50_000)
		for _, n := range []int{1000, 10_000, 50_000} {
			b.Run(fmt.Sprintf("%s/%d", t.name, n), func(b *testing.B) {
				size := int64(0)
				began := processorTime()
				for b.Loop() {
					w, err := newSegmentWriter(countBytes{&size}, l, benchLimits)
					if err != nil {
						b.Fatal(err)
					}
					for i := range n {
						if err := w.add(&rows[i]); err != nil {
							b.Fatal(err)
						}
					}
					if _, err := w.close(); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric((processorTime()-began)*1e6/float64(b.N*n), "cpu-µs/row")
				b.ReportMetric(float64(size)/float64(b.N*n), "bytes/row")
			})
		}
	}
}

func BenchmarkReadPage(b *testing.B) {
	for _, t := range benchTables {
		l, image := t.table()
		rows := benchRows(image, 50_000)
		var buf bytes.Buffer
		w, err := newSegmentWriter(&buf, l, benchLimits)
		if err != nil {
			b.Fatal(err)
		}
		for i := range rows {
			if err := w.add(&rows[i]); err != nil {
				b.Fatal(err)
			}
		}
		sum, err := w.close()
		if err != nil {
			b.Fatal(err)
		}
		hash := sha256.Sum256(buf.Bytes())
		want := expected{object: "1/s.parquet", size: int64(buf.Len()), sha256: hash[:], rows: sum.rows, minSeq: sum.minSeq, maxSeq: sum.maxSeq}
		bucket, err := OpenLocalBucket(b.TempDir())
		if err != nil {
			b.Fatal(err)
		}
		if err := bucket.PutIfAbsent(b.Context(), want.object, io.Reader(&buf), want.size); err != nil {
			b.Fatal(err)
		}
		b.Run(t.name+"/open", func(b *testing.B) {
			began := processorTime()
			for b.Loop() {
				if _, err := openSegment(b.Context(), bucket, want); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((processorTime()-began)*1e3/float64(b.N), "cpu-ms/op")
		})
		f, err := openSegment(b.Context(), bucket, want)
		if err != nil {
			b.Fatal(err)
		}
		for _, every := range []int{1, 2, 10} {
			b.Run(fmt.Sprintf("%s/%d", t.name, every), func(b *testing.B) {
				at := 0
				began := processorTime()
				for b.Loop() {
					at = (at + 7919) % (len(rows) - 1024*every)
					ordinals := make([]uint32, 0, 1024)
					for i := range 1024 {
						ordinals = append(ordinals, uint32(at+i*every))
					}
					if _, err := f.rows(b.Context(), ordinals, false); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric((processorTime()-began)*1e3/float64(b.N), "cpu-ms/op")
			})
		}
	}
}

// processorTime is how many seconds of processor time this process has had: on a machine that others use too, the only time that means
// anything.
func processorTime() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
