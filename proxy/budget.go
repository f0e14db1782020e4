package proxy

import (
	"fmt"
	"sync/atomic"

	"github.com/koldproxy/koldproxy"
)

const (
	// heldSessions is how many sessions may hold as much as each of them may (Config.HoldBytes) at the same time.
	heldSessions = 16
	// heldFreely is what a session may hold whatever the others do, so that a few that hold much do not take it from the many
	// that hold little.
	heldFreely = 64 << 10
)

// budget bounds what the sessions of a Server hold in memory together. It may be used concurrently. Nil is without bounds.
type budget struct {
	limit int64
	used  atomic.Int64
}

// take asks for n bytes more.
func (b *budget) take(n int) bool {
	if b == nil || b.used.Add(int64(n)) <= b.limit {
		return true
	}
	b.give(n)
	return false
}

func (b *budget) give(n int) {
	if b != nil {
		b.used.Add(-int64(n))
	}
}

// share is a session's part of a budget.
type share struct {
	of    *budget
	taken int
}

// afford asks to hold size bytes in all, which are more than before. It is false when the budget is used up.
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

// shrink gives back what is not needed to hold size bytes.
func (s *share) shrink(size int) {
	if rest := max(0, size-heldFreely); rest < s.taken {
		s.of.give(s.taken - rest)
		s.taken = rest
	}
}

// release gives back everything.
func (s *share) release() {
	s.of.give(s.taken)
	s.taken = 0
}

func sizeOf(pages []page) (size int) {
	for _, p := range pages {
		size += p.size()
	}
	return size
}

// tooManyRows is the error of a statement whose cold rows do not fit into what is left of a budget.
func tooManyRows(b *budget) *koldproxy.Error {
	return koldproxy.Errorf(koldproxy.CodeOutOfMemory, "the cold rows of this statement are too many for koldproxy at the moment").
		WithDetail(fmt.Sprintf("All sessions together may hold %d MB.", b.limit>>20)).
		WithHint("Ask for smaller pages with limit_rows, or again when less is going on. proxy.hold_bytes bounds what is held.")
}
