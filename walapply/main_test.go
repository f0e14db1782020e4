package walapply_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
	"github.com/koldproxy/koldproxy/walapply"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(childDSN); dsn != "" {
		runChild(dsn)
		return
	}
	localpg.Main(m)
}

// database is a test database with the catalog and a table for what the recorder sees.
type database struct {
	t   testing.TB
	dsn string
	mu  sync.Mutex
	sql *pgx.Conn
	// metrics of the appliers that start starts; nil to count into the void.
	metrics *walapply.Metrics
}

func newDatabase(t testing.TB, cluster *localpg.Cluster) *database {
	t.Helper()
	dsn := cluster.TestDatabase(t)
	d := &database{t: t, dsn: dsn}
	d.reconnect()
	t.Cleanup(func() { d.sql.Close(context.Background()) })
	d.install()
	return d
}

func (d *database) reconnect() {
	d.t.Helper()
	conn, err := pgx.Connect(d.t.Context(), d.dsn)
	if err != nil {
		d.t.Fatalf("connect: %v", err)
	}
	d.sql = conn
}

func (d *database) install() {
	d.t.Helper()
	if err := migrations.Up(d.t.Context(), d.sql); err != nil {
		d.t.Fatal(err)
	}
	d.exec(`CREATE TABLE recorded (seq bigint PRIMARY KEY, commit_lsn bigint, xid bigint, who text, line text)`)
}

// exec runs a script of statements.
func (d *database) exec(sql string) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.sql.PgConn().Exec(context.Background(), sql).ReadAll(); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](d *database, sql string, args ...any) T {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	var v T
	if err := d.sql.QueryRow(context.Background(), sql, args...).Scan(&v); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// lines are the recorded changes in order, without those of the markers.
func (d *database) lines() []string {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	rows, err := d.sql.Query(context.Background(), `SELECT line FROM recorded ORDER BY seq`)
	if err != nil {
		d.t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		d.t.Fatal(err)
	}
	return lines
}

// awaitApplied waits until the slot has been told about everything that is in the log now.
func (d *database) awaitApplied() {
	d.t.Helper()
	target := query[string](d, `SELECT pg_current_wal_insert_lsn()::text`)
	d.await("confirmed_flush_lsn to reach "+target, func() bool {
		return query[bool](d, `SELECT count(*) = 1 FROM pg_replication_slots
			WHERE database = current_database() AND confirmed_flush_lsn >= $1::text::pg_lsn`, target)
	})
}

// patience is how long a test waits for what should take a fraction of it.
const patience = 2 * time.Minute

func (d *database) await(what string, ok func() bool) {
	d.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			d.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// config has short pauses for tests.
func (d *database) config() walapply.Config {
	cfg := walapply.DefaultConfig(d.dsn)
	cfg.RetryMin, cfg.RetryMax = 10*time.Millisecond, 200*time.Millisecond
	cfg.TakeoverInterval = 50 * time.Millisecond
	cfg.OnGap = walapply.OnGapStop
	return cfg
}

// running is an applier in a goroutine.
type running struct {
	*walapply.Applier
	stop func() // cancels and waits; may be called again
}

func (d *database) start(target walapply.Target, change ...func(*walapply.Config)) *running {
	d.t.Helper()
	cfg := d.config()
	for _, f := range change {
		f(&cfg)
	}
	a, err := walapply.New(cfg, target, testLog(d.t), d.metrics)
	if err != nil {
		d.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.Run(ctx); err != nil {
			d.t.Errorf("Run: %v", err)
		}
	}()
	r := &running{Applier: a, stop: func() { cancel(); <-done }}
	d.t.Cleanup(r.stop)
	return r
}

// startStreaming starts an applier and waits until it reads the slot.
func (d *database) startStreaming(target walapply.Target, change ...func(*walapply.Config)) *running {
	d.t.Helper()
	r := d.start(target, change...)
	d.await("the applier to stream", func() bool { return r.Status().Streaming })
	return r
}

func testLog(t testing.TB) zerolog.Logger {
	return zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.DebugLevel).With().Timestamp().Logger()
}

// recorder is a target that writes one line for each change into the table recorded.
type recorder struct {
	who string
	// before, if set, is called at the beginning of Apply; its error is Apply's.
	before func(ctx context.Context, changes []koldproxy.Change) error
	// work, if set, is Background.
	work func(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence) (bool, error)

	mu                              sync.Mutex
	resets, applies, commits, units int
}

func (r *recorder) count(n *int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return *n
}

func (r *recorder) Reset()     { r.mu.Lock(); r.resets++; r.mu.Unlock() }
func (r *recorder) Committed() { r.mu.Lock(); r.commits++; r.mu.Unlock() }

func (r *recorder) Apply(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) error {
	r.mu.Lock()
	r.applies++
	r.mu.Unlock()
	if r.before != nil {
		if err := r.before(ctx, changes); err != nil {
			return err
		}
	}
	seq := seqs.Reserve(int64(len(changes)), time.Now())
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"public", "recorded"}, []string{"seq", "commit_lsn", "xid", "who", "line"},
		pgx.CopyFromSlice(len(changes), func(i int) ([]any, error) {
			c := changes[i]
			return []any{int64(seq) + int64(i), int64(c.CommitLSN), int64(c.XID), r.who, line(c)}, nil
		}))
	return err
}

func (r *recorder) Close() {}

func (r *recorder) Due() bool { return true }

func (r *recorder) Background(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence) (bool, error) {
	r.mu.Lock()
	r.units++
	r.mu.Unlock()
	if r.work == nil {
		return false, nil
	}
	return r.work(ctx, tx, seqs)
}

// line spells a change: "UPDATE t (1,a)" or, with an old row, "UPDATE t (1,a) was (1,b)".
func line(c koldproxy.Change) string {
	var b strings.Builder
	b.WriteString([]string{"", "INSERT ", "UPDATE ", "DELETE ", "TRUNCATE "}[c.Op])
	if c.Relation.Namespace != "public" {
		b.WriteString(c.Relation.Namespace + ".")
	}
	b.WriteString(c.Relation.Name)
	if c.New != nil {
		b.WriteString(" " + tuple(c.New))
	}
	if c.Old != nil {
		b.WriteString(" was " + tuple(c.Old))
	}
	return b.String()
}

func tuple(row []koldproxy.Datum) string {
	parts := make([]string, len(row))
	for i, d := range row {
		parts[i] = map[koldproxy.DatumKind]string{
			koldproxy.DatumMissing: "missing", koldproxy.DatumNull: "NULL", koldproxy.DatumUnchanged: "unchanged",
		}[d.Kind]
		if d.Kind == koldproxy.DatumText {
			parts[i] = d.Text
			if len(d.Text) > 100 {
				parts[i] = fmt.Sprintf("%d bytes", len(d.Text))
			}
		}
	}
	return "(" + strings.Join(parts, ",") + ")"
}

func (d *database) equal(got, want []string) {
	d.t.Helper()
	for i := range max(len(got), len(want)) {
		g, w := "nothing", "nothing"
		if i < len(got) {
			g = got[i]
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w {
			d.t.Fatalf("change %d of %d/%d:\n got %s\nwant %s\nall: %q", i, len(got), len(want), g, w, got[:min(len(got), 50)])
		}
	}
}
