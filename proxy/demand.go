package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/rewrite"
)

// maxRounds bounds how often one statement may demand something.
const maxRounds = 64

// way is how a statement is run again after a demand.
type way int

const (
	wayNone  way = iota // not at all: the client gets the error that names koldproxy's part in it
	wayAlone            // as it is: its failure has taken back all that it did
	waySaved            // from a savepoint in front of it
	wayBatch            // with all that the client has sent since its last Sync
)

// conversation runs one statement that may demand something, or the rest of a batch in which several may, in a session that
// was taken over.
type conversation struct {
	session *session
	hold    hold
	kind    byte // Query, Bind (the planner calls functions, too) or Execute
	message []byte
	detail  *detail

	way    way
	text   *text
	bind   []byte // Execute: the Bind message of its portal
	source string // Execute: the statement of its portal
	staged []page
	proven bool   // the cursor that the statement declares has been read to its end
	gone   bool   // the statement has ended the savepoint, or what it did stays whatever happens
	before []byte // what was held ahead of the answer of the statement when it failed first

	plain  bool      // the statement turned out to be one that demands nothing
	unseen bool      // the client has got nothing yet of the answers to the batch
	began  time.Time // when the statement was run first
}

// page is a sealed answer to a demand.
type page struct {
	demand json.RawMessage
	sealed sealed
}

// size is how many bytes staging the page takes.
func (p page) size() int { return len(p.sealed.boxed) }

// planned are the pages that planning a portal's statement has taken; executing it will take them again.
type planned struct {
	portal string
	pages  []page
}

// runDemanding sends a Query, a Bind or an Execute that may demand something and sees to it that the demand is met. It returns
// when the answer is with the client.
func (s *session) runDemanding(ctx context.Context, kind byte, m looked) (err error) {
	if err := s.takeover(); err != nil {
		return err
	}
	defer s.giveBack()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.mu.Lock()
	s.demand = cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.demand = nil
		s.mu.Unlock()
	}()
	c := &conversation{session: s, kind: kind, message: m.rewritten, detail: m.detail}
	c.hold = hold{session: s, limit: s.server.cfg.HoldBytes, share: share{of: &s.server.held}}
	defer c.hold.share.release()
	defer func() { s.pages.shrink(sizeOf(s.pinned) + sizeOf(s.planned.pages)) }()
	err = c.run(ctx, cancel)
	if released := c.hold.release(); err == nil {
		return released
	}
	s.back.r = s.back.w // answers to messages of our own are not for the client
	return err
}

func (c *conversation) run(ctx context.Context, cancel context.CancelCauseFunc) error {
	for {
		if err := c.one(ctx, cancel); err != nil {
			return err
		}
		if more, err := c.follow(); err != nil || !more { //nolint:contextcheck // the catalog is asked within a time of its own
			return err
		}
	}
}

// one runs the statement.
func (c *conversation) one(ctx context.Context, cancel context.CancelCauseFunc) error {
	defer c.session.watch(cancel)()
	if err := c.settle(); err != nil {
		return err
	}
	c.began = time.Now()
	c.choose()
	if c.plain && c.unseen { // the batch goes on
		c.way = wayBatch
		if err := c.session.expect(c.kind, c.detail); err != nil {
			return err
		}
		return c.session.toServer(c.message)
	}
	if c.way != wayBatch {
		if err := c.hold.flush(); err != nil { // what was said before it stays
			return err
		}
	}
	if c.way == wayNone {
		if done, err := c.withStats(); err != nil || done {
			return err
		}
		if err := c.session.expect(c.kind, c.detail); err != nil {
			return err
		}
		return c.session.toServer(c.message)
	}
	for round := 0; ; round++ {
		outcome, err := c.attempt(round)
		if err != nil || outcome.done {
			return err
		}
		if met, err := c.meet(ctx, outcome); err != nil || !met {
			return err
		}
	}
}

// follow goes on with a batch: what the client sends up to its next Sync or Flush belongs to it, and the answers to what was
// sent so far are held until then, because the rest may demand something, too. It returns true with the next statement that may.
func (c *conversation) follow() (more bool, err error) {
	s := c.session
	if c.way != wayBatch || c.hold.open || s.isSkipping() || !s.batch.whole() {
		return false, nil
	}
	var out []byte
	for {
		message, ok := s.nextOfClient()
		if !ok || bytes.IndexByte([]byte{msgParse, msgBind, msgDescribe, msgExecute, msgClose}, message[0]) < 0 {
			return false, s.toServer(out)
		}
		m := s.look(message[0], message, int64(len(message)), nil)
		if m.rewritten == nil {
			m.rewritten = append([]byte(nil), message...)
		}
		kind := message[0]
		s.front.r += len(message)
		if m.care {
			c.kind, c.message, c.detail = kind, m.rewritten, m.detail
			return true, s.toServer(out)
		}
		if err := s.expect(kind, m.detail); err != nil {
			return false, err
		}
		out = append(out, m.rewritten...)
	}
}

