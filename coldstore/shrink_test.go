package coldstore_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy/coldstore"
)

// TestMirrorsGiveSpaceBack empties a mirror of many rows but for a few at its end. It keeps its size while somebody uses it and when the
// shrinking fails, and loses nothing.
func TestMirrorsGiveSpaceBack(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.PolicyInterval = time.Millisecond })
	tab := f.messages("max_rows_per_file = 200000")
	const rows = 120_000
	f.exec("INSERT INTO "+tab.mirror+" SELECT i, $1::bigint + i, 1, jsonb_build_object('id', i, 'v', 'x') FROM generate_series(1, 120000) i", tab.seq)
	tab.seq += rows
	tab.mustFlush(rows, 1)
	tab.put(1, "changed")
	tab.put(rows+1, "new")
	size := func() (bytes int64) {
		f.scan("SELECT pg_total_relation_size($1::regclass)", []any{tab.mirror}, &bytes)
		return bytes
	}
	hot := func() (text string) {
		f.scan("SELECT string_agg(m::text, ';' ORDER BY seq) FROM "+tab.mirror+" m", nil, &text)
		return text
	}
	before, want := size(), hot()
	// try lets the store look until it has come to the step, or until it has shrunk the mirror.
	reached := 0
	try := func(enough func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !enough(); {
			if time.Now().After(deadline) {
				t.Fatalf("the mirror has %d bytes, and had %d", size(), before)
			}
			f.exec("VACUUM " + tab.mirror)
			if _, err := f.store.RunJobs(t.Context()); err != nil && !strings.Contains(err.Error(), "failpoint") {
				t.Fatal(err)
			}
		}
	}
	f.failpoint(func(step string) error {
		if step == "shrink" {
			reached++
			return errors.New("not now")
		}
		return nil
	})
	try(func() bool { return reached > 0 })
	f.failpoint(func(step string) error {
		if step == "shrink" {
			reached++
		}
		return nil
	})
	reader, err := f.pool.Begin(t.Context())
	ok(t, err)
	_, err = reader.Exec(t.Context(), "LOCK TABLE "+tab.mirror+" IN ACCESS SHARE MODE")
	ok(t, err)
	reached = 0
	try(func() bool { return reached > 0 })
	if n := size(); n < before/2 {
		t.Errorf("%d of %d bytes are left although it failed, and although somebody reads", n, before)
	}
	ok(t, reader.Rollback(t.Context()))
	try(func() bool { return size() < before/10 })
	if got := hot(); got != want {
		t.Errorf("the mirror has %s, and had %s", got, want)
	}
	reached = 0
	for range 3 {
		_, err := f.store.RunJobs(t.Context())
		ok(t, err)
	}
	if reached > 0 {
		t.Error("a mirror that has given its space back was written again")
	}
	tab.mustFlush(2, 1)
}
