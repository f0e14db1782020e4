package coldstore

import (
	"encoding/json"

	"github.com/koldproxy/koldproxy"
)

// Row is one version of one row of a managed table, as jsonb text. The bytes must not be changed: others may have the same row.
type Row struct {
	Seq koldproxy.Seq
	Op  koldproxy.Op
	// PK is an object of the key columns.
	PK json.RawMessage
	// Image is the whole row, nil for a delete.
	Image json.RawMessage
}

// mirrorRow is a row on its way from the mirror into a file.
type mirrorRow struct {
	Row
	hash int64 // of the key, by PostgreSQL
}

// summary is what a file holds, as the catalog records it.
type summary struct {
	rows       int64
	tombstones int64
	minSeq     koldproxy.Seq
	maxSeq     koldproxy.Seq
	hashes     []int64         // of the keys, in row order
	seqs       []koldproxy.Seq // in row order
}
