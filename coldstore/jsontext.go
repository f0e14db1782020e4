package coldstore

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// JSON here is text as PostgreSQL writes jsonb: a value is kept as its exact bytes ("raw"), because a number that went
// through a float is another number. Only the outermost object is taken apart.

var errNotJSON = errors.New("not a JSON object as PostgreSQL writes it")

// eachMember calls fn with every key and raw value of a JSON object. The key is the text between the quotes, escapes and
// all; both slices are parts of object. Any input ends in nil or an error.
func eachMember(object []byte, fn func(key, value []byte) error) error {
	i := skipBlank(object, 0)
	if i >= len(object) || object[i] != '{' {
		return errNotJSON
	}
	i = skipBlank(object, i+1)
	if i < len(object) && object[i] == '}' {
		return atEnd(object, i+1)
	}
	for {
		key, next, ok := scanString(object, i)
		if !ok {
			return errNotJSON
		}
		i = skipBlank(object, next)
		if i >= len(object) || object[i] != ':' {
			return errNotJSON
		}
		i = skipBlank(object, i+1)
		end, ok := scanValue(object, i)
		if !ok {
			return errNotJSON
		}
		if err := fn(key, object[i:end]); err != nil {
			return err
		}
		i = skipBlank(object, end)
		if i >= len(object) {
			return errNotJSON
		}
		switch object[i] {
		case ',':
			i = skipBlank(object, i+1)
		case '}':
			return atEnd(object, i+1)
		default:
			return errNotJSON
		}
	}
}

func atEnd(b []byte, i int) error {
	if skipBlank(b, i) != len(b) {
		return errNotJSON
	}
	return nil
}

func skipBlank(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r') {
		i++
	}
	return i
}

// scanString returns what is between the quotes of the string that begins at i, and the index behind it.
func scanString(b []byte, i int) (inner []byte, next int, ok bool) {
	if i >= len(b) || b[i] != '"' {
		return nil, 0, false
	}
	for j := i + 1; j < len(b); j++ {
		switch b[j] {
		case '\\':
			j++
		case '"':
			return b[i+1 : j], j + 1, true
		}
	}
	return nil, 0, false
}

// scanValue returns the index behind the value that begins at i. Nesting is counted, not recursed into, so depth costs no
// stack.
func scanValue(b []byte, i int) (end int, ok bool) {
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			if _, i, ok = scanString(b, i); !ok {
				return 0, false
			}
		case '{', '[':
			depth++
			i++
			continue
		case '}', ']':
			if depth == 0 {
				return 0, false
			}
			depth--
			i++
		case ',', ':', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return 0, false
			}
			i++
			continue
		default:
			for i < len(b) && !isDelimiter(b[i]) {
				i++
			}
		}
		if depth == 0 {
			return i, true
		}
	}
	return 0, false
}

func isDelimiter(c byte) bool {
	switch c {
	case ',', ':', ']', '}', '[', '{', '"', ' ', '\t', '\n', '\r':
		return true
	}
	return false
}

// unescape decodes the inside of a JSON string. Bytes that are not UTF-8 are kept as they are.
func unescape(inner []byte) (string, bool) {
	out := make([]byte, 0, len(inner))
	for i := 0; i < len(inner); i++ {
		if inner[i] != '\\' {
			out = append(out, inner[i])
			continue
		}
		i++
		if i == len(inner) {
			return "", false
		}
		switch inner[i] {
		case '"', '\\', '/':
			out = append(out, inner[i])
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			r, ok := hex4(inner[i+1:])
			if !ok || r >= 0xD800 && r < 0xE000 { // PostgreSQL never writes surrogates
				return "", false
			}
			out = utf8.AppendRune(out, r)
			i += 4
		default:
			return "", false
		}
	}
	return string(out), true
}

func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// appendString writes s as a JSON string exactly as PostgreSQL's escape_json does: control characters and the two
// necessary characters are escaped, everything else stays.
func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := range len(s) {
		switch c := s[i]; c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\b':
			dst = append(dst, '\\', 'b')
		case '\f':
			dst = append(dst, '\\', 'f')
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			if c < ' ' {
				dst = fmt.Appendf(dst, `\u%04x`, c)
			} else {
				dst = append(dst, c)
			}
		}
	}
	return append(dst, '"')
}

// compareNames is the order in which jsonb keeps the members of an object: shorter names first, then by bytes.
func compareNames(a, b string) int {
	if c := len(a) - len(b); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

// objectWriter writes a JSON object member by member.
type objectWriter struct {
	buf []byte
}

// add writes a member. The key is already a JSON string, with its quotes.
func (w *objectWriter) add(quotedKey, raw []byte) {
	w.buf = append(appendName(w.buf, 0, quotedKey), raw...)
}

// appendName begins the next member of an object that begins at from in dst, or would.
func appendName(dst []byte, from int, quotedKey []byte) []byte {
	if len(dst) == from {
		dst = append(dst, '{')
	} else {
		dst = append(dst, ',', ' ')
	}
	return append(append(dst, quotedKey...), ':', ' ')
}

// endObject ends an object that begins at from in dst, if it has any member.
func endObject(dst []byte, from int) []byte {
	if len(dst) == from {
		dst = append(dst, '{')
	}
	return append(dst, '}')
}

// finish returns the object and begins a new one.
func (w *objectWriter) finish() []byte {
	object := endObject(w.buf, 0)
	w.buf = nil
	return object
}
