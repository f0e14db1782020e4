package rewrite

import (
	"strings"
	"testing"
)

// TestReplacedDefinitions fixes what the statements become that change or grant something.
func TestReplacedDefinitions(t *testing.T) {
	t.Parallel()
	alterStream := func(schema, stream, options, ifExists string) string {
		return "CALL koldstore.alter_stream(stream_schema => " + schema + ", stream_name => $ks$" + stream + "$ks$, options => $ks$" + options + "$ks$, if_exists => " + ifExists + ")"
	}
	alterTable := func(schema, table, options, ifExists string) string {
		return "CALL koldstore.alter_table_set(table_schema => " + schema + ", table_name => $ks$" + table + "$ks$, options => $ks$" + options + "$ks$, if_exists => " + ifExists + ")"
	}
	subscribe := func(procedure, filters, roles string) string {
		return "CALL koldstore." + procedure + "_subscribe(filters => ARRAY[" + filters + "]::pg_catalog.text[], roles => ARRAY[" + roles + "]::pg_catalog.name[])"
	}
	const on = `{"koldstore_enabled":true}`
	for _, c := range []struct{ name, tag, in, want string }{
		{"alter stream", "ALTER STREAM", "ALTER STREAM s SET (retention = '24h')", alterStream("NULL", "s", `{"retention":"24h"}`, "false")},
		{"alter stream without quotes", "ALTER STREAM", "alter stream IF EXISTS A.\"B\" set ( Retention=30d )", alterStream("$ks$a$ks$", "B", `{"retention":"30d"}`, "true")},
		{"reset", "ALTER STREAM", "ALTER/**/STREAM if RESET (retention, start)", alterStream("NULL", "if", `{"retention":null,"start":null}`, "false")},

		{"enable", "ALTER TABLE", "ALTER TABLE t SET (koldstore_enabled = true)", alterTable("NULL", "t", on, "false")},
		{"enable without value", "ALTER TABLE", "alter table only T set (KoldStore_Enabled)", alterTable("NULL", "t", on, "false")},
		{"with children", "ALTER TABLE", "ALTER TABLE t * SET (koldstore_enabled = true)", alterTable("NULL", "t", on, "false")},
		{"only in parentheses", "ALTER TABLE", "ALTER TABLE ONLY (a.t) SET (koldstore_enabled = true)", alterTable("$ks$a$ks$", "t", on, "false")},
		{
			"all options", "ALTER TABLE", `ALTER TABLE IF EXISTS "S.é"."T ""q" SET (koldstore_enabled = on, koldstore_storage = cold, koldstore_hot_row_limit = 10, "koldstore_move_after" = '7 days', koldstore_min_flush_rows = +5, koldstore_x = -1)`,
			alterTable("$ks$S.é$ks$", `T "q`, `{"koldstore_enabled":"on","koldstore_storage":"cold","koldstore_hot_row_limit":10,"koldstore_move_after":"7 days","koldstore_min_flush_rows":5,"koldstore_x":-1}`, "true"),
		},

		{"grant", "GRANT", "GRANT SUBSCRIBE ON TOPIC '$stream/app/orders' TO bob", subscribe("grant", "$ks$$stream/app/orders$ks$", "$ks$bob$ks$")},
		{
			"grant much", "GRANT", `grant subscribe on topic 'it''s/+', $$a/#$$, E'x' to GROUP Bob, "A ""b", public, CURRENT_USER, current_role, SESSION_USER, "current_user", value`,
			subscribe("grant", "$ks$it's/+$ks$, $ks$a/#$ks$, $ks$x$ks$", `$ks$bob$ks$, $ks$A "b$ks$, $ks$public$ks$, CURRENT_USER, CURRENT_USER, SESSION_USER, $ks$current_user$ks$, $ks$value$ks$`),
		},
		{"revoke", "REVOKE", "/*x*/REVOKE SUBSCRIBE ON TOPIC 'a' FROM PUBLIC;", "/*x*/" + subscribe("revoke", "$ks$a$ks$", "$ks$public$ks$") + ";"},
		{"filter with a quote's tag", "GRANT", "GRANT SUBSCRIBE ON TOPIC '$ks$/#' TO a", "CALL koldstore.grant_subscribe(filters => ARRAY[$ks1$$ks$/#$ks1$]::pg_catalog.text[], roles => ARRAY[$ks1$a$ks1$]::pg_catalog.name[])"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := Rewrite(c.in, conforming)
			if r.Refusal != nil {
				t.Fatalf("refused: %v at %d", r.Refusal, r.Refusal.Position)
			}
			if r.SQL != c.want {
				t.Errorf("got  %s\nwant %s", r.SQL, c.want)
			}
			if len(r.Statements) != 1 || r.Statements[0].Tag != c.tag {
				t.Errorf("statements: %+v", r.Statements)
			}
		})
	}
}

