package coldstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// The mirror is read by COPY in its binary form: what costs most on the way is what the server does for each row, and there it
// writes the image as text and nothing else. Keys come as they are where their JSON is plain, and are put together here.

// One query reads at most maxMirrorPage rows, fewer when they are large: a query that is given up midway has to be read to
// its end.
const (
	maxMirrorPage   = 16 << 10
	minMirrorPage   = 16
	mirrorPageBytes = 8 << 20
)

// read hands the mirror's rows above after and up to through to fn, at most so many of them, in the order of seq, until fn says stop. It
// holds one row at a time, and fn must not keep its bytes.
func (m *mirrorShape) read(ctx context.Context, tx pgx.Tx, after, through koldproxy.Seq, most int64, fn func(row *mirrorRow) (stop bool, err error)) error {
	fields := []string{"m.seq", "m.op", m.hash, "m.row_image"}
	for i := range m.keys {
		fields = append(fields, m.keys[i].sql)
	}
	for limit := int64(minMirrorPage); most > 0; {
		limit = min(limit, most)
		rows := copiedRows{keys: m.keys, fn: fn}
		_, err := tx.Conn().PgConn().CopyTo(ctx, &rows, fmt.Sprintf("COPY (SELECT %s FROM %s m WHERE m.seq > %d AND m.seq <= %d ORDER BY m.seq LIMIT %d) TO STDOUT (FORMAT binary)",
			strings.Join(fields, ", "), m.mirror, after, through, limit))
		switch {
		case rows.err != nil:
			return rows.err
		case err != nil:
			return fmt.Errorf("read mirror: %w", err)
		case rows.stop || rows.n < limit:
			return nil
		}
		after = rows.last
		most -= rows.n
		limit = min(max(mirrorPageBytes/(rows.bytes/rows.n+1), minMirrorPage), maxMirrorPage)
	}
	return nil
}

// copiedRows takes the binary output of one COPY, in pieces of any length, and hands its rows to fn. Whatever goes wrong with
// a row is kept in err, and the rest is passed over, so that the connection stays usable.
type copiedRows struct {
	keys []keyColumn
	fn   func(row *mirrorRow) (stop bool, err error)

	begun bool   // the header is behind
	ended bool   // so is the trailer
	rest  []byte // the beginning of a row whose end has not come yet
	key   objectWriter
	value []byte
	stop  bool
	err   error
	n     int64
	bytes int64
	last  koldproxy.Seq
}

var copySignature = []byte("PGCOPY\n\xff\r\n\x00")

// Write implements io.Writer; it takes everything.
func (c *copiedRows) Write(p []byte) (int, error) {
	data := p
	if len(c.rest) > 0 {
		data = append(c.rest, p...)
	}
	for c.err == nil && !c.stop && !c.ended {
		n, err := c.next(data)
		if err != nil {
			c.err = fmt.Errorf("read mirror: %w", err)
		}
		if n == 0 {
			break
		}
		data = data[n:]
	}
	if c.err != nil || c.stop || c.ended {
		data = nil
	}
	c.rest = append(c.rest[:0], data...)
	return len(p), nil
}

var errCopyFormat = errors.New("not a binary copy of the columns that were asked for")

