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
		ask(ctx, conn, finding{Check: "plpgsql", Database: name}, `SELECT coalesce((SELECT has_language_privilege(oid, 'USAGE')::text FROM pg_language
			WHERE lanname = 'plpgsql'), 'missing')`, func(f *finding, value string) {
			f.Found = "may be used; no other extension is needed"
			switch value {
			case "missing":
				f.Found = "is missing"
				f.problem("CREATE EXTENSION plpgsql;")
			case "false":
				f.Found = "the service role may not write functions in it"
				f.problem("GRANT USAGE ON LANGUAGE plpgsql TO %s;", role)
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
	case state.Version == 0:
		catalog.Found = "is not there yet"
		catalog.note("nothing has to be done: koldproxy serve installs it, as koldproxy migrate up would")
	case state.Version < state.Newest:
		catalog.problem("koldproxy migrate up, or start koldproxy serve")
	case state.Version > state.Newest:
		catalog.problem("use the koldproxy that has installed it, or a newer one; its migrate down --to %d goes back", state.Newest)
	}
	if findings = append(findings, catalog); catalog.Result != resultOK {
		return findings
	}
	findings = append(findings, checkApplying(ctx, conn, c, name)...)
	findings = append(findings, checkBroken(ctx, conn, name)...)
	return append(findings, checkStorages(ctx, conn, name)...)
}

// checkOwners names the roles whose tables cannot be captured because the service role is no member of them, or one that does not inherit
// what they may do. It had better not become a member of superusers.
func checkOwners(ctx context.Context, conn *pgx.Conn, name, role string) finding {
	f := finding{Check: "owners", Database: name, Result: resultOK, Found: "tables of all owners can be captured"}
	var strangers, barred, superusers *string
	var major int
	err := conn.QueryRow(ctx, `SELECT string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FILTER (WHERE NOT rolsuper AND NOT pg_has_role(oid, 'MEMBER')),
			string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FILTER (WHERE NOT rolsuper AND pg_has_role(oid, 'MEMBER')),
			string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FILTER (WHERE rolsuper), current_setting('server_version_num')::int / 10000
		FROM pg_roles WHERE NOT pg_has_role(oid, 'USAGE') AND oid IN (SELECT c.relowner FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\_%' AND n.nspname NOT IN ('information_schema', 'koldstore'))`).Scan(&strangers, &barred, &superusers, &major)
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
		return f
	}
	var names, remedies []string
	if strangers != nil {
		names, remedies = append(names, *strangers), append(remedies, fmt.Sprintf("if they are to be: GRANT %s TO %s;", *strangers, role))
	}
	if barred != nil {
		names, remedies = append(names, *barred), append(remedies, inheritRemedy(*barred, role, major))
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

// inheritRemedy has the service role do what owners may of whom it is a member already. Since PostgreSQL 16 that is said of each membership.
func inheritRemedy(owners, role string, major int) string {
	if major >= 16 {
		return fmt.Sprintf("the service role is a member without INHERIT: GRANT %s TO %s WITH INHERIT TRUE;", owners, role)
	}
	return fmt.Sprintf("the service role is a member, and does not inherit: ALTER ROLE %s INHERIT;", role)
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
	case ok && pe.Code == "53300" && strings.Contains(pe.Message, "max_wal_senders"):
		f.Remedy = "raise max_wal_senders, and restart the server"
	case ok:
		f.Remedy = connectRemedy(err, name)
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
		if p.WillClose() && c.Apply.OnGap == walapply.OnGapHeal {
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
	return f.unless(findings, err)
}

// unless is f if nothing else was found, with the error if looking failed.
func (f finding) unless(found []finding, err error) []finding {
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	}
	if err != nil || len(found) == 0 {
		return []finding{f}
	}
	return found
}

// checkStorages names registered storages that failed when they were looked at last.
func checkStorages(ctx context.Context, conn *pgx.Conn, name string) []finding {
	f := finding{Check: "registered storages", Database: name, Result: resultOK, Found: "none has failed its check"}
	rows, err := conn.Query(ctx, "SELECT name, check_error FROM koldstore.storages WHERE check_error IS NOT NULL AND NOT check_pending ORDER BY name")
	var findings []finding
	if err == nil {
		var storage, why string
		_, err = pgx.ForEachRow(rows, []any{&storage, &why}, func() error {
			bad := finding{Check: f.Check, Database: name, Found: storage + " has failed its check: " + why}
			bad.problem("correct the store or the rights there, or SELECT koldstore.alter_storage_credentials(%s, …); either is looked at anew", quoteLiteral(storage))
			findings = append(findings, bad)
			return nil
		})
	}
	return f.unless(findings, err)
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
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), tableRemedy(ctx, conn, table, oid, err)
		if pe, ok := errors.AsType[*pgconn.PgError](err); ok {
			f.Found = pe.Message
		}
	}
	return f
}

// tableRemedy is what to do about a table that cannot be captured. oid is 0 when its name leads nowhere.
func tableRemedy(ctx context.Context, conn *pgx.Conn, table string, oid uint32, err error) string {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	role := pgx.Identifier{conn.Config().User}.Sanitize()
	switch {
	case ok && pe.Code == "42501" && strings.HasPrefix(pe.Message, schemaDenied):
		return fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s;", pgx.Identifier{strings.TrimPrefix(pe.Message, schemaDenied)}.Sanitize(), role)
	case !ok || oid == 0:
		return "name it as SQL does, with its schema"
	case pe.Hint != "":
		return pe.Hint
	case pe.Code == "42501":
		return ownerRemedy(ctx, conn, oid, role)
	case pe.Code == "42883" || pe.Code == "3F000":
		return "koldproxy migrate up first, or start koldproxy serve: the catalog knows which tables can be captured"
	}
	return "capture another table than " + table + "; docs/sql.md says which kinds can be"
}

const schemaDenied = "permission denied for schema "

// ownerRemedy gives the service role what it lacks of the rights of a table's owner.
func ownerRemedy(ctx context.Context, conn *pgx.Conn, oid uint32, role string) string {
	var name, owner string
	var superuser, member bool
	var major int
	err := conn.QueryRow(ctx, `SELECT c.oid::regclass::text, quote_ident(r.rolname), r.rolsuper, pg_has_role(r.oid, 'MEMBER'), current_setting('server_version_num')::int / 10000
		FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner WHERE c.oid = $1`, oid).Scan(&name, &owner, &superuser, &member, &major)
	switch {
	case err != nil:
		return "see the error"
	case superuser:
		return fmt.Sprintf("its owner %s is a superuser: ALTER TABLE %s OWNER TO …; to one that the service role may be a member of", owner, name)
	case member:
		return inheritRemedy(owner, role, major)
	}
	return fmt.Sprintf("GRANT %s TO %s;", owner, role)
}
