package rewrite

// triggers are the words without which no text is of interest. The last one begins an identifier with escapes, which
// can spell any name.
var triggers = [...]string{"stream", "koldstore", "after", "topic", "changes_since", "flush_table", `u&"`}

// demanding are the functions that may raise a demand.
var demanding = [...]string{"changes_since", "flush_table"}

// triggerOf finds the trigger by its first letter in either case, of which no two share one.
var triggerOf = func() (t [256]string) {
	for _, w := range triggers {
		t[w[0]], t[w[0]-'a'+'A'] = w, w
	}
	return t
}()

// secondOf is the second letter of the trigger, lower case; zero for none.
var secondOf = func() (t [256]byte) {
	for c, w := range triggerOf {
		if w != "" {
			t[c] = w[1]
		}
	}
	return t
}()

// NeedsLook says whether body holds one of the words that [Rewrite] looks for, in any case. A text without one is never
// changed by it. It does not allocate and reads every byte at most a few times.
func NeedsLook(body []byte) bool {
	for i := 1; i < len(body); i++ {
		if c := body[i-1]; body[i]|0x20 == secondOf[c] && hasPrefixFold(body[i-1:], triggerOf[c]) {
			return true
		}
	}
	return false
}

// mentionsDemanding is the answer for a text whose tokens are not known.
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
