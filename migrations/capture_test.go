package migrations_test

import (
	"fmt"
	"slices"
	"testing"
)

// A table gets back the replica identity that it had.
func TestTheReplicaIdentityComesBack(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY, "U" int NOT NULL, CONSTRAINT "T u" UNIQUE ("U"));
		CREATE TABLE p (id int PRIMARY KEY, u int NOT NULL) PARTITION BY RANGE (id); CREATE TABLE leaf PARTITION OF p DEFAULT; CREATE UNIQUE INDEX leaf_u ON leaf (u)`)
	const identities = `SELECT string_agg(concat_ws(' ', c.relname, c.relreplident, i.indexrelid::regclass), ', ' ORDER BY c.relname)
		FROM pg_class c LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisreplident WHERE c.relname IN ('t', 'p', 'leaf')`
	for _, identity := range []string{
		`ALTER TABLE t REPLICA IDENTITY DEFAULT; ALTER TABLE leaf REPLICA IDENTITY DEFAULT`, `ALTER TABLE t REPLICA IDENTITY NOTHING; ALTER TABLE leaf REPLICA IDENTITY NOTHING`,
		`ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE leaf REPLICA IDENTITY FULL`, `ALTER TABLE t REPLICA IDENTITY USING INDEX "T u"; ALTER TABLE leaf REPLICA IDENTITY USING INDEX leaf_u`,
	} {
		exec(t, owner, identity)
		want := value[string](t, su, identities)
		exec(t, owner, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'true'); CALL koldstore.create_stream(NULL, 'sp', NULL, 'p', 'true')`)
		if n := value[int](t, su, `SELECT count(*) FROM pg_class WHERE relname IN ('t', 'leaf') AND relreplident = 'f'`); n != 2 {
			t.Errorf("%s: %d tables are captured", identity, n)
		}
		exec(t, owner, `CALL koldstore.drop_stream(NULL, 's'); CALL koldstore.drop_stream(NULL, 'sp')`)
		if got := value[string](t, su, identities); got != want {
			t.Errorf("%s: %q before, %q then", identity, want, got)
		}
	}
	// An index that has gone meanwhile cannot come back.
	exec(t, owner, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'true'); ALTER TABLE t DROP CONSTRAINT "T u"; CALL koldstore.drop_stream(NULL, 's')`)
	if got := value[string](t, su, `SELECT relreplident FROM pg_class WHERE relname = 't'`); got != "d" {
		t.Errorf("without the index it is %s", got)
	}
}

// A mirror that was dropped is nothing to hold on to: what is left of its feed is shown without rows and can be ended.
func TestAFeedWithoutItsMirror(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY)`)
	for range 2 {
		exec(t, owner, `SELECT koldstore.manage_table('t')`)
		asService(t, su, `DROP TABLE koldstore.t__cl`)
		if got := value[string](t, owner, `SELECT concat_ws(' ', s ->> 'state', s ->> 'hot_rows') FROM koldstore.table_status('t') s`); got != "pending" {
			t.Errorf("its status is %q", got)
		}
		exec(t, owner, `SELECT koldstore.verify_table_integrity('t')`)
		if got := value[int](t, owner, `SELECT koldstore.unmanage_table('t')`); got != 0 {
			t.Errorf("it had %d rows", got)
		}
	}
}

// Who renames a column of the key is told what becomes of the feed, and who has none is told nothing.
func TestRenamedKeysAreWarnedOf(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	var notices []string
	owner = connectWithNotices(t, owner, func(text string) { notices = append(notices, text) })
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY, v int); CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1'); ALTER TABLE t RENAME id TO "Key"; ALTER TABLE t RENAME v TO w`)
	if len(notices) > 0 {
		t.Errorf("without a feed: %q", notices)
	}
	exec(t, owner, `SELECT koldstore.manage_table('t'); ALTER TABLE t RENAME w TO v`)
	if len(notices) > 0 {
		t.Errorf("another column: %q", notices)
	}
	exec(t, owner, `ALTER TABLE t RENAME "Key" TO id`)
	if want := `the change feed of table public.t ends here: column "Key" of its primary key was renamed to "id"`; !slices.Contains(notices, want) {
		t.Errorf("not %q: %q", want, notices)
	}
}
