package changefeed_test

import (
	"fmt"
	"strings"
	"testing"
)

// specials are columns with values that other tools have got wrong (B48).
var specials = []struct{ column, value string }{
	{"n1 numeric", "'NaN'"},
	{"n2 numeric", "'Infinity'"},
	{"n3 numeric", "'1e-300'"},
	{"n4 numeric", "repeat('9', 200)::numeric"},
	{"n5 numeric(10,4)", "'1.10'"},
	{"f1 float8", "'NaN'"},
	{"f2 float8", "'-0'"},
	{"f3 float8", "'-Infinity'"},
	{"f4 float8", "0.1::float8 + 0.2::float8"},
	{"f5 float4", "'3.4028235e38'"},
	{"i1 int8", "9223372036854775807"},
	{"i2 int8", "-9223372036854775808"},
	{"ts1 timestamptz", "'infinity'"},
	{"ts2 timestamptz", "'2024-02-29 23:59:59.999999+05:45'"},
	{"ts3 timestamp", "'-infinity'"},
	{"ts4 timestamptz", "'0044-03-15 12:00:00 BC'"},
	{"d1 date", "'4713-01-01 BC'"},
	{"d2 date", "'5874897-12-31'"},
	{"t1 time", "'24:00'"},
	{"t2 timetz", "'23:59:60+14'"},
	{"iv1 interval", "'1 mon -1 day'"},
	{"iv2 interval", "'-1 year 2 mons -3 days 04:05:06.789'"},
	{"m1 money", "'-12345.67'"},
	{"b1 bytea", `''`},
	{"b2 bytea", `'\x00ff5c22'`},
	{"a1 int[]", `'[2:3]={1,2}'`},
	{"a2 text[]", `'{NULL,"NULL",""," a\"b\\c,{}"}'`},
	{"a3 int[]", `'{{1,NULL},{2,3}}'`},
	{"a4 int[]", `'{}'`},
	{"r1 tstzrange", `'empty'`},
	{"r2 tstzrange", `'[2024-01-01,)'`},
	{"r3 int4multirange", `'{[1,3),[5,9)}'`},
	{"r4 tstzrange", `'["2024-01-01 00:00:00+09","2024-01-02 00:00:00+09"]'`},
	{"c1 pair", `ROW(1, 'a"b\c,(d)')`},
	{"c2 pair[]", `ARRAY[ROW(NULL, '')::pair, ROW(2, NULL)::pair]`},
	{"dm short", `'abc'`},
	{"dma shorts", `'{abc,d}'`},
	{"e1 mood", `'very "happy"'`},
	{"e2 mood[]", `'{sad,NULL}'`},
	{"j1 jsonb", `'null'`},
	{"j2 jsonb", `NULL`},
	{"j3 json", `'{"a":1, "a":2,   "b": 12345678901234567890.10}'`},
	{"j4 jsonb", `'{"n": 1.10, "s": "\u00e9\ud83d\ude00\""}'`},
	{"u1 uuid", `'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'`},
	{"x1 xml", `'<a>&lt;"</a>'`},
	{"ip1 inet", `'::1/64'`},
	{"mac1 macaddr", `'08:00:2b:01:02:03'`},
	{"bit1 bit(5)", `B'10101'`},
	{"bit2 varbit", `B''`},
	{"ch1 char(5)", `'a'`},
	{`ch2 "char"`, `'\'`},
	{"nm1 name", `'n'`},
	{"ts5 tsvector", `'a:1 ''b c'':2'`},
	{"pt point", `'(1,-2.5)'`},
	{"pg path", `'[(0,0),(1,1)]'`},
	{"o1 oid", `4294967295`},
	{"re1 regclass", `'pg_class'`},
	{"txt text", "E'tab\\tnewline\\nquote\"backslash\\\\ü€𝄞 ''x'''"},
	{`"Odd ""name"", (x)" text`, `'v'`},
	{"big jsonb", `(SELECT jsonb_object_agg(i, repeat('x', 50)) FROM generate_series(1, 2000) i)`},
}

