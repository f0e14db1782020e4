package migrations_test

import (
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func value[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// refused runs sql and expects an error of the code whose message holds text.
func refused(t *testing.T, conn *pgx.Conn, code, text, sql string, args ...any) *pgconn.PgError {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		t.Errorf("%s: got %v, want SQLSTATE %s", sql, err, code)
		return &pgconn.PgError{}
	}
	if pe.Code != code || !strings.Contains(pe.Message, text) {
		t.Errorf("%s: got %s %q, want %s %q", sql, pe.Code, pe.Message, code, text)
	}
	return pe
}

// installed returns a superuser's connection to a database with the catalog, where "koldproxy" owns the catalog, and a
// function that connects as another role.
func installed(t *testing.T) (*pgx.Conn, func(role string) *pgx.Conn) {
	t.Helper()
	cluster := localpg.TestCluster(t)
	dsn := cluster.TestDatabase(t)
	su := connect(t, dsn)
	name := value[string](t, su, `SELECT current_database()`)
	role := func(suffix string) string { return name + "_" + suffix }
	exec(t, su, fmt.Sprintf(`CREATE ROLE %q SUPERUSER LOGIN PASSWORD 'x'`, role("service")))
	service := connect(t, cluster.DSN(name, role("service"), "x"))
	install(t, service)
	return su, func(suffix string) *pgx.Conn {
		exec(t, su, fmt.Sprintf(`DO $$ BEGIN IF to_regrole('%[1]s') IS NULL THEN CREATE ROLE %[1]q LOGIN PASSWORD 'x'; END IF; END $$`, role(suffix)))
		return connect(t, cluster.DSN(name, role(suffix), "x"))
	}
}

func TestManageTableRefusals(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `
		CREATE TABLE plain (id int PRIMARY KEY);
		CREATE TABLE nopk (id int);
		CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
		CREATE TABLE late (id int PRIMARY KEY DEFERRABLE);
		CREATE TABLE generated (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);
		CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id);
		CREATE TABLE part0 PARTITION OF part DEFAULT;
		CREATE TABLE quick (id int PRIMARY KEY) PARTITION BY RANGE (id);
		CREATE UNLOGGED TABLE quick0 PARTITION OF quick DEFAULT;
		CREATE TABLE keyseq (seq int PRIMARY KEY);
		CREATE TABLE kscol (id int PRIMARY KEY, _ks_x int);
		CREATE TEMP TABLE temporary (id int PRIMARY KEY);
		CREATE VIEW v AS SELECT * FROM plain`)
	for _, c := range []struct{ code, text, call string }{
		{"55000", "no primary key", `manage_table('nopk')`},
		{"55000", "unlogged", `manage_table('unlogged')`},
		{"55000", "deferrable", `manage_table('late')`},
		{"55000", "generated columns (g)", `manage_table('generated')`},
		{"55000", "it is a partition", `manage_table('part0')`},
		{"55000", "quick0 is unlogged", `manage_table('quick')`},
		{"55000", "temporary", `manage_table('temporary')`},
		{"55000", "is a view", `manage_table('v')`},
		{"55000", "system catalog", `manage_table('pg_catalog.pg_class')`},
		{"55000", "koldproxy itself", `manage_table('koldstore.job')`},
		{"55000", "column named seq", `manage_table('keyseq')`},
		{"55000", "_ks_x", `manage_table('kscol')`},
		{"22023", "hot_row_limit", `manage_table('plain', hot_row_limit => -1)`},
		{"22023", "min_flush_rows", `manage_table('plain', min_flush_rows => 0)`},
		{"22023", "max_rows_per_file", `manage_table('plain', max_rows_per_file => 0)`},
		{"22023", "exclude each other", `manage_table('plain', hot_row_limit => 1, move_after => '1 day')`},
		{"22023", "retention", `manage_table('plain', retention => '-1 day')`},
		{"22023", "nowhere", `manage_table('plain', storage => 'nowhere')`},
		{"22023", "table_name", `manage_table(NULL)`},
		{"42P01", "nothere", `manage_table('nothere')`},
		{"55000", "not managed", `unmanage_table('plain')`},
		{"55000", "not managed", `changes_since('plain')`},
		{"55000", "not managed", `flush_table('plain')`},
		{"55000", "not managed", `table_status('plain')`},
		{"55000", "not managed", `set_retention('plain', '1 day')`},
	} {
		refused(t, su, c.code, c.text, `SELECT koldstore.`+c.call)
	}
	exec(t, su, `SELECT koldstore.manage_table('plain')`)
	asService(t, su, `INSERT INTO koldstore.plain__cl VALUES (1, 1, 1, '{}')`)
	refused(t, su, "55000", "already managed", `SELECT koldstore.manage_table('plain')`)

	other := as("other")
	refused(t, other, "42501", "must be owner", `SELECT koldstore.manage_table('nopk')`)
	refused(t, other, "42501", "must be owner", `SELECT koldstore.flush_table('plain')`)
	refused(t, other, "42501", "must be owner", `SELECT koldstore.unmanage_table('plain')`)
	refused(t, other, "42501", "permission denied for table", `SELECT * FROM koldstore.changes_since('plain')`)
	refused(t, other, "42501", "permission denied for table", `SELECT * FROM koldstore.plain__cl`)
	refused(t, other, "42501", "permission denied for function", `SELECT koldstore.do_manage_table('postgres', '{}')`)
	refused(t, other, "42501", "permission denied for function", `SELECT * FROM koldstore.eval_rows(0, NULL, NULL)`)
}

