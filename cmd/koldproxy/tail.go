package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
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
	Old json.RawMessage `json:"old,omitempty"` // of streams with pre_image
}

const (
	tailPage = 500
	// tailPoll is how long a quiet stream is left alone when no notification comes, and the pause before connecting again.
	tailPoll = time.Second

	fromEarliest = "earliest"
)

func newTailCommand(opts *options) *cobra.Command {
	a := &admin{opts: opts}
	var from string
	cmd := &cobra.Command{
		Use:   "tail STREAM",
		Short: "print the events of a stream, first those behind --from, then new ones until Ctrl-C",
		Long: `Prints the events of a stream from its log: first those behind --from, then new ones until Ctrl-C. What is missing in front of an event, or
was never captured, is said on stderr. When the server goes away, tail goes on where it was once it is back.`,
		Example: `  koldproxy tail big_orders --config koldproxy.toml
  koldproxy tail big_orders --from earliest --json --config koldproxy.toml`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("from") && from != fromEarliest && !koldproxy.IsEventID(from) {
				return usageError{fmt.Errorf("--from %q is the id of no event; it is one as tail prints, or %q", from, fromEarliest)}
			}
			ctx := cmd.Context()
			pool, err := a.pool(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			t := &tailer{pool: pool, json: a.json, out: cmd.OutOrStdout(), notes: cmd.ErrOrStderr()}
			if err := t.begin(ctx, args[0], from); err != nil {
				return err
			}
			if err := t.run(ctx); ctx.Err() == nil {
				return err
			}
			return nil // Ctrl-C is how tail ends
		},
	}
	a.flags(cmd)
	cmd.Flags().StringVar(&from, "from", "", "begin behind this event `ID`, or with the earliest retained one (\"earliest\"); default: with the next new one")
	return cmd
}

// pool opens connections to the database that is meant: one that waits, and one that reads.
func (a *admin) pool(ctx context.Context) (*pgxpool.Pool, error) {
	c, database, err := a.config()
	if err != nil {
		return nil, err
	}
	dsn, err := c.dsn(database)
	if err != nil {
		return nil, err
	}
	pc, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("postgres.dsn is no connection string")
	}
	pc.MaxConns = 2
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("connect to database %s: %w", database, err)
	}
	return pool, nil
}

// tailer prints the log of one stream.
type tailer struct {
	pool   *pgxpool.Pool
	out    io.Writer
	notes  io.Writer
	json   bool
	stream string // as it was typed
	name   string
	replay *changefeed.Replay
	last   string // the position: the last id that was printed
}

// begin finds the stream and where to start.
func (t *tailer) begin(ctx context.Context, stream, from string) error {
	t.stream = stream
	var schema string
	err := t.pool.QueryRow(ctx, `SELECT s.schema_name, s.name FROM koldstore.stream s
		WHERE (s.schema_name, s.name) IN (SELECT n[1], n[2] FROM (SELECT parse_ident($1)) AS p(n) WHERE array_length(n, 1) = 2)
		   OR s.name = (SELECT n[1] FROM (SELECT parse_ident($1)) AS p(n) WHERE array_length(n, 1) = 1)
		ORDER BY s.schema_name = ANY (current_schemas(false)) DESC LIMIT 1`, stream).Scan(&schema, &t.name)
	if err == nil {
		t.replay, err = changefeed.OpenReplay(ctx, t.pool, schema, t.name)
	}
	if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, changefeed.ErrNoStream) {
		return fmt.Errorf("stream %s does not exist", stream)
	}
	if err != nil {
		return fmt.Errorf("look for stream %s: %w", stream, err)
	}
	switch from {
	case "":
		from = changefeed.FromNewest
	case fromEarliest:
		from = changefeed.FromEarliest
	}
	position, missed, err := t.replay.Begin(ctx, from)
	if err != nil {
		return err
	}
	t.last = position
	if missed != nil && missed.Reason == changefeed.Ahead {
		_, _ = fmt.Fprintf(t.notes, "koldproxy: %s is an id of the future; the newest event of stream %s is %q, and what comes behind it is printed\n", from, stream, position)
	} else if missed != nil {
		t.missing(*missed)
	}
	return nil
}

// missing says what is not printed.
func (t *tailer) missing(gap changefeed.ReplayGap) {
	if gap.Reason == changefeed.Expired {
		_, _ = fmt.Fprintf(t.notes, "koldproxy: events of stream %s up to %s are missing: they are past its retention\n", t.stream, gap.Floor)
		return
	}
	_, _ = fmt.Fprintf(t.notes, "koldproxy: events of stream %s behind %s are missing: %s\n", t.stream, gap.Floor, gap.Reason)
}

// run follows the stream until ctx ends or something is wrong that does not pass.
func (t *tailer) run(ctx context.Context) error {
	for said := false; ; {
		before := t.last
		err := t.follow(ctx)
		if !isOutage(err) || ctx.Err() != nil {
			return err
		}
		if !said || t.last != before {
			_, _ = fmt.Fprintf(t.notes, "koldproxy: lost the server, trying again: %v\n", err)
			said = true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(tailPoll):
		}
	}
}

// isOutage says whether an error may be that of a server that is restarted, or of the way to it.
func isOutage(err error) bool {
	if errors.Is(err, changefeed.ErrNoStream) || errors.As(err, new(outputError)) {
		return false
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return true
	}
	switch pg.Code[:min(2, len(pg.Code))] {
	case "08", "53", "57":
		return true
	}
	return false
}

// outputError is one of writing what is printed.
type outputError struct{ error }

// follow asks for notifications before the first read, so that none is missed.
func (t *tailer) follow(ctx context.Context) error {
	conn, err := t.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	listening := conn.Hijack() // whoever comes next is not to be notified
	defer listening.Close(context.WithoutCancel(ctx))
	if _, err := listening.Exec(ctx, "LISTEN "+pgx.Identifier{"koldstore_stream_" + t.name}.Sanitize()); err != nil {
		return fmt.Errorf("listen for events: %w", err)
	}
	for {
		more, err := t.printPage(ctx)
		if errors.Is(err, changefeed.ErrNoStream) {
			return fmt.Errorf("stream %s was dropped: %w", t.stream, err)
		}
		if err != nil {
			return err
		}
		if more {
			continue
		}
		waiting, cancel := context.WithTimeout(ctx, tailPoll)
		_, err = listening.WaitForNotification(waiting)
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

func (t *tailer) printPage(ctx context.Context) (more bool, err error) {
	page, more, err := t.replay.Page(ctx, t.last, tailPage)
	if err != nil {
		return false, err
	}
	for _, e := range page {
		if e.Gap != nil {
			t.missing(*e.Gap)
		}
		var event struct {
			tailRow
			Millis int64 `json:"ts"`
		}
		if err := json.Unmarshal(e.Payload, &event); err != nil {
			return false, err
		}
		event.TS = time.UnixMilli(event.Millis).UTC()
		if err := t.print(event.tailRow); err != nil {
			return false, outputError{err}
		}
		t.last = e.ID
	}
	return more, nil
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
