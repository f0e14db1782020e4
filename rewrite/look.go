package rewrite

// triggers are the words without which no text is of interest. The last one begins an identifier with escapes, which
// can spell any name.
var triggers = [...]string{"stream", "koldstore", "after", "topic", "changes_since", "flush_table", `u&"`}

// demanding are the functions that may raise a demand.
var demanding = [...]string{"changes_since", "flush_table"}

// triggerStarts marks the first letters of the triggers, in both cases.
var triggerStarts = func() (t [256]bool) {
	for _, w := range triggers {
		t[w[0]], t[w[0]-'a'+'A'] = true, true
	}
	return t
}()

// NeedsLook says whether body holds one of the words that [Rewrite] looks for, in any case. A text without one is never
// changed by it. It does not allocate and reads every byte at most a few times.
func NeedsLook(body []byte) bool {
	for i, c := range body {
		if !triggerStarts[c] {
			continue
		}
		rest := body[i:]
		for _, w := range triggers {
			if w[0] == c|0x20 && hasPrefixFold(rest, w) {
				return true
			}
		}
	}
	return false
}

// mentionsDemanding searches a text that cannot be scanned.
func mentionsDemanding(sql string) bool {
	for i := range len(sql) {
		for _, w := range demanding {
			if w[0] == sql[i]|0x20 && hasPrefixFold(sql[i:], w) {
				return true
			}
		}
	}
	return false
}

// hasPrefixFold compares without regard to the case of ASCII letters. word is lower case and no longer than a name.
func hasPrefixFold[T string | []byte](text T, word string) bool {
	if len(text) < len(word) {
		return false
	}
	for i := range len(word) {
		c := text[i]
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		if c != word[i] {
			return false
		}
	}
	return true
}
