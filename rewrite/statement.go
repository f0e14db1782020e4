package rewrite

// statementRange is one non-empty statement: tokens [from, to), without the semicolon.
type statementRange struct {
	from, to int
	// opaque statements hold text that PostgreSQL keeps for later: bodies of functions, rules, the elements of a new
	// schema. Nothing in them is replaced.
	opaque bool
}

// statementsOf cuts the text at its semicolons, except at those inside a BEGIN ATOMIC … END body or inside the
// parentheses of a rule.
func (s *source) statementsOf() []statementRange {
	var all []statementRange
	n := len(s.tokens)
	for i := 0; i < n; {
		if s.is(i, tSemicolon) {
			i++
			continue
		}
		st := statementRange{from: i}
		rule := false
		if s.is(i, tCreate) {
			i++
			if s.is(i, tOr) && s.is(i+1, tReplace) {
				i += 2
			}
			rule = s.is(i, tRule)
			st.opaque = rule || s.is(i, tFunction) || s.is(i, tProcedure) || s.is(i, tSchema)
		}
		depth, body := 0, false
		for ; i < n; i++ {
			switch s.tokens[i].kind {
			case tOpen:
				depth++
			case tClose:
				depth--
			case tAtomic:
				body = body || st.opaque && depth == 0 && s.is(i-1, tBegin)
			case tEnd:
				// END closes the body only in place of a statement; that of CASE, or a label, stands elsewhere.
				if body && (s.is(i-1, tSemicolon) || s.is(i-1, tAtomic)) {
					body = false
				}
			}
			if s.tokens[i].kind == tSemicolon && !body && (!rule || depth <= 0) {
				break
			}
		}
		st.to = i
		all = append(all, st)
	}
	return all
}
