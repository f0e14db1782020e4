package migrations_test

import (
	"fmt"
	"strings"
	"testing"
)

// A storage that koldproxy could not use gets no tables; those that have one keep their settings changeable.
func TestFailedStoragesGetNoTables(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, su, `SELECT koldstore.register_storage('archive', 's3', 'bucket/prefix')`)
	exec(t, owner, `CREATE TABLE early (id int PRIMARY KEY)`)
	exec(t, owner, `CREATE TABLE late (id int PRIMARY KEY)`)
	exec(t, owner, `SELECT koldstore.manage_table('early', storage => 'archive')`) // not tried yet
	asService(t, su, `UPDATE koldstore.storage SET wants_check = false, checked_at = now(), check_error = 'access denied' WHERE name = 'archive'`)
	if err := refused(t, owner, "55000", `storage "archive" cannot be used`, `SELECT koldstore.manage_table('late', storage => 'archive')`); !strings.Contains(err.Detail, "access denied") || !strings.Contains(err.Hint, "again") {
		t.Errorf("detail %q, hint %q", err.Detail, err.Hint)
	}
	exec(t, owner, `CALL koldstore.alter_table_set(NULL, 'early', '{"koldstore_min_flush_rows": "5"}')`)
	asService(t, su, `UPDATE koldstore.storage SET check_error = NULL WHERE name = 'archive'`)
	exec(t, owner, `SELECT koldstore.manage_table('late', storage => 'archive')`)
}

// A lost segment leaves the manifest. The floor rises only over deletes that were in it, and the rest is for a healing.
func TestForgetSegment(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, owner, `CREATE TABLE notes (id int PRIMARY KEY)`)
	exec(t, owner, `SELECT koldstore.manage_table('notes')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'`)
	for n, tombstones := range []int{0, 3, 0} {
		asService(t, su, fmt.Sprintf(`INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, tombstones, size_bytes, sha256, key_hashes)
			VALUES ('00000000-0000-4000-8000-00000000000%[1]d', 'public.notes'::regclass, 'default', 'k%[1]d', 'active', %[1]d00, %[1]d99, 9, %[2]d, 1, sha256('x'), 'x')`, n+1, tombstones))
	}
	id := func(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", n) }
	refused(t, owner, "42501", "permission denied to forget a segment", `SELECT koldstore.forget_segment($1)`, id(1))
	refused(t, su, "42704", "there is no segment "+id(7), `SELECT koldstore.forget_segment($1)`, id(7))
	refused(t, su, "42704", "there is no segment NULL", `SELECT koldstore.forget_segment(NULL)`)

	for n, want := range map[int]int64{1: 7, 2: 299} {
		asService(t, su, `UPDATE koldstore.managed_table SET floor = 7`)
		gen := value[int64](t, su, `SELECT generation FROM koldstore.managed_table`)
		job := value[string](t, su, `SELECT koldstore.forget_segment($1)::text`, id(n))
		if kind := value[string](t, su, `SELECT job_type FROM koldstore.job WHERE job_id = $1::uuid`, job); kind != "heal" {
			t.Errorf("segment %d: a job of type %s", n, kind)
		}
		if now := value[int64](t, su, `SELECT generation FROM koldstore.managed_table`); now != gen+1 {
			t.Errorf("segment %d: generation %d after %d", n, now, gen)
		}
		if floor := value[int64](t, su, `SELECT floor FROM koldstore.managed_table`); floor != want {
			t.Errorf("segment %d: floor %d, want %d", n, floor, want)
		}
		refused(t, su, "42704", "there is no segment", `SELECT koldstore.forget_segment($1)`, id(n))
	}
	if got := value[string](t, su, `SELECT string_agg(state, ' ' ORDER BY min_seq) FROM koldstore.segment`); got != "deleted deleted active" {
		t.Errorf("the segments are %s", got)
	}
}
