package coldstore

import (
	"bytes"

	"github.com/apache/arrow-go/v18/parquet"
)

// The quick readers of raw values. Each takes only what the format function of its kind is certain to give back byte for byte,
// so that nothing needs to be written again and compared; everything else is left to the careful pair (values.go).

// quickInt reads numbers of at most 18 digits without leading zeros.
func quickInt[T int32 | int64](limit T) func(raw []byte) (T, bool) {
	return func(raw []byte) (T, bool) {
		v, ok := plainNumber(raw, 0)
		if !ok || v > int64(limit) || v < -int64(limit) {
			return 0, false
		}
		return T(v), true
	}
}

// quickDecimal reads numbers with exactly scale digits behind the point.
func quickDecimal[T int32 | int64](scale, precision int) func(raw []byte) (T, bool) {
	limit := int64(1)
	for range precision {
		limit *= 10
	}
	return func(raw []byte) (T, bool) {
		v, ok := plainNumber(raw, scale)
		if !ok || v >= limit || v <= -limit {
			return 0, false
		}
		return T(v), true
	}
}

// plainNumber reads a decimal number as PostgreSQL writes it, as an integer without the point.
func plainNumber(raw []byte, scale int) (int64, bool) {
	negative := len(raw) > 0 && raw[0] == '-'
	if negative {
		raw = raw[1:]
	}
	whole := len(raw)
	if scale > 0 {
		if whole -= scale + 1; whole < 1 || raw[whole] != '.' {
			return 0, false
		}
	}
	if whole < 1 || len(raw) > 18 || raw[0] == '0' && whole > 1 {
		return 0, false
	}
	v := int64(0)
	for i, c := range raw {
		if i == whole {
			continue // the point
		}
		if c < '0' || c > '9' {
			return 0, false
		}
		v = v*10 + int64(c-'0')
	}
	if negative {
		v = -v
		return v, v != 0 // there is no -0
	}
	return v, true
}

// quickFloat reads numbers of so few digits that no shorter number is the same float, and which are therefore the ones that it is
// written with. powers are those of ten that a float of the type holds exactly, as it does the digits: the quotient is the nearest float.
func quickFloat[T float32 | float64](maxDigits int, powers []T) func(raw []byte) (T, bool) {
	return func(raw []byte) (T, bool) {
		digits, fraction := len(raw), 0
		if point := bytes.IndexByte(raw, '.'); point >= 0 {
			fraction = len(raw) - 1 - point
			digits--
		}
		if digits > 0 && raw[0] == '-' {
			digits--
		}
		if digits < 1 || digits > maxDigits || fraction >= len(powers) || fraction > 0 && raw[len(raw)-1] == '0' {
			return 0, false
		}
		v, ok := plainNumber(raw, fraction)
		return T(v) / powers[fraction], ok
	}
}

var (
	powers32 = []float32{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6}
	powers64 = []float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}
)

// quickText reads strings without escapes.
func quickText(a *arena) func(raw []byte) (parquet.ByteArray, bool) {
	return func(raw []byte) (parquet.ByteArray, bool) {
		last := len(raw) - 1
		if last < 1 || raw[0] != '"' || raw[last] != '"' {
			return nil, false
		}
		inner := raw[1:last]
		for _, c := range inner {
			if c < ' ' || c == '"' || c == '\\' {
				return nil, false
			}
		}
		return a.keep(inner), true
	}
}

// quickRaw keeps a value as it is.
func quickRaw(a *arena) func(raw []byte) (parquet.ByteArray, bool) {
	return func(raw []byte) (parquet.ByteArray, bool) { return a.keep(raw), true }
}

// arena keeps many small byte strings in few allocations. What it has kept stays as it is; the memory goes when nothing refers to
// it any more.
type arena struct{ free []byte }

// arenaBytes is what it allocates at a time.
const arenaBytes = 64 << 10

func (a *arena) keep(b []byte) []byte {
	if len(b) > arenaBytes/8 {
		return append([]byte(nil), b...)
	}
	if len(b) > cap(a.free)-len(a.free) {
		a.free = make([]byte, 0, arenaBytes)
	}
	from := len(a.free)
	a.free = append(a.free, b...)
	return a.free[from:len(a.free):len(a.free)]
}
