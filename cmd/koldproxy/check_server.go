package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/proxy"
)

// smallKeepSize is what max_slot_wal_keep_size had better be above, in MB.
const smallKeepSize = 1024

const standbyRemedy = "name the primary in postgres.dsn, or all hosts together with target_session_attrs=read-write"

// checkServer looks at what concerns the whole server.
func checkServer(ctx context.Context, conn *pgx.Conn, c *config) []finding {
	role := pgx.Identifier{conn.Config().User}.Sanitize()
	findings := []finding{
		ask(ctx, conn, finding{Check: "version"}, "SELECT current_setting('server_version_num')", func(f *finding, value string) {
			n, _ := strconv.Atoi(value)
			f.Found = fmt.Sprintf("PostgreSQL %d.%d", n/10000, n%10000)
			if n/10000 < localpg.MinMajor {
				f.problem("use PostgreSQL %d or later", localpg.MinMajor)
			}
		}),
		ask(ctx, conn, finding{Check: "primary"}, "SELECT pg_is_in_recovery()::text", func(f *finding, value string) {
			f.Found = "the server accepts writes"
			if value == "true" {
				f.Found = "the server is a standby"
				f.problem("%s", standbyRemedy)
			}
		}),
	}
	for _, f := range findings {
		if f.Result == resultProblem {
			return findings
		}
	}
	findings = append(findings,
		ask(ctx, conn, finding{Check: "wal_level"}, "SELECT current_setting('wal_level')", func(f *finding, value string) {
			if value != "logical" {
				f.problem("ALTER SYSTEM SET wal_level = logical; and restart the server (managed services: docs/deployment.md)")
			}
		}),
		checkFree(ctx, conn, c, "replication slots", "max_replication_slots", `SELECT count(*) FROM pg_replication_slots`),
		checkFree(ctx, conn, c, "wal senders", "max_wal_senders", `SELECT count(*) FROM pg_stat_replication`),
		ask(ctx, conn, finding{Check: "kept log"}, "SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size'", func(f *finding, value string) {
			n, _ := strconv.Atoi(value)
			f.Found = "max_slot_wal_keep_size is " + value + " MB"
			if n < 0 {
				f.Found = "max_slot_wal_keep_size is not limited: watch the disk while koldproxy is down"
			} else if n < smallKeepSize {
				f.note("ALTER SYSTEM SET max_slot_wal_keep_size = '%dMB'; or more: a slot that falls behind it is lost, which is a gap", smallKeepSize)
			}
		}),
		ask(ctx, conn, finding{Check: "idle slots"}, "SELECT coalesce(current_setting('idle_replication_slot_timeout', true), '0')", func(f *finding, value string) {
			f.Found = "are kept"
			if value != "0" {
				f.Found = "idle_replication_slot_timeout is " + value
				f.note("a koldproxy that is down for that long loses its slot: ALTER SYSTEM SET idle_replication_slot_timeout = 0;")
			}
		}),
		ask(ctx, conn, finding{Check: "synchronous standbys"}, "SELECT current_setting('synchronous_standby_names')", func(f *finding, value string) {
			if value == "" {
				f.Found = "none"
			}
			if value == "*" {
				f.problem("name the real standbys in synchronous_standby_names: with * commits wait for koldproxy")
			}
		}),
		checkClock(ctx, conn),
		ask(ctx, conn, finding{Check: "superuser"}, "SELECT rolsuper::text FROM pg_roles WHERE rolname = current_user", func(f *finding, value string) {
			f.Found = "event triggers can be installed"
			if value != "true" {
				f.Found = "the service role is none, so there are no event triggers"
				f.note("nothing has to be done: DDL on logs and captured tables is noticed within seconds instead of at once")
			}
		}),
		checkEvalRole(ctx, conn, role),
		checkConnections(ctx, conn, c),
	)
	if proxy.AuthMode(c.Proxy.Auth) == proxy.AuthSCRAM {
		findings = append(findings, checkVerifiers(ctx, conn, c.Postgres.Databases[0]))
	}
	return findings
}

// checkFree looks whether as many of something are free as databases lack one: those whose slot exists, or is being read, have theirs.
func checkFree(ctx context.Context, conn *pgx.Conn, c *config, check, setting, used string) finding {
	having := "s.slot_name IS NOT NULL"
	if setting == "max_wal_senders" {
		having = "s.active"
	}
	sql := `SELECT concat_ws(' ', current_setting($1)::int - (` + used + `), (SELECT count(*) FROM pg_database d
		LEFT JOIN pg_replication_slots s ON s.slot_name = 'koldproxy_' || d.oid WHERE d.datname = ANY ($2) AND ` + having + ` IS NOT TRUE), current_setting($1))`
	return ask(ctx, conn, finding{Check: check}, sql, func(f *finding, value string) {
		var free, needed, limit int
		if _, err := fmt.Sscan(value, &free, &needed, &limit); err != nil {
			f.problem("cannot be read: %v", err)
			return
		}
		f.Found = fmt.Sprintf("%d free, %d needed", free, needed)
		if free < needed {
			f.problem("ALTER SYSTEM SET %s = %d; and restart the server", setting, limit+needed-free)
		}
	}, setting, c.Postgres.Databases)
}

// clockTolerance is how far the clocks may be apart before lag in seconds means little.
const clockTolerance = 2 * time.Second

func checkClock(ctx context.Context, conn *pgx.Conn) finding {
	f := finding{Check: "clock", Result: resultOK}
	begin := time.Now()
	var server time.Time
	if err := conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&server); err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
		return f
	}
	middle := begin.Add(time.Since(begin) / 2)
	off := server.Sub(middle).Round(10 * time.Millisecond)
	f.Found = fmt.Sprintf("the server's is %v off", off.Abs())
	if off.Abs() > clockTolerance {
		f.note("set both by NTP: lag in seconds is wrong by that much, and object stores refuse requests that are minutes off. Positions do not depend on it")
	}
	return f
}

// checkVerifiers looks whether auth = "scram" can work.
func checkVerifiers(ctx context.Context, conn *pgx.Conn, database string) finding {
	const readable = `SELECT (has_column_privilege('pg_catalog.pg_authid', 'rolname', 'SELECT')
		AND has_column_privilege('pg_catalog.pg_authid', 'rolpassword', 'SELECT'))::text`
	return ask(ctx, conn, finding{Check: "password verifiers", Database: database}, readable, func(f *finding, value string) {
		f.Found = "readable: " + value
		if value != "true" {
			f.problem("%s", verifierRemedy(database))
		}
	})
}
