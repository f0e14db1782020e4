package rewrite

import (
	"strings"

	pg_query "github.com/pganalyze/pg_query_go/v6"
)

// token is one token of PostgreSQL's scanner: the bytes [start, end) of the text. Comments are left out.
type token struct {
	kind       pg_query.Token
	keyword    pg_query.KeywordKind
	start, end int
	// match is the index of the token that closes or opens this bracket; -1 for anything else and for unbalanced ones.
	match int
}

// source is a scanned text.
type source struct {
	sql    string
	tokens []token
}

// scan cuts sql into tokens. ok is false where PostgreSQL's scanner finds an error.
func scan(sql string) (s *source, ok bool) {
	scanned, err := pg_query.Scan(sql)
	if err != nil {
		masked, any := maskRetention(sql)
		if !any {
			return nil, false
		}
		if scanned, err = pg_query.Scan(masked); err != nil {
			return nil, false
		}
	}
	s = &source{sql: sql, tokens: make([]token, 0, len(scanned.Tokens))}
	var open []int
	for _, t := range scanned.Tokens {
		if t.Token == tLineComment || t.Token == tBlockComment {
			continue
		}
		i := len(s.tokens)
		s.tokens = append(s.tokens, token{t.Token, t.KeywordKind, int(t.Start), int(t.End), -1})
		switch t.Token {
		case tOpen, tOpenBracket:
			open = append(open, i)
		case tClose, tCloseBracket:
			if len(open) > 0 {
				o := open[len(open)-1]
				open = open[:len(open)-1]
				if (s.tokens[o].kind == tOpen) == (t.Token == tClose) {
					s.tokens[o].match, s.tokens[i].match = i, o
				}
			}
		case tSemicolon:
			// A semicolon ends what was left open, except within the parentheses of CREATE RULE, whose text is opaque.
			open = open[:0]
		}
	}
	return s, true
}

// maskRetention hides the letters of `retention = 30d` behind digits. The grammar of CREATE STREAM has the unit without
// quotes, while PostgreSQL's scanner refuses it ("trailing junk after numeric literal"). The text keeps its length, so
// tokens are found at their places and their values are taken from the original. Where the same characters stand in a
// literal or a comment nothing is lost: masked text is never sent.
func maskRetention(sql string) (masked string, any bool) {
	const word = "retention"
	var out []byte
	for i := 0; i+len(word) < len(sql); i++ {
		if sql[i]|0x20 != word[0] || !hasPrefixFold(sql[i:], word) || (i > 0 && isIdentifierByte(sql[i-1])) {
			continue
		}
		j := skipSpace(sql, i+len(word))
		if j == len(sql) || sql[j] != '=' {
			continue
		}
		j = skipSpace(sql, j+1)
		if j == len(sql) || sql[j] < '0' || sql[j] > '9' {
			continue
		}
		for ; j < len(sql) && (isIdentifierByte(sql[j]) || sql[j] == '.'); j++ {
			if c := sql[j]; c != '.' && (c < '0' || c > '9') {
				if out == nil {
					out = []byte(sql)
				}
				out[j] = '0'
			}
		}
		i = j - 1
	}
	return string(out), out != nil
}

func skipSpace[T string | []byte](s T, i int) int {
	for i < len(s) && strings.IndexByte(" \t\r\n\f\v", s[i]) >= 0 {
		i++
	}
	return i
}

func isIdentifierByte(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z'
}

// hasBackslash says whether a plain literal holds a backslash, so that its end depends on standard_conforming_strings.
// The first such literal begins at the same place under both settings; where there is none both scan alike.
func (s *source) hasBackslash() bool {
	for _, t := range s.tokens {
		if t.kind == tString && s.sql[t.start] == '\'' && strings.IndexByte(s.sql[t.start:t.end], '\\') >= 0 {
			return true
		}
	}
	return false
}

// callsDemanding looks for a function of demanding by name: behind a dot, or in front of a parenthesis and found through
// the search path. Where a literal is a body, of a DO block or of a function that is being made, its words count.
func (s *source) callsDemanding() bool {
	if s.bodyDemands() {
		return true
	}
	for i := range s.tokens {
		if !s.is(i-1, tDot) && !s.is(i+1, tOpen) && !s.is(i+1, tUescape) {
			continue
		}
		name, ok := s.name(i)
		if !ok {
			continue
		}
		for _, f := range demanding {
			if name == f {
				return true
			}
		}
	}
	return false
}

// bodyDemands says whether a statement with a body has a name of demanding somewhere.
func (s *source) bodyDemands() bool {
	if !mentionsDemanding(s.sql) {
		return false
	}
	for _, st := range s.statementsOf() {
		if (s.is(st.from, tDo) || st.opaque) && mentionsDemanding(s.sql[s.tokens[st.from].start:s.tokens[st.to-1].end]) {
			return true
		}
	}
	return false
}

// is reports whether the token at index i exists and is of this kind.
func (s *source) is(i int, kind pg_query.Token) bool {
	return i >= 0 && i < len(s.tokens) && s.tokens[i].kind == kind
}

// isWord reports whether the token at index i is this word, which is no keyword of PostgreSQL, without quotes.
func (s *source) isWord(i int, word string) bool {
	if !s.is(i, tIdent) {
		return false
	}
	t := s.tokens[i]
	return t.end-t.start == len(word) && hasPrefixFold(s.sql[t.start:t.end], word)
}

// text is what the user typed for the token at index i.
func (s *source) text(i int) string { return s.sql[s.tokens[i].start:s.tokens[i].end] }

// skip returns i, or the index of the closing bracket if the token at i opens one.
func (s *source) skip(i int) int {
	if k := s.tokens[i].kind; (k == tOpen || k == tOpenBracket) && s.tokens[i].match > i {
		return s.tokens[i].match
	}
	return i
}
