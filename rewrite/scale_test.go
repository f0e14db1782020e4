package rewrite

import (
	"strings"
	"testing"
	"time"
)

// hostile are texts built to make a careless walk recurse or take quadratic time, about n bytes long.
var hostile = map[string]func(n int) string{
	"parentheses": func(n int) string { return "SHOW STREAMS; SELECT " + strings.Repeat("(", n) },
	"balanced": func(n int) string {
		return "SHOW STREAMS; SELECT " + strings.Repeat("(", n/2) + strings.Repeat(")", n/2)
	},
	"in the predicate": func(n int) string {
		return "CREATE STREAM s ON t WHEN (" + strings.Repeat("(", n/2) + strings.Repeat(")", n/2) + ")"
	},
	"operators": func(n int) string { return "SHOW STREAMS; SELECT 1" + strings.Repeat("+1", n/2) },
	"comments":  func(n int) string { return "SHOW STREAMS; " + strings.Repeat("/*", n/4) + strings.Repeat("*/", n/4) },
	"short comments": func(n int) string {
		return "SHOW STREAMS; SELECT 1 " + strings.Repeat(strings.Repeat("/*", 64)+" "+strings.Repeat("*/", 64), n/257)
	},
	"pluses": func(n int) string { return "SHOW STREAMS; SELECT " + strings.Repeat("+", n) + "1" },
	"rows of pluses": func(n int) string {
		return "SHOW STREAMS; SELECT 1" + strings.Repeat(" "+strings.Repeat("+", 100)+"1", n/102)
	},
	"dashes":           func(n int) string { return strings.Repeat(strings.Repeat("-", 1000)+"\n", n/1001) + "SHOW STREAMS" },
	"stars":            func(n int) string { return "/" + strings.Repeat("*", n) + "/ SHOW STREAMS" },
	"quotes":           func(n int) string { return "SHOW STREAMS; SELECT " + strings.Repeat("'a' \n ", n/6) },
	"dollars":          func(n int) string { return "SHOW STREAMS; SELECT $a$" + strings.Repeat("$a", n/2) },
	"open comments":    func(n int) string { return "SHOW STREAMS; " + strings.Repeat("/*", n/2) },
	"statements":       func(n int) string { return strings.Repeat("SHOW STREAMS;", n/13) },
	"wrong statements": func(n int) string { return strings.Repeat("DROP STREAM s;", n/14) + "DROP STREAM" },
	"tags":             func(n int) string { return "SHOW STREAMS; SELECT '" + strings.Repeat("$ks123$", n/7) + "'" },
	"retentions":       func(n int) string { return "SHOW STREAMS; SELECT " + strings.Repeat("retention = 30d,", n/16) },
	"options": func(n int) string {
		return "CREATE STREAM s ON t WHEN (a) WITH (" + strings.Repeat("retention = 30d,", n/16)
	},
	"characters": func(n int) string {
		return "SELECT '" + strings.Repeat("é", n/4) + "';" + strings.Repeat("SHOW STREAMS;", n/26)
	},
	"keys": func(n int) string {
		return "SELECT FROM t ORDER BY a" + strings.Repeat(",a", n/4) + " LIMIT 1 AFTER (1" + strings.Repeat(",1", n/4) + ")"
	},
	"many AFTER": func(n int) string { return strings.Repeat("SELECT FROM t ORDER BY a LIMIT 1 AFTER (1);", n/43) },
	"AFTER side by side": func(n int) string {
		return "SELECT 1" + strings.Repeat(",(SELECT FROM t ORDER BY a LIMIT 1 AFTER (1))", n/45)
	},
	"AFTER nested in lists": func(n int) string {
		return strings.Repeat("SELECT(", n/40) + "SELECT 1" + strings.Repeat(") FROM t ORDER BY a LIMIT 1 AFTER(1)", n/40)
	},
	"AFTER nested in FROM": func(n int) string {
		return strings.Repeat("SELECT FROM(", n/40) + "SELECT 1" + strings.Repeat(")t ORDER BY a LIMIT 1 AFTER(1)", n/40)
	},
	"AFTER nested in values": func(n int) string { return strings.Repeat("SELECT FROM t ORDER BY a LIMIT 1 AFTER((", n/40) },
	"columns": func(n int) string {
		return "SELECT " + strings.Repeat("a+a,", n/4) + "b FROM t ORDER BY a,b,c,d,e,f,g LIMIT 1 AFTER(1,2,3,4,5,6,7)"
	},
	"long name":      func(n int) string { return "DROP STREAM " + strings.Repeat("x", n) },
	"NUL far behind": func(n int) string { return strings.Repeat("SHOW STREAMS;", n/13) + "\x00" },
}

