package integration_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// newRole makes a role that may log in with its name as password, and drops it at the end of the test.
func (w *tenant) newRole(t *testing.T, suffix, options string) string {
	t.Helper()
	role := w.schema + "_" + suffix
	admin := w.connectAs(t, "postgres")
	admin.exec(fmt.Sprintf(`CREATE ROLE "%[1]s" LOGIN PASSWORD '%[1]s' %[2]s`, role, options))
	t.Cleanup(func() { admin.exec(fmt.Sprintf(`DROP ROLE "%s"`, role)) })
	return role
}

// TestGrantedTopics: a grant lets a role in that may not even read the table, and a REVOKE ends what is running.
func TestGrantedTopics(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	guest := w.newRole(t, "guest", "")
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000);
		CREATE TABLE marks (id int PRIMARY KEY); CREATE STREAM mark ON marks WHEN (true)`)

	sub := w.inst.subscribe(t, guest, guest, w.topic("big"))
	if granted, ok := sub.await("Subscribed"); ok && !strings.Contains(granted, "128") {
		t.Errorf("subscribed without a grant: %s", granted)
	}
	if tag := c.exec(fmt.Sprintf("GRANT SUBSCRIBE ON TOPIC '%s', '%s' TO %s", w.topic("big"), w.topic("mark"), guest)); tag != "GRANT" {
		t.Errorf("tag %s", tag)
	}
	await(t, "the grant to be known", func() bool { // an answer is used for a second
		exact := w.inst.subscribe(t, guest, guest, w.topic("big"))
		granted, ok := exact.await("Subscribed")
		return ok && !strings.Contains(granted, "128")
	})
	owner := w.inst.subscribe(t, "demo", "demo", w.topic("big"))
	running := w.inst.subscribe(t, guest, guest, "$stream/"+database+"/#")
	for _, s := range []*subscriber{owner, running} {
		if _, ok := s.await("Subscribed"); !ok {
			t.Fatal("not subscribed")
		}
	}

	// received inserts an order and then a mark, and tells whether the guest gets the order too. The guest's messages come
	// in the order in which they are published.
	n := 0
	received := func() bool {
		t.Helper()
		n++
		c.exec("INSERT INTO orders VALUES ($1, 5000)", n)
		owner.message()
		c.exec("INSERT INTO marks VALUES ($1)", n)
		topic, payload := running.message()
		if topic == w.topic("mark") {
			return false
		}
		if topic != w.topic("big") || !strings.Contains(payload, fmt.Sprintf(`"k":%d`, n)) {
			t.Fatalf("the guest received %s: %s", topic, payload)
		}
		if topic, _ = running.message(); topic != w.topic("mark") {
			t.Fatalf("the guest received %s", topic)
		}
		return true
	}
	await(t, "events to be delivered", received)
	if tag := c.exec(fmt.Sprintf("REVOKE SUBSCRIBE ON TOPIC '%s' FROM %s", w.topic("big"), guest)); tag != "REVOKE" {
		t.Errorf("tag %s", tag)
	}
	revoked := time.Now()
	await(t, "the revocation to be known", func() bool {
		late := time.Since(revoked) > 1100*time.Millisecond // what the broker promises is a second
		still := received()
		if still && late {
			t.Errorf("an event is delivered %v after the right was revoked", time.Since(revoked))
		}
		return !still
	})
	if received() {
		t.Error("delivered again")
	}
}

// TestGrantStatements runs the statements in every protocol, and within transactions.
func TestGrantStatements(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	guest := w.newRole(t, "Guest é", "")
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM "über/alles" ON orders WHEN (total > 1000)`)
	topic := w.topic("über%2Falles")
	grants := func() string {
		t.Helper()
		return c.text("SELECT coalesce(string_agg(role, ' ' ORDER BY role), '') FROM koldstore.topic_grants WHERE filter = $1", topic)
	}
	grant := fmt.Sprintf(`GRANT SUBSCRIBE ON TOPIC '%s' TO "%s", GROUP Current_User /* too */`, topic, guest)
	revoke := fmt.Sprintf(`-- enough
		revoke subscribe ON topic $$%s$$ from "%s", demo`, topic, guest)
	for _, p := range protocols {
		if tag := c.exec(grant, p.mode); tag != "GRANT" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		if got := grants(); got != "demo "+guest && got != guest+" demo" {
			t.Errorf("%s: granted to %s", p.name, got)
		}
		if tag := c.exec(revoke, p.mode); tag != "REVOKE" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		if got := grants(); got != "" {
			t.Errorf("%s: still granted to %s", p.name, got)
		}
	}
	if tag := c.exec("BEGIN; "+grant+"; ROLLBACK", pgx.QueryExecModeSimpleProtocol); tag != "ROLLBACK" || grants() != "" {
		t.Errorf("tag %s, granted to %q", tag, grants())
	}
	c.exec("BEGIN; GRANT SUBSCRIBE ON TOPIC '" + topic + "' TO public")
	if got := grants(); got != "PUBLIC" {
		t.Errorf("granted to %s", got)
	}
	c.exec("ROLLBACK")

	c.notices = nil
	c.exec(revoke)
	if len(c.notices) != 2 || c.notices[0].Severity != "WARNING" || c.notices[0].Code != "01006" || c.notices[0].Where != "" {
		t.Errorf("a REVOKE of nothing gave %d notices", len(c.notices))
	}
	// Wildcards are for the owner of the database, who demo is.
	c.exec(fmt.Sprintf(`GRANT SUBSCRIBE ON TOPIC '$stream/%s/+' TO "%s"`, database, guest))
	c.exec(fmt.Sprintf(`REVOKE SUBSCRIBE ON TOPIC '$stream/%s/+' FROM "%s"`, database, guest))

	for _, in := range []badInput{
		{sql: "GRANT SUBSCRIBE ON TOPIC TO demo", code: "42601", text: `at or near "TO"`, hint: "GRANT SUBSCRIBE ON TOPIC 'filter'"},
		{sql: "GRANT SUBSCRIBE ON TOPIC '" + topic + "' FROM demo", code: "42601", text: `at or near "FROM"`},
		{sql: "GRANT SUBSCRIBE ON TOPIC '" + topic + "' TO demo WITH GRANT OPTION", code: "42601", text: `at or near "WITH"`},
		{sql: "GRANT SUBSCRIBE ON TOPIC '#' TO demo", code: "22023", text: "invalid topic filter", hint: "$stream/" + database},
		{sql: "GRANT SUBSCRIBE ON TOPIC '$stream/" + database + "/a+' TO demo", code: "22023", text: "invalid topic filter"},
		{sql: "GRANT SUBSCRIBE ON TOPIC '$share/g/$stream/#' TO demo", code: "22023", text: "invalid topic filter", hint: "$share"},
		{sql: "GRANT SUBSCRIBE ON TOPIC '$stream/" + database + "/nothing_of_this_name' TO demo", code: "42704", text: "no stream"},
		{sql: "GRANT SUBSCRIBE ON TOPIC '" + topic + "' TO nobody_of_this_name", code: "42704", text: `"nobody_of_this_name"`},
	} {
		for _, p := range protocols {
			t.Run(in.sql+", "+p.name, func(t *testing.T) { in.check(t, w.connect(t), p.mode) })
		}
	}
	g := w.connectAs(t, guest)
	for _, sql := range []string{grant, fmt.Sprintf(`GRANT SUBSCRIBE ON TOPIC '$stream/#' TO "%s"`, guest)} {
		_, err := g.Exec(g.ctx, sql)
		wantError(t, err, "42501", "must be owner of")
	}
	_, err := c.Exec(c.ctx, "BEGIN READ ONLY; "+grant, pgx.QueryExecModeSimpleProtocol)
	wantError(t, err, "25006", "read-only transaction")
	c.exec("ROLLBACK")
}
