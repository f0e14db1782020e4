package walapply

import (
	"sync"
	"time"

	"github.com/koldproxy/koldproxy"
)

// commitRecord is where and when a source transaction was committed.
type commitRecord struct {
	lsn koldproxy.LSN // where the record begins
	at  time.Time
}

func (c commitRecord) none() bool { return c.at.IsZero() }

// lag knows since when something is waiting to be applied. All methods may be called from any goroutine.
type lag struct {
	mu     sync.Mutex
	inHand commitRecord // the oldest that the apply loop has taken and not finished; zero if there is none
	queue  *queue       // of the session that streams; nil while none does
	// silent is since when this instance leads without streaming; zero while it streams or does not lead. What is committed
	// meanwhile is not known here, and is no older than that.
	silent time.Time
}

// take notes that the apply loop has begun with a source transaction.
func (l *lag) take(c commitRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inHand.none() {
		l.inHand = c
	}
}

// finish notes that the apply loop has nothing in hand any more but rest, which may be zero.
func (l *lag) finish(rest commitRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inHand = rest
}

// stream notes that a session streams into q what was not applied at a position. What an earlier session had in hand comes again, unless
// it was applied after all.
func (l *lag) stream(q *queue, applied koldproxy.LSN) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue, l.silent = q, time.Time{}
	if l.inHand.lsn < applied {
		l.inHand = commitRecord{}
	}
}

// stop notes that no session streams, though this instance leads. The oldest that is known to be behind stays it.
func (l *lag) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queue != nil && l.inHand.none() {
		l.inHand = l.queue.waiting()
	}
	l.queue = nil
	if l.silent.IsZero() {
		l.silent = time.Now()
	}
}

// forget notes that this instance does not lead.
func (l *lag) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inHand, l.queue, l.silent = commitRecord{}, nil, time.Time{}
}

// age is that of the oldest commit that is known not to be applied, or how long this instance has been leading without streaming; 0
// when nothing is behind.
func (l *lag) age() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.inHand
	if oldest.none() && l.queue != nil {
		oldest = l.queue.waiting()
	}
	since := oldest.at
	if oldest.none() {
		since = l.silent
	}
	if since.IsZero() {
		return 0
	}
	return max(time.Since(since), 0) // clocks differ
}
