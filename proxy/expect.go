package proxy

import (
	"bytes"
	"strings"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/rewrite"
)

// text is what is known about the text of a Query or of a prepared statement that was not merely passed on. It is
// immutable.
type text struct {
	positions  rewrite.PositionMap
	changed    bool
	statements []rewrite.Statement
	refusal    *koldproxy.Error
	refusalAt  int // where PostgreSQL's syntax error points that refusal replaces

	mayDemand  bool
	repeatable bool // running it again after an error does nothing twice
}

// statement is the n-th non-empty statement of the text.
func (t *text) statement(n int) rewrite.Statement {
	for _, s := range t.statements {
		if s.Ordinal == n {
			return s
		}
	}
	return rewrite.Statement{Ordinal: n}
}

// detail is what the tracker has to remember of a message beyond its type. Most messages have none.
type detail struct {
	text   *text
	target byte   // Describe, Close: 'S' or 'P'
	name   string // the statement (Parse, Describe, Close) or the portal (Bind, Execute, Describe, Close)
	source string // Bind: the statement
	bind   []byte // Bind: the whole message, if it may have to be sent again
}

// portal is a bound statement.
type portal struct {
	text     *text
	bind     []byte
	executed bool
}

// entry is a message of the client that awaits its answer.
type entry struct {
	kind     byte // type of the frontend message; CopyFail counts as CopyDone
	answered bool // Query, FunctionCall: something came that only this message can have caused
	*detail
}

// tracker follows one session's conversation. Messages of the client go into sent in the order in which they are
// forwarded, those of the server into received; both with one lock around them, since two pumps call it. It does no I/O.
//
// It knows about PostgreSQL: an error in an extended message voids everything up to the next Sync; errors of Query and
// FunctionCall do not; a server that reads copy data ignores Sync and Flush; Flush is never answered.
type tracker struct {
	queue  queue
	status byte // of the last ReadyForQuery: I, T or E; 0 before the first

	skipping bool // an extended message failed: what the client sends up to Sync is void
	copying  bool // the server reads copy data: Sync and Flush are void until CopyDone

	// named is set with the first text that matters. Before, no name can stand for one and bodies need no look.
	named      bool
	statements map[string]*text
	portals    map[string]*portal
	// What the client has sent, whether or not it has worked: a superset of the above that decides when it pays to wait
	// for the answers.
	demandStatements, demandPortals map[string]bool

	// block is the transaction status as far as it is known in the middle of a batch: I, T, E or '?'.
	block byte
	// Since the last ReadyForQuery:
	executes, binds int

	standardStrings bool
	clientEncoding  string
}

func newTracker() *tracker {
	return &tracker{
		statements:       map[string]*text{},
		portals:          map[string]*portal{},
		demandStatements: map[string]bool{},
		demandPortals:    map[string]bool{},
		standardStrings:  true,
	}
}

// idle says that every message has been answered and no transaction is open.
func (t *tracker) idle() bool { return t.settled() && !t.copying && !t.skipping && t.status == 'I' }

// settled says that the server owes no answer.
func (t *tracker) settled() bool { return t.head() == nil }

// wantsNames says whether sent needs the names in an extended message.
func (t *tracker) wantsNames() bool { return t.named }

// sent notes that a message is about to be forwarded. d may be nil.
func (t *tracker) sent(kind byte, d *detail) {
	switch kind {
	case msgCopyFail:
		kind = msgCopyDone
	case msgQuery, msgParse, msgBind, msgDescribe, msgExecute, msgClose, msgSync, msgFlush, msgFunction, msgCopyDone:
	default:
		return
	}
	if d != nil && d.text != nil {
		t.named = true
	}
	t.noteDemands(kind, d)
	if t.copying {
		switch kind {
		case msgSync, msgFlush:
			return
		case msgCopyDone:
			t.copying = false
			return
		}
	}
	if t.skipping {
		if kind != msgSync {
			return
		}
		t.skipping = false
	}
	t.queue.push(entry{kind: kind, detail: d})
}

func (t *tracker) noteDemands(kind byte, d *detail) {
	if d == nil {
		return
	}
	switch kind {
	case msgParse:
		if d.text != nil && d.text.mayDemand {
			t.demandStatements[d.name] = true
		} else if t.statements[d.name] == nil { // a failing Parse leaves the old statement where it is
			delete(t.demandStatements, d.name)
		}
	case msgBind:
		if t.demandStatements[d.source] {
			t.demandPortals[d.name] = true
		} else if t.portals[d.name] == nil {
			delete(t.demandPortals, d.name)
		}
	}
}

