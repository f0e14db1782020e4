package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/coldstore"
)

func newVerifyCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	cmd := &cobra.Command{
		Use:   "verify TABLE",
		Short: "read every cold segment of a managed table again and compare files, catalog and mirror",
		Example: `  koldproxy verify app.messages --config koldproxy.toml
  koldproxy verify '"S.é"."T"' --json --config koldproxy.toml`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			report, err := a.verify(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				err = printJSON(cmd.OutOrStdout(), report)
			} else {
				err = printReport(cmd, args[0], report)
			}
			if err == nil && !report.OK {
				err = fmt.Errorf("%s: %d problems", args[0], len(report.Problems))
			}
			return err
		},
	}
	a.flags(cmd)
	return cmd
}

// verify reads the cold store from where the command runs, which for a local folder has to be the machine that has it.
func (a *admin) verify(ctx context.Context, name string) (coldstore.Report, error) {
	c, database, err := a.config()
	if err != nil {
		return coldstore.Report{}, err
	}
	conn, err := c.connect(ctx, database)
	if err != nil {
		return coldstore.Report{}, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	oid, err := resolveTable(ctx, conn, name)
	if err != nil {
		return coldstore.Report{}, err
	}
	dsn, err := c.dsn(database)
	if err != nil {
		return coldstore.Report{}, err
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return coldstore.Report{}, fmt.Errorf("open a connection pool: %w", err)
	}
	defer pool.Close()
	bucket, err := openCold(ctx, c)
	if err != nil {
		return coldstore.Report{}, err
	}
	cc := coldstore.DefaultConfig()
	cc.OpenStorage = func(ctx context.Context, spec coldstore.StorageSpec) (coldstore.Bucket, error) {
		return openStorage(ctx, c, spec)
	}
	store, err := coldstore.New(pool, bucket, zerolog.Nop(), cc)
	if err != nil {
		return coldstore.Report{}, err
	}
	report, err := store.Verify(ctx, oid)
	return report, errors.Join(err, store.Close(), closeCold(bucket))
}

func printReport(cmd *cobra.Command, name string, report coldstore.Report) error {
	out := cmd.OutOrStdout()
	if report.OK {
		_, err := fmt.Fprintf(out, "%s: %d segments, %d rows, no problem\n", name, report.Segments, report.Rows)
		return err
	}
	t := newTable(out, "SEGMENT", "OBJECT", "PROBLEM")
	for _, p := range report.Problems {
		t.row(p.Segment, p.Object, p.Problem)
	}
	return t.flush()
}
