package coldstore

import (
	"math"
	"math/big"
	"strconv"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/schema"
)

// kind says how the values of a column are stored. The names are in the metadata of every file (docs/format.md), so a
// reader needs no PostgreSQL to render a value back.
type kind string

const (
	kindBool        kind = "bool"        // BOOLEAN
	kindInt2        kind = "int2"        // INT32, INTEGER(16)
	kindInt4        kind = "int4"        // INT32
	kindInt8        kind = "int8"        // INT64
	kindFloat4      kind = "float4"      // FLOAT
	kindFloat8      kind = "float8"      // DOUBLE
	kindDecimal     kind = "decimal"     // INT32, INT64 or FIXED_LEN_BYTE_ARRAY, DECIMAL(precision, scale)
	kindDate        kind = "date"        // INT32, DATE
	kindTimestamp   kind = "timestamp"   // INT64, TIMESTAMP(micros, local)
	kindTimestampTZ kind = "timestamptz" // INT64, TIMESTAMP(micros, UTC)
	kindBytes       kind = "bytes"       // BYTE_ARRAY
	kindText        kind = "text"        // BYTE_ARRAY, STRING: the JSON string decoded
	kindNumber      kind = "number"      // BYTE_ARRAY, STRING: the digits of a JSON number
	kindJSON        kind = "json"        // BYTE_ARRAY, JSON: the JSON value's text
)

// column is one column of a table as it was when a file was written.
type column struct {
	Name      string `json:"name"`
	Number    int16  `json:"attnum"` // pg_attribute.attnum, the field id in the file
	Type      string `json:"type"`   // as format_type shows it
	TypeMod   int32  `json:"typmod"`
	Kind      kind   `json:"kind"`
	Precision int32  `json:"precision,omitempty"`
	Scale     int32  `json:"scale,omitempty"`
}

// typeInfo is what pg_type says about a column's type, domains followed down to their base type.
type typeInfo struct {
	name     string // typname
	builtin  bool   // in pg_catalog
	class    string // typtype
	category string // typcategory
	typeMod  int32
}

// maxPrecision is the widest DECIMAL that other engines read.
const maxPrecision = 38

// columnKind chooses how to store a type. A wrong guess costs space only: a value that its kind cannot hold exactly is kept
// beside it as JSON.
func columnKind(t typeInfo) (k kind, precision, scale int32) {
	if t.category == "A" || t.class == "c" || t.name == "hstore" {
		return kindJSON, 0, 0
	}
	if !t.builtin {
		return kindText, 0, 0
	}
	switch t.name {
	case "bool":
		return kindBool, 0, 0
	case "int2":
		return kindInt2, 0, 0
	case "int4":
		return kindInt4, 0, 0
	case "int8":
		return kindInt8, 0, 0
	case "float4":
		return kindFloat4, 0, 0
	case "float8":
		return kindFloat8, 0, 0
	case "numeric":
		precision, scale = numericTypeMod(t.typeMod)
		if precision < 1 || precision > maxPrecision || scale < 0 || scale > precision {
			return kindNumber, 0, 0
		}
		return kindDecimal, precision, scale
	case "date":
		return kindDate, 0, 0
	case "timestamp":
		return kindTimestamp, 0, 0
	case "timestamptz":
		return kindTimestampTZ, 0, 0
	case "bytea":
		return kindBytes, 0, 0
	case "json", "jsonb":
		return kindJSON, 0, 0
	}
	return kindText, 0, 0
}

// numericTypeMod takes numeric's type modifier apart as PostgreSQL's numeric.c does; scale is a signed 11-bit number.
func numericTypeMod(typeMod int32) (precision, scale int32) {
	if typeMod < 4 {
		return 0, 0
	}
	typeMod -= 4
	return typeMod >> 16 & 0xffff, (typeMod&0x7ff ^ 1024) - 1024
}

// node is the column in a file's schema.
func (c *column) node() (schema.Node, error) {
	typ, logical, length := parquet.Types.ByteArray, schema.LogicalType(schema.NoLogicalType{}), -1
	switch c.Kind {
	case kindBool:
		typ = parquet.Types.Boolean
	case kindInt2:
		typ, logical = parquet.Types.Int32, schema.NewIntLogicalType(16, true)
	case kindInt4:
		typ, logical = parquet.Types.Int32, schema.NewIntLogicalType(32, true)
	case kindInt8:
		typ, logical = parquet.Types.Int64, schema.NewIntLogicalType(64, true)
	case kindFloat4:
		typ = parquet.Types.Float
	case kindFloat8:
		typ = parquet.Types.Double
	case kindDecimal:
		logical = schema.NewDecimalLogicalType(c.Precision, c.Scale)
		switch {
		case c.Precision <= 9:
			typ = parquet.Types.Int32
		case c.Precision <= 18:
			typ = parquet.Types.Int64
		default:
			typ, length = parquet.Types.FixedLenByteArray, decimalBytes(c.Precision)
		}
	case kindDate:
		typ, logical = parquet.Types.Int32, schema.DateLogicalType{}
	case kindTimestamp, kindTimestampTZ:
		typ = parquet.Types.Int64
		logical = schema.NewTimestampLogicalType(c.Kind == kindTimestampTZ, schema.TimeUnitMicros)
	case kindText, kindNumber:
		logical = schema.StringLogicalType{}
	case kindJSON:
		logical = schema.JSONLogicalType{}
	}
	return schema.NewPrimitiveNodeLogical(c.Name, parquet.Repetitions.Optional, logical, typ, length, int32(c.Number))
}

