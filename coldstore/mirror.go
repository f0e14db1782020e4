package coldstore

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// pinSettings makes PostgreSQL write keys in the same form as the applier writes images, whatever the role's defaults are.
const pinSettings = `SELECT pg_catalog.set_config('TimeZone', 'UTC', true), pg_catalog.set_config('DateStyle', 'ISO', true), pg_catalog.set_config('IntervalStyle', 'postgres', true),
	pg_catalog.set_config('bytea_output', 'hex', true), pg_catalog.set_config('extra_float_digits', '1', true), pg_catalog.set_config('lc_monetary', 'C', true)`

// mirrorShape is what must be known about a table to write its rows: the columns of the table and those of the mirror's key.
type mirrorShape struct {
	mirror  string // qualified and quoted
	key     []string
	keys    []keyColumn // the same, in the order in which jsonb has them
	hash    string      // SQL for the hash of the key of m
	columns []column
}

func loadShape(ctx context.Context, q querier, t *managedTable) (*mirrorShape, error) {
	shape := &mirrorShape{mirror: t.mirror}
	var hashed []string
	err := eachColumn(ctx, q, t.mirrorOID, func(c column, base typeInfo) {
		if slices.Contains([]string{"seq", "op", "row_image"}, c.Name) {
			return
		}
		shape.key = append(shape.key, c.Name)
		expr := "m." + quoteName(c.Name)
		shape.keys = append(shape.keys, newKeyColumn(c.Name, expr, base))
		if base.builtin && slices.Contains([]string{"bit", "varbit", "money", "tsvector", "tsquery"}, base.name) {
			expr += "::text" // types that can be sorted and not hashed
		}
		hashed = append(hashed, expr)
	})
	if err != nil {
		return nil, err
	}
	if len(shape.key) == 0 {
		return nil, fmt.Errorf("mirror %s has no key columns", t.mirror)
	}
	slices.SortFunc(shape.keys, func(a, b keyColumn) int { return compareNames(a.name, b.name) })
	// PostgreSQL's own hash agrees with its own idea of equal keys: numeric 1.0 and 1.00, or what a collation says.
	shape.hash = "pg_catalog.hash_record_extended(ROW(" + strings.Join(hashed, ", ") + "), 0)"
	err = eachColumn(ctx, q, t.oid, func(c column, base typeInfo) {
		if !strings.HasPrefix(c.Name, "_ks_") { // kept as exact JSON; the names are taken
			c.Kind, c.Precision, c.Scale = columnKind(base)
			shape.columns = append(shape.columns, c)
		}
	})
	if err != nil {
		return nil, err
	}
	if len(shape.columns) == 0 {
		return nil, koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "table %s does not exist any more", t)
	}
	return shape, nil
}

// keyJSON is SQL for a column of a key as JSON. Where a type is not PostgreSQL's own, to_jsonb looks for a cast to json, and
// that would be code of whoever made the type; its text says the same.
func keyJSON(expr string, base typeInfo) string {
	switch {
	case base.builtin:
		return "pg_catalog.to_jsonb(" + expr + ")"
	case base.category == "A":
		return "pg_catalog.to_jsonb(pg_catalog.format('%s', " + expr + ")::pg_catalog.text[])"
	default:
		return "pg_catalog.to_jsonb(pg_catalog.format('%s', " + expr + "))"
	}
}

// eachColumn goes through the columns of a relation; domains are followed down to their base types.
func eachColumn(ctx context.Context, q querier, relation uint32, fn func(c column, base typeInfo)) error {
	rows, err := q.Query(ctx, `
		SELECT a.attnum, a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypmod, b.*
		FROM pg_catalog.pg_attribute a
		CROSS JOIN LATERAL (
			WITH RECURSIVE base(oid, mod) AS (
				SELECT a.atttypid, a.atttypmod
				UNION ALL
				SELECT t.typbasetype, CASE WHEN base.mod = -1 THEN t.typtypmod ELSE base.mod END
				FROM base JOIN pg_catalog.pg_type t ON t.oid = base.oid AND t.typtype = 'd')
			SELECT t.typname::text, t.typnamespace = 'pg_catalog'::regnamespace, t.typtype::text, t.typcategory::text, base.mod
			FROM base JOIN pg_catalog.pg_type t ON t.oid = base.oid AND t.typtype <> 'd') b
		WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
		ORDER BY a.attnum`, relation)
	if err != nil {
		return fmt.Errorf("load columns of %d: %w", relation, err)
	}
	var (
		c    column
		base typeInfo
	)
	scans := []any{&c.Number, &c.Name, &c.Type, &c.TypeMod, &base.name, &base.builtin, &base.class, &base.category, &base.typeMod}
	if _, err := pgx.ForEachRow(rows, scans, func() error { fn(c, base); return nil }); err != nil {
		return fmt.Errorf("load columns of %d: %w", relation, err)
	}
	return nil
}

func quoteName(name string) string { return pgx.Identifier{name}.Sanitize() }

// sameKeys asks PostgreSQL which pairs of keys are equal, for keys that differ as text. Whole records are compared: that takes
// the operators of the types' own operator classes. Any other = is looked up by name, and may be found by way of a
// cast that is code of whoever made the type.
func (m *mirrorShape) sameKeys(ctx context.Context, q querier, pairs [][2]Row) ([]bool, error) {
	var a, b []string
	for _, pair := range pairs {
		a, b = append(a, string(pair[0].PK)), append(b, string(pair[1].PK))
	}
	rows, err := q.Query(ctx, fmt.Sprintf(`
		SELECT coalesce(x OPERATOR(pg_catalog.=) y, false)
		FROM unnest($1::text[], $2::text[]) WITH ORDINALITY u(a, b, n)
		CROSS JOIN LATERAL pg_catalog.jsonb_populate_record(NULL::%[1]s, u.a::jsonb) x
		CROSS JOIN LATERAL pg_catalog.jsonb_populate_record(NULL::%[1]s, u.b::jsonb) y
		ORDER BY u.n`, m.mirror), a, b)
	if err != nil {
		return nil, fmt.Errorf("compare keys: %w", err)
	}
	same, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return nil, fmt.Errorf("compare keys: %w", err)
	}
	if len(same) != len(pairs) {
		return nil, fmt.Errorf("compare keys: %d answers for %d pairs", len(same), len(pairs))
	}
	return same, nil
}
