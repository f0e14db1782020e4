package koldproxy_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/koldproxy/koldproxy"
)

func TestSeqHoldsMillisecondsAndACounter(t *testing.T) {
	t.Parallel()
	at := time.Date(2025, 3, 1, 12, 30, 0, 123_456_789, time.UTC)
	seq := koldproxy.SeqAt(at)
	if want := at.Truncate(time.Millisecond); !seq.Time().Equal(want) {
		t.Errorf("the time part is %v, want %v", seq.Time(), want)
	}
	if seq.Counter() != 0 {
		t.Errorf("the first position of a millisecond has counter %d", seq.Counter())
	}
	if got := (seq + 5).Counter(); got != 5 {
		t.Errorf("five later the counter is %d", got)
	}
	if (seq + 1<<22).Millis() != seq.Millis()+1 {
		t.Error("a full counter does not go on in the next millisecond")
	}
}

func TestSeqEpoch(t *testing.T) {
	t.Parallel()
	epoch := time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)
	if got := koldproxy.SeqAt(epoch); got != 0 {
		t.Errorf("the epoch is position %d", got)
	}
	if got := koldproxy.SeqAt(epoch.Add(-time.Hour)); got != 0 {
		t.Errorf("a time before the epoch is position %d", got)
	}
	if got := koldproxy.Seq(0).Time(); !got.Equal(epoch) {
		t.Errorf("position 0 is at %v", got)
	}
}

// TestSequenceNeverRepeats: whatever the clock does, and across restarts that know the watermark only, positions go up.
func TestSequenceNeverRepeats(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now := time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)
		sequence := koldproxy.NewSequence(koldproxy.Seq(rapid.Int64Range(0, 1<<60).Draw(t, "watermark")))
		last := sequence.Watermark()
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(-int64(time.Hour), int64(time.Hour)).Draw(t, "clock step")))
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				sequence = koldproxy.NewSequence(sequence.Watermark())
			case 1:
				raised := koldproxy.Seq(rapid.Int64Range(0, 1<<60).Draw(t, "raise"))
				sequence.Raise(raised)
				if sequence.Watermark() < raised || sequence.Watermark() < last {
					t.Fatalf("raised to %d, the watermark is %d", raised, sequence.Watermark())
				}
				last = sequence.Watermark()
			default:
				n := rapid.Int64Range(1, 1<<23).Draw(t, "n")
				first := sequence.Reserve(n, now)
				if first <= last {
					t.Fatalf("position %d follows %d", first, last)
				}
				if first < koldproxy.SeqAt(now) {
					t.Fatalf("position %d is behind the clock, %d", first, koldproxy.SeqAt(now))
				}
				last = first + koldproxy.Seq(n) - 1
				if sequence.Watermark() != last {
					t.Fatalf("the watermark is %d after %d positions from %d", sequence.Watermark(), n, first)
				}
			}
		}
	})
}

// FuzzEventID: ids have a fixed width and sort as bytes the way their positions sort as numbers.
func FuzzEventID(f *testing.F) {
	f.Add(int64(0), uint64(0), int64(1), uint64(1))
	f.Add(int64(1)<<61, ^uint64(0), int64(1)<<22, uint64(7))
	f.Fuzz(func(t *testing.T, a int64, lsnA uint64, b int64, lsnB uint64) {
		const maxSeq = 1<<63 - 1
		seqA, seqB := koldproxy.Seq(a&maxSeq), koldproxy.Seq(b&maxSeq)
		idA, idB := koldproxy.EventID(seqA, koldproxy.LSN(lsnA)), koldproxy.EventID(seqB, koldproxy.LSN(lsnB))
		if len(idA) != koldproxy.EventIDLen || len(idB) != koldproxy.EventIDLen {
			t.Fatalf("lengths of %q and %q", idA, idB)
		}
		if !koldproxy.IsEventID(idA) || !koldproxy.IsEventID(idB) {
			t.Errorf("%q or %q is no event id", idA, idB)
		}
		if seqA != seqB && (seqA < seqB) != (idA < idB) {
			t.Errorf("%d and %d sort otherwise than %q and %q", seqA, seqB, idA, idB)
		}
	})
}

func TestIsEventID(t *testing.T) {
	t.Parallel()
	const id = "00001764000000000-0000000001-00000000deadbeef"
	if !koldproxy.IsEventID(id) {
		t.Errorf("%q is no event id", id)
	}
	for _, s := range []string{
		"", "earliest", id[1:], id + "0", strings.Repeat("f", len(id)), strings.Repeat("-", len(id)), strings.ToUpper(id),
		strings.Replace(id, "-", "0", 1), strings.Replace(id, "1", "a", 1), " " + id[1:],
	} {
		if koldproxy.IsEventID(s) {
			t.Errorf("%q is an event id", s)
		}
	}
}
