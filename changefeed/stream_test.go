package changefeed_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// Streams that start with what is there, made while writers write: no gap and no repeat between backfill and live events.
func TestEarliestUnderConcurrentWriters(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ctx := t.Context()
	s := seed(t)
	must(t, feedtest.CreateTable(ctx, h.app, "r", false))
	h.exec(`INSERT INTO r (id, v) SELECT i, i % 100 FROM generate_series(1, 300) i`)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for w := range 3 {
		conn, err := pgx.ConnectConfig(ctx, h.app.Config())
		must(t, err)
		history := feedtest.NewHistory("r", 60, s+uint64(w))
		wg.Go(func() {
			defer conn.Close(context.Background())
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := history.Step(ctx, conn); err != nil {
					t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
	for i := range 5 {
		h.stream(fmt.Sprintf("s%d", i), "r", feedtest.Predicate, "start", "earliest")
	}
	close(stop)
	wg.Wait()
	h.fence()
	for i := range 5 {
		must(t, feedtest.CheckFold(ctx, h.pool, fmt.Sprintf("_stream_s%d", i), "r", feedtest.Predicate, "to_jsonb(t.id)", true))
	}
	// Every backfilled event is below every live one.
	h.expect(`SELECT s.name FROM koldstore.stream s WHERE s.state <> 'active'`)
}

// The validators find faults; a check that cannot fail proves nothing.
func TestValidatorsFindFaults(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	ctx := t.Context()
	must(t, feedtest.CreateTable(ctx, h.app, "r", false))
	audit, err := feedtest.NewAudit(ctx, h.app, "r", feedtest.Predicate, "id")
	must(t, err)
	h.stream("s", "r", feedtest.Predicate)
	h.manage("r")
	h.exec(`INSERT INTO r (id, v) SELECT i, 60 FROM generate_series(1, 5) i`, `UPDATE r SET v = 1 WHERE id = 2`, `DELETE FROM r WHERE id = 3`)
	h.fence()
	check := func() error {
		return audit.CheckStream(ctx, h.pool, "_stream_s")
	}
	fold := func() error {
		return feedtest.CheckFold(ctx, h.pool, "_stream_s", "r", feedtest.Predicate, "to_jsonb(t.id)", true)
	}
	feed := func() error {
		ever, err := audit.Keys(ctx, h.pool)
		must(t, err)
		return feedtest.CheckFeed(ctx, h.pool, "r", audit.FeedKey(), 2, ever)
	}
	must(t, check())
	must(t, fold())
	must(t, feed())
	for _, fault := range []struct {
		what, sql string
		finders   []func() error
	}{
		{"a lost event", `DELETE FROM _stream_s WHERE k = '4'`, []func() error{check, fold}},
		{"an event too many", `INSERT INTO _stream_s SELECT id || 'x', 'exit', k, ts, doc FROM _stream_s WHERE k = '1'`, []func() error{check, fold}},
		{"a wrong document", `UPDATE _stream_s SET doc = '{}' WHERE k = '1'`, []func() error{check, fold}},
		{"a repeated event", `INSERT INTO _stream_s SELECT id || 'x', op, k, ts, doc FROM _stream_s WHERE k = '5'`, []func() error{check}},
		{"a lost row", `DELETE FROM koldstore.r__cl WHERE id = 1`, []func() error{feed}},
		{"a lost tombstone", `DELETE FROM koldstore.r__cl WHERE id = 3`, []func() error{feed}},
		{"a stale row", `UPDATE koldstore.r__cl SET row_image = '{}' WHERE id = 4`, []func() error{feed}},
		{"a live row that is gone", `UPDATE koldstore.r__cl SET op = 1, row_image = '{}' WHERE id = 3`, []func() error{feed}},
	} {
		tx, err := h.pool.Begin(ctx)
		must(t, err)
		_, err = tx.Exec(ctx, fault.sql)
		must(t, err)
		must(t, tx.Commit(ctx))
		for i, find := range fault.finders {
			if find() == nil {
				t.Errorf("%s: validator %d saw nothing", fault.what, i)
			}
		}
		h.exec(`TRUNCATE r_audit`, `TRUNCATE r`) // begin anew
		h.fence()
		h.admin(`TRUNCATE _stream_s`, `TRUNCATE koldstore.r__cl`)
		h.exec(`TRUNCATE r_audit`, `INSERT INTO r (id, v) SELECT i, 60 FROM generate_series(1, 5) i`, `UPDATE r SET v = 1 WHERE id = 2`, `DELETE FROM r WHERE id = 3`)
		h.fence()
		must(t, check())
		must(t, fold())
		must(t, feed())
	}
}
