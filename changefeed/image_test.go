package changefeed

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
)

// TestImagesAreWhatTheServerSays paints values of every type that has a renderer and compares them, as jsonb, with to_jsonb of the
// same row on the server, under the settings of the applier.
func TestImagesAreWhatTheServerSays(t *testing.T) {
	t.Parallel()
	conn := settledConn(t)
	ctx := t.Context()
	values := map[string][]string{
		"boolean":  {"true", "false"},
		"smallint": {"0", "-32768"}, "integer": {"2147483647"}, "bigint": {"-9223372036854775808"},
		"real":             {"'NaN'", "'-Infinity'", "'Infinity'", "1e20", "-0.0", "0.1", "1.5e-38"},
		"double precision": {"'NaN'", "'-Infinity'", "1e308", "-0.0", "0.1", "1e-7", "123456789012345680"},
		"numeric":          {"'NaN'", "'Infinity'", "1.00", "0.000000000000000001", "1e100", "-0.0", "12345678901234567890.123456789"},
		"text":             {"''", "'null'", "'NULL'", `'a"b\c'`, `E'\t\n\r\x01\x1f\x7f'`, "'ü€😀'", "U&'\\2028'", "repeat('\"', 3000)"},
		"varchar(9)":       {"'x'", `'\'`}, "char(5)": {"'a'", "''"}, "name": {"'n'"}, `"char"`: {"'c'", "''"},
		"uuid":        {"'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"},
		"bytea":       {`'\x00ff'`, "''"},
		"date":        {"'2026-02-28'", "'infinity'", "'-infinity'", "'0044-03-15 BC'", "'5874897-12-31'"},
		"time":        {"'12:00'", "'24:00:00'", "'00:00:00.000001'"},
		"time(2)":     {"'12:00:00.126'"},
		"timetz":      {"'12:00+05:30'", "'00:00:00-15:59:59'"},
		"interval":    {"'1 year 2 mons -3 days 04:05:06.789'", "'-1 s'", "'0'"},
		"timestamp":   {"'2026-02-28 01:02:03.4'", "'infinity'", "'-infinity'", "'0044-03-15 00:00:00 BC'", "'294276-12-31 23:59:59.999999'"},
		"timestamptz": {"'2026-02-28 01:02:03.4+13'", "'infinity'", "'-infinity'", "'0044-03-15 00:00:00 BC'", "'1883-01-01 America/New_York'", "'294276-12-31 23:59:59.999999Z'"},
		"oid":         {"4294967295"},
		"inet":        {"'10.0.0.1/8'", "'::1'"}, "cidr": {"'10.0.0.0/8'"}, "macaddr": {"'08:00:2b:01:02:03'"},
		"bit(3)": {"B'101'"}, "varbit": {"B''"},
		"jsonb":              {`'{"b":1.00,"a":[null,"\u00fc\"",{}]}'`, "'null'", "'\"s\"'", "'1e5'"},
		"boolean[]":          {"'{t,f,NULL}'"},
		"smallint[]":         {"'{1}'"},
		"integer[]":          {"'{}'", "'{1,NULL,-3}'", "'{{1,2},{3,4}}'", "'[0:1]={5,6}'", "'[-1:0][2:3]={{1,2},{NULL,4}}'"},
		"bigint[]":           {"'{1}'"},
		"real[]":             {"'{NaN,1e20}'"},
		"double precision[]": {"'{-Infinity,0.1}'"},
		"numeric[]":          {"'{1.00,NaN}'"},
		"text[]":             {`ARRAY['a', NULL, 'NULL', 'null', '', 'a b', 'a,b', '{', '}', '"', '\', E'\n', 'ü']`, `ARRAY[ARRAY['a b'], ARRAY['c}']]`, "'[5:5]={x}'"},
		"varchar[]":          {`'{a,"b c"}'`},
		"uuid[]":             {"'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'"},
		"date[]":             {"'{2026-01-01,infinity}'", "'{0044-03-15 BC}'"},
		"timestamp[]":        {"'{2026-01-01 00:00:00,infinity}'"},
		"timestamptz[]":      {"'{2026-01-01 00:00:00.5+00,-infinity,0044-03-15 00:00:00 BC}'"},
	}
	seen := make(map[uint32]bool)
	for typeName, examples := range values {
		for _, example := range append(examples, "NULL") {
			var oid uint32
			var text *string
			var want string
			const name = `a "column"`
			err := conn.QueryRow(ctx, fmt.Sprintf(`SELECT pg_typeof(x.%[3]s)::oid, CASE WHEN x.%[3]s IS NOT NULL THEN format('%%s', x.%[3]s) END, to_jsonb(x)::text FROM (SELECT (%[1]s)::%[2]s AS %[3]s) x`,
				example, typeName, ident(name))).Scan(&oid, &text, &want)
			if err != nil {
				t.Fatalf("%s %s: %v", typeName, example, err)
			}
			tab := &table{attributes: []attribute{{name: name, typeOID: oid}}, columns: []int{0}}
			p := newPainter(tab)
			if p == nil {
				t.Fatalf("%s has no renderer", typeName)
			}
			seen[oid] = true
			value := koldproxy.Datum{Kind: koldproxy.DatumNull}
			if text != nil {
				value = koldproxy.Datum{Kind: koldproxy.DatumText, Text: *text}
			}
			got := p.image([]koldproxy.Datum{value})
			var same string
			if err := conn.QueryRow(ctx, `SELECT $1::text::jsonb::text`, got).Scan(&same); err != nil {
				t.Fatalf("%s %s: %s: %v", typeName, example, got, err)
			}
			if same != want {
				t.Errorf("%s %s: painted %s, the server says %s", typeName, example, same, want)
			}
		}
	}
	for oid := range renderers {
		if !seen[oid] {
			t.Errorf("nothing of type %d was tried", oid)
		}
	}
}

// TestImagesAreSorted wants the members of an image where jsonb has them: that is worth a quarter of what a wide row costs the server.
func TestImagesAreSorted(t *testing.T) {
	t.Parallel()
	tab := &table{}
	for i, name := range []string{"id", "c10", "c9", "Z", "a", "é", "ab", "aé", "c1", `q"`, "c 1", "ÿz"} {
		tab.attributes = append(tab.attributes, attribute{name: name, typeOID: pgtype.Int4OID})
		tab.columns = append(tab.columns, i)
	}
	row := make([]koldproxy.Datum, len(tab.columns))
	for i := range row {
		row[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: strconv.Itoa(i)}
	}
	var painted, stored []int
	err := settledConn(t).QueryRow(t.Context(), `SELECT array(SELECT value::int FROM json_each_text($1::text::json)), array(SELECT value::int FROM jsonb_each_text($1::text::jsonb))`,
		newPainter(tab).image(row)).Scan(&painted, &stored)
	if err != nil || !slices.Equal(painted, stored) || len(stored) != len(row) {
		t.Errorf("columns are painted in the order %v, jsonb has %v (%v)", painted, stored, err)
	}
}

// settledConn is a session with the settings of the applier.
func settledConn(t *testing.T) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(localpg.TestCluster(t).TestDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, setting := range evalSettings {
		cfg.RuntimeParams[name] = setting
	}
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}
