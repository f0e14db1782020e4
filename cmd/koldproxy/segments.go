package main

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy"
)

// segmentRow is one cold segment, as `segments` shows it.
type segmentRow struct {
	Segment    string    `db:"segment_id" json:"segment"`
	State      string    `db:"state" json:"state"`
	Storage    string    `db:"storage" json:"storage"`
	MinSeq     *int64    `db:"min_seq" json:"min_seq"`
	MaxSeq     *int64    `db:"max_seq" json:"max_seq"`
	Rows       int64     `db:"row_count" json:"rows"`
	DeadRows   int64     `db:"dead_count" json:"dead_rows"`
	Tombstones int64     `db:"tombstones" json:"tombstones"`
	Bytes      int64     `db:"size_bytes" json:"bytes"`
	Created    time.Time `db:"created_at" json:"created_at"`
}

func newSegmentsCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "segments TABLE",
		Short: "list the cold segments of a managed table, oldest first",
		Example: `  koldproxy segments app.messages --config koldproxy.toml
  koldproxy segments app.messages --json --config koldproxy.toml | jq 'map(.bytes) | add'`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(ctx)
			oid, err := resolveTable(ctx, conn, args[0])
			if err != nil {
				return err
			}
			rows, err := conn.Query(ctx, `SELECT segment_id::text, state, storage, min_seq, max_seq, row_count, dead_count,
				tombstones, size_bytes, created_at FROM koldstore.segment WHERE table_oid = $1 ORDER BY min_seq NULLS LAST, created_at`, oid)
			if err != nil {
				return err
			}
			segments, err := pgx.CollectRows(rows, pgx.RowToStructByName[segmentRow])
			if err != nil {
				return fmt.Errorf("list segments: %w", err)
			}
			if len(segments) == 0 { // a table that is not managed any more may have left some
				var managed bool
				if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM koldstore.managed_table WHERE table_oid = $1)`, oid).Scan(&managed); err != nil {
					return fmt.Errorf("look for the feed of %s: %w", args[0], err)
				}
				if !managed {
					return koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "table %q is not managed by koldstore", args[0])
				}
			}
			if a.json {
				return printJSON(cmd.OutOrStdout(), segments)
			}
			t := newTable(cmd.OutOrStdout(), "SEGMENT", "STATE", "MIN SEQ", "MAX SEQ", "ROWS", "DEAD", "TOMBSTONES", "BYTES", "CREATED")
			for _, s := range segments {
				t.row(s.Segment, s.State, orDash(s.MinSeq), orDash(s.MaxSeq), fmt.Sprint(s.Rows), fmt.Sprint(s.DeadRows),
					fmt.Sprint(s.Tombstones), fmt.Sprint(s.Bytes), s.Created.UTC().Format(time.RFC3339))
			}
			return t.flush()
		},
	}
	a.flags(cmd)
	return cmd
}
