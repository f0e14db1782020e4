package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

func TestStatementTimeoutEndsADemand(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{block: make(chan struct{}, 10)} // it waits until its context ends
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	for _, begin := range []string{"", "BEGIN; SET LOCAL statement_timeout = '101ms'"} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
			conn := connect(t, p.dsn(t, direct))
			mustExec(t, conn, "SET statement_timeout = '1100ms'; CREATE SCHEMA IF NOT EXISTS mine; SET search_path = mine, pg_catalog")
			mustExec(t, conn, begin)
			_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1)", mode)
			if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled || !strings.Contains(e.Message, "statement timeout") {
				t.Errorf("%q: got %v", begin, err)
			}
			if status := conn.PgConn().TxStatus(); begin == "" && status != 'I' || begin != "" && status != 'E' {
				t.Errorf("transaction status %c", status)
			}
			mustExec(t, conn, "ROLLBACK; SELECT 1")
		}
	}
}

// slowFulfiller takes its time.
type slowFulfiller struct {
	fakeFulfiller
	time time.Duration
}

func (f *slowFulfiller) Fulfil(ctx context.Context, database string, demand json.RawMessage) (json.RawMessage, error) {
	time.Sleep(f.time)
	return f.fakeFulfiller.Fulfil(ctx, database, demand)
}

// A session that waits for its answer is not idle.
func TestIdleTimeoutsAreNotForDemands(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &slowFulfiller{time: time.Second} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	for _, begin := range []string{"", "BEGIN"} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
			conn := connect(t, p.dsn(t, direct))
			mustExec(t, conn, "SET idle_session_timeout = '400ms'; SET idle_in_transaction_session_timeout = '400ms'")
			mustExec(t, conn, begin)
			tag, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1)", mode)
			if err != nil || tag.RowsAffected() != 2 {
				t.Errorf("%q: %s, %v", begin, tag, err)
			}
		}
	}
}
