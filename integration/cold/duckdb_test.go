package cold_test

import (
	"context"
	"crypto/md5" //nolint:gosec // compares, protects nothing
	"database/sql"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	_ "github.com/duckdb/duckdb-go/v2" // the engine under test
	"github.com/parquet-go/parquet-go"
)

func duckDB(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open("duckdb", "")
	ok(t, err)
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(1)
	_, err = db.ExecContext(context.Background(), "SET TimeZone = 'UTC'; SET threads = 2")
	ok(t, err)
	return db
}

// list is a DuckDB list of file names.
func list(files []string) string { return "['" + strings.Join(files, "', '") + "']" }

const everyType = `id bigint PRIMARY KEY, b boolean, i2 smallint, i4 integer, i8 bigint, f4 real, f8 double precision, n9 numeric(9,2), n18 numeric(18,4), n38 numeric(38,10), n numeric,
	t text, vc varchar(20), ch char(5), by bytea, d date, ts timestamp, tz timestamptz, ti time, iv interval, u uuid, j json, jb jsonb, a integer[], ip inet`

// TestDuckDBReadsEveryType compares the values that DuckDB finds in a file with those that PostgreSQL has in the table.
func TestDuckDBReadsEveryType(t *testing.T) {
	f := newFixture(t, nil)
	tab := f.manage("kinds", everyType, "")
	f.exec(`SET TIME ZONE 'Asia/Kolkata'`)
	f.exec(`INSERT INTO kinds VALUES
		(1, true, -32768, 2147483647, 9007199254740993, 1.5, 1e300, -1234567.89, 12345678901234.5678, 1234567890123456789012345678.0123456789, 0.00000000000000000001,
			E'line\nbreak "quoted" \\ ü', 'x', 'ab', '\xdeadbeef', '0044-03-15 BC', '2023-05-18 03:52:45.573605', '2023-05-18 03:52:45.573605+00', '23:59:59.999', '1 mon 2 days 03:04:05.6',
			'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": "\"\\"}', '{"k": [1, 2.50, null]}', '{1,NULL,3}', '10.0.0.1/8'),
		(2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
		(3, false, 0, 0, -9223372036854775808, -0.25, 'NaN', 0.00, 0.0000, -0.0000000001, 1e20, '', '', '', '', '9999-12-31', '0001-01-01', '1969-12-31 23:59:59.999999+00', '00:00', '-1 day', NULL, 'null', 'null', '{}', NULL)`)
	tab.capture("true")
	tab.mustFlush()
	db := duckDB(t)
	// The same expressions, as text, in both. Text is compared as it is, numbers and times by their value.
	columns := []string{
		"id", "b", "i2", "i4", "i8", "f4::double precision", "f8", "n9", "n18", "n38", "t", "vc", "to_jsonb(ch) #>> '{}'", "encode(by, 'hex')", "d", "ts", "u",
	}
	for _, column := range columns {
		duck := map[string]string{"encode(by, 'hex')": "lower(hex(\"by\"))", "f4::double precision": "f4::double", "to_jsonb(ch) #>> '{}'": "ch"}[column]
		if duck == "" {
			duck = column
		}
		want := f.texts("SELECT coalesce((" + column + ")::text, 'NULL') FROM kinds ORDER BY id")
		got := duckTexts(t, db, fmt.Sprintf("SELECT coalesce((%s)::varchar, 'NULL') FROM read_parquet(%s) ORDER BY _ks_seq", duck, list(tab.files())))
		for i := range want {
			if same(want[i], got[i]) {
				continue
			}
			t.Errorf("%s of row %d: DuckDB has %q, PostgreSQL %q", column, i+1, got[i], want[i])
		}
	}
	// Types are real ones.
	types := duckTexts(t, db, fmt.Sprintf("SELECT column_name || ' ' || column_type FROM (DESCRIBE SELECT * FROM read_parquet(%s))", list(tab.files())))
	for _, want := range []string{
		"_ks_seq BIGINT", "b BOOLEAN", "i2 SMALLINT", "i4 INTEGER", "f4 FLOAT", "f8 DOUBLE", "n9 DECIMAL(9,2)", "n18 DECIMAL(18,4)", "n38 DECIMAL(38,10)", "t VARCHAR", "by BLOB", "d DATE",
		"ts TIMESTAMP", "tz TIMESTAMP WITH TIME ZONE", "jb JSON",
	} {
		if !strings.Contains("\n"+strings.Join(types, "\n")+"\n", "\n"+want+"\n") {
			t.Errorf("no column %q among\n%s", want, strings.Join(types, "\n"))
		}
	}
}

