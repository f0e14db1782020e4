package walapply_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// A gap that is closed without anybody's help says so, and whom it waits for: the new slot waits for every open transaction.
func TestGapSaysWhomItWaitsFor(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.applied().stop()
	blocker, err := pgx.Connect(t.Context(), d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer blocker.Close(context.Background())
	for _, sql := range []string{`BEGIN`, `CREATE TABLE prepared ()`, `PREPARE TRANSACTION 'kp ''gid'`, `BEGIN`, `CREATE TABLE blocked ()`} {
		if _, err := blocker.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	d.exec(`SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`)

	var log syncBuffer
	cfg := d.config()
	cfg.OnGap = walapply.OnGapHeal
	a, err := walapply.New(cfg, &recorder{}, zerolog.New(&log), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	defer sync.OnceFunc(func() { cancel(); <-done })()

	process, prepared := fmt.Sprintf("process %d in database", blocker.PgConn().PID()), `prepared transaction 'kp ''gid'`
	d.await("the blockers to be named", func() bool {
		list, err := walapply.Inspect(t.Context(), d.sql, "koldproxy", walapply.OnGapStop) // the gap is being closed, whatever is configured here
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 0 || !strings.Contains(list[0].Waits, process) {
			return false
		}
		if text := list[0].Error(); !strings.Contains(text, prepared) || !strings.Contains(text, "by itself") || strings.Contains(text, "heal_gap") {
			t.Errorf("the advice is %q", text)
		}
		return true
	})
	if got := query[string](d, `SELECT (s ->> 'waiting_for') || ' ' || (s ->> 'running') FROM koldstore.async_mirror_status() s`); !strings.Contains(got, process) || !strings.Contains(got, prepared) || !strings.HasSuffix(got, " false") {
		t.Errorf("the status shows %q", got)
	}
	for _, sql := range []string{`ROLLBACK`, `ROLLBACK PREPARED 'kp ''gid'`} {
		if _, err := blocker.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	d.await("the gap to be closed", func() bool { return a.Status().Streaming })
	if got := query[*string](d, `SELECT koldstore.async_mirror_status() ->> 'waiting_for'`); got != nil {
		t.Errorf("it still waits for %s", *got)
	}
	if text := log.String(); !strings.Contains(text, `"warn"`) || strings.Contains(text, "heal_gap") || strings.Contains(text, "does not exist any more") && strings.Contains(text, `"level":"error"`) {
		t.Errorf("the log says:\n%s", text)
	}
}
