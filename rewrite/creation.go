package rewrite

import pg_query "github.com/pganalyze/pg_query_go/v6"

// Creation is a view, a function, a table or the like that a text creates or changes, so that a call may be hidden behind its
// name from then on. Tables that are made of a query are none: what the query has read is in them.
type Creation struct {
	// Name is without quotes, and in lower case if it has none. A trigger, policy or rule goes by the name of its table.
	Name string
	// Temporary says that the name is the session's own.
	Temporary bool
	// Statement is the position of the creating statement among the non-empty ones of the text, from 0 on.
	Statement int
}

// creations are those of a text.
func (s *source) creations(statements []statementRange) (all []Creation) {
	for n, st := range statements {
		before := len(all)
		switch {
		case s.is(st.from, tAlter):
			all = s.altered(all, st)
		case s.is(st.from, tCreate) && s.is(st.from+1, tSchema):
			for i := st.from + 2; i < st.to; i = s.skip(i) + 1 {
				if s.is(i, tCreate) { // an element of the schema
					all = s.created(all, statementRange{from: i, to: st.to})
				}
			}
		case s.is(st.from, tCreate):
			all = s.created(all, st)
		}
		for i := range all[before:] {
			all[before+i].Statement = n
		}
	}
	return all
}

// created adds what a CREATE creates.
func (s *source) created(all []Creation, st statementRange) []Creation {
	i, temporary := st.from+1, false
	for ; ; i++ {
		switch {
		case s.is(i, tTemp), s.is(i, tTemporary):
			temporary = true
			continue
		case s.is(i, tOr), s.is(i, tReplace), s.is(i, tLocal), s.is(i, tGlobal), s.is(i, tUnlogged), s.is(i, tRecursive), s.is(i, tMaterialized),
			s.is(i, tForeign), s.is(i, tConstraint):
			continue
		}
		break
	}
	switch s.kindAt(i) {
	case tTable:
		if s.find(st, i, tAs) > 0 {
			return all
		}
	case tView, tFunction, tProcedure, tAggregate:
	case tTrigger, tPolicy:
		i = s.find(st, i, tOn)
	case tRule:
		i = s.find(st, i, tTo)
	default:
		return all
	}
	if i == 0 {
		return all
	}
	if i++; s.is(i, tIf) && s.is(i+1, tNot) && s.is(i+2, tExists) {
		i += 3
	}
	return s.named(all, i, temporary)
}

// altered adds what an ALTER changes, by its old and its new name.
func (s *source) altered(all []Creation, st statementRange) []Creation {
	i := st.from + 1
	for s.is(i, tMaterialized) || s.is(i, tForeign) {
		i++
	}
	switch s.kindAt(i) {
	case tTable, tView, tFunction, tProcedure, tRoutine, tAggregate:
	default:
		return all
	}
	if i++; s.is(i, tIf) && s.is(i+1, tExists) {
		i += 2
	}
	if s.is(i, tOnly) {
		i++
	}
	all = s.named(all, i, false)
	if i = s.find(st, i, tRename); i > 0 && s.is(i+1, tTo) {
		all = s.named(all, i+2, false)
	}
	return all
}

// named adds what the qualified name at index i names, if it is one.
func (s *source) named(all []Creation, i int, temporary bool) []Creation {
	name, ok := s.name(i)
	for ok {
		if s.is(i+1, tUescape) {
			i += 2
		}
		if !s.is(i+1, tDot) {
			return append(all, Creation{Name: name, Temporary: temporary})
		}
		temporary = temporary || name == "pg_temp"
		i += 2
		name, ok = s.name(i)
	}
	return all
}

// find is the index of the first token of a kind behind index i, outside of brackets; 0 if the statement has none.
func (s *source) find(st statementRange, i int, kind pg_query.Token) int {
	for ; i < st.to; i = s.skip(i) + 1 {
		if s.is(i, kind) && !s.is(i-1, tDot) {
			return i
		}
	}
	return 0
}

func (s *source) kindAt(i int) pg_query.Token {
	if i >= len(s.tokens) {
		return 0
	}
	return s.tokens[i].kind
}
