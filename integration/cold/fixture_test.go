package cold_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// fixture is a database with the catalog and a cold store. The tests write mirrors as the applier would.
type fixture struct {
	testing.TB
	ctx    context.Context //nolint:containedctx // the test's
	pool   *pgxpool.Pool
	folder string
	store  *coldstore.Store
}

// newFixture opens bucket, or a folder if it is nil.
func newFixture(t testing.TB, bucket coldstore.Bucket) *fixture {
	t.Helper()
	f := openFixture(t, localpg.TestCluster(t).TestDatabase(t), t.TempDir())
	if bucket != nil {
		f.openStore(bucket, coldstore.DefaultConfig())
	}
	return f
}

// openFixture opens a database, whose catalog is brought up to date, and the store in a folder.
func openFixture(t testing.TB, dsn, folder string) *fixture {
	t.Helper()
	f := &fixture{TB: t, ctx: t.Context(), folder: folder}
	var err error
	f.pool, err = pgxpool.New(f.ctx, dsn)
	ok(t, err)
	t.Cleanup(f.pool.Close)
	ok(t, f.pool.AcquireFunc(f.ctx, func(c *pgxpool.Conn) error { return migrations.Up(f.ctx, c.Conn()) }))
	bucket, err := coldstore.OpenLocalBucket(folder)
	ok(t, err)
	f.openStore(bucket, coldstore.DefaultConfig())
	return f
}

func (f *fixture) openStore(bucket coldstore.Bucket, cfg coldstore.Config) {
	f.Helper()
	cfg.TempDir = f.TempDir()
	var err error
	f.store, err = coldstore.New(f.pool, bucket, zerolog.Nop(), cfg)
	ok(f, err)
}

func (f *fixture) exec(sql string, args ...any) {
	f.Helper()
	_, err := f.pool.Exec(f.ctx, sql, args...)
	ok(f, err)
}

// table is a managed table of the fixture, whose key is id.
type table struct {
	*fixture
	oid  uint32
	name string
	seq  koldproxy.Seq // the last one that was given out
}

func (f *fixture) manage(name, definition, settings string) *table {
	f.Helper()
	f.exec("CREATE TABLE " + name + " (" + definition + ")")
	f.exec("CREATE TABLE koldstore." + name + "__cl (id bigint PRIMARY KEY, seq bigint NOT NULL UNIQUE, op smallint NOT NULL, row_image jsonb)")
	f.exec("SELECT koldstore.guard($1::regclass::oid, $2::regclass::oid, NULL, 'hint')", "koldstore."+name+"__cl", name)
	f.exec(`INSERT INTO koldstore.managed_table (table_oid, schema_name, table_name, mirror_oid, state, storage, min_flush_rows, max_rows_per_file, auto_flush, seed_job, created_by)
		VALUES ($1::regclass, 'public', $1, ('koldstore.' || $1 || '__cl')::regclass, 'active', 'default', 10, 100000, true, gen_random_uuid(), current_user)`, name)
	tab := &table{fixture: f, name: name, seq: koldproxy.SeqAt(time.Now().Add(-time.Hour))}
	ok(f, f.pool.QueryRow(f.ctx, "SELECT $1::regclass::oid", name).Scan(&tab.oid))
	if settings != "" {
		f.exec("UPDATE koldstore.managed_table SET "+settings+" WHERE table_oid = $1", tab.oid)
	}
	return tab
}

// capture brings the mirror up to date with the rows of the table that a condition chooses, in the order of their ids.
func (t *table) capture(condition string) {
	t.Helper()
	tag, err := t.pool.Exec(t.ctx, fmt.Sprintf(`INSERT INTO koldstore.%[1]s__cl AS m SELECT r.id, $1 + row_number() OVER (ORDER BY r.id), 1, to_jsonb(r) FROM %[1]s r WHERE %[2]s
		ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, op = 2, row_image = excluded.row_image`, t.name, condition), t.seq)
	ok(t, err)
	t.seq += koldproxy.Seq(tag.RowsAffected())
}

func (t *table) remove(id int) {
	t.seq++
	t.exec(fmt.Sprintf(`INSERT INTO koldstore.%s__cl AS m VALUES ($1, $2, 3, NULL)
		ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, op = 3, row_image = NULL`, t.name), id, t.seq)
}

func (t *table) flush() coldstore.Result {
	t.Helper()
	queued, err := t.store.Enqueue(t.ctx, t.oid, true)
	ok(t, err)
	r, err := t.store.Flush(t.ctx, queued.JobID)
	ok(t, err)
	return r
}

func (t *table) mustFlush() {
	t.Helper()
	if r := t.flush(); r.Status != "completed" {
		t.Fatalf("flush: %+v", r)
	}
}

// files are the paths of the current segments, as docs/format.md says to find them.
func (t *table) files() (files []string) {
	t.Helper()
	rows, err := t.pool.Query(t.ctx, "SELECT object_key FROM koldstore.segments WHERE table_name = $1::regclass", t.name)
	ok(t, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	ok(t, err)
	for _, key := range keys {
		files = append(files, t.folder+"/"+key)
	}
	return files
}
