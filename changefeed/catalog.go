package changefeed

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// catalog is what a Target knows about the database: every table that has something to be written for. It is immutable but
// for mirror.seeding, mirror.noCopy and table.inForce.
type catalog struct {
	tables map[uint32]*table
	// announced means that every change of a table's columns comes through the log as well.
	announced bool
}

// table is a source table as it is now.
type table struct {
	oid     uint32
	rowType uint32
	name    string // schema-qualified and quoted
	shape   string // what shapeSQL said when the table was loaded
	// partitioned tables have their rows in others; in the log, changes are of the table as a whole.
	partitioned bool
	// attributes are all columns in the order of their numbers, dropped ones included.
	attributes []attribute
	// columns are the positions in attributes of the columns that exist.
	columns []int
	// inForce are the columns that rows have at the place in the log that has been applied.
	inForce shape
	// renamed are, by the numbers of columns, values of enums that rows there show by another name than today's.
	renamed map[int]map[string]string
	// key are the positions in columns of the primary key, in its order.
	key []int
	// equal and above are the operators = and > of the key's columns, as the primary key's index knows them. Others may
	// be found through a search path, or be better matches for the types at hand.
	equal, above []string
	painter      painter           // nil if only the server can make images of its rows
	queries      map[string]string // see judge.evaluate
	mirror       *mirror           // nil if the table is not managed
	streams      []*stream
	judged       []int // see judgedColumns
}

// attribute is a column as pg_attribute has it.
type attribute struct {
	name      string
	dropped   bool
	generated bool
	xmin      uint32 // the transaction that changed its row last: that dropped it if it is dropped
	typeOID   uint32
	typeName  string // schema-qualified and quoted, without modifiers
	// base, modifier and collation are what values are made of: domains followed down to their base type.
	base      uint32
	modifier  int32
	collation uint32
	safe      bool // see safeTypes
	missing   *string
}

// mirror is the koldstore.<table>__cl of a managed table.
type mirror struct {
	oid     uint32
	name    string
	keys    []string    // its key columns, quoted, in the order of table.key
	key     []attribute // the same
	columns int         // how many columns it has; those of the key come first
	painter painter     // the table's
	seeding bool        // or being healed
	page    int         // how many rows the next page of a seed has
	mirrorStatements
	noCopy int // for how many batches COPY is not worth trying
}

// stream is an active stream.
type stream struct {
	id        int64
	label     string // schema.name
	log       string
	predicate string // the function's name
	// predicateOID is the same as a number.
	predicateOID uint32
	uses         []int // positions in the table's columns of what the predicate looks at; none if that is not known
	preImage     bool
	foreign      bool   // the predicate can run code that is not PostgreSQL's own
	seeding      bool   // its backfill is under way
	end          string // where its partitions end, see makeRoom
	sql          string // see streamSQL
}

// from is what stands in FROM to read the table.
func (t *table) from() string {
	if t.partitioned {
		return t.name
	}
	return "ONLY " + t.name
}

func (t *table) column(i int) *attribute { return &t.attributes[t.columns[i]] }

// shapeSQL tells two shapes of a table apart; it stands where c and n are the table's rows in pg_class and pg_namespace.
const shapeSQL = `pg_catalog.md5(pg_catalog.concat_ws('|', n.nspname, c.relname,
	(SELECT pg_catalog.string_agg(pg_catalog.concat_ws(':', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attisdropped, a.xmin), ',' ORDER BY a.attnum)
	 FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0),
	(SELECT i.indkey::text FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary),
	(SELECT pg_catalog.string_agg(e.oid || e.enumlabel, ',' ORDER BY a.attnum, e.oid)
	 FROM pg_catalog.pg_attribute a CROSS JOIN LATERAL koldstore.enums_in(a.atttypid) AS i(type) JOIN pg_catalog.pg_enum e ON e.enumtypid = i.type
	 WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.atttypid >= 16384)))`

