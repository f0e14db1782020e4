package rewrite

import "github.com/koldproxy/koldproxy"

// maxKeys is the number of keys AFTER takes: as many as an index has columns.
const maxKeys = 32

// span is a range of bytes of the text.
type span struct{ start, end int }

// orderKey is one key of ORDER BY together with its value in AFTER.
type orderKey struct {
	column     span // what to compare, as typed: the column reference and its COLLATE
	first      int  // first token of the column reference
	last       int  // its last token
	end        int  // last token of its COLLATE; last without one
	desc       bool
	nullsFirst bool

	value   span
	isNull  nullness
	literal bool // the value is a string without a type of its own

	// table is the table whose column this surely is, as SQL; empty where it is not known. See findNullable.
	table string
	// name is the column's name.
	name string
}

// nullness says whether a value of AFTER is NULL.
type nullness uint8

const (
	neverNull nullness = iota
	maybeNull
	alwaysNull
)

// orderKeys reads ORDER BY. Every key has to be a plain column.
func (r *rewriter) orderKeys(f *frame, at int) ([]orderKey, *koldproxy.Error) {
	from, to, _ := f.find(tOrder, at)
	var keys []orderKey
	for i := from; i < to; i++ {
		start := i
		for i < to && !r.is(i, tComma) {
			i = r.skip(i) + 1
		}
		key, ok := r.orderKey(start, i)
		if !ok {
			return nil, r.unsupported(at, "AFTER is supported only where ORDER BY names columns, with COLLATE, ASC or DESC, NULLS FIRST or LAST")
		}
		if key.first == key.end { // only a bare name can be one of the select list
			item, found := r.outputName(f, key.name)
			switch {
			case found && !item.plain:
				return nil, r.unsupported(at, `AFTER is not supported where "`+key.name+`" in ORDER BY is or may be an expression of the select list`)
			case found:
				key.first, key.last, key.end = item.from, item.to-1, item.to-1
				if key.name, found = r.name(key.last); !found {
					return nil, r.unsupported(at, "AFTER is supported only where ORDER BY names columns")
				}
			}
		}
		key.column = span{r.tokens[key.first].start, r.tokens[key.end].end}
		if keys = append(keys, key); len(keys) > maxKeys {
			return nil, r.unsupported(at, "AFTER is supported with at most 32 keys")
		}
	}
	if len(keys) == 0 {
		return nil, r.unsupported(at, "AFTER requires keys in ORDER BY")
	}
	return keys, nil
}

// orderKey reads one key: column [COLLATE name] [ASC | DESC] [NULLS FIRST | LAST].
func (r *rewriter) orderKey(from, to int) (key orderKey, ok bool) {
	explicit := false
	if to-2 > from && r.is(to-2, tNulls) && (r.is(to-1, tFirst) || r.is(to-1, tLast)) {
		explicit, key.nullsFirst = true, r.is(to-1, tFirst)
		to -= 2
	}
	if to-1 > from && (r.is(to-1, tAsc) || r.is(to-1, tDesc)) && !r.is(to-2, tDot) {
		key.desc = r.is(to-1, tDesc)
		to--
	}
	if !explicit {
		key.nullsFirst = key.desc
	}
	key.end = to - 1
	for i := from; i < to; i++ {
		if r.is(i, tCollate) && !r.is(i-1, tDot) {
			if !r.isColumnReference(i+1, to) {
				return key, false
			}
			to = i
		}
	}
	if !r.isColumnReference(from, to) {
		return key, false
	}
	key.first, key.last = from, to-1
	key.name, ok = r.name(to - 1)
	key.name = clip(key.name)
	return key, ok
}

// isColumnReference reports whether the tokens [from, to) are name{.name}. U&"" names with UESCAPE are not taken.
func (r *rewriter) isColumnReference(from, to int) bool {
	if to <= from || !r.isColumnName(from) {
		return false
	}
	i := from + 1
	for ; i+1 < to && r.is(i, tDot) && r.isLabel(i+1); i += 2 {
	}
	return i == to
}

// afterValues reads the values of AFTER ( … ) into keys.
func (r *rewriter) afterValues(keys []orderKey, at, end int) *koldproxy.Error {
	n := 0
	for i := at + 2; ; i++ {
		start := i
		for i < end && !r.is(i, tComma) {
			i = r.skip(i) + 1
		}
		if i == start {
			return koldproxy.Errorf(koldproxy.CodeSyntaxError, `syntax error at or near "%s"`, r.text(i)).
				WithHint("AFTER takes a value for each key of ORDER BY: AFTER ('value'[, ...]).").At(r.chars.position(r.tokens[i].start))
		}
		if n < len(keys) {
			keys[n].value = span{r.tokens[start].start, r.tokens[i-1].end}
			keys[n].isNull = r.nullness(start, i)
			keys[n].literal = i == start+1 && r.is(start, tString)
		}
		if n++; n == len(keys)+1 {
			return r.wrongCount(keys, start, "AFTER has more values than ORDER BY has keys")
		}
		if i == end {
			break
		}
	}
	if n < len(keys) {
		return r.wrongCount(keys, end, "AFTER has fewer values than ORDER BY has keys")
	}
	return nil
}

func (r *rewriter) wrongCount(keys []orderKey, i int, message string) *koldproxy.Error {
	hint := "Give one value for the one key of ORDER BY, that of the last row you saw."
	if len(keys) > 1 {
		hint = "Give one value for each key of ORDER BY, in their order, those of the last row you saw."
	}
	return koldproxy.Errorf(koldproxy.CodeSyntaxError, "%s", message).WithHint(hint).At(r.chars.position(r.tokens[i].start))
}

// nullness judges a value by its tokens: a constant, with or without a sign and casts, is not NULL.
func (r *rewriter) nullness(from, to int) nullness {
	result := neverNull
	switch r.tokens[from].kind {
	case tPlus, tMinus:
		from++
		if !r.is(from, tInteger) && !r.is(from, tFloat) {
			return maybeNull
		}
	case tNull:
		result = alwaysNull
	case tInteger, tFloat, tString, tBits, tHex, tTrue, tFalse:
	default:
		return maybeNull
	}
	if from+1 < to && !r.is(from+1, tCast) {
		return maybeNull
	}
	for i := from + 1; i < to; i++ {
		if !r.isTypeToken(i) {
			return maybeNull
		}
	}
	return result
}

// isTypeToken reports whether the token at index i is part of a cast and surely no operator, however it is spelled.
func (r *rewriter) isTypeToken(i int) bool {
	t := r.tokens[i]
	switch t.kind {
	case tCast, tDot, tOpen, tClose, tOpenBracket, tCloseBracket, tInteger, tComma, tIdent, tDouble, tText, tVarying:
		return true
	case tBetween:
		return false
	}
	return t.keyword == kColumn
}
