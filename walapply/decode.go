package walapply

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/koldproxy/koldproxy"
)

// messageKind says what a [message] is.
type messageKind uint8

const (
	messageBegin messageKind = iota
	messageChange
	messageCommit
	messageKeepalive
)

// message is one step of the stream for the apply loop.
type message struct {
	kind messageKind
	// lsn is the begin of the commit record (begin), its end (commit) or the end of log (keepalive).
	lsn koldproxy.LSN
	// time is the commit time (begin and commit).
	time time.Time
	// behind is how long ago the commit was when the server sent it, by its own clock (commit).
	behind time.Duration
	// change is set for messageChange.
	change koldproxy.Change
	// bytes is about what the message occupies in memory.
	bytes int
}

// relation is a relation's current version with what decoding tuples needs besides.
type relation struct {
	*koldproxy.Relation
	key []bool // column is part of the replica identity, by the message's flags
}

// decoder turns pgoutput messages (protocol 1, text format) into messages. It is total: any bytes give messages or an error,
// and it allocates in proportion to the input only. It belongs to one goroutine and one replication session.
type decoder struct {
	relations map[uint32]relation
	inTx      bool
	commitLSN koldproxy.LSN
	commitAt  time.Time
	xid       uint32
	spare     []koldproxy.Datum // memory for rows, see row
}

func newDecoder() *decoder { return &decoder{relations: make(map[uint32]relation)} }

// decode appends what data, the payload of one XLogData message, says to dst. The result holds no memory of data.
func (d *decoder) decode(dst []message, data []byte) ([]message, error) {
	if len(data) == 0 {
		return dst, errors.New("decode: empty message")
	}
	r := &reader{s: string(data[1:])}
	out, err := d.dispatch(dst, data[0], r, len(data))
	if err == nil && r.bad {
		err = errors.New("message is shorter than it says")
	}
	if err == nil && len(r.s) > 0 {
		err = fmt.Errorf("%d bytes left over", len(r.s))
	}
	if err != nil {
		return dst, fmt.Errorf("decode message %q of %d bytes: %w", data[0], len(data), err)
	}
	return out, nil
}

func (d *decoder) dispatch(dst []message, kind byte, r *reader, size int) ([]message, error) {
	switch kind {
	case 'B':
		return d.begin(dst, r)
	case 'C':
		return d.commit(dst, r)
	case 'R':
		return dst, d.relation(r)
	case 'I':
		return d.insert(dst, r, size)
	case 'U':
		return d.update(dst, r, size)
	case 'D':
		return d.delete(dst, r, size)
	case 'T':
		return d.truncate(dst, r)
	case 'Y', 'O', 'M': // types, origins and logical messages mean nothing to us
		r.s = ""
		return dst, nil
	default:
		return dst, errors.New("unknown kind of message")
	}
}

// messageBytes is what a message costs without its rows.
const messageBytes = int(unsafe.Sizeof(message{}))

func (d *decoder) begin(dst []message, r *reader) ([]message, error) {
	lsn, at, xid := r.lsn(), r.time(), r.uint32()
	if d.inTx {
		return dst, errors.New("begin inside a transaction")
	}
	if r.bad {
		return dst, nil
	}
	d.inTx, d.commitLSN, d.commitAt, d.xid = true, lsn, at, xid
	return append(dst, message{kind: messageBegin, lsn: lsn, time: at, bytes: messageBytes}), nil
}

func (d *decoder) commit(dst []message, r *reader) ([]message, error) {
	r.byte() // flags, unused
	begin, end, at := r.lsn(), r.lsn(), r.time()
	if r.bad {
		return dst, nil
	}
	if !d.inTx || begin != d.commitLSN || end <= begin {
		return dst, fmt.Errorf("commit record %v to %v does not fit the begin message", begin, end)
	}
	d.inTx = false
	return append(dst, message{kind: messageCommit, lsn: end, time: at, bytes: messageBytes}), nil
}

// relation reads a relation message. Each makes a new version, even if nothing has changed.
func (d *decoder) relation(r *reader) error {
	rel := &koldproxy.Relation{OID: r.uint32(), Namespace: r.cstring(), Name: r.cstring()}
	if rel.Namespace == "" { // how pgoutput spells pg_catalog
		rel.Namespace = "pg_catalog"
	}
	r.byte() // replica identity setting; what counts is what tuples carry
	n := int(r.uint16())
	const least = 1 + 1 + 4 + 4 // flags, empty name, type, modifier
	if n*least > len(r.s) {
		return errors.New("message is shorter than it says")
	}
	rel.Columns = make([]koldproxy.Column, n)
	key := make([]bool, n)
	for i := range n {
		key[i] = r.byte()&1 != 0
		rel.Columns[i] = koldproxy.Column{Name: r.cstring(), TypeOID: r.uint32(), TypeMod: int32(r.uint32())}
	}
	if !r.bad {
		d.relations[rel.OID] = relation{Relation: rel, key: key}
	}
	return nil
}

