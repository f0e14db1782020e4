package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/koldproxy/koldproxy"
)

const (
	// reserved is the name of statements, portals and the savepoint that koldproxy adds to a session. They are gone again
	// before the client gets its answer.
	reserved = "koldproxy.demand"
	// spoiler is the name of a portal that does not exist: executing it makes the server fail.
	spoiler = "koldproxy.demand_failed"
	// maxRounds bounds how often one statement may demand something.
	maxRounds = 64
)

// step is SQL of koldproxy's own, as messages and as the answers that they have.
type step struct {
	messages []byte
	answers  string
}

func (st *step) sql(sql string, args ...[]byte) {
	st.messages = appendParse(st.messages, reserved, sql)
	st.messages = appendBind(st.messages, reserved, reserved, args...)
	st.messages = appendExecute(st.messages, reserved)
	st.messages = appendClose(st.messages, 'P', reserved)
	st.messages = appendClose(st.messages, 'S', reserved)
	st.answers += "12C33"
}

func (st *step) stage(value []byte) {
	st.sql("SELECT pg_catalog.set_config('koldstore.staged', $1, true)", value)
}

func (st *step) sync() {
	st.messages = appendSync(st.messages)
	st.answers += "Z"
}

func (st *step) flush() { st.messages = appendFlush(st.messages) }

// conversation runs one statement that may demand something, in a session that was taken over.
type conversation struct {
	session *session
	hold    hold
	kind    byte // Query or Execute
	message []byte
	detail  *detail

	block  bool   // in a transaction block: a savepoint makes the repeat possible
	bind   []byte // Execute: the Bind message of its portal
	source string // Execute: the statement of its portal
	staged []json.RawMessage
}

// runDemanding sends a Query or an Execute that may demand something and sees to it that the demand is met. It returns
// when the answer is with the client.
func (s *session) runDemanding(ctx context.Context, kind byte, m looked) (err error) {
	if err := s.takeover(); err != nil {
		return err
	}
	defer s.giveBack()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer s.watch(cancel)()
	s.mu.Lock()
	s.demand = cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.demand = nil
		s.mu.Unlock()
	}()
	c := &conversation{session: s, kind: kind, message: m.rewritten, detail: m.detail}
	c.hold = hold{session: s, limit: s.server.cfg.HoldBytes}
	err = c.run(ctx)
	if released := c.hold.release(); err == nil {
		err = released
	}
	return err
}

