package coldstore_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/coldstore"
)

// Every type of the table in docs/format.md, with values that other stores are known to lose. The first value of each
// column is an ordinary one, which must be in its typed column, not beside it.
var typeColumns = []struct {
	name, typ string
	values    []string // SQL expressions
}{
	{"c_bool", "boolean", []string{"true", "false"}},
	{"c_int2", "smallint", []string{"1", "-32768", "32767"}},
	{"c_int4", "integer", []string{"1", "-2147483648", "2147483647"}},
	{"c_int8", "bigint", []string{"1", "9007199254740993", "-9223372036854775808", "9223372036854775807"}},
	{"c_float4", "real", []string{"1.5", "0.1", "3.4028235e38", "1e-45", "'NaN'", "'Infinity'", "'-Infinity'", "'-0'", "16777217"}},
	{"c_float8", "double precision", []string{
		"1.5", "0.1", "1e300", "1e-7", "5e-324", "1.7976931348623157e308", "'NaN'", "'Infinity'", "'-Infinity'", "'-0'", "123456789.123456789", "9007199254740993",
	}},
	{"c_num9", "numeric(9,2)", []string{"1.50", "-0.01", "9999999.99", "0", "'NaN'"}},
	{"c_num18", "numeric(18,6)", []string{"1.5", "-999999999999.999999", "0.000001"}},
	{"c_num38", "numeric(38,10)", []string{"1.5", "9999999999999999999999999999.9999999999", "-9999999999999999999999999999.9999999999", "-0.0000000001", "0"}},
	{"c_num38i", "numeric(38)", []string{"1", "99999999999999999999999999999999999999", "-1"}},
	{"c_num40", "numeric(40,2)", []string{"1.50", "12345678901234567890123456789012345678.90"}},
	{"c_numneg", "numeric(5,-2)", []string{"12300"}},
	{"c_numsmall", "numeric(2,4)", []string{"0.0012"}},
	{"c_numeric", "numeric", []string{"1.50", "2.500", "1.0", "1", "'NaN'", "1e-20", "1e100", "'-Infinity'", "repeat('9', 1000)::numeric", "-0.10"}},
	{"c_money", "money", []string{"'1234.50'", "'-0.01'"}},
	{"c_text", "text", []string{
		"'plain'", "''", `'null'`, `'"quoted"'`, `E'a\tb\nc\\d"e/f\b\f\r'`, `E'\u0001\u001f\u007f\u0085'`, "'é☃𝄞'", `E'\u2028'`, "repeat('x', 20000)", "'123'",
	}},
	{"c_varchar", "varchar(10)", []string{"'abc'", "'é'"}},
	{"c_char", "char(5)", []string{"'ab'", "''"}},
	{"c_qchar", `"char"`, []string{"'x'", "''"}},
	{"c_name", "name", []string{"'abc'"}},
	{"c_bytea", "bytea", []string{`'\xdeadbeef'`, `''`, `'\x00'`}},
	{"c_date", "date", []string{"'2024-02-29'", "'0001-01-01'", "'0044-03-15 BC'", "'4713-01-01 BC'", "'infinity'", "'-infinity'", "'10000-01-01'", "'5874897-12-31'", "'1969-12-31'"}},
	{"c_time", "time", []string{"'12:34:56.7'", "'24:00:00'", "'00:00'"}},
	{"c_timetz", "timetz", []string{"'12:34:56+02'", "'23:59:59.999+05:30'", "'00:00+15:59:59'"}},
	{"c_ts", "timestamp", []string{
		"'2024-01-02 03:04:05.6'", "'1969-12-31 23:59:59.999999'", "'0001-01-01'", "'0044-03-15 12:00 BC'", "'4713-01-01 BC'", "'infinity'", "'-infinity'",
		"'294246-12-31 23:59:59.999999'", "'294276-12-31 23:59:59.999999'", "'10000-01-01'", "'2024-01-02 24:00'",
	}},
	{"c_tstz", "timestamptz", []string{
		"'2023-05-18 03:52:45.573605+00'", "'0001-01-01 00:00+05:30'", "'0044-03-15 BC'", "'infinity'", "'-infinity'", "'294276-12-31 23:59:59.999999+00'", "'1883-11-18 12:00+00'",
	}},
	{"c_interval", "interval", []string{"'1 mon 2 days 03:04:05.6'", "'-1 mons +2 days -03:00:00'", "'0'", "'178000000 years'"}},
	{"c_uuid", "uuid", []string{"'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"}},
	{"c_json", "json", []string{`'{"b":1, "a":  [1,2]}'`, `'{"a":1,"a":2}'`, `'"text"'`, `'null'`, `'1.00'`, `'1.0e3'`, `'[]'`}},
	{"c_jsonb", "jsonb", []string{
		`'{"b":1, "a":  [1,2]}'`, `'123'`, `'"123"'`, `'"null"'`, `'null'`, `'true'`, `'9007199254740993'`, `'1.00'`, `'{"n": [1e400, 0.10, -0]}'`, `'{}'`, `'""'`,
		`'{"a":"\"\\"}'`, `'{"": {"\u2028é": "x"}}'`,
	}},
	{"c_enum", "mood", []string{"'happy'", `'so "so"'`}},
	{"c_domint", "positive", []string{"5", "9007199254740993"}},
	{"c_domnum", "price", []string{"1.50", "'NaN'"}},
	{"c_ints", "int[]", []string{"'{1,2,NULL}'", "'{}'", "'{{1,2},{3,4}}'", "'[0:1]={1,2}'"}},
	{"c_texts", "text[]", []string{`'{a,"b,c",NULL,"NULL"}'`}},
	{"c_nums", "numeric[]", []string{"'{1.50,2.500}'"}},
	{"c_comp", "pair", []string{`ROW(1.2345, 'a"b', '2024-01-01 00:00+00')::pair`, "ROW(NULL, NULL, NULL)::pair"}},
	{"c_range", "int4range", []string{"'[1,5)'", "'empty'", "'(,)'"}},
	{"c_nrange", "numrange", []string{"'[1.50,2.0)'"}},
	{"c_tsrange", "tstzrange", []string{"'[2024-01-01 00:00+00,)'"}},
	{"c_mrange", "int4multirange", []string{"'{[1,2),[5,6)}'"}},
	{"c_inet", "inet", []string{"'10.0.0.1/24'", "'::1'"}},
	{"c_cidr", "cidr", []string{"'10.0.0.0/8'"}},
	{"c_mac", "macaddr", []string{"'08:00:2b:01:02:03'"}},
	{"c_bit", "bit(4)", []string{"B'1010'"}},
	{"c_varbit", "varbit", []string{"B'101'", "B''"}},
	{"c_xml", "xml", []string{"'<a>b</a>'"}},
	{"c_tsv", "tsvector", []string{"'fat cat'"}},
	{"c_point", "point", []string{"'(1.5,2)'"}},
	{"c_box", "box", []string{"'(1,1),(0,0)'"}},
	{"c_lsn", "pg_lsn", []string{"'16/B374D848'"}},
	{"c_xid8", "xid8", []string{"'18446744073709551615'"}},
	{"c_oid", "oid", []string{"42", "4294967295"}},
	{"c_regclass", "regclass", []string{"'pg_class'"}},
	{"c_jsonpath", "jsonpath", []string{"'$.a'"}},
	{"c_int2vector", "int2vector", []string{"'1 2'"}},
}

