package changefeed_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
	"github.com/koldproxy/koldproxy/walapply"
)

// seed is printed, and taken from KOLDPROXY_TEST_SEED if that is set.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := rand.Uint64()
	if text := os.Getenv("KOLDPROXY_TEST_SEED"); text != "" {
		var err error
		s, err = strconv.ParseUint(text, 10, 64)
		must(t, err)
	}
	t.Logf("KOLDPROXY_TEST_SEED=%d", s)
	return s
}

// TestRandomHistories: several writers at once, an applier that is stopped, started and cut off all the time; afterwards log,
// fold, feed and table agree with each other and with triggers that saw every change.
func TestRandomHistories(t *testing.T) {
	t.Parallel()
	for _, composite := range []bool{false, true} {
		t.Run(fmt.Sprintf("composite key %v", composite), func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.change = func(c *walapply.Config) { c.BatchRows = 37 } // transactions span batches, batches span transactions
			s := seed(t)
			ctx := t.Context()
			must(t, feedtest.CreateTable(ctx, h.app, "r", composite))
			keys := []string{"id"}
			if composite {
				keys = []string{"kind", "id"}
			}
			audit, err := feedtest.NewAudit(ctx, h.app, "r", feedtest.Predicate, keys...)
			must(t, err)
			h.stream("s", "r", feedtest.Predicate)
			h.stream("pre", "r", feedtest.Predicate, "pre_image", "true", "start", "earliest")
			h.manage("r")

			h.writeHistories(s, 3, 150)
			h.fence()
			must(t, audit.CheckStream(ctx, h.pool, "_stream_s"))
			must(t, audit.CheckStream(ctx, h.pool, "_stream_pre"))
			must(t, feedtest.CheckFold(ctx, h.pool, "_stream_s", "r", feedtest.Predicate, audit.StreamKey(), true))
			ever, err := audit.Keys(ctx, h.pool)
			must(t, err)
			must(t, feedtest.CheckFeed(ctx, h.pool, "r", audit.FeedKey(), 7, ever))
			h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")
			h.expect(`SELECT count(*) FROM koldstore.stream t JOIN koldstore.stream_status u USING (stream_id) WHERE t.state <> 'active' OR u.events_lost > 0`, "0")
			h.expect(`SELECT (SELECT count(*) FROM _stream_s) = u.events FROM koldstore.stream t JOIN koldstore.stream_status u USING (stream_id) WHERE t.name = 's'`, "t")
		})
	}
}

// writeHistories lets several writers write while the applier suffers: so many steps in long tests, a third of them in others.
func (h *host) writeHistories(seed uint64, writers, steps int) {
	h.t.Helper()
	if os.Getenv("KOLDPROXY_TEST_LONG") == "" {
		steps /= 3
	}
	ctx := h.t.Context()
	var wg sync.WaitGroup
	for w := range writers {
		conn, err := pgx.ConnectConfig(ctx, h.app.Config())
		must(h.t, err)
		history := feedtest.NewHistory("r", 20, seed+uint64(w))
		wg.Go(func() {
			defer conn.Close(context.Background())
			for range steps {
				if err := history.Step(ctx, conn); err != nil {
					h.t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	trouble := rand.New(rand.NewPCG(seed, 99))
	for {
		select {
		case <-done:
			return
		case <-time.After(time.Duration(trouble.IntN(120)) * time.Millisecond):
		}
		if trouble.IntN(2) == 0 {
			h.stopApplier()
			h.startApplier()
		} else {
			h.admin(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
				AND (backend_type = 'walsender' OR application_name LIKE '%apply%') AND random() < 0.7`)
		}
	}
}
