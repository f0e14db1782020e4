package coldstore_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/storetest"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// fixture is a database with the catalog, a bucket, and a table whose mirror the test writes as the applier would.
type fixture struct {
	t      *testing.T
	pool   *pgxpool.Pool
	folder string
	bucket *storetest.Faults
	store  *coldstore.Store
	cfg    coldstore.Config

	mu   sync.Mutex
	step func(step string) error // the store's failpoint
}

func newFixture(t *testing.T, change func(*coldstore.Config)) *fixture {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), localpg.TestCluster(t).TestDatabase(t))
	ok(t, err)
	t.Cleanup(pool.Close)
	ok(t, pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error { return migrations.Up(t.Context(), c.Conn()) }))
	f := &fixture{t: t, pool: pool, folder: t.TempDir()}
	local, err := coldstore.OpenLocalBucket(f.folder)
	ok(t, err)
	f.bucket = &storetest.Faults{Bucket: local}
	f.cfg = coldstore.DefaultConfig()
	f.cfg.TempDir = t.TempDir()
	f.cfg.DeleteGrace = 0
	f.cfg.Failpoint = func(step string) error {
		f.mu.Lock()
		hook := f.step
		f.mu.Unlock()
		if hook == nil {
			return nil
		}
		return hook(step)
	}
	if change != nil {
		change(&f.cfg)
	}
	f.store = f.newStore()
	return f
}

// newStore makes another store on the same database and bucket, as another process would.
func (f *fixture) newStore() *coldstore.Store {
	f.t.Helper()
	s, err := coldstore.New(f.pool, f.bucket, zerolog.New(zerolog.NewTestWriter(f.t)), f.cfg)
	ok(f.t, err)
	return s
}

func (f *fixture) failpoint(hook func(step string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.step = hook
}

// table is a managed table of the fixture.
type table struct {
	*fixture
	oid    uint32
	name   string
	mirror string
	seq    koldproxy.Seq
}

// manage makes a table and its mirror, without an applier. The definition begins with the key columns, keys of them.
func (f *fixture) manage(name, definition, keyDefinition, settings string) *table {
	f.t.Helper()
	mirror := "koldstore." + pgx.Identifier{name + "__cl"}.Sanitize()
	quoted := pgx.Identifier{name}.Sanitize()
	f.exec("CREATE TABLE " + quoted + " (" + definition + ")")
	f.exec("CREATE TABLE " + mirror + " (" + keyDefinition + ", seq bigint NOT NULL UNIQUE, op smallint NOT NULL, row_image jsonb)")
	f.exec("SELECT koldstore.guard($1::regclass::oid, $2::regclass::oid, NULL, 'hint')", mirror, quoted)
	f.exec(`INSERT INTO koldstore.managed_table (table_oid, schema_name, table_name, mirror_oid, state, storage, min_flush_rows, max_rows_per_file, auto_flush, seed_job, created_by)
		VALUES ($1::regclass, 'public', $2, $3::regclass, 'active', 'default', 10, 100000, true, gen_random_uuid(), current_user)`, quoted, name, mirror)
	tab := &table{fixture: f, name: name, mirror: mirror, seq: koldproxy.SeqAt(time.Now())}
	ok(f.t, f.pool.QueryRow(f.t.Context(), "SELECT $1::regclass::oid", quoted).Scan(&tab.oid))
	if settings != "" {
		f.exec("UPDATE koldstore.managed_table SET "+settings+" WHERE table_oid = $1", tab.oid)
	}
	return tab
}

// messages is the plain table that most tests use.
func (f *fixture) messages(settings string) *table {
	f.t.Helper()
	return f.manage("messages", "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", settings)
}

func (f *fixture) exec(sql string, args ...any) {
	f.t.Helper()
	_, err := f.pool.Exec(f.t.Context(), sql, args...)
	ok(f.t, err)
}

func (f *fixture) scan(sql string, args []any, into ...any) {
	f.t.Helper()
	ok(f.t, f.pool.QueryRow(f.t.Context(), sql, args...).Scan(into...))
}

// put writes the newest version of a message into the mirror, remove its tombstone.
func (tab *table) put(id int, v string) {
	tab.seq++
	tab.exec("INSERT INTO "+tab.mirror+` AS m (id, seq, op, row_image) VALUES ($1, $2, 1, jsonb_build_object('id', $1::bigint, 'v', $3::text))
		ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, op = 2, row_image = excluded.row_image`, id, tab.seq, v)
}

func (tab *table) remove(id int) {
	tab.seq++
	tab.exec("INSERT INTO "+tab.mirror+` AS m (id, seq, op) VALUES ($1, $2, 3)
		ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, op = 3, row_image = NULL`, id, tab.seq)
}

// flush runs a flush to its end.
func (tab *table) flush(store *coldstore.Store, force bool) coldstore.Result {
	tab.t.Helper()
	queued, err := store.Enqueue(tab.t.Context(), tab.oid, force)
	ok(tab.t, err)
	r, err := store.Flush(tab.t.Context(), queued.JobID)
	ok(tab.t, err)
	return r
}

func (tab *table) mustFlush(rows, segments int64) {
	tab.t.Helper()
	r := tab.flush(tab.store, true)
	if r.Status != "completed" || r.RowsFlushed != rows || r.Segments != segments {
		message := ""
		if r.Error != nil {
			message = *r.Error
		}
		tab.t.Fatalf("flush: %+v %s, want %d rows in %d segments", r, message, rows, segments)
	}
}

func (tab *table) hot() (n int64) {
	tab.t.Helper()
	tab.scan("SELECT count(*) FROM "+tab.mirror, nil, &n)
	return n
}

func (tab *table) segments() []coldstore.SegmentInfo {
	tab.t.Helper()
	infos, err := tab.store.Segments(tab.t.Context(), tab.oid)
	ok(tab.t, err)
	return infos
}

func (tab *table) ids() []uuid.UUID {
	tab.t.Helper()
	var ids []uuid.UUID
	for _, s := range tab.segments() {
		ids = append(ids, s.ID)
	}
	return ids
}

// version is what a feed shows of a row.
type version struct {
	Seq   koldproxy.Seq
	Op    koldproxy.Op
	Image string
}

// snapshot is what a reader's statement sees of a table: the mirror, the segments and the generation.
type snapshot struct {
	generation int64
	segments   []uuid.UUID
	hot        map[string]version
}

func (tab *table) snapshot(ctx context.Context) (snapshot, error) {
	s := snapshot{hot: map[string]version{}}
	err := pgx.BeginTxFunc(ctx, tab.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, "SELECT generation FROM koldstore.managed_table WHERE table_oid = $1", tab.oid).Scan(&s.generation); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, "SELECT segment_id FROM koldstore.segment WHERE table_oid = $1 AND state = 'active'", tab.oid)
		if err != nil {
			return err
		}
		if s.segments, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID]); err != nil {
			return err
		}
		rows, err = tx.Query(ctx, "SELECT jsonb_build_object('id', id)::text, seq, op, coalesce(row_image::text, '') FROM "+tab.mirror)
		if err != nil {
			return err
		}
		var key string
		var v version
		_, err = pgx.ForEachRow(rows, []any{&key, &v.Seq, &v.Op, &v.Image}, func() error {
			s.hot[key] = v
			return nil
		})
		return err
	})
	return s, err
}

