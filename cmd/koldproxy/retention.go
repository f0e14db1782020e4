package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func newRetentionCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "retention TABLE AGE",
		Short: `set how long the changes of a managed table are kept, as in "30 days"; "none" keeps them for ever`,
		Example: `  koldproxy retention app.messages '30 days' --config koldproxy.toml
  koldproxy retention app.messages none --config koldproxy.toml`,
		Args: arguments(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			oid, err := resolveTable(ctx, conn, args[0])
			if err != nil {
				return err
			}
			age := &args[1]
			if *age == "none" {
				age = nil
			}
			var changed bool
			if err := conn.QueryRow(ctx, "SELECT koldstore.set_retention($1::oid::regclass, $2::text::interval)", oid, age).Scan(&changed); err != nil {
				return fmt.Errorf("set the retention of %s: %w", args[0], err)
			}
			if a.json {
				return printJSON(cmd.OutOrStdout(), map[string]any{"table": args[0], "retention": age, "changed": changed})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: retention %s\n", args[0], args[1])
			return err
		},
	}
	a.flags(cmd)
	return cmd
}
