package proxy

import (
	"bytes"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/koldproxy/koldproxy"
)

// whenMarker stands in front of a stream's predicate wherever koldproxy's SQL functions hand it to PostgreSQL, so that an
// error in it can be pointed out in what the user typed.
const whenMarker = "/*koldstore:when*/"

// codeDatatypeMismatch is PostgreSQL's datatype_mismatch.
const codeDatatypeMismatch = "42804"

// edit returns the message that the client is to see in place of a message of the server. body is the message's body; the
// result is nil when the message is to be passed on as it is.
func edit(typ byte, body []byte, o origin) []byte {
	if o.text == nil || body == nil {
		return nil
	}
	switch typ {
	case msgComplete:
		return editTag(body, o)
	case msgError, msgNotice:
		return editFields(typ, body, o)
	}
	return nil
}

// editTag puts the tag of a statement of koldproxy's where PostgreSQL says how it was done: CALL, or SELECT and a number.
func editTag(body []byte, o origin) []byte {
	tag := o.text.statement(o.ordinal).Tag
	if tag == "" {
		return nil
	}
	was, _, _ := strings.Cut(string(bytes.TrimRight(body, "\x00")), " ")
	if was != "CALL" && was != "SELECT" {
		return nil
	}
	return appendMessage(nil, msgComplete, zeroTerminated(tag))
}

// editFields makes an error or a notice about a rewritten text one about the text that the client sent.
func editFields(typ byte, body []byte, o origin) []byte {
	fs, ok := parseFields(body)
	if !ok {
		return nil
	}
	if o.text.refusal != nil {
		if typ != msgError || fs.get(fieldCode) != koldproxy.CodeSyntaxError || fs.get(fieldPosition) != position(o.text.refusalAt) {
			return nil // PostgreSQL met something else first
		}
		return fs.replaced(o.text.refusal).appendTo(nil, typ)
	}
	if !o.text.changed && o.text.lead == 0 {
		return nil
	}
	if p, err := strconv.Atoi(fs.get(fieldPosition)); err == nil {
		p -= o.text.lead
		if o.text.changed {
			p = o.text.positions.Input(p)
		}
		fs = fs.with(fieldPosition, position(p))
	}
	st := o.text.statement(o.ordinal)
	if p, ok := predicatePosition(fs, st.Predicate); ok {
		fs = fs.with(fieldPosition, position(p)).without("pq")
		if fs.get(fieldCode) == codeDatatypeMismatch { // argument of WHERE must be type boolean
			fs = fs.with(fieldMessage, strings.Replace(fs.get(fieldMessage), " WHERE ", " WHEN ", 1))
		}
	}
	if st.Tag != "" {
		fs = fs.without("W")
	}
	return fs.appendTo(nil, typ)
}

// predicatePosition finds where an error in an internal query points to, if that is within the predicate which stands in
// the client's text at character start.
func predicatePosition(fs fields, start int) (int, bool) {
	query := fs.get(fieldInternalQuery)
	at, err := strconv.Atoi(fs.get(fieldInternalPosition))
	if err != nil || start <= 0 {
		return 0, false
	}
	before, _, found := strings.Cut(query, whenMarker+"(")
	if !found {
		return 0, false
	}
	first := utf8.RuneCountInString(before) + len(whenMarker) + 2 // both count characters from 1
	if at < first {
		return 0, false
	}
	return start + at - first, true
}
