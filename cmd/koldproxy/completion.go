package main

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// completionTimeout is how long a person waits for suggestions; without a server there are none.
const completionTimeout = 2 * time.Second

// The names that can follow a command, as SQL has them.
const (
	capturableTables = `SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition AND relpersistence = 'p'
		AND relnamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname LIKE 'pg\_%' OR nspname IN ('information_schema', 'koldstore')) ORDER BY 1`
	managedTables = `SELECT quote_ident(schema_name) || '.' || quote_ident(table_name) FROM koldstore.managed_table ORDER BY 1`
	streamNames   = `SELECT quote_ident(schema_name) || '.' || quote_ident(name) FROM koldstore.stream ORDER BY 1`
)

// completeNames lets the shell suggest tables, streams and keys.
func completeNames(root *cobra.Command, opts *options) error {
	for name, sql := range map[string]string{
		"check": capturableTables, "flush": managedTables, "heal": managedTables, "retention": managedTables, "segments": managedTables,
		"verify": managedTables, "tail": streamNames,
	} {
		cmd, _, err := root.Find([]string{name})
		if err != nil {
			return err
		}
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 && name != "check" {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			found, _ := listNames(cmd.Context(), opts, cmd.Flag("database").Value.String(), sql) // nothing is better than an error here
			return slices.DeleteFunc(found, func(n string) bool { return slices.Contains(args, n) }), cobra.ShellCompDirectiveNoFileComp
		}
	}
	return root.RegisterFlagCompletionFunc("set", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var keys []string
		for _, f := range defaultConfig().fields() {
			keys = append(keys, f.key+"=")
		}
		return keys, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	})
}

func listNames(ctx context.Context, opts *options, database, sql string) ([]string, error) {
	c, err := loadConfig(opts, os.Environ())
	if err != nil {
		return nil, err
	}
	if database == "" && len(c.Postgres.Databases) > 0 {
		database = c.Postgres.Databases[0]
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	conn, err := c.connect(ctx, database)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// strictCompletion has cobra's completion command refuse shells that it does not know, as every other command refuses its arguments. The
// scripts are written to where root's output goes at this moment.
func strictCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args = arguments(cobra.NoArgs)
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
}
