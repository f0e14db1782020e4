package koldproxy

import "time"

// Op says what a change did to a row. The first three values are what koldstore.changes_since shows in its op column.
type Op int16

// The operations of row changes.
const (
	OpInsert   Op = 1
	OpUpdate   Op = 2
	OpDelete   Op = 3
	OpTruncate Op = 4
)

// DatumKind tells apart the four things that a column of a decoded row can be.
type DatumKind uint8

const (
	// DatumMissing means that the row came without this column: it did not exist then, is generated, or is no part of the
	// key and only the key was logged.
	DatumMissing DatumKind = iota
	// DatumNull is the SQL NULL.
	DatumNull
	// DatumText carries the value in PostgreSQL's text output format under the pinned settings of the applier.
	DatumText
	// DatumUnchanged is a toasted value that the change did not touch and the log does not carry.
	DatumUnchanged
)

// Datum is one column of a decoded row. Text is set for [DatumText] only and is immutable.
type Datum struct {
	Kind DatumKind
	Text string
}

// Column describes one column of a relation as the write-ahead log announced it.
type Column struct {
	Name    string
	TypeOID uint32
	TypeMod int32
}

// Relation is one version of a table's shape, as announced in front of the rows that have it. The same table may have
// several versions within one transaction; leaves of partitioned tables may announce another column order.
type Relation struct {
	OID       uint32
	Namespace string
	Name      string
	Columns   []Column
}

// Change is one committed row event, in commit order. Old and New run parallel to Relation.Columns; Old is nil where the
// log carried no old row, New is nil for deletes and truncates. Where the log carried the old key only, the other columns
// of Old are missing ([DatumMissing]).
type Change struct {
	Relation *Relation
	Op       Op
	Old, New []Datum
	// CommitLSN is where the commit record of the change's transaction begins; all changes of a transaction share it, and
	// no other transaction has it. (The checkpoint holds ends of commit records: the end is on the wire only after the
	// changes, too late for a transaction that is larger than memory.)
	CommitLSN LSN
	// CommitTime is when the transaction committed, by the server's clock.
	CommitTime time.Time
	// XID is the transaction's id.
	XID uint32
}
