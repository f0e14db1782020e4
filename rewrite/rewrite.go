package rewrite

import (
	"encoding/json"

	"github.com/koldproxy/koldproxy"
)

// MaxTextBytes is the length up to which a text is searched for koldproxy's statements. Longer ones are forwarded.
const MaxTextBytes = 1 << 20

// Options is what the session knows at the time of the text.
type Options struct {
	// StreamStats is the JSON object that koldstore.show_streams merges into its answer: consumers and lag of this
	// instance by stream. nil stands for {}. It is read, never kept.
	StreamStats json.RawMessage
	// StatsLater is for texts that are executed later than they are looked at: SHOW STREAMS then reads StreamStats from the
	// setting koldstore.stream_stats when it is executed, and Statement.StatsLater says so.
	StatsLater bool
	// ConformingStrings says that standard_conforming_strings is known to be on for this text. While it is false a text
	// with a backslash in a plain literal is forwarded.
	ConformingStrings bool
	// ClientEncoding is the session's client_encoding as ParameterStatus reports it ("UTF8", "SJIS"). Empty is UTF8. A
	// name that is not known is treated as one whose quotes cannot be told.
	ClientEncoding string
	// EncodingUnsure says that PostgreSQL may read this text in another encoding, since what is under way may change it. A text
	// in which a backslash may be the end of a character is forwarded then.
	EncodingUnsure bool
}

// Result is what to do with a text.
type Result struct {
	// SQL is what to send. It equals the input when nothing changed.
	SQL string
	// Changed says whether SQL differs from the input.
	Changed bool
	// Positions leads characters of SQL back to the input. Its zero value, for unchanged texts, is the identity.
	Positions PositionMap
	// Statements lists the rewritten statements in the order of the text.
	Statements []Statement
	// Refusal is set when the text is koldproxy's but not acceptable. SQL is to be sent all the same: PostgreSQL answers
	// with a syntax error at the character RefusalAt, whose fields are to be replaced by these. An error at any other place
	// is one that PostgreSQL met first, and goes to the client as it is. SQL is the input then or, where PostgreSQL could
	// take that for one of its own statements, the input with something in it that is an error in any case.
	Refusal *koldproxy.Error
	// RefusalAt is where PostgreSQL's own error will point, in characters from 1; zero without Refusal.
	RefusalAt int
	// MayDemand says that the text names a function of koldstore that may raise a demand (docs/architecture.md), so that
	// its answer has to be held until it can no longer do so. Calls hidden in views, function bodies and prepared
	// statements do not show in a text.
	MayDemand bool
}

// Statement is one rewritten statement of a text.
type Statement struct {
	// Ordinal counts the non-empty statements of the text from 0: the n-th CommandComplete belongs to it.
	Ordinal int
	// Tag is the command tag that the client expects in place of PostgreSQL's. Empty: PostgreSQL's own is right.
	Tag string
	// Predicate is where the expression of CREATE STREAM … WHEN begins in the input, in characters from 1; otherwise 0.
	// Positions in the predicate count from there.
	Predicate int
	// StatsLater says that the statement reads the setting koldstore.stream_stats; see Options.StatsLater.
	StatsLater bool
}

// Rewrite replaces koldproxy's statements in sql. It is safe for concurrent use. The result may share memory with sql
// and with nothing else.
func Rewrite(sql string, opts Options) Result {
	unchanged := Result{SQL: sql, MayDemand: mentionsDemanding(sql)}
	enc := encodingNamed(opts.ClientEncoding)
	if len(sql) > MaxTextBytes || !worthScanning(sql) || enc == unsafeQuotes || !enc.valid(sql) || opts.EncodingUnsure && hidesBackslash(sql) || !scansInTime(sql) {
		return unchanged
	}
	src, ok := scan(sql)
	if !ok {
		return unchanged
	}
	if !opts.ConformingStrings && src.hasBackslash() {
		return unchanged
	}
	unchanged.MayDemand = src.callsDemanding()

	r := &rewriter{source: src, chars: newCharIndex(sql, enc), opts: opts, firstCustom: -1}
	if refusal := r.run(); refusal != nil {
		if r.firstCustom >= 0 {
			unchanged.Refusal = refusal
			unchanged.RefusalAt = r.chars.position(r.firstCustom)
		}
		if r.spoil {
			unchanged.SQL, unchanged.Changed = sql[:r.firstCustom]+spoiler+sql[r.firstCustom:], true
		}
		return unchanged
	}
	if len(r.edits) == 0 {
		return unchanged
	}
	result := unchanged
	result.SQL, result.Positions = splice(r.chars, r.edits)
	result.Changed = true
	result.Statements = r.statements
	return result
}

// rewriter collects the edits of one text.
type rewriter struct {
	*source
	chars      *charIndex
	opts       Options
	edits      []edit
	statements []Statement
	quotes     *quoter
	// firstCustom is the byte at which PostgreSQL will find a syntax error in the text, -1 for none. With spoil it finds one
	// only if a spoiler is put there.
	firstCustom int
	spoil       bool
	// namesLeft bounds the search for output names in select lists; see outputName.
	namesLeft int
	// ctes are the names that may be defined by WITH in the statement that begins at token ctesOf; see commonTables.
	ctes   map[string]bool
	ctesOf int
}

// run walks over the statements. The first refusal ends it.
func (r *rewriter) run() *koldproxy.Error {
	r.namesLeft = 16*len(r.tokens) + 1024
	for ordinal, s := range r.statementsOf() {
		before := len(r.edits)
		statement := Statement{Ordinal: ordinal}
		var refusal *koldproxy.Error
		switch {
		case r.is(s.from, tCreate) && r.isWord(s.from+1, "stream"):
			refusal = r.createStream(s, &statement)
		case r.is(s.from, tDrop) && r.isWord(s.from+1, "stream"):
			refusal = r.dropStream(s, &statement)
		case r.is(s.from, tAlter) && r.isWord(s.from+1, "stream"):
			refusal = r.alterStream(s, &statement)
		case r.is(s.from, tAlter) && r.is(s.from+1, tTable):
			refusal = r.alterTable(s, &statement)
		case (r.is(s.from, tGrant) || r.is(s.from, tRevoke)) && r.isWord(s.from+1, "subscribe") && r.is(s.from+2, tOn) && r.isWord(s.from+3, "topic"):
			refusal = r.grantSubscribe(s, &statement)
		case r.is(s.from, tShow) && r.isWord(s.from+1, "streams") && s.from+2 == s.to:
			r.showStreams(s, &statement)
		case !s.opaque:
			refusal = r.after(s)
		}
		if refusal != nil {
			return refusal
		}
		if len(r.edits) > before {
			r.statements = append(r.statements, statement)
		}
	}
	return nil
}

// custom notes that PostgreSQL would stumble over the token at index i.
func (r *rewriter) custom(i int) {
	if r.firstCustom < 0 {
		r.firstCustom = r.tokens[i].start
	}
}

// spoiler is a syntax error at the beginning of every statement.
const spoiler = ")"

// customAnyway notes that the statement which begins with the token at index i is koldproxy's although PostgreSQL's grammar
// may have it: a refusal has to make it an error.
func (r *rewriter) customAnyway(i int) {
	if r.firstCustom < 0 {
		r.firstCustom, r.spoil = r.tokens[i].start, true
	}
}

// quoter returns the text's dollar quotes, made when first needed.
func (r *rewriter) quoter() *quoter {
	if r.quotes == nil {
		r.quotes = newQuoter(r.sql, r.opts.StreamStats)
	}
	return r.quotes
}
