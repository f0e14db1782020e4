package changefeed

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// resolveUnchanged looks up toasted values that changes did not touch and the log did not carry. It has work only if somebody
// took REPLICA IDENTITY FULL away from a table. The mirror's image is what the row was before; the table itself is what the
// row is by now, which may be newer. A value that is nowhere is a problem of its event: never NULL instead.
func (t *Target) resolveUnchanged(ctx context.Context, tx pgx.Tx, p *plan) error {
	for _, te := range p.unresolved {
		for i := range te.events {
			if e := &te.events[i]; e.problem == "" {
				if err := t.resolveEvent(ctx, tx, te, i); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (t *Target) resolveEvent(ctx context.Context, tx pgx.Tx, te *tableEvents, i int) error {
	e, tab := &te.events[i], te.table
	for column := range e.new {
		if e.new[column].Kind != koldproxy.DatumUnchanged {
			continue
		}
		key := e.key
		if e.keyBefore != nil {
			key = e.keyBefore
		}
		value, found := lookBack(te.events[:i], key, column)
		for _, source := range []string{imageSQL(tab, column), heapSQL(tab, column)} {
			if found || source == "" {
				continue
			}
			var text *string
			args := make([]any, len(key))
			for k := range key {
				args[k] = key[k]
			}
			err := tx.QueryRow(ctx, source, args...).Scan(&text)
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				if blame(err) == definition {
					return errStale
				}
				return fmt.Errorf("look up a toasted value: %w", err)
			}
			if err == nil && text != nil { // a toasted value is never NULL
				value, found = koldproxy.Datum{Kind: koldproxy.DatumText, Text: *text}, true
			}
		}
		if !found {
			e.problem = "an unchanged toasted value is neither in the log nor anywhere else"
			return nil
		}
		e.new[column] = value
	}
	return nil
}

// lookBack finds the value in the newest row of a key among events.
func lookBack(events []event, key []string, column int) (koldproxy.Datum, bool) {
	wanted := make([]koldproxy.Datum, len(key))
	for i := range key {
		wanted[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: key[i]}
	}
	for i := len(events) - 1; i >= 0; i-- {
		e := &events[i]
		if e.new == nil || len(e.key) != len(key) {
			continue
		}
		same := true
		for k := range key {
			same = same && e.key[k] == key[k]
		}
		if same && known(e.new, column) {
			return e.new[column], true
		}
	}
	return koldproxy.Datum{}, false
}

func imageSQL(tab *table, column int) string {
	if tab.mirror == nil {
		return ""
	}
	name := tab.column(column).name
	return fmt.Sprintf(`SELECT (pg_catalog.jsonb_populate_record(NULL::%s, m.row_image)).%s::text FROM %s m WHERE m.op <> 3 AND m.row_image ? %s AND %s`,
		tab.name, ident(name), tab.mirror.name, quoteLiteral(name), tab.keyIs(func(i int) string { return tab.mirror.keys[i] }))
}

func heapSQL(tab *table, column int) string {
	return fmt.Sprintf(`SELECT m.%s::text FROM ONLY %s m WHERE %s`, ident(tab.column(column).name), tab.name,
		tab.keyIs(func(i int) string { return ident(tab.column(tab.key[i]).name) }))
}

// keyIs compares the key columns of m with parameters.
func (t *table) keyIs(name func(i int) string) string {
	sql := ""
	for i := range t.key {
		if i > 0 {
			sql += " AND "
		}
		sql += fmt.Sprintf("m.%s = $%d::text::%s", name(i), i+1, t.keyType(i))
	}
	return sql
}
