package integration_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// TestAlterTableIsTheOtherSpellingOfManageTable.
func TestAlterTableIsTheOtherSpellingOfManageTable(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	const enable = `alter table /* the feed */ "M, N" set (koldstore_enabled, koldstore_move_after = '7 days', koldstore_min_flush_rows = 1)`
	settings := func(table string) string {
		t.Helper()
		return c.text(`SELECT concat_ws(' ', min_flush_rows, max_rows_per_file, coalesce(move_after::text, '-'), coalesce(hot_row_limit::text, '-')) FROM koldstore.visible_managed_table WHERE table_oid = $1::text::regclass`, table)
	}
	for _, p := range protocols {
		c.exec(`CREATE TABLE "M, N" (id int PRIMARY KEY, v int); INSERT INTO "M, N" VALUES (1, 1)`)
		if tag := c.exec(enable, p.mode); tag != "ALTER TABLE" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		if got := settings(`"M, N"`); got != "1 100000 7 days -" {
			t.Errorf("%s: settings %s", p.name, got)
		}
		c.exec(`INSERT INTO "M, N" VALUES (2, 2)`)
		c.fence()
		if got := c.drain(`"M, N"`, 0, 10); len(got) != 2 {
			t.Errorf("%s: the feed has %v", p.name, got)
		}
		if tag := c.exec(`ALTER TABLE ONLY `+w.table(`"M, N"`)+` SET (koldstore_hot_row_limit = 10, koldstore_max_rows_per_file = 500)`, p.mode); tag != "ALTER TABLE" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		if got := settings(`"M, N"`); got != "1 500 - 10" {
			t.Errorf("%s: settings %s", p.name, got)
		}
		c.exec(`SELECT koldstore.unmanage_table('"M, N"')`)
		c.exec(`DROP TABLE "M, N"`)
	}

	c.exec("CREATE TABLE plain (id int PRIMARY KEY, v int)")
	if tag := c.exec("BEGIN; ALTER TABLE plain SET (koldstore_enabled = true); ROLLBACK", pgx.QueryExecModeSimpleProtocol); tag != "ROLLBACK" {
		t.Errorf("tag %s", tag)
	}
	if tag := c.exec("ALTER TABLE plain SET (fillfactor = 70), ALTER v SET (n_distinct = 5) -- koldstore_enabled = true"); tag != "ALTER TABLE" {
		t.Errorf("tag %s", tag)
	}
	c.notices = nil
	if tag := c.exec("ALTER TABLE IF EXISTS missing SET (koldstore_enabled = true)"); tag != "ALTER TABLE" {
		t.Errorf("tag %s", tag)
	}
	if len(c.notices) != 1 || c.notices[0].Message != `relation "missing" does not exist, skipping` || c.notices[0].Where != "" {
		t.Errorf("%d notices", len(c.notices))
	}

	for _, in := range []badInput{
		{sql: "ALTER TABLE plain SET (koldstore_hot_row_limit = 5)", code: "55000", text: "not managed", hint: "koldstore_enabled = true"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = false)", code: "0A000", text: "false", hint: "unmanage_table"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = true, koldstore_color = red)", code: "22023", text: "koldstore_color", hint: "koldstore_move_after"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = maybe)", code: "22023", text: "maybe"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = true, koldstore_min_flush_rows = 0)", code: "22023", text: "min_flush_rows"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = true, koldstore_storage = nowhere)", code: "22023", text: "nowhere"},
		{sql: "ALTER TABLE plain SET (koldstore_enabled = )", code: "42601", text: `at or near ")"`, hint: "koldstore_option"},
		{sql: "ALTER TABLE missing SET (koldstore_enabled = true)", code: "42P01", text: `"missing"`},
		{sql: "ALTER TABLE pg_class SET (koldstore_enabled = true)", code: "42501", text: "owner"},
	} {
		for _, p := range protocols {
			t.Run(in.sql+", "+p.name, func(t *testing.T) { in.check(t, w.connect(t), p.mode) })
		}
	}
	// What would be carried out by two different means is refused as a whole, where it goes wrong.
	for _, sql := range []string{
		"SELECT 'ä'; ALTER TABLE plain SET (koldstore_enabled = true, ^fillfactor = 50)",
		"ALTER TABLE plain ^ADD x int, SET (koldstore_enabled = true)",
		"ALTER TABLE plain ^RESET (koldstore_enabled)",
	} {
		before, after, _ := strings.Cut(sql, "^")
		_, err := c.Exec(c.ctx, before+after, pgx.QueryExecModeSimpleProtocol)
		if e := wantError(t, err, "0A000", "the options of koldstore"); int(e.Position) != len([]rune(before))+1 || e.Hint == "" {
			t.Errorf("%s: position %d, hint %q", sql, e.Position, e.Hint)
		}
	}
	if got := c.text("SELECT count(*) FROM koldstore.visible_managed_table WHERE schema_name = $1", w.schema); got != "0" {
		t.Errorf("%s tables are managed", got)
	}
}