// The one who is judged is the current role, also under SET ROLE and within SECURITY DEFINER functions.
func TestCommandsJudgeTheCurrentRole(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	alice, bob := as("alice"), as("bob")
	a, b := value[string](t, alice, `SELECT current_user`), value[string](t, bob, `SELECT current_user`)
	exec(t, su, fmt.Sprintf(`CREATE SCHEMA a AUTHORIZATION %q; GRANT USAGE ON SCHEMA a TO PUBLIC`, a))
	exec(t, alice, `CREATE TABLE a.one (id int PRIMARY KEY); CREATE TABLE a.two (id int PRIMARY KEY)`)
	refused(t, bob, "42501", "must be owner", `SELECT koldstore.manage_table('a.one')`)
	exec(t, alice, `CREATE FUNCTION a.manage_two() RETURNS uuid LANGUAGE sql SECURITY DEFINER AS $$ SELECT koldstore.manage_table('a.two') $$`)
	exec(t, bob, `SELECT a.manage_two()`)
	if got := value[string](t, su, `SELECT requester FROM koldstore.command ORDER BY command_id DESC LIMIT 1`); got != a {
		t.Errorf("command of a SECURITY DEFINER function was noted for %q, want %q", got, a)
	}
	refused(t, bob, "42501", "permission denied", `SELECT * FROM koldstore.changes_since('a.two')`)
	exec(t, su, fmt.Sprintf(`GRANT %q TO %q`, a, b))
	exec(t, bob, fmt.Sprintf(`SET ROLE %q`, a))
	exec(t, bob, `SELECT koldstore.manage_table('a.one')`)
	exec(t, su, fmt.Sprintf(`SET ROLE %q`, b))
	// bob inherits from alice now; a stranger does not.
	exec(t, su, `RESET ROLE`)
	stranger := as("stranger")
	exec(t, su, fmt.Sprintf(`SET ROLE %q`, value[string](t, stranger, `SELECT current_user`)))
	refused(t, su, "42501", "permission denied", `SELECT * FROM koldstore.changes_since('a.two')`)
}