// The states in which a managed table or a stream takes part.
const (
	tableTakesPart  = `state IN ('seeding', 'healing', 'active')`
	streamTakesPart = `state IN ('seeding', 'active')`
)

// loadCatalog reads everything. What the catalog of PostgreSQL contradicts is marked broken on the way.
func (t *Target) loadCatalog(ctx context.Context, tx pgx.Tx) (*catalog, error) {
	cat := &catalog{tables: make(map[uint32]*table)}
	if err := t.breakLostMirrors(ctx, tx); err != nil {
		return nil, err
	}
	if err := cat.loadTables(ctx, tx); err != nil {
		return nil, fmt.Errorf("load managed tables: %w", err)
	}
	if err := cat.loadColumns(ctx, tx); err != nil {
		return nil, fmt.Errorf("load columns: %w", err)
	}
	if err := cat.loadShapes(ctx, tx); err != nil {
		return nil, fmt.Errorf("load shapes: %w", err)
	}
	if err := cat.loadOperators(ctx, tx); err != nil {
		return nil, fmt.Errorf("load operators: %w", err)
	}
	lost, err := cat.loadStreams(ctx, tx)
	if err != nil {
		return nil, fmt.Errorf("load streams: %w", err)
	}
	for _, s := range lost {
		if err := t.breakStream(ctx, tx, s, "its table, log or predicate was dropped"); err != nil {
			return nil, err
		}
	}
	safe, err := cat.safeTypes(ctx, tx)
	if err != nil {
		return nil, fmt.Errorf("load types of keys: %w", err)
	}
	for _, tab := range cat.tables {
		tab.painter, tab.queries = newPainter(tab), make(map[string]string)
		if tab.mirror != nil {
			if reason := tab.mirrorFault(safe); reason != "" {
				if err := t.breakMirror(ctx, tx, tab, reason); err != nil {
					return nil, err
				}
			}
		}
		if len(tab.key) == 0 {
			for _, s := range tab.streams {
				if err := t.breakStream(ctx, tx, s, "the table has no primary key any more"); err != nil {
					return nil, err
				}
			}
			tab.streams = nil
		}
		if tab.mirror != nil {
			tab.mirror.painter, tab.mirror.mirrorStatements = tab.painter, newMirrorStatements(tab)
		}
		for _, s := range tab.streams {
			t.metrics.knowStream(s.label)
			s.sql = streamSQL(tab, s)
		}
		tab.judged = tab.judgedColumns()
	}
	return cat, nil
}

// breakLostMirrors takes out managed tables that are gone, or whose mirrors are.
func (t *Target) breakLostMirrors(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT m.table_oid, m.schema_name || '.' || m.table_name, c.oid IS NOT NULL
		FROM koldstore.managed_table m LEFT JOIN pg_catalog.pg_class c ON c.oid = m.table_oid
		WHERE m.`+tableTakesPart+` AND (c.oid IS NULL OR NOT EXISTS (SELECT FROM pg_catalog.pg_class mc WHERE mc.oid = m.mirror_oid))`)
	var lost []*table
	var there []bool
	if err == nil {
		var tab table
		var exists bool
		_, err = pgx.ForEachRow(rows, []any{&tab.oid, &tab.name, &exists}, func() error {
			lost, there = append(lost, &table{oid: tab.oid, name: tab.name}), append(there, exists)
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("look for mirrors that are gone: %w", err)
	}
	for i, tab := range lost {
		reason := "the table was dropped"
		if there[i] {
			reason = "its mirror was dropped"
		}
		if err := t.breakMirror(ctx, tx, tab, reason); err != nil {
			return err
		}
	}
	return nil
}

func (c *catalog) loadTables(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		SELECT c.oid, c.reltype, pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname), `+shapeSQL+`, c.relkind = 'p',
		       coalesce(m.mirror_oid, 0), coalesce(pg_catalog.quote_ident(mn.nspname) || '.' || pg_catalog.quote_ident(mc.relname), ''), coalesce(m.state IN ('seeding', 'healing'), false)
		FROM (SELECT t.table_oid FROM koldstore.managed_table t WHERE t.`+tableTakesPart+`
		      UNION SELECT s.table_oid FROM koldstore.stream s WHERE s.`+streamTakesPart+`) w
		JOIN pg_catalog.pg_class c ON c.oid = w.table_oid
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN (koldstore.managed_table m
		           JOIN pg_catalog.pg_class mc ON mc.oid = m.mirror_oid
		           JOIN pg_catalog.pg_namespace mn ON mn.oid = mc.relnamespace) ON m.table_oid = c.oid AND m.`+tableTakesPart)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		tab, m := &table{}, &mirror{}
		if err := rows.Scan(&tab.oid, &tab.rowType, &tab.name, &tab.shape, &tab.partitioned, &m.oid, &m.name, &m.seeding); err != nil {
			return err
		}
		if m.name != "" {
			tab.mirror = m
		}
		c.tables[tab.oid] = tab
	}
	return rows.Err()
}

