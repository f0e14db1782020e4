package coldstore

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/koldproxy/koldproxy"
)

// segmentWriter turns rows into a segment file. It takes rows apart into batches of typed columns, of which it holds three at most; the
// encoder does the rest. Whoever makes one calls close or stop.
type segmentWriter struct {
	layout  *layout
	byName  map[string]int // column by name
	keys    map[string]int // key column by name
	to      io.Writer
	encoder *encoder // begun with the first full batch
	limits  rowGroupLimits
	summary summary

	batch      *batch
	batchBytes int64
	groupRows  int
	groupBytes int64
	groups     int
	rawBytes   int64 // of all rows so far

	// Of the row at hand, reused from row to row.
	values    [][]byte // raw value by column, nil for one that is missing
	exactRow  objectWriter
	extras    []member
	keyValues [][]byte // raw value by key column
	imageHint memberOrder
	keyHint   memberOrder
}

type member struct{ key, value []byte }

// rowGroupLimits says when a row group is closed: at so many rows, or so many bytes of JSON.
type rowGroupLimits struct {
	rows  int
	bytes int64
}

// maxRowGroups stays below what the format can count (an int16).
const maxRowGroups = 30_000

func newSegmentWriter(w io.Writer, l *layout, limits rowGroupLimits) (*segmentWriter, error) {
	sw := &segmentWriter{
		layout: l, to: w, limits: limits,
		byName: make(map[string]int, len(l.columns)), keys: make(map[string]int, len(l.key)),
		values: make([][]byte, len(l.columns)), keyValues: make([][]byte, len(l.key)),
	}
	var err error
	if sw.batch, err = newBatch(l); err != nil {
		return nil, err
	}
	for i := range l.columns {
		sw.byName[l.columns[i].Name] = i
	}
	for i, name := range l.key {
		sw.keys[name] = i
	}
	return sw, nil
}

// full says whether the file has to be closed although there are more rows.
func (w *segmentWriter) full(maxRows, maxBytes int64) bool {
	return w.summary.rows >= maxRows || w.rawBytes >= maxBytes || w.groups >= maxRowGroups
}

// add appends a row. Rows must come in ascending order of seq.
func (w *segmentWriter) add(row *mirrorRow) error {
	switch {
	case w.summary.rows > 0 && row.Seq <= w.summary.maxSeq:
		return fmt.Errorf("row with seq %d after one with %d", row.Seq, w.summary.maxSeq)
	case row.Op < koldproxy.OpInsert || row.Op > koldproxy.OpDelete:
		return fmt.Errorf("row with seq %d has the unknown op %d", row.Seq, row.Op)
	case row.Op != koldproxy.OpDelete && row.Image == nil:
		return fmt.Errorf("row with seq %d has op %d and no image", row.Seq, row.Op)
	}
	if err := w.split(row); err != nil {
		return fmt.Errorf("row with seq %d: %w", row.Seq, err)
	}
	tombstone := row.Op == koldproxy.OpDelete
	b := w.batch
	b.seq.values = append(b.seq.values, int64(row.Seq))
	b.op.values = append(b.op.values, int32(row.Op))
	b.hash.values = append(b.hash.values, row.hash)
	var missing []string
	for i, value := range w.values {
		switch {
		case value == nil && !tombstone:
			missing = append(missing, w.layout.columns[i].Name)
			b.columns[i].addNull()
		case value == nil || string(value) == "null":
			b.columns[i].addNull()
		case !b.columns[i].add(value):
			b.columns[i].addNull()
			w.exactRow.add(appendString(nil, w.layout.columns[i].Name), value)
		}
	}
	for _, m := range w.extras {
		w.exactRow.add(append(append([]byte{'"'}, m.key...), '"'), m.value)
	}
	if len(w.exactRow.buf) == 0 {
		b.exact.addNull()
	} else {
		b.exact.addValue(w.exactRow.finish())
	}
	if err := b.addMissing(missing); err != nil {
		return err
	}
	if w.keyFollows(tombstone) {
		b.key.addNull()
	} else {
		b.key.addValue(bytes.Clone(row.PK))
	}
	w.count(row)
	return w.send()
}

// count notes what the catalog will know of a row.
func (w *segmentWriter) count(row *mirrorRow) {
	if w.summary.rows == 0 {
		w.summary.minSeq = row.Seq
	}
	w.summary.maxSeq = row.Seq
	w.summary.rows++
	if row.Op == koldproxy.OpDelete {
		w.summary.tombstones++
	}
	w.summary.hashes = append(w.summary.hashes, row.hash)
	w.summary.seqs = append(w.summary.seqs, row.Seq)
	size := int64(len(row.Image) + len(row.PK) + 32)
	w.batchBytes += size
	w.groupRows++
	w.groupBytes += size
	w.rawBytes += size
}

