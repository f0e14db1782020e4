package coldstore

import (
	"bytes"
	"encoding/hex"
	"math"
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

// appendScaled is appendDecimal for numbers that an int64 holds.
func appendScaled(dst []byte, v int64, scale int) []byte {
	whole, fraction := v, int64(0)
	if scale > 0 && scale < len(powersInt) {
		whole, fraction = v/powersInt[scale], v%powersInt[scale]
	}
	if v < 0 {
		dst, whole, fraction = append(dst, '-'), -whole, -fraction
	}
	dst = strconv.AppendInt(dst, whole, 10)
	if scale > 0 {
		dst = appendPadded(append(dst, '.'), fraction, scale)
	}
	return dst
}

// powersInt are the powers of ten that decimals of an int64 may have to be divided by.
var powersInt = [...]int64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18}

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
		if bits == 64 {
			if scaled, scale, ok := fewDigits(f); ok {
				return appendScaled(dst, scaled, scale)
			}
		}
		return strconv.AppendFloat(dst, f, 'f', -1, bits)
	}
}

// fewDigits finds the decimal number with at most 4 digits behind the point and 15 in all that reads as f, if there is one. No two of such
// numbers read as the same float, so none that is shorter does: it is the one that f is written with. The search goes from the fewest
// digits up, so the last one is no zero.
func fewDigits(f float64) (scaled int64, scale int, ok bool) {
	for scale, power := range powers64[:5] {
		n := math.Round(f * power)
		if n/power != f {
			continue
		}
		return int64(n), scale, n != 0 && math.Abs(n) < 1e15 // 0 may be -0
	}
	return 0, 0, false
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
