package proxy

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/rewrite"
)

// rewritten looks at the SQL of a Query or a Parse. t is nil when nobody has to remember anything about it; out is the text
// to send if it is another one.
func (s *session) rewritten(kind byte, sql []byte) (t *text, out string, changed bool) {
	asks := s.asks(sql) || s.prepared && hasWord(sql, "execute")
	options, suspicious := s.rewriteOptions(kind)
	asks = asks || suspicious
	known, defines := rewrite.NeedsLook(sql), s.names != nil && rewrite.Defines(sql)
	if !known && !asks && !defines {
		return nil, "", false
	}
	input := string(sql)
	t = &text{}
	if known {
		options.StreamStats = s.streamStats()
		r := rewrite.Rewrite(input, options)
		if r.Refusal != nil || r.Changed {
			t.positions, t.changed, t.statements = r.Positions, r.Changed && r.Refusal == nil, r.Statements
			t.refusal, t.refusalAt = r.Refusal, r.RefusalAt
		}
		asks = (asks || r.MayDemand) && r.Refusal == nil
		out, changed = r.SQL, r.Changed
	}
	for _, st := range t.statements {
		if st.Tag != "" && t.changed {
			s.server.metrics.rewritten.WithLabelValues(st.Tag).Inc()
		}
		t.stats = t.stats || st.StatsLater
	}
	if asks && s.server.deps.Fulfiller != nil {
		t.classify(input, options)
		t.ownWay = t.ownWay || s.preparedLasting && hasWord(sql, "execute")
	} else if defines && t.refusal == nil {
		s.defining(input, options)
	}
	if (mentions(input) || asks) && hasWord(sql, "prepare") {
		s.prepared = true
		s.preparedLasting = s.preparedLasting || lasting.MatchString(input)
	}
	if t.refusal == nil && !t.changed && !t.mayDemand {
		return nil, out, changed
	}
	return t, out, changed
}

// rewriteOptions are those for the next text; suspicious says that any text of the session may demand.
func (s *session) rewriteOptions(kind byte) (options rewrite.Options, suspicious bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	certain := s.tracker.certain()
	return rewrite.Options{
		ConformingStrings: s.tracker.standardStrings && certain,
		ClientEncoding:    s.tracker.clientEncoding,
		EncodingUnsure:    !certain,
		StatsLater:        kind == msgParse,
	}, s.tracker.suspicious
}

func (s *session) streamStats() json.RawMessage {
	if stats := s.server.deps.StreamStats; stats != nil {
		return stats.StreamStats(s.database)
	}
	return json.RawMessage("{}")
}

// rewrittenQuery returns what to send for the body of a Query; nil means the message as it is.
func (s *session) rewrittenQuery(body []byte) (*text, []byte) {
	sql, rest, ok := cString(body)
	if !ok || len(rest) > 0 {
		return nil, nil // malformed: PostgreSQL says so
	}
	t, out, changed := s.rewritten(msgQuery, sql)
	if !changed {
		return t, nil
	}
	return t, appendMessage(nil, msgQuery, zeroTerminated(out))
}

// rewrittenParse is rewrittenQuery for Parse. It also returns the statement's name.
func (s *session) rewrittenParse(body []byte) (t *text, name string, message []byte) {
	n, rest, ok := cString(body)
	if !ok {
		return nil, "", nil
	}
	sql, types, ok := cString(rest)
	if !ok {
		return nil, string(n), nil
	}
	t, out, changed := s.rewritten(msgParse, sql)
	if !changed {
		return t, string(n), nil
	}
	return t, string(n), appendMessage(nil, msgParse, zeroTerminated(string(n)), zeroTerminated(out), types)
}

// names reads the names in the body of a Bind, Describe, Execute or Close, of which a prefix may be enough.
func names(kind byte, body []byte) *detail {
	d := &detail{}
	if kind == msgDescribe || kind == msgClose {
		if len(body) == 0 {
			return d
		}
		d.target, body = body[0], body[1:]
	}
	name, rest, ok := cString(body)
	if !ok {
		return d
	}
	d.name = string(name)
	if kind == msgBind {
		source, _, _ := cString(rest)
		d.source = string(source)
	}
	return d
}

// gap is white space or a comment.
const gap = `(?:\s|--[^\n\r]*[\n\r]|/\*.*?\*/)`

