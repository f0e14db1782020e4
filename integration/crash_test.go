package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// TestKillNine kills koldproxy, and with it its PostgreSQL, again and again while random transactions are written, mirrors
// are flushed and consumers read. Afterwards nothing may be missing and nothing may be there twice: not in the streams, not
// in the feeds, and not in the copies that the consumers made on their way.
func TestKillNine(t *testing.T) {
	t.Parallel()
	kills := 4
	if longTests {
		kills = 20
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))

	inst := newInstance(t, keptDemo)
	load := newLoad(t, inst, seed)
	for i := range kills {
		load.start()
		want := load.commits.Load() + 20 + random.Int64N(150)
		await(t, "transactions to commit", func() bool { return load.commits.Load() >= want || load.failed() })
		if err := inst.kill(); err != nil {
			t.Fatalf("kill %d: %v", i+1, err)
		}
		load.stop()
		if err := inst.start(nil); err != nil {
			t.Fatalf("start after kill %d: %v", i+1, err)
		}
	}
	if load.failed() {
		t.FailNow()
	}
	t.Logf("%d transactions, %d flushes, %d pages read", load.commits.Load(), load.flushes.Load(), load.pages.Load())
	load.check()
}

// load is what goes on while koldproxy is killed.
type load struct {
	t      *testing.T
	inst   *instance
	tables []*loadedTable

	wholeReads bool // also reads whole feeds in one statement

	commits, flushes, pages atomic.Int64
	broken                  atomic.Bool
	cancel                  context.CancelFunc
	running                 sync.WaitGroup
}

// loadedTable is a table with a stream and a feed, its writers, its ground truth and its consumers.
type loadedTable struct {
	name      string
	key       []string
	audit     *feedtest.Audit
	histories []*feedtest.History
	feed      *feedConsumer
	stream    *streamConsumer
}

func newLoad(t *testing.T, inst *instance, seed uint64) *load {
	t.Helper()
	l := &load{t: t, inst: inst}
	c := inst.connect(t, "demo", nil)
	for i, table := range []*loadedTable{{name: "single", key: []string{"id"}}, {name: "composite", key: []string{"kind", "id"}}} {
		must(t, feedtest.CreateTable(c.ctx, c, table.name, len(table.key) > 1))
		var err error
		table.audit, err = feedtest.NewAudit(c.ctx, c, table.name, feedtest.Predicate, table.key...)
		must(t, err)
		c.exec(fmt.Sprintf("CREATE STREAM %[1]s ON %[1]s WHEN (%[2]s) WITH (pre_image = true)", table.name, feedtest.Predicate))
		c.exec(fmt.Sprintf("SELECT koldstore.manage_table('%s', min_flush_rows => 1, max_rows_per_file => 50)", table.name))
		c.exec("SELECT koldstore.wait_for_async_mirror()") // a feed is not shown while it is being seeded
		for w := range 2 {
			table.histories = append(table.histories, feedtest.NewHistory(table.name, 60, seed+uint64(10*i+w)))
		}
		table.feed = newFeedConsumer(table.name, 7)
		table.stream = &streamConsumer{stream: table.name, copied: map[string]string{}, seen: map[string]bool{}}
		l.tables = append(l.tables, table)
	}
	return l
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// start runs writers, flushes and consumers until stop; each connects for itself.
func (l *load) start() {
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	for _, table := range l.tables {
		for _, history := range table.histories {
			l.loop(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				if err := history.Step(ctx, conn); err != nil {
					return err
				}
				l.commits.Add(1)
				return nil
			})
		}
		l.loop(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, fmt.Sprintf("SELECT koldstore.flush_table('%s', wait => true, force => true)", table.name))
			if err == nil {
				l.flushes.Add(1)
			}
			return err
		})
		l.loop(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			l.pages.Add(1)
			if err := table.feed.read(ctx, conn); err != nil {
				return err
			}
			return table.stream.read(ctx, conn)
		})
		if l.wholeReads {
			l.loop(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				l.pages.Add(1)
				return readWhole(ctx, conn, table)
			})
		}
	}
}

