package proxy

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// What all sessions hold together is bounded; little is held whatever the others hold, and all of it is given back.
func TestSessionsHoldABoundedAmount(t *testing.T) {
	t.Parallel()
	const hold = 200_000
	p := startProxy(t, func(c *Config, d *Deps) { c.HoldBytes, d.Fulfiller = hold, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	ask := func(bytes int) error {
		t.Helper()
		for _, sql := range []string{"%s; SELECT * FROM koldstore.changes_since(1)", "BEGIN; %s; SELECT * FROM koldstore.changes_since(1); COMMIT"} {
			if _, err := conn.PgConn().Exec(within(t), fmt.Sprintf(sql, fmt.Sprintf("SELECT repeat('x', %d)", bytes))).ReadAll(); err != nil {
				mustExec(t, conn, "ROLLBACK")
				return err
			}
		}
		return nil
	}
	held := &p.server.held
	if err := ask(hold / 2); err != nil {
		t.Error(err)
	}
	takeAll := func() {
		t.Helper()
		for begun := time.Now(); !held.take(int(held.limit)); time.Sleep(time.Millisecond) { // a session gives back when the client has its answer
			if time.Since(begun) > testTimeout {
				t.Fatalf("%d bytes are in use", held.used.Load())
			}
		}
	}
	takeAll()
	if e, ok := errors.AsType[*pgconn.PgError](ask(hold / 2)); !ok || e.Code != koldproxy.CodeProxyNeeded {
		t.Errorf("more than all may hold: %v", e)
	}
	if err := ask(1000); err != nil {
		t.Errorf("little: %v", err)
	}
	held.give(int(held.limit))
	if err := ask(hold / 2); err != nil {
		t.Error(err)
	}
	t.Run("cold rows", func(t *testing.T) {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
			takeAll()
			_, err := conn.Exec(within(t), "SELECT * FROM koldstore.changes_since(1, 15)", mode)
			if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeOutOfMemory || e.Hint == "" {
				t.Errorf("got %v", err)
			}
			held.give(int(held.limit))
			if _, err := conn.Exec(within(t), "SELECT * FROM koldstore.changes_since(1, 15)", mode); err != nil {
				t.Error(err)
			}
		}
	})
	p.stop()
	if used := held.used.Load(); used != 0 {
		t.Errorf("%d bytes are in use in the end", used)
	}
}