// TestOthersOfTheSameWordsStay: what PostgreSQL has under the same words is PostgreSQL's.
func TestOthersOfTheSameWordsStay(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		"ALTER TABLE koldstore SET (fillfactor = 70), ADD stream int",
		"ALTER TABLE t ADD koldstore_enabled int, DROP CONSTRAINT koldstore_x",
		"ALTER TABLE t ALTER koldstore_x SET (n_distinct = 5)",
		"ALTER TABLE t ALTER koldstore_x SET DEFAULT (koldstore_y)",
		"ALTER TABLE t ALTER c SET (koldstore_enabled = true)", // PostgreSQL knows what columns can have
		"ALTER TABLE t SET (toast.koldstore_enabled = true)",
		"ALTER TABLE t SET (\"KOLDSTORE_ENABLED\" = true)",
		"ALTER TABLE t SET SCHEMA koldstore_x",
		"ALTER TABLE ALL IN TABLESPACE koldstore_x SET TABLESPACE y",
		"ALTER TABLE a.b.c.d SET (koldstore_enabled = true)",
		"ALTER INDEX t SET (koldstore_enabled = true)",
		"CREATE TABLE t (id int) WITH (koldstore_enabled = true)",
		"GRANT SELECT ON topic TO bob",
		"GRANT SELECT, SUBSCRIBE ON TOPIC TO bob",
		`GRANT "subscribe" ON topic TO bob`,
		"GRANT subscribe TO topic",
		"REVOKE GRANT OPTION FOR SUBSCRIBE ON TOPIC FROM bob",
		"SELECT 'GRANT SUBSCRIBE ON TOPIC ''a'' TO b'",
	} {
		if r := Rewrite(sql, conforming); r.Changed || r.SQL != sql || r.Refusal != nil {
			t.Errorf("%s: became %s (refusal %v)", sql, r.SQL, r.Refusal)
		}
	}
}

// TestSpoiledTexts: where PostgreSQL's grammar would accept what is refused, the text is made a syntax error at the place
// that RefusalAt names, and is otherwise the input.
func TestSpoiledTexts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, in, out string }{
		{"alone", "ALTER TABLE t SET (koldstore_enabled, fillfactor = 5)", ")ALTER TABLE t SET (koldstore_enabled, fillfactor = 5)"},
		{"behind others", "SELECT 'é'; REVOKE SUBSCRIBE ON TOPIC FROM bob; SELECT 1", "SELECT 'é'; )REVOKE SUBSCRIBE ON TOPIC FROM bob; SELECT 1"},
		{"behind a good one", "GRANT SUBSCRIBE ON TOPIC 'a' TO b; DROP STREAM", ")GRANT SUBSCRIBE ON TOPIC 'a' TO b; DROP STREAM"},
		{"behind a syntax error", "DROP STREAM s; GRANT SUBSCRIBE ON TOPIC TO b", "DROP STREAM s; GRANT SUBSCRIBE ON TOPIC TO b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := Rewrite(c.in, conforming)
			if r.Refusal == nil || r.SQL != c.out || r.Changed != (c.in != c.out) || len(r.Statements) > 0 {
				t.Errorf("became %s (refusal %v)", r.SQL, r.Refusal)
			}
			if i := strings.Index(r.SQL, spoiler); r.Changed && r.RefusalAt != len([]rune(c.in[:i]))+1 {
				t.Errorf("RefusalAt is %d", r.RefusalAt)
			}
		})
	}
}
