package rewrite

// A bare name in ORDER BY means an output column before it means a column of FROM; in WHERE it means the latter only.
// So SELECT upper(name) AS name … ORDER BY name sorts by something else than WHERE name > 'x' compares. Before a key is
// compared, the select list has to be searched for what gives itself its name.

// outputItem is an item of a select list, tokens [from, to) without its label.
type outputItem struct {
	from, to int
	plain    bool // a column reference and nothing else
}

// outputName looks for the select list item that is, or may be, called name. Where tokens do not tell, the answer is an
// item that is not plain.
//
// Statements nest, and each level searches what is below it, so the whole text has a budget; what goes beyond counts as
// not told.
func (r *rewriter) outputName(f *frame, name string) (item outputItem, found bool) {
	i := f.sel + 1
	if r.is(i, tAll) {
		i++
	}
	to := f.clauses[0].at
	for ; i < to; i++ {
		start := i
		for i < to && !r.is(i, tComma) {
			r.namesLeft--
			i = r.skip(i) + 1
		}
		it := outputItem{from: start, to: i}
		label, known := r.label(&it)
		switch {
		case r.namesLeft < 0:
			return outputItem{}, true
		case known && label != name:
			continue
		case !known && !r.is(i-1, tStar) && !r.mentions(start, i, name): // (row).* may hold any name
			continue
		case known:
			return it, true
		default:
			return outputItem{}, true
		}
	}
	return outputItem{}, false
}

// label is the name of an item, if tokens tell. It cuts an explicit label off the item. The star of a table has no name
// of its own, since it stands for columns of FROM: known, and empty.
func (r *rewriter) label(it *outputItem) (name string, known bool) {
	last := it.to - 1
	if last < it.from {
		return "", true
	}
	if r.is(last, tStar) && (last == it.from || r.is(last-1, tDot) && r.isColumnReference(it.from, last-1)) {
		return "", true
	}
	if r.isColumnReference(it.from, it.to) {
		it.plain = true
		name, known = r.name(last)
		return clip(name), known
	}
	labelled := false
	switch {
	case last-1 > it.from && r.is(last-1, tAs) && r.isLabel(last):
		it.to, labelled = last-1, true
	case last > it.from && r.is(last, tIdent) && r.endsValue(last-1):
		it.to, labelled = last, true
	}
	if labelled {
		it.plain = r.isColumnReference(it.from, it.to)
		name, known = r.name(last)
		return clip(name), known
	}
	if open := r.callOf(it.from, it.to); open > 0 {
		name, known = r.name(open - 1)
		return clip(name), known
	}
	if r.hasOperator(it.from, it.to) {
		return "?column?", true
	}
	return "", false
}

// endsValue reports whether an identifier behind the token at index i can only be a label. Keywords do not count, since
// they may be operators or the first half of a type's name.
func (r *rewriter) endsValue(i int) bool {
	switch r.tokens[i].kind {
	case tInteger, tFloat, tParam, tIdent, tUnicodeIdent, tCloseBracket, tClose, tEnd, tNull, tTrue, tFalse, tString:
		return !r.is(i, tClose) || !r.is(r.tokens[i].match-1, tOperator)
	}
	return r.tokens[i].keyword != kNone && r.tokens[i].keyword != kReserved && (r.is(i-1, tCast) || r.is(i-1, tDot))
}

// callOf returns the index of the opening parenthesis if the tokens [from, to) are one call of a function, else 0.
func (r *rewriter) callOf(from, to int) int {
	for i := from; i < to-1 && r.isLabel(i); i += 2 {
		if r.is(i+1, tOpen) {
			if r.tokens[i+1].match == to-1 && r.tokens[i].keyword != kReserved && !r.isKeywordCall(i) {
				return i + 1
			}
			return 0
		}
		if !r.is(i+1, tDot) {
			return 0
		}
	}
	return 0
}

// isKeywordCall reports whether the call with the name at index i may be named otherwise than it is spelled: CAST,
// TREAT, XMLSERIALIZE, ROW, ARRAY and other words with a grammar of their own.
func (r *rewriter) isKeywordCall(i int) bool { return r.tokens[i].keyword == kColumn }

// hasOperator reports whether an operator stands outside of all parentheses and CASEs, so that PostgreSQL has no name
// for the expression.
func (r *rewriter) hasOperator(from, to int) bool {
	cases := 0
	for i := from; i < to; i = r.skip(i) + 1 {
		r.namesLeft--
		switch k := r.tokens[i].kind; {
		case k == tCase:
			cases++
		case k == tEnd:
			cases--
		case cases == 0 && isOperatorByte(r.sql[r.tokens[i].start]) && !r.is(i-1, tDot):
			return true
		}
	}
	return false
}

// mentions reports whether any token of [from, to), at any depth, may be the name.
func (r *rewriter) mentions(from, to int, name string) bool {
	for i := from; i < to; i++ {
		if r.namesLeft--; r.namesLeft < 0 {
			return true
		}
		if got, ok := r.name(i); ok && clip(got) == name || !ok && r.is(i, tUnicodeIdent) {
			return true
		}
	}
	return false
}
