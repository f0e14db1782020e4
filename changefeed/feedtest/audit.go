package feedtest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Execer runs statements.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Audit records every row change of one table by trigger, with what the predicate says about the old and the new row.
type Audit struct {
	table, name string
	keys        []string
}

// NewAudit installs the triggers. table is a name without schema or quotes; keys are its primary key's columns; predicate is
// an expression over its columns.
func NewAudit(ctx context.Context, q Execer, table, predicate string, keys ...string) (*Audit, error) {
	a := &Audit{table: table, name: table + "_audit", keys: keys}
	statements := []string{
		fmt.Sprintf(`CREATE TABLE %s (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, op text NOT NULL, ok text, nk text, om boolean, nm boolean, od text, nd text, opk text, npk text)`, a.name),
		fmt.Sprintf(`CREATE FUNCTION %[1]s_match(r %[2]s) RETURNS boolean LANGUAGE sql IMMUTABLE AS $f$ SELECT coalesce((SELECT %[3]s FROM (SELECT (r).*) AS %[2]s), false) $f$`,
			a.name, table, predicate),
		fmt.Sprintf(`CREATE FUNCTION %[1]s_row() RETURNS trigger LANGUAGE plpgsql AS $f$
		BEGIN
			IF TG_OP = 'TRUNCATE' THEN
				INSERT INTO %[1]s (op) VALUES ('TRUNCATE');
				RETURN NULL;
			END IF;
			INSERT INTO %[1]s (op, ok, nk, om, nm, od, nd, opk, npk) VALUES (TG_OP,
				CASE WHEN TG_OP <> 'INSERT' THEN (%[2]s)::text END, CASE WHEN TG_OP <> 'DELETE' THEN (%[3]s)::text END,
				CASE WHEN TG_OP <> 'INSERT' THEN %[1]s_match(OLD) END, CASE WHEN TG_OP <> 'DELETE' THEN %[1]s_match(NEW) END,
				CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD)::text END, CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW)::text END,
				CASE WHEN TG_OP <> 'INSERT' THEN (%[4]s)::text END, CASE WHEN TG_OP <> 'DELETE' THEN (%[5]s)::text END);
			RETURN NULL;
		END $f$`, a.name, a.k("OLD"), a.k("NEW"), a.pk("OLD"), a.pk("NEW")),
		fmt.Sprintf(`CREATE TRIGGER %[1]s_rows AFTER INSERT OR UPDATE OR DELETE ON %[2]s FOR EACH ROW EXECUTE FUNCTION %[1]s_row()`, a.name, table),
		fmt.Sprintf(`CREATE TRIGGER %[1]s_truncate AFTER TRUNCATE ON %[2]s FOR EACH STATEMENT EXECUTE FUNCTION %[1]s_row()`, a.name, table),
	}
	for _, sql := range statements {
		if _, err := q.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("install an audit of %s: %w", table, err)
		}
	}
	return a, nil
}

// k and pk are the key of a row as logs and as feeds show it.
func (a *Audit) k(row string) string {
	if len(a.keys) == 1 {
		return "to_jsonb(" + row + "." + a.keys[0] + ")"
	}
	return a.pk(row)
}

func (a *Audit) pk(row string) string {
	parts := make([]string, len(a.keys))
	for i, k := range a.keys {
		parts[i] = fmt.Sprintf("'%[1]s', %[2]s.%[1]s", k, row)
	}
	return "jsonb_build_object(" + strings.Join(parts, ", ") + ")"
}

// StreamKey and FeedKey are the key of a row t as logs and as feeds show it.
func (a *Audit) StreamKey() string { return a.k("t") }

// FeedKey is the key of a row t as feeds show it.
func (a *Audit) FeedKey() string { return a.pk("t") }

// Keys are all keys that the table has ever had, as feeds show them.
func (a *Audit) Keys(ctx context.Context, q Querier) ([]string, error) {
	rows, err := q.Query(ctx, fmt.Sprintf(`SELECT opk FROM %[1]s WHERE opk IS NOT NULL UNION SELECT npk FROM %[1]s WHERE npk IS NOT NULL`, a.name))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// expected are the events that the recorded changes give, per key. Identity values are handed out before commit, but writers
// of one key wait for each other, and so does TRUNCATE for all.
func (a *Audit) expected(ctx context.Context, q Querier) (map[string][]Event, error) {
	rows, err := q.Query(ctx, fmt.Sprintf(`SELECT op, coalesce(ok, ''), coalesce(nk, ''), coalesce(om, false), coalesce(nm, false), coalesce(od, ''), coalesce(nd, '') FROM %s ORDER BY n`, a.name))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	events := make(map[string][]Event)
	add := func(op, k, doc string) { events[k] = append(events[k], Event{Op: op, K: k, Doc: doc}) }
	for rows.Next() {
		var op, ok, nk, od, nd string
		var om, nm bool
		if err := rows.Scan(&op, &ok, &nk, &om, &nm, &od, &nd); err != nil {
			return nil, err
		}
		switch {
		case op == "TRUNCATE":
			for k, es := range events {
				if e := es[len(es)-1]; e.Op == "put" {
					add("delete", k, e.Doc)
				}
			}
		case op == "UPDATE" && ok == nk:
			if nm {
				add("put", nk, nd)
			} else if om {
				add("exit", nk, nd)
			}
		default:
			if om {
				add("delete", ok, od)
			}
			if nm {
				add("put", nk, nd)
			}
		}
	}
	return events, rows.Err()
}

// CheckStream compares a stream log with what the audit saw since it was installed: the same events for each key, in the same
// order, and no other. Stream and audit must have begun together, on an empty table.
func (a *Audit) CheckStream(ctx context.Context, q Querier, log string) error {
	want, err := a.expected(ctx, q)
	if err != nil {
		return fmt.Errorf("read the audit of %s: %w", a.table, err)
	}
	events, err := ReadLog(ctx, q, log)
	if err != nil {
		return err
	}
	got := make(map[string][]Event)
	for _, e := range events {
		got[e.K] = append(got[e.K], Event{Op: e.Op, K: e.K, Doc: e.Doc})
	}
	errs := []error{CheckOrder(events)}
	for k := range want {
		errs = append(errs, compareEvents(k, got[k], want[k]))
	}
	for k := range got {
		if want[k] == nil {
			errs = append(errs, compareEvents(k, got[k], nil))
		}
	}
	return errors.Join(errs...)
}

func compareEvents(k string, got, want []Event) error {
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			return fmt.Errorf("key %s: event %d is missing, want %s %s", k, i+1, want[i].Op, shorten(want[i].Doc))
		case i >= len(want):
			return fmt.Errorf("key %s: event %d is %s %s, want none", k, i+1, got[i].Op, shorten(got[i].Doc))
		case got[i] != want[i]:
			return fmt.Errorf("key %s: event %d is %s %s, want %s %s", k, i+1, got[i].Op, shorten(got[i].Doc), want[i].Op, shorten(want[i].Doc))
		}
	}
	return nil
}
