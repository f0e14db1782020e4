package proxy

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// TestHeldAnswerTooLarge lets an answer go that cannot be held, and does not repeat the statement then.
func TestHeldAnswerTooLarge(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, d *Deps) { c.HoldBytes, d.Fulfiller = 100_000, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	ctx := within(t)
	for _, begin := range []string{"", "BEGIN"} {
		mustExec(t, conn, begin)
		var rows, size int
		err := conn.QueryRow(ctx, `SELECT count(*), sum(length(v)) FROM (SELECT repeat('x', 1000) AS v FROM generate_series(1, 1000)
			UNION ALL SELECT n::text FROM koldstore.changes_since(1)) x`).Scan(&rows, &size)
		if err != nil || rows != 1002 {
			t.Errorf("%d rows, %v", rows, err)
		}
		result, err := conn.PgConn().Exec(ctx, "SELECT repeat('x', 1000) FROM generate_series(1, 1000) UNION ALL SELECT 'koldstore.changes_since()'; SELECT koldstore.changes_since(0)").ReadAll()
		if err != nil || len(result) != 2 || len(result[0].Rows) != 2 && len(result[0].Rows) != 1001 {
			t.Errorf("a large answer: %v", err)
		}
		_, err = conn.PgConn().Exec(ctx, "SELECT repeat('x', 1000) FROM generate_series(1, 1000); SELECT koldstore.changes_since(1)").ReadAll()
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded {
			t.Errorf("a demand behind a large answer: %v", err)
		}
		if status := conn.PgConn().TxStatus(); begin != "" && status != 'E' || begin == "" && status != 'I' {
			t.Errorf("transaction status %c", status)
		}
	}
}

// A demand that the server cannot even judge fails its own statement and no other.
func TestADemandThatFailsLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1, 667)", mode)
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "22P02" {
			t.Errorf("an odd demand: %v", err)
		}
		for range 2 {
			if _, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1, 1)", mode); err != nil {
				t.Errorf("the demand after it: %v", err)
			}
		}
	}
}

func TestDemandsWithoutEnd(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	for i, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1000)", mode)
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded {
			t.Errorf("%v", err)
		}
		if got := f.count(); got != (i+1)*maxRounds {
			t.Errorf("%d demands", got)
		}
	}
}

// TestHugeError: an error that cannot be held goes through, and the session goes on.
func TestHugeError(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, d *Deps) { c.HoldBytes, d.Fulfiller = 100_000, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+`CREATE FUNCTION huge() RETURNS int LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION '%', repeat('x', 1000000) USING ERRCODE = 'KS003', DETAIL = '{"kind":"cold_page"}'; END $$`)
	conn := connect(t, p.dsn(t, direct))
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec} {
		_, err := conn.Exec(within(t), "SELECT huge() FROM koldstore.changes_since(0) RIGHT JOIN (SELECT 1) x ON true", mode)
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || len(e.Message) != 1_000_000 {
			t.Errorf("%.200v", err)
		}
		mustExec(t, conn, "SELECT 1")
	}
}

func TestNoFulfillerMeansAClearError(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	_, err := conn.Exec(within(t), "SELECT koldstore.changes_since(1)")
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded || e.Hint == "" {
		t.Errorf("%v", err)
	}
}
