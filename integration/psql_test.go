package integration_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"
)

// psql runs a script as psql does for a person, except that output comes without alignment.
func psql(t *testing.T, dsn, script string) outcome {
	t.Helper()
	return program{name: "psql", args: []string{"-X", "-A", "-t", "-F", "|", "-d", dsn}, stdin: script}.run(t)
}

// TestPsql types what a person would type, over TCP and over the Unix socket, as the owner and as the superuser.
func TestPsql(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"demo", "postgres"} {
		for _, network := range []string{"tcp", "unix"} {
			t.Run(role+" over "+network, func(t *testing.T) {
				t.Parallel()
				w := newTenant(t)
				dsn := w.inst.dsn(role, url.Values{"options": {"-csearch_path=" + w.schema}})
				if network == "unix" {
					dsn = w.inst.socketDSN(role, url.Values{"options": {"-csearch_path=" + w.schema}})
				}
				if role == "postgres" { // whoever owns the schema drops it at the end
					defer psql(t, dsn, `DROP STREAM IF EXISTS big_orders; DROP TABLE orders;`)
				}
				typeStreamSession(t, dsn)
			})
		}
	}
}

// socketDSN is the URL of the proxy's Unix socket.
func (i *instance) socketDSN(role string, params url.Values) string {
	params.Set("host", i.home)
	params.Set("port", fmt.Sprint(i.ports.proxy))
	return (&url.URL{Scheme: "postgres", User: url.UserPassword(role, role), Path: "/" + database, RawQuery: params.Encode()}).String()
}

func typeStreamSession(t *testing.T, dsn string) {
	t.Helper()
	made := psql(t, dsn, `
CREATE TABLE orders (id int PRIMARY KEY, total numeric NOT NULL, status text NOT NULL);
create /* any case */ stream big_orders on orders
  when (total > 1000 AND status <> 'draft')  -- with a comment; and a semicolon
  with (start = 'now', retention = '24h');
CREATE STREAM IF NOT EXISTS big_orders ON orders WHEN (true);
INSERT INTO orders VALUES (1, 1, 'open'), (2, 2000, 'open'), (3, 3000, 'draft');
UPDATE orders SET total = total + 5000, status = 'paid' WHERE id < 3;
UPDATE orders SET total = 0 WHERE id = 2;
DELETE FROM orders WHERE id = 1;
SELECT koldstore.wait_for_async_mirror() IS NOT NULL;
SELECT op, k, doc ->> 'total', ts <= now() FROM _stream_big_orders ORDER BY id LIMIT 500;
SHOW STREAMS;
`)
	wantOutput := strings.Join([]string{
		"CREATE TABLE", "CREATE STREAM", "CREATE STREAM", "INSERT 0 3", "UPDATE 2", "UPDATE 1", "DELETE 1", "t",
		"put|2|2000|t", "put|1|5001|t", "put|2|7000|t", "exit|2|0|t", "delete|1|5001|t", "",
	}, "\n")
	shown, ok := strings.CutPrefix(made.stdout, wantOutput)
	if made.code != 0 || !ok {
		t.Fatalf("%v\nwant\n%s", made, wantOutput)
	}
	if !strings.Contains(made.stderr, `NOTICE:  stream "big_orders" already exists, skipping`) {
		t.Errorf("no notice about the second CREATE STREAM: %s", made.stderr)
	}
	// Streams of other schemas have their schema in front.
	if want := "\nbig_orders|orders|((total > (1000)::numeric) AND (status <> 'draft'::text))|0|0\n"; !strings.Contains("\n"+shown, want) {
		t.Errorf("SHOW STREAMS shows %q, want %q", shown, want)
	}

	resumed := psql(t, dsn, `
SELECT id AS last FROM _stream_big_orders ORDER BY id LIMIT 1 OFFSET 2 \gset
SELECT op, k FROM _stream_big_orders ORDER BY id LIMIT 500 AFTER (:'last');
BEGIN;
DROP STREAM big_orders;
ROLLBACK;
SELECT count(*) FROM _stream_big_orders;
DROP STREAM big_orders;
DROP STREAM IF EXISTS big_orders;
SELECT to_regclass('_stream_big_orders') IS NULL;
`)
	if want := "exit|2\ndelete|1\nBEGIN\nDROP STREAM\nROLLBACK\n5\nDROP STREAM\nDROP STREAM\nt\n"; resumed.code != 0 || resumed.stdout != want {
		t.Errorf("%v\nwant\n%s", resumed, want)
	}
}

