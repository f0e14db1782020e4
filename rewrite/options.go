package rewrite

import (
	"encoding/json"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// optionForm says what an option looks like.
type optionForm int

const (
	valueNeeded   optionForm = iota // name = value
	valueOptional                   // or name alone, which is true
	valueAbsent                     // name alone, which is null
)

// options reads ( name = value, … ) and returns it as a JSON object in the order typed. Names and values are passed on
// as they are: which of them exist is for the procedure to say.
//
// The object is put together from the client's own bytes and stays in the client's encoding.
func (p *parser) options(form optionForm) string {
	var out strings.Builder
	seen := make(map[string]bool)
	p.expect(tOpen)
	for p.err == nil {
		at := p.i
		name := p.nextName(p.isLabel(p.i))
		value := "null"
		switch {
		case form == valueNeeded, form == valueOptional && p.i < p.to && p.is(p.i, tEquals):
			p.expect(tEquals)
			value = p.optionValue()
		case form == valueOptional:
			value = "true"
		}
		if p.err != nil {
			break
		}
		if seen[name] {
			p.fail(koldproxy.CodeSyntaxError, "conflicting or redundant options", at)
			break
		}
		seen[name] = true
		if out.Len() > 0 {
			out.WriteByte(',')
		}
		out.WriteString(jsonString(name) + ":" + value)
		if !p.take(tComma) {
			p.expect(tClose)
			break
		}
	}
	return "{" + out.String() + "}"
}

// optionValue reads a literal, number, name or true/false and returns it as JSON.
func (p *parser) optionValue() string {
	if p.err != nil {
		return ""
	}
	sign := ""
	if p.take(tMinus) {
		sign = "-"
	} else {
		p.take(tPlus)
	}
	if p.i >= p.to {
		p.unexpected(p.i)
		return ""
	}
	i := p.i
	text := p.text(i)
	switch kind := p.tokens[i].kind; {
	case kind == tInteger || kind == tFloat:
		p.i++
		if n := sign + text; json.Valid([]byte(n)) {
			return n
		}
		return jsonString(sign + text) // 30d, and numbers that JSON does not have: 0x1F, .5, 1_000
	case sign != "" || p.is(i-1, tPlus):
	case kind == tString || kind == tUnicodeString:
		return jsonString(p.literal())
	case kind == tTrue || kind == tFalse:
		p.i++
		return foldASCII(text)
	case kind == tParam:
		p.fail(codeUndefinedParam, "there is no parameter "+text, i)
		return ""
	case p.isLabel(i):
		return jsonString(p.nextName(true))
	}
	p.unexpected(i)
	return ""
}

// literal reads a string literal without escapes.
func (p *parser) literal() string {
	if p.err != nil {
		return ""
	}
	if p.i < p.to && p.is(p.i, tParam) {
		p.fail(codeUndefinedParam, "there is no parameter "+p.text(p.i), p.i)
		return ""
	}
	if p.i >= p.to || !p.is(p.i, tString) && !p.is(p.i, tUnicodeString) {
		p.unexpected(p.i)
		return ""
	}
	value, ok := literalValue(p.text(p.i))
	if !ok {
		p.fail(koldproxy.CodeFeatureNotSupported, "string literals with escapes are not supported in the statements of koldproxy", p.i)
		return ""
	}
	p.i++
	return value
}

// literalValue decodes a plain or dollar-quoted literal, and E” where it has no escapes.
func literalValue(text string) (value string, ok bool) {
	switch text[0] {
	case 'U', 'u':
		return "", false
	case '$':
		tag := text[:strings.IndexByte(text[1:], '$')+2]
		return text[len(tag) : len(text)-len(tag)], true
	case 'E', 'e':
		if strings.IndexByte(text, '\\') >= 0 {
			return "", false
		}
		text = text[1:]
	}
	body := text[1 : len(text)-1]
	value = strings.ReplaceAll(body, "''", "'")
	// What has other quotes inside continues on another line ('a' 'b').
	return value, strings.Count(body, "'") == 2*strings.Count(body, "''")
}

// jsonString quotes s for JSON. Bytes from 0x80 on stay as they are.
func jsonString(s string) string {
	const hex = "0123456789abcdef"
	var out strings.Builder
	out.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			out.WriteByte('\\')
			out.WriteByte(c)
		case c < 0x20:
			out.WriteString(`\u00`)
			out.WriteByte(hex[c>>4])
			out.WriteByte(hex[c&15])
		default:
			out.WriteByte(c)
		}
	}
	out.WriteByte('"')
	return out.String()
}
