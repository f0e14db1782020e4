package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
)

// tailRow is one event of a stream log, as `tail` prints it.
type tailRow struct {
	ID  string          `json:"id"`
	Op  string          `json:"op"`
	K   json.RawMessage `json:"k"`
	TS  time.Time       `json:"ts"`
	Doc json.RawMessage `json:"doc"`
}

const (
	tailPage = 500
	// tailPoll is how long a quiet stream is left alone when no notification comes.
	tailPoll = time.Second

	fromEarliest = "earliest"
)

func newTailCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	var from string
	cmd := &cobra.Command{
		Use:   "tail STREAM",
		Short: "print the events of a stream, first those behind --from, then new ones until Ctrl-C",
		Example: `  koldproxy tail big_orders --config koldproxy.toml
  koldproxy tail big_orders --from earliest --json --config koldproxy.toml`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("from") && from != fromEarliest && !koldproxy.IsEventID(from) {
				return usageError{fmt.Errorf("--from %q is the id of no event; it is one as tail prints, or %q", from, fromEarliest)}
			}
			ctx := cmd.Context()
			conn, err := a.open(ctx)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			t := &tailer{conn: conn, json: a.json, out: cmd.OutOrStdout(), notes: cmd.ErrOrStderr()}
			if err := t.begin(ctx, args[0], from); err != nil {
				return err
			}
			if err := t.follow(ctx); ctx.Err() == nil {
				return err
			}
			return nil // Ctrl-C is how tail ends
		},
	}
	a.flags(cmd)
	cmd.Flags().StringVar(&from, "from", "", "begin behind this event `ID`, or with the earliest retained one (\"earliest\"); default: with the next new one")
	return cmd
}

// tailer prints the log of one stream.
type tailer struct {
	conn    *pgx.Conn
	out     io.Writer
	notes   io.Writer
	json    bool
	log     string // the log's name, quoted
	channel string
	last    string // the last id printed
}

// begin finds the stream's log and where to start, and asks for notifications before the first read, so that none is missed.
func (t *tailer) begin(ctx context.Context, stream, from string) error {
	var floor string
	err := t.conn.QueryRow(ctx, `SELECT s.log_oid::regclass::text, 'koldstore_stream_' || s.name, coalesce(greatest(s.floor, koldstore.expired(s.stream_id)), '')
		FROM koldstore.stream s
		WHERE (s.schema_name, s.name) IN (SELECT n[1], n[2] FROM (SELECT parse_ident($1)) AS p(n) WHERE array_length(n, 1) = 2)
		   OR s.name = (SELECT n[1] FROM (SELECT parse_ident($1)) AS p(n) WHERE array_length(n, 1) = 1)
		ORDER BY s.schema_name = ANY (current_schemas(false)) DESC LIMIT 1`, stream).Scan(&t.log, &t.channel, &floor)
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("stream %s does not exist", stream)
	}
	if err != nil {
		return fmt.Errorf("look for stream %s: %w", stream, err)
	}
	if _, err := t.conn.Exec(ctx, "LISTEN "+pgx.Identifier{t.channel}.Sanitize()); err != nil {
		return fmt.Errorf("listen for events: %w", err)
	}
	if from == fromEarliest {
		return nil
	}
	var end string
	if err := t.conn.QueryRow(ctx, "SELECT coalesce(max(id), '') FROM "+t.log).Scan(&end); err != nil {
		return fmt.Errorf("find the end of stream %s: %w", stream, err)
	}
	t.last = from
	switch {
	case from == "":
		t.last = end
	case changefeed.FromFuture(from, end, floor, time.Now()):
		t.last = end
		_, _ = fmt.Fprintf(t.notes, "koldproxy: %s is an id of the future; the newest event of stream %s is %q, and what comes behind it is printed\n", from, stream, end)
	}
	return nil
}

func (t *tailer) follow(ctx context.Context) error {
	for {
		n, err := t.printPage(ctx)
		if err != nil {
			return err
		}
		if n == tailPage {
			continue
		}
		waiting, cancel := context.WithTimeout(ctx, tailPoll)
		_, err = t.conn.WaitForNotification(waiting)
		timedOut := waiting.Err() != nil
		cancel()
		if err != nil && !timedOut {
			return fmt.Errorf("wait for events: %w", err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (t *tailer) printPage(ctx context.Context) (n int, err error) {
	rows, err := t.conn.Query(ctx, "SELECT id, op, k, ts, doc FROM "+t.log+" WHERE id > $1 ORDER BY id LIMIT $2", t.last, tailPage)
	if err != nil {
		return 0, fmt.Errorf("read events: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var r tailRow
		if err := rows.Scan(&r.ID, &r.Op, &r.K, &r.TS, &r.Doc); err != nil {
			return n, fmt.Errorf("read events: %w", err)
		}
		if err := t.print(r); err != nil {
			return n, err
		}
		t.last = r.ID
		n++
	}
	return n, rows.Err()
}

func (t *tailer) print(r tailRow) error {
	if !t.json {
		_, err := fmt.Fprintf(t.out, "%s  %s  %-6s  %s  %s\n", r.ID, r.TS.UTC().Format("2006-01-02 15:04:05.000"), r.Op, r.K, r.Doc)
		return err
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(t.out, "%s\n", line)
	return err
}