var (
	// What an error does not take back: it is not done twice. Words are searched for without regard to quotes; taking a
	// literal for a word costs a clear error, the opposite would cost somebody's commit.
	lasting = regexp.MustCompile(`(?i)\b(pg_(try_)?advisory_(lock|unlock)\w*|dblink\w*|lo_(im|ex)port|pg_logical_(emit_message|slot_(get|peek)\w*)|` +
		`pg_(create|drop|copy|advance|replication_slot_advance|replication_origin)\w*|pg_(terminate|cancel)_backend|pg_file_\w+|program|u&["'])`)
	// What a DO block that is alone has to say if it commits: itself, in a procedure that it calls, in another
	// language than PL/pgSQL, or in characters that are written otherwise.
	commits   = regexp.MustCompile(`(?i)commit|rollback|\\|u&`)
	calls     = regexp.MustCompile(`(?i)\bcall\b`)
	ownCalls  = regexp.MustCompile(`(?i)\bcall\s+koldstore\.`)
	languages = regexp.MustCompile(`(?i)\blanguage\b`)
	plpgsql   = regexp.MustCompile(`(?i)\blanguage\s+plpgsql\b`)
	// What PostgreSQL refuses behind a savepoint.
	isolates = regexp.MustCompile(`(?is)\bset` + gap + `+transaction\b`)
	// What it may refuse behind a query, with BEGIN, START or SET in front. To take something else for it costs nothing.
	foremost = regexp.MustCompile(`(?i)\b(isolation|deferrable|snapshot|write)\b`)
)

// classify says what holding the answer of a text has to mind.
func (t *text) classify(sql string, options rewrite.Options) {
	outline, ok := rewrite.OutlineOf(sql, options)
	if ok && outline.Statements <= 1 {
		switch outline.Command {
		case "fetch", "move", "close", "begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release", "set", "reset", "show",
			"listen", "unlisten", "notify", "prepare", "deallocate", "discard", "lock", "vacuum", "checkpoint", "load", "cluster", "reindex":
			return // it evaluates nothing, or a cursor that an error ends for good
		case "do":
			t.alone = commits.MatchString(sql) || other(sql, calls, ownCalls) || other(sql, languages, plpgsql)
		case "call":
			t.alone = outline.Schema != ownSchema
		case "declare":
			t.cursor = outline.Cursor
		}
		t.utility = !slices.Contains(queries, outline.Command)
	}
	t.mayDemand = true
	t.savepoints = outline.Savepoints
	t.creates = outline.Creations
	t.noPoint, t.noQuery = isolates.MatchString(sql), foremost.MatchString(sql)
	t.ownWay = !ok || lasting.MatchString(sql)
}

// queries are the words that a planned statement begins with. The empty one is a parenthesis.
var queries = []string{"", "select", "insert", "update", "delete", "merge", "with", "values", "table"}

// ownSchema holds koldproxy's procedures, which never commit.
const ownSchema = "koldstore"

// other says whether some match of all is not one of fine.
func other(sql string, all, fine *regexp.Regexp) bool {
	return len(all.FindAllStringIndex(sql, -1)) > len(fine.FindAllStringIndex(sql, -1))
}

// hasWord says whether a word stands in a text, in any case. Identifiers that contain it count.
func hasWord(sql []byte, word string) bool {
	return bytes.Contains(bytes.ToLower(sql), []byte(word))
}

// mentions says whether a text has one of the functions that may demand, in literals and bodies too.
func mentions(sql string) bool {
	lower := strings.ToLower(sql)
	return strings.Contains(lower, "changes_since") || strings.Contains(lower, "flush_table")
}

// isDemand reads the demand in the DETAIL of a KS003 and returns its canonical form: what is judged, answered and sealed is that, and
// never the text that somebody has raised.
func isDemand(detail string) (json.RawMessage, bool) {
	d, err := koldproxy.ParseDemand([]byte(detail))
	if err != nil {
		return nil, false
	}
	return json.RawMessage(d.String()), true
}

// ascii rewrites JSON so that it means the same in every client encoding.
func ascii(doc []byte) []byte {
	if bytes.IndexFunc(doc, func(r rune) bool { return r >= 0x80 }) < 0 {
		return doc
	}
	const hex = "0123456789abcdef"
	unit := func(out []byte, u rune) []byte {
		return append(out, '\\', 'u', hex[u>>12&15], hex[u>>8&15], hex[u>>4&15], hex[u&15])
	}
	out := make([]byte, 0, len(doc)*2)
	for _, r := range string(doc) { // all non-ASCII text in JSON is inside strings
		switch {
		case r < 0x80:
			out = append(out, byte(r))
		case r < 0x10000:
			out = unit(out, r)
		default:
			r -= 0x10000
			out = unit(unit(out, 0xd800+r>>10), 0xdc00+r&0x3ff)
		}
	}
	return out
}
