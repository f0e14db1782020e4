package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/migrations"
	"github.com/koldproxy/koldproxy/walapply"
)

// databaseStatus is one database, as `status --json` prints it. The raw parts are the answers of the SQL functions.
type databaseStatus struct {
	Database string            `json:"database"`
	Catalog  migrations.State  `json:"catalog"`
	Applier  json.RawMessage   `json:"applier,omitempty"`
	Problems []string          `json:"problems"`
	Tables   []json.RawMessage `json:"tables"`
	Streams  []streamStatus    `json:"streams"`
}

type streamStatus struct {
	Name       string  `db:"name" json:"name"`
	Table      string  `db:"table" json:"table"`
	State      string  `db:"state" json:"state"`
	Reason     *string `db:"reason" json:"reason"`
	Events     int64   `db:"events" json:"events"`
	EventsLost int64   `db:"events_lost" json:"events_lost"`
	Retention  *string `db:"retention" json:"retention"`
}

func newStatusCommand(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show applier, managed tables and streams of every configured database",
		Example: `  koldproxy status --config koldproxy.toml
  koldproxy status --json --config koldproxy.toml | jq '.[].applier.lag_bytes'`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all := []databaseStatus{}
			err := eachDatabase(cmd, opts, func(ctx context.Context, c *config, name string) error {
				s, err := readStatus(ctx, c, name)
				all = append(all, s)
				return err
			})
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), all)
			}
			for _, s := range all {
				if err := s.print(cmd.OutOrStdout()); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func readStatus(ctx context.Context, c *config, database string) (databaseStatus, error) {
	s := databaseStatus{Database: database, Problems: []string{}}
	conn, err := c.connect(ctx, database)
	if err != nil {
		return s, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if s.Catalog, err = migrations.Status(ctx, conn); err != nil || s.Catalog.Version == 0 {
		return s, err
	}
	if err := conn.QueryRow(ctx, "SELECT koldstore.async_mirror_status()").Scan(&s.Applier); err != nil {
		return s, fmt.Errorf("read the applier's status: %w", err)
	}
	problems, err := walapply.Inspect(ctx, conn, walapply.DefaultConfig("").Publication, c.Apply.OnGap)
	if err != nil {
		return s, err
	}
	for _, p := range problems {
		s.Problems = append(s.Problems, p.Error())
	}
	rows, err := conn.Query(ctx, `SELECT koldstore.table_status(table_oid::regclass) FROM koldstore.managed_table m
		WHERE EXISTS (SELECT FROM pg_class c WHERE c.oid = m.table_oid) ORDER BY schema_name, table_name`)
	if err != nil {
		return s, err
	}
	if s.Tables, err = pgx.CollectRows(rows, pgx.RowTo[json.RawMessage]); err != nil {
		return s, fmt.Errorf("read the status of managed tables: %w", err)
	}
	rows, err = conn.Query(ctx, `SELECT quote_ident(s.schema_name) || '.' || quote_ident(s.name) AS name, s.table_oid::regclass::text AS "table",
		s.state, s.reason, t.events, t.events_lost, s.retention::text AS retention
		FROM koldstore.stream s JOIN koldstore.stream_status t USING (stream_id) ORDER BY 1`)
	if err != nil {
		return s, err
	}
	if s.Streams, err = pgx.CollectRows(rows, pgx.RowToStructByName[streamStatus]); err != nil {
		return s, fmt.Errorf("read the status of streams: %w", err)
	}
	return s, nil
}

func (s databaseStatus) print(out io.Writer) error {
	if s.Catalog.Version == 0 {
		_, err := fmt.Fprintf(out, "database %s: no catalog; koldproxy migrate up installs it\n", s.Database)
		return err
	}
	var applier struct {
		Running    bool   `json:"running"`
		AppliedLSN string `json:"applied_lsn"`
		LagBytes   *int64 `json:"lag_bytes"`
		Watermark  int64  `json:"watermark"`
	}
	if err := json.Unmarshal(s.Applier, &applier); err != nil {
		return fmt.Errorf("read the applier's status: %w", err)
	}
	state := "not running"
	if applier.Running {
		state = "running"
	}
	if _, err := fmt.Fprintf(out, "database %s: catalog %d of %d, applier %s at %s, lag %s bytes, watermark %d\n",
		s.Database, s.Catalog.Version, s.Catalog.Newest, state, applier.AppliedLSN, orDash(applier.LagBytes), applier.Watermark); err != nil {
		return err
	}
	for _, p := range s.Problems {
		if _, err := fmt.Fprintf(out, "PROBLEM: %s\n", p); err != nil {
			return err
		}
	}
	if len(s.Tables) > 0 {
		t := newTable(out, "TABLE", "STATE", "HOT ROWS", "COLD ROWS", "SEGMENTS", "COLD BYTES", "FLOOR")
		for _, raw := range s.Tables {
			var m struct {
				Table     string `json:"table"`
				State     string `json:"state"`
				HotRows   int64  `json:"hot_rows"`
				ColdRows  int64  `json:"cold_rows"`
				Segments  int64  `json:"segments"`
				ColdBytes int64  `json:"cold_bytes"`
				Floor     int64  `json:"floor"`
			}
			if err := json.Unmarshal(raw, &m); err != nil {
				return fmt.Errorf("read the status of a table: %w", err)
			}
			t.row(m.Table, m.State, fmt.Sprint(m.HotRows), fmt.Sprint(m.ColdRows), fmt.Sprint(m.Segments), fmt.Sprint(m.ColdBytes), fmt.Sprint(m.Floor))
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if len(s.Streams) > 0 {
		t := newTable(out, "STREAM", "TABLE", "STATE", "EVENTS", "LOST", "RETENTION")
		for _, r := range s.Streams {
			t.row(r.Name, r.Table, r.State, fmt.Sprint(r.Events), fmt.Sprint(r.EventsLost), orDash(r.Retention))
		}
		return t.flush()
	}
	return nil
}
