package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/rewrite"
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

type panicking struct{ fakeFulfiller }

func (*panicking) Fulfil(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	panic("in a session")
}

func TestPanicEndsItsSessionOnly(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller, d.Log = &panicking{}, zerolog.Nop() })
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

// changingStats counts one consumer more each time it is asked.
type changingStats struct{ asked atomic.Int64 }

func (s *changingStats) StreamStats(string) json.RawMessage {
	return fmt.Appendf(nil, `{"s":{"consumers":%d,"lag":0}}`, s.asked.Add(1))
}

// A prepared SHOW STREAMS has the numbers of its execution, in and outside of transaction blocks and in batches.
func TestPreparedShowStreamsCountsWhenItRuns(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.StreamStats, d.Fulfiller = &changingStats{}, &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+"CREATE TABLE t (i int PRIMARY KEY)")
	conn := connect(t, p.dsn(t, direct))
	mustExec(t, conn, "CREATE STREAM s ON t WHEN (i > 0)")
	if _, err := conn.Prepare(within(t), "shown", "SHOW STREAMS"); err != nil {
		t.Fatal(err)
	}
	last := 0
	show := func(scan func(dest ...any) error, how string) {
		t.Helper()
		var consumers int
		if err := scan(nil, nil, nil, &consumers, nil); err != nil || consumers <= last {
			t.Errorf("%s: %d consumers after %d, %v", how, consumers, last, err)
		}
		last = consumers
	}
	for _, how := range []string{"alone", "again", "BEGIN", "in a block", "COMMIT", "behind it"} {
		if strings.ToUpper(how) == how {
			mustExec(t, conn, how)
			continue
		}
		show(conn.QueryRow(within(t), "shown").Scan, how)
	}
	batch := &pgx.Batch{}
	for range 3 {
		batch.Queue("shown")
	}
	results := conn.SendBatch(within(t), batch)
	for i := range 3 {
		show(results.QueryRow().Scan, fmt.Sprintf("number %d of a batch", i))
	}
	if err := results.Close(); err != nil {
		t.Error(err)
	}
	if status := conn.PgConn().TxStatus(); status != 'I' {
		t.Errorf("transaction status %c", status)
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

func TestClassify(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]text{
		"SELECT changes_since()":                                                         {mayDemand: true},
		"SELECT changes_since() WHERE x = 'commit';":                                     {mayDemand: true},
		"BEGIN; SELECT changes_since()":                                                  {mayDemand: true}, // tags say how far it has come
		"BEGIN":                                                                          {},
		"-- changes_since\nFETCH ALL FROM c":                                             {},
		"SELECT pg_advisory_lock(1), changes_since()":                                    {mayDemand: true, ownWay: true},
		"SELECT pg_advisory_xact_lock(1), changes_since()":                               {mayDemand: true},
		"SET TRANSACTION READ ONLY; SELECT changes_since()":                              {mayDemand: true, noPoint: true},
		"DO $$ BEGIN CALL p(); END $$ -- ; x":                                            {mayDemand: true, alone: true},
		"CALL p('; x')":                                                                  {mayDemand: true, alone: true},
		"CALL p(); SELECT changes_since()":                                               {mayDemand: true},
		"DO $$ BEGIN CALL p() END $$":                                                    {mayDemand: true, alone: true},
		"DO $$ BEGIN CALL koldstore.flush_table() END $$":                                {mayDemand: true},
		"DO $$ spi_commit() $$":                                                          {mayDemand: true, alone: true},
		"SET /* x */ TRANSACTION READ ONLY; SELECT changes_since()":                      {mayDemand: true, noPoint: true},
		"DO $$ BEGIN COMMIT; PERFORM changes_since(); END $$":                            {mayDemand: true, alone: true},
		"DO $$ BEGIN COMMIT PERFORM changes_since() END $$":                              {mayDemand: true, alone: true},
		"/* a /* b */ */ do $$ BEGIN changes_since() rollback$$":                         {mayDemand: true, alone: true},
		"-- x\n call p(changes_since())":                                                 {mayDemand: true, alone: true},
		"CALL koldstore.create_stream('changes_since')":                                  {mayDemand: true},
		"DECLARE c CURSOR FOR SELECT changes_since()":                                    {mayDemand: true, cursor: "c"},
		"/* a /* b */ c */ CALL pc($1)":                                                  {mayDemand: true, alone: true},
		`CALL pc(length(E'it\'s; x')+$1)`:                                                {mayDemand: true, alone: true},
		"CALL übertrag($1)":                                                              {mayDemand: true, alone: true},
		"DO $é$ BEGIN CALL p(); END $é$":                                                 {mayDemand: true, alone: true},
		"DO $body$ BEGIN EXECUTE $x$ a; b $x$; COMMIT; END $body$":                       {mayDemand: true, alone: true},
		"DO $body$ BEGIN EXECUTE $x$ a; b $x$; END $body$":                               {mayDemand: true},
		"DO $$ BEGIN CALL /* /* */ koldstore. */ p(); END $$":                            {mayDemand: true, alone: true},
		`DO E'BEGIN \103ALL p(); END'`:                                                   {mayDemand: true, alone: true},
		"DO LANGUAGE plpgsql $$ BEGIN PERFORM changes_since(); END $$":                   {mayDemand: true},
		"DO LANGUAGE plpython3u $$ changes_since() $$":                                   {mayDemand: true, alone: true},
		"SELECT changes_since() FROM pg_logical_slot_get_changes('s', NULL, NULL)":       {mayDemand: true, ownWay: true},
		"COPY (SELECT changes_since()) TO PROGRAM 'cat'":                                 {mayDemand: true, ownWay: true},
		`SELECT U&"pg\005fadvisory_lock"(1), changes_since()`:                            {mayDemand: true, ownWay: true},
		`declare/**/"Ö x" CURSOR FOR SELECT changes_since()`:                             {mayDemand: true, cursor: `"Ö x"`},
		"DECLARE -- x\n c CURSOR FOR SELECT changes_since()":                             {mayDemand: true, cursor: "c"},
		`/* x */ declare "a ""b" no scroll cursor with hold for SELECT changes_since();`: {mayDemand: true, cursor: `"a ""b"`},
	} {
		got := text{}
		got.classify(sql, rewrite.Options{ConformingStrings: true})
		if got.mayDemand != want.mayDemand || got.ownWay != want.ownWay || got.alone != want.alone || got.noPoint != want.noPoint || got.cursor != want.cursor {
			t.Errorf("%s: %+v", sql, got)
		}
	}
}