func TestEveryTypeComesBackAsItWas(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.RowGroupRows = 5 })
	f.exec(`CREATE TYPE mood AS ENUM ('happy', 'so "so"'); CREATE DOMAIN positive AS bigint CHECK (VALUE > 0); CREATE DOMAIN price AS numeric(10,2);
		CREATE TYPE pair AS (a numeric(10,4), b text, c timestamptz)`)
	var definition strings.Builder
	definition.WriteString("id bigint PRIMARY KEY")
	most := 0
	for _, c := range typeColumns {
		fmt.Fprintf(&definition, ", %s %s", c.name, c.typ)
		most = max(most, len(c.values))
	}
	tab := f.manage("types", definition.String(), "id bigint PRIMARY KEY", "")
	rows := 0
	write := func(pick func(values []string) string) {
		values := make([]string, len(typeColumns))
		for i, c := range typeColumns {
			values[i] = pick(c.values)
		}
		rows++
		tab.seq++
		f.exec(fmt.Sprintf("INSERT INTO types VALUES (%d, %s)", rows, strings.Join(values, ", ")))
		// The applier's settings, and a hostile default of the role that flushes.
		ok(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres'; SET LOCAL bytea_output = 'hex'"); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), "INSERT INTO "+tab.mirror+" SELECT id, $2, 1, to_jsonb(t) FROM types t WHERE id = $1", rows, tab.seq)
			return err
		}))
	}
	for i := range most {
		write(func(values []string) string { return values[i%len(values)] })
	}
	write(func([]string) string { return "NULL" })
	f.exec("CREATE TABLE expected AS SELECT * FROM " + tab.mirror)
	for _, setting := range []string{"timezone = 'Asia/Kolkata'", "bytea_output = 'escape'", "datestyle = 'German'", "intervalstyle = 'iso_8601'"} {
		f.exec("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET " + strings.ReplaceAll(setting, "'", "''") + "', current_database()); END $$")
	}
	f.pool.Reset()
	tab.mustFlush(int64(rows), 1)
	tab.verified()

	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 1000})
	ok(t, err)
	if len(page.Rows) != rows {
		t.Fatalf("%d rows", len(page.Rows))
	}
	for _, r := range page.Rows {
		var same, sameText, samePK bool
		f.scan(`SELECT row_image = $2::jsonb, row_image::text = $2::text, jsonb_build_object('id', id) = $3::jsonb FROM expected WHERE seq = $1`,
			[]any{r.Seq, string(r.Image), string(r.PK)}, &same, &sameText, &samePK)
		if !same || !sameText || !samePK {
			var want string
			f.scan("SELECT row_image::text FROM expected WHERE seq = $1", []any{r.Seq}, &want)
			t.Errorf("row %s:\n got %s\nwant %s", r.PK, r.Image, want)
		}
	}
	checkTyped(t, filepath.Join(f.folder, tab.segments()[0].Object))
}

