package rewrite

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/koldproxy/koldproxy"
)

const (
	createStreamGrammar = "CREATE STREAM [IF NOT EXISTS] [schema.]name ON [schema.]table WHEN ( expression ) [WITH ( option = value, ... )]"
	dropStreamGrammar   = "DROP STREAM [IF EXISTS] [schema.]name"
	codeUndefinedParam  = "42P02"
)

// createStream replaces
//
//	CREATE STREAM [IF NOT EXISTS] [schema.]name ON [schema.]table WHEN ( expression ) [WITH ( option = value, … )]
//
// by a call. The expression stays as typed inside a literal, so that PostgreSQL's positions in it can be led back.
func (r *rewriter) createStream(s statementRange, statement *Statement) *koldproxy.Error {
	r.custom(s.from + 1)
	p := r.parser(s, s.from+2, createStreamGrammar)
	ifNotExists := p.take(tIf, tNot, tExists)
	stream := p.qualifiedName()
	p.expect(tOn)
	table := p.qualifiedName()
	if p.err == nil && (p.i == p.to || r.is(p.i, tWith)) {
		return koldproxy.Errorf(koldproxy.CodeSyntaxError, "WHEN is required in CREATE STREAM").
			WithHint("A stream without a filter would be the table itself. " + grammarHint(createStreamGrammar)).
			At(r.chars.position(r.tokens[p.i-1].end))
	}
	p.expect(tWhen)
	first, last := p.parenthesized()
	options := "{}"
	if p.err == nil && p.take(tWith) {
		options = p.options(valueNeeded)
	}
	if err := p.finish(); err != nil {
		return err
	}

	q := r.quoter()
	start, end := r.tokens[first].start, r.tokens[last].end
	r.edits = append(r.edits, edit{
		start: r.tokens[s.from].start, end: r.tokens[s.to-1].end, anchor: r.tokens[s.from].start,
		pieces: []piece{
			insert("CALL koldstore.create_stream(stream_schema => " + q.orNull(stream.schema) + ", stream_name => " + q.literal(stream.name) +
				", table_schema => " + q.orNull(table.schema) + ", table_name => " + q.literal(table.name) + ", predicate => " + q.tag),
			copyOf(start, end),
			insert(q.tag + ", if_not_exists => " + strconv.FormatBool(ifNotExists) + ", options => " + q.literal(options) + ")"),
		},
	})
	statement.Tag = "CREATE STREAM"
	statement.Predicate = r.chars.position(start)
	return nil
}

// dropStream replaces DROP STREAM [IF EXISTS] [schema.]name by a call.
func (r *rewriter) dropStream(s statementRange, statement *Statement) *koldproxy.Error {
	r.custom(s.from + 1)
	p := r.parser(s, s.from+2, dropStreamGrammar)
	ifExists := p.take(tIf, tExists)
	stream := p.qualifiedName()
	if err := p.finish(); err != nil {
		return err
	}
	q := r.quoter()
	r.replace(s, "CALL koldstore.drop_stream(stream_schema => "+q.orNull(stream.schema)+", stream_name => "+q.literal(stream.name)+
		", if_exists => "+strconv.FormatBool(ifExists)+")")
	statement.Tag = "DROP STREAM"
	return nil
}

// showStreams replaces SHOW STREAMS by a query. PostgreSQL takes it for the name of a setting (42704), so it is no
// syntax error and never refused here.
func (r *rewriter) showStreams(s statementRange, statement *Statement) {
	var live string
	if statement.StatsLater = r.opts.StatsLater; statement.StatsLater {
		live = `CASE WHEN pg_catalog.current_setting('koldstore.stream_stats', true) <> '' THEN pg_catalog.current_setting('koldstore.stream_stats', true)::pg_catalog.jsonb END`
	} else {
		stats := "{}"
		if len(r.opts.StreamStats) > 0 {
			stats = escapeNonASCII(string(r.opts.StreamStats))
		}
		live = r.quoter().literal(stats)
	}
	r.replace(s, `SELECT name, "table", predicate, consumers, lag FROM koldstore.show_streams(`+live+")")
	statement.Tag = "SHOW"
}

// replace puts text in the place of a whole statement.
func (r *rewriter) replace(s statementRange, text string) {
	start := r.tokens[s.from].start
	r.edits = append(r.edits, edit{start: start, end: r.tokens[s.to-1].end, anchor: start, pieces: []piece{insert(text)}})
}

func (q *quoter) orNull(s *string) string {
	if s == nil {
		return "NULL"
	}
	return q.literal(*s)
}

func grammarHint(grammar string) string { return "The grammar is: " + grammar }

// escapeNonASCII writes the characters of a JSON text that the client's encoding may not have as \u escapes. Outside of
// strings JSON has none of them.
func escapeNonASCII(json string) string {
	if isASCII(json) {
		return json
	}
	var out strings.Builder
	for _, c := range json {
		if c < 0x80 {
			out.WriteRune(c)
			continue
		}
		units := []rune{c}
		if high, low := utf16.EncodeRune(c); high != utf8.RuneError {
			units = []rune{high, low}
		}
		for _, u := range units {
			hex := strconv.FormatInt(int64(u), 16)
			out.WriteString(`\u` + strings.Repeat("0", 4-len(hex)) + hex)
		}
	}
	return out.String()
}
