package coldstore_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/coldstore"
)

// TestATableInARegisteredStorage keeps its segments there, and there alone, and takes up rotated credentials.
func TestATableInARegisteredStorage(t *testing.T) {
	t.Parallel()
	folder, opened := t.TempDir(), 0
	f := newFixture(t, func(cfg *coldstore.Config) {
		cfg.OpenStorage = func(_ context.Context, spec coldstore.StorageSpec) (coldstore.Bucket, error) {
			opened++
			if !strings.Contains(string(spec.Credentials), "right") {
				return nil, errors.New("access denied")
			}
			return coldstore.OpenLocalBucket(folder)
		}
	})
	f.exec(`SELECT koldstore.register_storage('archive', 's3', 'bucket/prefix', '{"access_key_id": "AKIA", "secret_access_key": "wrong-s3cret"}')`)
	f.runJobs(f.store)
	var problem *string
	f.scan("SELECT check_error FROM koldstore.storages WHERE name = 'archive' AND checked_at IS NOT NULL", nil, &problem)
	if problem == nil || !strings.Contains(*problem, "access denied") || strings.Contains(*problem, "s3cret") {
		t.Errorf("check: %v", problem)
	}
	tab := f.messages("storage = 'archive'")
	tab.put(1, "x")
	if r := tab.flush(f.store, true); r.Status != "error" || tab.hot() != 1 {
		t.Fatalf("flush with wrong credentials: %+v", r)
	}
	f.exec(`SELECT koldstore.alter_storage_credentials('archive', '{"access_key_id": "AKIA", "secret_access_key": "right-s3cret"}')`)
	f.runJobs(f.store)
	f.scan("SELECT check_error FROM koldstore.storages WHERE name = 'archive'", nil, &problem)
	if problem != nil {
		t.Errorf("check: %s", *problem)
	}
	tab.mustFlush(1, 1)
	if objects, err := f.bucket.List(t.Context(), ""); err != nil || len(objects) != 0 {
		t.Errorf("in the default storage: %v %v", objects, err)
	}
	if state, err := tab.drain(t.Context(), f.newStore(), 3); err != nil || len(state) != 1 {
		t.Errorf("drained %v %v", state, err)
	}
	// Secrets are nowhere to be seen.
	var seen int
	f.scan(`SELECT (SELECT count(*) FROM koldstore.command c WHERE c::text LIKE '%s3cret%') + (SELECT count(*) FROM koldstore.storages s WHERE s::text LIKE '%s3cret%')
		+ (SELECT count(*) FROM koldstore.job j WHERE j::text LIKE '%s3cret%')`, nil, &seen)
	if seen != 0 {
		t.Errorf("a secret is in %d rows", seen)
	}
	f.exec("DO $$ BEGIN IF to_regrole('cold_nobody') IS NULL THEN CREATE ROLE cold_nobody; END IF; END $$")
	tx, err := f.pool.Begin(t.Context())
	ok(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "SET LOCAL ROLE cold_nobody")
	ok(t, err)
	for _, sql := range []string{"SELECT credentials FROM koldstore.storage", "SELECT koldstore.register_storage('mine', 'filesystem', '/etc')"} {
		err := pgx.BeginFunc(t.Context(), tx, func(savepoint pgx.Tx) error {
			_, err := savepoint.Exec(t.Context(), sql)
			return err
		})
		if sqlstate(err) != "42501" {
			t.Errorf("an ordinary role does %s: %v", sql, err)
		}
	}
}

func TestRegisterStorageRefusesWhatItCannotHonour(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	for args, want := range map[string]string{
		`'', 's3', 'b'`: "22023", `'x', 'ftp', 'b'`: "22023", `'x', 's3', ''`: "22023", `'x', 's3', 's3://b'`: "22023", `'x', 's3', 'b/../c'`: "22023",
		`'x', 'filesystem', 'relative'`: "22023", `'x', 's3', 'b', '{"password": "x"}'`: "22023", `'x', 's3', 'b', '{"session_token": 5}'`: "22023",
		`'x', 's3', 'b', '{"session_token": {"url": "x"}}'`: "22023", `'x', 's3', 'b', '[]'`: "22023", `'x', 's3', 'b', '{}', '{"color": "x"}'`: "22023",
		`'x', 'filesystem', '/x', '{"account_key": "x"}'`: "22023", `'default', 's3', 'b'`: "42710",
	} {
		if _, err := f.pool.Exec(t.Context(), "SELECT koldstore.register_storage("+args+")"); sqlstate(err) != want {
			t.Errorf("register_storage(%s): %v", args, err)
		}
	}
	if _, err := f.pool.Exec(t.Context(), `SELECT koldstore.alter_storage_credentials('default', '{}')`); sqlstate(err) != "55000" {
		t.Errorf("credentials of the configured storage: %v", err)
	}
}

