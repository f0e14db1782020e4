package rewrite

import (
	"strconv"
	"strings"

	"github.com/koldproxy/koldproxy"
)

const (
	alterStreamGrammar = "ALTER STREAM [IF EXISTS] [schema.]name { SET ( option = value, ... ) | RESET ( option, ... ) }"
	alterTableGrammar  = "ALTER TABLE [IF EXISTS] [schema.]name SET ( koldstore_option = value, ... )"
	feedOptionPrefix   = "koldstore_"
)

// alterStream replaces
//
//	ALTER STREAM [IF EXISTS] [schema.]name SET ( option = value, … )
//	ALTER STREAM [IF EXISTS] [schema.]name RESET ( option, … )
//
// by a call. An option to be reset is null there.
func (r *rewriter) alterStream(s statementRange, statement *Statement) *koldproxy.Error {
	r.custom(s.from + 1)
	p := r.parser(s, s.from+2, alterStreamGrammar)
	ifExists := p.take(tIf, tExists)
	stream := p.qualifiedName()
	form := valueAbsent
	if !p.take(tReset) {
		p.expect(tSet)
		form = valueNeeded
	}
	options := p.options(form)
	if err := p.finish(); err != nil {
		return err
	}
	q := r.quoter()
	r.replace(s, "CALL koldstore.alter_stream(stream_schema => "+q.orNull(stream.schema)+", stream_name => "+q.literal(stream.name)+
		", options => "+q.literal(options)+", if_exists => "+strconv.FormatBool(ifExists)+")")
	statement.Tag = "ALTER STREAM"
	return nil
}

// alterTable replaces ALTER TABLE [IF EXISTS] [ONLY] [schema.]name SET ( koldstore_option [= value], … ) by a call. An ALTER
// TABLE without such an option is PostgreSQL's; one that has others too, or other changes, is refused, because the two
// parts of it would be carried out by different means.
func (r *rewriter) alterTable(s statementRange, statement *Statement) *koldproxy.Error {
	p := r.parser(s, s.from+2, alterTableGrammar)
	ifExists := p.take(tIf, tExists)
	table := p.relation()
	ours, foreign := p.feedOptions()
	if !ours {
		return nil
	}
	r.customAnyway(s.from)
	if p.is(p.i, tReset) {
		p.fail(koldproxy.CodeFeatureNotSupported, "the options of koldstore cannot be reset", p.i)
		return p.err.WithHint("Set them to another value. koldstore.unmanage_table ends the change feed of a table.")
	}
	if foreign >= 0 {
		p.fail(koldproxy.CodeFeatureNotSupported, "the options of koldstore cannot be set together with anything else", foreign)
		return p.err.WithHint("Split the statement: one ALTER TABLE with koldstore_… options, one with the rest.")
	}
	p.expect(tSet)
	options := p.options(valueOptional)
	if err := p.finish(); err != nil {
		return err
	}
	q := r.quoter()
	r.replace(s, "CALL koldstore.alter_table_set(table_schema => "+q.orNull(table.schema)+", table_name => "+q.literal(table.name)+
		", options => "+q.literal(options)+", if_exists => "+strconv.FormatBool(ifExists)+")")
	statement.Tag = "ALTER TABLE"
	return nil
}

// relation reads the table of a statement that changes it: [ONLY] name [*].
func (p *parser) relation() qualified {
	if p.take(tOnly) && p.take(tOpen) {
		q := p.qualifiedName()
		p.expect(tClose)
		return q
	}
	q := p.qualifiedName()
	p.take(tStar)
	return q
}

// feedOptions looks through the changes of ALTER TABLE that follow, without reading them: ours says that an option of
// koldstore is set or reset, foreign is the first token of the first other option or change, -1 for none. After an error
// nothing is ours.
func (p *parser) feedOptions() (ours bool, foreign int) {
	foreign = -1
	if p.err != nil {
		return false, foreign
	}
	for i := p.i; i < p.to; i++ { // one change
		here := false
		if first := i + 2; (p.is(i, tSet) || p.is(i, tReset)) && p.is(i+1, tOpen) {
			end := p.tokens[i+1].match
			if end < 0 {
				end = p.to
			}
			for j := first; j < end; j++ {
				if j > first && !p.is(j-1, tComma) {
					j = p.skip(j)
				} else if name, ok := p.name(j); ok && strings.HasPrefix(name, feedOptionPrefix) {
					here = true
				} else if foreign < 0 {
					foreign = j
				}
			}
		}
		if !here && (foreign < 0 || foreign > i) {
			foreign = i
		}
		ours = ours || here
		for i < p.to && !p.is(i, tComma) {
			i = p.skip(i) + 1
		}
	}
	return ours, foreign
}
