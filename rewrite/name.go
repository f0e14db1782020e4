package rewrite

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// maxNameBytes is where PostgreSQL cuts names off (NAMEDATALEN - 1).
const maxNameBytes = 63

// name is the name that the token at index i stands for: folded if it has no quotes, decoded if it has. Any keyword
// counts as a name here. ok is false for other tokens and for U&"" names that do not decode.
//
// Folding is that of ASCII letters; PostgreSQL folds others in single-byte encodings only, by the database's locale.
func (s *source) name(i int) (name string, ok bool) {
	if i < 0 || i >= len(s.tokens) {
		return "", false
	}
	t := s.tokens[i]
	text := s.sql[t.start:t.end]
	switch {
	case t.kind == tIdent && text[0] == '"':
		return undouble(text), true
	case t.kind == tUnicodeIdent:
		escape := byte('\\')
		if s.is(i+1, tUescape) {
			if !s.is(i+2, tString) {
				return "", false
			}
			if lit := s.text(i + 2); len(lit) == 3 && lit[0] == '\'' {
				escape = lit[1]
			} else {
				return "", false
			}
		}
		return decodeUnicode(undouble(text[2:]), escape)
	case t.kind == tIdent || t.keyword != kNone:
		return foldASCII(text), true
	}
	return "", false
}

// isColumnName reports whether the token at index i may be a name of its own: PostgreSQL's ColId.
func (s *source) isColumnName(i int) bool {
	if i < 0 || i >= len(s.tokens) {
		return false
	}
	t := s.tokens[i]
	return t.kind == tIdent || t.kind == tUnicodeIdent || t.keyword == kFree || t.keyword == kColumn
}

// isLabel reports whether the token at index i may stand behind a dot or AS: PostgreSQL's ColLabel.
func (s *source) isLabel(i int) bool {
	if i < 0 || i >= len(s.tokens) {
		return false
	}
	t := s.tokens[i]
	return t.kind == tIdent || t.kind == tUnicodeIdent || t.keyword != kNone
}

// isRoleName reports whether the token at index i may name a role: PostgreSQL's NonReservedWord.
func (s *source) isRoleName(i int) bool { return s.isLabel(i) && s.tokens[i].keyword != kReserved }

// clip cuts a name off where PostgreSQL does.
func clip(name string) string {
	if len(name) <= maxNameBytes {
		return name
	}
	n := maxNameBytes
	for n > maxNameBytes-utf8.UTFMax && !utf8.RuneStart(name[n]) {
		n--
	}
	return name[:n]
}

func undouble(quoted string) string {
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `""`, `"`)
}

func foldASCII(s string) string {
	for i := range len(s) {
		if s[i] >= 'A' && s[i] <= 'Z' {
			b := []byte(s)
			for j := i; j < len(b); j++ {
				if b[j] >= 'A' && b[j] <= 'Z' {
					b[j] |= 0x20
				}
			}
			return string(b)
		}
	}
	return s
}

// decodeUnicode undoes the escapes of a U&"" name: \XXXX, \+XXXXXX and the doubled escape character.
func decodeUnicode(s string, escape byte) (string, bool) {
	var out strings.Builder
	high := rune(-1)
	for i := 0; i < len(s); {
		if s[i] != escape {
			if high >= 0 {
				return "", false
			}
			out.WriteByte(s[i])
			i++
			continue
		}
		if high < 0 && i+1 < len(s) && s[i+1] == escape {
			out.WriteByte(escape)
			i += 2
			continue
		}
		from, digits := i+1, 4
		if from < len(s) && s[from] == '+' {
			from, digits = from+1, 6
		}
		if from+digits > len(s) {
			return "", false
		}
		n, err := strconv.ParseUint(s[from:from+digits], 16, 32)
		if err != nil || n == 0 || n > utf8.MaxRune {
			return "", false
		}
		r := rune(n)
		i = from + digits
		switch {
		case high >= 0:
			if r = utf16.DecodeRune(high, r); r == utf8.RuneError {
				return "", false
			}
			high = -1
		case r >= 0xd800 && r < 0xdc00:
			high = r
			continue
		case utf16.IsSurrogate(r):
			return "", false
		}
		out.WriteRune(r)
	}
	return out.String(), high < 0
}
