package feedtest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Event is a row of a stream log; K and Doc are the text of the jsonb.
type Event struct {
	ID, Op, K, Doc string
}

// ReadLog reads a whole stream log in its order. log is its name as SQL.
func ReadLog(ctx context.Context, q Querier, log string) ([]Event, error) {
	rows, err := q.Query(ctx, `SELECT id, op, k::text, coalesce(doc::text, '') FROM `+log+` ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("read log %s: %w", log, err)
	}
	events, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Event])
	if err != nil {
		return nil, fmt.Errorf("read log %s: %w", log, err)
	}
	return events, nil
}

// CheckOrder reports every event that is out of order or cannot follow the one before it of the same key: an exit or a delete
// that follows an exit or a delete. (The first event of a key may be any: the row may be older than the stream.)
func CheckOrder(events []Event) error {
	var errs []error
	last := make(map[string]Event)
	for i, e := range events {
		if i > 0 && e.ID <= events[i-1].ID {
			errs = append(errs, fmt.Errorf("event %s follows %s", e.ID, events[i-1].ID))
		}
		before, known := last[e.K]
		switch e.Op {
		case "put":
		case "exit", "delete":
			if known && before.Op != "put" {
				errs = append(errs, fmt.Errorf("key %s: %s %s follows %s %s", e.K, e.Op, e.ID, before.Op, before.ID))
			}
		default:
			errs = append(errs, fmt.Errorf("event %s has op %q", e.ID, e.Op))
		}
		last[e.K] = e
	}
	return errors.Join(errs...)
}

// Fold replays events: which keys match, with their rows.
func Fold(events []Event) map[string]string {
	state := make(map[string]string)
	for _, e := range events {
		if e.Op == "put" {
			state[e.K] = e.Doc
		} else {
			delete(state, e.K)
		}
	}
	return state
}

// CheckFold compares the fold of a log with the rows of a table that match the predicate. key is the SQL of the log's column k
// for a row t of the table. Unless complete, keys without any event are left out: their rows may be older than the stream.
func CheckFold(ctx context.Context, q Querier, log, table, predicate, key string, complete bool) error {
	events, err := ReadLog(ctx, q, log)
	if err != nil {
		return err
	}
	rows, err := q.Query(ctx, fmt.Sprintf(`SELECT (%s)::text, to_jsonb(t.*)::text FROM %s t WHERE %s`, key, table, predicate))
	if err != nil {
		return fmt.Errorf("read table %s: %w", table, err)
	}
	want, err := collectPairs(rows)
	if err != nil {
		return fmt.Errorf("read table %s: %w", table, err)
	}
	if !complete {
		mentioned := make(map[string]bool)
		for _, e := range events {
			mentioned[e.K] = true
		}
		for k := range want {
			if !mentioned[k] {
				delete(want, k)
			}
		}
	}
	return errors.Join(CheckOrder(events), compare("fold of "+log, Fold(events), want))
}

func collectPairs(rows pgx.Rows) (map[string]string, error) {
	defer rows.Close()
	out := make(map[string]string)
	for rows.Next() {
		var k, v string
		if err := rows.Scan(&k, &v); err != nil {
			return nil, err
		}
		out[k] = v
	}
	return out, rows.Err()
}

// compare reports every difference between two states.
func compare(what string, got, want map[string]string) error {
	var errs []error
	for k, w := range want {
		if g, ok := got[k]; !ok {
			errs = append(errs, fmt.Errorf("%s: key %s is missing, want %s", what, k, shorten(w)))
		} else if g != w {
			errs = append(errs, fmt.Errorf("%s: key %s is %s, want %s", what, k, shorten(g), shorten(w)))
		}
	}
	for k, g := range got {
		if _, ok := want[k]; !ok {
			errs = append(errs, fmt.Errorf("%s: key %s is %s, want none", what, k, shorten(g)))
		}
	}
	return errors.Join(errs...)
}

func shorten(s string) string {
	const most = 200
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
