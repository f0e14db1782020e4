package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// evalRole is the role in which code of users runs.
const evalRole = "koldproxy_eval"

// checkEvalRole looks at the role in which code of users runs: that it is there, and that it can do nothing.
func checkEvalRole(ctx context.Context, conn *pgx.Conn, role string) finding {
	f := ask(ctx, conn, finding{Check: "koldproxy_eval"}, `SELECT CASE WHEN to_regrole('koldproxy_eval') IS NULL THEN 'missing'
		WHEN pg_has_role('koldproxy_eval', 'MEMBER') THEN 'member' ELSE 'stranger' END || CASE WHEN rolsuper OR rolcreaterole THEN '' ELSE ', may not create it' END
		FROM pg_roles WHERE rolname = current_user`, func(f *finding, value string) {
		switch value {
		case "missing, may not create it":
			f.Found = "the role in which code of users runs does not exist"
			f.problem("CREATE ROLE koldproxy_eval NOLOGIN; GRANT koldproxy_eval TO %s;", role)
		case "stranger, may not create it":
			f.Found = "the service role is no member of it"
			f.problem("GRANT koldproxy_eval TO %s;", role)
		default:
			f.Found = "code of users has a role without rights"
		}
	})
	rights, remedy, err := evalRights(ctx, conn)
	switch {
	case err != nil:
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	case rights != "":
		f.Found = "code of users has rights: koldproxy_eval " + rights
		f.problem("%s", remedy)
	}
	return f
}

// evalRights says what koldproxy_eval can do beyond what anybody can, "" if that is nothing, and the SQL that takes it away.
func evalRights(ctx context.Context, conn *pgx.Conn) (rights, remedy string, err error) {
	var options, memberships []string
	err = conn.QueryRow(ctx, `SELECT array_remove(ARRAY[CASE WHEN r.rolsuper THEN 'SUPERUSER' END, CASE WHEN r.rolbypassrls THEN 'BYPASSRLS' END,
			CASE WHEN r.rolcreaterole THEN 'CREATEROLE' END, CASE WHEN r.rolcreatedb THEN 'CREATEDB' END, CASE WHEN r.rolreplication THEN 'REPLICATION' END,
			CASE WHEN r.rolcanlogin THEN 'LOGIN' END], NULL),
			ARRAY(SELECT DISTINCT quote_ident(pg_get_userbyid(m.roleid)) FROM pg_auth_members m WHERE m.member = r.oid ORDER BY 1)
		FROM (SELECT) AS one LEFT JOIN pg_roles r ON r.rolname = 'koldproxy_eval'`).Scan(&options, &memberships)
	if err != nil {
		return "", "", fmt.Errorf("look at the role koldproxy_eval: %w", err)
	}
	var has, lose []string
	if len(options) > 0 {
		has = append(has, "is "+strings.Join(options, ", "))
		lose = append(lose, "ALTER ROLE koldproxy_eval NO"+strings.Join(options, " NO")+";")
	}
	if len(memberships) > 0 {
		names := strings.Join(memberships, ", ")
		has, lose = append(has, "is a member of "+names), append(lose, "REVOKE "+names+" FROM koldproxy_eval;")
	}
	return strings.Join(has, " and "), strings.Join(lose, "\n"), nil
}

// serviceConns is how many connections to a database koldproxy may have open at once beside its pool: for replication, for applying, for
// code of users, for leadership, and for passwords.
const serviceConns = 4 + maxVerifierConns

// fewestConns is what a database takes without any work.
const fewestConns = 5

// checkConnections looks whether limits leave koldproxy as many connections as it may need.
func checkConnections(ctx context.Context, conn *pgx.Conn, c *config) finding {
	const each = minPoolConns + serviceConns
	all := each * len(c.Postgres.Databases)
	f := finding{Check: "connection limits", Result: resultOK, Found: fmt.Sprintf("leave the service role the %d connections that it may need", all)}
	// Superusers have no limits. -1 is none.
	rows, err := conn.Query(ctx, `SELECT 'ROLE ' || quote_ident(r.rolname), r.rolconnlimit, $2::int, $3::int FROM pg_roles r
			WHERE r.rolname = current_user AND NOT r.rolsuper AND r.rolconnlimit BETWEEN 0 AND $2 - 1
		UNION ALL SELECT 'DATABASE ' || quote_ident(d.datname), d.datconnlimit, $4::int, $5::int FROM pg_database d JOIN pg_roles r ON r.rolname = current_user
			WHERE d.datname = ANY ($1) AND NOT r.rolsuper AND d.datconnlimit BETWEEN 0 AND $4 - 1`,
		c.Postgres.Databases, all, fewestConns*len(c.Postgres.Databases), each, fewestConns)
	var found, remedies []string
	tooFew := false
	if err == nil {
		var who string
		var limit, most, fewest int
		_, err = pgx.ForEachRow(rows, []any{&who, &limit, &most, &fewest}, func() error {
			found = append(found, fmt.Sprintf("%s: %d connections, koldproxy may need %d", who, limit, most))
			remedies = append(remedies, fmt.Sprintf("ALTER %s CONNECTION LIMIT -1;", who))
			tooFew = tooFew || limit < fewest
			return nil
		})
	}
	switch {
	case err != nil:
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
	case tooFew:
		f.Found = strings.Join(found, "; ")
		f.problem("%s", strings.Join(remedies, "\n"))
	case len(found) > 0:
		f.Found = strings.Join(found, "; ")
		f.note("%s", strings.Join(remedies, "\n"))
	}
	return f
}
