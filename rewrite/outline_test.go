package rewrite

import "testing"

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
		"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT CASE WHEN true THEN 1 END; END; SELECT 2": {Statements: 2, Command: "create", Creates: true},
		"CREATE RULE r AS ON INSERT TO t DO (SELECT 1; SELECT 2)":                                                {Statements: 1, Command: "create", Creates: true},
		"DECLARE c CURSOR FOR SELECT 1":                                                                          {Statements: 1, Command: "declare", Cursor: "c"},
		"declare/**/\"a \"\"b\"/**/cursor for select 1":                                                          {Statements: 1, Command: "declare", Cursor: `"a ""b"`},
		"DECLARE insensitive CURSOR FOR SELECT 1":                                                                {Statements: 1, Command: "declare", Cursor: "insensitive"},
		`DECLARE U&"c" UESCAPE '!' CURSOR FOR SELECT 1`:                                                          {Statements: 1, Command: "declare"},
		"CALL p()":                          {Statements: 1, Command: "call", Procedure: "p"},
		`call/**/"Koldstore" . P ()`:        {Statements: 1, Command: "call", Schema: "Koldstore", Procedure: "p"},
		"CALL koldstore()":                  {Statements: 1, Command: "call", Procedure: "koldstore"},
		`CALL U&"k!006fld" UESCAPE '!'.x()`: {Statements: 1, Command: "call", Schema: "kold", Procedure: "x"},
	} {
		if got, ok := OutlineOf(sql, Options{ConformingStrings: true}); !ok || got != want {
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
		if got, ok := OutlineOf(c.sql, c.options); ok || got != (Outline{}) {
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
		if got, ok := OutlineOf(sql, Options{ConformingStrings: true, ClientEncoding: "SJIS"}); !ok || got != want {
			t.Errorf("%q: %+v, %t, not %+v", sql, got, ok, want)
		}
	}
	if got, ok := OutlineOf("SELECT '\x8130\x8130'; x", Options{ConformingStrings: true, ClientEncoding: "GB18030"}); !ok || got.Statements != 2 {
		t.Errorf("%+v, %t", got, ok)
	}
}
