package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"
)

// flushResult is what koldstore.flush_table answers.
type flushResult struct {
	OK          bool    `json:"ok"`
	JobID       *string `json:"job_id"`
	Status      string  `json:"status"`
	RowsFlushed *int64  `json:"rows_flushed"`
	Segments    *int64  `json:"segments"`
	Error       *string `json:"error"`
}

func newFlushCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	var wait, force bool
	cmd := &cobra.Command{
		Use:   "flush TABLE",
		Short: "ask the running koldproxy to move the oldest rows of a mirror to cold storage",
		Example: `  koldproxy flush app.messages --config koldproxy.toml
  koldproxy flush app.messages --force --wait --config koldproxy.toml`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			result, err := flush(ctx, conn, args[0], force)
			if err != nil {
				return err
			}
			if wait && result.JobID != nil {
				if err := awaitJob(ctx, cmd, conn, &result); err != nil {
					return err
				}
			}
			return a.printFlush(cmd, args[0], result)
		},
	}
	a.flags(cmd)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the flush has ended")
	cmd.Flags().BoolVar(&force, "force", false, "flush everything, whatever the table's policy says")
	return cmd
}

func (a *admin) printFlush(cmd *cobra.Command, name string, result flushResult) error {
	out := cmd.OutOrStdout()
	if a.json {
		if err := printJSON(out, result); err != nil {
			return err
		}
	} else {
		text := name + ": " + result.Status
		if result.RowsFlushed != nil && result.Segments != nil {
			text += fmt.Sprintf(", rows flushed %d, segments %d", *result.RowsFlushed, *result.Segments)
		}
		if _, err := fmt.Fprintln(out, text); err != nil {
			return err
		}
	}
	if result.Error != nil {
		return fmt.Errorf("flush %s: %s", name, *result.Error)
	}
	return nil
}

func flush(ctx context.Context, conn *pgx.Conn, name string, force bool) (flushResult, error) {
	oid, err := resolveTable(ctx, conn, name)
	if err != nil {
		return flushResult{}, err
	}
	var raw []byte
	if err := conn.QueryRow(ctx, "SELECT koldstore.flush_table($1::oid::regclass, force => $2)", oid, force).Scan(&raw); err != nil {
		return flushResult{}, fmt.Errorf("flush %s: %w", name, err)
	}
	var result flushResult
	if err := json.Unmarshal(raw, &result); err != nil {
		return flushResult{}, fmt.Errorf("flush %s: read the answer: %w", name, err)
	}
	return result, nil
}

// jobPoll is how often a job is looked at. The job's row is the only sign of its progress that outlives the instance that
// works on it.
const jobPoll = 200 * time.Millisecond

// awaitJob follows a job to its end, with a line of progress on a terminal, and puts the outcome into result.
func awaitJob(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, result *flushResult) error {
	f, isFile := cmd.ErrOrStderr().(interface{ Fd() uintptr })
	onTerminal := isFile && isatty.IsTerminal(f.Fd())
	tick := time.NewTicker(jobPoll)
	defer tick.Stop()
	for {
		var progress []byte
		err := conn.QueryRow(ctx, `SELECT status, error, progress, (progress ->> 'rows_flushed')::bigint, (progress ->> 'segments')::bigint
			FROM koldstore.job WHERE job_id = $1`, *result.JobID).
			Scan(&result.Status, &result.Error, &progress, &result.RowsFlushed, &result.Segments)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("job %s is gone", *result.JobID)
		}
		if err != nil {
			return fmt.Errorf("look at job %s: %w", *result.JobID, err)
		}
		if result.Status != "queued" && result.Status != "running" {
			result.OK = result.Error == nil && result.Status != "error"
			return nil
		}
		if onTerminal {
			_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "\r%-10s %s\x1b[K\r", result.Status, progress)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("stopped waiting; job %s goes on: %w", *result.JobID, ctx.Err())
		case <-tick.C:
		}
	}
}