func TestCommandsRollBack(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY, v int)`)
	before := schemaOf(t, su)
	exec(t, su, `BEGIN; SELECT koldstore.manage_table('t'); CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1'); ROLLBACK`)
	if got := schemaOf(t, su); got != before {
		t.Errorf("a rolled back command leaves:\n%s", got)
	}
	exec(t, su, `SELECT koldstore.manage_table('t'); CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1')`)
	exec(t, su, `CALL koldstore.drop_stream(NULL, 's'); SELECT koldstore.unmanage_table('t')`)
	if got := schemaOf(t, su); got != before {
		t.Errorf("unmanage_table and drop_stream leave:\n%s", got)
	}
	if got := value[string](t, su, `SELECT relreplident::text FROM pg_class WHERE oid = 't'::regclass`); got != "d" {
		t.Errorf("replica identity is %q afterwards, want d", got)
	}
	if got := value[int](t, su, `SELECT count(*) FROM pg_publication_tables WHERE tablename = 't'`); got != 0 {
		t.Error("the table is still published")
	}
}

func TestCreateStreamRefusals(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY, v int, at timestamptz); CREATE TABLE nopk (id int); CREATE TABLE _stream_taken (x int);
		CREATE FUNCTION vol(int) RETURNS boolean LANGUAGE plpgsql VOLATILE AS 'BEGIN RETURN true; END'`)
	call := func(name, table, predicate, options string) string {
		return fmt.Sprintf(`CALL koldstore.create_stream(NULL, '%s', NULL, '%s', $p$%s$p$, options => '%s')`, name, table, predicate, options)
	}
	for _, c := range []struct{ code, text, sql string }{
		{"42P01", `relation "nothere" does not exist`, call("s", "nothere", "v > 1", "{}")},
		{"55000", "no primary key", call("s", "nopk", "id > 1", "{}")},
		{"42P07", "_stream_taken", call("taken", "t", "v > 1", "{}")},
		{"42703", "nocol", call("s", "t", "nocol > 1", "{}")},
		{"42804", "boolean", call("s", "t", "v", "{}")},
		{"42P17", "IMMUTABLE", call("s", "t", "at > now()", "{}")},
		{"42P17", "IMMUTABLE", call("s", "t", "vol(v)", "{}")},
		{"0A000", "subquery", call("s", "t", "v > (SELECT 1)", "{}")},
		{"42803", "aggregate", call("s", "t", "max(v) > 1", "{}")},
		{"42601", "syntax error", call("s", "t", "v >", "{}")},
		{"42601", "predicate", call("s", "t", " ", "{}")},
		{"22023", "colour", call("s", "t", "v > 1", `{"colour": "red"}`)},
		{"22023", "start", call("s", "t", "v > 1", `{"start": "yesterday"}`)},
		{"22023", "retention", call("s", "t", "v > 1", `{"retention": "soon"}`)},
		{"22023", "retention", call("s", "t", "v > 1", `{"retention": "-1h"}`)},
		{"22023", "retention", call("s", "t", "v > 1", `{"retention": "0h"}`)},
		{"22023", "pre_image", call("s", "t", "v > 1", `{"pre_image": "perhaps"}`)},
		{"42622", "too long", call(strings.Repeat("x", 60), "t", "v > 1", "{}")},
		{"42704", "does not exist", `CALL koldstore.drop_stream(NULL, 'nothere')`},
	} {
		refused(t, su, c.code, c.text, c.sql)
	}
	exec(t, su, `INSERT INTO t VALUES (1, 2)`)
	exec(t, su, `SELECT; `+call("s", "t", "v > 1", `{"start": "earliest"}`))
	refused(t, su, "42710", "already exists", call("s", "t", "v > 1", "{}"))
	exec(t, su, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1', if_not_exists => true)`)
	exec(t, su, `CALL koldstore.drop_stream(NULL, 'nothere', if_exists => true)`)

	other := as("other")
	exec(t, su, `GRANT CREATE ON SCHEMA public TO PUBLIC`)
	refused(t, other, "42501", "must be owner", call("mine", "t", "v > 1", "{}"))
	refused(t, other, "42501", "must be owner", `CALL koldstore.drop_stream(NULL, 's')`)
	refused(t, other, "42501", "permission denied for table", `SELECT * FROM _stream_s`)
	if got := pages(t, other, `SELECT name FROM koldstore.show_streams()`); len(got) != 0 {
		t.Errorf("SHOW STREAMS shows a stranger %v", got)
	}
	exec(t, su, `GRANT SELECT ON t TO PUBLIC`)
	exec(t, other, `SELECT * FROM _stream_s`)
	if got := pages(t, other, `SELECT name || '|' || "table" || '|' || predicate || '|' || consumers || '|' || lag FROM koldstore.show_streams('{"public.s": {"consumers": 2, "lag": 3}}')`); strings.Join(got, "") != "s|t|(v > 1)|2|3" {
		t.Errorf("SHOW STREAMS shows a reader %v", got)
	}
	exec(t, su, `ALTER TABLE t ENABLE ROW LEVEL SECURITY`)
	refused(t, other, "42501", "row-level security", `SELECT * FROM _stream_s`)
}

