package rewrite

import (
	pg_query "github.com/pganalyze/pg_query_go/v6"

	"github.com/koldproxy/koldproxy"
)

// parser reads the tokens of one statement of koldproxy's own from left to right. The first error sticks and turns all
// further steps into nothing, so that a grammar reads as a list of steps with one check at the end.
type parser struct {
	*rewriter
	i, to   int // next token; end of the statement
	grammar string
	err     *koldproxy.Error
}

func (r *rewriter) parser(s statementRange, from int, grammar string) *parser {
	return &parser{rewriter: r, i: from, to: s.to, grammar: grammar}
}

// qualified is [schema.]name; schema is nil without one.
type qualified struct {
	schema *string
	name   string
}

// take steps over these tokens if they come next, all of them.
func (p *parser) take(kinds ...pg_query.Token) bool {
	if p.err != nil || p.i+len(kinds) > p.to {
		return false
	}
	for n, k := range kinds {
		if !p.is(p.i+n, k) {
			return false
		}
	}
	p.i += len(kinds)
	return true
}

// expect steps over one token that has to come.
func (p *parser) expect(kind pg_query.Token) {
	if p.err == nil && !p.take(kind) {
		p.unexpected(p.i)
	}
}

// qualifiedName reads [schema.]name.
func (p *parser) qualifiedName() (q qualified) {
	q.name = p.nextName(p.isColumnName(p.i))
	if !p.take(tDot) {
		return q
	}
	schema := q.name
	q.schema = &schema
	q.name = p.nextName(p.isLabel(p.i))
	if p.err == nil && p.i < p.to && p.is(p.i, tDot) {
		p.fail(koldproxy.CodeSyntaxError, "improper qualified name (too many dotted names)", p.i)
	}
	return q
}

// nextName reads one name; fits says whether the token may be one at this place.
func (p *parser) nextName(fits bool) string {
	if p.err != nil {
		return ""
	}
	if p.i >= p.to || !fits {
		p.unexpected(p.i)
		return ""
	}
	name, ok := p.name(p.i)
	switch {
	case !ok:
		p.fail(koldproxy.CodeSyntaxError, "invalid Unicode escape", p.i)
	case p.tokens[p.i].kind == tUnicodeIdent && p.chars.enc != utf8Text:
		p.fail(koldproxy.CodeFeatureNotSupported, `U&"" names in the statements of koldproxy need client_encoding UTF8`, p.i)
	case name == "":
		p.fail(koldproxy.CodeSyntaxError, "zero-length delimited identifier", p.i)
	}
	p.i++
	if p.tokens[p.i-1].kind == tUnicodeIdent && p.i+1 < p.to && p.is(p.i, tUescape) {
		p.i += 2
	}
	return name
}

// parenthesized steps over ( … ) and returns the first and last token inside, of which there has to be one.
func (p *parser) parenthesized() (first, last int) {
	p.expect(tOpen)
	if p.err != nil {
		return 0, 0
	}
	first = p.i
	end := p.tokens[first-1].match
	if end < 0 || end >= p.to {
		// Unbalanced: PostgreSQL reads on to what cannot be in an expression, at the latest the end of the statement.
		p.unexpected(p.to)
		return 0, 0
	}
	if end == first {
		p.unexpected(end)
		return 0, 0
	}
	for i := first; i < end; i++ {
		if p.is(i, tParam) {
			p.fail(codeUndefinedParam, "there is no parameter "+p.text(i), i)
			return 0, 0
		}
	}
	p.i = end + 1
	return first, end - 1
}

// finish says what was wrong, if anything was, with the end of the statement.
func (p *parser) finish() *koldproxy.Error {
	if p.err == nil && p.i < p.to {
		p.unexpected(p.i)
	}
	return p.err
}

// unexpected is PostgreSQL's syntax error for the token at index i, which may be the one behind the statement.
func (p *parser) unexpected(i int) {
	if i >= len(p.tokens) {
		p.err = koldproxy.Errorf(koldproxy.CodeSyntaxError, "syntax error at end of input").
			WithHint(grammarHint(p.grammar)).At(p.chars.position(len(p.sql)))
		return
	}
	p.fail(koldproxy.CodeSyntaxError, `syntax error at or near "`+p.text(i)+`"`, i)
	p.err = p.err.WithHint(grammarHint(p.grammar))
}

// fail points an error at the token with index i.
func (p *parser) fail(code, message string, i int) {
	p.err = koldproxy.Errorf(code, "%s", message).At(p.chars.position(p.tokens[i].start))
}
