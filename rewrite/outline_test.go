package rewrite

import (
	"reflect"
	"slices"
	"testing"
)

func TestOutline(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]Outline{
		"":                                {},
		" ; -- nothing\n;":                {},
		"SELECT 1":                        {Statements: 1, Command: "select"},
		"(SELECT 1) UNION SELECT 2;":      {Statements: 1},
		"SELECT ';'; ":                    {Statements: 1, Command: "select"},
		"SELECT 1; /* ; */ SELECT 2":      {Statements: 2, Command: "select"},
		"/* a /* ; */ ; */ Do $$ ; $$":    {Statements: 1, Command: "do"},
		`SELECT E'\';x', 'it''s; me'`:     {Statements: 1, Command: "select"},
		`SELECT E'a\'; DROP TABLE t; --'`: {Statements: 1, Command: "select"},
		"SELECT $a$ $b$ ; $a$, $b$;$b$":   {Statements: 1, Command: "select"},
		`SELECT ";""; "`:                  {Statements: 1, Command: "select"},
		"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT CASE WHEN true THEN 1 END; END; SELECT 2": {Statements: 2, Command: "create", Creations: []Creation{{Name: "f"}}},
		"CREATE RULE r AS ON INSERT TO t DO (SELECT 1; SELECT 2)":                                                {Statements: 1, Command: "create", Creations: []Creation{{Name: "t"}}},
		"DECLARE c CURSOR FOR SELECT 1":                                                                          {Statements: 1, Command: "declare", Cursor: "c"},
		"declare/**/\"a \"\"b\"/**/cursor for select 1":                                                          {Statements: 1, Command: "declare", Cursor: `"a ""b"`},
		"DECLARE insensitive CURSOR FOR SELECT 1":                                                                {Statements: 1, Command: "declare", Cursor: "insensitive"},
		`DECLARE U&"c" UESCAPE '!' CURSOR FOR SELECT 1`:                                                          {Statements: 1, Command: "declare"},
		"CALL p()":                          {Statements: 1, Command: "call", Procedure: "p"},
		`call/**/"Koldstore" . P ()`:        {Statements: 1, Command: "call", Schema: "Koldstore", Procedure: "p"},
		"CALL koldstore()":                  {Statements: 1, Command: "call", Procedure: "koldstore"},
		`CALL U&"k!006fld" UESCAPE '!'.x()`: {Statements: 1, Command: "call", Schema: "kold", Procedure: "x"},
	} {
		if got, ok := OutlineOf(sql, Options{ConformingStrings: true}); !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("%s\n%+v, %t, not %+v", sql, got, ok, want)
		}
	}
	for _, c := range []struct {
		sql     string
		options Options
	}{
		{"SELECT 'x", Options{ConformingStrings: true}},
		{"SELECT 1 \x00", Options{ConformingStrings: true}},
		{`SELECT '\'; SELECT '`, Options{}},
		{"SELECT '\xff'", Options{ConformingStrings: true}},
	} {
		if got, ok := OutlineOf(c.sql, c.options); ok || !reflect.DeepEqual(got, Outline{}) {
			t.Errorf("%q: %+v, %t", c.sql, got, ok)
		}
	}
}

// TestOutlineOfForeignEncodings has characters whose second byte is a backslash, a letter or a digit, and such of one byte in
// front of what must not be taken for a second one.
func TestOutlineOfForeignEncodings(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]Outline{
		"SELECT E'\x83\x5c'; SELECT 2":           {Statements: 2, Command: "select"}, // a backslash in SJIS
		"SELECT '\xb1';SELECT '\xb1'":            {Statements: 2, Command: "select"}, // half-width kana in SJIS
		"DECLARE \"\x83\x5c \xb1\" CURSOR FOR x": {Statements: 1, Command: "declare", Cursor: "\"\x83\x5c \xb1\""},
		"SELECT \xb1'b;'; x":                     {Statements: 2, Command: "select"}, // a name, then a literal without a prefix
	} {
		if got, ok := OutlineOf(sql, Options{ConformingStrings: true, ClientEncoding: "SJIS"}); !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %t, not %+v", sql, got, ok, want)
		}
	}
	if got, ok := OutlineOf("SELECT '\x8130\x8130'; x", Options{ConformingStrings: true, ClientEncoding: "GB18030"}); !ok || got.Statements != 2 {
		t.Errorf("%+v, %t", got, ok)
	}
}