func TestLogIsReadOnly(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 5) g`)
	exec(t, owner, `SELECT; CALL koldstore.create_stream(NULL, 's', NULL, 't', 't.v > 2', options => '{"start": "earliest"}')`)
	if got := value[int](t, owner, `SELECT count(*) FROM _stream_s`); got != 3 {
		t.Fatalf("backfill of three matching rows gave %d events", got)
	}
	exec(t, owner, `SELECT koldstore.manage_table('t')`)
	for name, conn := range map[string]*pgx.Conn{"owner": owner, "superuser": su} {
		for _, sql := range []string{
			`INSERT INTO _stream_s (id, op, k, ts) VALUES ('x', 'put', '1', now())`,
			`UPDATE _stream_s SET op = 'put'`,
			`DELETE FROM _stream_s`,
			`DELETE FROM _stream_s WHERE false`,
			`TRUNCATE _stream_s`,
			`DROP TABLE _stream_s`,
			`DELETE FROM koldstore.t__cl`,
			`UPDATE koldstore.t__cl SET op = 1`,
		} {
			if e := refused(t, conn, "42809", "", sql); e.Hint == "" {
				t.Errorf("%s: %s has no hint", name, sql)
			}
		}
	}
	for _, sql := range []string{
		`ALTER TABLE _stream_s ADD x int`,
		`ALTER TABLE _stream_s DISABLE TRIGGER koldproxy_guard`,
		`ALTER TABLE _stream_s DISABLE ROW LEVEL SECURITY`,
		`DROP TRIGGER koldproxy_guard ON _stream_s`,
		`DROP POLICY koldproxy_readers ON _stream_s`,
		`CREATE RULE r AS ON INSERT TO _stream_s DO INSTEAD NOTHING`,
		`DROP SCHEMA public CASCADE`,
		`CREATE TABLE mine PARTITION OF _stream_s FOR VALUES FROM ('9') TO ('99')`,
	} {
		refused(t, su, "42809", "log of a stream", sql)
	}
	// What holds for the log holds for its partitions.
	part := value[string](t, su, `SELECT part::regclass FROM koldstore.log_partitions('_stream_s'::regclass)`)
	for _, sql := range []string{
		`INSERT INTO %s (id, op, k, ts) VALUES ('0', 'put', '1', now())`, `UPDATE %s SET op = 'put'`, `DELETE FROM %s`, `TRUNCATE %s`, `DROP TABLE %s`,
		`ALTER TABLE %s DISABLE TRIGGER koldproxy_guard`, `ALTER TABLE %s RENAME TO mine`, `ALTER TABLE %s SET SCHEMA public`,
		`ALTER TABLE _stream_s DETACH PARTITION %s`, `DROP TRIGGER koldproxy_guard ON %s`,
	} {
		refused(t, su, "42809", "", fmt.Sprintf(sql, part))
	}
	refused(t, owner, "42501", "permission denied", `SELECT * FROM `+part)
	// The predicate's column cannot go away unnoticed; a rename follows.
	refused(t, owner, "2BP01", "", `ALTER TABLE t DROP COLUMN v`)
	refused(t, owner, "0A000", "", `ALTER TABLE t ALTER v TYPE text`)
	exec(t, owner, `ALTER TABLE t RENAME v TO w; ALTER TABLE t RENAME TO r`)
	if got := value[string](t, owner, `SELECT "table" || ': ' || predicate FROM koldstore.show_streams()`); got != "r: (w > 2)" {
		t.Errorf("SHOW STREAMS after the renames: %s", got)
	}
	exec(t, owner, `ALTER TABLE r RENAME TO t`)
	exec(t, owner, `ALTER TABLE t ADD extra int; ALTER TABLE t DROP extra`)
	exec(t, owner, `DROP TABLE t CASCADE`)
	if got := value[string](t, su, `SELECT state || ': ' || reason FROM koldstore.stream`); got != "broken: its table was dropped" {
		t.Errorf("after DROP TABLE … CASCADE the stream is %q", got)
	}
	exec(t, su, `CALL koldstore.drop_stream(NULL, 's')`)
}

// asService runs sql as the role that owns the catalog.
func asService(t *testing.T, su *pgx.Conn, sql string) {
	t.Helper()
	service := value[string](t, su, `SELECT nspowner::regrole FROM pg_namespace WHERE nspname = 'koldstore'`)
	exec(t, su, `SET ROLE `+service+`; `+sql+`; RESET ROLE`)
}

// pages drains a feed from a cursor and returns "seq/op/source" of each row.
func pages(t *testing.T, conn *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return out
}

func TestChangesSinceMergesMirrorAndStagedPages(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE SCHEMA app; CREATE TABLE app.m (id int PRIMARY KEY, body text); SELECT koldstore.manage_table('app.m')`)
	write := func(sql string) { asService(t, su, sql) }
	// Rows 1 to 4 are cold (seq 10..40), 3 was changed since, 5 and 6 are hot, 6 is deleted.
	write(`UPDATE koldstore.managed_table SET state = 'active', floor = 0; INSERT INTO koldstore.m__cl VALUES (3, 50, 2, '{"id": 3, "body": "new"}'), (5, 60, 1, '{"id": 5}'), (6, 70, 3, NULL)`)
	write(`INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256)
		VALUES ('00000000-0000-0000-0000-000000000001', 'app.m'::regclass, 'default', 'x', 'active', 10, 40, 4, '\x00')`)
	write(`UPDATE koldstore.managed_table SET generation = 7`)

	const feed = `SELECT seq || '/' || op || '/' || source FROM koldstore.changes_since('app.m', %s)`
	q := func(args string) string { return fmt.Sprintf(feed, args) }
	if got := pages(t, su, q("since_seq => 40")); strings.Join(got, " ") != "50/2/hot 60/1/hot 70/3/hot" {
		t.Errorf("above the cold part: %v", got)
	}
	if got := pages(t, su, q("last_rows => 2")); strings.Join(got, " ") != "60/1/hot 70/3/hot" {
		t.Errorf("newest two: %v", got)
	}
	demand := refused(t, su, "KS003", "cold history", q("limit_rows => 3")).Detail
	for _, want := range []string{`"kind": "cold_page"`, `"mode": "forward"`, `"after": 0`, `"limit": 3`, `"generation": 7`, `"segments": ["00000000-0000-0000-0000-000000000001"]`} {
		if !strings.Contains(demand, want) {
			t.Errorf("demand %s lacks %s", demand, want)
		}
	}
	if value[*string](t, su, `SELECT koldstore.demand_allowed($1)`, demand) == nil {
		t.Fatal("the demand is not allowed")
	}

	k := secretsOf(t, su)
	stage := func(answers ...string) {
		var lines []string
		for _, a := range answers {
			lines = append(lines, k.sealed(t, su, a)...)
		}
		exec(t, su, `SELECT set_config('koldstore.staged', $1, false)`, strings.Join(lines, "\n"))
	}
	page := func(mode, extra, rows string) string {
		return fmt.Sprintf(`{"kind":"cold_page","table":%d,"generation":7,"segments":["00000000-0000-0000-0000-000000000001"],"mode":%q,%s,"rows":[%s]}`,
			value[int64](t, su, `SELECT 'app.m'::regclass::oid::bigint`), mode, extra, rows)
	}
	row := func(id, seq int) string {
		return fmt.Sprintf(`{"seq":%d,"op":1,"pk":{"id":%d},"image":{"id":%d,"body":null}}`, seq, id, id)
	}
	// Three rows were staged and one of them is superseded: a short page would lie, so more is demanded.
	stage(page("forward", `"after":0,"limit":3,"through":30,"complete":false`, row(1, 10)+","+row(2, 20)+","+row(3, 30)))
	if d := refused(t, su, "KS003", "cold history", q("limit_rows => 3")).Detail; !strings.Contains(d, `"limit": 1006`) {
		t.Errorf("the second demand is %s", d)
	}
	if got := pages(t, su, q("limit_rows => 2")); strings.Join(got, " ") != "10/1/cold 20/1/cold" {
		t.Errorf("two cold rows: %v", got)
	}
	stage(page("forward", `"after":0,"limit":3,"through":30,"complete":false`, row(1, 10)),
		page("forward", `"after":0,"limit":1006,"through":40,"complete":true`, row(1, 10)+","+row(2, 20)+","+row(3, 30)+","+row(4, 40)))
	if got := pages(t, su, q("limit_rows => 5")); strings.Join(got, " ") != "10/1/cold 20/1/cold 40/1/cold 50/2/hot 60/1/hot" {
		t.Errorf("cold and hot: %v", got)
	}
	stage(page("last", `"limit":2,"through":0,"complete":true`, row(1, 10)+","+row(2, 20)+","+row(3, 30)+","+row(4, 40)))
	if got := pages(t, su, q("last_rows => 5")); strings.Join(got, " ") != "20/1/cold 40/1/cold 50/2/hot 60/1/hot 70/3/hot" {
		t.Errorf("newest five: %v", got)
	}
	// A page of another generation is as good as none.
	write(`UPDATE koldstore.managed_table SET generation = 8, floor = 15`)
	refused(t, su, "KS003", "cold history", q("last_rows => 5"))
	refused(t, su, "KS001", "change records before sequence 15 are no longer retained", q("since_seq => 14"))
	for args, text := range map[string]string{
		"since_seq => -1":                   "since_seq must be >= 0",
		"since_seq => NULL":                 "since_seq must be >= 0",
		"limit_rows => 0":                   "limit_rows must be positive",
		"last_rows => 0":                    "last_rows must be positive",
		"last_rows => 11, limit_rows => 10": "last_rows must be <= limit_rows",
	} {
		refused(t, su, "22023", text, q(args))
	}
	// A positive cursor wins over last_rows, whatever that is.
	if got := pages(t, su, q("since_seq => 60, last_rows => 5000")); strings.Join(got, " ") != "70/3/hot" {
		t.Errorf("cursor with last_rows: %v", got)
	}
	if got := pages(t, su, q("since_seq => 9000000000000")); len(got) != 0 {
		t.Errorf("above the watermark: %v", got)
	}
}