func (c *catalog) loadColumns(ctx context.Context, tx pgx.Tx) error {
	byMirror := make(map[uint32]*table)
	oids := make([]uint32, 0, 2*len(c.tables))
	for oid, tab := range c.tables {
		oids = append(oids, oid)
		if tab.mirror != nil {
			oids = append(oids, tab.mirror.oid)
			byMirror[tab.mirror.oid] = tab
		}
	}
	rows, err := tx.Query(ctx, `
		SELECT a.attrelid, a.attname, a.attisdropped, a.attgenerated <> '', a.xmin::text::bigint, a.atttypid,
		       coalesce(pg_catalog.quote_ident(tn.nspname) || '.' || pg_catalog.quote_ident(t.typname), ''), coalesce(b.type, 0), coalesce(b.typmod, -1), a.attcollation,
		       CASE WHEN a.atthasmissing THEN (a.attmissingval::text::text[])[1] END,
		       coalesce(pg_catalog.array_position((i.indkey::int2[])[0:i.indnkeyatts - 1], a.attnum) - 1, -1)
		FROM pg_catalog.pg_attribute a
		LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
		LEFT JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
		LEFT JOIN LATERAL koldstore.base_type(a.atttypid, a.atttypmod) b ON a.atttypid <> 0
		LEFT JOIN pg_catalog.pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
		WHERE a.attrelid = ANY ($1) AND a.attnum > 0
		ORDER BY a.attrelid, a.attnum`, oids)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var oid uint32
		var a attribute
		var keyPosition int
		if err := rows.Scan(&oid, &a.name, &a.dropped, &a.generated, &a.xmin, &a.typeOID, &a.typeName, &a.base, &a.modifier, &a.collation, &a.missing, &keyPosition); err != nil {
			return err
		}
		if tab := c.tables[oid]; tab != nil {
			tab.add(a, keyPosition)
		} else if tab := byMirror[oid]; tab != nil { // its key columns come first, in the order of the key
			tab.mirror.columns++
			if keyPosition >= 0 {
				tab.mirror.keys, tab.mirror.key = append(tab.mirror.keys, ident(a.name)), append(tab.mirror.key, a)
			}
		}
	}
	return rows.Err()
}

// add appends a column; keyPosition is its place in the primary key or negative.
func (t *table) add(a attribute, keyPosition int) {
	t.attributes = append(t.attributes, a)
	if a.dropped {
		return
	}
	t.columns = append(t.columns, len(t.attributes)-1)
	if keyPosition < 0 {
		return
	}
	for len(t.key) <= keyPosition {
		t.key = append(t.key, -1)
	}
	t.key[keyPosition] = len(t.columns) - 1
}

