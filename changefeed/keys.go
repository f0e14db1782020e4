package changefeed

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// loadOperators finds the operators = and > of primary keys: those of the operator class of the index, where they can be
// named (see exact).
func (c *catalog) loadOperators(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		SELECT i.indrelid, e.name, g.name,
		       bt.typnamespace = 'pg_catalog'::pg_catalog.regnamespace OR oc.opcintype = a.atttypid
		FROM pg_catalog.pg_index i
		CROSS JOIN LATERAL pg_catalog.unnest(i.indclass::oid[]) WITH ORDINALITY AS k(class, ord)
		JOIN pg_catalog.pg_opclass oc ON oc.oid = k.class
		JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = (i.indkey::int2[])[k.ord - 1]
		CROSS JOIN LATERAL koldstore.base_type(a.atttypid, a.atttypmod) AS b
		JOIN pg_catalog.pg_type bt ON bt.oid = b.type
		CROSS JOIN LATERAL (`+operatorSQL(3)+`) AS e(name)
		CROSS JOIN LATERAL (`+operatorSQL(5)+`) AS g(name)
		WHERE i.indrelid = ANY ($1) AND i.indisprimary AND k.ord <= i.indnkeyatts
		ORDER BY i.indrelid, k.ord`, c.oids())
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var oid uint32
		var equal, above string
		var exact bool
		if err := rows.Scan(&oid, &equal, &above, &exact); err != nil {
			return err
		}
		if !exact {
			equal, above = "", ""
		}
		tab := c.tables[oid]
		tab.equal, tab.above = append(tab.equal, equal), append(tab.above, above)
	}
	return rows.Err()
}

// exact says whether the operators of the key can be named so that no others are found. That of enums takes any enum; naming
// it may find another one, by way of a cast that is code of whoever made the type.
func (t *table) exact() bool { return !slices.Contains(t.equal, "") }

// keyIs compares the columns of the key with others of the same types, or of their base types, as whole records if need be: those are compared by
// the types' own operator classes.
func (t *table) keyIs(left, right func(i int) string) string {
	n := len(t.key)
	switch {
	case t.exact():
	case t.mirror != nil: // whose columns have the base types of domains, and records of different types cannot be compared
		return fmt.Sprintf("%s OPERATOR(pg_catalog.=) %s", t.mirror.record(left), t.mirror.record(right))
	default:
		return fmt.Sprintf("ROW(%s)::record OPERATOR(pg_catalog.=) ROW(%s)::record", list(n, left), list(n, right))
	}
	parts := make([]string, n)
	for i := range parts {
		parts[i] = left(i) + " " + t.equal[i] + " " + right(i)
	}
	return strings.Join(parts, " AND ")
}

// keyAbove is the condition that the key of a row of the table is above that of a row of its mirror. In the form with records it
// does not use the index.
func (t *table) keyAbove(left, right func(i int) string) string {
	n := len(t.key)
	if !t.exact() {
		return fmt.Sprintf("%s OPERATOR(pg_catalog.>) %s", t.mirror.record(left), t.mirror.record(right))
	}
	if !slices.ContainsFunc(t.above, func(op string) bool { return op != t.above[0] }) {
		return fmt.Sprintf("(%s) %s (%s)", list(n, left), t.above[0], list(n, right))
	}
	// Rows are compared with one operator for all of their columns; these have several.
	sql := ""
	for i := n - 1; i >= 0; i-- {
		above := left(i) + " " + t.above[i] + " " + right(i)
		if sql == "" {
			sql = above
		} else {
			sql = fmt.Sprintf("(%s OR %s %s %s AND %s)", above, left(i), t.equal[i], right(i), sql)
		}
	}
	return sql
}

// record is a row of the mirror that has a key and nothing else.
func (m *mirror) record(column func(i int) string) string {
	return fmt.Sprintf("ROW(%s)::%s", list(m.columns, func(i int) string {
		if i < len(m.keys) {
			return column(i)
		}
		return "NULL"
	}), m.name)
}

// operatorSQL names the operator of an operator class oc for a strategy of B-trees.
func operatorSQL(strategy int) string {
	return fmt.Sprintf(`SELECT pg_catalog.format('OPERATOR(%%I.%%s)', n.nspname, o.oprname)
		FROM pg_catalog.pg_amop a JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
		WHERE a.amopfamily = oc.opcfamily AND a.amoplefttype = oc.opcintype AND a.amoprighttype = oc.opcintype AND a.amopstrategy = %d`, strategy)
}

func (c *catalog) oids() []uint32 {
	oids := make([]uint32, 0, len(c.tables))
	for oid := range c.tables {
		oids = append(oids, oid)
	}
	return oids
}

// safeTypes returns which types of columns can be read from text without running code of users: those that contain no domain
// and nothing composite, down to the elements of arrays and the bounds of ranges.
func (c *catalog) safeTypes(ctx context.Context, tx pgx.Tx) (map[uint32]bool, error) {
	types := []uint32{}
	add := func(a *attribute) {
		if !a.dropped && !slices.Contains(types, a.typeOID) {
			types = append(types, a.typeOID)
		}
	}
	for _, tab := range c.tables {
		for i := range tab.attributes {
			add(&tab.attributes[i])
		}
		if tab.mirror != nil {
			for i := range tab.mirror.key {
				add(&tab.mirror.key[i])
			}
		}
	}
	rows, err := tx.Query(ctx, `
		WITH RECURSIVE part(whole, type) AS (
			SELECT u.oid, u.oid FROM unnest($1::oid[]) AS u(oid)
			UNION
			SELECT p.whole, x.type
			FROM part p
			JOIN pg_catalog.pg_type t ON t.oid = p.type
			CROSS JOIN LATERAL (
				SELECT t.typelem WHERE t.typelem <> 0
				UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid OR r.rngmultitypid = t.oid) AS x(type))
		SELECT p.whole, bool_and(t.typtype IN ('b', 'e', 'r', 'm')) FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.type GROUP BY p.whole`, types)
	if err != nil {
		return nil, err
	}
	safe := make(map[uint32]bool)
	var oid uint32
	var ok bool
	_, err = pgx.ForEachRow(rows, []any{&oid, &ok}, func() error {
		safe[oid] = ok
		return nil
	})
	for _, tab := range c.tables {
		for i := range tab.attributes {
			tab.attributes[i].safe = safe[tab.attributes[i].typeOID]
		}
	}
	return safe, err
}

// mirrorFault says why a mirror cannot follow its table any more, or nothing. A mirror is made for the primary key that its
// table had then.
func (t *table) mirrorFault(safe map[uint32]bool) string {
	m := t.mirror
	if len(t.key) == 0 {
		return "the table has no primary key any more"
	}
	if slices.Contains(t.key, -1) || len(m.key) != len(t.key) {
		return "the primary key of the table has changed"
	}
	for i := range m.key {
		was, is := &m.key[i], t.column(t.key[i])
		switch {
		case was.name != is.name && t.find(was.name) < 0:
			return fmt.Sprintf("column %s of the primary key has been renamed to %s", ident(was.name), ident(is.name))
		case was.name != is.name:
			return fmt.Sprintf("the primary key of the table has changed: it has column %s where it had %s", ident(is.name), ident(was.name))
		case was.base != is.base || was.modifier != is.modifier || was.collation != is.collation:
			return fmt.Sprintf("column %s of the primary key has changed its type", ident(is.name))
		case !safe[was.typeOID]:
			return fmt.Sprintf("the type of column %s of the primary key contains a domain or is composite", ident(is.name))
		}
	}
	return ""
}

// find returns the position in columns of a name, or -1.
func (t *table) find(name string) int {
	return slices.IndexFunc(t.columns, func(i int) bool { return t.attributes[i].name == name })
}