func TestNamesInATextAreFound(t *testing.T) {
	t.Parallel()
	set := nameSet{}
	for _, name := range []string{"feed v", "f", "Größe", "İx", `a "b`, "select"} {
		set.add(name)
	}
	for _, c := range []struct {
		text, encoding string
		want           bool
	}{
		{`SELECT * FROM "Feed v"`, "UTF8", true},
		{"select F(1)", "UTF8", true},
		{"f", "", true},
		{"feed", "UTF8", false},
		{"ff f_", "UTF8", false},
		{"éf", "UTF8", false},
		{"xf.f", "UTF8", true},
		{"", "UTF8", false},
		{"SELECT 1", "UTF8", false},
		{`SELECT "select"(1)`, "UTF8", true},
		{"TABLE GRÖSSE", "UTF8", false},
		{"TABLE GRÖßE", "UTF8", true},
		{`TABLE "İx"`, "UTF8", true},
		{`TABLE "a ""b"`, "UTF8", true},
		{"TABLE gr\xf6\xdfe", "UTF8", false},
		{"TABLE gr\xf6\xdfe", "LATIN1", true},
		{"TABLE \x83\x5c", "SJIS", true}, // whatever that is
		{"TABLE feet", "LATIN1", false},
	} {
		if set.in([]byte(c.text), c.encoding) != c.want {
			t.Errorf("%q in %s: %t", c.text, c.encoding, !c.want)
		}
	}
	if none := (nameSet{}); none.in([]byte("TABLE \xe9"), "LATIN1") {
		t.Error("a name is found that nobody has")
	}
}
