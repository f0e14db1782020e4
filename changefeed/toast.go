package changefeed

import (
	"context"
	"encoding/json"
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
		for _, look := range []func(context.Context, pgx.Tx, *table, []string, int) (*string, error){lookInMirror, lookInTable} {
			if found {
				break
			}
			text, err := look(ctx, tx, tab, key, column)
			if err != nil {
				if blame(err) == definition {
					return errStale
				}
				return fmt.Errorf("look up a toasted value: %w", err)
			}
			if text != nil { // a toasted value is never NULL
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

// lookInMirror reads the value from the image of the row. An image is JSON; what it says is brought back into the text of the
// column's type by the input function of that type, if that runs no code of users.
func lookInMirror(ctx context.Context, tx pgx.Tx, tab *table, key []string, column int) (*string, error) {
	a := tab.column(column)
	if tab.mirror == nil || !a.safe {
		return nil, nil
	}
	return lookUp(ctx, tx, fmt.Sprintf(`SELECT pg_catalog.format('%%s', x.%[1]s)
		FROM (SELECT $1::text::%[2]s AS row OFFSET 0) k, %[2]s m, pg_catalog.jsonb_to_record(m.row_image) AS x(%[1]s %[3]s)
		WHERE m.op <> 3 AND m.row_image ? %[4]s AND x.%[1]s IS NOT NULL AND %[5]s`,
		ident(a.name), tab.mirror.name, a.typeName, quoteLiteral(a.name),
		tab.keyIs(func(i int) string { return "m." + tab.mirror.keys[i] }, func(i int) string { return "(k.row)." + tab.mirror.keys[i] })),
		tab.mirror.literal(key))
}

// lookInTable reads the value from the table, if the key can be handed over without running code of users.
func lookInTable(ctx context.Context, tx pgx.Tx, tab *table, key []string, column int) (*string, error) {
	values := make(map[string]string, len(key))
	for i := range key {
		if a := tab.column(tab.key[i]); !a.safe {
			return nil, nil
		}
		values[fmt.Sprintf("k%d", i+1)] = key[i]
	}
	object, err := json.Marshal(values)
	if err != nil {
		return nil, err
	}
	var text *string
	err = readTable(ctx, tx, tab, func() error {
		text, err = lookUp(ctx, tx, fmt.Sprintf(`SELECT pg_catalog.format('%%s', m.%s)
			FROM pg_catalog.jsonb_to_record($1::text::pg_catalog.jsonb) AS k(%s), %s m WHERE m.%[1]s IS NOT NULL AND %[4]s`,
			ident(tab.column(column).name),
			list(len(key), func(i int) string { return fmt.Sprintf("k%d %s", i+1, tab.column(tab.key[i]).typeName) }), tab.from(),
			tab.keyIs(func(i int) string { return "m." + ident(tab.column(tab.key[i]).name) }, func(i int) string { return fmt.Sprintf("k.k%d", i+1) })),
			string(object))
		return err
	})
	var foreign *foreignCodeError
	if errors.As(err, &foreign) {
		return nil, nil
	}
	return text, err
}

func lookUp(ctx context.Context, tx pgx.Tx, sql, arg string) (text *string, err error) {
	err = tx.QueryRow(ctx, sql, arg).Scan(&text)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return text, err
}
