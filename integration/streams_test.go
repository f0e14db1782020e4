package integration_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"testing"
	"time"
)

// TestExpiredEventsAreInvisible: an event that is older than its stream's retention is not seen any more, whether or not its
// space has been freed. (Roles that bypass row-level security see it until the sweep: docs/guarantees.md.)
func TestExpiredEventsAreInvisible(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY); CREATE STREAM short ON orders WHEN (id > 0) WITH (retention = '3s');
		CREATE STREAM long ON orders WHEN (id > 0) WITH (retention = '1h')`)
	c.exec("INSERT INTO orders VALUES (1)")
	c.fence()
	await(t, "the event to expire", func() bool { return c.text("SELECT count(*) FROM _stream_short") == "0" })
	for name, reader := range map[string]*client{"its owner": c, "the same directly": w.connectDirect(t, "demo")} {
		for _, sql := range []string{
			"SELECT id FROM _stream_short",
			"SELECT id FROM _stream_short ORDER BY id LIMIT 10 AFTER ('')",
			"SELECT id FROM _stream_short WHERE id > ''",
			"WITH x AS (SELECT * FROM _stream_short) SELECT id FROM x",
		} {
			if name == "the same directly" && sql[len(sql)-1] == ')' {
				continue // AFTER is koldproxy's
			}
			if got := reader.rows(sql); len(got) != 0 {
				t.Errorf("%s sees an expired event: %s", name, sql)
			}
		}
		if got := reader.rows("SELECT id FROM _stream_long"); len(got) != 1 {
			t.Errorf("%s sees %d events that have not expired", name, len(got))
		}
	}
	last := 1
	await(t, "a new event to be seen before it expires", func() bool {
		last++
		c.exec(fmt.Sprintf("INSERT INTO orders VALUES (%d)", last))
		c.fence()
		return c.text(fmt.Sprintf("SELECT count(*) FROM _stream_short WHERE k = '%d'", last)) == "1"
	})
}

// TestStreamsBeginAtTheirCommit: nothing older than CREATE STREAM, nothing missed after it, and everything that matched
// first with start = 'earliest', while others write.
func TestStreamsBeginAtTheirCommit(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int); INSERT INTO orders SELECT i, i FROM generate_series(1, 500) i")
	ctx, cancel := context.WithCancel(c.ctx)
	written := make(chan error, 1)
	writer := w.connect(t)
	defer func() { cancel(); <-written }() // also when the test fails: its session must not be closed under the writer
	go func() {
		defer close(written)
		for i := 501; ; i++ {
			if _, err := writer.Exec(ctx, fmt.Sprintf("INSERT INTO orders VALUES (%d, %d); UPDATE orders SET v = v + 1 WHERE id = %d; DELETE FROM orders WHERE id = %d", i, i, i%100+1, i-200)); err != nil {
				written <- err
				return
			}
			if ctx.Err() != nil {
				written <- nil
				return
			}
		}
	}()
	for i := range 5 {
		c.exec(fmt.Sprintf("CREATE STREAM copy%d ON orders WHEN (v %% 2 = 0) WITH (start = 'earliest')", i))
		c.exec(fmt.Sprintf("CREATE STREAM live%d ON orders WHEN (true)", i))
	}
	await(t, "some writes behind the last CREATE STREAM", func() bool { return c.text("SELECT count(*) > 20 FROM _stream_live4") == "t" })
	cancel()
	<-written
	c.fence()
	for i := range 5 {
		c.checkFoldOf(fmt.Sprintf("copy%d", i), "orders", "v % 2 = 0", true)
	}
	// A later stream has the same events as an earlier one, from its own beginning on.
	for i := range 4 {
		earlier, err := c.readLog(fmt.Sprintf("live%d", i), "", 1000)
		must(t, err)
		later, err := c.readLog(fmt.Sprintf("live%d", i+1), "", 1000)
		must(t, err)
		if len(later) > len(earlier) {
			t.Fatalf("stream %d has %d events, the later one %d", i, len(earlier), len(later))
		}
		tail := earlier[len(earlier)-len(later):]
		for j := range later {
			if tail[j] != later[j] {
				t.Fatalf("stream %d: %s", i, firstDifference(tail, later))
			}
		}
	}
}

// TestNotify: SQL consumers are woken with the id of the newest event.
func TestNotify(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	name := w.schema + "_woken" // channels are not qualified
	c.exec(fmt.Sprintf("CREATE TABLE orders (id int PRIMARY KEY); CREATE STREAM %s ON orders WHEN (id > 0)", name))
	listener := w.connect(t)
	listener.exec("LISTEN koldstore_stream_" + name)
	c.exec("INSERT INTO orders VALUES (1)")
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	n, err := listener.WaitForNotification(ctx)
	must(t, err)
	c.fence()
	if want := c.text("SELECT max(id) FROM _stream_" + name); n.Payload != want {
		t.Errorf("notified of %q, the newest is %q", n.Payload, want)
	}
}

// TestALostEventIsCounted: a row that cannot become an event costs that event and is counted; the application's write, the
// events around it and the feed go on.
func TestALostEventIsCounted(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int, j json); CREATE STREAM risky ON orders WHEN (100 / v > 1)")
	c.exec("SELECT koldstore.manage_table('orders')")
	c.exec("INSERT INTO orders VALUES (1, 10)")
	c.exec("INSERT INTO orders VALUES (2, 0)")              // the predicate raises
	c.exec(`INSERT INTO orders VALUES (3, 10, '"\u0000"')`) // to_jsonb raises
	c.exec("INSERT INTO orders VALUES (4, 10)")
	c.fence()
	if got := c.text("SELECT string_agg(k::text, ' ' ORDER BY id) FROM _stream_risky"); got != "1 4" {
		t.Errorf("events: %s", got)
	}
	if got := c.text("SELECT count(*) FROM orders"); got != "4" {
		t.Errorf("%s rows in the table", got)
	}
	if got := c.text("SELECT events_lost FROM koldstore.show_streams() WHERE name = 'risky'"); got != "2" {
		t.Errorf("%s events lost", got)
	}
	if lost := w.inst.metric(t, "koldproxy_stream_events_lost_total", w.schema+".risky"); lost != 2 {
		t.Errorf("koldproxy_stream_events_lost_total is %v", lost)
	}
}

// metric reads a counter of a stream from /metrics.
func (i *instance) metric(t *testing.T, name, stream string) float64 {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	answer, err := (&http.Client{Transport: transport}).Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", i.ports.http))
	must(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	must(t, err)
	line := regexp.MustCompile(`(?m)^` + name + `\{[^}]*stream="` + regexp.QuoteMeta(stream) + `"[^}]*\} (\S+)$`).FindSubmatch(body)
	if line == nil {
		t.Fatalf("no %s of stream %s in /metrics", name, stream)
	}
	value, err := strconv.ParseFloat(string(line[1]), 64)
	must(t, err)
	return value
}