// checkTyped looks at the first row group with its ordinary first row: every column must have typed values there.
func checkTyped(t *testing.T, name string) {
	t.Helper()
	r, err := file.OpenParquetFile(name, false)
	ok(t, err)
	defer r.Close()
	group := r.RowGroup(0)
	for i := range group.NumColumns() {
		column := r.MetaData().Schema.Column(i)
		chunk, err := group.MetaData().ColumnChunk(i)
		ok(t, err)
		stats, err := chunk.Statistics()
		ok(t, err)
		if strings.HasPrefix(column.Name(), "c_") && stats != nil && stats.HasNullCount() && stats.NullCount() == chunk.NumValues() {
			t.Errorf("column %s has no typed value at all", column.Name())
		}
	}
}

// TestColumnsThatBecomeOthers gives a column another type, and then another column its name: images stay what they were, and every file
// has its own idea of the column.
func TestColumnsThatBecomeOthers(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	images := []string{`{"v": "12", "id": 1}`, `{"v": 12, "id": 2}`, `{"v": "2026-01-02T03:04:05", "id": 3}`}
	for i, change := range []string{"", "ALTER TABLE messages ALTER v TYPE integer USING v::integer", "ALTER TABLE messages DROP v, ADD v timestamp"} {
		if change != "" {
			f.exec(change)
		}
		tab.seq++
		f.exec("INSERT INTO "+tab.mirror+" VALUES ($1, $2, 1, $3)", i+1, tab.seq, images[i])
		tab.mustFlush(1, 1)
	}
	tab.verified()
	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 10})
	ok(t, err)
	for i, r := range page.Rows {
		if string(r.Image) != images[i] {
			t.Errorf("%s, want %s", r.Image, images[i])
		}
	}
	var found []string
	for _, s := range tab.segments() {
		r, err := file.OpenParquetFile(filepath.Join(f.folder, s.Object), false)
		ok(t, err)
		c := r.MetaData().Schema.Column(r.MetaData().Schema.ColumnIndexByName("v"))
		found = append(found, fmt.Sprintf("%s %d", c.PhysicalType(), c.SchemaNode().FieldID()))
		ok(t, r.Close())
	}
	if got := strings.Join(found, ", "); got != "BYTE_ARRAY 2, INT32 2, INT64 3" {
		t.Errorf("types and field ids of the column: %s", got)
	}
}

func TestMissingIsNotNull(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	write := func(id int, image string) {
		tab.seq++
		f.exec("INSERT INTO "+tab.mirror+" VALUES ($1, $2, 1, $3)", id, tab.seq, image)
	}
	images := []string{`{"v": null, "id": 1}`, `{"id": 2}`, `{"v": "x", "id": 3, "old": {"a": [1]}}`, `{"v": "", "id": 4, "later": 7}`}
	for i, image := range images[:3] {
		write(i+1, image)
	}
	f.exec("ALTER TABLE messages ADD COLUMN later int DEFAULT 7")
	write(4, images[3])
	tab.mustFlush(4, 1)
	f.exec("ALTER TABLE messages DROP COLUMN v")
	f.exec("ALTER TABLE messages RENAME COLUMN id TO number")
	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 10})
	ok(t, err)
	for i, r := range page.Rows {
		var same bool
		if f.scan("SELECT $1::jsonb = $2::jsonb", []any{string(r.Image), images[i]}, &same); !same {
			t.Errorf("got %s, want %s", r.Image, images[i])
		}
	}
	// The table has other columns now; images that still have the old ones are kept whole all the same.
	write(5, `{"v": "5", "id": 5, "later": 1}`)
	tab.mustFlush(1, 1)
	tab.verified()
	page, err = f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeLast, Limit: 1})
	ok(t, err)
	if r := page.Rows[0]; string(r.PK) != `{"id": 5}` || string(r.Image) != `{"v": "5", "id": 5, "later": 1}` {
		t.Errorf("%s %s", r.PK, r.Image)
	}
}
