package integration_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
)

// columns of a table that holds what capture systems have got wrong (values of B48 in the field's bug trackers): each type
// with its special values.
var columns = []struct {
	name, definition string
	values           []string // SQL
}{
	{"n", "numeric", []string{"'NaN'", "'Infinity'", "'-Infinity'", "1e-300", "repeat('9', 200)::numeric", "1.10", "0.000", "-0.0", "1e100"}},
	{"n2", "numeric(10,4)", []string{"1.2345", "-999999.9999", "'NaN'", "0"}},
	{"n40", "numeric(40,2)", []string{"12345678901234567890123456789012345678.90", "0.01"}},
	{"neg", "numeric(5,-2)", []string{"12300", "-500"}},
	{"f8", "float8", []string{"'NaN'", "'-0'", "'Infinity'", "'-Infinity'", "0.1", "1e-310", "1.7976931348623157e308", "5e-324", "123456789012345678"}},
	{"f4", "real", []string{"'NaN'", "'-0'", "0.1", "3.4028235e38", "1e-45", "16777217"}},
	{"i2", "smallint", []string{"-32768", "32767"}},
	{"i4", "int", []string{"-2147483648", "2147483647"}},
	{"i8", "bigint", []string{"9223372036854775807", "-9223372036854775808", "9007199254740993"}},
	{"o", "oid", []string{"4294967295", "0"}},
	{"m", "money", []string{"'-92233720368547758.08'", "'12345.67'", "0"}},
	{"b", "boolean", []string{"true", "false"}},
	{"t", "text", []string{"''", "'NULL'", "'null'", "E'a\\tb\\nc\\\\d\"e''f'", "'ä€😀'", "repeat('x', 10000)", "E'\\x7f'", "' leading and trailing '"}},
	{"vc", "varchar(5)", []string{"'abc'", "'12345'", "''"}},
	{"c", "char(5)", []string{"'ab'", "'     '", "'abcde'"}},
	{"nm", "name", []string{"'pg_class'", "repeat('n', 63)"}},
	{"by", "bytea", []string{"''", "'\\x00ff'", "'\\x5c27'", "decode(repeat('ab', 5000), 'hex')"}},
	{"d", "date", []string{"'infinity'", "'-infinity'", "'4713-01-01 BC'", "'0001-01-01'", "'5874897-12-31'", "'2024-02-29'", "'0044-03-15 BC'"}},
	{"ts", "timestamp", []string{"'infinity'", "'-infinity'", "'4713-01-01 00:00:00 BC'", "'294276-12-31 23:59:59.999999'", "'2024-01-01 00:00:00.000001'", "'1969-12-31 23:59:59.999999'", "'1969-12-31 23:59:60'"}},
	{"tz", "timestamptz", []string{"'infinity'", "'-infinity'", "'4713-01-01 00:00:00+00 BC'", "'294276-12-31 23:59:59.999999+00'", "'2024-06-01 12:00:00.5+05:30'", "'1883-11-18 12:00 America/New_York'"}},
	{"ti", "time", []string{"'24:00'", "'00:00'", "'23:59:59.999999'"}},
	{"tt", "timetz", []string{"'24:00+00'", "'12:00:00.123+05:30'", "'00:00-15:59'"}},
	{"iv", "interval", []string{"'1 mon -1 day'", "'-178000000 years'", "'00:00:00.000001'", "'1 year 2 mons 3 days 04:05:06.789'", "'0'"}},
	{"u", "uuid", []string{"'00000000-0000-0000-0000-000000000000'", "'FFFFFFFF-ffff-ffff-ffff-ffffffffffff'"}},
	{"j", "json", []string{"'null'", `'{"a":1,"a":2}'`, `'{"b": 1,   "a" : [1, 2.50, 1e2]}'`, `'"\u00e4"'`, "'123456789012345678901234567890.10'"}},
	{"jb", "jsonb", []string{"'null'", `'{"a":1,"a":2}'`, `'[1.10, 1e400, -0, "x\ty"]'`, `'{}'`, "'9007199254740993'"}},
	{"jp", "jsonpath", []string{`'$.a[*] ? (@ > 1)'`}},
	{"ia", "int[]", []string{"'{}'", "'{NULL,1}'", "'{{1,NULL},{2,3}}'", "'[2:3]={1,2}'"}},
	{"ta", "text[]", []string{`'{NULL,"NULL",""}'`, `'{"a\"b","c\\d","{e,f}"}'`, "'{{{a}}}'"}},
	{"na", "numeric(6,2)[]", []string{"'{1.10,NaN}'"}},
	{"ja", "jsonb[]", []string{`ARRAY['null', '{"a": [1]}', NULL]::jsonb[]`}},
	{"ir", "int4range", []string{"'empty'", "'[1,5)'", "'(,)'", "'[,7]'"}},
	{"tr", "tstzrange", []string{"'[2024-01-01 00:00+00,)'", "'[-infinity,infinity]'"}},
	{"mr", "int8multirange", []string{"'{}'", "'{[1,3),[5,)}'"}},
	{"ip", "inet", []string{"'192.168.0.1/24'", "'::1'", "'::ffff:1.2.3.4/128'"}},
	{"ci", "cidr", []string{"'10.0.0.0/8'", "'2001:db8::/32'"}},
	{"ma", "macaddr", []string{"'08:00:2b:01:02:03'"}},
	{"m8", "macaddr8", []string{"'08:00:2b:01:02:03:04:05'"}},
	{"bt", "bit(5)", []string{"B'10101'"}},
	{"vb", "bit varying", []string{"B''", "B'1'", "B'000000001'"}},
	{"po", "point", []string{"'(1.5,-0)'", "'(NaN,Infinity)'"}},
	{"bx", "box", []string{"'(1,1),(0,0)'"}},
	{"pa", "path", []string{"'[(0,0),(1,1)]'", "'((0,0),(1,1))'"}},
	{"ce", "circle", []string{"'<(0,0),1.1>'"}},
	{"x", "xml", []string{"'<a b=\"c\">&lt;</a>'", "'text'"}},
	{"tv", "tsvector", []string{"'''it''''s'':1A fat:2,4B'"}},
	{"tq", "tsquery", []string{"'fat & (rat | !cat)'"}},
	{"ls", "pg_lsn", []string{"'0/0'", "'FFFFFFFF/FFFFFFFF'"}},
	{"rc", "regclass", []string{"'pg_class'"}},
	{"e", "mood", []string{"'so so'", `'"quoted"'`}},
	{"ea", "mood[]", []string{`ARRAY['so so', NULL, '"quoted"']::mood[]`}},
	{"dom", "positive", []string{"1"}},
	{"da", "few", []string{"'{1,2}'"}},
	{"co", "pair", []string{`ROW(1.2345, 'a"b\c,(d)', '{1,NULL}')`, "ROW(NULL, '', '{}')", "ROW(NULL, NULL, NULL)"}},
	{"ca", "pair[]", []string{`ARRAY[ROW(1, 'x', '{}'), NULL]::pair[]`}},
	{"hs", "hstore", []string{`'a=>1,"b c"=>NULL,c=>"NULL"'`, "''"}},
	{"ct", "citext", []string{"'MiXeD'"}},
	{`"weird ""name, with (all) of it"`, "text", []string{"'x'"}},
	{`"_"`, "int DEFAULT 7", []string{"8"}},
}

