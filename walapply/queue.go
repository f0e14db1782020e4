package walapply

import (
	"context"
	"sync"
	"time"
)

// queue hands messages from the receiver to the apply loop, one goroutine on each side. It is lossless: a full queue makes
// the receiver wait.
type queue struct {
	limit int
	// filled has a token when take has something to tell, drained when put may go on, wanted when rest is over.
	filled, drained, wanted chan struct{}

	mu     sync.Mutex
	items  []message
	bytes  int
	hungry bool         // see want
	oldest commitRecord // of the first source transaction that begins in items; zero if none does
	err    error
}

func newQueue(limit int) *queue {
	return &queue{limit: limit, filled: make(chan struct{}, 1), drained: make(chan struct{}, 1), wanted: make(chan struct{}, 1)}
}

// put appends messages. It waits while the queue holds limit bytes or more, so it exceeds the limit by what one call adds.
func (q *queue) put(ctx context.Context, items []message) error {
	for {
		q.mu.Lock()
		if q.bytes < q.limit {
			for i := range items {
				q.bytes += items[i].bytes
				if items[i].kind == messageBegin && q.oldest.none() {
					q.oldest = commitRecord{items[i].lsn, items[i].time}
				}
			}
			q.items = append(q.items, items...)
			q.hungry = false
			q.mu.Unlock()
			signal(q.filled)
			return nil
		}
		q.mu.Unlock()
		select {
		case <-q.drained:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// close says that nothing comes any more, and why. What is in the queue can still be taken.
func (q *queue) close(err error) {
	q.mu.Lock()
	q.err = err
	q.mu.Unlock()
	signal(q.filled)
}

// take empties the queue without waiting. reuse is a former result that is not needed any more. Once the queue is empty
// and closed, it returns the error of close.
func (q *queue) take(reuse []message) ([]message, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items, q.bytes, q.oldest = reuse[:0], 0, commitRecord{}
	signal(q.drained)
	if len(items) == 0 {
		return items, q.err
	}
	return items, nil
}

// want says that the caller of take has nothing else to do until something comes.
func (q *queue) want() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.hungry = len(q.items) == 0
	if q.hungry {
		signal(q.wanted)
	}
}

// rest waits for a while, but no longer than until what comes next is wanted at once.
func (q *queue) rest(ctx context.Context, while time.Duration) {
	q.mu.Lock()
	hungry := q.hungry
	if !hungry {
		select {
		case <-q.wanted: // of an earlier time
		default:
		}
	}
	q.mu.Unlock()
	if hungry {
		return
	}
	timer := time.NewTimer(while)
	defer timer.Stop()
	select {
	case <-q.wanted:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// empty says whether take would return nothing.
func (q *queue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items) == 0
}

// waiting is the commit of the first source transaction that begins in the queue; zero if none does.
func (q *queue) waiting() commitRecord {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.oldest
}

// signal leaves a token in c unless one is there.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
