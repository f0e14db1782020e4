package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/migrations"
	"github.com/koldproxy/koldproxy/walapply"
)

// checkDatabase looks at one database with streams and feeds, over the service connection to it.
func checkDatabase(ctx context.Context, conn *pgx.Conn, c *config, name string) []finding {
	database, role := pgx.Identifier{name}.Sanitize(), pgx.Identifier{conn.Config().User}.Sanitize()
	findings := []finding{
		checkReplication(ctx, c, name),
		ask(ctx, conn, finding{Check: "plpgsql", Database: name}, "SELECT EXISTS (SELECT FROM pg_language WHERE lanname = 'plpgsql')::text", func(f *finding, value string) {
			f.Found = "is there; no other extension is needed"
			if value != "true" {
				f.Found = "is missing"
				f.problem("CREATE EXTENSION plpgsql;")
			}
		}),
		ask(ctx, conn, finding{Check: "create schema", Database: name}, "SELECT has_database_privilege(current_database(), 'CREATE')::text", func(f *finding, value string) {
			f.Found = "the service role may create a schema and a publication"
			if value != "true" {
				f.Found = "the service role may not create a schema and a publication"
				f.problem("GRANT CREATE ON DATABASE %s TO %s;", database, role)
			}
		}),
		checkOwners(ctx, conn, name, role),
	}
	catalog := finding{Check: "catalog", Database: name}
	state, err := migrations.Status(ctx, conn)
	if err != nil {
		catalog.Result, catalog.Found, catalog.Remedy = resultProblem, err.Error(), catalogRemedy(err, role)
		return append(findings, catalog)
	}
	catalog.Found, catalog.Result = fmt.Sprintf("version %d of %d", state.Version, state.Newest), resultOK
	switch {
	case state.Version < state.Newest:
		catalog.problem("koldproxy migrate up, or start koldproxy serve")
	case state.Version > state.Newest:
		catalog.problem("use the koldproxy that has installed it, or a newer one; its migrate down --to %d goes back", state.Newest)
	}
	if findings = append(findings, catalog); catalog.Result != resultOK {
		return findings
	}
	return append(append(findings, checkApplying(ctx, conn, c, name)...), checkBroken(ctx, conn, name)...)
}

// checkOwners names the roles whose tables cannot be captured because the service role is no member of them. It had better not become a
// member of superusers.
func checkOwners(ctx context.Context, conn *pgx.Conn, name, role string) finding {
	f := finding{Check: "owners", Database: name, Result: resultOK, Found: "tables of all owners can be captured"}
	var others, superusers *string
	err := conn.QueryRow(ctx, `SELECT string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FILTER (WHERE NOT rolsuper),
			string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FILTER (WHERE rolsuper)
		FROM pg_roles WHERE NOT pg_has_role(oid, 'USAGE') AND oid IN (SELECT c.relowner FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\_%' AND n.nspname NOT IN ('information_schema', 'koldstore'))`).Scan(&others, &superusers)
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
		return f
	}
	var names, remedies []string
	if others != nil {
		names, remedies = append(names, *others), append(remedies, fmt.Sprintf("if they are to be: GRANT %s TO %s;", *others, role))
	}
	if superusers != nil {
		names, remedies = append(names, *superusers), append(remedies, "tables of superusers need another owner first: ALTER TABLE … OWNER TO …;")
	}
	if len(names) > 0 {
		f.Found = "tables of " + strings.Join(names, ", ") + " cannot be captured"
		f.note("%s", strings.Join(remedies, "\n"))
	}
	return f
}

func catalogRemedy(err error, role string) string {
	if pe, ok := errors.AsType[*pgconn.PgError](err); ok && pe.Code == "42501" {
		return "the catalog belongs to another role: name that one in postgres.dsn, or GRANT it TO " + role + ";"
	}
	return "see the error"
}

// checkReplication opens a replication connection, which takes REPLICATION, an entry in pg_hba.conf and a free sender.
func checkReplication(ctx context.Context, c *config, name string) finding {
	f := finding{Check: "replication", Database: name, Result: resultOK, Found: "a replication connection works"}
	cc, err := c.pgxConfig(name)
	if err == nil {
		cc.RuntimeParams["replication"] = "database"
		var conn *pgconn.PgConn
		if conn, err = pgconn.ConnectConfig(ctx, &cc.Config); err == nil {
			_, err = conn.Exec(ctx, "IDENTIFY_SYSTEM").ReadAll()
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}
	if err == nil {
		return f
	}
	f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	pe, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case ok && strings.Contains(pe.Message, "pg_hba.conf"):
		f.Remedy = hbaRemedy(name, pe.Message)
	case ok && pe.Code == "42501", ok && pe.Code == "28000":
		f.Remedy = fmt.Sprintf("ALTER ROLE %s REPLICATION; (Amazon RDS: GRANT rds_replication TO it)", pgx.Identifier{cc.User}.Sanitize())
	case ok && pe.Code == "53300":
		f.Remedy = "raise max_wal_senders, and restart the server"
	}
	return f
}

