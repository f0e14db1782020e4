package walapply

import (
	"context"
	"testing"
	"time"
)

func TestLongestRest(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	for _, c := range []struct {
		name  string
		took  time.Duration
		bytes int
		want  time.Duration
	}{
		{"a pace of a full rest in ten milliseconds", 10 * time.Millisecond, calmBytes, 10 * time.Millisecond},
		{"a tenth of that pace", 10 * time.Millisecond, calmBytes / 10, 100 * time.Millisecond},
		{"as fast as the server can", time.Millisecond, 2 * calmBytes, time.Millisecond / 2},
		{"nothing came", time.Second, 0, calmBytes * time.Second},
		{"no rest before, and after a long silence", 1 << 62, 1, calmBytes * time.Second},
	} {
		r := receiver{restedAt: begun.Add(-c.took), came: c.bytes}
		got := r.longestRest(begun)
		if diff := (got - c.want).Abs(); diff > c.want/1000 {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		if r.came != 0 || !r.restedAt.Equal(begun) {
			t.Errorf("%s: the pace is measured from %v with %d bytes", c.name, r.restedAt, r.came)
		}
	}
}

// A rest may be long, and ends at once when something is wanted.
func TestRestUntilWanted(t *testing.T) {
	t.Parallel()
	q := newQueue(1)
	q.wantAt(time.Now().Add(time.Hour))
	rested := make(chan struct{})
	go func() {
		defer close(rested)
		q.rest(context.Background(), time.Millisecond, time.Hour)
	}()
	q.want()
	select {
	case <-rested:
	case <-time.After(time.Minute):
		t.Fatal("the rest goes on though something is wanted")
	}
	q.rest(context.Background(), time.Millisecond, time.Hour) // nothing came: it is still wanted
	if err := q.put(context.Background(), make([]message, 1)); err != nil {
		t.Fatal(err)
	}
	q.rest(context.Background(), time.Millisecond, 2*time.Millisecond) // no longer than the pace allows
}
