package coldstore

import (
	"bytes"
	"encoding/hex"
	"math/big"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/parquet"
)

// Each kind has a pair of functions: one reads a raw JSON value, the other writes it as PostgreSQL does. The first may take
// more than PostgreSQL writes, because what it takes is written again and compared.

// parseDecimal reads a number with exactly scale digits behind the point as an integer without the point. The result is
// never nil.
func parseDecimal(raw []byte, scale, precision int) (*big.Int, bool) {
	whole, fraction, _ := strings.Cut(string(raw), ".")
	v, ok := new(big.Int), len(fraction) == scale && len(whole) <= precision+2
	if !ok {
		return v, false
	}
	if _, ok := v.SetString(whole+fraction, 10); !ok {
		return new(big.Int), false
	}
	limit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(precision)), nil)
	if v.CmpAbs(limit) >= 0 {
		return new(big.Int), false
	}
	return v, true
}

func appendDecimal(dst []byte, digits string, scale int) []byte {
	if digits[0] == '-' {
		dst, digits = append(dst, '-'), digits[1:]
	}
	if missing := scale + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	dst = append(dst, digits[:len(digits)-scale]...)
	if scale > 0 {
		dst = append(dst, '.')
		dst = append(dst, digits[len(digits)-scale:]...)
	}
	return dst
}

func parseBool(raw []byte) (value, ok bool) {
	value = string(raw) == "true"
	return value, value || string(raw) == "false"
}

func parseInt[T int32 | int64](bits int) func(raw []byte) (T, bool) {
	return func(raw []byte) (T, bool) {
		v, err := strconv.ParseInt(string(raw), 10, bits)
		return T(v), err == nil
	}
}

func formatInt[T int32 | int64](dst []byte, v T) []byte { return strconv.AppendInt(dst, int64(v), 10) }

// parseFloat also reads "NaN" and the infinities, which PostgreSQL writes as JSON strings.
func parseFloat[T float32 | float64](bits int) func(raw []byte) (T, bool) {
	return func(raw []byte) (T, bool) {
		s := string(raw)
		if inner, next, ok := scanString(raw, 0); ok && next == len(raw) {
			s = string(inner)
		}
		v, err := strconv.ParseFloat(s, bits)
		return T(v), err == nil
	}
}

// formatFloat writes the shortest digits that are the number, without an exponent, as jsonb does.
func formatFloat[T float32 | float64](bits int) func(dst []byte, v T) []byte {
	return func(dst []byte, v T) []byte {
		f := float64(v)
		switch {
		case f != f:
			return append(dst, `"NaN"`...)
		case f-f != 0 && f > 0:
			return append(dst, `"Infinity"`...)
		case f-f != 0:
			return append(dst, `"-Infinity"`...)
		}
		return strconv.AppendFloat(dst, f, 'f', -1, bits)
	}
}

// inQuotes makes a parser of raw values of one for what is inside a string without escapes.
func inQuotes[T any](parse func(s string) (T, bool)) func(raw []byte) (T, bool) {
	return func(raw []byte) (T, bool) {
		inner, next, ok := scanString(raw, 0)
		if !ok || next != len(raw) {
			var zero T
			return zero, false
		}
		return parse(string(inner))
	}
}

func quoted[T any](format func(dst []byte, v T) []byte) func(dst []byte, v T) []byte {
	return func(dst []byte, v T) []byte { return append(format(append(dst, '"'), v), '"') }
}

const byteaPrefix = `"\\x`

func parseBytea(raw []byte) (parquet.ByteArray, bool) {
	inner, ok := bytes.CutPrefix(raw, []byte(byteaPrefix))
	if ok {
		inner, ok = bytes.CutSuffix(inner, []byte(`"`))
	}
	if !ok {
		return nil, false
	}
	v := make([]byte, hex.DecodedLen(len(inner)))
	_, err := hex.Decode(v, inner)
	return v, err == nil
}

func formatBytea(dst []byte, v parquet.ByteArray) []byte {
	return append(hex.AppendEncode(append(dst, byteaPrefix...), v), '"')
}

func parseText(raw []byte) (parquet.ByteArray, bool) {
	inner, next, ok := scanString(raw, 0)
	if !ok || next != len(raw) {
		return nil, false
	}
	s, ok := unescape(inner)
	return parquet.ByteArray(s), ok
}

func formatText(dst []byte, v parquet.ByteArray) []byte { return appendString(dst, string(v)) }

func parseNumber(raw []byte) (parquet.ByteArray, bool) {
	ok := len(raw) > 0 && (raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9')
	return bytes.Clone(raw), ok
}

func parseRaw(raw []byte) (parquet.ByteArray, bool) { return bytes.Clone(raw), true }

func formatRaw(dst []byte, v parquet.ByteArray) []byte { return append(dst, v...) }
