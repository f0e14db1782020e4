package migrations_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

func TestStreamTopicIsThatOfGo(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	database := value[string](t, su, `SELECT current_database()`)
	for _, schema := range []string{"public", "app", "S.é", "a/b+#", "x%y", "..", "line\nbreak", "nel\u0085", "tab\t"} {
		for _, name := range []string{"orders", "größer als", "a.b", "+", "#", "%2F", "/", "\x7f", "\u0080\u009f\u00a0", "日本語", `q"'\`, "$stream"} {
			if got, want := value[string](t, su, `SELECT koldstore.stream_topic($1, $2)`, schema, name), koldproxy.StreamTopic(database, schema, name); got != want {
				t.Errorf("%q.%q: the topic is %q in SQL, %q in Go", schema, name, got, want)
			}
		}
	}
}

func TestTopicMatches(t *testing.T) {
	t.Parallel()
	su, _ := installed(t)
	for _, c := range []struct {
		filter, topic string
		want          bool
	}{
		{"$stream/db/s", "$stream/db/s", true},
		{"$stream/db/s", "$stream/db/t", false},
		{"$stream/db/s", "$stream/db/s/x", false},
		{"$stream/db/s/x", "$stream/db/s", false},
		{"$stream/db/+", "$stream/db/s", true},
		{"$stream/db/+", "$stream/db", false},
		{"$stream/db/+", "$stream/db/", true},
		{"$stream/+/s", "$stream/db/s", true},
		{"$stream/+/+", "$stream/db/app.s", true},
		{"$stream/#", "$stream/db/s", true},
		{"$stream/#", "$stream", true},
		{"$stream/db/#", "$stream/db/s", true},
		{"$stream/db/s/#", "$stream/db/s", true},
		{"$stream/db/s/+/#", "$stream/db/s", false},
		{"#", "$stream/db/s", false},
		{"+/db/s", "$stream/db/s", false},
		{"#", "a/b", true},
		{"a//b", "a//b", true},
		{"a/+/b", "a//b", true},
	} {
		if got := value[bool](t, su, `SELECT koldstore.topic_matches($1, $2)`, c.filter, c.topic); got != c.want {
			t.Errorf("%s matches %s: %v", c.filter, c.topic, got)
		}
	}
}

// subscriptions is a database with table t of role owner and stream s, and a question.
type subscriptions struct {
	t        *testing.T
	su       *pgx.Conn
	as       func(string) *pgx.Conn
	database string
}

func newSubscriptions(t *testing.T) *subscriptions {
	t.Helper()
	su, as := installed(t)
	w := &subscriptions{t: t, su: su, as: as, database: value[string](t, su, `SELECT current_database()`)}
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, w.role("owner")))
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY, v int)`)
	exec(t, owner, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1')`)
	return w
}

func (w *subscriptions) role(suffix string) string { return w.database + "_" + suffix }

// call is a call of grant_subscribe or revoke_subscribe for one filter, below this database unless it begins with $.
func (w *subscriptions) call(procedure, filter string, roles ...string) string {
	if !strings.HasPrefix(filter, "$") {
		filter = "$stream/" + w.database + "/" + filter
	}
	return fmt.Sprintf(`CALL koldstore.%s_subscribe(ARRAY['%s'], ARRAY['%s']::name[])`, procedure, filter, strings.Join(roles, "','"))
}

// want checks who of all roles may subscribe to stream s.
func (w *subscriptions) want(stream string, roles ...string) {
	w.t.Helper()
	allowed := map[string]bool{}
	for _, r := range roles {
		allowed[r] = true
	}
	for _, r := range []string{"owner", "reader", "member", "other"} {
		if got := value[bool](w.t, w.su, `SELECT koldstore.may_subscribe($1, 'public', $2)`, w.role(r), stream); got != allowed[r] {
			w.t.Errorf("may %s subscribe to %s: %v", r, stream, got)
		}
	}
}

func TestWhoMaySubscribe(t *testing.T) {
	t.Parallel()
	w := newSubscriptions(t)
	su, owner := w.su, w.as("owner")
	w.as("reader")
	w.as("member")
	w.as("other")
	exec(t, su, fmt.Sprintf(`CREATE ROLE %[1]q; GRANT %[1]q TO %[2]q; ALTER ROLE %[3]q NOINHERIT; GRANT %[1]q TO %[3]q`, w.role("team"), w.role("member"), w.role("other")))

	// To read the table is not enough, and not needed.
	exec(t, owner, `GRANT SELECT ON t TO PUBLIC`)
	w.want("s", "owner")
	exec(t, owner, `REVOKE ALL ON t FROM PUBLIC; ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY`)
	exec(t, owner, w.call("grant", "s", w.role("reader")))
	w.want("s", "owner", "reader")
	exec(t, owner, w.call("grant", "s", w.role("reader"))) // once more changes nothing
	if got := value[int](t, su, `SELECT count(*) FROM koldstore.topic_grant`); got != 1 {
		t.Errorf("%d grants", got)
	}

	// By membership, but not for a role that does not inherit.
	exec(t, owner, w.call("grant", "s", w.role("team")))
	w.want("s", "owner", "reader", "member")
	exec(t, owner, w.call("revoke", "s", w.role("reader"), w.role("team")))
	w.want("s", "owner")
	exec(t, owner, w.call("grant", "s", "public"))
	w.want("s", "owner", "reader", "member", "other")
	if value[bool](t, su, `SELECT koldstore.may_subscribe('nobody_of_this_name', 'public', 's')`) || value[bool](t, su, `SELECT koldstore.may_subscribe($1, 'public', 'nothing')`, w.role("reader")) {
		t.Error("a role or a stream that does not exist may")
	}
	exec(t, su, w.call("revoke", "s", "public")) // a superuser may, whoever has granted
	w.want("s", "owner")
	if !value[bool](t, su, `SELECT koldstore.may_subscribe(current_user, 'public', 's')`) {
		t.Error("a superuser may not")
	}

	// A grant takes part in its transaction, and ends with its stream.
	exec(t, owner, `BEGIN`)
	exec(t, owner, w.call("grant", "s", "public"))
	exec(t, owner, `ROLLBACK`)
	w.want("s", "owner")
	exec(t, owner, w.call("grant", "s", "public"))
	exec(t, owner, `CALL koldstore.drop_stream(NULL, 's')`)
	exec(t, owner, `CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1')`)
	w.want("s", "owner")

	// So does one to a role that is dropped, and what is left of it goes with the next grant.
	exec(t, owner, w.call("grant", "s", w.role("team")))
	exec(t, su, fmt.Sprintf(`DROP ROLE %q`, w.role("team")))
	w.want("s", "owner")
	if got := value[int](t, su, `SELECT count(*) FROM koldstore.topic_grants`); got != 0 {
		t.Errorf("%d grants are listed for a role that is gone", got)
	}
	exec(t, owner, w.call("grant", "s", w.role("reader")))
	if got := value[string](t, su, `SELECT string_agg(role_oid::regrole::text, ' ') FROM koldstore.topic_grant`); got != w.role("reader") {
		t.Errorf("grants are left for %s", got)
	}
}

// TestWildcardGrants: the owner of the database makes them, and they convey streams of tables that are the grantor's.
func TestWildcardGrants(t *testing.T) {
	t.Parallel()
	w := newSubscriptions(t)
	su, owner, other := w.su, w.as("owner"), w.as("other")
	w.as("reader")
	w.as("member")
	refused(t, owner, "42501", "must be owner of database", w.call("grant", "#", w.role("reader")))
	refused(t, owner, "42501", "must be owner of database", w.call("revoke", "+", w.role("reader")))
	exec(t, su, fmt.Sprintf(`ALTER DATABASE %q OWNER TO %q; GRANT CREATE ON SCHEMA public TO %q`, w.database, w.role("owner"), w.role("other")))
	exec(t, other, `CREATE TABLE u (id int PRIMARY KEY)`)
	exec(t, other, `CALL koldstore.create_stream(NULL, 'theirs', NULL, 'u', 'id > 1')`)

	exec(t, owner, w.call("grant", "+", w.role("reader")))
	w.want("s", "owner", "reader")
	w.want("theirs", "other")
	refused(t, owner, "42501", "must be owner of stream theirs", w.call("grant", "theirs", w.role("reader")))
	exec(t, owner, `CALL koldstore.create_stream(NULL, 'later', NULL, 't', 'v > 1')`)
	w.want("later", "owner", "reader")
	exec(t, su, w.call("grant", "$stream/#", w.role("member")))
	w.want("theirs", "other", "member")
	w.want("s", "owner", "reader", "member")
	exec(t, su, fmt.Sprintf(`ALTER TABLE u OWNER TO %q`, w.role("owner")))
	w.want("theirs", "owner", "reader", "member")

	// What one has granted the other takes back.
	exec(t, owner, w.call("revoke", "$stream/#", w.role("member")))
	exec(t, su, w.call("revoke", "+", w.role("reader")))
	w.want("s", "owner")
	w.want("theirs", "owner")
}

func TestGrantSubscribeRefusals(t *testing.T) {
	t.Parallel()
	w := newSubscriptions(t)
	for _, c := range []struct{ code, text, detail, call string }{
		{"22023", "invalid topic filter", "empty", `CALL koldstore.grant_subscribe(ARRAY[''], ARRAY['public'])`},
		{"22023", "invalid topic filter", "empty", `CALL koldstore.revoke_subscribe(ARRAY[NULL], ARRAY['public'])`},
		{"22023", "invalid topic filter", "1024", w.call("grant", strings.Repeat("x", 1025), "public")},
		{"22023", "invalid topic filter", "Shared", w.call("grant", "$share/g/$stream/#", "public")},
		{"22023", "invalid topic filter", "alone in its level", w.call("grant", "app.+", "public")},
		{"22023", "invalid topic filter", "alone in its level", w.call("grant", "s#", "public")},
		{"22023", "invalid topic filter", "last level", w.call("grant", "#/s", "public")},
		{"22023", "invalid topic filter", "first level", `CALL koldstore.grant_subscribe(ARRAY['#'], ARRAY['public'])`},
		{"22023", "invalid topic filter", "first level", `CALL koldstore.grant_subscribe(ARRAY['+/x'], ARRAY['public'])`},
		{"22023", "invalid topic filter", "not about streams", w.call("grant", "$SYS/#", "public")},
		{"22023", "invalid topic filter", "not about streams", `CALL koldstore.grant_subscribe(ARRAY['a//b'], ARRAY['public'])`},
		{"22023", "invalid topic filter", "not about streams", w.call("grant", "$stream", "public")},
		{"22023", "invalid topic filter", "another database", w.call("grant", "$stream/elsewhere/#", "public")},
		{"22023", "invalid topic filter", "another database", w.call("grant", "$stream//s", "public")},
		{"42704", "no stream with topic", "", w.call("grant", "nothing", "public")},
		{"42704", "no stream with topic", "", w.call("grant", "public.s", "public")}, // not how it is spelled
		{"42704", "no stream with topic", "", w.call("revoke", "", "public")},
		{"42704", `role "nobody_of_this_name" does not exist`, "", w.call("grant", "s", "nobody_of_this_name")},
		{"42704", `role "nobody_of_this_name" does not exist`, "", w.call("revoke", "s", "nobody_of_this_name")},
		{"42704", `role "NULL" does not exist`, "", `CALL koldstore.grant_subscribe(ARRAY['$stream/+/s'], ARRAY[NULL]::name[])`},
		{"22023", "unknown command", "", `INSERT INTO koldstore.command (verb, args) VALUES ('nothing', '{}')`},
		{"22023", "unknown command", "", `INSERT INTO koldstore.command (verb, args) VALUES ('grant_subscribe(name, jsonb); --', '{}')`},
	} {
		if e := refused(t, w.su, c.code, c.text, c.call); !strings.Contains(e.Detail, c.detail) {
			t.Errorf("%s: detail %q, want %q in it", c.call, e.Detail, c.detail)
		}
	}
	other := w.as("other")
	refused(t, other, "42501", "must be owner of stream s", w.call("grant", "s", w.role("other")))
	refused(t, other, "42501", "must be owner of stream s", w.call("revoke", "s", w.role("owner")))
	refused(t, other, "42501", "permission denied", `SELECT koldstore.do_grant_subscribe('postgres', '{}')`)
	refused(t, other, "42501", "permission denied", `SELECT koldstore.may_subscribe('postgres', 'public', 's')`)
	refused(t, other, "42501", "permission denied", `DELETE FROM koldstore.topic_grant`)
	if got := value[int](t, w.su, `SELECT count(*) FROM koldstore.topic_grant`); got != 0 {
		t.Errorf("%d grants came of it", got)
	}
}

func TestTopicGrantsAreListedToThoseConcerned(t *testing.T) {
	t.Parallel()
	w := newSubscriptions(t)
	owner := w.as("owner")
	reader, other := w.as("reader"), w.as("other")
	exec(t, owner, w.call("grant", "s", w.role("reader"), "public"))
	exec(t, w.su, w.call("grant", "#", w.role("other")))
	const list = `SELECT coalesce(string_agg(split_part(filter, '/', 3) || '>' || replace(role, current_database() || '_', ''), ' ' ORDER BY filter, role), '') FROM koldstore.topic_grants`
	for _, c := range []struct {
		who  string
		conn *pgx.Conn
		want string
	}{
		{"superuser", w.su, "#>other s>PUBLIC s>reader"},
		{"owner of the stream", owner, "s>PUBLIC s>reader"},
		{"reader", reader, "s>PUBLIC s>reader"},
		{"other", other, "#>other s>PUBLIC"},
	} {
		if got := value[string](t, c.conn, list); got != c.want {
			t.Errorf("%s sees %q, want %q", c.who, got, c.want)
		}
	}
	if got := value[string](t, w.su, `SELECT string_agg(DISTINCT granted_by::text, ' ') FROM koldstore.topic_grants WHERE filter NOT LIKE '%#'`); got != w.role("owner") {
		t.Errorf("granted by %s", got)
	}
}
