package rewrite

import (
	"cmp"
	"slices"
	"sort"
	"strings"
)

// edit replaces the bytes [start, end) of the input by pieces. Edits of one text do not overlap.
type edit struct {
	start, end int
	// anchor is the byte of the keyword that caused the edit; what is inserted belongs to it.
	anchor int
	pieces []piece
}

// piece is inserted text, or a copy of the input's bytes [start, end) if end is positive.
type piece struct {
	text       string
	start, end int
}

// insert and copyOf make pieces.
func insert(text string) piece    { return piece{text: text} }
func copyOf(start, end int) piece { return piece{start: start, end: end} }

// PositionMap leads character positions of a rewritten text back to the text the user typed. What was copied leads to
// its original place, also where it was moved; what was inserted leads to the keyword that caused it. The zero value is
// the identity. A PositionMap is immutable.
type PositionMap struct{ segments []segment }

// segment begins at the character out of the rewritten text and reaches to the next one.
type segment struct {
	out, in int
	copied  bool
}

// Input returns the character of the input that the character at position, counted from 1, comes from. Positions that
// are not in the rewritten text come back as they are.
func (m PositionMap) Input(position int) int {
	i := sort.Search(len(m.segments), func(i int) bool { return m.segments[i].out > position }) - 1
	if i < 0 {
		return position
	}
	s := m.segments[i]
	if s.copied {
		return s.in + position - s.out
	}
	return s.in
}

// splice applies edits.
func splice(x *charIndex, edits []edit) (string, PositionMap) {
	slices.SortStableFunc(edits, func(a, b edit) int { return cmp.Compare(a.start, b.start) })
	var (
		out strings.Builder
		m   PositionMap
		at  = 1 // next character of out
	)
	verbatim := func(start, end int) {
		in := x.position(start)
		m.segments = append(m.segments, segment{at, in, true})
		out.WriteString(x.sql[start:end])
		at += x.position(end) - in
	}
	done := 0
	for _, e := range edits {
		if e.start > done {
			verbatim(done, e.start)
		}
		for _, p := range e.pieces {
			if p.end > 0 {
				verbatim(p.start, p.end)
				continue
			}
			m.segments = append(m.segments, segment{at, x.position(e.anchor), false})
			out.WriteString(p.text)
			at += x.inserted(p.text)
		}
		done = e.end
	}
	verbatim(done, len(x.sql))
	return out.String(), m
}

// inserted counts the characters of text, which is in the encoding of the input.
func (x *charIndex) inserted(text string) int {
	if x.enc == singleByte {
		return len(text)
	}
	n := 0
	for i := 0; i < len(text); i += x.enc.width(text[i]) {
		n++
	}
	return n
}