func (c *conversation) run(ctx context.Context) error {
	if err := c.settle(); err != nil {
		return err
	}
	if !c.repeatable() {
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

// settle passes on the answers to everything the client has sent before, so that the session's state is known exactly.
func (c *conversation) settle() error {
	s := c.session
	flushed := false
	for {
		if _, err := s.relayServer(s.toClient, ""); err != nil {
			return err
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

// repeatable decides whether the statement can be run again after a demand, and how. If not, it runs like any other and
// the client gets the error that names koldproxy's part in it.
func (c *conversation) repeatable() bool {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tracker
	if t.skipping || t.copying {
		return false
	}
	txt, binds := c.detail.text, 0
	if c.kind == msgExecute {
		p := t.portals[c.detail.name]
		if p == nil || p.executed || p.bind == nil {
			return false
		}
		txt, binds = p.text, 1
		c.bind, c.source = p.bind, names(msgBind, p.bind[headerLen:]).source
	}
	if !txt.mayDemand || !txt.repeatable {
		return false
	}
	switch t.block {
	case 'T':
		c.block = true
		return true
	case 'I': // nothing else in the implicit transaction, which a failure takes along
		return t.executes == 0 && t.binds == binds
	}
	return false
}

// outcome is how an attempt ended: done, or with a demand that may be met.
type outcome struct {
	done   bool
	failed []byte // the ErrorResponse that carries the demand
	demand json.RawMessage
}

// attempt runs the statement once, with what is staged in front of it.
func (c *conversation) attempt(round int) (outcome, error) {
	var st step
	if c.block && round == 0 {
		st.sql(`SAVEPOINT "` + reserved + `"`)
	}
	if len(c.staged) > 0 {
		all, err := json.Marshal(c.staged)
		if err != nil {
			return outcome{}, &failure{sideProxy, "stage", err}
		}
		st.stage(ascii(all))
	}
	if c.kind == msgExecute && round > 0 {
		st.messages = append(appendClose(st.messages, 'P', c.detail.name), c.bind...)
		st.answers += "32"
	}
	st.messages = append(st.messages, c.message...)
	if c.kind == msgExecute {
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
		return outcome{done: true}, c.fail(failed, true)
	}
	c.expected(round)
	if c.kind == msgQuery {
		return c.queryOutcome(round)
	}
	return c.executeOutcome(round)
}

// expected tells the tracker what the client's messages are about to answer.
func (c *conversation) expected(round int) {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.kind == msgExecute && round > 0 {
		s.tracker.bound(&detail{name: c.detail.name, source: c.source, bind: c.bind})
	}
	s.tracker.sent(c.kind, c.detail)
}

// queryOutcome follows the answer of a Query up to ReadyForQuery.
func (c *conversation) queryOutcome(round int) (outcome, error) {
	var o outcome
	for {
		ev, err := c.await("EZGW")
		if err != nil {
			return o, err
		}
		switch ev.typ {
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

// executeOutcome follows the answer of an Execute until it is complete, suspended or failed.
func (c *conversation) executeOutcome(round int) (outcome, error) {
	ev, err := c.await("ECsIGW")
	if err != nil {
		return outcome{}, err
	}
	switch ev.typ {
	case msgError:
		if demand, ok := c.demanded(ev.message, round); ok {
			return outcome{failed: ev.message, demand: demand}, nil
		}
		return outcome{done: true}, c.letGo(ev)
	case msgCopyIn, msgCopyBoth:
		return outcome{done: true}, c.letGo(ev)
	}
	return outcome{done: true}, c.succeed(ev.message, c.block)
}

// letGo gives up holding: there will be no repeat.
func (c *conversation) letGo(ev event) error {
	if err := c.hold.write(ev.message); err != nil {
		return err
	}
	return c.hold.release()
}

// await hands the server's answer to hold until a message of one of the types in ends.
func (c *conversation) await(ends string) (event, error) {
	for {
		ev, err := c.session.relayServer(c.hold.write, ends+"AS")
		if err != nil {
			return ev, err
		}
		switch ev.typ {
		case 0:
			err = c.session.pull()
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
	if !ok || c.hold.open || round >= maxRounds {
		c.count("passed")
		return nil, false
	}
	return demand, true
}

func (c *conversation) count(outcome string) {
	c.session.server.metrics.demands.WithLabelValues(outcome).Inc()
}

// meet gets the answer to a demand and stages it. If it is false, the client has got the error that it led to.
func (c *conversation) meet(ctx context.Context, o outcome) (bool, error) {
	c.hold.discard()
	allowed, failed, skipping, err := c.allowed(o.demand)
	switch {
	case err != nil:
		return false, err
	case failed != nil:
		c.count("failed")
		return false, c.fail(failed, skipping)
	case !allowed:
		c.count("denied")
		return false, c.fail(o.failed, false)
	}
	s := c.session
	answer, err := s.fulfil(ctx, o.demand)
	if err != nil {
		c.count("failed")
		fs, _ := parseFields(o.failed[headerLen:])
		return false, c.fail(fs.replaced(asError(err)).appendTo(nil, msgError), false)
	}
	c.count("fulfilled")
	c.staged = append(c.staged, answer)
	return true, nil
}

// fulfil asks the Fulfiller. The statement's cancellation is the error when ctx has ended.
func (s *session) fulfil(ctx context.Context, demand json.RawMessage) (json.RawMessage, error) {
	var answer json.RawMessage
	err := context.Cause(ctx)
	if err == nil {
		answer, err = s.server.deps.Fulfiller.Fulfil(ctx, s.database, demand)
	}
	switch {
	case ctx.Err() != nil:
		if cause, ok := errors.AsType[*koldproxy.Error](context.Cause(ctx)); ok {
			return nil, cause
		}
		return nil, errCancelled
	case err != nil:
		if _, expected := errors.AsType[*koldproxy.Error](err); !expected {
			s.log.Error().Err(err).Msg("cannot fulfil a demand")
		}
		return nil, err
	case !json.Valid(answer):
		err := errors.New("the answer to a demand is not JSON")
		s.log.Error().Err(err).Msg("cannot fulfil a demand")
		return nil, err
	}
	return answer, nil
}

// allowed takes the session out of the failed state, up to the savepoint in a block, and asks the server whether the
// session's current user is entitled to what is demanded: anybody can raise KS003. failed is the server's error, if it has
// one; skipping says whether it then waits for a Sync.
func (c *conversation) allowed(demand json.RawMessage) (yes bool, failed []byte, skipping bool, err error) {
	var st step
	if c.kind == msgExecute { // the failure has ended the client's implicit transaction, if it was in one
		st.sync()
	}
	if c.block {
		st.sql(`ROLLBACK TO SAVEPOINT "` + reserved + `"`)
	}
	st.sql("SELECT koldstore.demand_allowed($1)", demand)
	if c.block {
		st.flush()
	} else {
		st.sync() // no transaction is open while the demand is being met
	}
	if err := c.session.toServer(st.messages); err != nil {
		return false, nil, false, err
	}
	row, failed, err := c.swallow(st.answers)
	if err != nil {
		return false, nil, false, err
	}
	if failed != nil && !c.block {
		_, _, err = c.swallow("Z")
		return false, failed, false, err
	}
	if c.block && failed == nil {
		c.session.mu.Lock()
		c.session.tracker.status, c.session.tracker.block = 'T', 'T'
		c.session.mu.Unlock()
	}
	return bytes.Equal(row, []byte("t")), failed, failed != nil, nil
}

// succeed lets the answer go, after everything that was added to the transaction is gone from it. last is the message that
// completes the answer.
func (c *conversation) succeed(last []byte, savepoint bool) error {
	savepoint = savepoint && c.block
	var st step
	if len(c.staged) > 0 && (savepoint || c.kind == msgExecute) {
		st.stage(nil) // a later statement of the transaction must not take it for its own
	}
	if savepoint {
		st.sql(`RELEASE SAVEPOINT "` + reserved + `"`)
	}
	if st.answers != "" {
		st.flush()
		if err := c.session.toServer(st.messages); err != nil {
			return err
		}
		_, failed, err := c.swallow(st.answers)
		switch {
		case err != nil:
			return err
		case failed != nil: // a cancel request that came in between
			return c.fail(failed, true)
		}
	}
	if err := c.hold.write(last); err != nil {
		return err
	}
	return c.hold.release()
}

// fail makes message the statement's error and leaves the server as a failing statement would have left it: the
// transaction block failed, an extended batch skipped up to the client's Sync. skipping says that it skips already.
func (c *conversation) fail(message []byte, skipping bool) error {
	c.hold.discard()
	if err := c.hold.write(message); err != nil {
		return err
	}
	s := c.session
	var out []byte
	spoil := !skipping && (c.block || c.kind == msgExecute)
	if spoil {
		out = appendExecute(out, spoiler)
	}
	if c.kind == msgQuery {
		out = appendSync(out) // the server is idle, in a block or failing: nothing is ended
	} else {
		out = appendFlush(out)
	}
	if err := s.toServer(out); err != nil {
		return err
	}
	if spoil {
		if _, _, err := c.swallow("-"); err != nil {
			return err
		}
	}
	if c.kind == msgExecute {
		s.mu.Lock()
		s.tracker.skipping = true
		s.mu.Unlock()
		return c.hold.release()
	}
	ev, err := c.await("Z")
	if err != nil {
		return err
	}
	if err := c.hold.write(ev.message); err != nil {
		return err
	}
	return c.hold.release()
}

// swallow reads the answers to messages of koldproxy's own; types are their types in order. It returns the first column of
// the last row among them. An ErrorResponse ends it and is returned; a type that matches nothing waits for one.
func (c *conversation) swallow(types string) (row, failed []byte, err error) {
	s := c.session
	for len(types) > 0 {
		message, err := next(s.back, s.server.cfg.HoldBytes, s.pull)
		if err != nil {
			return nil, nil, err
		}
		typ, body := message[0], message[headerLen:]
		switch typ {
		case msgNotification, msgParameterStatus:
			if typ == msgParameterStatus {
				s.answered(typ, body)
			}
			err = c.hold.keep(message)
		case msgNotice:
		case msgDataRow:
			row = append([]byte(nil), firstColumn(body)...)
		case msgError:
			failed = append([]byte(nil), message...)
			types = ""
		case types[0]:
			if typ == msgReady {
				s.answered(typ, body)
			}
			types = types[1:]
		default:
			err = &failure{sideServer, "protocol", fmt.Errorf("unexpected message %q", typ)}
		}
		if err != nil {
			return nil, nil, err
		}
		s.back.r += len(message)
	}
	return row, failed, nil
}