// mightDemand says whether it pays to wait for all answers and to ask the portal itself.
func (t *tracker) mightDemand(portal string) bool {
	if !t.demandPortals[portal] {
		return false
	}
	p := t.portals[portal]
	return p == nil || !p.executed || t.head() != nil
}

// keepsBind says whether a Bind of the statement has to be kept.
func (t *tracker) keepsBind(statement string) bool { return t.demandStatements[statement] }

// head is the first message that the server owes an answer.
func (t *tracker) head() *entry {
	for {
		e := t.queue.front()
		if e == nil || (e.kind != msgFlush && e.kind != msgCopyDone) {
			return e
		}
		t.queue.pop() // unanswered by nature; a CopyDone outside of COPY is ignored by the server
	}
}

// answers says which message types answer a message; those that may come at any time are not among them.
func answers(kind, typ byte) bool {
	switch kind {
	case msgQuery:
		return strings.IndexByte("TCIGHWZ", typ) >= 0
	case msgParse:
		return typ == msgParsed
	case msgBind:
		return typ == msgBound
	case msgClose:
		return typ == msgClosed
	case msgDescribe:
		return typ == 't' || typ == msgRowDescription || typ == msgNoData
	case msgExecute:
		return strings.IndexByte("CIsGHW", typ) >= 0
	case msgSync:
		return typ == msgReady
	case msgFunction:
		return typ == msgFunctionResult || typ == msgReady
	}
	return false
}

// resyncDepth bounds the search for a message that an unexpected answer may belong to.
const resyncDepth = 256

// match is the message that an answer belongs to, nil if there is none. Where the queue disagrees with the server (there
// are corners in which nobody can know what was skipped) the server is right and what stands in between is dropped.
func (t *tracker) match(typ byte) *entry {
	e := t.head()
	if e == nil || answers(e.kind, typ) {
		if e != nil && typ == msgReady && e.kind != msgSync && !e.answered {
			return nil // Query and FunctionCall say something before they are ready
		}
		return e
	}
	if typ == msgReady {
		return nil
	}
	for i := 1; i < min(t.queue.len(), resyncDepth); i++ {
		if answers(t.queue.at(i).kind, typ) {
			for range i {
				t.queue.pop()
			}
			return t.queue.front()
		}
	}
	return nil
}

// origin says what a message of the server is about: the text that caused it, if that text matters, and which of its
// statements.
type origin struct {
	text    *text
	ordinal int
}

// needsBody says whether a message of the server has to be seen as a whole: because received wants it or because it may
// have to be edited.
func (t *tracker) needsBody(typ byte, size int) bool {
	switch typ {
	case msgReady, msgComplete, msgParameterStatus:
		return size <= 1<<10
	case msgError, msgNotice:
		e := t.head()
		return e != nil && t.textOf(e) != nil
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
	e.answered = true
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
		delete(t.demandStatements, d.name)
	default:
		delete(t.portals, d.name)
		delete(t.demandPortals, d.name)
	}
}

func (t *tracker) completed(e *entry, typ byte, body []byte) {
	t.executes++
	if typ == msgComplete && body != nil {
		t.tagged(string(bytes.TrimRight(body, "\x00")))
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

// tagged learns from a command tag what no other message says.
func (t *tracker) tagged(tag string) {
	switch tag {
	case "BEGIN", "START TRANSACTION":
		t.block = 'T'
	case "COMMIT", "ROLLBACK", "PREPARE TRANSACTION": // ROLLBACK is the tag of ROLLBACK TO as well
		t.block = '?'
	case "DEALLOCATE ALL", "DISCARD ALL":
		clear(t.statements)
		clear(t.demandStatements)
		if tag == "DISCARD ALL" {
			clear(t.portals)
			clear(t.demandPortals)
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
	t.executes, t.binds = 0, 0
	if len(body) != 1 {
		return
	}
	t.status, t.block = body[0], body[0]
	if t.status == 'I' && t.settled() { // portals end with their transaction
		clear(t.portals)
		clear(t.demandPortals)
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