// checkApplying looks at checkpoint, slot and publication.
func checkApplying(ctx context.Context, conn *pgx.Conn, c *config, name string) []finding {
	f := finding{Check: "applying", Database: name, Result: resultOK, Found: "checkpoint, slot and publication fit"}
	problems, err := walapply.Inspect(ctx, conn, walapply.DefaultConfig("").Publication, c.Apply.OnGap)
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	}
	if err != nil || len(problems) == 0 {
		return []finding{f}
	}
	findings := make([]finding, len(problems))
	for i, p := range problems {
		findings[i] = finding{Check: f.Check, Database: name, Result: resultProblem, Found: p.Problem, Remedy: p.Hint}
		if p.Gap && c.Apply.OnGap == "heal" {
			findings[i].Remedy = `start koldproxy serve, which closes the gap (apply.on_gap = "heal"); docs/operations.md says what becomes of streams and feeds`
			if p.Waits != "" {
				findings[i].Remedy = "have these transactions end, which a new replication slot waits for: " + p.Waits
			}
		}
	}
	return findings
}

// checkBroken names the streams and feeds that were given up.
func checkBroken(ctx context.Context, conn *pgx.Conn, name string) []finding {
	f := finding{Check: "streams and feeds", Database: name, Result: resultOK, Found: "none is broken"}
	rows, err := conn.Query(ctx, `
		SELECT 'stream ' || quote_ident(schema_name) || '.' || quote_ident(name), coalesce(reason, ''), 'DROP STREAM, and CREATE STREAM when its table is in order'
		FROM koldstore.stream WHERE state = 'broken'
		UNION ALL
		SELECT 'feed of ' || quote_ident(schema_name) || '.' || quote_ident(table_name), coalesce(reason, ''), format('SELECT koldstore.heal_table(%L);',
			quote_ident(schema_name) || '.' || quote_ident(table_name))
		FROM koldstore.managed_table WHERE state = 'broken' ORDER BY 1`)
	var findings []finding
	if err == nil {
		var what, why, remedy string
		_, err = pgx.ForEachRow(rows, []any{&what, &why, &remedy}, func() error {
			findings = append(findings, finding{Check: f.Check, Database: name, Result: resultProblem, Found: what + " is broken: " + why, Remedy: remedy})
			return nil
		})
	}
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	}
	if err != nil || len(findings) == 0 {
		return []finding{f}
	}
	return findings
}

// checkTable says whether changes of a table can be captured, as the commands would.
func checkTable(ctx context.Context, conn *pgx.Conn, database, table string) finding {
	f := finding{Check: "table " + table, Database: database, Result: resultOK, Found: "can have streams and a feed"}
	oid, err := resolveTable(ctx, conn, table)
	if err == nil {
		_, err = conn.Exec(ctx, "SELECT koldstore.check_table(current_user, $1::oid::regclass)", oid)
	}
	if err == nil {
		var filtered bool
		if err = conn.QueryRow(ctx, "SELECT row_security_active($1::oid)", oid).Scan(&filtered); err == nil && filtered {
			f.Found = "row-level security hides rows from the service role"
			f.problem("ALTER TABLE %s NO FORCE ROW LEVEL SECURITY;", table)
		}
	}
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "name it as SQL does, with its schema"
		if pe, ok := errors.AsType[*pgconn.PgError](err); ok {
			f.Found = pe.Message
			switch {
			case pe.Hint != "":
				f.Remedy = pe.Hint
			case pe.Code == "42501" && strings.HasPrefix(pe.Message, "permission denied for schema"):
				f.Remedy = fmt.Sprintf("GRANT USAGE ON SCHEMA … TO %s;", pgx.Identifier{conn.Config().User}.Sanitize())
			case pe.Code == "42501":
				f.Remedy = fmt.Sprintf("GRANT the owner of the table TO %s;", pgx.Identifier{conn.Config().User}.Sanitize())
			case pe.Code == "42883" || pe.Code == "3F000":
				f.Remedy = "koldproxy migrate up first: the catalog knows which tables can be captured"
			default:
				f.Remedy = "capture another table; docs/sql.md says which kinds can be"
			}
		}
	}
	return f
}
