package cold_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/internal/localpg"
)

const recoveryPassword = "the same on both sides"

// TestPointInTimeRecovery restores a base backup to a moment before the last flushes and compactions, as docs/operations.md says: the
// database first, the segments second. The restored feed is that of the moment; it goes on without touching what the original has written
// since, also in the same folder; and a segment that is gone is KS002.
func TestPointInTimeRecovery(t *testing.T) {
	if os.Getenv("KOLDPROXY_TEST_LONG") == "" {
		t.Skip("starts two servers; set KOLDPROXY_TEST_LONG=1")
	}
	if _, err := exec.LookPath("pg_basebackup"); err != nil {
		t.Skip("pg_basebackup is not in PATH")
	}
	original, err := localpg.Start(t.Context(), localpg.Config{Password: recoveryPassword, Settings: map[string]string{"wal_keep_size": "1GB"}})
	ok(t, err)
	t.Cleanup(func() { ok(t, original.Stop(context.Background())) })
	f := openFixture(t, original.DSN("postgres", "", ""), t.TempDir())
	tab := f.manage("messages", "id bigint PRIMARY KEY, body text", "max_rows_per_file = 100")
	f.exec("INSERT INTO messages SELECT i, 'first ' || i FROM generate_series(1, 500) i")
	tab.capture("true")
	tab.mustFlush()
	home := baseBackup(t, original)

	tab.change("second", "id % 3 = 0")
	tab.mustFlush()
	tab.change("third", "id % 5 = 0") // stays in the mirror
	f.exec("DELETE FROM messages WHERE id = 7")
	tab.remove(7)
	want, segments := tab.rows(), tab.ids()
	f.exec("SELECT pg_create_restore_point('wanted')")

	tab.change("too late", "id % 2 = 0")
	tab.mustFlush()
	tab.compact()
	tab.agrees()
	f.exec("SELECT pg_switch_wal()")
	copied := t.TempDir()
	ok(t, os.CopyFS(copied, os.DirFS(f.folder)))

	restored := restore(t, original, home)
	g := openFixture(t, restored.DSN("postgres", "", ""), copied)
	again := g.table("messages")
	if got := again.rows(); !maps.Equal(got, want) || !slices.Equal(again.ids(), segments) {
		t.Fatalf("restored: %d rows, %d segments; want %d and %d", len(got), len(segments), len(want), len(again.ids()))
	}
	again.agrees()

	t.Run("it goes on with a copy of the objects", func(t *testing.T) {
		before := contents(t, copied)
		again.change("another future", "id % 2 = 1")
		again.mustFlush()
		again.agrees()
		after := contents(t, copied)
		for name, content := range before {
			if after[name] != content {
				t.Errorf("%s is not what it was", name)
			}
		}
		if len(after) <= len(before) {
			t.Error("no object was written")
		}
	})
	t.Run("it goes on in the place of the original", func(t *testing.T) {
		bucket, err := coldstore.OpenLocalBucket(f.folder)
		ok(t, err)
		ok(t, filepath.WalkDir(copied, func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			object, err := filepath.Rel(copied, name)
			ok(t, err)
			data, err := os.ReadFile(name)
			ok(t, err)
			return os.WriteFile(filepath.Join(f.folder, object), data, 0o600)
		}))
		// What the applier writes down before anything else is done on another timeline.
		g.exec("INSERT INTO koldstore.gap (reason, seq) VALUES ('the checkpoint belongs to timeline 1, the server is on 2', 0)")
		cfg := coldstore.DefaultConfig()
		cfg.DeleteGrace = 0
		g.openStore(bucket, cfg)
		before := contents(t, f.folder)
		again.change("shared", "id % 4 = 1")
		again.mustFlush()
		again.compact()
		after := contents(t, f.folder)
		for name, content := range before {
			if after[name] != content {
				t.Errorf("%s is not what it was", name)
			}
		}
		again.agrees()
		tab.agrees()
	})
	t.Run("what is gone is named", func(t *testing.T) {
		victim := segments[0]
		ok(t, os.Remove(filepath.Join(copied, fmt.Sprintf("%d/%s.parquet", again.oid, victim))))
		bucket, err := coldstore.OpenLocalBucket(copied)
		ok(t, err)
		g.openStore(bucket, coldstore.DefaultConfig())
		_, err = g.store.Page(g.ctx, coldstore.PageRequest{Table: again.oid, Segments: []uuid.UUID{victim}, Mode: coldstore.ModeForward, Limit: 10})
		var client *koldproxy.Error
		if !errors.As(err, &client) || client.Code != koldproxy.CodeColdUnreadable || !strings.Contains(client.Message, victim.String()) {
			t.Errorf("%v", err)
		}
	})
}