// same compares what two engines write for one value: PostgreSQL's -0044 is DuckDB's 0044 (BC), its 1e+300 is 1e300.
func same(postgres, duck string) bool {
	clean := strings.NewReplacer(" (BC)", " BC", "e+", "e", "true", "true", "nan", "NaN")
	a, b := clean.Replace(postgres), clean.Replace(duck)
	return a == b || a+".0" == b || strings.TrimSuffix(a, ".0") == strings.TrimSuffix(b, ".0")
}

func (f *fixture) texts(query string) (texts []string) {
	f.Helper()
	rows, err := f.pool.Query(f.ctx, query)
	ok(f, err)
	defer rows.Close()
	for rows.Next() {
		var s string
		ok(f, rows.Scan(&s))
		texts = append(texts, s)
	}
	ok(f, rows.Err())
	return texts
}

func duckTexts(t testing.TB, db *sql.DB, query string) (texts []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var s string
		ok(t, rows.Scan(&s))
		texts = append(texts, s)
	}
	ok(t, rows.Err())
	return texts
}

// latestState is the query of docs/format.md.
func latestState(t testing.TB, files []string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/format.md")
	ok(t, err)
	_, query, found := strings.Cut(string(text), "<!-- latest state -->\n```sql\n")
	query, _, closed := strings.Cut(query, "```")
	if !found || !closed {
		t.Fatal("docs/format.md has no query for the latest state")
	}
	return strings.NewReplacer("['/cold/16384/…parquet', …]", list(files)).Replace(query)
}

