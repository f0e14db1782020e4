package coldstore

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/parquet"
	"pgregory.net/rapid"
)

func TestKindsGiveBackWhatTheyTakeOrRefuseIt(t *testing.T) {
	t.Parallel()
	kept := map[kind]string{
		kindBool:        `true false`,
		kindInt4:        `0 -1 2147483647 -2147483648`,
		kindInt8:        `9007199254740993 -9223372036854775808 9223372036854775807`,
		kindFloat4:      `1.5 340282350000000000000000000000000000000 "NaN" "Infinity" "-Infinity" 0.1`,
		kindFloat8:      `0.1 0.0000001 100000000000000000000 "NaN" "-Infinity" 0 123456789.125`,
		kindDate:        `"2024-02-29" "0001-01-01" "0044-03-15 BC" "0001-12-31 BC" "4713-11-24 BC" "10000-01-01" "5874897-12-31" "1969-12-31"`,
		kindTimestamp:   `"2024-01-02T03:04:05.6" "1969-12-31T23:59:59.999999" "0044-03-15T00:00:00 BC" "294246-12-31T23:59:59.999999"`,
		kindTimestampTZ: `"2023-05-18T03:52:45.573605+00:00" "0001-01-01T00:00:00+00:00" "0044-03-15T01:02:03+00:00 BC"`,
		kindBytes:       `"\\xdeadbeef" "\\x"`,
		kindText:        `"" "plain" "é☃" "a\"b\\c\n\t\r\b\f" "\u0001\u001f" "/"`,
		kindNumber:      `2.500 1e5 123456789012345678901234567890.10 -0.1`,
		kindJSON:        `{"a":1} [1,null] "123" 123 null 9007199254740993.000`,
	}
	for k, values := range kept {
		c := column{Name: "c", Kind: k}
		for _, raw := range strings.Fields(strings.ReplaceAll(values, " BC", "_BC")) {
			raw = strings.ReplaceAll(raw, "_BC", " BC")
			if !accepts(t, &c, raw) {
				t.Errorf("%s: %s was refused", k, raw)
			}
		}
	}
	refused := map[kind][]string{
		kindBool:        {`1`, `"true"`, `null`},
		kindInt4:        {`2147483648`, `1.0`, `"1"`, ``, `+1`, `01`},
		kindFloat8:      {`0.10`, `1.0`, `"nan"`, `"1"`, `1e400`, `9007199254740993`, `"inf"`},
		kindDate:        {`"infinity"`, `"-infinity"`, `"2024-2-1"`, `"2023-02-29"`, `20240101`, `"5881580-07-12"`, `"2024-01-02 "`},
		kindTimestamp:   {`"infinity"`, `"294276-12-31T23:59:59.999999"`, `"2024-01-02T03:04:05+00:00"`, `"2024-01-02T03:04:05.60"`, `"2024-01-02T24:00:00"`},
		kindTimestampTZ: {`"2024-01-02T03:04:05+05:30"`, `"2024-01-02T03:04:05"`, `"294276-12-31T23:59:59.999999+00:00"`},
		kindBytes:       {`"\\xDEAD"`, `"\\xabc"`, `"abc"`, `"\\x`, ``},
		kindText:        {`1`, `null`, `"\/"`, `"A"`, `"\u00e9"`, `"\ud83d"`, `"a"x`, `"`},
		kindNumber:      {`"NaN"`, `null`, `[1]`},
	}
	// "A" is a plain string and stays; its escaped spelling is what PostgreSQL never writes.
	refused[kindText][3] = `"\u0041"`
	for k, values := range refused {
		c := column{Name: "c", Kind: k}
		for _, raw := range values {
			if accepts(t, &c, raw) {
				t.Errorf("%s: %s was accepted", k, raw)
			}
		}
	}
}

func TestDecimalsOfEveryWidth(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		precision := rapid.Int32Range(1, maxPrecision).Draw(t, "precision")
		scale := rapid.Int32Range(0, precision).Draw(t, "scale")
		digits := rapid.StringOfN(rapid.RuneFrom([]rune("0123456789")), 1, int(precision), -1).Draw(t, "digits")
		raw := string(appendDecimal(nil, strings.TrimLeft(digits[:len(digits)-1], "0")+digits[len(digits)-1:], int(scale)))
		if rapid.Bool().Draw(t, "negative") && strings.Trim(raw, "0.") != "" {
			raw = "-" + raw
		}
		c := column{Name: "c", Kind: kindDecimal, Precision: precision, Scale: scale}
		if !accepts(t, &c, raw) {
			t.Fatalf("decimal(%d,%d): %s was refused", precision, scale, raw)
		}
		for _, other := range []string{raw + ".", `"NaN"`, "-0", "1e2", "+" + raw, strings.Repeat("9", 39)} {
			if accepts(t, &c, other) {
				t.Fatalf("decimal(%d,%d): %s was accepted", precision, scale, other)
			}
		}
	})
}

// accepts says whether a column of the kind keeps a raw value; add itself renders the value again and compares.
func accepts(t interface{ Fatal(args ...any) }, c *column, raw string) bool {
	codec, err := c.codec()
	if err != nil {
		t.Fatal(err)
	}
	return codec.add([]byte(raw))
}

