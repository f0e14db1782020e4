package proxy

import (
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
	ownWay     bool               // it may do what no error takes back
	alone      bool               // outside of a transaction block it may commit before it fails
	noPoint    bool               // it must not run behind a savepoint
	noQuery    bool               // no query must run in front of it in its transaction
	utility    bool               // it is a command that PostgreSQL does not plan, such as CALL or COPY
	cursor     string             // the cursor that it declares, as it is written
	creates    []rewrite.Creation // what it creates that may hide a call
	savepoints rewrite.Savepoints
	stats      bool // it reads koldstore.stream_stats when it is executed

	lead int // characters of the statement that koldproxy has put in front, see repeated
}

// care says that executing the text takes more than passing it on.
func (t *text) care() bool { return t.mayDemand || t.stats }

// statement is the n-th non-empty statement of the text that the client sent.
func (t *text) statement(n int) rewrite.Statement {
	if t.lead > 0 {
		n--
	}
	for _, s := range t.statements {
		if s.Ordinal == n {
			return s
		}
	}
	return rewrite.Statement{Ordinal: n}
}

// creations are those of the n-th non-empty statement of the text that was sent.
func (t *text) creations(n int) []rewrite.Creation {
	if t.lead > 0 {
		n--
	}
	var list []rewrite.Creation
	for _, c := range t.creates {
		if c.Statement == n {
			list = append(list, c)
		}
	}
	return list
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

	open     bool // something was sent for which no Sync has been sent yet
	skipping bool // an extended message failed: what the client sends up to Sync is void
	copying  bool // the server reads copy data: Sync and Flush are void until CopyDone

	// named is set with the first text that matters. Before, no name can stand for one and bodies need no look.
	named      bool
	statements map[string]*text
	portals    map[string]*portal
	// What the client has sent, whether or not it has worked: a superset of the above that decides when it pays to wait
	// for the answers.
	demandStatements, demandPortals map[string]bool
	// demanded is set with the first text that may demand: from then on batches are kept, see batch.go.
	demanded bool

	// block is the transaction status as far as it is known in the middle of a batch: I, T, E or '?'.
	block byte
	// Since the last ReadyForQuery:
	executes, binds int
	answered        bool // the server has said something that is part of an answer
	lasts           bool // something was done that an error behind it may not take back

	created   nameSet                  // what the session has created that may hide a call
	learned   int                      // how much that was
	announced definitions              // what it has sent to be created that does not hide one as far as is known
	others    definitions              // what of it was created in this transaction: later it is for the whole database to know
	onCreate  func([]rewrite.Creation) // is told of what may hide a call; may be nil
	onDefine  func(definition)         // is told of the others; may be nil

	watchful   bool // demands that reach the client are noticed
	suspicious bool // one has: any statement of this session may demand

	standardStrings bool
	clientEncoding  string
}

func newTracker() *tracker {
	return &tracker{
		statements:       map[string]*text{},
		portals:          map[string]*portal{},
		demandStatements: map[string]bool{},
		demandPortals:    map[string]bool{},
	}
}

// idle says that every message has been answered and no transaction is open.
func (t *tracker) idle() bool {
	return t.settled() && !t.open && !t.copying && !t.skipping && t.status == 'I'
}

// settled says that the server owes no answer.
func (t *tracker) settled() bool { return t.head() == nil }

// certain says that the settings of the session are known for the next text. A change is reported only with ReadyForQuery, so
// that nothing is known while statements are under way.
func (t *tracker) certain() bool { return t.settled() && t.executes == 0 }

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
		t.demanded = t.demanded || d.text.mayDemand
	}
	t.noteDemands(kind, d)
	switch kind {
	case msgSync, msgQuery, msgFunction:
		t.open = false
	case msgCopyDone:
	default:
		t.open = true
	}
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
		if d.text != nil && d.text.care() {
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
		return contains("TCIGHWZ", typ)
	case msgParse:
		return typ == msgParsed
	case msgBind:
		return typ == msgBound
	case msgClose:
		return typ == msgClosed
	case msgDescribe:
		return typ == 't' || typ == msgRowDescription || typ == msgNoData
	case msgExecute:
		return contains("CIsGHW", typ)
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
