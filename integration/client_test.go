package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// testTimeout bounds what a single test may wait for.
const testTimeout = 3 * time.Minute

// database is the one that a demo instance serves.
const database = "default"

// tenant is a schema of a test's own in the database of an instance, owned by role demo.
type tenant struct {
	inst   *instance
	schema string
}

var tenants atomic.Int64

// newTenant makes a schema in the shared instance.
func newTenant(t *testing.T) *tenant {
	t.Helper()
	return newTenantOf(t, shared(t))
}

// newTenantOf makes a schema in an instance. At the end of the test its streams and feeds are dropped, then the schema.
func newTenantOf(t *testing.T, inst *instance) *tenant {
	t.Helper()
	w := &tenant{inst: inst, schema: fmt.Sprintf("t%d", tenants.Add(1))}
	c := inst.connect(t, "demo", nil)
	c.exec("CREATE SCHEMA " + w.schema)
	t.Cleanup(func() {
		if inst.running() {
			w.drop(t)
		}
	})
	return w
}

func (w *tenant) drop(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, w.inst.dsn("demo", nil))
	if err != nil {
		t.Errorf("drop schema %s: %v", w.schema, err)
		return
	}
	defer conn.Close(ctx)
	for _, sql := range []string{
		`DO $$
		DECLARE s record;
		BEGIN
			FOR s IN SELECT * FROM koldstore.visible_stream WHERE schema_name = '` + w.schema + `' LOOP
				CALL koldstore.drop_stream(s.schema_name, s.name);
			END LOOP;
			FOR s IN SELECT * FROM koldstore.visible_managed_table WHERE schema_name = '` + w.schema + `' AND to_regclass(format('%I.%I', schema_name, table_name)) = table_oid LOOP
				PERFORM koldstore.unmanage_table(s.table_oid, drop_cold => true);
			END LOOP;
		END $$`,
		"DROP SCHEMA " + w.schema + " CASCADE",
	} {
		if _, err := conn.Exec(ctx, sql); err != nil && !t.Failed() {
			t.Errorf("drop schema %s: %v", w.schema, err)
		}
	}
}

// connect opens a session through the proxy as demo, with the tenant's schema as search_path.
func (w *tenant) connect(t *testing.T) *client { return w.connectAs(t, "demo") }

// connectAs is connect for another role of the demo.
func (w *tenant) connectAs(t *testing.T, role string) *client {
	t.Helper()
	return w.inst.connect(t, role, url.Values{"search_path": {w.schema}})
}

// connectDirect opens a session that does not pass through the proxy.
func (w *tenant) connectDirect(t *testing.T, role string) *client {
	t.Helper()
	return open(t, w.inst.directDSN(role, url.Values{"search_path": {w.schema}}))
}

// table is the qualified name of a table of the tenant.
func (w *tenant) table(name string) string { return w.schema + "." + name }

// topic is where the events of a stream of the tenant are published.
func (w *tenant) topic(stream string) string {
	return "$stream/" + database + "/" + w.schema + "." + stream
}

// dsn is the URL of the proxy for a role whose password is its name. Parameters become startup parameters.
func (i *instance) dsn(role string, params url.Values) string {
	return demoDSN(role, i.ports.proxy, params)
}

// directDSN is the URL of the server behind the proxy.
func (i *instance) directDSN(role string, params url.Values) string {
	return demoDSN(role, i.ports.pg, params)
}

func demoDSN(role string, port int, params url.Values) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(role, role), Host: fmt.Sprintf("127.0.0.1:%d", port), Path: "/" + database,
		RawQuery: strings.ReplaceAll(params.Encode(), "+", "%20"), // a + is a + to PostgreSQL's drivers
	}
	return u.String()
}

// connect opens a session through the proxy.
func (i *instance) connect(t *testing.T, role string, params url.Values) *client {
	t.Helper()
	return open(t, i.dsn(role, params))
}

// client is a session whose failures end the test.
type client struct {
	*pgx.Conn
	t   *testing.T
	ctx context.Context //nolint:containedctx // a test's session lives as long as the test

	notices []*pgconn.Notice // since the last clearNotices
}