// TestAlterStreamChangesRetention.
func TestAlterStreamChangesRetention(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000)")
	c.exec("INSERT INTO orders VALUES (1, 5000)")
	c.fence()
	shown := find(c.rows("SHOW STREAMS"), "big")
	for _, p := range protocols {
		if tag := c.exec("ALTER STREAM "+w.table("big")+" SET ( retention = 1s )", p.mode); tag != "ALTER STREAM" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		await(t, "the event to be out of sight", func() bool { return c.text("SELECT count(*) FROM _stream_big") == "0" })
		if tag := c.exec("ALTER STREAM big SET (Retention = '30d')", p.mode); tag != "ALTER STREAM" {
			t.Errorf("%s: tag %s", p.name, tag)
		}
		if got := c.text("SELECT count(*) FROM _stream_big"); got != "1" { // the sweep comes every quarter of an hour
			t.Errorf("%s: %s events are visible", p.name, got)
		}
	}
	c.exec("BEGIN; ALTER STREAM big SET (retention = 1s)")
	c.exec("ROLLBACK")
	if got := c.text("SELECT retention FROM koldstore.visible_stream WHERE schema_name = $1", w.schema); got != "30 days" {
		t.Errorf("retention is %s", got)
	}
	c.exec("ALTER STREAM big RESET (retention)")
	if got := c.text("SELECT retention IS NULL FROM koldstore.visible_stream WHERE schema_name = $1", w.schema); got != "t" {
		t.Error("retention is not reset")
	}
	c.notices = nil
	c.exec("ALTER STREAM IF EXISTS missing RESET (retention)")
	if len(c.notices) != 1 || c.notices[0].Message != `stream "missing" does not exist, skipping` {
		t.Errorf("%d notices", len(c.notices))
	}
	if got := find(c.rows("SHOW STREAMS"), "big"); strings.Join(got[:3], "|") != strings.Join(shown[:3], "|") {
		t.Errorf("SHOW STREAMS shows %v, before it was %v", got, shown)
	}
	// The stream goes on.
	c.exec("INSERT INTO orders VALUES (2, 5000)")
	c.fence()
	if got := c.text("SELECT count(*) FROM _stream_big"); got != "2" {
		t.Errorf("%s events", got)
	}
	for _, in := range []badInput{
		{sql: "ALTER STREAM big SET (retention = 'soon')", code: "22023", text: `"soon"`, hint: "24h"},
		{sql: "ALTER STREAM big SET (start = 'now')", code: "22023", text: `"start"`, hint: "Only retention"},
		{sql: "ALTER STREAM big SET (color = red)", code: "22023", text: `"color"`},
		{sql: "ALTER STREAM big SET (retention)", code: "42601", text: `at or near ")"`, hint: "ALTER STREAM"},
		{sql: "ALTER STREAM big", code: "42601", text: "end of input"},
		{sql: "ALTER STREAM big RENAME TO other", code: "42601", text: `at or near "RENAME"`},
		{sql: "ALTER STREAM missing RESET (retention)", code: "42704", text: `"missing"`},
	} {
		for _, p := range protocols {
			t.Run(in.sql+", "+p.name, func(t *testing.T) { in.check(t, w.connect(t), p.mode) })
		}
	}
}