func TestCreations(t *testing.T) {
	t.Parallel()
	first := func(names ...string) (list []Creation) {
		for _, n := range names {
			list = append(list, Creation{Name: n})
		}
		return list
	}
	temporary := func(name string) []Creation { return []Creation{{Name: name, Temporary: true}} }
	for sql, want := range map[string][]Creation{
		"CREATE VIEW v AS SELECT":                                                            first("v"),
		"create or replace  view\n s.V (a, b) as select":                                     first("v"),
		`CREATE TEMP VIEW "a ""b" AS`:                                                        temporary(`a "b`),
		"CREATE LOCAL TEMPORARY TABLE t (n int DEFAULT f())":                                 temporary("t"),
		"CREATE VIEW pg_temp.v AS":                                                           temporary("v"),
		`CREATE VIEW pg_temp . U&"!0076" UESCAPE '!' AS`:                                     temporary("v"),
		"CREATE MATERIALIZED VIEW IF NOT EXISTS db.s . mv AS":                                first("mv"),
		"/* c */ CREATE/**/OR REPLACE FUNCTION s.f(x int)":                                   first("f"),
		"CREATE TABLE t AS SELECT 'create view v as'":                                        nil,
		"CREATE UNLOGGED TABLE IF NOT EXISTS t (n int) WITH (fillfactor = 10) AS (SELECT 1)": nil,
		"CREATE TABLE t (n int GENERATED ALWAYS AS (f()) STORED)":                            first("t"),
		"CREATE TABLE p PARTITION OF t DEFAULT":                                              first("p"),
		"CREATE TRIGGER t AFTER INSERT OR UPDATE OF x ON app.tab FOR EACH ROW":               first("tab"),
		"CREATE OR REPLACE CONSTRAINT TRIGGER t AFTER INSERT ON tab FROM x":                  first("tab"),
		`CREATE POLICY p ON "Tab" USING (f() > 0)`:                                           first("Tab"),
		"CREATE RULE r AS ON INSERT TO s.t WHERE x DO ALSO (SELECT 1; SELECT 2)":             first("t"),
		"CREATE RECURSIVE VIEW é (n) AS":                                                     first("é"),
		"CREATE AGGREGATE a (int) (SFUNC = f, STYPE = int)":                                  first("a"),
		"CREATE SCHEMA s AUTHORIZATION x CREATE VIEW v AS SELECT (1) CREATE TABLE t ()":      first("v", "t"),
		"ALTER VIEW IF EXISTS s.v RENAME TO w":                                               first("v", "w"),
		"ALTER MATERIALIZED VIEW v SET SCHEMA s":                                             first("v"),
		"ALTER FUNCTION f (int, text) RENAME TO g":                                           first("f", "g"),
		"ALTER TABLE ONLY t ALTER n SET DEFAULT f()":                                         first("t"),
		"ALTER TABLE t RENAME COLUMN a TO b":                                                 first("t"),
		"ALTER FOREIGN TABLE t RENAME TO u":                                                  first("t", "u"),
		"CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION f()":                     nil,
		"CREATE INDEX i ON t (f(x))":                                                         nil,
		"CREATE VIEW":                                                                        nil,
		"CREATE TRIGGER t":                                                                   nil,
		"ALTER ROLE r RENAME TO v":                                                           nil,
		"DO $$ BEGIN EXECUTE 'create view v as'; END $$":                                     nil,
		"SELECT 'create view v as'":                                                          nil,
	} {
		if o, ok := OutlineOf(sql, conforming); !ok || !slices.Equal(o.Creations, want) {
			t.Errorf("%s: %+v, %t", sql, o.Creations, ok)
		}
	}
	o, _ := OutlineOf("CREATE PROCEDURE p() LANGUAGE sql AS ''; CREATE VIEW w AS SELECT 1", conforming)
	if want := []Creation{{Name: "p"}, {Name: "w", Statement: 1}}; !slices.Equal(o.Creations, want) {
		t.Errorf("%+v", o.Creations)
	}
	o, _ = OutlineOf("CREATE VIEW \"\x83\x5c\" AS SELECT 1", Options{ConformingStrings: true, ClientEncoding: "SJIS"})
	if !slices.Equal(o.Creations, first("\x83\x5c")) {
		t.Errorf("%+v", o.Creations)
	}
}