func TestDaysAreAnUnbrokenCount(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		days := rapid.Int64Range(-2_500_000, 2_150_000_000).Draw(t, "days")
		year, month, day := civilFromDays(days)
		if back := daysFromCivil(year, month, day); back != days || month < 1 || month > 12 || day < 1 || day > 31 {
			t.Fatalf("day %d is %d-%d-%d is day %d", days, year, month, day, back)
		}
	})
}

func TestNumericTypeModifiers(t *testing.T) {
	t.Parallel()
	for mod, want := range map[int32][2]int32{-1: {0, 0}, 655366: {10, 2}, 2490372 + 4 - 4: {38, 0}, 4 + (5<<16 | 0x7fe): {5, -2}} {
		if p, s := numericTypeMod(mod); p != want[0] || s != want[1] {
			t.Errorf("typmod %d: numeric(%d,%d), want %v", mod, p, s, want)
		}
	}
}

func FuzzEachMember(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"a": 1}`, `{"a": {"b": [1, "}"]}, "c": null}`, `{"a\"b": "\\"}`, `{"a": 1`, `{"a"}`, `[1]`, `{"a": }`, `{"a": 1,}`, ``,
		`{"a": tru e}`, strings.Repeat(`{"a":`, 1000),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, object []byte) {
		members := map[string]json.RawMessage{}
		err := eachMember(object, func(key, value []byte) error {
			s, ok := unescape(key)
			if !ok {
				return errNotJSON
			}
			members[s] = append(json.RawMessage(nil), value...)
			return nil
		})
		var want map[string]json.RawMessage
		if json.Unmarshal(object, &want) != nil || want == nil {
			return // what is no JSON may be refused or taken; it must not crash
		}
		if err != nil {
			if strings.Contains(string(object), `\u`) || strings.Contains(string(object), `\U`) {
				return // surrogates
			}
			t.Fatalf("%s: %v", object, err)
		}
		for key, value := range want {
			if got, ok := members[key]; ok && strings.TrimSpace(string(got)) != strings.TrimSpace(string(value)) {
				t.Fatalf("%s: %s = %s, want %s", object, key, got, value)
			}
		}
	})
}

// TestFloatsAreWrittenWithTheFewestDigits compares what is written quickly with what the standard library says.
func TestFloatsAreWrittenWithTheFewestDigits(t *testing.T) {
	t.Parallel()
	format := formatFloat[float64](64)
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.OneOf(
			rapid.Float64(),
			rapid.Custom(func(t *rapid.T) float64 { // those that may have few digits, and their neighbours
				f := float64(rapid.Int64Range(-1e16, 1e16).Draw(t, "digits")) / powers64[rapid.IntRange(0, 6).Draw(t, "scale")]
				for range rapid.IntRange(0, 2).Draw(t, "steps") {
					f = math.Nextafter(f, math.Inf(1))
				}
				return f
			}),
		).Draw(t, "f")
		if f != f || math.IsInf(f, 0) {
			return
		}
		if got, want := string(format(nil, f)), strconv.FormatFloat(f, 'f', -1, 64); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
	})
}

// TestWhatIsReadQuicklyIsWrittenTheSame draws values that look plain and compares the quick readers with the careful ones.
func TestWhatIsReadQuicklyIsWrittenTheSame(t *testing.T) {
	t.Parallel()
	const number, day, clock = `-?[0-9]{1,17}(\.[0-9]{1,7})?`, `[0-9]{4}-[01][0-9]-[0-3][0-9]`, `T[0-2][0-9]:[0-6][0-9]:[0-6][0-9](\.[0-9]{1,7})?`
	for k, pattern := range map[kind]string{
		kindInt4: number, kindInt8: number, kindFloat4: number, kindFloat8: number, kindDecimal: number, kindDate: `"` + day + `"`,
		kindTimestamp: `"` + day + clock + `"`, kindTimestampTZ: `"` + day + clock + `\+00:00"`, kindText: `"[ -~é]{0,4}"`,
	} {
		t.Run(string(k), func(t *testing.T) {
			t.Parallel()
			c, err := (&column{Name: "c", Kind: k, Precision: 9, Scale: 2}).codec()
			if err != nil {
				t.Fatal(err)
			}
			rapid.Check(t, func(t *rapid.T) {
				raw := rapid.StringMatching(pattern).Draw(t, "raw")
				switch c := c.(type) {
				case *typed[int32]:
					quickly(t, c, raw)
				case *typed[int64]:
					quickly(t, c, raw)
				case *typed[float32]:
					quickly(t, c, raw)
				case *typed[float64]:
					quickly(t, c, raw)
				case *typed[parquet.ByteArray]:
					quickly(t, c, raw)
				}
			})
		})
	}
}

func quickly[T any](t *rapid.T, c *typed[T], raw string) {
	v, ok := c.quick([]byte(raw))
	if !ok {
		return // left to the careful reader
	}
	careful, ok := c.parse([]byte(raw))
	if back := string(c.format(nil, v)); !ok || back != raw || string(c.format(nil, careful)) != raw {
		t.Fatalf("%s is read as %v, which is written %s (carefully read: %v)", raw, v, back, careful)
	}
}
