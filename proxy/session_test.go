package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
)

func TestPgxWorksThroughTheProxy(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	if _, err := conn.Exec(ctx, "CREATE TABLE t (id int PRIMARY KEY, v text)"); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		if _, err := conn.Exec(ctx, "INSERT INTO t VALUES ($1, $2)", i, strings.Repeat("x", i*10_000)); err != nil {
			t.Fatal(err)
		}
	}
	var sum int
	if err := conn.QueryRow(ctx, "SELECT sum(length(v)) FROM t WHERE id >= $1", 0).Scan(&sum); err != nil {
		t.Fatal(err)
	}
	if sum != 450_000 {
		t.Errorf("sum of lengths is %d", sum)
	}
}

// TestPipelineWithoutReading is the mutual block: a client that writes much before it reads.
func TestPipelineWithoutReading(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	w := dialWire(t, p.dsn(t, p.cluster.TestDatabase(t)))
	const statements = 50_000
	var batch []byte
	batch = appendParse(batch, "s", "SELECT repeat('x', 1000)")
	for range statements {
		batch = appendBind(batch, "", "s")
		batch = appendExecute(batch, "")
	}
	batch = appendSync(batch)
	var sent sync.WaitGroup
	sent.Go(func() { w.send(t, batch, 0) })
	rows := 0
	for {
		message, err := w.read()
		if err != nil {
			t.Fatal(err)
		}
		if message[0] == msgDataRow {
			rows++
		}
		if message[0] == msgReady {
			break
		}
	}
	sent.Wait()
	if rows != statements {
		t.Errorf("%d rows", rows)
	}
}

func TestLargeMessages(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	big := strings.Repeat("y", 20<<20)
	var got string
	if err := conn.QueryRow(ctx, "SELECT $1::text", big).Scan(&got); err != nil || got != big {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := conn.QueryRow(ctx, "SELECT '"+big+"'", pgx.QueryExecModeSimpleProtocol).Scan(&got); err != nil || got != big {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	var count int
	args := make([]any, 65535)
	holders := make([]string, len(args))
	for i := range args {
		args[i], holders[i] = "1", fmt.Sprintf("$%d", i+1)
	}
	err := conn.QueryRow(ctx, "SELECT cardinality(ARRAY["+strings.Join(holders, ",")+"])", args...).Scan(&count)
	if err != nil || count != len(args) {
		t.Errorf("%d parameters, %v", count, err)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.MaxConnections, c.HandshakeTimeout = 1, time.Second })
	direct := p.cluster.DSN("postgres", "", "")
	first := dialWire(t, p.dsn(t, direct))
	second, cfg := dialOnly(t, p.dsn(t, direct))
	second.send(t, startupPacketFor("user", cfg.User), 0)
	if got := second.until('Z', 1); !strings.Contains(got[0], `C="53300"`) {
		t.Errorf("one too many got %q", got)
	}
	slow, _ := dialOnly(t, p.dsn(t, direct))
	slow.send(t, []byte{0, 0}, 0)
	if got := slow.until('Z', 1); !slices.Equal(got, []string{"EOF"}) {
		t.Errorf("a slow client got %q", got)
	}
	first.send(t, parseMessage(t, `Q "SELECT 1"`), 0) // its deadline has passed with the handshake
	if got := first.until('Z', 1); got[len(got)-1] != "Z I" {
		t.Errorf("the session got %q", got)
	}
}

type panicking struct{}

func (panicking) Fulfil(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	panic("in a session")
}

func TestPanicEndsItsSessionOnly(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller, d.Log = panicking{}, zerolog.Nop() })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	victim, other := connect(t, p.dsn(t, direct)), connect(t, p.dsn(t, direct))
	if _, err := victim.Exec(within(t), "SELECT koldstore.changes_since(1)"); err == nil {
		t.Error("no error")
	}
	mustExec(t, other, "SELECT 1")
	p.backends(t, direct, 1)
}

type fakeStats struct{}

func (fakeStats) StreamStats(database string) json.RawMessage {
	return json.RawMessage(`{"s":{"consumers":3,"lag":7},"é'$$":{"consumers":1}}`)
}

func TestShowStreamsKnowsThisInstance(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.StreamStats = fakeStats{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+"CREATE TABLE t (i int PRIMARY KEY)")
	conn := connect(t, p.dsn(t, direct))
	mustExec(t, conn, "CREATE STREAM s ON t WHEN (i > 0)")
	var consumers, lag int
	if err := conn.QueryRow(within(t), "SHOW STREAMS").Scan(nil, nil, nil, &consumers, &lag); err != nil || consumers != 3 || lag != 7 {
		t.Errorf("%d consumers, lag %d, %v", consumers, lag, err)
	}
}

func TestServeSaysWhenItsListenerBreaks(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if err := p.server.Serve(t.Context(), ln); err == nil {
		t.Error("no error")
	}
}

func TestRepeatable(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"SELECT changes_since()":                                 true,
		"SELECT changes_since() WHERE x = 'commit';":             true,
		"SELECT CASE WHEN a THEN b END FROM changes_since(); ":   true,
		"INSERT INTO t VALUES (1); SELECT changes_since()":       true,
		"SELECT CASE WHEN a THEN 1 END; SELECT changes_since()":  true,
		"BEGIN; SELECT changes_since()":                          false,
		"SELECT changes_since(); /* x */ end":                    false,
		"SELECT changes_since();COMMIT":                          false,
		"DO $$ BEGIN COMMIT; PERFORM changes_since(); END $$":    false,
		"/* a /* b */ */ do $$ BEGIN changes_since();rollback$$": false,
		"DO $$ BEGIN PERFORM changes_since() END $$":             true,
		"-- x\n call p(changes_since())":                         false,
		"CALL koldstore.create_stream('changes_since')":          true,
	} {
		if got := repeatable(sql); got != want {
			t.Errorf("%s: %t", sql, got)
		}
	}
}
