package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/migrations"
)

func newMigrateCommand(opts *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "install, update, remove or look at the catalog (schema koldstore) of every configured database",
		Args:  arguments(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var to int32
	var asJSON bool
	down := &cobra.Command{
		Use:   "down",
		Short: "go back to an older version of the catalog; version 0 removes streams, mirrors and everything else",
		Example: `  koldproxy migrate down --to 10 --config koldproxy.toml
  koldproxy migrate down --to 0 --config koldproxy.toml   # koldproxy leaves the database`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("to") {
				return usageError{fmt.Errorf("say --to VERSION; --to 0 removes streams, mirrors and everything else")}
			}
			return migrateEach(cmd, opts, asJSON, func(ctx context.Context, c *config, name string) error {
				return migrateDown(ctx, c, name, to)
			})
		},
	}
	down.Flags().Int32Var(&to, "to", 0, "the `VERSION` to go back to")
	up := &cobra.Command{
		Use:     "up",
		Short:   "install the catalog or bring it to the version of this binary",
		Example: "  koldproxy migrate up --config koldproxy.toml",
		Args:    arguments(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return migrateEach(cmd, opts, asJSON, migrateUp) },
	}
	for _, c := range []*cobra.Command{up, down} {
		c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	}
	cmd.AddCommand(down, up, newMigrateStatusCommand(opts))
	return cmd
}

// migrateEach migrates every configured database and then says where each stands.
func migrateEach(cmd *cobra.Command, opts *options, asJSON bool, migrate func(ctx context.Context, c *config, database string) error) error {
	if err := eachDatabase(cmd, opts, migrate); err != nil {
		return err
	}
	return printVersions(cmd, opts, asJSON)
}

func newMigrateStatusCommand(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show the version of the catalog in each database",
		Example: `  koldproxy migrate status --config koldproxy.toml
  koldproxy migrate status --json --config koldproxy.toml`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return printVersions(cmd, opts, asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printVersions(cmd *cobra.Command, opts *options, asJSON bool) error {
	states := map[string]migrations.State{}
	t := newTable(cmd.OutOrStdout(), "DATABASE", "VERSION", "NEWEST")
	err := eachDatabase(cmd, opts, func(ctx context.Context, c *config, name string) error {
		conn, err := c.connect(ctx, name)
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		state, err := migrations.Status(ctx, conn)
		states[name] = state
		t.row(name, strconv.Itoa(int(state.Version)), strconv.Itoa(int(state.Newest)))
		return err
	})
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), states)
	}
	return t.flush()
}

// eachDatabase calls do for every configured database, in order, until one fails.
func eachDatabase(cmd *cobra.Command, opts *options, do func(ctx context.Context, c *config, database string) error) error {
	c, err := loadValid(opts)
	if err != nil {
		return err
	}
	for _, name := range c.Postgres.Databases {
		if err := do(cmd.Context(), c, name); err != nil {
			return fmt.Errorf("database %s: %w", name, err)
		}
	}
	return nil
}

func migrateUp(ctx context.Context, c *config, database string) error {
	conn, err := c.connect(ctx, database)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if conn.PgConn().ParameterStatus("in_hot_standby") == "on" { // which cannot be written to, not even "IF NOT EXISTS"
		return errStandby
	}
	rights, remedy, err := evalRights(ctx, conn)
	if err != nil {
		return err
	}
	if rights != "" {
		return fmt.Errorf("code of users would run with rights: %s %s; %s", evalRole, rights, remedy)
	}
	return migrations.Up(ctx, conn)
}

// errStandby may pass: standbys are promoted.
var errStandby = errors.New("the server is a standby; " + standbyRemedy)

func migrateDown(ctx context.Context, c *config, database string, to int32) error {
	conn, err := c.connect(ctx, database)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if to > 0 {
		return migrations.Down(ctx, conn, to)
	}
	// The slot goes along: nobody would read it any more, and the server would keep its log for it until the disk is full.
	const slot = ` FROM pg_catalog.pg_replication_slots s JOIN pg_catalog.pg_database d ON d.datname = current_database() WHERE s.slot_name = 'koldproxy_' || d.oid`
	var active bool
	if err := conn.QueryRow(ctx, "SELECT coalesce(bool_or(s.active), false)"+slot).Scan(&active); err != nil {
		return fmt.Errorf("look for the replication slot: %w", err)
	}
	if active {
		return errors.New("its changes are being applied; stop koldproxy first")
	}
	if err := migrations.Down(ctx, conn, 0); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "SELECT pg_catalog.pg_drop_replication_slot(s.slot_name)"+slot); err != nil {
		return fmt.Errorf("drop the replication slot: %w", err)
	}
	return nil
}
