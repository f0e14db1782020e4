package coldstore

import (
	"math"
	"math/big"
	"strconv"
	"strings"
)

// PostgreSQL writes dates and times in JSON as ISO 8601 with years of at least four digits and the suffix " BC" for years
// before 1, in the proleptic Gregorian calendar. Go's time package knows neither the suffix nor years of more than four
// digits, hence these few functions. They may accept more than PostgreSQL writes: what they read is written again and
// compared.

const (
	secondsPerDay = 24 * 60 * 60
	microsPerSec  = 1_000_000
	microsPerDay  = secondsPerDay * microsPerSec
)

// daysFromCivil counts days since 1970-01-01. Year 0 is 1 BC. The arithmetic runs in eras of 400 years that begin in March.
func daysFromCivil(year, month, day int64) int64 {
	if month <= 2 {
		year--
	}
	era := floorDiv(year, 400)
	yearOfEra := year - era*400
	dayOfYear := (153*((month+9)%12)+2)/5 + day - 1
	dayOfEra := yearOfEra*365 + yearOfEra/4 - yearOfEra/100 + dayOfYear
	return era*146097 + dayOfEra - 719468
}

func civilFromDays(days int64) (year, month, day int64) {
	days += 719468
	era := floorDiv(days, 146097)
	dayOfEra := days - era*146097
	yearOfEra := (dayOfEra - dayOfEra/1460 + dayOfEra/36524 - dayOfEra/146096) / 365
	dayOfYear := dayOfEra - (365*yearOfEra + yearOfEra/4 - yearOfEra/100)
	shifted := (5*dayOfYear + 2) / 153
	day = dayOfYear - (153*shifted+2)/5 + 1
	month = (shifted+2)%12 + 1
	year = yearOfEra + era*400
	if month <= 2 {
		year++
	}
	return year, month, day
}

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

// digits reads n digits at the front of s, or as many as there are when n is negative.
func digits(s string, n int) (value int64, rest string, ok bool) {
	i := 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' && i != n && i < 10 {
		value = value*10 + int64(s[i]-'0')
		i++
	}
	return value, s[i:], i > 0 && (n < 0 || i == n)
}

// parseDate reads "2024-01-02" and returns the days since 1970 and what follows. bc says that the year is before Christ.
func parseDate(s string, bc bool) (days int64, rest string, ok bool) {
	year, s, ok := digits(s, -1)
	if !ok || !strings.HasPrefix(s, "-") {
		return 0, "", false
	}
	month, s, ok := digits(s[1:], 2)
	if !ok || !strings.HasPrefix(s, "-") || month < 1 || month > 12 {
		return 0, "", false
	}
	day, s, ok := digits(s[1:], 2)
	if !ok {
		return 0, "", false
	}
	if bc {
		year = 1 - year
	}
	return daysFromCivil(year, month, day), s, true
}

func appendDate(dst []byte, days int64) (out []byte, bc bool) {
	year, month, day := civilFromDays(days)
	if year <= 0 {
		year, bc = 1-year, true
	}
	dst = append(appendPadded(dst, year, 4), '-')
	dst = append(appendPadded(dst, month, 2), '-')
	return appendPadded(dst, day, 2), bc
}

// appendPadded writes a number that is not negative with at least so many digits.
func appendPadded(dst []byte, v int64, width int) []byte {
	for limit := int64(10); width > 1; width-- {
		if v < limit {
			dst = append(dst, "00000000000000000"[:width-1]...)
			break
		}
		limit *= 10
	}
	return strconv.AppendInt(dst, v, 10)
}

const suffixBC = " BC"

// dateToDays reads a date; infinities and what does not fit are not read.
func dateToDays(s string) (int32, bool) {
	s, bc := strings.CutSuffix(s, suffixBC)
	days, rest, ok := parseDate(s, bc)
	if !ok || rest != "" || days > math.MaxInt32 || days < math.MinInt32 {
		return 0, false
	}
	return int32(days), true
}

func appendDays(dst []byte, days int32) []byte {
	dst, bc := appendDate(dst, int64(days))
	if bc {
		dst = append(dst, suffixBC...)
	}
	return dst
}

// timestampToMicros reads "2024-01-02T03:04:05.6" followed by zone, in microseconds since 1970.
func timestampToMicros(s, zone string) (int64, bool) {
	s, bc := strings.CutSuffix(s, suffixBC)
	s, ok := strings.CutSuffix(s, zone)
	if !ok {
		return 0, false
	}
	days, s, ok := parseDate(s, bc)
	if !ok || !strings.HasPrefix(s, "T") {
		return 0, false
	}
	hour, s, ok := digits(s[1:], 2)
	if !ok || !strings.HasPrefix(s, ":") {
		return 0, false
	}
	minute, s, ok := digits(s[1:], 2)
	if !ok || !strings.HasPrefix(s, ":") {
		return 0, false
	}
	second, s, ok := digits(s[1:], 2)
	if !ok {
		return 0, false
	}
	var micros int64
	if fraction, found := strings.CutPrefix(s, "."); found {
		n := len(fraction)
		if micros, s, ok = digits(fraction, -1); !ok || n > 6 {
			return 0, false
		}
		for ; n < 6; n++ {
			micros *= 10
		}
	}
	if s != "" || hour > 24 || minute > 59 || second > 60 {
		return 0, false
	}
	micros += (hour*3600 + minute*60 + second) * microsPerSec
	// PostgreSQL counts from 2000 and reaches 30 years further than an int64 of microseconds since 1970 does.
	total := new(big.Int).Add(new(big.Int).Mul(big.NewInt(days), big.NewInt(microsPerDay)), big.NewInt(micros))
	return total.Int64(), total.IsInt64()
}

// timestampFormat writes timestamps as JSON strings. It remembers the date that it wrote last: those of neighbouring rows are mostly of one day.
type timestampFormat struct {
	zone string // what follows the time
	days int64
	date []byte // of days; nil before the first
	bc   bool
}

func (f *timestampFormat) append(dst []byte, micros int64) []byte {
	days := floorDiv(micros, microsPerDay)
	micros -= days * microsPerDay
	if f.date == nil || f.days != days {
		f.date, f.bc = appendDate(f.date[:0], days)
		f.days = days
	}
	second, fraction := micros/microsPerSec, micros%microsPerSec
	dst = append(append(dst, '"'), f.date...)
	dst = append(dst, 'T',
		byte('0'+second/36000), byte('0'+second/3600%10), ':',
		byte('0'+second/600%6), byte('0'+second/60%10), ':',
		byte('0'+second/10%6), byte('0'+second%10))
	if fraction != 0 {
		dst = appendPadded(append(dst, '.'), fraction, 6)
		for dst[len(dst)-1] == '0' {
			dst = dst[:len(dst)-1]
		}
	}
	dst = append(dst, f.zone...)
	if f.bc {
		dst = append(dst, suffixBC...)
	}
	return append(dst, '"')
}