// TestTimeIsLinear gives every hostile text of 100 KB far more time than it needs, and far less than a square would take.
func TestTimeIsLinear(t *testing.T) {
	t.Parallel()
	for name, text := range hostile {
		t.Run(name, func(t *testing.T) { // one after the other, so that each has the time to itself
			sql := text(100_000)
			began := time.Now()
			r := Rewrite(sql, conforming)
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("took %v", took)
			}
			if len(r.SQL) > 16*len(sql) {
				t.Errorf("grew from %d to %d bytes", len(sql), len(r.SQL))
			}
		})
	}
}

// TestAMillionDeep gives the longest texts there may be of the kinds that recurse in a parser. A step for each pair of
// characters would take hours, and a stack that grows with them would end the process.
func TestAMillionDeep(t *testing.T) {
	t.Parallel()
	const n = 1_000_000
	for name, sql := range map[string]string{
		"in a value": "SELECT FROM t ORDER BY a LIMIT 1 AFTER (" + strings.Repeat("(", n/2) + "1" + strings.Repeat(")", n/2) + ")",
		"in WHERE":   "SELECT FROM t WHERE " + strings.Repeat("(", n/2) + "1" + strings.Repeat(")", n/2) + " ORDER BY a LIMIT 1 AFTER (1)",
		"brackets":   "CREATE STREAM s ON t WHEN (a" + strings.Repeat("[", n/2) + "1" + strings.Repeat("]", n/2) + ")",
		"comments":   hostile["comments"](n),
		"operators":  hostile["operators"](n),
		"nested":     hostile["AFTER nested in lists"](n / 2),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if r := Rewrite(sql, conforming); len(sql) > MaxTextBytes || len(r.SQL) > 16*len(sql) {
				t.Errorf("grew from %d to %d bytes", len(sql), len(r.SQL))
			}
		})
	}
}

func TestNeedsLookDoesNotAllocate(t *testing.T) {
	body := []byte(strings.Repeat("SELECT abalance FROM pgbench_accounts WHERE aid = $1; ", 20))
	if n := testing.AllocsPerRun(100, func() { _ = NeedsLook(body) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkNeedsLook(b *testing.B) {
	body := []byte("SELECT abalance FROM pgbench_accounts WHERE aid = $1")
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		_ = NeedsLook(body)
	}
}

func BenchmarkRewriteAfter(b *testing.B) {
	const sql = "SELECT id, op, k, ts, doc FROM _stream_big_orders ORDER BY id LIMIT 500 AFTER ('00000086400000000-0000000001-000000000a1b2c3d')"
	b.ReportAllocs()
	for b.Loop() {
		_ = Rewrite(sql, conforming)
	}
}

func BenchmarkRewriteNothing(b *testing.B) {
	const sql = "SELECT id, op, k, ts, doc FROM events WHERE created_after > $1 ORDER BY id LIMIT 500"
	b.ReportAllocs()
	for b.Loop() {
		_ = Rewrite(sql, conforming)
	}
}

// BenchmarkRewriteForeign is the cost of a statement of 2 KB that has a trigger word and is not koldproxy's.
func BenchmarkRewriteForeign(b *testing.B) {
	sql := "SELECT id, created_after, name" + strings.Repeat(", coalesce(price * 2 + 1, 0) AS total", 50) + " FROM events WHERE created_after > $1 AND name LIKE 'x%' ORDER BY id LIMIT 500"
	b.SetBytes(int64(len(sql)))
	b.ReportAllocs()
	for b.Loop() {
		_ = Rewrite(sql, conforming)
	}
}

func TestScannerIsSparedRowsOfOperators(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{strings.Repeat("/*", 50_000), strings.Repeat("+", 50_000), strings.Repeat(strings.Repeat("*/*", 1000)+" ", 100)} {
		if scansInTime(sql) {
			t.Errorf("%.12q… of %d bytes would be scanned", sql, len(sql))
		}
	}
}
