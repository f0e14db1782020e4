package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// healed is what `heal` answers. Job is nil where nothing was asked of a single table.
type healed struct {
	Table string  `json:"table,omitempty"`
	Began bool    `json:"began"`
	Job   *string `json:"job_id,omitempty"`
}

func newHealCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "heal [TABLE]",
		Short: "close the gap that koldproxy has stopped at, or compare the feed of one table with the table",
		Long: `Without a TABLE: let a koldproxy that has stopped at a gap ([apply] on_gap = "stop") make a new slot and go on. Feeds are compared
with their tables; streams show a hole. With a TABLE: compare one feed with its table at any time, also to bring back one that is
broken. Either is done by the running koldproxy; list_jobs() shows how far it is.`,
		Example: `  koldproxy heal --config koldproxy.toml
  koldproxy heal app.messages --config koldproxy.toml`,
		Args: arguments(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			h, err := heal(ctx, conn, args)
			if err != nil {
				return err
			}
			if a.json {
				return printJSON(cmd.OutOrStdout(), h)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), h)
			return err
		},
	}
	a.flags(cmd)
	return cmd
}

func heal(ctx context.Context, conn *pgx.Conn, tables []string) (h healed, err error) {
	if len(tables) == 0 {
		if err := conn.QueryRow(ctx, `SELECT koldstore.heal_gap()`).Scan(&h.Began); err != nil {
			return h, fmt.Errorf("close the gap: %w", err)
		}
		return h, nil
	}
	h.Table = tables[0]
	oid, err := resolveTable(ctx, conn, h.Table)
	if err != nil {
		return h, err
	}
	if err := conn.QueryRow(ctx, `SELECT koldstore.heal_table($1::oid::regclass)::text`, oid).Scan(&h.Job); err != nil {
		return h, fmt.Errorf("heal %s: %w", h.Table, err)
	}
	h.Began = true
	return h, nil
}

func (h healed) String() string {
	switch {
	case h.Job != nil:
		return fmt.Sprintf("%s: job %s compares it with its table", h.Table, *h.Job)
	case h.Began:
		return "the gap is being closed; koldproxy gaps shows it as closed once a running koldproxy has a new slot"
	default:
		return "there is no open gap"
	}
}