func TestIntegrityAndRecovery(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	tab.flushes(2)
	var good bool
	check := func() bool {
		f.scan("SELECT (koldstore.verify_table_integrity('messages') ->> 'ok')::boolean", nil, &good)
		return good
	}
	if !check() {
		t.Error("a sound table does not verify")
	}
	f.exec(`INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, created_at) VALUES (gen_random_uuid(), $1, 'default', '1/orphan.parquet', now() - interval '2 hours'),
		(gen_random_uuid(), $1, 'default', '1/young.parquet', now())`, tab.oid)
	if check() {
		t.Error("an unfinished file is not noticed")
	}
	var dry, done int
	f.scan("SELECT koldstore.recover_segments('messages', dry_run => true)", nil, &dry)
	f.scan("SELECT koldstore.recover_segments('messages')", nil, &done)
	if dry != 1 || done != 1 || !check() {
		t.Errorf("recovered %d, said %d, sound after it: %v", done, dry, good)
	}
	for _, damage := range []string{"key_hashes = ''", "dead_count = row_count + 1", "sha256 = '\\x00'", "min_seq = 1", "max_seq = 9223372036854775807"} {
		f.exec("BEGIN; UPDATE koldstore.segment SET " + damage + " WHERE segment_id = (SELECT segment_id FROM koldstore.segment WHERE state = 'active' ORDER BY min_seq DESC LIMIT 1); COMMIT")
		if check() {
			t.Errorf("%s is not noticed", damage)
		}
	}
}

// TestAFolderIsMadeOnlyWhileNoSegmentIsInIt: a volume that is not mounted must not be replaced, by nobody.
func TestAFolderIsMadeOnlyWhileNoSegmentIsInIt(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	f := newFixture(t, func(cfg *coldstore.Config) {
		cfg.OpenStorage = func(context.Context, coldstore.StorageSpec) (coldstore.Bucket, error) {
			return coldstore.OpenLocalBucketIn(root, "volume/archive")
		}
	})
	f.exec(`SELECT koldstore.register_storage('archive', 'filesystem', '/volume/archive', "check" => false)`)
	tab := f.messages("storage = 'archive'")
	tab.put(1, "x")
	tab.mustFlush(1, 1)
	ok(t, os.Rename(filepath.Join(root, "volume"), filepath.Join(root, "away")))
	tab.put(2, "y")
	r := tab.flush(f.store, true)
	if r.Status != "error" || r.Error == nil || !strings.Contains(*r.Error, "segments are in it") || strings.Contains(*r.Error, root) {
		t.Errorf("flush without the volume: %+v %v", r, r.Error)
	}
	report, err := f.newStore().Verify(t.Context(), tab.oid)
	if err != nil || report.OK {
		t.Errorf("verify without the volume: %+v, %v", report, err)
	}
	if _, err := os.Lstat(filepath.Join(root, "volume")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder was made in the place of the volume: %v", err)
	}
	ok(t, os.Rename(filepath.Join(root, "away"), filepath.Join(root, "volume")))
	tab.mustFlush(1, 1)
	tab.verified()
}

// TestFlushesDoNotSayWhereTemporaryFilesAre: their errors are shown to owners of tables.
func TestFlushesDoNotSayWhereTemporaryFilesAre(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "missing")
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.TempDir = folder })
	tab := f.messages("")
	tab.put(1, "x")
	r := tab.flush(f.store, true)
	if r.Status != "error" || r.Error == nil || !strings.Contains(*r.Error, "temporary file") || strings.Contains(*r.Error, folder) {
		t.Errorf("flush: %+v %v", r, r.Error)
	}
}

// TestWhatWasNeverStoredIsForgotten: a storage that cannot be opened would keep the sweep at work for ever.
func TestWhatWasNeverStoredIsForgotten(t *testing.T) {
	t.Parallel()
	var f *fixture
	f = newFixture(t, func(cfg *coldstore.Config) {
		cfg.OpenStorage = func(_ context.Context, spec coldstore.StorageSpec) (coldstore.Bucket, error) {
			if spec.Name == "refused" {
				return nil, errors.New("not in cold.filesystem_root")
			}
			return coldstore.OpenLocalBucketIn(f.folder, "file/below")
		}
	})
	write(t, filepath.Join(f.folder, "file"), "")
	for _, name := range []string{"refused", "unmakeable"} {
		f.exec(`SELECT koldstore.register_storage($1, 'filesystem', '/', "check" => false)`, name)
		tab := f.manage(name, "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", "storage = '"+name+"'")
		tab.put(1, "x")
		if r := tab.flush(f.store, true); r.Status != "error" || tab.hot() != 1 {
			t.Errorf("%s: flush: %+v", name, r)
		}
	}
	f.runJobs(f.store)
	var left int
	f.scan("SELECT count(*) FROM koldstore.segment", nil, &left)
	if left != 0 {
		t.Errorf("%d segments are left", left)
	}
}

// TestAFailedStorageIsTriedAgain and may be used as soon as that succeeds; until then tables are refused (migrations).
func TestAFailedStorageIsTriedAgain(t *testing.T) {
	t.Parallel()
	works, folder := false, t.TempDir()
	f := newFixture(t, func(cfg *coldstore.Config) {
		cfg.OpenStorage = func(context.Context, coldstore.StorageSpec) (coldstore.Bucket, error) {
			if !works {
				return nil, errors.New("access denied")
			}
			return coldstore.OpenLocalBucket(folder)
		}
	})
	f.exec("SELECT koldstore.register_storage('archive', 's3', 'bucket/prefix')")
	failed := func() (failed bool) {
		t.Helper()
		f.runJobs(f.store)
		f.scan("SELECT check_error IS NOT NULL FROM koldstore.storages WHERE name = 'archive' AND checked_at IS NOT NULL", nil, &failed)
		return failed
	}
	if !failed() {
		t.Fatal("the check of a storage that cannot be opened has not failed")
	}
	works = true
	if !failed() {
		t.Error("the storage was tried again at once")
	}
	f.exec("UPDATE koldstore.storage SET checked_at = checked_at - interval '1 hour'")
	if failed() {
		t.Error("the storage was not tried again")
	}
}