// settle takes in the answers to everything the client has sent before, so that the session's state is known exactly. Those
// to the same batch are held while the client has got none of them, since they may have to be given again.
func (c *conversation) settle() error {
	s := c.session
	s.mu.Lock()
	c.unseen = c.kind != msgQuery && s.batch.whole() && s.backRest == 0 && !c.hold.open && (!s.tracker.answered || c.way == wayBatch)
	s.mu.Unlock()
	if !c.unseen { // what was held is in front of what comes now
		if err := c.hold.flush(); err != nil {
			return err
		}
	}
	flushed := false
	for {
		write, stops := s.toClient, "Z"
		if c.unseen {
			write = c.hold.write
		}
		ev, err := s.relayServer(write, stops)
		if err != nil {
			return err
		}
		if ev.typ == msgReady { // what was before is no part of the batch
			if err := c.hold.flush(); err != nil {
				return err
			}
			if err := s.toClient(ev.message); err != nil {
				return err
			}
			c.unseen = c.kind != msgQuery && s.batch.whole() && !c.hold.open
			continue
		}
		s.mu.Lock()
		settled := s.tracker.settled() && s.backRest == 0 || s.tracker.copying
		s.mu.Unlock()
		if settled {
			return nil
		}
		if !flushed {
			flushed = true
			if err := s.toServer(appendFlush(nil)); err != nil {
				return err
			}
			continue
		}
		if err := s.pull(); err != nil {
			return err
		}
	}
}

// choose decides whether the statement can be run again after a demand, and how.
func (c *conversation) choose() {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	c.way, c.text, c.plain, c.proven, c.gone, c.before = wayNone, c.detail.text, false, false, false, nil
	t := s.tracker
	if t.block == 'I' && t.executes == 0 {
		s.pinned = nil
	}
	if t.skipping || t.copying {
		return
	}
	binds := 0
	var pages []page
	switch c.kind {
	case msgBind:
		c.text = t.statements[c.detail.source]
		if c.plain = c.text == nil || !c.text.mayDemand; c.plain || c.detail.bind == nil {
			return
		}
	case msgExecute:
		p := t.portals[c.detail.name]
		if c.plain = p == nil || !p.text.care(); c.plain {
			return
		}
		c.text = p.text
		if p.executed || p.bind == nil {
			return
		}
		c.bind, c.source, binds = p.bind, names(msgBind, p.bind[headerLen:]).source, 1
		if s.planned.portal == c.detail.name {
			pages = s.planned.pages
		}
	}
	if !c.text.mayDemand || c.text.ownWay {
		return
	}
	switch {
	case t.block == 'T' && !c.text.noPoint:
		c.way = waySaved
	case t.block != 'I' || c.text.alone:
	case c.unseen && !c.hold.open && !t.lasts:
		c.way = wayBatch
	case t.executes == 0 && t.binds == binds: // nothing else in the implicit transaction, which a failure takes along
		c.way = wayAlone
	}
	if c.way != waySaved && c.way != wayAlone {
		return
	}
	if c.kind == msgExecute && t.statements[c.source] != c.text { // the name has come to mean another statement, or none
		c.way = wayNone
		return
	}
	c.staged, s.planned = pages, planned{}
}

// rebinds says that the portal is made anew in front of the statement: an error has ended it, or must not leave its snapshot
// behind. PostgreSQL takes that of a utility statement at the portal's level of nesting. If it is lower than the savepoint's, going back
// to that does not take the snapshot away, and COMMIT warns "snapshot … still active".
func (c *conversation) rebinds(round int) bool {
	return c.kind == msgExecute && c.way != wayBatch && (round > 0 || c.way == waySaved && c.text.utility)
}

// withStats runs an Execute that reads what this instance knows about streams.
func (c *conversation) withStats() (done bool, err error) {
	s := c.session
	s.mu.Lock()
	blocked := s.tracker.skipping || s.tracker.copying || s.tracker.block == 'E'
	s.mu.Unlock()
	if c.kind == msgBind || c.text == nil || !c.text.stats || blocked {
		return false, nil
	}
	var st step
	st.sql("SELECT pg_catalog.set_config('koldstore.stream_stats', $1, true) IS NULL", ascii(s.streamStats()))
	st.flush()
	if err := s.toServer(st.messages); err != nil {
		return false, err
	}
	_, failed, err := c.swallow(st.answers)
	if err != nil || failed == nil {
		return false, err
	}
	return true, c.fail(failed, true)
}

