package statuspage

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRatesOfCounters(t *testing.T) {
	t.Parallel()
	h := history{capacity: 4}
	start := time.Unix(1_000, 0)
	for i, events := range []map[string]int64{{"a": 7}, {"a": 10}, {"a": 4}, {"a": 4, "b": 50}, {"a": 24, "b": 60}} {
		h.add(sample{at: start.Add(time.Duration(i) * 2 * time.Second), rowsApplied: int64(i * i), lagBytes: int64(i), events: events})
	}
	if got := h.Span(); got != "last 6 s" {
		t.Errorf("the samples span %q", got)
	}
	// The first sample is forgotten. Counter a begins anew once; b appears later, and what it had by then is no rate.
	for _, c := range []struct {
		what      string
		got, want []float64
	}{
		{"lag", h.Lag(), []float64{1, 2, 3, 4}},
		{"rows", h.Rows(), []float64{1.5, 2.5, 3.5}},
		{"a", h.StreamEvents("a"), []float64{2, 0, 10}},
		{"b", h.StreamEvents("b"), []float64{0, 5}},
		{"missing", h.StreamEvents("c"), nil},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, c.got, c.want)
		}
	}
}

func TestChartStaysInItsFrame(t *testing.T) {
	t.Parallel()
	if got := chartLine([]float64{0, 5, 10}); got != "0.0 46.0 L120.0 24.0 L240.0 2.0" {
		t.Errorf("line %q", got)
	}
	if got := chartLine([]float64{0, -3, 0}); got != "0.0 46.0 L120.0 46.0 L240.0 46.0" {
		t.Errorf("line of nothing %q", got)
	}
	for _, series := range [][]float64{nil, {3}} {
		if got := string(chart("x", series)); strings.Contains(got, "path") || !strings.Contains(got, "svg") {
			t.Errorf("chart of %v: %s", series, got)
		}
	}
	if got := string(chart(`a"><script>`, []float64{1, 2})); strings.Contains(got, "<script>") {
		t.Errorf("the label is not escaped: %s", got)
	}
}

func TestFormats(t *testing.T) {
	t.Parallel()
	n := int64(5 << 20)
	for _, c := range [][2]string{
		{formatBytes(int64(0)), "0 B"},
		{formatBytes(int64(1023)), "1023 B"},
		{formatBytes(int64(1536)), "1.5 kB"},
		{formatBytes(&n), "5.0 MB"},
		{formatBytes((*int64)(nil)), "0 B"},
		{formatBytes(int64(5_000_000_000_000_000)), "4547 TB"},
		{formatCount(0), "0"},
		{formatCount(-1234), "-1\u202f234"},
		{formatCount(1234567), "1\u202f234\u202f567"},
		{formatRate(0.26), "0.3/s"},
		{formatRate(12345.6), "12\u202f346/s"},
		{formatAgo(0), "now"},
		{formatAgo(90 * time.Minute), "90 min ago"},
		{formatProgress(json.RawMessage(`{"rows": 12000, "segments_written": 2}`)), "rows 12\u202f000 · segments written 2"},
		{formatProgress(json.RawMessage(`null`)), ""},
		{formatRetention("24:00:00"), "24 h"},
		{formatRetention("00:45:00"), "45 min"},
		{formatRetention("01:30:00"), "1 h 30 min"},
		{formatRetention("00:00:05"), "00:00:05"},
		{formatRetention("30 days"), "30 days"},
		{streamLink("a&b", stream{Schema: "../x", Name: `T "q"`}), "/stream?db=a%26b&name=T+%22q%22&schema=..%2Fx"},
	} {
		if c[0] != c[1] {
			t.Errorf("%q, want %q", c[0], c[1])
		}
	}
	if s := (job{Progress: json.RawMessage(`{"rows": 5, "total": 20}`)}).Share(); s != 0.25 {
		t.Errorf("share %g", s)
	}
	if s := (job{Progress: json.RawMessage(`{"rows": 5}`)}).Share(); s != -1 {
		t.Errorf("share without a total %g", s)
	}
}
