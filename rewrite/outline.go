package rewrite

// Outline is what can be told of a text without parsing it: its statements and how the first one begins. Its zero value is
// an empty text.
type Outline struct {
	// Statements is how many non-empty statements there are.
	Statements int
	// Command is the word that the first of them begins with, in lower case; empty when it begins otherwise, with a
	// parenthesis say.
	Command string
	// Cursor is the name that the first of them declares a cursor by, as it is spelled.
	Cursor string
	// Schema and Procedure name what the first of them calls if it is a CALL; Schema is empty when none is given.
	Schema, Procedure string
	// Creations is what they create that may hide a call.
	Creations []Creation
	// Savepoints is what they do to those of a transaction block.
	Savepoints Savepoints
}

// OutlineOf cuts sql into statements as PostgreSQL does. ok is false when that cannot be told, or PostgreSQL cannot do it
// either: the outline is empty then. It is safe for concurrent use.
func OutlineOf(sql string, opts Options) (o Outline, ok bool) {
	enc := encodingNamed(opts.ClientEncoding)
	masked := sql
	if enc == unsafeQuotes {
		masked, enc = maskCharacters(sql), asciiText
	}
	if len(sql) > MaxTextBytes || !enc.valid(masked) || !scansInTime(masked) {
		return o, false
	}
	src, ok := scan(masked)
	if !ok || !opts.ConformingStrings && src.hasBackslash() || opts.EncodingUnsure && hidesBackslash(sql) {
		return o, false
	}
	statements := src.statementsOf()
	o.Statements = len(statements)
	if len(statements) == 0 {
		return o, true
	}
	src.sql = sql // names as they are
	o.Savepoints = src.savepoints(statements)
	o.Creations = src.creations(statements)
	first := statements[0].from
	if src.tokens[first].keyword == kNone {
		return o, true
	}
	o.Command = foldASCII(src.text(first))
	switch src.tokens[first].kind {
	case tDeclare:
		if src.isColumnName(first+1) && !src.is(first+2, tUescape) {
			t := src.tokens[first+1]
			o.Cursor = sql[t.start:t.end]
		}
	case tCall:
		o.Procedure, _ = src.name(first + 1)
		after := first + 2
		if src.is(after, tUescape) {
			after += 2
		}
		if src.is(after, tDot) {
			o.Schema = o.Procedure
			o.Procedure, _ = src.name(after + 1)
		}
	}
	return o, true
}

// maskCharacters replaces the characters of an encoding whose later bytes may look like ASCII, one byte by another, so that
// quotes and names stay where they are. Such a byte is a digit, a letter or one of @[\]^_`{|}~, which a character of one byte
// in front of it would leave without a meaning of its own only in a name or a literal, where it makes no difference.
func maskCharacters(sql string) string {
	const filler = 'z' // unlike b, e, n, u and x nothing in front of a quote
	masked := []byte(sql)
	for i := range masked {
		if sql[i] < 0x80 {
			continue
		}
		masked[i] = filler
		if i+1 < len(sql) && (sql[i+1] >= '@' || sql[i+1] >= '0' && sql[i+1] <= '9') {
			masked[i+1] = filler
		}
	}
	return string(masked)
}
