package rewrite

import (
	"strconv"
	"strings"
)

// quoter writes dollar-quoted literals: they mean the same whatever standard_conforming_strings is, and characters in
// them keep their distance, which the position map relies on.
type quoter struct{ tag string }

// newQuoter chooses a tag no beginning of which stands in any of the texts, so that no part of them, put in quotes,
// can end its literal.
func newQuoter(sql string, more []byte) *quoter {
	const stem = "$ks"
	used := make(map[string]bool)
	collect := func(text string) {
		for {
			i := strings.Index(text, stem)
			if i < 0 {
				return
			}
			text = text[i+len(stem):]
			used[""] = true
			// Numbers of more digits than the text may hold tags are never chosen.
			for n := 1; n <= 7 && n <= len(text) && text[n-1] >= '0' && text[n-1] <= '9'; n++ {
				used[text[:n]] = true
			}
		}
	}
	collect(sql)
	collect(string(more))
	suffix := ""
	for n := 1; used[suffix]; n++ {
		suffix = strconv.Itoa(n)
	}
	return &quoter{tag: stem + suffix + "$"}
}

// literal puts s in quotes. Names that were folded or decoded may hold what the text itself does not; they get a tag of
// their own.
func (q *quoter) literal(s string) string {
	if strings.Contains(s, q.tag[:len(q.tag)-1]) {
		q = newQuoter(s, nil)
	}
	return q.tag + s + q.tag
}
