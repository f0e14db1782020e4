package statuspage

import (
	"fmt"
	"slices"
	"time"
)

// sample is what is kept of one moment.
type sample struct {
	at          time.Time
	lagBytes    int64
	retained    int64
	rowsApplied int64
	events      map[string]int64 // by qualified stream name
}

// history is the recent past of one database, oldest first: a ring that forgets what is older than its capacity. It is not
// safe for concurrent use.
type history struct {
	capacity int
	samples  []sample
}

func (h *history) add(s sample) {
	if len(h.samples) == h.capacity {
		copy(h.samples, h.samples[1:])
		h.samples = h.samples[:h.capacity-1]
	}
	h.samples = append(h.samples, s)
}

// clone is a copy that the caller may keep.
func (h history) clone() history {
	return history{capacity: h.capacity, samples: append([]sample(nil), h.samples...)}
}

// Lag is how far the applier was behind, in bytes of write-ahead log.
func (h history) Lag() []float64 {
	return h.series(func(s sample) float64 { return float64(s.lagBytes) })
}

// Retained is how much of the write-ahead log the slot held back, in bytes.
func (h history) Retained() []float64 {
	return h.series(func(s sample) float64 { return float64(s.retained) })
}

func (h history) series(value func(sample) float64) []float64 {
	out := make([]float64, len(h.samples))
	for i, s := range h.samples {
		out[i] = value(s)
	}
	return out
}

// Rows is the number of applied row changes a second between neighbouring samples.
func (h history) Rows() []float64 {
	return h.rates(func(s sample) (int64, bool) { return s.rowsApplied, true })
}

// StreamEvents is the number of events a second that a stream got between neighbouring samples.
func (h history) StreamEvents(stream string) []float64 {
	return h.rates(func(s sample) (int64, bool) { n, ok := s.events[stream]; return n, ok })
}

// rates turns a counter into rates. A counter that goes back has begun anew and counts from zero; a sample that does not know
// the counter gives no rate.
func (h history) rates(counter func(sample) (int64, bool)) []float64 {
	var out []float64
	for i := 1; i < len(h.samples); i++ {
		before, after := h.samples[i-1], h.samples[i]
		from, known := counter(before)
		to, ok := counter(after)
		seconds := after.at.Sub(before.at).Seconds()
		if !ok || seconds <= 0 {
			continue
		}
		if !known || to < from {
			from = 0
			if !known {
				from = to
			}
		}
		out = append(out, float64(to-from)/seconds)
	}
	return out
}

// Span says how much of the past there is.
func (h history) Span() string {
	if len(h.samples) < 2 {
		return "just begun"
	}
	d := h.samples[len(h.samples)-1].at.Sub(h.samples[0].at).Round(time.Second)
	if d < 2*time.Minute {
		return fmt.Sprintf("last %d s", int(d.Seconds()))
	}
	return fmt.Sprintf("last %d min", int(d.Minutes()))
}

// top is the largest value of a series, 0 when there is none.
func top(series []float64) float64 {
	if len(series) == 0 {
		return 0
	}
	return slices.Max(series)
}

// last is the newest value of a series, 0 when there is none.
func last(series []float64) float64 {
	if len(series) == 0 {
		return 0
	}
	return series[len(series)-1]
}
