package changefeed

import (
	"context"
	"database/sql"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

const (
	// copyFrom is for how many new keys COPY is worth a round trip of its own.
	copyFrom = 200
	// copyPause is for how many batches COPY is not tried after it has failed.
	copyPause = 64
	// copyAhead is about how many bytes are painted at a time, so that the server has something to do meanwhile.
	copyAhead = 1 << 20
)

// errStanding says that COPY has met a key that is in the mirror, a tombstone mostly, or one that it cannot take.
var errStanding = errors.New("new keys cannot be copied")

// copies says whether new keys are to be written by COPY, and counts the batches for which they are not.
func (w *write) copies() bool {
	m := w.table.mirror
	if w.stream != nil || m.copy == "" || m.seeding || len(w.effective) < copyFrom {
		return false
	}
	if m.noCopy > 0 {
		m.noCopy--
		return false
	}
	return true
}

// copyIn writes new keys by COPY, which is the cheapest way for the server and for its log.
func (t *Target) copyIn(ctx context.Context, tx pgx.Tx, w *write) error {
	m := w.table.mirror
	rows := newCopyStream(m, w.effective)
	tag, err := tx.Conn().PgConn().CopyFrom(ctx, rows, m.copy)
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == codeUniqueViolation || pg.Code == codeCanceled && rows.refused.Load()) {
		m.noCopy = copyPause
		return errStanding
	}
	if err != nil {
		return fmt.Errorf("copy into a mirror: %w", err)
	}
	t.done.mirrorRows += tag.RowsAffected()
	return nil
}

// codeUniqueViolation is PostgreSQL's unique_violation.
const codeUniqueViolation = "23505"

// copyStream is what [mirrorStatements].copy reads, in COPY's binary format. Images are painted as they are read, while the server
// stores those before.
type copyStream struct {
	mirror  *mirror
	items   []item
	rest    []byte // written and not read
	buffer  []byte // what rest is a part of
	ended   bool
	refused atomic.Bool // a key could not be written
}

// A file begins with a signature, flags and the length of what else may be in its header, and ends with a row of -1 columns.
const (
	copyBegin = "PGCOPY\n\xff\r\n\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	copyEnd   = "\xff\xff"
)

func newCopyStream(m *mirror, items []item) *copyStream {
	return &copyStream{mirror: m, items: items, rest: []byte(copyBegin)}
}

// Read fills p unless nothing more comes.
func (c *copyStream) Read(p []byte) (n int, err error) {
	for {
		copied := copy(p[n:], c.rest)
		c.rest = c.rest[copied:]
		switch n += copied; {
		case n == len(p):
			return n, nil
		case c.ended:
			return n, io.EOF
		case len(c.items) == 0:
			c.ended, c.rest = true, []byte(copyEnd)
		default:
			if err = c.fill(); err != nil {
				return n, err
			}
		}
	}
}

// fill writes the next rows: so many that the server has something to do while others are written.
func (c *copyStream) fill() (err error) {
	c.buffer = c.buffer[:0]
	for len(c.items) > 0 && len(c.buffer) < copyAhead {
		if c.buffer, err = c.mirror.appendCopied(c.buffer, &c.items[0]); err != nil {
			c.refused.Store(true)
			return err
		}
		c.items = c.items[1:]
	}
	c.rest = c.buffer
	return nil
}

// appendCopied appends a row of the mirror: key, seq, op and image.
func (m *mirror) appendCopied(b []byte, it *item) (_ []byte, err error) {
	b = binary.BigEndian.AppendUint16(b, uint16(len(it.key)+3))
	for i, text := range it.key {
		start := len(b)
		if b, err = binaryKeys[m.key[i].typeOID](append(b, 0, 0, 0, 0), text); err != nil {
			return b, err
		}
		setLength(b, start)
	}
	b = binary.BigEndian.AppendUint64(append(b, 0, 0, 0, 8), uint64(it.seq))
	b = binary.BigEndian.AppendUint16(append(b, 0, 0, 0, 2), uint16(it.op))
	if it.op == koldproxy.OpDelete {
		return append(b, 0xff, 0xff, 0xff, 0xff), nil // NULL
	}
	start := len(b)
	const version = 1 // of jsonb's binary format, which is its text
	if b = append(b, 0, 0, 0, 0, version); it.doc != nil {
		b = append(b, *it.doc...)
	} else {
		b = m.painter.append(slices.Grow(b, m.painter.size(it.new)), it.new)
	}
	setLength(b, start)
	return b, nil
}

// setLength fills in the length of what has been written since start, where it is to be.
func setLength(b []byte, start int) {
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-4))
}

// binaryKeys append a value of a plain key, of which they get the text, in the binary format of its type. They know all types of
// plainKeys and textKeys.
var binaryKeys = map[uint32]func(b []byte, text string) ([]byte, error){
	pgtype.BoolOID: func(b []byte, text string) ([]byte, error) {
		if text == "t" {
			return append(b, 1), nil
		}
		return append(b, 0), nil
	},
	pgtype.Int2OID: binaryInteger(2), pgtype.Int4OID: binaryInteger(4), pgtype.Int8OID: binaryInteger(8),
	pgtype.OIDOID: func(b []byte, text string) ([]byte, error) {
		n, err := strconv.ParseUint(text, 10, 32)
		return binary.BigEndian.AppendUint32(b, uint32(n)), err
	},
	pgtype.UUIDOID: func(b []byte, text string) ([]byte, error) {
		return hex.AppendDecode(b, []byte(strings.ReplaceAll(text, "-", "")))
	},
	pgtype.ByteaOID: func(b []byte, text string) ([]byte, error) {
		return hex.AppendDecode(b, []byte(strings.TrimPrefix(text, `\x`)))
	},
	pgtype.TextOID: binaryText, pgtype.VarcharOID: binaryText,
	pgtype.DateOID:        binaryTime[pgtype.Date](pgtype.DateCodec{}),
	pgtype.TimestampOID:   binaryTime[pgtype.Timestamp](&pgtype.TimestampCodec{}),
	pgtype.TimestamptzOID: binaryTime[pgtype.Timestamptz](&pgtype.TimestamptzCodec{}),
}

func binaryInteger(size int) func(b []byte, text string) ([]byte, error) {
	return func(b []byte, text string) ([]byte, error) {
		n, err := strconv.ParseInt(text, 10, size*8)
		var whole [8]byte
		binary.BigEndian.PutUint64(whole[:], uint64(n))
		return append(b, whole[8-size:]...), err
	}
}

func binaryText(b []byte, text string) ([]byte, error) { return append(b, text...), nil }

// binaryTime leaves dates and times to pgx.
func binaryTime[T any, P interface {
	*T
	sql.Scanner
}](codec pgtype.Codec,
) func(b []byte, text string) ([]byte, error) {
	return func(b []byte, text string) ([]byte, error) {
		var value T
		if err := P(&value).Scan(text); err != nil {
			return b, err
		}
		return codec.PlanEncode(nil, 0, pgtype.BinaryFormatCode, value).Encode(value, b)
	}
}
