package changefeed

import (
	"context"
	"encoding/json"
	"errors"
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
	// Labels are the names of the values of an enum by their OIDs, and Former those that some had before, with their OIDs: a
	// transaction that wrote a row before a rename may commit behind it. Both are nil for other types.
	Labels map[string]string `json:"labels,omitempty"`
	Former map[string]string `json:"former,omitempty"`
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

// renamed says, by the numbers of columns, what the enum values that rows have are called today, where that is something else.
func (s shape) renamed(today shape) map[int]map[string]string {
	out := make(map[int]map[string]string)
	for _, c := range s {
		i := slices.IndexFunc(today, func(d shapeColumn) bool { return d.Number == c.Number })
		if i < 0 || c.Labels == nil {
			continue
		}
		names := maps.Clone(c.Former)
		if names == nil {
			names = make(map[string]string)
		}
		for oid, name := range c.Labels {
			names[name] = oid
		}
		for name, oid := range names {
			if now, ok := today[i].Labels[oid]; ok && now != name {
				names[name] = now
			} else {
				delete(names, name)
			}
		}
		if len(names) > 0 {
			out[c.Number] = names
		}
	}
	return out
}

// remember notes the names that values of enums had before.
func (s shape) remember(before shape) {
	for i := range s {
		k := slices.IndexFunc(before, func(b shapeColumn) bool { return b.Number == s[i].Number })
		if k < 0 || s[i].Labels == nil {
			continue
		}
		former := maps.Clone(before[k].Former)
		for oid, name := range before[k].Labels {
			if s[i].Labels[oid] != name {
				if former == nil {
					former = make(map[string]string)
				}
				former[name] = oid
			}
		}
		for _, name := range s[i].Labels { // is another one now
			delete(former, name)
		}
		s[i].Former = former
	}
}

// loadShapes loads the shapes in force, and whether every ALTER TABLE announces a new one: that takes event triggers, which only
// a superuser can have made.
func (c *catalog) loadShapes(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT a.table_oid, a.shape, koldstore.shape_of(a.table_oid) FROM koldstore.applied_shape a`)
	if err != nil {
		return err
	}
	var oid uint32
	var inForce, today []byte
	_, err = pgx.ForEachRow(rows, []any{&oid, &inForce, &today}, func() error {
		tab := c.tables[oid]
		if tab == nil {
			return nil
		}
		var now shape
		tab.inForce = nil
		if err := errors.Join(json.Unmarshal(inForce, &tab.inForce), json.Unmarshal(today, &now)); err != nil {
			return err
		}
		tab.renamed = tab.inForce.renamed(now)
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
	var begun shape
	if err := json.Unmarshal([]byte(details), &begun); err != nil {
		return fmt.Errorf("read a marker: %w", err)
	}
	if err := t.load(ctx, tx); err != nil {
		return err
	}
	if tab := t.cat.tables[oid]; tab != nil {
		begun.remember(tab.inForce)
	}
	if err := t.keepShape(ctx, tx, oid, begun); err != nil {
		return err
	}
	maps.DeleteFunc(t.placed, func(rel *koldproxy.Relation, _ []int) bool { return rel.OID == oid })
	t.forget()
	return nil
}

func (t *Target) keepShape(ctx context.Context, tx pgx.Tx, oid uint32, columns shape) error {
	details, err := json.Marshal(columns)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `INSERT INTO koldstore.applied_shape (table_oid, shape) VALUES ($1, $2::text::jsonb)
		ON CONFLICT (table_oid) DO UPDATE SET shape = EXCLUDED.shape`, oid, string(details))
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
			inferred[i] = shapeColumn{Number: numbers[i], Name: column.Name, TypeOID: column.TypeOID, Modifier: column.TypeMod}
			if k := slices.IndexFunc(tab.inForce, func(c shapeColumn) bool { return c.Number == numbers[i] && c.TypeOID == column.TypeOID }); k >= 0 {
				inferred[i].Labels, inferred[i].Former = tab.inForce[k].Labels, tab.inForce[k].Former
			}
		}
		if err := t.keepShape(ctx, tx, rel.OID, inferred); err != nil {
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
