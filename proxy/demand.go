package proxy

import (
	"context"
	"encoding/json"

	"github.com/koldproxy/koldproxy"
)

// maxRounds bounds how often one statement may demand something.
const maxRounds = 64

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
		return released
	}
	s.back.r = s.back.w // answers to messages of our own are not for the client
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
