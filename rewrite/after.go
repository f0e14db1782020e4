package rewrite

import (
	pg_query "github.com/pganalyze/pg_query_go/v6"

	"github.com/koldproxy/koldproxy"
)

// AFTER is an unreserved word of PostgreSQL: the name of columns, functions, aliases. It is koldproxy's only where
// PostgreSQL's grammar has no place for it: directly behind the whole operand of LIMIT, or behind FETCH FIRST … ROWS
// ONLY, at the same depth of parentheses, and in front of a parenthesis.
//
// The walk below keeps one frame for each open parenthesis and, in frames that hold a SELECT, the places of its clauses.
// Their keywords are reserved words that may be names only behind a dot or AS, which is what makes tokens enough.

// clause is one clause of a SELECT: it reaches from its keyword to the keyword of the next one.
type clause struct {
	kind pg_query.Token
	at   int
}

// frame is what stands between one pair of parentheses, or the whole statement.
type frame struct {
	sel     int // index of SELECT, -1 if there is none
	clauses []clause
	setOp   int  // index of a UNION, INTERSECT or EXCEPT, -1 if there is none
	window  bool // a window function is called outside of nested queries
	agg     bool // so is an aggregate
	cases   int  // open CASEs since the last clause keyword
	after   bool // its AFTER has been read
}

// aggregates are the aggregates that a look at tokens recognizes. What it misses is an error in PostgreSQL, since the
// keys would have to be grouped.
var aggregates = map[string]bool{
	"count": true, "sum": true, "avg": true, "min": true, "max": true, "array_agg": true, "string_agg": true, "json_agg": true,
	"jsonb_agg": true, "json_object_agg": true, "jsonb_object_agg": true, "bool_and": true, "bool_or": true, "every": true,
}

// after replaces every AFTER clause of a statement.
func (r *rewriter) after(s statementRange) *koldproxy.Error {
	frames := []frame{{sel: -1, setOp: -1}}
	valuesEnd := -1 // the closing parenthesis of the last AFTER
	for i := s.from; i < s.to; i++ {
		f := &frames[len(frames)-1]
		switch r.tokens[i].kind {
		case tOpen, tOpenBracket:
			frames = append(frames, frame{sel: -1, setOp: -1})
		case tClose, tCloseBracket:
			if len(frames) == 1 {
				return nil // unbalanced: PostgreSQL will say so
			}
			inner := *f
			frames = frames[:len(frames)-1]
			if inner.sel < 0 && inner.setOp < 0 {
				f = &frames[len(frames)-1]
				f.note(inner.window, inner.agg)
			}
		case tAfter:
			if !r.isAfter(f, i) {
				continue
			}
			r.custom(i)
			if i < valuesEnd {
				return r.unsupported(i, "AFTER is not supported within the values of another AFTER")
			}
			if f.after {
				return koldproxy.Errorf(koldproxy.CodeSyntaxError, `syntax error at or near "%s"`, r.text(i)).
					WithHint("A SELECT has one AFTER, with a value for each key of ORDER BY.").At(r.chars.position(r.tokens[i].start))
			}
			f.after = true
			valuesEnd = r.tokens[i+1].match
			if err := r.spliceAfter(s, f, i, valuesEnd); err != nil {
				return err
			}
		default:
			r.step(f, i)
		}
	}
	return nil
}

// step takes notice of one token at the frame's own depth.
func (r *rewriter) step(f *frame, i int) {
	if r.is(i-1, tDot) {
		return
	}
	kind := r.tokens[i].kind
	switch kind {
	case tSelect:
		// Behind another SELECT of the same depth it is a label, unless it continues a set operation.
		if f.sel < 0 || r.followsSetOp(i) {
			*f = frame{sel: i, setOp: f.setOp}
		}
	case tUnion, tIntersect, tExcept:
		if !r.is(i-1, tAs) {
			f.setOp = i
		}
	case tCase:
		f.cases++
	case tEnd:
		f.cases--
	case tOver:
		// OVER has to be written with AS where it is a label, so behind a call it is none.
		f.note(r.is(i-1, tClose), false)
	case tFilter, tWithin:
		f.note(false, r.is(i-1, tClose) && (r.is(i+1, tOpen) || r.is(i+1, tGroup)))
	case tIdent:
		if r.is(i+1, tOpen) && aggregates[foldASCII(r.text(i))] {
			f.note(false, true)
		}
	default:
		if r.isClause(i) {
			f.clauses = append(f.clauses, clause{kind, i})
			f.cases = 0
		}
	}
}

// note records calls in a select list, or in parentheses that may be part of one.
func (f *frame) note(window, agg bool) {
	if f.sel < 0 || len(f.clauses) == 0 {
		f.window = f.window || window
		f.agg = f.agg || agg
	}
}

// isClause reports whether the token at index i begins a clause that may follow a select list.
func (r *rewriter) isClause(i int) bool {
	if r.is(i-1, tAs) {
		return false
	}
	switch r.tokens[i].kind {
	case tFrom: // not that of IS [NOT] DISTINCT FROM and ROWS FROM ( … )
		return !r.is(i-1, tRows) && (!r.is(i-1, tDistinct) || r.is(i-2, tSelect))
	case tGroup, tOrder:
		return r.is(i+1, tBy)
	case tInto, tWhere, tHaving, tWindow, tLimit, tOffset, tFetch, tFor:
		return true
	}
	return false
}

// followsSetOp reports whether the SELECT at index i is the right side of a set operation.
func (r *rewriter) followsSetOp(i int) bool {
	if r.is(i-1, tAll) || r.is(i-1, tDistinct) {
		i--
	}
	return r.is(i-1, tUnion) || r.is(i-1, tIntersect) || r.is(i-1, tExcept)
}