// next takes the header, a row or the trailer off the front of data and returns its length, 0 if it is not complete.
func (c *copiedRows) next(data []byte) (int, error) {
	if !c.begun {
		header := len(copySignature) + 8 // flags, and the length of an extension that there is none of
		if len(data) < header {
			return 0, nil
		}
		if !bytes.HasPrefix(data, copySignature) || binary.BigEndian.Uint64(data[len(copySignature):]) != 0 {
			return 0, errCopyFormat
		}
		c.begun = true
		return header, nil
	}
	if len(data) < 2 {
		return 0, nil
	}
	count := int16(binary.BigEndian.Uint16(data))
	if count == -1 {
		c.ended = true
		return 2, nil
	}
	if int(count) != 4+len(c.keys) {
		return 0, errCopyFormat
	}
	n, rest := 2, data[2:]
	var fields [4][]byte
	c.key.buf = c.key.buf[:0]
	for i := range int(count) {
		if len(rest) < 4 {
			return 0, nil
		}
		size := int32(binary.BigEndian.Uint32(rest))
		rest = rest[4:]
		if size < -1 || int64(size) > int64(len(rest)) {
			if size < -1 {
				return 0, errCopyFormat
			}
			return 0, nil
		}
		n += 4 + int(max(size, 0))
		var field []byte
		if size >= 0 {
			field, rest = rest[:size:size], rest[size:]
		}
		if i < len(fields) {
			fields[i] = field
			continue
		}
		var ok bool
		if c.value, ok = c.keys[i-len(fields)].render(c.value[:0], field); !ok {
			return 0, errCopyFormat
		}
		c.key.add(c.keys[i-len(fields)].quoted, c.value)
	}
	return n, c.row(fields)
}

// jsonbVersion is the byte in front of the text of a jsonb value.
const jsonbVersion = 1

func (c *copiedRows) row(fields [4][]byte) error {
	seq, op, hash, image := fields[0], fields[1], fields[2], fields[3]
	if len(seq) != 8 || len(op) != 2 || len(hash) != 8 || image != nil && (len(image) == 0 || image[0] != jsonbVersion) {
		return errCopyFormat
	}
	c.key.buf = endObject(c.key.buf, 0)
	row := mirrorRow{
		Row:  Row{Seq: koldproxy.Seq(binary.BigEndian.Uint64(seq)), Op: koldproxy.Op(binary.BigEndian.Uint16(op)), PK: json.RawMessage(c.key.buf)},
		hash: int64(binary.BigEndian.Uint64(hash)),
	}
	if image != nil {
		row.Image = json.RawMessage(image[1:])
	}
	c.n++
	c.last = row.Seq
	c.bytes += int64(len(row.PK) + len(row.Image))
	c.stop, c.err = c.fn(&row)
	return nil
}

// keyColumn is a column of a mirror's key: how to ask for it, and how to turn the answer into what to_jsonb would have made of it.
type keyColumn struct {
	name   string
	quoted []byte // the name as a JSON string
	sql    string
	render func(dst, field []byte) ([]byte, bool)
}

func newKeyColumn(name, expr string, base typeInfo) keyColumn {
	k := keyColumn{name: name, quoted: appendString(nil, name), sql: expr}
	switch {
	case base.builtin && slices.Contains([]string{"int2", "int4", "int8"}, base.name):
		k.render = renderInt
	case base.builtin && slices.Contains([]string{"text", "varchar"}, base.name):
		k.render = func(dst, field []byte) ([]byte, bool) { return appendString(dst, string(field)), field != nil }
	case base.builtin && base.name == "uuid":
		k.render = renderUUID
	default:
		k.sql = keyJSON(expr, base)
		k.render = func(dst, field []byte) ([]byte, bool) {
			if len(field) == 0 || field[0] != jsonbVersion {
				return dst, false
			}
			return append(dst, field[1:]...), true
		}
	}
	return k
}

func renderInt(dst, field []byte) ([]byte, bool) {
	switch len(field) {
	case 2:
		return strconv.AppendInt(dst, int64(int16(binary.BigEndian.Uint16(field))), 10), true
	case 4:
		return strconv.AppendInt(dst, int64(int32(binary.BigEndian.Uint32(field))), 10), true
	case 8:
		return strconv.AppendInt(dst, int64(binary.BigEndian.Uint64(field)), 10), true
	}
	return dst, false
}

func renderUUID(dst, field []byte) ([]byte, bool) {
	if len(field) != 16 {
		return dst, false
	}
	dst = append(dst, '"')
	for i, n := range []int{4, 2, 2, 2, 6} {
		if i > 0 {
			dst = append(dst, '-')
		}
		dst, field = hex.AppendEncode(dst, field[:n]), field[n:]
	}
	return append(dst, '"'), true
}
