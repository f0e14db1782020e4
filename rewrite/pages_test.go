package rewrite

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"
)

// TestPagesJoinedAreTheWholeQuery reads random tables page after page, as a client does that knows only the last row, in
// orders over columns of many types and collations, and compares all pages together with the query without a limit.
func TestPagesJoinedAreTheWholeQuery(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	columns := pagedTable(t, conn)
	rapid.Check(t, func(t *rapid.T) {
		sql := "DELETE FROM paged;"
		for id := range rapid.IntRange(0, 25).Draw(t, "rows") {
			values := fmt.Sprint(id)
			for _, c := range columns {
				choice := c.values
				if !strings.Contains(c.kind, "NOT NULL") {
					choice = append(slices.Clone(choice), "NULL")
				}
				values += ", " + rapid.SampledFrom(choice).Draw(t, c.name)
			}
			sql += "INSERT INTO paged VALUES (" + values + ");"
		}
		if _, err := conn.PgConn().Exec(context.Background(), sql).ReadAll(); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		keys := rapid.Permutation(columns).Draw(t, "columns")[:rapid.IntRange(0, 4).Draw(t, "keys")]
		p := paging{
			from: rapid.SampledFrom([]string{"paged", "paged AS p", "paged p JOIN (SELECT true) j ON true"}).Draw(t, "from"), mode: "auto",
			page: rapid.IntRange(1, 7).Draw(t, "page"), params: rapid.Bool().Draw(t, "params"),
		}
		for _, k := range append(slices.Clone(keys), pagedColumn{name: "id"}) {
			p.order = append(p.order, sortKey{k.name, rapid.SampledFrom([]string{"", " ASC", " DESC"}).Draw(t, "direction") +
				rapid.SampledFrom([]string{"", " NULLS FIRST", " NULLS LAST"}).Draw(t, "nulls")})
		}
		p.joined(t, conn)
	})
}

type pagedColumn struct {
	name, kind string
	values     []string // SQL
}

// pagedTable creates a table with a column of every kind that the server has.
func pagedTable(t *testing.T, conn *pgx.Conn) []pagedColumn {
	words := []string{"''", "'a'", "'A'", "'b'", "'é'", "'e'", "'É'", "'a b'", "'ab'", "'a-b'", "'_'", "E'\\\\'", "'it''s'", "'ß'", "'ss'", "'10'", "'9'"}
	columns := []pagedColumn{
		{"n", "int", []string{"-1", "0", "1"}},
		{"num", "numeric", []string{"0", "0.0", "-1.5", "1e30", "'NaN'", "'Infinity'"}},
		{"f", "float8", []string{"0", "'-0'", "0.1", "'NaN'", "'-Infinity'"}},
		{"truth", "boolean", []string{"true", "false"}},
		{"at", "timestamptz", []string{"'infinity'", "'-infinity'", "'2024-02-29 12:00+02'", "'2024-02-29 10:00+00'"}},
		{"day", "date NOT NULL", []string{"'2024-01-01'", "'0044-03-15 BC'"}},
		{"span", "interval", []string{"'1 month'", "'30 days'", "'-1 s'"}},
		{"raw", "bytea", []string{`'\x'`, `'\x00'`, `'\xff'`}},
		{"doc", "jsonb", []string{`'null'`, `'1'`, `'{"a": "''"}'`, `'[]'`}},
		{"list", "text[]", []string{"'{}'", "'{a,NULL}'", "'{NULL,a}'", `'{"a b"}'`}},
		{"padded", `char(3) COLLATE "C"`, []string{"'a'", "'a  '", "'b'"}},
		{"short", "varchar(5)", words[:6]},
		{"plain", "text", words},
		{"bytes", `text COLLATE "C"`, words},
		{"posix", `text COLLATE "POSIX" NOT NULL`, words},
	}
	has := func(sql string) bool {
		var found bool
		if err := conn.QueryRow(context.Background(), sql).Scan(&found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if has("SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'citext')") {
		exec(t, conn, "CREATE EXTENSION citext")
		columns = append(columns, pagedColumn{"folded", "citext", words})
	}
	if has("SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'de-x-icu')") {
		exec(t, conn, "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
		columns = append(columns, pagedColumn{"german", `text COLLATE "de-x-icu"`, words}, pagedColumn{"unseeing", "text COLLATE blind", words})
	}
	sql := "CREATE TABLE paged (id int PRIMARY KEY"
	for _, c := range columns {
		sql += ", " + c.name + " " + c.kind
	}
	exec(t, conn, sql+"); CREATE INDEX ON paged (n, id); CREATE INDEX ON paged (plain DESC); SET enable_seqscan = off; SET jit = off; SET extra_float_digits = 3")
	return columns
}

// joined reads all pages, each behind the last row of the one before.
func (p paging) joined(t *rapid.T, conn *pgx.Conn) {
	var columns, order []string
	for _, k := range p.order {
		columns = append(columns, k.column)
		order = append(order, k.column+k.direction)
	}
	query := "SELECT " + strings.Join(columns, ", ") + " FROM " + p.from + " ORDER BY " + strings.Join(order, ", ")
	whole := p.read(t, conn, query, nil)
	page := p.read(t, conn, fmt.Sprintf("%s LIMIT %d", query, p.page), nil)
	all := page
	for len(page) == p.page && len(all) <= len(whole) {
		values, params := p.values(all[len(all)-1])
		r := Rewrite(query+fmt.Sprintf(" LIMIT %d AFTER (%s)", p.page, strings.Join(values, ", ")), conforming)
		if !r.Changed || r.Refusal != nil {
			t.Fatalf("unchanged: %s (%v)", query, r.Refusal)
		}
		page = p.read(t, conn, r.SQL, params)
		all = append(all, page...)
	}
	if !slices.EqualFunc(whole, all, slices.Equal[[]string]) {
		t.Fatalf("%s in pages of %d\nwhole %q\npages %q", query, p.page, whole, all)
	}
}
