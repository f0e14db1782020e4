package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/coldstore"
)

// The results of a check. A note is worth knowing and no reason to fail.
const (
	resultOK      = "ok"
	resultNote    = "note"
	resultProblem = "problem"
)

// finding is the outcome of one check.
type finding struct {
	Check    string `json:"check"`
	Database string `json:"database,omitempty"` // "" for what concerns the whole server, or koldproxy's machine
	Result   string `json:"result"`
	Found    string `json:"found"`
	// Remedy is what to do about a problem or a note: a statement, a setting, or a sentence.
	Remedy string `json:"remedy,omitempty"`
}

func newCheckCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "check [TABLE…]",
		Short: "look whether server, databases and cold store are fit for koldproxy, and whether tables can be captured",
		Long: `check looks at everything that koldproxy needs and changes nothing. Each line is ok, a note, or a PROBLEM with what to do about it.
With names of tables it also says of each whether streams and feeds can be made of it; those of the database in --database are meant.

The exit code is 0 without problems, 1 with some, and 2 when the configuration itself cannot be used.`,
		Example: `  koldproxy check --config koldproxy.toml
  koldproxy check --config koldproxy.toml orders app.messages
  koldproxy check --config koldproxy.toml --json | jq '.[] | select(.result == "problem")'`,
		RunE: func(cmd *cobra.Command, tables []string) error {
			c, err := loadValid(opts)
			if err != nil {
				return err
			}
			database := a.database
			if database != "" && !slices.Contains(c.Postgres.Databases, database) {
				return usageError{fmt.Errorf("--database %s: not one of postgres.databases (%s)", database, strings.Join(c.Postgres.Databases, ", "))}
			}
			if len(tables) > 0 {
				if _, database, err = a.config(); err != nil {
					return err
				}
			}
			return report(cmd.OutOrStdout(), preflight(cmd.Context(), c, database, tables), a.json)
		},
	}
	a.flags(cmd)
	return cmd
}

// report prints findings; problems among them are its error.
func report(out io.Writer, findings []finding, asJSON bool) error {
	problems := 0
	for _, f := range findings {
		if f.Result == resultProblem {
			problems++
		}
	}
	var err error
	if asJSON {
		err = printJSON(out, findings)
	} else {
		err = printFindings(out, findings)
	}
	if err == nil && problems > 0 {
		err = fmt.Errorf("%d of %d checks found a problem", problems, len(findings))
	}
	return err
}

func printFindings(out io.Writer, findings []finding) error {
	for _, f := range findings {
		result := f.Result
		if result == resultProblem {
			result = "PROBLEM"
		}
		name := f.Check
		if f.Database != "" {
			name += " (" + f.Database + ")"
		}
		text := fmt.Sprintf("%-8s %-32s %s\n", result, name, strings.Join(strings.Fields(f.Found), " "))
		for line := range strings.Lines(f.Remedy) {
			text += "         → " + strings.TrimSuffix(line, "\n") + "\n"
		}
		if _, err := io.WriteString(out, text); err != nil {
			return err
		}
	}
	return nil
}

// preflight makes every check; one that cannot be made is a problem too. tables are in database.
func preflight(ctx context.Context, c *config, database string, tables []string) []finding {
	findings := []finding{checkCold(ctx, c)}
	findings = append(findings, checkCertificates(c)...)
	findings = append(findings, checkSockets(ctx, c)...)
	findings = append(findings, checkSessions(ctx, c)...)
	for i, name := range c.Postgres.Databases {
		conn, err := c.connect(ctx, name)
		if err != nil {
			f := finding{Check: "connection", Database: name, Found: err.Error()}
			f.problem("%s", c.serviceRemedy(ctx, err, name))
			findings = append(findings, f)
			continue
		}
		if f := checkDirect(ctx, conn, name); f.Result != resultOK { // the rest would be about the pooler
			findings = append(findings, f)
			_ = conn.Close(context.WithoutCancel(ctx))
			continue
		}
		fit := true
		if i == 0 {
			server := checkServer(ctx, conn, c)
			for _, f := range server {
				fit = fit && (f.Result != resultProblem || f.Check != "version" && f.Check != "primary")
			}
			findings = append(findings, server...)
		}
		if fit { // what follows cannot even be asked of another server
			findings = append(findings, checkDatabase(ctx, conn, c, name)...)
			if name == database {
				for _, table := range tables {
					findings = append(findings, checkTable(ctx, conn, name, table))
				}
			}
		}
		_ = conn.Close(context.WithoutCancel(ctx))
		if !fit {
			break
		}
	}
	return findings
}

// connectRemedy says what to do when the service connection cannot be made.
func connectRemedy(err error, database string) string {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case !ok:
		return "start the server, or correct the host and port in postgres.dsn"
	case pe.Code == "28000" && strings.Contains(pe.Message, "pg_hba.conf"):
		return hbaRemedy(database, pe.Message)
	case pe.Code == "28000":
		return "create the role, and let it log in: koldproxy init writes the SQL"
	case pe.Code == "28P01":
		return "correct the password in postgres.password_file or postgres.dsn, or create the role: koldproxy init writes the SQL"
	case pe.Code == codeNoDatabase:
		return fmt.Sprintf("CREATE DATABASE %s; or correct postgres.databases", pgx.Identifier{database}.Sanitize())
	case pe.Code == "42501":
		return fmt.Sprintf("GRANT CONNECT ON DATABASE %s TO %s;", pgx.Identifier{database}.Sanitize(), pgx.Identifier{roleOf(err)}.Sanitize())
	case pe.Code == "53300" && strings.HasPrefix(pe.Message, "too many connections for role"):
		return fmt.Sprintf("ALTER ROLE %s CONNECTION LIMIT -1;", pgx.Identifier{roleOf(err)}.Sanitize())
	case pe.Code == "53300" && strings.HasPrefix(pe.Message, "too many connections for database"):
		return fmt.Sprintf("ALTER DATABASE %s CONNECTION LIMIT -1;", pgx.Identifier{database}.Sanitize())
	case pe.Code == "08P01" && strings.Contains(pe.Message, "startup parameter"):
		return poolerRemedy
	case pe.Code == "53300":
		return "raise max_connections, and restart the server"
	}
	return "see the error"
}