// isAfter reports whether the word AFTER at index i is koldproxy's.
func (r *rewriter) isAfter(f *frame, i int) bool {
	if !r.is(i+1, tOpen) || r.tokens[i+1].match < 0 || len(f.clauses) == 0 {
		return false
	}
	switch c := f.clauses[len(f.clauses)-1]; c.kind {
	case tLimit:
		return i-1 > c.at && f.cases == 0 && r.endsOperand(i-1)
	case tFetch:
		return (r.is(c.at+1, tFirst) || r.is(c.at+1, tNext)) && r.is(i-1, tOnly) && (r.is(i-2, tRow) || r.is(i-2, tRows))
	}
	return false
}

// endsOperand reports whether an expression may be complete with the token at index i, so that a word behind it cannot
// belong to it. Tokens about which there is doubt do not count: then PostgreSQL says what it thinks of AFTER.
func (r *rewriter) endsOperand(i int) bool {
	switch r.tokens[i].kind {
	case tInteger, tFloat, tString, tUnicodeString, tBits, tHex, tParam, tIdent, tUnicodeIdent, tCloseBracket, tAll, tNull, tEnd:
		return true
	case tClose:
		// OPERATOR(pg_catalog.+) is an operator.
		return r.tokens[i].match > 0 && !r.is(r.tokens[i].match-1, tOperator)
	}
	return r.is(i-1, tDot) || r.is(i-1, tCast)
}

// find returns the tokens of a clause, without its keywords: [from, to). ok is false if the SELECT does not have it.
func (f *frame) find(kind pg_query.Token, end int) (from, to int, ok bool) {
	for n, c := range f.clauses {
		if c.kind != kind {
			continue
		}
		from, to = c.at+1, end
		if kind == tOrder || kind == tGroup {
			from++
		}
		if n+1 < len(f.clauses) {
			to = f.clauses[n+1].at
		}
		return from, to, true
	}
	return 0, 0, false
}

// has reports whether the SELECT has this clause.
func (f *frame) has(kind pg_query.Token) bool {
	_, _, ok := f.find(kind, 0)
	return ok
}

// spliceAfter replaces the AFTER at index at, whose values end at index end, by a condition.
func (r *rewriter) spliceAfter(s statementRange, f *frame, at, end int) *koldproxy.Error {
	if err := r.supported(f, at); err != nil {
		return err
	}
	keys, err := r.orderKeys(f, at)
	if err != nil {
		return err
	}
	if err := r.afterValues(keys, at, end); err != nil {
		return err
	}
	r.findNullable(s, f, at, keys)

	anchor, stored := r.tokens[at].start, r.createsView(s)
	var condition []piece
	if from, to, ok := f.find(tWhere, at); ok {
		if from == to {
			return nil // a syntax error that PostgreSQL meets first
		}
		first, last := r.tokens[from].start, r.tokens[to-1].end
		r.edits = append(r.edits, edit{start: first, end: first, anchor: anchor, pieces: []piece{insert("(")}})
		condition = append(condition, insert(") AND ("))
		condition = append(condition, keyset(keys, r.quoter(), stored)...)
		r.edits = append(r.edits, edit{start: last, end: last, anchor: anchor, pieces: append(condition, insert(")"))})
	} else {
		// In front of WINDOW or ORDER BY, directly behind the last token, so that no comment can swallow it.
		order, _, _ := f.find(tOrder, at)
		last := r.tokens[order-3].end
		condition = append(condition, insert(" WHERE "))
		condition = append(condition, keyset(keys, r.quoter(), stored)...)
		r.edits = append(r.edits, edit{start: last, end: last, anchor: anchor, pieces: condition})
	}
	r.edits = append(r.edits, edit{start: anchor, end: r.tokens[end].end, anchor: anchor, pieces: []piece{insert(" ")}})
	return nil
}

// supported refuses the queries in which it is not clear, or not the same, what a condition before and one after the rest
// of the query select.
func (r *rewriter) supported(f *frame, at int) *koldproxy.Error {
	switch {
	case f.setOp >= 0:
		return r.unsupported(at, "AFTER is not supported with UNION, INTERSECT or EXCEPT")
	case f.sel < 0:
		return r.unsupported(at, "AFTER is supported in SELECT only")
	case r.is(f.sel+1, tDistinct):
		return r.unsupported(at, "AFTER is not supported with DISTINCT")
	case f.has(tGroup):
		return r.unsupported(at, "AFTER is not supported with GROUP BY")
	case f.has(tHaving):
		return r.unsupported(at, "AFTER is not supported with HAVING")
	case f.agg:
		return r.unsupported(at, "AFTER is not supported with aggregate functions")
	case f.window || f.has(tWindow):
		return r.unsupported(at, "AFTER is not supported with window functions")
	case !f.has(tOrder):
		return koldproxy.Errorf(koldproxy.CodeSyntaxError, "AFTER requires ORDER BY").
			WithHint("AFTER gives a value for each key of ORDER BY.").At(r.chars.position(r.tokens[at].start))
	}
	return nil
}

// unsupported is the refusal of an AFTER that is clear to PostgreSQL's grammar but not in its meaning.
func (r *rewriter) unsupported(at int, message string) *koldproxy.Error {
	return koldproxy.Errorf(koldproxy.CodeFeatureNotSupported, "%s", message).
		WithHint("AFTER pages over SELECT ... FROM ... WHERE ... ORDER BY columns LIMIT n; put anything else into a sub-select in FROM.").
		At(r.chars.position(r.tokens[at].start))
}