func (d *decoder) insert(dst []message, r *reader, size int) ([]message, error) {
	rel, err := d.lookup(r)
	if err != nil {
		return dst, err
	}
	if kind := r.byte(); kind != 'N' {
		return dst, fmt.Errorf("insert with a tuple of kind %q", kind)
	}
	row, err := d.tuple(rel, r, false)
	if err != nil {
		return dst, err
	}
	return d.change(dst, koldproxy.Change{Relation: rel.Relation, Op: koldproxy.OpInsert, New: row}, size), nil
}

func (d *decoder) update(dst []message, r *reader, size int) ([]message, error) {
	rel, err := d.lookup(r)
	if err != nil {
		return dst, err
	}
	c := koldproxy.Change{Relation: rel.Relation, Op: koldproxy.OpUpdate}
	kind := r.byte()
	if kind == 'K' || kind == 'O' {
		if c.Old, err = d.tuple(rel, r, kind == 'K'); err != nil {
			return dst, err
		}
		kind = r.byte()
	}
	if kind != 'N' {
		return dst, fmt.Errorf("update with a tuple of kind %q", kind)
	}
	if c.New, err = d.tuple(rel, r, false); err != nil {
		return dst, err
	}
	return d.change(dst, c, size), nil
}

func (d *decoder) delete(dst []message, r *reader, size int) ([]message, error) {
	rel, err := d.lookup(r)
	if err != nil {
		return dst, err
	}
	kind := r.byte()
	if kind != 'K' && kind != 'O' {
		return dst, fmt.Errorf("delete with a tuple of kind %q", kind)
	}
	row, err := d.tuple(rel, r, kind == 'K')
	if err != nil {
		return dst, err
	}
	return d.change(dst, koldproxy.Change{Relation: rel.Relation, Op: koldproxy.OpDelete, Old: row}, size), nil
}

// truncate makes one change per relation.
func (d *decoder) truncate(dst []message, r *reader) ([]message, error) {
	n := int(r.uint32())
	r.byte() // CASCADE and RESTART IDENTITY: all truncated tables that are published are named anyway
	if n != len(r.s)/4 {
		return dst, errors.New("truncate with a wrong number of relations")
	}
	out := dst
	for range n {
		rel, err := d.lookup(r)
		if err != nil {
			return dst, err
		}
		out = d.change(out, koldproxy.Change{Relation: rel.Relation, Op: koldproxy.OpTruncate}, 0)
	}
	return out, nil
}

// lookup reads the OID of a relation that was announced before, inside a transaction.
func (d *decoder) lookup(r *reader) (relation, error) {
	oid := r.uint32()
	rel, ok := d.relations[oid]
	switch {
	case !d.inTx:
		return rel, errors.New("change outside a transaction")
	case !ok:
		return rel, fmt.Errorf("relation %d has not been announced", oid)
	}
	return rel, nil
}

// change completes c with what it shares with its transaction. size is the length of the message.
func (d *decoder) change(dst []message, c koldproxy.Change, size int) []message {
	const datumBytes = int(unsafe.Sizeof(koldproxy.Datum{}))
	c.CommitLSN, c.CommitTime, c.XID = d.commitLSN, d.commitAt, d.xid
	return append(dst, message{
		kind: messageChange, lsn: d.commitLSN, time: d.commitAt, change: c,
		bytes: messageBytes + size + (len(c.Old)+len(c.New))*datumBytes,
	})
}

// tuple reads one row. Of a key tuple only the columns of the replica identity count: the others are sent as NULL
// whatever they hold.
func (d *decoder) tuple(rel relation, r *reader, keyOnly bool) ([]koldproxy.Datum, error) {
	n := int(r.uint16())
	if n != len(rel.Columns) {
		return nil, fmt.Errorf("row of %d columns in a relation of %d", n, len(rel.Columns))
	}
	row := d.row(n)
	for i := range row {
		switch kind := r.byte(); kind {
		case 'n':
			row[i].Kind = koldproxy.DatumNull
			if keyOnly && !rel.key[i] {
				row[i].Kind = koldproxy.DatumMissing
			}
		case 'u':
			row[i].Kind = koldproxy.DatumUnchanged
		case 't':
			row[i] = koldproxy.Datum{Kind: koldproxy.DatumText, Text: r.bytes(r.uint32())}
		default:
			return nil, fmt.Errorf("column of kind %q", kind)
		}
	}
	return row, nil
}

// spareDatums is for how many columns memory is taken at once.
const spareDatums = 1024

// row is an empty row of n columns.
func (d *decoder) row(n int) []koldproxy.Datum {
	if len(d.spare) < n {
		d.spare = make([]koldproxy.Datum, max(n, spareDatums))
	}
	row := d.spare[:n:n]
	d.spare = d.spare[n:]
	return row
}