// drain reads a whole feed in pages, as koldstore.changes_since does, and checks its order. The result is the latest version
// by key.
func (tab *table) drain(ctx context.Context, store *coldstore.Store, limit int) (map[string]version, error) {
	s, err := tab.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	return tab.drainSnapshot(ctx, store, s, limit)
}

func (tab *table) drainSnapshot(ctx context.Context, store *coldstore.Store, s snapshot, limit int) (map[string]version, error) {
	state := map[string]version{}
	last := koldproxy.Seq(0)
	add := func(key string, v version) error {
		if v.Seq <= last {
			return fmt.Errorf("seq %d after %d", v.Seq, last)
		}
		if _, twice := state[key]; twice {
			return fmt.Errorf("key %s twice", key)
		}
		last, state[key] = v.Seq, v
		return nil
	}
	for after, complete := koldproxy.Seq(0), len(s.segments) == 0; !complete; {
		page, err := store.Page(ctx, coldstore.PageRequest{
			Table: tab.oid, Generation: s.generation, Segments: s.segments, Mode: coldstore.ModeForward, After: after, Limit: limit,
		})
		if err != nil {
			return nil, err
		}
		if len(page.Rows) > limit || len(page.Rows) == 0 && !page.Complete || page.Through < after {
			return nil, fmt.Errorf("page of %d rows through %d, complete %v", len(page.Rows), page.Through, page.Complete)
		}
		for _, r := range page.Rows {
			if _, hot := s.hot[string(r.PK)]; !hot {
				if err := add(string(r.PK), version{r.Seq, r.Op, string(r.Image)}); err != nil {
					return nil, err
				}
			}
		}
		after, complete = page.Through, page.Complete
	}
	keys := slices.SortedFunc(maps.Keys(s.hot), func(a, b string) int { return int(s.hot[a].Seq - s.hot[b].Seq) })
	for _, key := range keys {
		if err := add(key, s.hot[key]); err != nil {
			return nil, err
		}
	}
	return state, nil
}

// verified fails the test if anything about the table's cold storage is wrong.
func (tab *table) verified() {
	tab.t.Helper()
	report, err := tab.store.Verify(tab.t.Context(), tab.oid)
	ok(tab.t, err)
	if !report.OK {
		tab.t.Fatalf("verify: %+v", report.Problems)
	}
}

func ok(t interface {
	Helper()
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
