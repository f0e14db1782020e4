package proxy

import (
	"bytes"
	"slices"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// origin says what a message of the server is about: the text that caused it, if that text matters, and which of its
// statements.
type origin struct {
	text    *text
	ordinal int
}

// demandCode is the SQLSTATE of a demand as it stands in an ErrorResponse.
var demandCode = []byte("C" + koldproxy.CodeProxyNeeded + "\x00")

// needsBody says whether a message of the server has to be seen as a whole: because received wants it or because it may
// have to be edited.
func (t *tracker) needsBody(typ byte, size int) bool {
	switch typ {
	case msgReady, msgComplete, msgParameterStatus:
		return size <= 1<<10
	case msgError, msgNotice:
		e := t.head()
		return e != nil && t.textOf(e) != nil || typ == msgError && t.watchful
	}
	return false
}

// textOf is the text that a message runs, nil if it does not matter.
func (t *tracker) textOf(e *entry) *text {
	if e.detail == nil {
		return nil
	}
	switch e.kind {
	case msgQuery, msgParse:
		return e.text
	case msgBind:
		return t.statements[e.source]
	case msgDescribe:
		if e.target == 'S' {
			return t.statements[e.name]
		}
		fallthrough
	case msgExecute:
		if p := t.portals[e.name]; p != nil {
			return p.text
		}
	}
	return nil
}

// received advances the conversation by one message of the server. body is the message's body if needsBody asked for it,
// otherwise nil.
func (t *tracker) received(typ byte, body []byte) origin {
	switch typ {
	case msgDataRow, 'd', msgNotification: // the many
		return origin{}
	case msgParameterStatus:
		t.parameter(body)
		return origin{}
	case msgNotice:
		return t.originOf(t.head())
	case msgError:
		o := t.originOf(t.head())
		if t.watchful && o.text == nil && bytes.Contains(body, demandCode) {
			t.suspicious, t.demanded = true, true
			t.learn(nil) // the catalog knows more
		}
		t.failed()
		return o
	case msgReady:
		t.ready(body)
		return origin{}
	}
	e := t.match(typ)
	if e == nil {
		return origin{}
	}
	e.answered, t.answered = true, true
	o := t.originOf(e)
	switch typ {
	case msgCopyIn, msgCopyBoth:
		t.copyIn()
	case msgComplete, msgEmpty, msgSuspended:
		t.completed(e, typ, body)
	case msgRowDescription, msgNoData:
		if e.kind == msgDescribe {
			t.queue.pop()
		}
	case msgParsed:
		set(t.statements, e.detail, e.textOrNil())
		t.queue.pop()
	case msgBound:
		t.bound(e.detail)
		t.queue.pop()
	case msgClosed:
		t.closed(e.detail)
		t.queue.pop()
	}
	return o
}

func (e *entry) textOrNil() *text {
	if e.detail == nil {
		return nil
	}
	return e.text
}

func (t *tracker) originOf(e *entry) origin {
	if e == nil {
		return origin{}
	}
	o := origin{text: t.textOf(e)}
	if e.kind == msgQuery && o.text != nil {
		o.ordinal = t.queue.done
	}
	return o
}

func set(m map[string]*text, d *detail, v *text) {
	if d == nil {
		return
	}
	if v == nil {
		delete(m, d.name)
	} else {
		m[d.name] = v
	}
}

func (t *tracker) bound(d *detail) {
	t.binds++
	if d == nil {
		return
	}
	if st := t.statements[d.source]; st != nil {
		t.portals[d.name] = &portal{text: st, bind: d.bind}
	} else {
		delete(t.portals, d.name)
	}
}

func (t *tracker) closed(d *detail) {
	switch {
	case d == nil:
	case d.target == 'S':
		delete(t.statements, d.name)
		if t.isLast() {
			delete(t.demandStatements, d.name)
		}
	default:
		delete(t.portals, d.name)
		if t.isLast() {
			delete(t.demandPortals, d.name)
		}
	}
}

// isLast says that the message that is being answered is the last that was sent: none behind it has used its names anew.
func (t *tracker) isLast() bool { return t.queue.len() == 1 }

func (t *tracker) completed(e *entry, typ byte, body []byte) {
	t.executes++
	if typ == msgComplete && body != nil {
		tag := string(bytes.TrimRight(body, "\x00"))
		t.tagged(tag)
		if x := t.textOf(e); x != nil && isCreation(tag) {
			if list := x.creations(t.queue.done); len(list) > 0 {
				t.learn(list)
			}
		}
		if len(t.announced.list) > 0 && (strings.HasPrefix(tag, "CREATE ") || strings.HasPrefix(tag, "ALTER ")) {
			t.define()
		}
	}
	if e.kind == msgQuery {
		t.queue.done++
		return
	}
	if e.detail != nil {
		if p := t.portals[e.name]; p != nil {
			p.executed = true
		}
	}
	t.queue.pop()
}

// isCreation says whether a statement with this tag has created or changed something. That of CREATE MATERIALIZED VIEW is SELECT.
func isCreation(tag string) bool {
	return strings.HasPrefix(tag, "CREATE ") || strings.HasPrefix(tag, "ALTER ") || strings.HasPrefix(tag, "SELECT")
}

// undone are the beginnings of the tags of those statements that an error behind them takes back, whatever they were, as long
// as no transaction block ends. CALL and DO may have committed, others do so at once.
var undone = []string{
	"SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "FETCH", "MOVE", "DECLARE", "CLOSE", "EXPLAIN", "SHOW", "SET", "RESET",
	"LOCK", "NOTIFY", "LISTEN", "UNLISTEN", "TRUNCATE", "CREATE TABLE", "CREATE VIEW", "CREATE FUNCTION", "DROP TABLE",
}

// tagged learns from a command tag what no other message says.
func (t *tracker) tagged(tag string) {
	t.lasts = t.lasts || !slices.ContainsFunc(undone, func(beginning string) bool { return strings.HasPrefix(tag, beginning) })
	switch tag {
	case "BEGIN", "START TRANSACTION":
		t.block = 'T'
	case "COMMIT", "ROLLBACK", "PREPARE TRANSACTION": // ROLLBACK is the tag of ROLLBACK TO as well
		t.block = '?'
	case "DEALLOCATE": // nobody knows which: no portal can be made again
		for _, p := range t.portals {
			p.bind = nil
		}
	case "DEALLOCATE ALL", "DISCARD ALL":
		clear(t.statements)
		if tag == "DISCARD ALL" {
			clear(t.portals)
		}
		if t.isLast() {
			clear(t.demandStatements)
		}
	}
}

// failed handles an ErrorResponse.
func (t *tracker) failed() {
	t.copying = false
	e := t.head()
	switch {
	case e == nil:
		// In the middle of a batch (a timeout, say) it voids the rest; otherwise it is the server's farewell.
		t.skipping = t.executes+t.binds > 0
		return
	case e.kind == msgQuery || e.kind == msgFunction || e.kind == msgSync:
		e.answered = true
		return
	}
	t.void()
}

// void drops what the server skips after an error in an extended message.
func (t *tracker) void() {
	t.skipping = true
	for e := t.queue.front(); e != nil; e = t.queue.front() {
		if e.kind == msgSync {
			t.skipping = false
			return
		}
		t.queue.pop()
	}
}

// copyIn voids the Sync and Flush messages that the server will meet while it reads copy data.
func (t *tracker) copyIn() {
	t.copying = true
	if e := t.head(); e != nil && e.kind == msgExecute {
		t.open = true // a Sync behind it is none
	}
	t.queue.filterTail(func(e entry) bool {
		if !t.copying {
			return true
		}
		switch e.kind {
		case msgCopyDone:
			t.copying = false
			return false
		case msgSync, msgFlush:
			return false
		}
		return true
	})
}

func (t *tracker) ready(body []byte) {
	if e := t.match(msgReady); e != nil {
		if e.kind == msgQuery { // it has destroyed them when it began
			delete(t.statements, "")
			delete(t.portals, "")
		}
		t.queue.pop()
	} else if t.skipping {
		t.skipping = false
	}
	t.copying = false
	t.open = t.open && !t.settled()
	t.executes, t.binds, t.answered, t.lasts = 0, 0, false, false
	if len(body) != 1 {
		return
	}
	t.status, t.block = body[0], body[0]
	if t.status == 'I' {
		t.others = definitions{}
	}
	if t.named && t.status == 'I' { // portals end with their transaction
		clear(t.portals)
		if t.settled() {
			clear(t.demandPortals)
		}
	}
}

func (t *tracker) parameter(body []byte) {
	name, rest, ok := cString(body)
	if !ok {
		return
	}
	value, _, _ := cString(rest)
	switch string(name) {
	case "standard_conforming_strings":
		t.standardStrings = string(value) == "on"
	case "client_encoding":
		t.clientEncoding = string(value)
	}
}
