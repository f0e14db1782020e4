package changefeed

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// shape are the columns that rows of a table have, in the order of their numbers. Every ALTER TABLE of a captured table, and the
// command that begins to capture it, puts one into koldstore.wal_marker, in front of the rows that have it. The shape in force is
// the one that was met last; it is kept in koldstore.applied_shape, which is written in apply transactions only and is therefore
// as of the checkpoint.
type shape []shapeColumn

type shapeColumn struct {
	Number   int    `json:"attnum"`
	Name     string `json:"name"`
	TypeOID  uint32 `json:"type"`
	Modifier int32  `json:"typmod"`
}

// agrees says whether a relation has exactly these columns.
func (s shape) agrees(rel *koldproxy.Relation) bool {
	return slices.EqualFunc(s, rel.Columns, func(c shapeColumn, r koldproxy.Column) bool { return c.Name == r.Name && c.TypeOID == r.TypeOID })
}

func (s shape) numbers() []int {
	out := make([]int, len(s))
	for i := range s {
		out[i] = s[i].Number
	}
	return out
}

// loadShapes loads the shapes in force, and whether every ALTER TABLE announces a new one: that takes event triggers, which only
// a superuser can have made.
func (c *catalog) loadShapes(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT a.table_oid, a.shape FROM koldstore.applied_shape a`)
	if err != nil {
		return err
	}
	var oid uint32
	var text []byte
	_, err = pgx.ForEachRow(rows, []any{&oid, &text}, func() error {
		if tab := c.tables[oid]; tab != nil {
			tab.inForce = nil
			return json.Unmarshal(text, &tab.inForce)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tx.QueryRow(ctx, `SELECT count(*) = 2 FROM pg_catalog.pg_event_trigger e
		WHERE e.evtname IN ('koldproxy_ddl', 'koldproxy_drop') AND e.evtenabled = 'A'`).Scan(&c.announced)
}

// beginShape puts the shape of a marker in force.
func (t *Target) beginShape(ctx context.Context, tx pgx.Tx, oid uint32, details string) error {
	if err := t.keepShape(ctx, tx, oid, details); err != nil {
		return err
	}
	maps.DeleteFunc(t.placed, func(rel *koldproxy.Relation, _ []int) bool { return rel.OID == oid })
	t.forget()
	return nil
}

func (t *Target) keepShape(ctx context.Context, tx pgx.Tx, oid uint32, details string) error {
	_, err := tx.Exec(ctx, `INSERT INTO koldstore.applied_shape (table_oid, shape) VALUES ($1, $2::text::jsonb)
		ON CONFLICT (table_oid) DO UPDATE SET shape = EXCLUDED.shape`, oid, details)
	if err != nil {
		return fmt.Errorf("note the columns of a table: %w", err)
	}
	return nil
}

// place finds out which columns the relation of a change has, once for each relation. Where that cannot be told, everything that
// follows the table is broken, and the table is no longer in the catalog afterwards.
func (t *Target) place(ctx context.Context, tx pgx.Tx, c *koldproxy.Change) error {
	rel, tab := c.Relation, t.cat.tables[c.Relation.OID]
	if t.placed[rel] != nil {
		return nil
	}
	t.fresh = false
	if !sameColumns(rel, tab) || !t.cat.announced || !tab.inForce.agrees(rel) {
		t.forget() // what is cached may be older than the relation
		if err := t.load(ctx, tx); err != nil {
			return err
		}
		if tab = t.cat.tables[rel.OID]; tab == nil {
			return nil
		}
	}
	numbers, ok := placeColumns(rel, tab, c.XID, t.cat.announced)
	if !ok {
		return t.breakTable(ctx, tx, tab, "columns changed while changes were on their way, and the write-ahead log does not tell which is which")
	}
	if !tab.inForce.agrees(rel) || !slices.Equal(tab.inForce.numbers(), numbers) {
		inferred := make(shape, len(numbers))
		for i, column := range rel.Columns {
			inferred[i] = shapeColumn{numbers[i], column.Name, column.TypeOID, column.TypeMod}
		}
		details, err := json.Marshal(inferred)
		if err != nil {
			return err
		}
		if err := t.keepShape(ctx, tx, rel.OID, string(details)); err != nil {
			return err
		}
		tab.inForce = inferred
	}
	t.placed[rel] = numbers
	return nil
}

// breakTable breaks all that follows a table.
func (t *Target) breakTable(ctx context.Context, tx pgx.Tx, tab *table, reason string) error {
	for _, s := range tab.streams {
		if err := t.breakStream(ctx, tx, s, reason); err != nil {
			return err
		}
	}
	if tab.mirror != nil {
		if err := t.breakMirror(ctx, tx, tab, reason); err != nil {
			return err
		}
	}
	t.forget()
	return t.load(ctx, tx)
}
