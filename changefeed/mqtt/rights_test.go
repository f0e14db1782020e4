package mqtt

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
)

var nopLog = zerolog.Nop()

// scriptedAuth answers as its fields say and counts.
type scriptedAuth struct {
	asked   atomic.Int64
	allowed atomic.Bool
	delay   time.Duration
	err     error
}

func (a *scriptedAuth) Login(context.Context, string, string) error { return nil }

func (a *scriptedAuth) MaySubscribe(ctx context.Context, _, _ string) (bool, error) {
	a.asked.Add(1)
	select {
	case <-time.After(a.delay):
		return a.allowed.Load(), a.err
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

func newRights(auth Auth) *Rights {
	return &Rights{auth: auth, ttl: time.Second, timeout: 3 * time.Second, places: make(chan struct{}, 2), answers: make(map[rightKey]*answer)}
}

func TestRightsAreAskedOnceAndNotUsedForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		auth := &scriptedAuth{delay: 100 * time.Millisecond}
		auth.allowed.Store(true)
		r := newRights(auth)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if ok, err := r.MaySubscribe(t.Context(), "u", "t"); !ok || err != nil {
					t.Errorf("mayRead = %v, %v", ok, err)
				}
			})
		}
		wg.Wait()
		auth.allowed.Store(false)
		time.Sleep(899 * time.Millisecond) // 999 ms after the question
		if ok, _ := r.MaySubscribe(t.Context(), "u", "t"); !ok {
			t.Error("the answer is forgotten before its time")
		}
		time.Sleep(time.Millisecond)
		if ok, _ := r.MaySubscribe(t.Context(), "u", "t"); ok {
			t.Error("an answer is used that was asked for a second ago")
		}
		if n := auth.asked.Load(); n != 2 {
			t.Errorf("asked %d times", n)
		}
	})
}

func TestRightsOutliveTheOneWhoAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		auth := &scriptedAuth{delay: time.Second}
		auth.allowed.Store(true)
		r := newRights(auth)
		asker, leave := context.WithCancel(t.Context())
		go func() { _, _ = r.MaySubscribe(asker, "u", "t") }()
		synctest.Wait()
		done := make(chan bool)
		go func() {
			ok, err := r.MaySubscribe(t.Context(), "u", "t")
			done <- ok && err == nil
		}()
		synctest.Wait()
		leave()
		if !<-done {
			t.Error("the answer went away with the one who asked")
		}
	})
}

func TestRightsThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		auth := &scriptedAuth{err: errors.New("down")}
		auth.allowed.Store(true)
		r := newRights(auth)
		for range 10 { // within errorTTL
			if _, err := r.MaySubscribe(t.Context(), "u", "t"); err == nil {
				t.Error("no error")
			}
		}
		if n := auth.asked.Load(); n != 1 {
			t.Errorf("asked %d times", n)
		}
		time.Sleep(errorTTL)
		auth.err = nil
		if ok, err := r.MaySubscribe(t.Context(), "u", "t"); !ok || err != nil {
			t.Errorf("mayRead = %v, %v", ok, err)
		}
		auth.delay = time.Hour
		if _, err := r.MaySubscribe(t.Context(), "u", "other"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("err = %v", err)
		}
	})
}

func TestRightsAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRights(&scriptedAuth{})
		for i := range 5000 {
			_, _ = r.MaySubscribe(t.Context(), "u", strings.Repeat("t", i%4000))
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(r.answers); n > 1024 {
			t.Errorf("%d answers are kept", n)
		}
	})
}

func TestConfig(t *testing.T) {
	t.Parallel()
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	err := Config{MaxMessageBytes: 1 << 30, WriteTimeout: -1}.Validate()
	for _, name := range []string{"mqtt.max_message_bytes", "mqtt.write_timeout", "mqtt.max_connections", "mqtt.rights_ttl"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not reported: %v", name, err)
		}
	}
	if _, err := New(Config{}, nil, nopLog, nil); err == nil {
		t.Error("New takes an empty Config")
	}
}
