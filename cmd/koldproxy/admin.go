package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// loadValid reads the configuration and refuses one that cannot be used.
func loadValid(opts *options) (*config, error) {
	c, err := loadConfig(opts, os.Environ())
	if err != nil {
		return nil, err
	}
	c.again = func() (*config, error) { return loadValid(opts) }
	return c, c.validate()
}

// connect opens the service connection to a database, within proxy.connect_timeout for each of its servers.
func (c *config) connect(ctx context.Context, database string) (*pgx.Conn, error) {
	cc, err := c.pgxConfig(database)
	if err != nil {
		return nil, err
	}
	cc.ConnectTimeout = min(cc.ConnectTimeout, time.Duration(c.Proxy.ConnectTimeout))
	conn, err := pgx.ConnectConfig(ctx, cc)
	if err != nil {
		return nil, fmt.Errorf("connect to database %s: %w", database, err)
	}
	return conn, nil
}

// admin is what the commands that work on one database share.
type admin struct {
	opts     *options
	database string
	json     bool
}

func (a *admin) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.database, "database", "", "the database; needed only when the configuration names several")
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON")
}

// config reads the configuration and decides which database is meant.
func (a *admin) config() (c *config, database string, err error) {
	if c, err = loadValid(a.opts); err != nil {
		return nil, "", err
	}
	if a.database != "" {
		return c, a.database, nil
	}
	if len(c.Postgres.Databases) != 1 {
		return nil, "", usageError{fmt.Errorf("say --database: the configuration names %d", len(c.Postgres.Databases))}
	}
	return c, c.Postgres.Databases[0], nil
}

// open connects to the database that is meant.
func (a *admin) open(ctx context.Context) (*pgx.Conn, error) {
	c, database, err := a.config()
	if err != nil {
		return nil, err
	}
	return c.connect(ctx, database)
}

// resolveTable turns the name of a managed table, as SQL spells it, into its OID.
func resolveTable(ctx context.Context, conn *pgx.Conn, name string) (oid uint32, err error) {
	var known *uint32
	if err := conn.QueryRow(ctx, "SELECT to_regclass($1)::oid", name).Scan(&known); err != nil {
		return 0, fmt.Errorf("look for table %s: %w", name, err)
	}
	if known == nil {
		return 0, fmt.Errorf("table %s does not exist", name)
	}
	return *known, nil
}

// printJSON writes one value for machines.
func printJSON(out io.Writer, v any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(v)
}

// table writes aligned columns for people.
type table struct {
	w    *tabwriter.Writer
	errs []error
}

func newTable(out io.Writer, header ...string) *table {
	t := &table{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) {
	_, err := fmt.Fprintln(t.w, strings.Join(cells, "\t"))
	t.errs = append(t.errs, err)
}

func (t *table) flush() error { return errors.Join(errors.Join(t.errs...), t.w.Flush()) }

// orDash shows what may be absent.
func orDash[T any](v *T) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}
