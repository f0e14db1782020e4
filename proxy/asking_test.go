package proxy

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

// namingFulfiller knows names, as the catalog does.
type namingFulfiller struct {
	fakeFulfiller
	names []string
}

func (f *namingFulfiller) DemandNames(context.Context, string) ([]string, error) { return f.names, nil }

// held says whether the answer of an INSERT in a transaction block is held: its row is written behind a savepoint then.
func held(t *testing.T, conn *pgx.Conn) bool {
	t.Helper()
	mustExec(t, conn, "BEGIN")
	var outside bool
	if err := conn.QueryRow(within(t), "INSERT INTO t VALUES (1) RETURNING xmin::text = pg_current_xact_id()::text", pgx.QueryExecModeSimpleProtocol).Scan(&outside); err != nil {
		t.Fatal(err)
	}
	mustExec(t, conn, "ROLLBACK")
	return !outside
}

// Nobody can have the statements of others held: neither by literals nor by names that are keywords.
func TestNamesThatLeadToADemand(t *testing.T) {
	t.Parallel()
	f := &namingFulfiller{names: []string{"insert", "Returning", "feed", "größe"}}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+`CREATE TABLE t (i int); CREATE FUNCTION feed() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM koldstore.changes_since(1)';
		CREATE FUNCTION "insert"() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM koldstore.changes_since(1)';
		CREATE FUNCTION "größe"() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM koldstore.changes_since(1)'`)
	one, other := connect(t, p.dsn(t, direct)), connect(t, p.dsn(t, direct))
	if held(t, other) {
		t.Error("a keyword is taken for a name")
	}
	for _, sql := range []string{
		"SELECT 'create view insert as changes_since'", "SELECT 'create view t as changes_since'", "DO $$ BEGIN /* create view t as changes_since */ END $$",
		"CREATE TEMP TABLE u AS SELECT 'create view values as changes_since' AS u",
	} {
		mustExec(t, one, sql)
	}
	mustFail := "CREATE VIEW t AS SELECT koldstore.changes_since(1)" // there is a table of the name
	if _, err := one.Exec(within(t), mustFail, pgx.QueryExecModeSimpleProtocol); err == nil {
		t.Fatal("no error")
	}
	for name, conn := range map[string]*pgx.Conn{"the session's own": one, "another session's": other} {
		if held(t, conn) {
			t.Errorf("%s statements are held", name)
		}
	}
	mustExec(t, one, "CREATE VIEW v AS SELECT * FROM koldstore.changes_since(1); CREATE FUNCTION count_v() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM v /* changes_since */'")
	mustExec(t, one, "/* for all */ CREATE VIEW everybodys AS SELECT * FROM v")
	mustExec(t, one, "ALTER VIEW everybodys RENAME TO all_of_it")
	// What calls others before they are there, in one text and in several, and in one transaction.
	mustExec(t, one, "CREATE TABLE traced (n bigint)")
	mustExec(t, one, "CREATE FUNCTION trace() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.n := later(); RETURN NEW; END'")
	mustExec(t, one, "CREATE TRIGGER tr BEFORE INSERT ON traced FOR EACH ROW EXECUTE FUNCTION trace()")
	mustExec(t, one, "/* a /* comment */; */ BEGIN; -- another;\nCREATE FUNCTION even_later() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN later(); END'; COMMIT")
	mustExec(t, one, "SELECT 1; CREATE FUNCTION later() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM v'")
	mustExec(t, one, "BEGIN; CREATE TEMP TABLE own (n bigint)")
	if _, err := one.Exec(within(t), "CREATE FUNCTION pg_temp.trace() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.n := latest(); RETURN NEW; END'"); err != nil {
		t.Fatal(err)
	}
	mustExec(t, one, "CREATE TRIGGER tr BEFORE INSERT ON own FOR EACH ROW EXECUTE FUNCTION pg_temp.trace(); CREATE FUNCTION latest() RETURNS bigint LANGUAGE sql AS 'SELECT later()'")
	var n int
	if err := one.QueryRow(within(t), "INSERT INTO own VALUES (0) RETURNING n", pgx.QueryExecModeSimpleProtocol).Scan(&n); err != nil || n != 2 {
		t.Errorf("in the transaction: %d, %v", n, err)
	}
	mustExec(t, one, "COMMIT")
	mustExec(t, one, "CREATE FUNCTION by_body() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM koldstore.changes_since(1)); END'")
	for sql, conn := range map[string]*pgx.Conn{
		"SELECT count(*) FROM all_of_it": other, "SELECT count(*) FROM v": one, "SELECT count_v()": one, "SELECT by_body()": other, "SELECT feed()": other,
		"INSERT INTO traced VALUES (0) RETURNING n": other, "SELECT even_later()": other, `SELECT "insert"()`: other, "SELECT public . insert()": other,
	} {
		var n int
		if err := conn.QueryRow(within(t), sql, pgx.QueryExecModeSimpleProtocol).Scan(&n); err != nil || n != 2 {
			t.Errorf("%s: %d, %v", sql, n, err)
		}
	}
	mustExec(t, other, "SET client_encoding TO latin1")
	if _, err := other.PgConn().Exec(within(t), "SELECT gr\xf6\xdfe()").ReadAll(); err != nil {
		t.Errorf("in another encoding: %v", err)
	}
}

// waitingFulfiller knows no names when it is asked first, and waits when it is asked again.
type waitingFulfiller struct {
	fakeFulfiller
	calls atomic.Int64
	again chan struct{}
	ended chan error
}

func (f *waitingFulfiller) DemandNames(ctx context.Context, _ string) ([]string, error) {
	if f.calls.Add(1) == 1 {
		return nil, nil
	}
	close(f.again)
	<-ctx.Done()
	f.ended <- ctx.Err()
	return nil, ctx.Err()
}

// A session does not stay for an answer that is for the next ones.
func TestAskingEndsWithTheSession(t *testing.T) {
	t.Parallel()
	f := &waitingFulfiller{again: make(chan struct{}), ended: make(chan error, 1)}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	conn := connect(t, p.dsn(t, direct))
	mustExec(t, conn, "CREATE VIEW v AS SELECT * FROM koldstore.changes_since(1)") // the names are outdated now
	for asked := false; !asked; {
		mustExec(t, conn, "SELECT 1")
		select {
		case <-f.again:
			asked = true
		default:
		}
	}
	_ = conn.Close(within(t))
	if err := <-f.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}
