package koldproxy_test

import (
	"math"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy"
)

func TestLSNTextForm(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]koldproxy.LSN{
		"0/0":               0,
		"0/1":               1,
		"1/0":               1 << 32,
		"16/B374D848":       0x16_B374D848,
		"FFFFFFFF/FFFFFFFF": math.MaxUint64,
	} {
		got, err := koldproxy.ParseLSN(text)
		if err != nil || got != want {
			t.Errorf("ParseLSN(%q) = %d, %v, want %d", text, uint64(got), err, uint64(want))
		}
		if got.String() != text {
			t.Errorf("%q comes back as %q", text, got)
		}
	}
	if got, err := koldproxy.ParseLSN("16/b374d848"); err != nil || got != 0x16_B374D848 {
		t.Errorf("lower case: %v, %v", got, err)
	}
}

func TestParseLSNRefusesWhatIsNotOne(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "/", "0", "0/", "/0", "0/0/0", "0/0 ", " 0/0", "0/+1", "-0/1", "0x1/0", "G/0", "123456789/0", "0/123456789", "0/1\x00", "١/٢",
	} {
		if got, err := koldproxy.ParseLSN(text); err == nil {
			t.Errorf("ParseLSN(%q) = %v, want an error", text, got)
		}
	}
}

func FuzzParseLSN(f *testing.F) {
	for _, seed := range []string{"0/0", "16/B374D848", "ffffffff/ffffffff", "0/", "1/2/3"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		lsn, err := koldproxy.ParseLSN(text)
		if err != nil {
			return
		}
		again, err := koldproxy.ParseLSN(lsn.String())
		if err != nil || again != lsn {
			t.Errorf("%q is %v, which comes back as %v, %v", text, lsn, again, err)
		}
		if want := trimZeros(strings.ToUpper(text)); lsn.String() != want {
			t.Errorf("%q prints as %v, want %s", text, lsn, want)
		}
	})
}

func trimZeros(text string) string {
	hi, lo, _ := strings.Cut(text, "/")
	trim := func(s string) string { return s[min(len(s)-1, len(s)-len(strings.TrimLeft(s, "0"))):] }
	return trim(hi) + "/" + trim(lo)
}
