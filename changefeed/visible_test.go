package changefeed

import (
	"testing"
)

func TestSnapshotShowsWhatHadEnded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		snapshot string
		xid      uint32
		want     bool
	}{
		{"10:20:12,15", 9, true},
		{"10:20:12,15", 12, false},
		{"10:20:12,15", 13, true},
		{"10:20:12,15", 15, false},
		{"10:20:12,15", 20, false},
		{"10:20:12,15", 21, false},
		{"10:10:", 9, true},
		{"10:10:", 10, false},
		// after a wraparound: the upper half is 1
		{"4294967306:4294967316:4294967310", 13, true},
		{"4294967306:4294967316:4294967310", 14, false},
		{"4294967306:4294967316:4294967310", 4294967295, true},
		{"4294967306:4294967316:4294967310", 30, false},
		// just before it, a transaction after it has begun meanwhile
		{"4294967290:4294967294:4294967292", 3, false},
		{"4294967290:4294967294:4294967292", 4294967292, false},
		{"4294967290:4294967294:4294967292", 4294967293, true},
	} {
		s, err := parseSnapshot(c.snapshot)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.shows(c.xid); got != c.want {
			t.Errorf("%s shows %d: %v, want %v", c.snapshot, c.xid, got, c.want)
		}
	}
	for _, bad := range []string{"", "10", "10:20", "10::", "10:20:a", "10:20:1:2", "-1:2:"} {
		if s, err := parseSnapshot(bad); err == nil {
			t.Errorf("parseSnapshot(%q) = %v, want an error", bad, s)
		}
	}
}
