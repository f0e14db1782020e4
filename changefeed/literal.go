package changefeed

import (
	"strings"

	"github.com/koldproxy/koldproxy"
)

// rowLiteral writes values as a literal of a composite type, in the order of its columns: ("1","a ""b""",,"") with NULL as
// nothing at all and every other value in quotes. record_in reads it back under any settings.
func rowLiteral(values []koldproxy.Datum) string {
	n := 2
	for _, v := range values {
		n += len(v.Text) + 3
	}
	var b strings.Builder
	b.Grow(n)
	b.WriteByte('(')
	for i, v := range values {
		if i > 0 {
			b.WriteByte(',')
		}
		if v.Kind != koldproxy.DatumText {
			continue
		}
		b.WriteByte('"')
		writeEscaped(&b, v.Text)
		b.WriteByte('"')
	}
	b.WriteByte(')')
	return b.String()
}

// writeEscaped doubles quotes and backslashes. All encodings that a server can have are safe to look at bytewise.
func writeEscaped(b *strings.Builder, s string) {
	for {
		i := strings.IndexAny(s, `"\`)
		if i < 0 {
			b.WriteString(s)
			return
		}
		b.WriteString(s[:i])
		b.WriteByte(s[i])
		b.WriteByte(s[i])
		s = s[i+1:]
	}
}

// ident quotes an identifier.
func ident(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

// quoteLiteral quotes a string constant.
func quoteLiteral(s string) string {
	q := `'` + strings.ReplaceAll(s, `'`, `''`) + `'`
	if strings.Contains(s, `\`) {
		q = ` E` + strings.ReplaceAll(q, `\`, `\\`)
	}
	return q
}

// list writes one piece of text for each of n things, with commas between them.
func list(n int, piece func(i int) string) string {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = piece(i)
	}
	return strings.Join(parts, ", ")
}