// roleOf is the role that could not connect.
func roleOf(err error) string {
	if failed, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return failed.Config.User
	}
	return "the service role"
}

// codeNoDatabase is invalid_catalog_name.
const codeNoDatabase = "3D000"

// connectHint is what to do about an error of work that begins with connecting.
func connectHint(err error, database string) string {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return connectRemedy(err, database)
	}
	return "koldproxy check says what the server lacks"
}

// hbaRemedy is the line that pg_hba.conf lacks. message is PostgreSQL's, with the client's address and role.
func hbaRemedy(database, message string) string {
	host, role := "ADDRESS/MASK", "ROLE"
	if _, rest, ok := strings.Cut(message, `host "`); ok {
		host, rest, _ = strings.Cut(rest, `"`)
		if _, rest, ok = strings.Cut(rest, `user "`); ok {
			role, _, _ = strings.Cut(rest, `"`)
		}
		host += map[bool]string{true: "/128", false: "/32"}[strings.Contains(host, ":")]
	}
	return fmt.Sprintf("add to pg_hba.conf: host  %s  %s  %s  scram-sha-256\nand then, as a superuser: SELECT pg_reload_conf();",
		pgx.Identifier{database}.Sanitize(), pgx.Identifier{role}.Sanitize(), host)
}

// checkCold stores, reads and removes an object where segments will be. A folder that serve will make is left for it to make.
func checkCold(ctx context.Context, c *config) finding {
	f := finding{Check: "cold store", Result: resultOK, Found: "write, read and remove work in " + c.Cold.URL}
	bucket, err := openCold(ctx, c)
	if local, ok := bucket.(*coldstore.LocalBucket); ok && errors.Is(local.CheckFolder(), fs.ErrNotExist) {
		return checkColdFolder(ctx, c, f)
	}
	if err == nil {
		folder := missingFolder(c.Cold.URL, "check")
		err = errors.Join(coldstore.RoundTrip(ctx, bucket), closeCold(bucket))
		if folder != "" {
			_ = os.Remove(folder) // which takes it only while it is empty
		}
	}
	if err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, c.Cold.URL+": "+err.Error(), "make cold.url a place that koldproxy may write to"
	}
	return f
}

// missingFolder is the path of a folder in a file URL that is not there yet, or "".
func missingFolder(where, name string) string {
	u, err := url.Parse(where)
	if err != nil || u.Scheme != "file" {
		return ""
	}
	folder := filepath.Join(u.Path, name)
	if _, err := os.Lstat(folder); !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return folder
}

// checkColdFolder judges a folder that is not there.
func checkColdFolder(ctx context.Context, c *config, f finding) finding {
	f.Found = c.Cold.URL + " does not exist yet, and koldproxy serve makes it"
	switch why := checkColdUnused(ctx, c); {
	case errors.Is(why, coldstore.ErrInUse):
		f.Found = c.Cold.URL + " does not exist, and segments should be in it: " + why.Error()
		f.problem("mount the volume, restore the folder from a copy, or correct cold.url")
	case why != nil:
		f.Found = c.Cold.URL + " does not exist, and whether segments should be in it cannot be asked: " + why.Error()
		f.problem("correct the connection first")
	default:
		if err := checkMakeable(c.Cold.URL); err != nil {
			f.Found = c.Cold.URL + " does not exist yet: " + err.Error()
			f.problem("make the folder, and koldproxy's user its owner; or make cold.url a place that koldproxy may write to")
		}
	}
	return f
}

// checkMakeable says whether the folder of a URL could be made: it makes and removes one where it would begin.
func checkMakeable(where string) error {
	u, err := url.Parse(where)
	if err != nil {
		return err
	}
	folder := u.Path
	for {
		if _, err := os.Lstat(folder); !errors.Is(err, fs.ErrNotExist) || folder == filepath.Dir(folder) {
			break
		}
		folder = filepath.Dir(folder)
	}
	trial, err := os.MkdirTemp(folder, ".koldproxy-check-")
	if err != nil {
		return err
	}
	return os.Remove(trial)
}

// ask runs a query with one text result for a finding, and turns an error into one.
func ask(ctx context.Context, conn *pgx.Conn, f finding, sql string, judge func(f *finding, value string), args ...any) finding {
	var value string
	f.Result = resultOK
	if err := conn.QueryRow(ctx, sql, args...).Scan(&value); err != nil {
		f.Result, f.Found, f.Remedy = resultProblem, err.Error(), "see the error"
		return f
	}
	f.Found = value
	judge(&f, value)
	return f
}

// problem and note are how judges of ask say no.
func (f *finding) problem(format string, args ...any) {
	f.Result, f.Remedy = resultProblem, fmt.Sprintf(format, args...)
}

func (f *finding) note(format string, args ...any) {
	f.Result, f.Remedy = resultNote, fmt.Sprintf(format, args...)
}
