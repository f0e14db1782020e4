package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// gapRow is one time for which changes may be missing, as `gaps` shows it. One that nobody has closed has no end yet.
type gapRow struct {
	Noticed time.Time  `db:"noticed_at" json:"noticed_at"`
	Table   *string    `db:"table_name" json:"table"` // nil: all of them
	Open    bool       `db:"open" json:"open"`
	From    *string    `db:"from_lsn" json:"from_lsn"`
	To      *string    `db:"to_lsn" json:"to_lsn"`
	Since   *time.Time `db:"from_time" json:"from_time"`
	Until   *time.Time `db:"to_time" json:"to_time"`
	Reason  string     `db:"reason" json:"reason"`
}

const gapsSQL = `SELECT coalesce(gap_at, now()) AS noticed_at, NULL AS table_name, true AS open, applied_lsn::text AS from_lsn, NULL AS to_lsn,
		applied_at AS from_time, NULL::timestamptz AS to_time, gap AS reason
	FROM koldstore.checkpoint WHERE gap IS NOT NULL
	UNION ALL
	SELECT noticed_at, table_oid::regclass::text, false, from_lsn::text, to_lsn::text, from_time, to_time, reason FROM koldstore.gap
	ORDER BY open, noticed_at`

func newGapsCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "gaps",
		Short: "list the times for which changes may be missing, oldest first, and how to close one that is open",
		Example: `  koldproxy gaps --config koldproxy.toml
  koldproxy gaps --json --config koldproxy.toml | jq 'map(select(.open))'`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			rows, err := conn.Query(ctx, gapsSQL)
			if err != nil {
				return fmt.Errorf("list gaps: %w", err)
			}
			gaps, err := pgx.CollectRows(rows, pgx.RowToStructByName[gapRow])
			if err != nil {
				return fmt.Errorf("list gaps: %w", err)
			}
			if a.json {
				return printJSON(cmd.OutOrStdout(), gaps)
			}
			return printGaps(cmd, gaps)
		},
	}
	a.flags(cmd)
	return cmd
}

func printGaps(cmd *cobra.Command, gaps []gapRow) error {
	t, open := newTable(cmd.OutOrStdout(), "NOTICED", "TABLE", "STATE", "FROM", "TO", "REASON"), false
	for _, g := range gaps {
		name, state := "(all)", "closed"
		if g.Table != nil {
			name = *g.Table
		}
		if g.Open {
			state, open = "open", true
		}
		t.row(g.Noticed.UTC().Format(time.RFC3339), name, state, orDash(g.From), orDash(g.To), g.Reason)
	}
	if err := t.flush(); err != nil || !open {
		return err
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), "\nNothing is applied until the open one is closed: koldproxy heal")
	return err
}
