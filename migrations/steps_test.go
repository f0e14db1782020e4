package migrations_test

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
)

// namedBy lists what a binary can name in the catalog: columns with their types, functions with their arguments and results.
func namedBy(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		SELECT format('%s.%s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod))
		FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
		WHERE c.relnamespace = to_regnamespace('koldstore') AND c.relkind IN ('r', 'p', 'v') AND a.attnum > 0 AND NOT a.attisdropped
		UNION ALL
		SELECT format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), coalesce(pg_get_function_result(p.oid), 'nothing'))
		FROM pg_proc p WHERE p.pronamespace = to_regnamespace('koldstore') ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// before010 is what steps have taken away or changed while no release was out. No step of a release may be added here: the binary of the
// release before has to go on beside it (see the package documentation).
var before010 = map[int32][]string{
	13: {"stage_key.kind text", "stage_key.table_oid oid", "unseal(box bytea, nonce bytea, mac bytea, key bytea) jsonb"},
}

// checkSteps compares what can be named at each version with the one before.
func checkSteps(t *testing.T, named map[int32][]string) {
	t.Helper()
	for v, list := range named {
		next, ok := named[v+1]
		if !ok {
			continue
		}
		var gone []string
		for _, name := range list {
			if !slices.Contains(next, name) {
				gone = append(gone, name)
			}
		}
		if !slices.Equal(gone, before010[v+1]) {
			t.Errorf("step %d takes away or changes %q, which the previous binary may use", v+1, gone)
		}
	}
}
