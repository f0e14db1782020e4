package coldstore

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/file"

	"github.com/koldproxy/koldproxy"
)

// segmentWriter turns rows into a segment file. It holds one row group in memory, never more.
type segmentWriter struct {
	layout  *layout
	byName  map[string]int // column by name
	keys    map[string]int // key column by name
	to      io.Writer
	out     *file.Writer // begun with the first row group
	limits  rowGroupLimits
	summary summary

	seq, hash  typed[int64]
	op         typed[int32]
	exact      typed[parquet.ByteArray]
	missing    typed[parquet.ByteArray]
	key        typed[parquet.ByteArray]
	columns    []codec
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
		seq: typed[int64]{required: true}, op: typed[int32]{required: true}, hash: typed[int64]{required: true},
		values: make([][]byte, len(l.columns)), keyValues: make([][]byte, len(l.key)),
	}
	for i := range l.columns {
		c, err := l.columns[i].codec()
		if err != nil {
			return nil, err
		}
		sw.columns = append(sw.columns, c)
		sw.byName[l.columns[i].Name] = i
	}
	for i, name := range l.key {
		sw.keys[name] = i
	}
	return sw, nil
}

// begin opens the file when its first row group is full, or the last one: how many rows that has is how large Bloom filters have to be.
func (w *segmentWriter) begin() error {
	root, err := w.layout.schema()
	if err != nil {
		return err
	}
	meta, err := w.layout.metadata()
	if err != nil {
		return err
	}
	// Only Write is passed on: closing the file, and syncing it, stays with its owner.
	w.out, err = file.NewParquetWriterWithError(struct{ io.Writer }{w.to}, root, file.WithWriterProps(properties(w.groupRows)), file.WithWriteMetadata(meta))
	if err != nil {
		return fmt.Errorf("begin segment file: %w", err)
	}
	return nil
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
	w.seq.values = append(w.seq.values, int64(row.Seq))
	w.op.values = append(w.op.values, int32(row.Op))
	w.hash.values = append(w.hash.values, row.hash)
	var missing []string
	for i, value := range w.values {
		name := w.layout.columns[i].Name
		switch {
		case value == nil && !tombstone:
			missing = append(missing, name)
			w.columns[i].addNull()
		case value == nil || string(value) == "null":
			w.columns[i].addNull()
		case !w.columns[i].add(value):
			w.columns[i].addNull()
			w.exactRow.add(appendString(nil, name), value)
		}
	}
	for _, m := range w.extras {
		w.exactRow.add(append(append([]byte{'"'}, m.key...), '"'), m.value)
	}
	addOptional(&w.exact, w.exactRow.buf, func() []byte { return w.exactRow.finish() })
	if err := w.addMissing(missing); err != nil {
		return err
	}
	if w.keyFollows(tombstone) {
		w.key.addNull()
	} else {
		w.key.values, w.key.levels = append(w.key.values, bytes.Clone(row.PK)), append(w.key.levels, 1)
	}

	if w.summary.rows == 0 {
		w.summary.minSeq = row.Seq
	}
	w.summary.maxSeq = row.Seq
	w.summary.rows++
	if tombstone {
		w.summary.tombstones++
	}
	w.summary.hashes = append(w.summary.hashes, row.hash)
	w.summary.seqs = append(w.summary.seqs, row.Seq)
	size := int64(len(row.Image) + len(row.PK) + 32)
	w.groupRows++
	w.groupBytes += size
	w.rawBytes += size
	if w.groupRows >= w.limits.rows || w.groupBytes >= w.limits.bytes {
		return w.closeGroup()
	}
	return nil
}

func addOptional(c *typed[parquet.ByteArray], present []byte, value func() []byte) {
	if len(present) == 0 {
		c.addNull()
		return
	}
	c.values, c.levels = append(c.values, value()), append(c.levels, 1)
}

func (w *segmentWriter) addMissing(names []string) error {
	if names == nil {
		w.missing.addNull()
		return nil
	}
	list, err := json.Marshal(names)
	if err != nil {
		return err
	}
	w.missing.values, w.missing.levels = append(w.missing.values, list), append(w.missing.levels, 1)
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

func (w *segmentWriter) closeGroup() (err error) {
	if w.groupRows == 0 {
		return nil
	}
	if w.out == nil {
		if err := w.begin(); err != nil {
			return err
		}
	}
	group, err := w.out.AppendRowGroupChecked()
	if err != nil {
		return fmt.Errorf("begin row group: %w", err)
	}
	system := []codec{&w.seq, &w.op, &w.hash, &w.exact, &w.missing, &w.key}
	for i, c := range append(system, w.columns...) {
		chunk, err := group.NextColumn()
		if err != nil {
			return fmt.Errorf("begin column %d: %w", i, err)
		}
		if err := c.write(chunk); err != nil {
			return fmt.Errorf("write column %d: %w", i, err)
		}
	}
	if err := group.Close(); err != nil {
		return fmt.Errorf("close row group: %w", err)
	}
	w.groupRows, w.groupBytes = 0, 0
	w.groups++
	return nil
}

// close writes what is left and the footer. The file is complete after it returns nil.
func (w *segmentWriter) close() (summary, error) {
	if err := w.closeGroup(); err != nil {
		return summary{}, err
	}
	if w.out == nil { // no rows: no file
		return w.summary, nil
	}
	if err := w.out.Close(); err != nil {
		return summary{}, fmt.Errorf("close segment file: %w", err)
	}
	return w.summary, nil
}
