package coldstore

import (
	"context"
	"slices"

	"github.com/koldproxy/koldproxy"
)

// prefetcher notices who reads a table from page to page, and decodes what comes next while the page before is on its way. One batch at a
// time is decoded like that, whoever it is for; what is not read after all costs its decoding and is forgotten by the cache.
type prefetcher struct {
	ends  [64]pageEnd // where pages ended lately
	at    int
	key   cacheKey      // of the batch at hand
	ended chan struct{} // closed when it is decoded; nil if there is none
	stop  context.CancelFunc
}

// pageEnd is a position that a reader would go on from.
type pageEnd struct {
	table uint32
	seq   koldproxy.Seq
}

// readsOn says whether a position is one where another page has ended.
func (s *Store) readsOn(table uint32, from koldproxy.Seq) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.prefetch.ends[:], pageEnd{table, from})
}

// endsAt notes where a page ends.
func (s *Store) endsAt(table uint32, to koldproxy.Seq) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.prefetch
	p.ends[p.at] = pageEnd{table, to}
	p.at = (p.at + 1) % len(p.ends)
}

// fetchAhead decodes the batch with a row of a segment, or the one behind it, into the cache, unless both are there or another one is at
// hand.
func (s *Store) fetchAhead(ctx context.Context, segment *liveSegment, ordinal uint32) {
	number := int(ordinal / batchRows)
	for s.cache.get(cacheKey{segment.id, number}) != nil {
		if number++; number > int(ordinal/batchRows)+1 || int64(number)*batchRows >= segment.rows {
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prefetch.ended != nil || s.closed {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it outlives the call
	ended := make(chan struct{})
	s.prefetch.key, s.prefetch.ended, s.prefetch.stop = cacheKey{segment.id, number}, ended, cancel
	ahead := *segment
	go func() {
		defer close(ended)
		defer cancel()
		_, _ = s.decodeBatch(ctx, &ahead, number) // whoever wants it sees what is wrong
		s.mu.Lock()
		defer s.mu.Unlock()
		s.prefetch.ended = nil
	}()
}

// fetched waits for a batch that is being decoded ahead, and gives it if that has worked.
func (s *Store) fetched(ctx context.Context, key cacheKey) decodedBatch {
	s.mu.Lock()
	ended := s.prefetch.ended
	if s.prefetch.key != key {
		ended = nil
	}
	s.mu.Unlock()
	if ended == nil {
		return nil
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
	decoded, _ := s.cache.get(key).(decodedBatch)
	return decoded
}

// endPrefetch waits until nothing is decoded ahead any more, and sees to it that nothing is from now on.
func (s *Store) endPrefetch() {
	s.mu.Lock()
	s.closed = true
	ended, stop := s.prefetch.ended, s.prefetch.stop
	s.mu.Unlock()
	if ended != nil {
		stop()
		<-ended
	}
}