// TestErrorPositionsPointIntoWhatWasTyped reads psql's carets.
func TestErrorPositionsPointIntoWhatWasTyped(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	w.connect(t).exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric, note text)")
	dsn := w.inst.dsn("demo", url.Values{"options": {"-csearch_path=" + w.schema}})
	for _, test := range []struct{ name, typed, at string }{ // at: what the caret must point at
		{"unknown column", `CREATE STREAM s ON orders WHEN (total > 1 AND totl > 1000);`, "totl"},
		{"on the second line", "CREATE STREAM s ON orders\n  WHEN (note = 'x' OR nope = 1);", "nope"},
		{"behind characters of several bytes", `/* größe */ CREATE STREAM "späße" ON orders WHEN (note = 'ä€😀' OR nope = 1);`, "nope"},
		{"behind a tab", "CREATE STREAM s\tON orders WHEN\t(note = 'x' OR nope = 1);", "nope"},
		{"a function that does not exist", `CREATE STREAM s ON orders WHEN (frobnicate(total));`, "frobnicate"},
		{"syntax in the predicate", `CREATE STREAM s ON orders WHEN (total > > 1);`, "> 1"},
		{"no predicate", `CREATE STREAM s ON orders;`, ";"},
		{"a word that is no option list", `CREATE STREAM s ON orders WHEN (true) WITHOUT (start = 'now');`, "WITHOUT"},
		{"a missing name", `DROP STREAM ;`, ";"},
		{"an error behind a custom statement", `DROP STREAM IF EXISTS s; SELECT oops;`, "oops"},
		{"AFTER without an order", `SELECT id FROM orders LIMIT 5 AFTER (1);`, "AFTER"},
		{"an error in front of AFTER", `SELECT oops FROM orders ORDER BY id LIMIT 5 AFTER (1);`, "oops"},
		{"an error behind AFTER", `SELECT * FROM (SELECT id FROM orders ORDER BY id LIMIT 5 AFTER (1)) x WHERE oops;`, "oops"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			// \; keeps several statements in one message, as a driver would send them.
			got := psql(t, dsn, strings.ReplaceAll(strings.TrimSuffix(test.typed, ";"), ";", `\;`)+";\n")
			at, err := caret(got.stderr)
			if err != nil {
				t.Fatalf("%v:\n%v", err, got)
			}
			if !strings.HasPrefix(at, strings.TrimSuffix(test.at, ";")) {
				t.Errorf("the caret points at %q, want %q:\n%s", at, test.at, got.stderr)
			}
		})
	}
}

// caret returns the text above psql's caret, from there to the end of the line.
func caret(stderr string) (string, error) {
	above := ""
	for line := range strings.Lines(stderr) {
		line = strings.TrimRight(line, "\n")
		if strings.HasSuffix(line, "^") && strings.Trim(line, " \t^") == "" && strings.HasPrefix(above, "LINE ") {
			column := utf8.RuneCountInString(line) - 1
			for i, r := range above {
				if column <= 0 {
					return above[i:], nil
				}
				column-- // psql counts cells of a terminal
				if r >= 0x1F300 {
					column--
				}
			}
			return "", fmt.Errorf("the caret is behind the end of the line")
		}
		above = line
	}
	return "", fmt.Errorf("no caret")
}
