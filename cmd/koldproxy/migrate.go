package main

import (
	"context"
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
	down := &cobra.Command{
		Use:   "down",
		Short: "go back to an older version of the catalog; version 0 removes streams, mirrors and everything else",
		Args:  arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("to") {
				return usageError{fmt.Errorf("say --to VERSION; --to 0 removes streams, mirrors and everything else")}
			}
			return eachDatabase(cmd, opts, func(ctx context.Context, c *config, name string) error {
				return migrateDown(ctx, c, name, to)
			})
		},
	}
	down.Flags().Int32Var(&to, "to", 0, "the `VERSION` to go back to")
	cmd.AddCommand(down,
		&cobra.Command{
			Use:   "up",
			Short: "install the catalog or bring it to the version of this binary",
			Args:  arguments(cobra.NoArgs),
			RunE:  func(cmd *cobra.Command, _ []string) error { return eachDatabase(cmd, opts, migrateUp) },
		},
		newMigrateStatusCommand(opts))
	return cmd
}

func newMigrateStatusCommand(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show the version of the catalog in each database",
		Args:  arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
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
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
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
	return migrations.Up(ctx, conn)
}

func migrateDown(ctx context.Context, c *config, database string, to int32) error {
	conn, err := c.connect(ctx, database)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return migrations.Down(ctx, conn, to)
}
