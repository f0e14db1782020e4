package proxy

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// hotFeed makes of the stand-in one whose feed needs no answer of koldproxy: it has the rows itself.
const hotFeed = `
CREATE OR REPLACE FUNCTION koldstore.changes_since(pages int, tab int DEFAULT 1) RETURNS TABLE (n bigint, note text) LANGUAGE sql STABLE AS
	$$ SELECT i * 10 + r, 'é😀' FROM generate_series(1, pages) i, generate_series(0, 1) r $$;
`

// differentialSetup is what scripts work on. changes_since is evaluated by the planner as well.
const differentialSetup = `
CREATE FUNCTION changes_since(pages int) RETURNS bigint LANGUAGE sql STABLE AS 'SELECT max(n) FROM koldstore.changes_since(pages)';
CREATE FUNCTION writes(i int) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN INSERT INTO t VALUES (i); RETURN (SELECT max(n) FROM koldstore.changes_since(1)); END $$;
CREATE TABLE t (i bigint)`

// differential is a random conversation, several batches and Query messages, each of which ends with a ReadyForQuery.
type differential struct {
	rnd   *rand.Rand
	steps [][]byte
	told  []string
}

// Nothing here writes and returns rows: where some are left in the portal PostgreSQL shows what was written to the next statement
// but one, and one of koldproxy's own may be that.
var (
	differentialFeeds = []string{
		"SELECT n FROM koldstore.changes_since(1)", "SELECT n, note FROM koldstore.changes_since(2)", "SELECT n FROM koldstore.changes_since(0)",
		"INSERT INTO t SELECT n FROM koldstore.changes_since(1)", "SELECT count(*) FROM t WHERE i < changes_since(1)",
		"SELECT writes(3), changes_since(0)", "SELECT 1 / (SELECT count(*) - 2 FROM koldstore.changes_since(1))",
	}
	differentialPlain = []string{
		"SELECT 'plain', 42", "INSERT INTO t VALUES (1)", "SELECT count(*), sum(i) FROM t", "UPDATE t SET i = i + 1",
		"SELECT generate_series(1, 3)", "SELECT generate_series(1, 3) / (SELECT count(*) FROM t)", "SET x.y = '1'", "SHOW standard_conforming_strings",
	}
	differentialBlocks = []string{"BEGIN", "BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT a", "SAVEPOINT b", "ROLLBACK TO a", "RELEASE a", "ROLLBACK TO b", "RELEASE b"}
	differentialTexts  = []string{
		"SAVEPOINT a; %s", "%s; SAVEPOINT b", "SAVEPOINT a; %s; RELEASE a", "INSERT INTO t VALUES (5); SAVEPOINT a; UPDATE t SET i = 0; %s; ROLLBACK TO a",
		"INSERT INTO t VALUES (2); %s", "%s; SELECT count(*) FROM t", "%s; SELECT 1/0",
	}
)

func (d *differential) pick(list []string) string { return list[d.rnd.IntN(len(list))] }

func (d *differential) statement() string {
	switch r := d.rnd.IntN(10); {
	case r < 4:
		return d.pick(differentialFeeds)
	case r < 9:
		return d.pick(differentialPlain)
	}
	return d.pick(differentialBlocks)
}

func newDifferential(t *testing.T, seed uint64) *differential {
	d := &differential{rnd: rand.New(rand.NewPCG(seed, 1))}
	parsed := []string{""} // mostly what exists is used, so that a batch goes on
	for range 2 + d.rnd.IntN(5) {
		var step []byte
		var told []string
		say := func(format string, args ...any) {
			line := fmt.Sprintf(format, args...)
			told = append(told, line)
			step = append(step, parseMessage(t, line)...)
		}
		if d.rnd.IntN(5) < 2 {
			sql := d.statement()
			if d.rnd.IntN(3) == 0 {
				sql = fmt.Sprintf(d.pick(differentialTexts), d.pick(differentialFeeds))
			}
			say("Q %q", sql)
		} else {
			for range 1 + d.rnd.IntN(8) {
				statement, portal := d.pick([]string{"", "s", "u"}), d.pick([]string{"", "", "p"})
				if portal != "" {
					say("C P %q", portal)
				}
				parse := func() {
					say("C S %q", statement)
					say("P %q %q", statement, d.statement())
					parsed = append(parsed, statement)
				}
				rows := d.rnd.IntN(6) / 4 // mostly all
				switch r := d.rnd.IntN(20); {
				case r < 8:
					parse()
					say("B %q %q", portal, statement)
					say("E %q %d", portal, rows)
				case r < 14:
					say("B %q %q", portal, d.pick(parsed))
					if d.rnd.IntN(2) == 0 {
						say("D P %q", portal)
					}
					say("E %q %d", portal, rows)
				case r < 15:
					say("E %q %d", portal, rows)
				case r < 16:
					say("D S %q", d.pick(parsed))
				case r < 17:
					say("C S %q", statement)
					parsed = slices.DeleteFunc(parsed, func(name string) bool { return name == statement && name != "" })
				default:
					parse()
				}
			}
			say("S")
		}
		d.steps, d.told = append(d.steps, step), append(d.told, strings.Join(told, "\n"))
	}
	return d
}

// play has the conversation and returns the answers to each step. together sends everything before anything is read.
func (d *differential) play(t *testing.T, dsn string, together bool) []string {
	t.Helper()
	w := dialWire(t, dsn)
	defer w.conn.Close()
	w.send(t, parseMessage(t, `Q "SET extra_float_digits = 1; TRUNCATE t"`), 0)
	w.until('Z', 1)
	if together {
		for _, step := range d.steps {
			w.send(t, step, 0)
		}
	}
	var all []string
	for _, step := range d.steps {
		if !together {
			w.send(t, step, 0)
		}
		all = append(all, strings.Join(w.until('Z', 1), "\n"))
	}
	return all
}

// TestFeedsLookHot has random conversations with feeds in them, once with PostgreSQL where the feeds have all of their rows, once
// through the proxy where every row is cold, and compares the answers. Where koldproxy may say KS003 (docs/guarantees.md) the
// conversation ends; that is not to be often.
func TestFeedsLookHot(t *testing.T) {
	t.Parallel()
	conversations := 120
	if os.Getenv("KOLDPROXY_TEST_LONG") == "1" {
		conversations = 3000
	}
	first := uint64(time.Now().UnixNano())
	if text := os.Getenv("KOLDPROXY_TEST_SEED"); text != "" {
		if _, err := fmt.Sscan(text, &first); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seeds %d and following; KOLDPROXY_TEST_SEED=… repeats them", first)
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	cold, hot := p.cluster.TestDatabase(t), p.cluster.TestDatabase(t)
	p.prepare(t, cold, standIn+differentialSetup)
	p.prepare(t, hot, standIn+hotFeed+differentialSetup)
	through := p.dsn(t, cold)
	refused := 0
	for seed := first; seed < first+uint64(conversations); seed++ {
		d := newDifferential(t, seed)
		together := seed%4 == 0
		want, got := d.play(t, hot, together), d.play(t, through, together)
		for i := range want {
			if strings.Contains(got[i], `C="KS003"`) {
				refused++
				break
			}
			if got[i] != want[i] {
				t.Fatalf("seed %d, step %d of\n%s\nthrough koldproxy:\n%s\ndirect:\n%s", seed, i+1, indent(strings.Join(d.told, "\n\n")), indent(got[i]), indent(want[i]))
			}
		}
	}
	t.Logf("%d of %d conversations end with KS003", refused, conversations)
	if refused*5 > conversations {
		t.Error("that is too often")
	}
}