// secrets are those of koldstore.stage_secret, which koldproxy reads as the role that owns them.
type secrets struct{ secret, seal []byte }

func secretsOf(t *testing.T, su *pgx.Conn) secrets {
	t.Helper()
	var k secrets
	if err := su.QueryRow(t.Context(), `SELECT secret, seal FROM koldstore.stage_secret`).Scan(&k.secret, &k.seal); err != nil {
		t.Fatal(err)
	}
	return k
}

// sealed is an answer as koldstore.staged wants to find it: what proxy/seal.go does, by the description there.
func (k secrets) sealed(t *testing.T, conn *pgx.Conn, answer string) []string {
	t.Helper()
	return k.sealedAt(t, answer, value[int32](t, conn, `SELECT pg_backend_pid()`), value[int64](t, conn, `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`))
}

func (k secrets) sealedAt(t *testing.T, answer string, pid int32, at int64) []string {
	t.Helper()
	var d struct {
		Kind  string
		Table uint64
	}
	if err := json.Unmarshal([]byte(answer), &d); err != nil {
		t.Fatal(err)
	}
	nonce, box, session := []byte("nonce"), []byte(answer), binary.BigEndian.AppendUint32(nil, uint32(pid))
	key := sha512.Sum512(slices.Concat(k.secret, session, binary.BigEndian.AppendUint64(nil, d.Table), []byte(d.Kind), nonce))
	for i := range box {
		block := sha512.Sum512(binary.BigEndian.AppendUint32(key[:], uint32(i/64)))
		box[i] ^= block[i%64]
	}
	head := fmt.Sprintf(`{"demand":%s,"nonce":"%x","box":"%x","at":%d}`, answer, nonce, sha512.Sum512(box), at)
	inner := sha512.Sum512(slices.Concat(k.seal, session, []byte(head)))
	return []string{head, fmt.Sprintf("%x", sha512.Sum512(slices.Concat(k.seal, inner[:]))), base64.StdEncoding.EncodeToString(box)}
}

