package migrations_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// openRelations are the tables and views that everybody may select from, with what holds rows back in those that have any. Nothing
// else is granted to PUBLIC, by policies or otherwise.
var openRelations = map[string]string{
	"koldstore.checkpoint":     "nothing: it is how far the applier is",
	"koldstore.schema_version": "nothing",
	"koldstore.storages":       "nothing: credentials are no part of it",

	"koldstore.command":               "the view",
	"koldstore.segments":              "the view",
	"koldstore.topic_grants":          "the view",
	"koldstore.stage_key":             "the view",
	"koldstore.stage_right":           "the view",
	"koldstore.visible_gap":           "the view",
	"koldstore.visible_job":           "the view",
	"koldstore.visible_managed_table": "the view",
	"koldstore.visible_quarantine":    "the view",
	"koldstore.visible_segment":       "the view",
	"koldstore.visible_stream":        "the view",
	"koldstore.visible_stream_status": "the view",
}

// TestNothingLeansOnPoliciesAlone walks everything that koldproxy has made as a role without a right and as one that policies do not
// hold up either.
func TestNothingLeansOnPoliciesAlone(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE TABLE secret (id int PRIMARY KEY, v text); INSERT INTO secret VALUES (1, 'classified')`)
	exec(t, su, `SELECT koldstore.manage_table('secret')`)
	exec(t, su, `SELECT; CALL koldstore.create_stream(NULL, 's', NULL, 'secret', 'v <> ''''', options => '{"start": "earliest"}')`)
	exec(t, su, `SELECT koldstore.register_storage('elsewhere', 's3', 'bucket/secret', '{"secret_access_key": "classified"}', '{}', false)`)
	exec(t, su, fmt.Sprintf(`CALL koldstore.grant_subscribe(ARRAY['$stream/%s/s'], ARRAY['postgres']::name[])`, value[string](t, su, `SELECT current_database()`)))
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'; INSERT INTO koldstore.secret__cl VALUES (1, 99, 1, '{"id": 1, "v": "classified"}');
		INSERT INTO koldstore.quarantine (table_oid, seq, op, commit_lsn, sqlstate, message, row_text) VALUES ('secret'::regclass, 1, 1, '0/0', 'XX000', 'm', 'classified');
		INSERT INTO koldstore.gap (table_oid, reason, seq) VALUES ('secret'::regclass, 'classified', 1);
		INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256) VALUES (gen_random_uuid(), 'secret'::regclass, 'default', 'classified', 'active', 1, 2, 1, '\x00')`)

	roles := map[string]*pgx.Conn{"a plain role": as("plain"), "a role with BYPASSRLS": as("above")}
	exec(t, su, `ALTER ROLE `+value[string](t, roles["a role with BYPASSRLS"], `SELECT quote_ident(current_user)`)+` BYPASSRLS`)
	relations := pages(t, su, `SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND (n.nspname = 'koldstore' OR c.relname = '_stream_s') ORDER BY 1`)
	if all := strings.Join(relations, " "); !strings.Contains(all, "public._stream_s") || !strings.Contains(all, "koldstore.secret__cl") || !strings.Contains(all, "koldstore._stream_") {
		t.Fatalf("the walk leaves out what it is about: %s", all)
	}
	for who, conn := range roles {
		for _, rel := range relations {
			if _, open := openRelations[rel]; !open {
				refused(t, conn, "42501", "permission denied", `SELECT * FROM `+rel)
				continue
			}
			rows := pages(t, conn, fmt.Sprintf(`SELECT x::text FROM %s AS x`, rel))
			if strings.Contains(strings.Join(rows, "\n"), "classified") || openRelations[rel] == "the view" && len(rows) > 0 {
				t.Errorf("%s reads %s: %v", who, rel, rows)
			}
		}
		for _, sql := range []string{`SELECT * FROM koldstore.changes_since('secret')`, `SELECT koldstore.table_status('secret')`, `SELECT koldstore.verify_table_integrity('secret')`, `SELECT koldstore.flush_table('secret')`} {
			refused(t, conn, "42501", "", sql)
		}
		for _, sql := range []string{`SELECT koldstore.list_jobs()::text`, `SELECT coalesce(koldstore.demand_allowed(jsonb_build_object('kind', 'cold_page', 'table', 'secret'::regclass::oid::bigint)), '[]')`} {
			if got := value[string](t, conn, sql); got != "[]" {
				t.Errorf("%s: %s gives %s", who, sql, got)
			}
		}
		if got := value[int](t, conn, `SELECT count(*) FROM koldstore.show_streams()`); got != 0 {
			t.Errorf("%s sees %d streams", who, got)
		}
	}
	if got := value[string](t, su, `SELECT string_agg(name, ' ' ORDER BY name) FROM koldstore.show_streams()`); got != "s" {
		t.Errorf("a superuser sees %s", got)
	}
	// Answers to commands are for those who gave them.
	exec(t, roles["a plain role"], `INSERT INTO koldstore.command (verb, args) SELECT 'cancel_job', jsonb_build_object('job_id', gen_random_uuid())`)
	if got := value[string](t, roles["a plain role"], `SELECT string_agg(verb || ' ' || result::text, ',') FROM koldstore.command`); got != `cancel_job {"ok": false}` {
		t.Errorf("the plain role's commands are %s", got)
	}
	if got := value[int](t, roles["a role with BYPASSRLS"], `SELECT count(*) FROM koldstore.command`); got != 0 {
		t.Errorf("another role sees %d of them", got)
	}
}

// TestTablesOfTheCatalogWithDefaultPrivileges: what the service role grants to everybody by default does not reach the catalog's tables.
func TestTablesOfTheCatalogWithDefaultPrivileges(t *testing.T) {
	t.Parallel()
	conn := connect(t, localpg.TestCluster(t).TestDatabase(t))
	exec(t, conn, `ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC`)
	if err := migrations.Up(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	got := pages(t, conn, `SELECT format('%s %s', c.relname, a.privilege_type) FROM pg_class c, aclexplode(c.relacl) a
		WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relkind = 'r' AND a.grantee = 0 ORDER BY 1`)
	if want := "checkpoint SELECT, schema_version SELECT"; strings.Join(got, ", ") != want {
		t.Errorf("everybody has %q, want %s", got, want)
	}
}

// A log and a mirror are granted to those who may read their table, and follow it: GRANT, REVOKE, a new owner.
func TestRightsFollowTheTable(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner, reader := as("owner"), as("reader")
	o, r := value[string](t, owner, `SELECT quote_ident(current_user)`), value[string](t, reader, `SELECT quote_ident(current_user)`)
	exec(t, su, `ALTER ROLE `+r+` BYPASSRLS; GRANT CREATE ON SCHEMA public TO PUBLIC`)
	exec(t, owner, `CREATE TABLE m (id int PRIMARY KEY, v int); SELECT koldstore.manage_table('m'); CALL koldstore.create_stream(NULL, 's', NULL, 'm', 'v > 1')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active'`)
	reads := []string{`SELECT * FROM _stream_s`, `SELECT * FROM koldstore.m__cl`, `SELECT * FROM koldstore.changes_since('m')`}
	may := func(conn *pgx.Conn, yes bool) {
		t.Helper()
		for _, sql := range reads {
			if yes {
				exec(t, conn, sql)
			} else {
				refused(t, conn, "42501", "permission denied", sql)
			}
		}
	}
	may(owner, true)
	may(reader, false)
	exec(t, owner, `GRANT SELECT ON m TO `+r)
	may(reader, true)
	refused(t, reader, "42501", "", `DELETE FROM _stream_s`)
	exec(t, owner, `REVOKE ALL ON m FROM `+r)
	may(reader, false)
	exec(t, owner, `GRANT SELECT (id, v) ON m TO `+r)
	may(reader, false)
	exec(t, owner, `GRANT SELECT ON m TO PUBLIC`)
	may(reader, true)
	exec(t, su, `GRANT SELECT ON _stream_s TO `+r+`; REVOKE SELECT ON m FROM PUBLIC`)
	may(reader, false)
	exec(t, su, `ALTER TABLE m OWNER TO `+r)
	may(reader, true)
	refused(t, reader, "42809", "", `DELETE FROM _stream_s`)
	may(owner, false)
	// What is left over keeps nobody from being dropped.
	exec(t, su, fmt.Sprintf(`ALTER TABLE m OWNER TO %s; REVOKE ALL ON m FROM %s`, o, r))
	if got := value[int](t, su, `SELECT count(*) FROM pg_shdepend WHERE refobjid = $1::regrole AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())`, r); got != 0 {
		t.Errorf("%d objects remember the former owner", got)
	}
	// Where no event trigger tells, koldproxy looks.
	exec(t, su, `ALTER EVENT TRIGGER koldproxy_rights DISABLE; GRANT SELECT ON m TO `+r)
	refused(t, reader, "42501", "permission denied", reads[0])
	exec(t, su, `SELECT koldstore.follow_rights()`)
	may(reader, true)
}

// A page counts that was read from the right segments: anybody can have koldproxy read others, within the statement of a reader.
func TestPagesOfOtherSegmentsDoNotCount(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE m (id int PRIMARY KEY); SELECT koldstore.manage_table('m')`)
	asService(t, su, `UPDATE koldstore.managed_table SET state = 'active', generation = 7;
		INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256)
		SELECT ('00000000-0000-0000-0000-00000000000' || i)::uuid, 'm'::regclass, 'default', i::text, 'active', i * 10, i * 10 + 5, 1, '\x00' FROM generate_series(1, 3) i`)
	k := secretsOf(t, su)
	for _, c := range []struct {
		mode, segments string
		counts         bool
	}{
		{"forward", "1 2 3", true},
		{"forward", "1", true},
		{"forward", "3", false},
		{"forward", "1 3", false},
		{"forward", "2 3", false},
		{"forward", "1 1", false},
		{"forward", "1 4", false},
		{"last", "1 2 3", true},
		{"last", "3", true},
		{"last", "2 3", true},
		{"last", "1", false},
		{"last", "1 3", false},
		{"last", "3 3", false},
		{"last", "3 3 3", false},
	} {
		var ids, rows []string
		for _, s := range strings.Fields(c.segments) {
			ids = append(ids, `"00000000-0000-0000-0000-00000000000`+s+`"`)
			rows = append(rows, fmt.Sprintf(`{"seq": %s0, "op": 1, "pk": {"id": %[1]s}, "image": {}}`, s))
		}
		after := ""
		if c.mode == "forward" {
			after = `"after": 0,`
		}
		page := fmt.Sprintf(`{"kind": "cold_page", "table": %d, "generation": 7, "segments": [%s], "mode": %q, %s "limit": 1000000, "rows": [%s], "through": 35, "complete": true}`,
			value[int64](t, su, `SELECT 'm'::regclass::oid::bigint`), strings.Join(ids, ","), c.mode, after, strings.Join(rows, ","))
		exec(t, su, `SELECT set_config('koldstore.staged', $1, false)`, strings.Join(k.sealed(t, su, page), "\n"))
		asked := fmt.Sprintf(`SELECT koldstore.staged(jsonb_build_object('kind', 'cold_page', 'table', 'm'::regclass::oid::bigint, 'generation', 7, 'mode', '%s')) IS NOT NULL`, c.mode)
		if got := value[bool](t, su, asked); got != c.counts {
			t.Errorf("a %s page of segments %s counts: %v", c.mode, c.segments, got)
		}
	}
}

// Refusals name the statement that was typed.
func TestReadOnlyStatements(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY); SET default_transaction_read_only = on`)
	for statement, sql := range map[string]string{
		"CREATE STREAM": `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'true')`,
		"ALTER STREAM":  `CALL koldstore.alter_stream(NULL, 's', '{}')`,
		"DROP STREAM":   `CALL koldstore.drop_stream(NULL, 's')`,
		"ALTER TABLE":   `CALL koldstore.alter_table_set(NULL, 't', '{}')`,
		"GRANT":         `CALL koldstore.grant_subscribe('{x}', '{postgres}')`,
		"REVOKE":        `CALL koldstore.revoke_subscribe('{x}', '{postgres}')`,
	} {
		refused(t, su, "25006", "cannot execute "+statement+" in a read-only transaction", sql)
	}
}

// The owner of a stream's table gets the reason, and not the lack of a right, when he alters or drops the log.
func TestOwnersAlterNoLog(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner, stranger := as("owner"), as("stranger")
	exec(t, su, `GRANT CREATE ON SCHEMA public TO PUBLIC`)
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY); CALL koldstore.create_stream(NULL, 'S 1', NULL, 't', 'true')`)
	for _, sql := range []string{
		`ALTER TABLE "_stream_S 1" ADD x int`, `ALTER TABLE IF EXISTS ONLY public . "_stream_S 1" DROP op`, "/* now */ alter\ttable -- this\n\"_stream_S 1\" RENAME TO mine",
		`ALTER TABLE public."_stream_S 1" DISABLE TRIGGER ALL`, `DROP TABLE "_stream_S 1"`, `DROP TABLE IF EXISTS public."_stream_S 1" CASCADE`,
	} {
		if e := refused(t, owner, "42809", "log of a stream", sql); e.Hint == "" {
			t.Errorf("%s has no hint", sql)
		}
		refused(t, stranger, "42501", "must be owner", sql)
	}
	exec(t, owner, `ALTER TABLE t ADD v int; DROP TABLE IF EXISTS nothing`)
}
