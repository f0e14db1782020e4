package rewrite

import (
	"strings"
	"unicode/utf8"
)

// encoding is a class of client encodings: how to find the end of a character, and whether a byte below 0x80 always is
// the ASCII character it looks like.
type encoding uint8

const (
	utf8Text encoding = iota
	// asciiText is SQL_ASCII: bytes without a meaning. PostgreSQL counts them in the encoding of the database, which is
	// nearly always UTF8, so text that is valid UTF-8 is counted as such.
	asciiText
	singleByte
	eucText  // EUC_CN, EUC_KR: two bytes; EUC_JP, EUC_JIS_2004, EUC_TW: SS2 and SS3 introduce longer ones
	eucTW    // SS2 introduces four bytes
	muleText // MULE_INTERNAL
	// unsafeQuotes are the client-only encodings (BIG5, GB18030, GBK, JOHAB, SHIFT_JIS_2004, SJIS, UHC): the second byte
	// of a character may be a backslash or a quote. Encodings nobody knows are counted among them.
	unsafeQuotes
)

func encodingNamed(name string) encoding {
	name = strings.ToUpper(name)
	switch name {
	case "", "UTF8", "UNICODE":
		return utf8Text
	case "SQL_ASCII":
		return asciiText
	case "EUC_JP", "EUC_JIS_2004", "EUC_CN", "EUC_KR":
		return eucText
	case "EUC_TW":
		return eucTW
	case "MULE_INTERNAL":
		return muleText
	}
	for _, prefix := range []string{"LATIN", "WIN", "ISO_8859_", "KOI8"} {
		if strings.HasPrefix(name, prefix) {
			return singleByte
		}
	}
	return unsafeQuotes
}

// valid says whether the scanner may see s: no NUL, and no broken UTF-8 where UTF-8 was promised.
func (e encoding) valid(s string) bool {
	return strings.IndexByte(s, 0) < 0 && (e != utf8Text || utf8.ValidString(s))
}

// hidesBackslash says whether a backslash of s is a part of a character in some of the encodings of unsafeQuotes.
func hidesBackslash(s string) bool {
	for i := 1; i < len(s); i++ {
		if s[i] == '\\' && s[i-1] >= utf8.RuneSelf {
			return true
		}
	}
	return false
}

// width is the length in bytes of the character that begins with the byte c.
func (e encoding) width(c byte) int {
	switch {
	case c < 0x80:
		return 1
	case e == utf8Text:
		switch {
		case c >= 0xf0:
			return 4
		case c >= 0xe0:
			return 3
		}
		return 2
	case e == eucText || e == eucTW:
		switch {
		case c == 0x8e && e == eucTW:
			return 4
		case c == 0x8f:
			return 3
		}
		return 2
	case e == muleText:
		switch {
		case c >= 0x81 && c <= 0x8d:
			return 2
		case c >= 0x90 && c <= 0x9b:
			return 3
		case c == 0x9c || c == 0x9d:
			return 4
		}
	}
	return 1
}

// markEvery is the distance in bytes between the places whose character number a charIndex remembers.
const markEvery = 256

// charIndex turns bytes of a text into character numbers.
type charIndex struct {
	sql string
	enc encoding
	// marks[i] is the last beginning of a character at or before byte i*markEvery; nil where bytes are characters.
	marks []mark
}

type mark struct{ offset, chars int }

func newCharIndex(sql string, enc encoding) *charIndex {
	if enc == asciiText {
		enc = singleByte
		if utf8.ValidString(sql) {
			enc = utf8Text
		}
	}
	x := &charIndex{sql: sql, enc: enc}
	if enc == singleByte || isASCII(sql) {
		return x
	}
	at := mark{}
	for at.offset < len(sql) {
		next := mark{at.offset + enc.width(sql[at.offset]), at.chars + 1}
		for len(x.marks)*markEvery < next.offset {
			x.marks = append(x.marks, at)
		}
		at = next
	}
	x.marks = append(x.marks, at)
	return x
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// position is the number, from 1, of the character that begins at byte offset; the end of the text is one more than its
// last character.
func (x *charIndex) position(offset int) int {
	if x.marks == nil {
		return offset + 1
	}
	at := x.marks[min(offset/markEvery, len(x.marks)-1)]
	for at.offset < offset {
		at = mark{at.offset + x.enc.width(x.sql[at.offset]), at.chars + 1}
	}
	return at.chars + 1
}
