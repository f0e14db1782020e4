package mqtt

import (
	"context"
	"errors"
	"sync"
	"time"
)

// errorTTL is how long a failed question keeps others from being asked.
const errorTTL = 100 * time.Millisecond

// Rights asks who may receive what and remembers the answers for a short time. Its methods may run concurrently.
type Rights struct {
	auth    Auth
	ttl     time.Duration
	timeout time.Duration
	places  chan struct{} // one element for each question under way

	mu      sync.Mutex
	answers map[rightKey]*answer
	sweepAt int // number of answers at which old ones are looked for
}

// NewRights makes Rights that ask auth, within the bounds that cfg has for it.
func NewRights(cfg Config, auth Auth) *Rights {
	return &Rights{
		auth: auth, ttl: cfg.RightsTTL, timeout: cfg.RightsTimeout,
		places: make(chan struct{}, cfg.RightsConcurrency), answers: make(map[rightKey]*answer),
	}
}

type rightKey struct{ user, topic string }

// answer is a question and, once done is closed, what came of it. Its age counts from the moment it was asked, since that
// is when PostgreSQL may have looked.
type answer struct {
	asked   time.Time
	done    chan struct{}
	allowed bool
	err     error
}

// MaySubscribe tells whether a role may receive a topic, as PostgreSQL said at most ttl ago. Questions about the same are asked
// once. An error means that the question could not be asked.
func (r *Rights) MaySubscribe(ctx context.Context, user, topic string) (bool, error) {
	key := rightKey{user, topic}
	for {
		a, mine := r.find(key)
		if mine {
			a.allowed, a.err = r.ask(ctx, key)
			close(a.done)
			return a.allowed, a.err
		}
		select {
		case <-a.done:
		case <-ctx.Done():
			return false, ctx.Err()
		}
		if errors.Is(a.err, context.Canceled) && ctx.Err() == nil {
			r.forget(key, a) // the one who asked has gone, we have not
			continue
		}
		return a.allowed, a.err
	}
}

// find returns the answer to use or to wait for; mine is true if the caller has to get it.
func (r *Rights) find(key rightKey) (a *answer, mine bool) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if a = r.answers[key]; a != nil && r.fresh(a, now) {
		return a, false
	}
	a = &answer{asked: now, done: make(chan struct{})}
	if len(r.answers) >= r.sweepAt {
		for k, old := range r.answers {
			if !r.fresh(old, now) {
				delete(r.answers, k)
			}
		}
		r.sweepAt = max(1024, 2*len(r.answers))
	}
	r.answers[key] = a
	return a, true
}

// fresh tells whether an answer may be used, or is still on its way.
func (r *Rights) fresh(a *answer, now time.Time) bool {
	select {
	case <-a.done:
	default:
		return true
	}
	ttl := r.ttl
	if a.err != nil {
		ttl = min(ttl, errorTTL)
	}
	return now.Sub(a.asked) < ttl
}

// forget removes an answer unless another one has taken its place.
func (r *Rights) forget(key rightKey, a *answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.answers[key] == a {
		delete(r.answers, key)
	}
}

func (r *Rights) ask(ctx context.Context, key rightKey) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	select {
	case r.places <- struct{}{}:
		defer func() { <-r.places }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	return r.auth.MaySubscribe(ctx, key.user, key.topic)
}
