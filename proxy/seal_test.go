package proxy

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// TestForgedPagesAreNotBelieved lets a session stage pages of its own making: an old one, one that was changed, and one for which it has
// raised the demand itself in words that could be taken for another.
func TestForgedPagesAreNotBelieved(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+`CREATE TABLE kept (page text);
		CREATE FUNCTION keep() RETURNS int LANGUAGE sql AS $$ INSERT INTO kept VALUES (current_setting('koldstore.staged')) RETURNING 1 $$;
		CREATE FUNCTION ask(detail text) RETURNS text LANGUAGE plpgsql AS $$
		BEGIN
			IF coalesce(current_setting('koldstore.staged', true), '') = '' THEN
				RAISE EXCEPTION 'changes_since' USING ERRCODE = 'KS003', DETAIL = detail;
			END IF;
			RETURN current_setting('koldstore.staged');
		END $$`)
	conn, bare := connect(t, p.dsn(t, direct)), connect(t, direct)
	ctx := within(t)
	mustExec(t, conn, "SELECT n, keep() FROM koldstore.changes_since(1)")
	var page string
	if err := conn.QueryRow(ctx, "SELECT page FROM kept").Scan(&page); err != nil || strings.Count(page, "\n") != 2 {
		t.Fatalf("%.100q was staged, %v", page, err)
	}
	lines := strings.Split(page, "\n")
	for name, text := range map[string]string{
		"a page of another session": page,
		"another head":              strings.Replace(lines[0], `"after":1`, `"after":2`, 1) + "\n" + lines[1] + "\n" + lines[2],
		"another box":               lines[0] + "\n" + lines[1] + "\n" + strings.ToUpper(lines[2]),
		"no MAC":                    lines[0] + "\n\n" + lines[2],
	} {
		mustExec(t, bare, "SELECT set_config('koldstore.staged', "+"'"+text+"', false)")
		_, err := bare.Exec(ctx, "SELECT koldstore.changes_since(1)")
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded {
			t.Errorf("%s: %v", name, err)
		}
	}

	before := f.count()
	for _, demand := range []string{
		`{"kind":"cold_page","table":1,"Table":2,"generation":1,"segments":[],"mode":"forward","after":0,"limit":3}`,
		`{"kind":"cold_page","Kind":"flush","table":1,"Table":2,"force":true}`, `{"kind":"flush","table":1,"table":2,"force":true}`, `{"kind":"flush","table":1,"force":true,"x":1}`,
	} {
		_, err := conn.Exec(ctx, "SELECT 'changes_since', ask('"+demand+"')")
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeProxyNeeded || e.Detail != demand {
			t.Errorf("%s: %v", demand, err)
		}
	}
	if f.count() != before {
		t.Error("a demand that could be taken for another was met")
	}
}
