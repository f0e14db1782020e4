package koldproxy

import (
	"fmt"
	"time"
)

// Seq is a position in the change feed of a table: a 64-bit snowflake, milliseconds since 2024-01-01 UTC in the upper
// 42 bits (the sign bit stays zero) and a counter in the lower 22. Zero is before every change.
type Seq int64

const (
	// SeqEpochMillis is 2024-01-01T00:00:00Z in milliseconds since 1970.
	SeqEpochMillis int64 = 1_704_067_200_000
	seqCounterBits       = 22
	seqCounterMask       = 1<<seqCounterBits - 1
)

// Millis returns the time part in milliseconds since 1970.
func (s Seq) Millis() int64 { return int64(s)>>seqCounterBits + SeqEpochMillis }

// Time returns the time part, in UTC.
func (s Seq) Time() time.Time { return time.UnixMilli(s.Millis()).UTC() }

// Counter returns the counter part.
func (s Seq) Counter() int64 { return int64(s) & seqCounterMask }

// SeqAt returns the first Seq of the millisecond t falls in; times before 2024 give zero.
func SeqAt(t time.Time) Seq {
	ms := t.UnixMilli() - SeqEpochMillis
	if ms < 0 {
		return 0
	}
	return Seq(ms << seqCounterBits)
}

// Sequence hands out strictly increasing positions. It follows the clock while the clock goes forward and goes on
// counting above its watermark when the clock stands still or steps back, so positions never repeat.
//
// A Sequence belongs to one goroutine: the applier of one database.
type Sequence struct {
	watermark Seq
}

// NewSequence continues above watermark, the highest position that was ever handed out for the database.
func NewSequence(watermark Seq) *Sequence { return &Sequence{watermark: watermark} }

// Reserve returns the first of n consecutive positions, all above every position handed out or raised to before.
func (q *Sequence) Reserve(n int64, now time.Time) Seq {
	first := max(SeqAt(now), q.watermark+1)
	q.watermark = first + Seq(n) - 1
	return first
}

// Raise lifts the watermark to at least s.
func (q *Sequence) Raise(s Seq) { q.watermark = max(q.watermark, s) }

// Watermark is the highest position handed out or raised to.
func (q *Sequence) Watermark() Seq { return q.watermark }

// EventIDLen is the length of every event id in bytes.
const EventIDLen = 17 + 1 + 10 + 1 + 16

// EventID is the position of an event in a stream log: the time part of its seq in milliseconds since 1970, the counter
// part, and the source transaction's CommitLSN (see [Change]) in hexadecimal, all of fixed width, so that ids sort in event
// order as bytes. The SQL function koldstore.event_id writes the same text.
func EventID(s Seq, commit LSN) string {
	return fmt.Sprintf("%017d-%010d-%016x", s.Millis(), s.Counter(), uint64(commit))
}

// IsEventID says whether s has the form of an event id. There need not be such an event.
func IsEventID(s string) bool {
	if len(s) != EventIDLen {
		return false
	}
	for i, c := range []byte(s) {
		dash := i == 17 || i == 17+1+10
		digit := '0' <= c && c <= '9' || i > 17+1+10 && 'a' <= c && c <= 'f'
		if dash && c != '-' || !dash && !digit {
			return false
		}
	}
	return true
}