// loadStreams returns the streams that have lost something they cannot do without.
func (c *catalog) loadStreams(ctx context.Context, tx pgx.Tx) (lost []*stream, err error) {
	rows, err := tx.Query(ctx, `
		SELECT s.table_oid, s.stream_id, s.schema_name || '.' || s.name, coalesce(pg_catalog.quote_ident(ln.nspname) || '.' || pg_catalog.quote_ident(l.relname), ''),
		       coalesce(pg_catalog.quote_ident(pn.nspname) || '.' || pg_catalog.quote_ident(p.proname), ''), s.predicate_fn, s.pre_image,
		       s.state = 'seeding', coalesce(koldstore.log_end(s.log_oid), ''),
		       ARRAY(SELECT d.refobjsubid FROM pg_catalog.pg_depend d
		             WHERE d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.objid = s.predicate_fn
		               AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = s.table_oid AND d.refobjsubid > 0),
		       EXISTS (SELECT FROM pg_catalog.pg_depend d
		               WHERE d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.objid = s.predicate_fn AND d.refobjid >= $1
		                 AND d.refclassid IN ('pg_catalog.pg_proc'::pg_catalog.regclass, 'pg_catalog.pg_operator'::pg_catalog.regclass, 'pg_catalog.pg_type'::pg_catalog.regclass)
		                 AND d.refobjid <> coalesce((SELECT c.reltype FROM pg_catalog.pg_class c WHERE c.oid = s.table_oid), 0))
		FROM koldstore.stream s
		LEFT JOIN (pg_catalog.pg_class l JOIN pg_catalog.pg_namespace ln ON ln.oid = l.relnamespace) ON l.oid = s.log_oid
		LEFT JOIN (pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace pn ON pn.oid = p.pronamespace) ON p.oid = s.predicate_fn
		WHERE s.`+streamTakesPart+`
		ORDER BY s.stream_id`, firstUserOID)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var oid uint32
		s := &stream{}
		var uses []int
		if err := rows.Scan(&oid, &s.id, &s.label, &s.log, &s.predicate, &s.predicateOID, &s.preImage, &s.seeding, &s.end, &uses, &s.foreign); err != nil {
			return nil, err
		}
		if tab := c.tables[oid]; tab != nil && s.log != "" && s.predicate != "" {
			for _, number := range uses {
				s.uses = append(s.uses, slices.Index(tab.columns, number-1)) // a predicate keeps its columns from being dropped
			}
			tab.streams = append(tab.streams, s)
		} else {
			lost = append(lost, s)
		}
	}
	return lost, rows.Err()
}

// stillTrueSQL asks whether tables have the shape, and mirrors and streams the state, that the catalog says. It is asked after
// writing: what has not changed by then had not changed while the statements in between looked at it.
const stillTrueSQL = `SELECT
	NOT EXISTS (SELECT FROM unnest($1::oid[], $2::text[]) AS known(oid, shape)
		WHERE known.shape IS DISTINCT FROM (SELECT ` + shapeSQL + `
			FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = known.oid))
	AND pg_catalog.cardinality($3::oid[]) = (SELECT count(*) FROM koldstore.managed_table m WHERE m.mirror_oid = ANY ($3) AND m.` + tableTakesPart + `)
	AND pg_catalog.cardinality($4::bigint[]) = (SELECT count(*) FROM koldstore.stream s WHERE s.stream_id = ANY ($4) AND s.` + streamTakesPart + `)`

// stillTrueArgs are the arguments of stillTrueSQL for some tables.
func stillTrueArgs(tables []*table) []any {
	oids, shapes := make([]uint32, 0, len(tables)), make([]string, 0, len(tables))
	mirrors, streams := []uint32{}, []int64{}
	for _, tab := range tables {
		oids, shapes = append(oids, tab.oid), append(shapes, tab.shape)
		if tab.mirror != nil {
			mirrors = append(mirrors, tab.mirror.oid)
		}
		for _, s := range tab.streams {
			streams = append(streams, s.id)
		}
	}
	return []any{oids, shapes, mirrors, streams}
}