// readWhole reads a feed and what lies under it in one snapshot: each key has to come once, and none may be missing that
// the mirror had at that moment.
func readWhole(ctx context.Context, conn *pgx.Conn, table *loadedTable) error {
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		page, err := feedtest.Page(ctx, tx, table.name, 0, 100_000)
		if err != nil {
			return err
		}
		var rows, keys int
		seen := map[string]bool{}
		for _, row := range page {
			if seen[row.PK] {
				return fmt.Errorf("the feed of %s gives key %s twice in one snapshot", table.name, row.PK)
			}
			seen[row.PK] = true
		}
		// The mirror and the live rows of all segments, as the catalog counts them.
		err = tx.QueryRow(ctx, fmt.Sprintf(`SELECT (SELECT count(*) FROM koldstore.%s__cl), count(DISTINCT pk)
			FROM koldstore.changes_since('%s', limit_rows => 100000)`, table.name, table.name)).Scan(&rows, &keys)
		if err != nil {
			return err
		}
		if keys != len(page) || rows > len(page) {
			return fmt.Errorf("the feed of %s has %d rows and then %d in one snapshot, of which %d in the mirror", table.name, len(page), keys, rows)
		}
		return nil
	})
}

// loop repeats a step on a connection until the connection breaks or ctx ends. An error of the server that does not come
// from its end fails the test.
func (l *load) loop(ctx context.Context, step func(context.Context, *pgx.Conn) error) {
	l.running.Go(func() {
		conn, err := pgx.Connect(ctx, l.inst.dsn("demo", url.Values{"connect_timeout": {"10"}}))
		if err != nil {
			return // killed already
		}
		defer conn.Close(context.Background())
		for ctx.Err() == nil {
			err := step(ctx, conn)
			var pg *pgconn.PgError
			switch {
			case err == nil:
				continue
			case conn.IsClosed() || ctx.Err() != nil:
				return
			case errors.As(err, &pg) && slices.Contains([]string{"57P01", "57P02", "57P03", "08006", "58000"}, pg.Code):
				return
			}
			l.broken.Store(true)
			l.t.Errorf("under load: %s", describe(err))
			return
		}
	})
}

func (l *load) failed() bool { return l.broken.Load() }

// stop ends what start began.
func (l *load) stop() {
	l.cancel()
	l.running.Wait()
}

// check compares streams, feeds and the consumers' copies with the tables and with the audits.
func (l *load) check() {
	t := l.t
	t.Helper()
	c := l.inst.connect(t, "demo", nil)
	c.fence()
	for _, table := range l.tables {
		log := "_stream_" + table.name
		if err := table.audit.CheckStream(c.ctx, c, log); err != nil {
			t.Errorf("stream of %s: %v", table.name, err)
		}
		if err := feedtest.CheckFold(c.ctx, c, log, table.name, feedtest.Predicate, table.audit.StreamKey(), true); err != nil {
			t.Error(err)
		}
		ever, err := table.audit.Keys(c.ctx, c)
		must(t, err)
		for _, limit := range []int{1000, 13} {
			if err := feedtest.CheckFeed(c.ctx, c, table.name, table.audit.FeedKey(), limit, ever); err != nil {
				t.Error(err)
			}
		}
		c.checkPreImages(table.name)
		must(t, table.feed.finish(c.ctx, c.Conn))
		compareCopies(t, "the copy from the feed of "+table.name, table.feed.copied, c.rowsByKey(table.name, "true", true))
		must(t, table.stream.finish(c.ctx, c.Conn))
		compareCopies(t, "the copy from the stream of "+table.name, table.stream.copied, c.rowsByKey(table.name, feedtest.Predicate, false))
		if lost := c.text("SELECT sum(events_lost) FROM koldstore.visible_stream_status"); lost != "0" {
			t.Errorf("%s events are counted as lost", lost)
		}
		if sick := c.rows("SELECT name, state, reason FROM koldstore.visible_stream WHERE state <> 'active'"); len(sick) > 0 {
			t.Errorf("streams: %v", sick)
		}
	}
}

// checkPreImages wants for every audited change of a single row that gives an event the row as it was before, in "old".
func (c *client) checkPreImages(table string) {
	c.t.Helper()
	missing := c.rows(fmt.Sprintf(`
		SELECT op, k, count(*) FROM (
			SELECT CASE WHEN op = 'DELETE' THEN 'delete' WHEN nm THEN 'put' ELSE 'exit' END AS op, coalesce(nk, ok)::jsonb AS k,
			       coalesce(nd, od)::jsonb AS doc, od::jsonb AS old
			FROM %[1]s_audit WHERE CASE op WHEN 'INSERT' THEN nm WHEN 'DELETE' THEN om WHEN 'UPDATE' THEN ok = nk AND (nm OR om) END
			EXCEPT ALL SELECT op, k, doc, old FROM _stream_%[1]s) x
		GROUP BY op, k ORDER BY op, k LIMIT 5`, table))
	if len(missing) > 0 {
		c.t.Errorf("stream %s: changes without an event that has their row before: %v", table, missing)
	}
}

