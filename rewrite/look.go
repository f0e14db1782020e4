package rewrite

import "bytes"

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

// Defines says whether a statement of body seems to begin with CREATE or ALTER, so that somebody may call or use what it makes. A
// semicolon in a literal is taken for the end of a statement. It does not allocate and reads every byte at most a few times.
func Defines(body []byte) bool {
	for {
		body = body[skipBlank(body):]
		if hasPrefixFold(body, "create") || hasPrefixFold(body, "alter") {
			return true
		}
		end := bytes.IndexByte(body, ';')
		if end < 0 {
			return false
		}
		body = body[end+1:]
	}
}

// skipBlank is the length of the white space and comments in front of a text, of all of it when a comment has no end.
func skipBlank(body []byte) (n int) {
	for n < len(body) {
		n = skipSpace(body, n)
		rest := body[n:]
		switch {
		case hasPrefixFold(rest, "--"):
			end := bytes.IndexAny(rest, "\r\n")
			if end < 0 {
				return len(body)
			}
			n += end
		case hasPrefixFold(rest, "/*"):
			end := commentEnd(rest)
			if end < 0 {
				return len(body)
			}
			n += end
		default:
			return n
		}
	}
	return n
}

// commentEnd is the length of the comment in brackets that a text begins with, those in it included; -1 without an end.
func commentEnd(text []byte) int {
	depth := 0
	for i := 0; i+1 < len(text); i++ {
		switch {
		case text[i] == '/' && text[i+1] == '*':
			depth++
			i++
		case text[i] == '*' && text[i+1] == '/':
			if depth--; depth == 0 {
				return i + 2
			}
			i++
		}
	}
	return -1
}

// worthScanning is a closer look, before the scanner is asked: whether a trigger stands where it could mean something to
// koldproxy. It errs towards yes. Names such as created_after and columns called stream end here.
func worthScanning(sql string) bool {
	var asked [256]bool // by the trigger's first letter: the rest of the text does not change
	for i := range len(sql) - 1 {
		word := triggerOf[sql[i]]
		if word == "" || !hasPrefixFold(sql[i:], word) {
			continue
		}
		end := i + len(word)
		if word != "after" {
			if asked[word[0]] {
				continue
			}
			asked[word[0]] = true
		}
		switch word {
		case "after": // in front of a parenthesis, comments aside
			if i > 0 && isIdentifierByte(sql[i-1]) {
				continue
			}
			if end = skipSpace(sql, end); end < len(sql) && (sql[end] == '(' || sql[end] == '/' || sql[end] == '-') {
				return true
			}
		case "stream":
			if mentionsAny(sql, "create", "drop", "alter", "show") {
				return true
			}
		case "topic":
			if mentionsAny(sql, "subscribe") {
				return true
			}
		case "koldstore":
			if mentionsAny(sql, "alter") {
				return true
			}
		default: // a function that may demand, an identifier with escapes
			return true
		}
	}
	return false
}

// mentionsAny says whether one of the words stands in a text, in any case, also as a part of another word.
func mentionsAny(sql string, words ...string) bool {
	for i := range len(sql) {
		for _, w := range words {
			if sql[i]|0x20 == w[0] && hasPrefixFold(sql[i:], w) {
				return true
			}
		}
	}
	return false
}

// mentionsDemanding is the answer for a text whose tokens are not known.
func mentionsDemanding(sql string) bool { return mentionsAny(sql, demanding[:]...) }

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
