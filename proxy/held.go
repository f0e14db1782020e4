package proxy

import "sync/atomic"

const (
	// heldSessions is how many sessions may hold as much as each of them may (Config.HoldBytes) at the same time.
	heldSessions = 16
	// heldFreely is what a session may hold whatever the others do, so that a few that hold much do not take it from the many
	// that hold little.
	heldFreely = 64 << 10
)

// heldBudget bounds what the sessions of a Server hold in memory together. It may be used concurrently. Nil is without bounds.
type heldBudget struct {
	limit int64
	used  atomic.Int64
}

// take asks for n bytes more.
func (b *heldBudget) take(n int) bool {
	if b == nil || b.used.Add(int64(n)) <= b.limit {
		return true
	}
	b.give(n)
	return false
}

func (b *heldBudget) give(n int) {
	if b != nil {
		b.used.Add(-int64(n))
	}
}

// share is a session's part of what may be held.
type share struct {
	of    *heldBudget
	taken int
}

// afford asks to hold size bytes in all, which are more than before. It is false when all of it is used up.
func (s *share) afford(size int) bool {
	more := size - heldFreely - s.taken
	if more <= 0 {
		return true
	}
	if !s.of.take(more) {
		return false
	}
	s.taken += more
	return true
}

// release gives back everything.
func (s *share) release() {
	s.of.give(s.taken)
	s.taken = 0
}