// decimalBytes is the length of the shortest two's complement number that holds every decimal of a precision.
func decimalBytes(precision int32) int {
	limit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(precision)), nil)
	return limit.BitLen()/8 + 1
}

// codec holds the values of one column of some rows. Values go in and come out as raw JSON; what is stored are typed
// values and, as definition levels, which of them are null.
type codec interface {
	// add appends a raw value unless its typed form would be rendered differently; then it appends nothing and says so.
	add(raw []byte) bool
	addNull()
	// write hands everything that was added to a file, whose pages p keeps account of; reset begins anew.
	write(w any, p *page) error
	reset()
	// distinct says how many different values were added, and how many at all.
	distinct() (different, all int)
	// read replaces everything by the next n values of a file.
	read(r any, n int) error
	// render appends the raw form of value i, or nothing if it is null.
	render(dst []byte, i int) []byte
}

// codec returns a new, empty codec for the column.
func (c *column) codec() (codec, error) {
	switch c.Kind {
	case kindBool:
		return &typed[bool]{parse: parseBool, format: strconv.AppendBool}, nil
	case kindInt2, kindInt4:
		return &typed[int32]{quick: quickInt[int32](math.MaxInt32), parse: parseInt[int32](32), format: formatInt[int32]}, nil
	case kindInt8:
		return &typed[int64]{quick: quickInt[int64](math.MaxInt64), parse: parseInt[int64](64), format: formatInt[int64]}, nil
	case kindFloat4:
		return &typed[float32]{quick: quickFloat(6, powers32), parse: parseFloat[float32](32), format: formatFloat[float32](32)}, nil
	case kindFloat8:
		return &typed[float64]{quick: quickFloat(15, powers64), parse: parseFloat[float64](64), format: formatFloat[float64](64)}, nil
	case kindDecimal:
		return c.decimalCodec(), nil
	case kindDate:
		return &typed[int32]{quick: quickDays, parse: inQuotes(dateToDays), format: quoted(appendDays)}, nil
	case kindTimestamp, kindTimestampTZ:
		zone := ""
		if c.Kind == kindTimestampTZ {
			zone = "+00:00" // the applier writes images in UTC
		}
		return &typed[int64]{
			quick:  quickMicros(zone),
			parse:  inQuotes(func(s string) (int64, bool) { return timestampToMicros(s, zone) }),
			format: (&timestampFormat{zone: zone}).append,
		}, nil
	case kindBytes:
		return &typed[parquet.ByteArray]{parse: parseBytea, format: formatBytea}, nil
	case kindText:
		return &typed[parquet.ByteArray]{quick: quickText(&arena{}), parse: parseText, format: formatText}, nil
	case kindNumber:
		return &typed[parquet.ByteArray]{parse: parseNumber, format: formatRaw}, nil
	case kindJSON:
		return &typed[parquet.ByteArray]{quick: quickRaw(&arena{}), parse: parseRaw, format: formatRaw}, nil
	}
	return nil, errUnknownKind(c.Kind)
}

func (c *column) decimalCodec() codec {
	scale := int(c.Scale)
	unscaled := func(raw []byte) (*big.Int, bool) { return parseDecimal(raw, scale, int(c.Precision)) }
	switch {
	case c.Precision <= 9:
		return &typed[int32]{
			quick: quickDecimal[int32](scale, int(c.Precision)),
			parse: func(raw []byte) (int32, bool) {
				v, ok := unscaled(raw)
				return int32(v.Int64()), ok
			},
			format: func(dst []byte, v int32) []byte { return appendScaled(dst, int64(v), scale) },
		}
	case c.Precision <= 18:
		return &typed[int64]{
			quick: quickDecimal[int64](scale, int(c.Precision)),
			parse: func(raw []byte) (int64, bool) {
				v, ok := unscaled(raw)
				return v.Int64(), ok
			},
			format: func(dst []byte, v int64) []byte { return appendScaled(dst, v, scale) },
		}
	}
	size := decimalBytes(c.Precision)
	return &typed[parquet.FixedLenByteArray]{
		parse: func(raw []byte) (parquet.FixedLenByteArray, bool) {
			v, ok := unscaled(raw)
			if v.Sign() < 0 {
				v.Add(v, new(big.Int).Lsh(big.NewInt(1), uint(size)*8))
			}
			return v.FillBytes(make([]byte, size)), ok
		},
		format: func(dst []byte, v parquet.FixedLenByteArray) []byte {
			n := new(big.Int).SetBytes(v)
			if len(v) > 0 && v[0] >= 0x80 {
				n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(len(v))*8))
			}
			return appendDecimal(dst, n.String(), scale)
		},
	}
}