const (
	batchBytes = 2 << 20
	batchSize  = 4 << 10
	// sampleTimes is how much larger the first batch is, from which encodings are chosen.
	sampleTimes = 4
)

// send hands the batch to the encoder if it is full, or the last one of its row group.
func (w *segmentWriter) send() error {
	w.batch.endsGroup = w.groupRows >= w.limits.rows || w.groupBytes >= w.limits.bytes
	times := 1
	if w.encoder == nil {
		times = sampleTimes
	}
	if !w.batch.endsGroup && w.batch.rows() < times*batchSize && w.batchBytes < int64(times)*batchBytes {
		return nil
	}
	return w.flush()
}

func (w *segmentWriter) flush() (err error) {
	if w.batch.endsGroup {
		w.groupRows, w.groupBytes = 0, 0
		w.groups++
	}
	w.batchBytes = 0
	if w.encoder == nil {
		if w.encoder, err = startEncoder(w.to, w.layout); err != nil {
			return err
		}
	}
	w.batch, err = w.encoder.swap(w.batch)
	return err
}

func (b *batch) addMissing(names []string) error {
	if names == nil {
		b.missing.addNull()
		return nil
	}
	list, err := json.Marshal(names)
	if err != nil {
		return err
	}
	b.missing.addValue(list)
	return nil
}

// split puts the members of the row's image, or of its key for a tombstone, beside the columns.
func (w *segmentWriter) split(row *mirrorRow) error {
	clear(w.values)
	clear(w.keyValues)
	w.imageHint.at, w.keyHint.at = 0, 0
	w.extras = w.extras[:0]
	source := row.Image
	if row.Op == koldproxy.OpDelete {
		source = row.PK
	}
	if err := eachMember(source, func(key, value []byte) error {
		i, ok := w.imageHint.find(key, w.byName)
		if !ok {
			return errNotJSON
		}
		if i >= 0 {
			w.values[i] = value
		} else {
			w.extras = append(w.extras, member{key, value})
		}
		return nil
	}); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	found := 0
	err := eachMember(row.PK, func(key, value []byte) error {
		i, ok := w.keyHint.find(key, w.keys)
		if !ok || i < 0 || w.keyValues[i] != nil {
			return errors.New("a member that is no key column")
		}
		w.keyValues[i] = value
		found++
		return nil
	})
	if err == nil && found != len(w.keys) {
		err = errors.New("key columns are missing")
	}
	if err != nil {
		return fmt.Errorf("primary key: %w", err)
	}
	return nil
}

// keyFollows says whether a reader can take the key from the row's columns. It cannot when the key was rendered under other
// settings than the image, or a key column was renamed after the image was written.
func (w *segmentWriter) keyFollows(tombstone bool) bool {
	if tombstone && len(w.extras) == 0 {
		return true // the columns were filled from the key itself
	}
	for k, value := range w.keyValues {
		i, ok := w.byName[w.layout.key[k]]
		if !ok || string(w.values[i]) != string(value) {
			return false
		}
	}
	return true
}

// memberOrder remembers the order in which objects have their members: rows of a table have theirs in the same one, so the next is
// where the row before had it. at is the member to come.
type memberOrder struct {
	keys  [][]byte // as they are between the quotes
	index []int    // what they were found as
	at    int
}

// find looks a member up in byName: -1 if it is not there. ok is false for a name that is no JSON string.
func (m *memberOrder) find(key []byte, byName map[string]int) (i int, ok bool) {
	at := m.at
	m.at++
	if at < len(m.keys) && bytes.Equal(m.keys[at], key) {
		return m.index[at], true
	}
	i, found := byName[string(key)]
	if bytes.IndexByte(key, '\\') >= 0 {
		name, ok := unescape(key)
		if !ok {
			return -1, false
		}
		i, found = byName[name]
	}
	if !found {
		i = -1
	}
	if at <= len(m.keys) && at < 4096 {
		m.keys, m.index = append(m.keys[:at], bytes.Clone(key)), append(m.index[:at], i)
	}
	return i, true
}

// close writes what is left and the footer. The file is complete after it returns nil.
func (w *segmentWriter) close() (summary, error) {
	if w.groupRows > 0 {
		w.batch.endsGroup = true
		if err := w.flush(); err != nil {
			return summary{}, err
		}
	}
	if w.encoder == nil { // no rows: no file
		return w.summary, nil
	}
	if err := w.encoder.finish(true); err != nil {
		return summary{}, err
	}
	return w.summary, nil
}

// stop gives the file up unless it is closed.
func (w *segmentWriter) stop() {
	if w.encoder != nil {
		_ = w.encoder.finish(false) // of a file that nobody wants
	}
}