// What is staged is for those who may read the table, as the role that asks: not for whoever can read the setting. Nobody but koldproxy
// makes it, and what it made is of no use in another session, nor later.
func TestStagedAnswersAreSealed(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE SCHEMA app; CREATE TABLE app.m (id int PRIMARY KEY); CREATE TABLE app.other (id int PRIMARY KEY);
		SELECT koldstore.manage_table('app.m'); SELECT koldstore.manage_table('app.other')`)
	m, _ := mallory(t, su, as)
	exec(t, su, `CREATE FUNCTION app.look(d jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS 'SELECT koldstore.staged($1)'`)
	exec(t, m, `CREATE FUNCTION mal.look(d jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS 'SELECT koldstore.staged($1)';
		CREATE VIEW mal.looking AS SELECT koldstore.staged(current_setting('app.d')::jsonb) AS page, (SELECT count(*) FROM koldstore.stage_key) AS keys;
		GRANT USAGE ON SCHEMA mal TO PUBLIC; GRANT SELECT ON mal.looking TO PUBLIC`)
	k := secretsOf(t, su)
	refused(t, m, "42501", "stage_secret", `SELECT * FROM koldstore.stage_secret`)
	d := value[string](t, su, `SELECT jsonb_build_object('kind', 'cold_page', 'table', 'app.m'::regclass::oid::bigint, 'segments', '[]'::jsonb)::text`)
	answer := strings.TrimSuffix(d, "}") + `, "rows": ["secret"]}`
	stage := func(conn *pgx.Conn, lines ...string) {
		exec(t, conn, `SELECT set_config('koldstore.staged', $1, false), set_config('app.d', $2, false)`, strings.Join(lines, "\n"), d)
	}
	honest := k.sealed(t, su, answer)
	stage(su, honest...)
	got := func(sql string) string {
		if page := value[*string](t, su, sql, d); page != nil {
			return *page
		}
		return "nothing"
	}
	for _, c := range []struct {
		who, sql string
		may      bool
	}{
		{"who may read", `SELECT koldstore.staged($1)::text`, true},
		{"a function of one who may", `SELECT app.look($1)::text`, true},
		{"a function of one who may not", `SELECT mal.look($1)::text`, false},
		{"a view, which runs as the one who asks", `SELECT page::text FROM mal.looking WHERE $1 <> ''`, true},
	} {
		if page := got(c.sql); strings.Contains(page, "secret") != c.may {
			t.Errorf("%s: %s", c.who, page)
		}
	}
	// Whoever may read the table has the key, and is believed no page of his own all the same.
	key := value[[]byte](t, su, `SELECT key FROM koldstore.stage_key`)
	pid, now := value[int32](t, su, `SELECT pg_backend_pid()`), value[int64](t, su, `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`)
	box := []byte(strings.Replace(answer, "secret", "FORGED", 1))
	for i := range box {
		block := sha512.Sum512(binary.BigEndian.AppendUint32(slices.Clone(key), uint32(i/64)))
		box[i] ^= block[i%64]
	}
	forged := base64.StdEncoding.EncodeToString(box)
	head := strings.Replace(honest[0], fmt.Sprintf("%x", sha512.Sum512(unbase64(t, honest[2]))), fmt.Sprintf("%x", sha512.Sum512(box)), 1)
	self := secrets{secret: k.secret, seal: []byte("guessed")}
	for name, lines := range map[string][]string{
		"another box under an honest head":    {honest[0], honest[1], forged},
		"a head for it under an honest MAC":   {head, honest[1], forged},
		"a seal that is guessed":              self.sealedAt(t, answer, pid, now),
		"an honest page of another session":   k.sealedAt(t, answer, pid+1, now),
		"an honest page from two minutes ago": k.sealedAt(t, answer, pid, now-120_000_000),
		"a page of another table":             k.sealedAt(t, strings.Replace(answer, fmt.Sprint(value[int64](t, su, `SELECT 'app.m'::regclass::oid::bigint`)), fmt.Sprint(value[int64](t, su, `SELECT 'app.other'::regclass::oid::bigint`)), 1), pid, now),
		"too few lines":                       honest[:2],
	} {
		stage(su, lines...)
		if page := got(`SELECT koldstore.staged($1)::text`); page != "nothing" {
			t.Errorf("%s is believed: %s", name, page)
		}
	}
	// A key is for one box: one that was seen before a REVOKE opens nothing that comes later.
	stage(su, k.sealed(t, su, answer)...)
	stage(m, k.sealed(t, m, answer)...)
	if got := value[int](t, m, `SELECT count(*) FROM koldstore.stage_key`); got != 0 {
		t.Errorf("a stranger sees %d keys", got)
	}
	exec(t, su, `SET ROLE `+value[string](t, m, `SELECT quote_ident(current_user)`))
	if page := got(`SELECT koldstore.staged($1)::text`); page != "nothing" {
		t.Errorf("another role opens it: %s", page)
	}
	if page := got(`SELECT page::text FROM mal.looking WHERE $1 <> ''`); page != "nothing" {
		t.Errorf("another role opens it through a view: %s", page)
	}
}

func unbase64(t *testing.T, text string) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// demanding_names finds what leads to a demand, through any number of steps.
func TestDemandingNames(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE m (id int PRIMARY KEY); CREATE TABLE traced (id int); CREATE TABLE plain (id int);
		CREATE VIEW "Feed v" AS SELECT * FROM koldstore.changes_since('m');
		CREATE MATERIALIZED VIEW mat AS SELECT * FROM "Feed v" WITH NO DATA;
		CREATE FUNCTION text_body() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT count(*) FROM "Feed v"); END $$;
		CREATE FUNCTION sql_body() RETURNS bigint BEGIN ATOMIC SELECT count(*) FROM koldstore.changes_since('m'); END;
		CREATE PROCEDURE calls() LANGUAGE sql AS 'SELECT TEXT_BODY()';
		CREATE FUNCTION tracing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM sql_body(); RETURN NULL; END $$;
		CREATE TRIGGER t AFTER INSERT ON traced FOR EACH ROW EXECUTE FUNCTION tracing();
		CREATE VIEW other AS SELECT * FROM plain;
		CREATE FUNCTION not_text_body_either() RETURNS int LANGUAGE sql AS 'SELECT 1 -- my_text_body'`)
	asService(t, su, `CREATE TABLE koldstore.found AS SELECT string_agg(n, ' ' ORDER BY n::text COLLATE "C") AS names FROM koldstore.demanding_names() n; GRANT SELECT ON koldstore.found TO PUBLIC`)
	got := value[string](t, su, `SELECT names FROM koldstore.found`)
	if want := "Feed v calls mat sql_body text_body traced tracing"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestFenceWithoutAnApplier(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY)`)
	refused(t, su, "57014", "did not catch up", `SELECT koldstore.wait_for_async_mirror(timeout => '50 ms')`)
	refused(t, su, "22023", "timeout", `SELECT koldstore.wait_for_async_mirror(timeout => '0')`)
}

func TestEventID(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	if got := value[string](t, su, `SELECT koldstore.event_id((1 << 22) + 3, '16/B374D848')`); got != "00001704067200001-0000000003-00000016b374d848" {
		t.Error(got)
	}
}
