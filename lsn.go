package koldproxy

import (
	"fmt"
	"strconv"
	"strings"
)

// LSN is a byte position in the write-ahead log of one PostgreSQL cluster and timeline. The zero value means "before
// everything". LSNs are compared as numbers, never as text.
type LSN uint64

// ParseLSN reads PostgreSQL's text form, two hexadecimal halves with a slash between them ("16/B374D848"). Trailing
// bytes, signs, blanks and halves of more than eight digits are refused.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if !ok || !isHex(hi) || !isHex(lo) {
		return 0, fmt.Errorf("parse LSN %q: want two hexadecimal numbers of at most eight digits, as 16/B374D848", s)
	}
	h, _ := strconv.ParseUint(hi, 16, 32)
	l, _ := strconv.ParseUint(lo, 16, 32)
	return LSN(h<<32 | l), nil
}

func isHex(s string) bool {
	if len(s) == 0 || len(s) > 8 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
			return false
		}
	}
	return true
}

// String is PostgreSQL's text form; [ParseLSN] reads it back.
func (l LSN) String() string {
	return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)) // the two halves of the number
}
