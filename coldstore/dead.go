package coldstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/RoaringBitmap/roaring/v2"
)

// deadRows says which rows of a segment newer segments supersede, and since which generation of the table. A reader whose
// snapshot is of generation g must see a row that died in g+1, so the newest deaths are kept apart from the rest for a while.
//
// Encoded (koldstore.segment.dead), numbers big endian:
//
//	byte     1, the version of this encoding
//	entries, in ascending order of generation:
//	  int64  generation that published the superseding rows
//	  int64  time of that, milliseconds since 1970
//	  uint8  1 if the entry stands for several generations up to this one, 0 if for this one alone
//	  uint32 length of what follows
//	  bytes  ordinals, a roaring bitmap in the portable format
type deadRows []deadEntry

type deadEntry struct {
	generation int64
	at         time.Time
	merged     bool
	ordinals   *roaring.Bitmap
}

const (
	deadVersion     = 1
	deadEntryHeader = 8 + 8 + 1 + 4
)

// errTooOld says that the state of an old generation is not known any more.
var errTooOld = errors.New("the generation is older than what is kept")

// asOf returns the rows that were dead in a generation.
func (d deadRows) asOf(generation int64) (*roaring.Bitmap, error) {
	all := roaring.New()
	for _, e := range d {
		switch {
		case e.generation <= generation:
			all.Or(e.ordinals)
		case e.merged:
			return nil, errTooOld
		}
	}
	return all, nil
}

// all returns every dead row.
func (d deadRows) all() *roaring.Bitmap {
	all := roaring.New()
	for _, e := range d {
		all.Or(e.ordinals)
	}
	return all
}

// with returns d with the rows that die in a generation. Entries from before keepSince become one. d itself stays.
func (d deadRows) with(generation int64, ordinals *roaring.Bitmap, now, keepSince time.Time) deadRows {
	var out deadRows
	for _, e := range d {
		if last := len(out) - 1; last >= 0 && e.at.Before(keepSince) {
			out[last] = deadEntry{
				generation: e.generation, at: e.at, merged: true, ordinals: roaring.Or(out[last].ordinals, e.ordinals),
			}
			continue
		}
		out = append(out, e)
	}
	return append(out, deadEntry{generation: generation, at: now, ordinals: ordinals})
}

func (d deadRows) encode() ([]byte, error) {
	out := []byte{deadVersion}
	for _, e := range d {
		e.ordinals.RunOptimize()
		bits, err := e.ordinals.ToBytes()
		if err != nil {
			return nil, fmt.Errorf("encode dead rows: %w", err)
		}
		out = binary.BigEndian.AppendUint64(out, uint64(e.generation))
		out = binary.BigEndian.AppendUint64(out, uint64(e.at.UnixMilli()))
		out = append(out, boolByte(e.merged))
		out = binary.BigEndian.AppendUint32(out, uint32(len(bits)))
		out = append(out, bits...)
	}
	return out, nil
}

func boolByte(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// decodeDead reads what encode wrote; nil means that no row is dead. The result does not refer to data.
func decodeDead(data []byte) (deadRows, error) {
	if len(data) == 0 {
		return nil, nil
	}
	if data[0] != deadVersion {
		return nil, fmt.Errorf("%w: dead rows of version %d", ErrUnknownFormat, data[0])
	}
	var d deadRows
	for data = data[1:]; len(data) > 0; {
		if len(data) < deadEntryHeader {
			return nil, errors.New("dead rows: cut off")
		}
		e := deadEntry{
			generation: int64(binary.BigEndian.Uint64(data)),
			at:         time.UnixMilli(int64(binary.BigEndian.Uint64(data[8:]))),
			merged:     data[16] == 1,
			ordinals:   roaring.New(),
		}
		n := int64(binary.BigEndian.Uint32(data[17:]))
		data = data[deadEntryHeader:]
		if n > int64(len(data)) {
			return nil, errors.New("dead rows: cut off")
		}
		if err := readBitmap(e.ordinals, data[:n]); err != nil {
			return nil, fmt.Errorf("dead rows: %w", err)
		}
		if last := len(d) - 1; last >= 0 && d[last].generation >= e.generation {
			return nil, errors.New("dead rows: generations do not ascend")
		}
		d, data = append(d, e), data[n:]
	}
	return d, nil
}

func readBitmap(into *roaring.Bitmap, data []byte) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("bitmap: %v", r)
		}
	}()
	n, err := into.ReadFrom(bytes.NewReader(data))
	if err == nil && n != int64(len(data)) {
		err = errors.New("trailing bytes")
	}
	if err == nil {
		err = into.Validate()
	}
	return err
}