// outcome is how an attempt ended: done, or with a demand that may be met.
type outcome struct {
	done     bool
	failed   []byte // the ErrorResponse that carries the demand
	demand   json.RawMessage
	skipping bool // the server waits for a Sync
}

// attempt runs the statement once, with what is staged in front of it.
func (c *conversation) attempt(round int) (outcome, error) {
	var st step
	if c.way == waySaved && round == 0 {
		st.sql(`SAVEPOINT "` + reserved + `"`)
	}
	own, lead := c.message, ""
	stages := len(c.staged)+len(c.session.pinned) > 0
	if round > 0 && c.kind == msgQuery && c.way == wayAlone {
		lead = c.lead()
		own = appendMessage(nil, msgQuery, []byte(lead), c.message[headerLen:])
		stages = !c.text.noQuery
	}
	if stages {
		st.stage(c.pages())
	}
	if round > 0 && c.way == wayBatch {
		var closed string
		own, closed = c.session.batch.again(nil)
		st.answers += closed
	} else if c.rebinds(round) {
		st.messages = append(appendClose(st.messages, 'P', c.detail.name), c.bind...)
		st.answers += "32"
	}
	st.messages = append(st.messages, own...)
	if c.kind != msgQuery {
		st.flush()
	}
	if err := c.session.toServer(st.messages); err != nil {
		return outcome{}, err
	}
	_, failed, err := c.swallow(st.answers)
	switch {
	case err != nil:
		return outcome{}, err
	case failed != nil:
		if demand, ok := c.demanded(failed, round); ok { // it is planned once more
			return outcome{failed: failed, demand: demand, skipping: true}, nil
		}
		return outcome{done: true}, c.fail(failed, true)
	}
	c.expected(round, len(lead))
	if c.kind == msgQuery {
		return c.queryOutcome(round)
	}
	return c.extendedOutcome(round)
}

// lead is the statement that goes in front of a Query outside of a transaction block when it is repeated. PostgreSQL runs
// both in one implicit block, which ends with the Query. Without it, a Query of one statement would leave the transaction open
// that staging has begun: PostgreSQL 18 makes an implicit block of that, which only a Sync ends or a Query of several statements.
func (c *conversation) lead() string {
	if c.text.noQuery { // not even one that stages
		return "SET LOCAL koldstore.staged TO " + literal(c.pages()) + ";"
	}
	return "SET LOCAL koldstore.repeated TO on;"
}

