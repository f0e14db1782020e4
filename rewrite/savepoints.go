package rewrite

import "slices"

// Savepoints says what the statements of a text do to the savepoints of a transaction block.
type Savepoints int

// The zero value is that there is no statement about savepoints, and that the transaction goes on.
const (
	SavepointsReleased Savepoints = iota + 1 // the text makes some and takes all of them away again
	SavepointsOwn                            // the text makes some, and leaves them
	SavepointsOfOthers                       // the text goes back to one that was there before, releases it or ends the transaction
)

// Stay says that a savepoint made in front of the text cannot be released behind it: there are younger ones, or it is gone.
func (s Savepoints) Stay() bool { return s == SavepointsOwn || s == SavepointsOfOthers }

// savepoints follows the savepoints of a text from statement to statement.
func (s *source) savepoints(statements []statementRange) Savepoints {
	var own []string
	result := Savepoints(0)
	for _, st := range statements {
		at := st.from + 1
		switch s.tokens[st.from].kind {
		case tSavepoint:
			name, _ := s.name(at)
			own, result = append(own, name), SavepointsReleased
		case tRelease:
			left, ok := s.backTo(own, at)
			if !ok {
				return SavepointsOfOthers
			}
			own = own[:left]
		case tRollback:
			if s.is(at, tWork) || s.is(at, tTransaction) {
				at++
			}
			left, ok := s.backTo(own, at+1)
			if !ok || !s.is(at, tTo) {
				return SavepointsOfOthers
			}
			own = own[:left+1]
		case tAbort, tCommit, tEnd, tPrepare:
			if k := s.tokens[st.from].kind; k != tPrepare || s.is(at, tTransaction) {
				return SavepointsOfOthers
			}
		}
	}
	if len(own) > 0 {
		return SavepointsOwn
	}
	return result
}

// backTo is the index of the newest savepoint with the name at token i, behind SAVEPOINT if that is there.
func (s *source) backTo(own []string, i int) (index int, ok bool) {
	if s.is(i, tSavepoint) && s.isColumnName(i+1) {
		i++
	}
	name, ok := s.name(i)
	if !ok {
		return 0, false
	}
	for index, n := range slices.Backward(own) {
		if n == name {
			return index, true
		}
	}
	return 0, false
}
