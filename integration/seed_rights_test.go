package integration_test

import (
	"fmt"
	"testing"
)

// TestRightsToALogAreThoseToItsTable: whoever may read the whole table now may read the log now, as the role that asks at the moment.
func TestRightsToALogAreThoseToItsTable(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	admin, owner := w.connectAs(t, "postgres"), w.connect(t)
	readers := w.newRole(t, "readers", "")
	heir := w.newRole(t, "heir", "")
	reserved := w.newRole(t, "reserved", "NOINHERIT")
	stranger := w.newRole(t, "stranger", "")
	next := w.newRole(t, "next", "")
	admin.exec(fmt.Sprintf("GRANT %s TO %s, %s; GRANT USAGE, CREATE ON SCHEMA %s TO PUBLIC", readers, heir, reserved, w.schema))
	t.Cleanup(func() {
		admin.exec(fmt.Sprintf("REASSIGN OWNED BY %[1]s TO demo; DROP OWNED BY %[1]s, %[2]s, %[3]s", next, readers, stranger))
	})
	owner.exec(`CREATE FUNCTION large(numeric) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN $1 > 10;
		CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM s ON orders WHEN (large(total)); INSERT INTO orders VALUES (1, 20)`)
	owner.fence()
	owner.exec("GRANT SELECT ON orders TO " + readers)

	const read = "SELECT k FROM _stream_s ORDER BY id"
	may := func(c *client, what string) {
		t.Helper()
		if _, err := c.tryRows(read); err != nil {
			t.Errorf("%s may not read: %s", what, describe(err))
		}
	}
	mayNot := func(c *client, what string) {
		t.Helper()
		if rows, err := c.tryRows(read); err == nil {
			t.Errorf("%s reads %v", what, rows)
		} else {
			wantError(t, err, "42501", "")
		}
	}
	inherits, asks, none := w.connectAs(t, heir), w.connectAs(t, reserved), w.connectAs(t, stranger)
	may(inherits, "a member of a role that may")
	mayNot(asks, "a member that does not inherit")
	asks.exec("SET ROLE " + readers)
	may(asks, "the same after SET ROLE")
	asks.exec("RESET ROLE")
	mayNot(asks, "the same after RESET ROLE")
	mayNot(none, "a stranger")
	owner.exec("GRANT SELECT (id, total) ON orders TO " + stranger)
	mayNot(none, "one with rights on every column of today") // a column that is added is none of them
	none.exec("CREATE VIEW mine AS SELECT * FROM _stream_s")
	if _, err := none.tryRows("SELECT * FROM mine"); err == nil {
		t.Error("a view of a stranger's shows the log to a stranger")
	}
	none.exec("DROP VIEW mine")
	owner.exec("CREATE VIEW shown AS SELECT * FROM _stream_s; GRANT SELECT ON shown TO " + stranger)
	if _, err := none.tryRows("SELECT * FROM shown"); err == nil {
		t.Error("a view shows the log to one who may not read the table")
	}
	owner.exec(`DROP VIEW shown; CREATE FUNCTION told() RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path = ` + w.schema + ` AS 'SELECT count(*) FROM _stream_s'`)
	if got := none.text("SELECT told()"); got != "1" {
		t.Errorf("a function with the owner's rights counts %s events", got)
	}
	for _, sql := range []string{"INSERT INTO _stream_s (id, op, k, ts) VALUES ('1', 'put', '1', now())", "DELETE FROM _stream_s", "TRUNCATE _stream_s", "LOCK TABLE _stream_s IN ACCESS EXCLUSIVE MODE", "SELECT FROM _stream_s FOR UPDATE"} {
		if _, err := inherits.Exec(inherits.ctx, sql); err == nil {
			t.Errorf("a reader may: %s", sql)
		}
	}
	// Row-level security hides rows of the table from readers, so the log is none of theirs; its owner is not concerned.
	owner.exec("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
	mayNot(inherits, "a reader under row-level security")
	may(owner, "the owner of a table with row-level security")
	owner.exec("ALTER TABLE orders DISABLE ROW LEVEL SECURITY")

	// A new owner has the stream, the old one has not; what the predicate calls goes on to work.
	admin.exec(fmt.Sprintf("ALTER TABLE %s.orders OWNER TO %s", w.schema, next))
	heiress := w.connectAs(t, next)
	heiress.exec("INSERT INTO orders VALUES (2, 30), (3, 1)")
	heiress.fence()
	if got := heiress.text("SELECT string_agg(k::text, ' ' ORDER BY id) FROM _stream_s"); got != "1 2" {
		t.Errorf("the new owner reads %s", got)
	}
	if _, err := heiress.Exec(heiress.ctx, "DELETE FROM _stream_s"); err == nil {
		t.Error("the new owner writes to the log")
	}
	admin.exec(fmt.Sprintf("REVOKE ALL ON %s.orders FROM demo", w.schema))
	mayNot(owner, "the former owner")
	_, err := owner.Exec(owner.ctx, "DROP STREAM s")
	wantError(t, err, "42501", "must be owner")
	heiress.exec("ALTER STREAM s SET (retention = '1h')")
	heiress.exec("DROP STREAM s")
}