// open connects with a DSN; the session is closed at the end of the test.
func open(t *testing.T, dsn string) *client {
	t.Helper()
	c := &client{t: t}
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	c.ctx = ctx
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { c.notices = append(c.notices, n) }
	if c.Conn, err = pgx.ConnectConfig(ctx, cfg); err != nil {
		cancel()
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() {
		defer cancel()
		_ = c.Close(ctx) // the server may have ended it
	})
	return c
}

// exec runs statements and returns the last command tag.
func (c *client) exec(sql string, args ...any) string {
	c.t.Helper()
	tag, err := c.Exec(c.ctx, sql, args...)
	if err != nil {
		c.t.Fatalf("%s\n%s", sql, describe(err))
	}
	return tag.String()
}

// text returns the single value that a query gives, as text; NULL is "NULL".
func (c *client) text(sql string, args ...any) string {
	c.t.Helper()
	rows := c.rows(sql, args...)
	if len(rows) != 1 || len(rows[0]) != 1 {
		c.t.Fatalf("%s\ngives %v instead of one value", sql, rows)
	}
	return rows[0][0]
}

// rows returns everything that a query gives, as text; NULL is "NULL". Arguments may be strings, integers and booleans.
func (c *client) rows(sql string, args ...any) [][]string {
	c.t.Helper()
	list, err := c.tryRows(sql, args...)
	if err != nil {
		c.t.Fatalf("%s\n%s", sql, describe(err))
	}
	return list
}

func (c *client) tryRows(sql string, args ...any) ([][]string, error) {
	params := make([][]byte, len(args))
	for i, a := range args {
		params[i] = []byte(fmt.Sprint(a))
	}
	result := c.PgConn().ExecParams(c.ctx, sql, params, nil, nil, nil).Read()
	if result.Err != nil {
		return nil, result.Err
	}
	return textRows(result.Rows), nil
}

func textRows(rows [][][]byte) [][]string {
	list := make([][]string, 0, len(rows))
	for _, values := range rows {
		row := make([]string, len(values))
		for i, v := range values {
			if row[i] = string(v); v == nil {
				row[i] = "NULL"
			}
		}
		list = append(list, row)
	}
	return list
}

// fence waits until everything committed before is in mirrors and logs.
func (c *client) fence() {
	c.t.Helper()
	c.exec("SELECT koldstore.wait_for_async_mirror('60 s')")
}

// flush moves everything of a managed table to cold storage and returns the number of rows.
func (c *client) flush(table string) int {
	c.t.Helper()
	c.fence()
	var answer struct {
		OK     bool
		Status string
		Rows   int `json:"rows_flushed"`
		Error  *string
	}
	raw := c.text("SELECT koldstore.flush_table($1::text::regclass, wait => true, force => true)", table)
	if err := json.Unmarshal([]byte(raw), &answer); err != nil {
		c.t.Fatal(err)
	}
	if !answer.OK || answer.Status != "completed" {
		c.t.Fatalf("flush of %s: %s", table, raw)
	}
	return answer.Rows
}

// describe shows everything about an error of the server.
func describe(err error) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err.Error()
	}
	return fmt.Sprintf("%s: %s (SQLSTATE %s) detail: %q hint: %q position: %d where: %q", pg.Severity, pg.Message, pg.Code, pg.Detail, pg.Hint, pg.Position, pg.Where)
}

// wantError checks an error's SQLSTATE and that its message contains a text.
func wantError(t *testing.T, err error, code, text string) *pgconn.PgError {
	t.Helper()
	var pg *pgconn.PgError
	switch {
	case err == nil:
		t.Fatalf("no error; want %s (%s)", code, text)
	case !errors.As(err, &pg):
		t.Fatalf("error %v; want %s (%s)", err, code, text)
	case pg.Code != code || !strings.Contains(pg.Message, text):
		t.Fatalf("%s\nwant %s with %q", describe(err), code, text)
	}
	return pg
}