// TestValuesOfEveryType writes each value, into a table with a stream and a feed, under a session whose settings say
// otherwise, and wants the image that SELECT to_jsonb(row) gives under the fixed settings: in the log, in the hot feed and in
// the cold one.
func TestValuesOfEveryType(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	admin := w.connectAs(t, "postgres")
	admin.exec("CREATE EXTENSION IF NOT EXISTS hstore SCHEMA public; CREATE EXTENSION IF NOT EXISTS citext SCHEMA public")
	fixed := url.Values{
		"search_path": {w.schema + ",public"}, "TimeZone": {"UTC"}, "DateStyle": {"ISO"}, "IntervalStyle": {"postgres"},
		"extra_float_digits": {"3"}, "bytea_output": {"hex"}, "options": {"-clc_monetary=C"},
	}
	strange := url.Values{
		"search_path": {w.schema + ",public"}, "TimeZone": {"Asia/Tokyo"}, "DateStyle": {"SQL, DMY"}, "IntervalStyle": {"sql_standard"},
		"extra_float_digits": {"-3"}, "bytea_output": {"escape"},
	}
	c := w.inst.connect(t, "demo", fixed)
	c.exec(`CREATE TYPE mood AS ENUM ('so so', '"quoted"'); CREATE DOMAIN positive AS int CHECK (VALUE > 0); CREATE DOMAIN few AS int[] CHECK (cardinality(VALUE) < 5);
		CREATE TYPE pair AS (n numeric(10,4), t text, a int[])`)
	definitions, rows := []string{"id int PRIMARY KEY"}, 1
	for _, col := range columns {
		definitions = append(definitions, col.name+" "+col.definition)
		rows = max(rows, len(col.values))
	}
	c.exec("CREATE TABLE everything (" + strings.Join(definitions, ", ") + ")")
	c.exec("CREATE STREAM everything ON everything WHEN (true) WITH (pre_image = true)")
	c.exec("SELECT koldstore.manage_table('everything')")

	// Row 0 is NULL everywhere; the others have each column's values in turn. Values are written under the fixed settings, so
	// that they mean what they say; what is strange is a session that updates the rows afterwards.
	c.exec(`INSERT INTO everything (id, "_") VALUES (0, NULL)`)
	for i := range rows {
		names, values := []string{"id"}, []string{fmt.Sprint(i + 1)}
		for _, col := range columns {
			names = append(names, col.name)
			values = append(values, col.values[i%len(col.values)])
		}
		c.exec("INSERT INTO everything (" + strings.Join(names, ", ") + ") VALUES (" + strings.Join(values, ", ") + ")")
	}
	s := w.inst.connect(t, "demo", strange)
	s.exec("UPDATE everything SET vc = 'upd' WHERE id % 2 = 1")
	c.fence()

	check := func(source string) {
		t.Helper()
		want := c.rowsByKey("everything", "true", true)
		if len(want) != rows+1 {
			t.Fatalf("%d rows", len(want))
		}
		for _, f := range c.drain("everything", 0, 100) {
			if f.source != source {
				t.Errorf("row %s comes from %s, want %s", f.pk, f.source, source)
			}
			sameImage(t, source+" row "+f.pk, f.image, want[f.pk])
		}
	}
	check("hot")
	events := c.checkFold("everything", "everything", "true")
	images := map[string]string{}
	for _, e := range events {
		if before, ok := images[e.k]; ok {
			sameImage(t, "old of "+e.k, e.old, before)
		}
		images[e.k] = e.doc
	}
	c.flush("everything")
	check("cold")

	// A strange session reads the same images.
	for _, f := range s.drain("everything", 0, 100) {
		sameImage(t, "read by a strange session, row "+f.pk, f.image, c.rowsByKey("everything", "true", true)[f.pk])
	}
	c.exec("DELETE FROM everything")
	c.fence()
	c.checkFold("everything", "everything", "true")
	if tombstones := c.checkFeed("everything"); len(tombstones) != rows+1 {
		t.Errorf("%d tombstones", len(tombstones))
	}
	if bad := c.rows("SELECT name, events_lost FROM koldstore.show_streams() WHERE name = 'everything' AND events_lost > 0"); len(bad) > 0 {
		t.Errorf("lost: %v", bad)
	}
}

// sameImage compares two jsonb texts and shows the columns that differ.
func sameImage(t *testing.T, what, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	left, right := splitObject(got), splitObject(want)
	for name, value := range right {
		if left[name] != value {
			t.Errorf("%s: %s is %.300s, want %.300s", what, name, left[name], value)
		}
	}
	for name := range left {
		if _, ok := right[name]; !ok {
			t.Errorf("%s: %s is too much", what, name)
		}
	}
}