func compareCopies(t *testing.T, what string, copied, want map[string]string) {
	t.Helper()
	for key, row := range want {
		if copied[key] != row {
			t.Errorf("%s: key %s is\n%q, the table has\n%q", what, key, copied[key], row)
		}
	}
	for key := range copied {
		if _, ok := want[key]; !ok {
			t.Errorf("%s: key %s is not in the table", what, key)
		}
	}
}

// feedConsumer keeps a copy of a table by paging through its feed with one cursor.
type feedConsumer struct {
	table  string
	limit  int
	cursor int64
	copied map[string]string
}

func newFeedConsumer(table string, limit int) *feedConsumer {
	return &feedConsumer{table: table, limit: limit, copied: map[string]string{}}
}

// read applies one page.
func (f *feedConsumer) read(ctx context.Context, conn *pgx.Conn) error {
	_, err := f.page(ctx, conn)
	return err
}

func (f *feedConsumer) page(ctx context.Context, conn *pgx.Conn) (n int, err error) {
	page, err := feedtest.Page(ctx, conn, f.table, f.cursor, f.limit)
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{}
	for _, row := range page {
		switch {
		case row.Seq <= f.cursor:
			return 0, fmt.Errorf("the feed of %s gives %d behind %d", f.table, row.Seq, f.cursor)
		case seen[row.PK]:
			return 0, fmt.Errorf("the feed of %s gives key %s twice in one page", f.table, row.PK)
		}
		seen[row.PK], f.cursor = true, row.Seq
		if row.Deleted {
			delete(f.copied, row.PK)
		} else {
			f.copied[row.PK] = row.Image
		}
	}
	return len(page), nil
}

// finish reads to the end.
func (f *feedConsumer) finish(ctx context.Context, conn *pgx.Conn) error {
	for {
		if n, err := f.page(ctx, conn); err != nil || n < f.limit {
			return err
		}
	}
}

// streamConsumer keeps a copy of what a stream's predicate selects, from its log.
type streamConsumer struct {
	stream string
	after  string
	copied map[string]string
	seen   map[string]bool
}

const streamPage = 9

func (s *streamConsumer) read(ctx context.Context, conn *pgx.Conn) error {
	_, err := s.page(ctx, conn)
	return err
}

func (s *streamConsumer) page(ctx context.Context, conn *pgx.Conn) (int, error) {
	rows, err := conn.Query(ctx, fmt.Sprintf("SELECT id, op, k::text, doc::text FROM _stream_%s ORDER BY id LIMIT %d AFTER ($1)", s.stream, streamPage), s.after)
	if err != nil {
		return 0, err
	}
	page, err := pgx.CollectRows(rows, pgx.RowToStructByPos[feedtest.Event])
	if err != nil {
		return 0, err
	}
	for _, e := range page {
		if e.ID <= s.after || s.seen[e.ID] {
			return 0, fmt.Errorf("stream %s gives event %s behind %s", s.stream, e.ID, s.after)
		}
		s.after, s.seen[e.ID] = e.ID, true
		if e.Op == "put" {
			s.copied[e.K] = e.Doc
		} else {
			delete(s.copied, e.K)
		}
	}
	return len(page), nil
}

func (s *streamConsumer) finish(ctx context.Context, conn *pgx.Conn) error {
	for {
		if n, err := s.page(ctx, conn); err != nil || n < streamPage {
			return err
		}
	}
}

// TestFlushUnderLoad pages through feeds, from the beginning and with a cursor, while rows change and mirrors are flushed as
// fast as they can: one row per key in every page, nothing skipped, nothing repeated.
func TestFlushUnderLoad(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, demo)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	l := newLoad(t, inst, seed)
	enough := time.After(6 * time.Second)
	if longTests {
		enough = time.After(time.Minute)
	}
	l.wholeReads = true
	l.start()
	<-enough
	l.stop()
	t.Logf("%d transactions, %d flushes, %d reads", l.commits.Load(), l.flushes.Load(), l.pages.Load())
	if l.flushes.Load() == 0 || l.pages.Load() == 0 {
		t.Error("nothing was flushed or read")
	}
	if !l.failed() {
		l.check()
	}
}