// baseBackup copies a cluster's data into a folder that a cluster can be kept in.
func baseBackup(t *testing.T, c *localpg.Cluster) (home string) {
	t.Helper()
	home, err := os.MkdirTemp("", "koldproxy-restored-*")
	ok(t, err)
	t.Cleanup(func() { ok(t, os.RemoveAll(home)) })
	ok(t, os.Chmod(home, 0o755))
	data := filepath.Join(home, filepath.Base(c.DataDir))
	run(t, "pg_basebackup", "-d", c.DSN("postgres", "", ""), "-D", data, "-X", "fetch", "-c", "fast")
	return home
}

// restore starts the copy in a folder as of the restore point; the original's own log stands for the archive.
func restore(t *testing.T, original *localpg.Cluster, home string) *localpg.Cluster {
	t.Helper()
	data := filepath.Join(home, filepath.Base(original.DataDir))
	settings := fmt.Sprintf("restore_command = 'cp %s/pg_wal/%%f %%p'\nrecovery_target_name = 'wanted'\nrecovery_target_action = 'promote'\n", original.DataDir)
	conf, err := os.OpenFile(filepath.Join(data, "postgresql.auto.conf"), os.O_APPEND|os.O_WRONLY, 0o600)
	ok(t, err)
	_, err = conf.WriteString(settings)
	ok(t, errors.Join(err, conf.Close(), os.WriteFile(filepath.Join(data, "recovery.signal"), nil, 0o600)))
	run(t, "chown", "-R", "--reference="+original.DataDir, data)
	c, err := localpg.Start(t.Context(), localpg.Config{Dir: home, Password: recoveryPassword})
	ok(t, err)
	t.Cleanup(func() { ok(t, c.Stop(context.Background())) })
	conn, err := pgx.Connect(t.Context(), c.DSN("postgres", "", ""))
	ok(t, err)
	defer func() { ok(t, conn.Close(t.Context())) }()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		var recovering bool
		ok(t, conn.QueryRow(t.Context(), "SELECT pg_is_in_recovery()").Scan(&recovering))
		if !recovering {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal("the restored server stays in recovery")
		}
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// table finds a table that is managed already. Its next changes come after all that were.
func (f *fixture) table(name string) *table {
	f.Helper()
	tab := &table{fixture: f, name: name, seq: koldproxy.SeqAt(time.Now())}
	ok(f, f.pool.QueryRow(f.ctx, "SELECT $1::regclass::oid", name).Scan(&tab.oid))
	return tab
}

// change gives rows another text and captures them.
func (t *table) change(text, condition string) {
	t.Helper()
	t.exec("UPDATE "+t.name+" SET body = $1 || ' ' || id WHERE "+condition, text)
	t.capture(condition)
}

// compact does all that is to be compacted and swept.
func (t *table) compact() {
	t.Helper()
	for worked := true; worked; {
		var err error
		worked, err = t.store.RunJobs(t.ctx)
		ok(t, err)
	}
}

func (t *table) ids() (ids []uuid.UUID) {
	t.Helper()
	infos, err := t.store.Segments(t.ctx, t.oid)
	ok(t, err)
	for i := range infos {
		ids = append(ids, infos[i].ID)
	}
	return ids
}

// rows are the images of the table's rows.
func (t *table) rows() map[string]bool {
	t.Helper()
	rows := map[string]bool{}
	for _, image := range t.texts("SELECT to_jsonb(r)::text FROM " + t.name + " r") {
		rows[image] = true
	}
	return rows
}

// agrees fails the test unless the feed, cold rows and mirror, folds to the table, and every file is as the catalog says.
func (t *table) agrees() {
	t.Helper()
	images := map[string]string{}
	for after, complete := koldproxy.Seq(0), false; !complete; {
		page, err := t.store.Page(t.ctx, coldstore.PageRequest{Table: t.oid, Segments: t.ids(), Mode: coldstore.ModeForward, After: after, Limit: 70})
		ok(t, err)
		for _, r := range page.Rows {
			images[string(r.PK)] = string(r.Image)
		}
		after, complete = page.Through, page.Complete
	}
	rows, err := t.pool.Query(t.ctx, fmt.Sprintf("SELECT jsonb_build_object('id', id)::text, coalesce(row_image::text, '') FROM koldstore.%s__cl", t.name))
	ok(t, err)
	var key, image string
	_, err = pgx.ForEachRow(rows, []any{&key, &image}, func() error { images[key] = image; return nil })
	ok(t, err)
	got := map[string]bool{}
	for _, image := range images {
		if image != "" {
			got[image] = true
		}
	}
	if want := t.rows(); !maps.Equal(got, want) {
		t.Fatalf("the feed folds to %d rows, the table has %d", len(got), len(want))
	}
	report, err := t.store.Verify(t.ctx, t.oid)
	ok(t, err)
	if !report.OK {
		t.Fatalf("verify: %+v", report.Problems)
	}
}

// contents are the objects of a folder.
func contents(t *testing.T, folder string) map[string]string {
	t.Helper()
	all := map[string]string{}
	ok(t, fs.WalkDir(os.DirFS(folder), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(filepath.Join(folder, name))
		all[name] = string(data)
		return err
	}))
	return all
}