// B48, B49: seed and live changes render every value the same way, the way PostgreSQL does under the pinned settings,
// whatever the settings of roles and databases are.
func TestValuesAreRenderedAsPostgresDoes(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(
		`CREATE TYPE mood AS ENUM ('sad', 'very "happy"')`, `CREATE TYPE pair AS (a int, b text)`,
		`CREATE DOMAIN short AS varchar(5) CHECK (VALUE <> '') NOT NULL`, `CREATE DOMAIN shorts AS text[]`,
	)
	h.stopApplier()
	for _, setting := range []string{
		`datestyle = 'SQL, DMY'`, `intervalstyle = 'sql_standard'`, `bytea_output = 'escape'`, `extra_float_digits = -3`, `timezone = 'Asia/Tokyo'`,
	} {
		h.admin(fmt.Sprintf(`ALTER DATABASE %s SET %s`, h.name, setting))
	}
	h.pool.Reset()
	h.startApplier()
	columns, values := []string{"id int PRIMARY KEY"}, []string{}
	for _, s := range specials {
		columns, values = append(columns, s.column), append(values, s.value)
	}
	insert := func(id int) string {
		return fmt.Sprintf(`INSERT INTO vals VALUES (%d, %s)`, id, strings.Join(values, ", "))
	}
	h.exec(fmt.Sprintf(`CREATE TABLE vals (%s)`, strings.Join(columns, ", ")), insert(1))
	h.manage("vals")
	h.stream("s", "vals", "id > 0", "pre_image", "true")
	h.exec(insert(2), `UPDATE vals SET i1 = i1 WHERE id = 1`, insert(3), `UPDATE vals SET id = 4 WHERE id = 3`)
	h.fence()
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")

	const same = `SELECT %s, key, a.value, b.value FROM jsonb_each(%s) a FULL JOIN jsonb_each(%s) b USING (key) WHERE key <> 'id' AND a.value IS DISTINCT FROM b.value`
	h.expect(`SELECT m.id, d.* FROM koldstore.vals__cl m JOIN koldstore.vals__cl o ON o.id = 1 CROSS JOIN LATERAL (` +
		fmt.Sprintf(same, "'mirror'", "m.row_image", "o.row_image") + `) d WHERE m.op <> 3`)
	h.expect(`SELECT s.id, d.* FROM _stream_s s JOIN koldstore.vals__cl o ON o.id = 1 CROSS JOIN LATERAL (` +
		fmt.Sprintf(same, "'doc'", "s.doc", "o.row_image") + `) d`)
	h.expect(`SELECT s.id, d.* FROM _stream_s s JOIN koldstore.vals__cl o ON o.id = 1 CROSS JOIN LATERAL (` +
		fmt.Sprintf(same, "'old'", "s.old", "o.row_image") + `) d WHERE s.old IS NOT NULL`)
	pinned := `SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex'; SET extra_float_digits = 1; SET timezone = 'UTC'; `
	_, err := h.app.Exec(t.Context(), pinned)
	must(t, err)
	var differences string
	must(t, h.app.QueryRow(t.Context(), `SELECT coalesce(string_agg(key || ': ' || coalesce(a.value::text, '-') || ' / ' || coalesce(b.value::text, '-'), E'\n'), '')
		FROM vals v JOIN koldstore.vals__cl m USING (id), jsonb_each(m.row_image) a FULL JOIN jsonb_each((SELECT to_jsonb(v.*) FROM vals v WHERE id = 2)) b USING (key)
		WHERE (v.id = 2 OR v.id IS NULL) AND a.value IS DISTINCT FROM b.value`).Scan(&differences))
	if differences != "" {
		t.Errorf("mirror / table:\n%s", differences)
	}
	h.expect(`SELECT count(*), count(old) FROM _stream_s`, "5 2") // put 2, put 1, put 3, delete 3, put 4
}
