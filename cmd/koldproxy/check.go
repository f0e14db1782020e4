package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
	"github.com/koldproxy/koldproxy/proxy"
	"github.com/koldproxy/koldproxy/walapply"
)

// finding is the outcome of one preflight.
type finding struct {
	Subject string `json:"subject"`
	OK      bool   `json:"ok"`
	Text    string `json:"text"`
	// Remedy is what to do about a problem.
	Remedy string `json:"remedy,omitempty"`
}

func newCheckCommand(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "look whether the server, the databases and the cold store are fit for koldproxy",
		Args:  arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadValid(opts)
			if err != nil {
				return err
			}
			findings := preflight(cmd.Context(), c)
			problems := 0
			for _, f := range findings {
				if !f.OK {
					problems++
				}
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), findings)
			} else {
				err = printFindings(cmd, findings)
			}
			if err == nil && problems > 0 {
				err = fmt.Errorf("%d of %d checks found a problem", problems, len(findings))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printFindings(cmd *cobra.Command, findings []finding) error {
	t := newTable(cmd.OutOrStdout(), "CHECK", "RESULT", "FOUND", "WHAT TO DO")
	for _, f := range findings {
		result := "ok"
		if !f.OK {
			result = "PROBLEM"
		}
		t.row(f.Subject, result, f.Text, f.Remedy)
	}
	return t.flush()
}

// preflight runs every check; one that cannot be made is a problem too.
func preflight(ctx context.Context, c *config) []finding {
	findings := []finding{checkCold(ctx, c)}
	for _, name := range c.Postgres.Databases {
		conn, err := c.connect(ctx, name)
		if err != nil {
			findings = append(findings, finding{
				Subject: "connect " + name, Text: err.Error(),
				Remedy: "correct postgres.dsn or start the server",
			})
			continue
		}
		if name == c.Postgres.Databases[0] {
			findings = append(findings, checkServer(ctx, conn)...)
			if proxy.AuthMode(c.Proxy.Auth) == proxy.AuthSCRAM {
				findings = append(findings, checkVerifiers(ctx, conn, name))
			}
		}
		findings = append(findings, checkDatabase(ctx, conn, name)...)
		_ = conn.Close(context.WithoutCancel(ctx))
	}
	return findings
}

// ask runs a query with one text result and turns an error into a finding.
func ask(ctx context.Context, conn *pgx.Conn, subject, sql string, judge func(value string) finding) finding {
	var value string
	if err := conn.QueryRow(ctx, sql).Scan(&value); err != nil {
		return finding{Subject: subject, Text: err.Error(), Remedy: "see the error"}
	}
	f := judge(value)
	f.Subject = subject
	if f.OK {
		f.Remedy = ""
	}
	return f
}

func checkServer(ctx context.Context, conn *pgx.Conn) []finding {
	free := func(setting string) func(string) finding {
		return func(value string) finding {
			n, _ := strconv.Atoi(value)
			return finding{OK: n > 0, Text: value + " free", Remedy: "raise " + setting + " and restart the server"}
		}
	}
	return []finding{
		ask(ctx, conn, "version", "SELECT current_setting('server_version_num')", func(value string) finding {
			n, _ := strconv.Atoi(value)
			return finding{
				OK: n/10000 >= localpg.MinMajor, Text: fmt.Sprintf("PostgreSQL %d.%d", n/10000, n%10000),
				Remedy: fmt.Sprintf("use PostgreSQL %d or later", localpg.MinMajor),
			}
		}),
		ask(ctx, conn, "wal_level", "SELECT current_setting('wal_level')", func(value string) finding {
			return finding{OK: value == "logical", Text: value, Remedy: "set wal_level = logical and restart the server"}
		}),
		ask(ctx, conn, "replication slots", `SELECT (current_setting('max_replication_slots')::int
			- (SELECT count(*) FROM pg_replication_slots WHERE slot_name NOT LIKE 'koldproxy\_%'))::text`, free("max_replication_slots")),
		ask(ctx, conn, "wal senders", `SELECT (current_setting('max_wal_senders')::int
			- (SELECT count(*) FROM pg_stat_replication WHERE application_name NOT LIKE 'koldproxy%'))::text`, free("max_wal_senders")),
		ask(ctx, conn, "replication right", "SELECT (rolreplication OR rolsuper)::text FROM pg_roles WHERE rolname = current_user", func(value string) finding {
			return finding{OK: value == "true", Text: value, Remedy: "ALTER ROLE … REPLICATION for the service role"}
		}),
	}
}

// checkVerifiers looks whether auth = "scram" can work.
func checkVerifiers(ctx context.Context, conn *pgx.Conn, database string) finding {
	const readable = `SELECT (has_column_privilege('pg_catalog.pg_authid', 'rolname', 'SELECT')
		AND has_column_privilege('pg_catalog.pg_authid', 'rolpassword', 'SELECT'))::text`
	return ask(ctx, conn, "password verifiers", readable, func(value string) finding {
		return finding{OK: value == "true", Text: "readable: " + value, Remedy: verifierRemedy(database)}
	})
}

func checkDatabase(ctx context.Context, conn *pgx.Conn, name string) []finding {
	catalog := finding{Subject: "catalog of " + name, Remedy: "koldproxy migrate up, or start koldproxy serve"}
	state, err := migrations.Status(ctx, conn)
	if err != nil {
		catalog.Text = err.Error()
	} else {
		catalog.OK = state.Version == state.Newest
		catalog.Text = fmt.Sprintf("version %d of %d", state.Version, state.Newest)
	}
	if catalog.OK {
		catalog.Remedy = ""
	}
	findings := []finding{
		ask(ctx, conn, "create in "+name, "SELECT has_database_privilege(current_database(), 'CREATE')::text", func(value string) finding {
			return finding{OK: value == "true", Text: value, Remedy: "GRANT CREATE ON DATABASE … to the service role"}
		}),
		catalog,
	}
	if catalog.OK {
		findings = append(findings, checkApplying(ctx, conn, name)...)
	}
	return findings
}

// checkApplying looks at checkpoint, slot and publication.
func checkApplying(ctx context.Context, conn *pgx.Conn, name string) []finding {
	subject := "applying in " + name
	problems, err := walapply.Inspect(ctx, conn, walapply.DefaultConfig("").Publication)
	if err != nil {
		return []finding{{Subject: subject, Text: err.Error(), Remedy: "see the error"}}
	}
	if len(problems) == 0 {
		return []finding{{Subject: subject, OK: true, Text: "checkpoint, slot and publication fit"}}
	}
	findings := make([]finding, len(problems))
	for i, p := range problems {
		findings[i] = finding{Subject: subject, Text: p.Problem, Remedy: p.Hint}
	}
	return findings
}

// checkCold stores, reads and removes an object where segments will be.
func checkCold(ctx context.Context, c *config) finding {
	f := finding{Subject: "cold store", Remedy: "make cold.url a place that koldproxy may write to"}
	bucket, err := openCold(ctx, c)
	if err == nil {
		err = errors.Join(coldstore.RoundTrip(ctx, bucket), closeCold(bucket))
	}
	if err != nil {
		f.Text = err.Error()
		return f
	}
	return finding{Subject: f.Subject, OK: true, Text: "write, read and remove work in " + c.Cold.URL}
}
