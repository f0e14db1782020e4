package migrations_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
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
		if len(gone) > 0 {
			t.Errorf("step %d takes away or changes %q, which the previous binary may use", v+1, gone)
		}
	}
}

// TestDevelopmentCatalog: what was installed in other steps, under numbers that this binary knows too, is left as it is.
func TestDevelopmentCatalog(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"step 13 and later": `CREATE TABLE koldstore.replaced (definition text NOT NULL); UPDATE koldstore.schema_version SET version = 18`,
		"before step 13":    `ALTER TABLE koldstore.command_log RENAME TO command_table; UPDATE koldstore.schema_version SET version = 12`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := connect(t, localpg.TestCluster(t).TestDatabase(t))
			ctx := t.Context()
			if err := migrations.Up(ctx, conn); err != nil {
				t.Fatal(err)
			}
			exec(t, conn, change)
			before := schemaOf(t, conn)
			_, statusErr := migrations.Status(ctx, conn)
			for call, err := range map[string]error{"Up": migrations.Up(ctx, conn), "Down": migrations.Down(ctx, conn, 0), "Status": statusErr} {
				if err == nil || !strings.Contains(err.Error(), "development version") {
					t.Errorf("%s: %v", call, err)
				}
			}
			if got := schemaOf(t, conn); got != before {
				t.Errorf("it was changed to:\n%s", got)
			}
		})
	}
}