// literal writes ASCII as SQL that means the same with every setting.
func literal(value []byte) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\047`).Replace(string(value)) + "'"
}

// pages are all that has to be staged.
func (c *conversation) pages() []byte {
	var lines [][]byte
	now := time.Now()
	for _, p := range c.session.pinned {
		lines = append(lines, p.sealed.lines(now))
	}
	for _, p := range c.staged {
		lines = append(lines, p.sealed.lines(now))
	}
	return bytes.Join(lines, []byte("\n"))
}

// expected tells the tracker what the client's messages are about to answer. lead is how many characters are in front of
// the client's.
func (c *conversation) expected(round, lead int) {
	d := c.detail
	if lead > 0 {
		t := *c.text
		t.lead = lead
		d = &detail{text: &t}
	}
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.way == wayBatch && round > 0 {
		for _, m := range s.batch.messages {
			s.tracker.sent(m.kind, m.detail)
		}
		return
	}
	if c.rebinds(round) {
		s.tracker.bound(&detail{name: c.detail.name, source: c.source, bind: c.bind})
	}
	s.tracker.sent(c.kind, d)
}

// isBarrier says whether nothing can be repeated behind a statement with this tag: what was before it stays, or the savepoint
// is gone. ROLLBACK and RELEASE are the tags of those that go to a savepoint, too.
func (t *text) isBarrier(tag string) bool {
	switch tag {
	case "ROLLBACK", "RELEASE":
		return t.savepoints == rewrite.SavepointsOfOthers
	case "COMMIT", "PREPARE TRANSACTION", "COMMIT PREPARED", "ROLLBACK PREPARED", "PREPARE", "DEALLOCATE", "DEALLOCATE ALL",
		"DISCARD ALL", "DISCARD PLANS", "DISCARD SEQUENCES", "DISCARD TEMP":
		return true
	}
	return false
}

// queryOutcome follows the answer of a Query up to ReadyForQuery.
func (c *conversation) queryOutcome(round int) (outcome, error) {
	var o outcome
	led := round > 0 && c.way == wayAlone // there is a lead, whose tag is not for the client
	for {
		ev, err := c.await("CEZGW")
		if err != nil {
			return o, err
		}
		switch ev.typ {
		case msgComplete:
			if led {
				led = false
				continue
			}
			c.gone = c.gone || ev.message == nil || c.text.isBarrier(string(bytes.TrimRight(ev.message[headerLen:], "\x00")))
			err = c.hold.write(ev.message)
		case msgError:
			if demand, ok := c.demanded(ev.message, round); ok {
				o.failed, o.demand = ev.message, demand
				continue
			}
			err = c.letGo(ev)
		case msgReady:
			if o.demand != nil {
				return o, nil
			}
			if ev.message[headerLen] == 'T' && !c.gone {
				if again, o, err := c.prove(round); err != nil || again {
					return o, err
				}
			}
			o.done = true
			return o, c.succeed(ev.message, ev.message[headerLen] == 'T')
		default: // the server wants copy data: the client has to have a say
			o.done = true
			return o, c.letGo(ev)
		}
		if err != nil {
			return o, err
		}
	}
}

// extendedOutcome follows the answer of a Bind or an Execute until it is complete, suspended or failed.
func (c *conversation) extendedOutcome(round int) (outcome, error) {
	ends := "ECsIGW"
	switch {
	case c.way == wayBatch:
		ends = "EGW"
	case c.kind == msgBind:
		ends = "E2"
	}
	ev, err := c.await(ends)
	if err != nil {
		return outcome{}, err
	}
	switch ev.typ {
	case 0:
		return outcome{done: true}, nil
	case msgError:
		if demand, ok := c.demanded(ev.message, round); ok {
			return outcome{failed: ev.message, demand: demand, skipping: true}, nil
		}
		return outcome{done: true}, c.letGo(ev)
	case msgCopyIn, msgCopyBoth:
		return outcome{done: true}, c.letGo(ev)
	case msgComplete:
		if again, o, err := c.prove(round); err != nil || again {
			return o, err
		}
	}
	return outcome{done: true}, c.succeed(ev.message, true)
}

// prove reads a cursor to its end in the transaction that has just declared it: a FETCH that fails ends its cursor for good,
// so that what it may demand has to be staged when it is declared. again says that the cursor is to be declared once
// more, with a demand met before or not.
func (c *conversation) prove(round int) (again bool, o outcome, err error) {
	if c.way != waySaved || c.text.cursor == "" || c.proven || c.hold.open {
		return false, o, nil
	}
	var st step
	st.sql("MOVE FORWARD ALL FROM " + c.text.cursor)
	st.flush()
	if err := c.session.toServer(st.messages); err != nil {
		return false, o, err
	}
	_, failed, err := c.swallow(st.answers)
	if err != nil {
		return false, o, err
	}
	o.skipping = failed != nil
	if demand, ok := c.demanded(failed, round); ok {
		o.failed, o.demand = failed, demand
		return true, o, nil
	}
	c.proven = true // another error is for whoever reads the cursor
	return true, o, nil
}

// letGo gives up holding: there will be no repeat.
func (c *conversation) letGo(ev event) error {
	if err := c.hold.write(ev.message); err != nil {
		return err
	}
	return c.hold.release()
}

// await hands the server's answer to hold until a message of one of the types in ends. The zero event means that there is
// nothing more to come, which only a batch gets to know.
func (c *conversation) await(ends string) (event, error) {
	s := c.session
	for {
		ev, err := s.relayServer(c.hold.write, ends+"AS")
		if err != nil {
			return ev, err
		}
		switch ev.typ {
		case 0:
			s.mu.Lock()
			settled := c.way == wayBatch && s.tracker.settled() && s.backRest == 0
			s.mu.Unlock()
			if settled {
				return event{}, nil
			}
			err = s.pull()
		case msgNotification, msgParameterStatus:
			if ev.message != nil {
				err = c.hold.keep(ev.message)
			}
		default:
			return ev, nil
		}
		if err != nil {
			return event{}, err
		}
	}
}

// demanded reads the demand out of an ErrorResponse, if it is one that can be met: nothing of the answer has gone out.
func (c *conversation) demanded(message []byte, round int) (json.RawMessage, bool) {
	if message == nil {
		return nil, false
	}
	fs, ok := parseFields(message[headerLen:])
	if !ok || fs.get(fieldCode) != koldproxy.CodeProxyNeeded {
		return nil, false
	}
	demand, ok := isDemand(fs.get(fieldDetail))
	again := slices.ContainsFunc(c.staged, func(p page) bool { return bytes.Equal(p.demand, demand) }) // what was staged did not stay
	if !ok || c.hold.open || c.gone || again || round >= maxRounds {
		c.count("passed")
		return nil, false
	}
	return demand, true
}

func (c *conversation) count(outcome string) {
	c.session.server.metrics.demands.WithLabelValues(outcome).Inc()
}