// TestDuckDBGivesTheLatestState runs the query of docs/format.md over a history with updates, deletes and compaction.
func TestDuckDBGivesTheLatestState(t *testing.T) {
	f := newFixture(t, nil)
	tab := f.manage("messages", "id bigint PRIMARY KEY, body text", "")
	db := duckDB(t)
	f.exec("INSERT INTO messages SELECT i, 'first ' || i FROM generate_series(1, 200) i")
	tab.capture("true")
	tab.mustFlush()
	for round := range 6 {
		f.exec("UPDATE messages SET body = 'round ' || $1::int WHERE id % 7 = $1", round)
		tab.capture(fmt.Sprintf("id %% 7 = %d", round))
		f.exec("DELETE FROM messages WHERE id = $1", 10+round)
		tab.remove(10 + round)
		tab.mustFlush()
		check := func() {
			want := f.texts("SELECT id || ' ' || body FROM messages ORDER BY id")
			got := duckTexts(t, db, "SELECT id || ' ' || body FROM ("+latestState(t, tab.files())+") ORDER BY id")
			if strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Fatalf("round %d: DuckDB has %d rows, PostgreSQL %d:\n%s\n---\n%s", round, len(got), len(want), strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
		check()
		if _, err := f.store.Compact(t.Context(), tab.oid); err != nil {
			t.Fatal(err)
		}
		check()
	}
}

// TestParquetGoReadsTheFiles reads with a second implementation of the format, page index and Bloom filter included.
func TestParquetGoReadsTheFiles(t *testing.T) {
	f := newFixture(t, nil)
	tab := f.manage("messages", "id bigint PRIMARY KEY, body text", "")
	f.exec("INSERT INTO messages SELECT i, CASE WHEN i % 3 > 0 THEN repeat('x', i % 50) END FROM generate_series(1, 40000) i")
	tab.capture("id % 7 = 3") // so that the keys do not ascend, and have a Bloom filter
	tab.capture("id % 7 <> 3")
	tab.mustFlush()
	rows, sum := 0, int64(0)
	for _, name := range tab.files() {
		file, err := os.Open(name)
		ok(t, err)
		defer func() { _ = file.Close() }()
		info, err := file.Stat()
		ok(t, err)
		p, err := parquet.OpenFile(file, info.Size())
		ok(t, err)
		type message struct {
			Seq  int64   `parquet:"_ks_seq"`
			Hash int64   `parquet:"_ks_hash"`
			ID   *int64  `parquet:"id,optional"`
			Body *string `parquet:"body,optional"`
		}
		r := parquet.NewGenericReader[message](p)
		buffer := make([]message, 1000)
		for {
			n, err := r.Read(buffer)
			for _, m := range buffer[:n] {
				rows++
				if m.ID == nil || (m.Body == nil) != (*m.ID%3 == 0) || m.Body != nil && *m.Body != strings.Repeat("x", int(*m.ID%50)) {
					t.Fatalf("row %d: %+v", rows, m)
				}
				sum += *m.ID
			}
			if err != nil {
				break
			}
		}
		for _, group := range p.RowGroups() {
			bloom := group.ColumnChunks()[6].BloomFilter()
			if bloom == nil {
				t.Fatal("no Bloom filter on id")
			}
		}
	}
	if rows != 40000 || sum != 40000*40001/2 {
		t.Errorf("%d rows, whose ids add up to %d", rows, sum)
	}
}

// TestOtherReadersUnderstandDifferences compares columns that are kept as differences, from one end of their types to the other and with
// pages without any value, and texts with their lengths in front, with what PostgreSQL has.
func TestOtherReadersUnderstandDifferences(t *testing.T) {
	f := newFixture(t, nil)
	tab := f.manage("numbers", "id bigint PRIMARY KEY, n integer, ts timestamp, price numeric(18,2), body text", "")
	f.exec(`INSERT INTO numbers SELECT CASE WHEN i % 2 = 0 THEN 9223372036854775807 - i ELSE -9223372036854775808 + i END,
		CASE WHEN i BETWEEN 15000 AND 30000 THEN NULL WHEN i % 3 = 0 THEN -2147483648 + i ELSE 2147483647 - i END,
		timestamp '2000-01-01' + i * i * interval '7 us', CASE WHEN i % 5 > 0 THEN 9999999999999999.99 - i * i END,
		CASE WHEN i % 1000 = 1 THEN repeat(md5(i::text), 500) WHEN i % 3 > 0 THEN left(md5(i::text), (i % 33)::int) WHEN i % 2 = 0 THEN '' END FROM generate_series(1, 40000::bigint) i`)
	tab.capture("true")
	tab.mustFlush()
	const columns = "id, coalesce(n, 0), ts, coalesce(price, 0), length(body), md5(body)"
	want := f.texts("SELECT concat_ws(' ', " + columns + ") FROM numbers ORDER BY id")
	got := duckTexts(t, duckDB(t), "SELECT concat_ws(' ', "+columns+") FROM read_parquet("+list(tab.files())+") ORDER BY id")
	if len(got) != len(want) {
		t.Fatalf("DuckDB has %d rows, PostgreSQL %d", len(got), len(want))
	}
	for i := range want {
		if strings.Replace(got[i], " 0.00", " 0", 1) != want[i] {
			t.Fatalf("DuckDB has %q, PostgreSQL %q", got[i], want[i])
		}
	}
	type number struct {
		ID *int64  `parquet:"id,optional"`
		N  *int32  `parquet:"n,optional"`
		B  *string `parquet:"body,optional"`
	}
	var pairs []string
	for _, name := range tab.files() {
		rows, err := parquet.ReadFile[number](name)
		ok(t, err)
		for _, r := range rows {
			n := int32(0)
			if r.N != nil {
				n = *r.N
			}
			body := "null"
			if r.B != nil {
				body = fmt.Sprintf("%x", md5.Sum([]byte(*r.B)))
			}
			pairs = append(pairs, fmt.Sprintf("%d %d %s", *r.ID, n, body))
		}
	}
	expected := f.texts("SELECT concat_ws(' ', id, coalesce(n, 0), coalesce(md5(body), 'null')) FROM numbers ORDER BY 1")
	slices.Sort(pairs)
	slices.Sort(expected)
	if !slices.Equal(pairs, expected) {
		t.Error("parquet-go has other numbers than PostgreSQL")
	}
}
