package proxy

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strings"

	"github.com/koldproxy/koldproxy/rewrite"
)

// rewritten looks at the SQL of a Query or a Parse. t is nil when nobody has to remember anything about it; out is the text
// to send if it is another one.
func (s *session) rewritten(sql []byte) (t *text, out string, changed bool) {
	if !rewrite.NeedsLook(sql) {
		return nil, "", false
	}
	s.mu.Lock()
	options := rewrite.Options{
		ConformingStrings: s.tracker.conforming(),
		ClientEncoding:    s.tracker.clientEncoding,
		StreamStats:       json.RawMessage("{}"),
	}
	s.mu.Unlock()
	if stats := s.server.deps.StreamStats; stats != nil {
		options.StreamStats = stats.StreamStats(s.database)
	}
	input := string(sql)
	r := rewrite.Rewrite(input, options)
	demands := r.MayDemand && s.server.deps.Fulfiller != nil
	if r.Refusal == nil && !r.Changed && !demands {
		return nil, "", false
	}
	t = &text{
		positions:  r.Positions,
		changed:    r.Changed && r.Refusal == nil,
		statements: r.Statements,
		refusal:    r.Refusal,
		refusalAt:  r.RefusalAt,
		mayDemand:  demands && r.Refusal == nil,
	}
	for _, st := range r.Statements {
		if st.Tag != "" && t.changed {
			s.server.metrics.rewritten.WithLabelValues(st.Tag).Inc()
		}
	}
	if t.mayDemand {
		t.repeatable = repeatable(input)
	}
	return t, r.SQL, r.Changed
}

// rewrittenQuery returns what to send for the body of a Query; nil means the message as it is.
func (s *session) rewrittenQuery(body []byte) (*text, []byte) {
	sql, rest, ok := cString(body)
	if !ok || len(rest) > 0 {
		return nil, nil // malformed: PostgreSQL says so
	}
	t, out, changed := s.rewritten(sql)
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
	t, out, changed := s.rewritten(sql)
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

var (
	// Words that make it impossible to run a text of several statements twice. They are searched for without regard to
	// quotes: taking a literal for a word costs a clear error, the opposite would cost somebody's commit.
	transactionWords = regexp.MustCompile(`(?i)\b(begin|start|commit|rollback|abort|savepoint|release|prepare|call|do)\b`)
	endWords         = regexp.MustCompile(`(?i)\bend\b`)
	caseWords        = regexp.MustCompile(`(?i)\bcase\b`)
	// A single statement can commit if it is a DO block that says so, or a CALL.
	blocks  = regexp.MustCompile(`(?i)\bdo\b`)
	commits = regexp.MustCompile(`(?i)\b(commit|rollback)\b`)
	calls   = regexp.MustCompile(`(?is)^(?:\s|;|--[^\n\r]*[\n\r]|/\*.*?\*/)*call\b`)
)

// repeatable says whether a text may be run again after it has failed: nothing it did can have outlived the failure.
func repeatable(sql string) bool {
	if strings.Contains(strings.TrimRight(sql, "; \t\r\n\f"), ";") { // several, in doubt
		return !transactionWords.MatchString(sql) &&
			len(endWords.FindAllStringIndex(sql, -1)) <= len(caseWords.FindAllStringIndex(sql, -1))
	}
	switch {
	case blocks.MatchString(sql) && commits.MatchString(sql):
		return false
	case calls.MatchString(sql):
		return strings.Contains(strings.ToLower(sql), "koldstore") // our own procedures never commit
	}
	return true
}

// isDemand says whether the DETAIL of a KS003 is a demand that a Fulfiller may understand.
func isDemand(detail string) (json.RawMessage, bool) {
	var d struct {
		Kind string `json:"kind"`
	}
	if err := json.Unmarshal([]byte(detail), &d); err != nil || d.Kind == "" {
		return nil, false
	}
	return json.RawMessage(detail), true
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
