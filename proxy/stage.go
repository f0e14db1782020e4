package proxy

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/koldproxy/koldproxy"
)

var (
	// reserved is the name of statements, portals and the savepoint that koldproxy adds to a session. They are gone again
	// before the client gets its answer. No client has something of this name by chance or because of a habit.
	reserved = "koldproxy.demand." + rand.Text()
	// spoiler is the name of a portal that does not exist: executing it makes the server fail.
	spoiler = reserved + ".failed"
)

// step is SQL of koldproxy's own, as messages and as the answers that they have.
type step struct {
	messages []byte
	answers  string
}

// sql adds a statement. What an earlier step may have left behind when it failed half-way is closed first; to close what
// does not exist is no error.
func (st *step) sql(sql string, args ...[]byte) {
	st.messages = appendClose(st.messages, 'P', reserved)
	st.messages = appendClose(st.messages, 'S', reserved)
	st.messages = appendParse(st.messages, reserved, sql)
	st.messages = appendBind(st.messages, reserved, reserved, args...)
	st.messages = appendExecute(st.messages, reserved)
	st.messages = appendClose(st.messages, 'P', reserved)
	st.messages = appendClose(st.messages, 'S', reserved)
	st.answers += "3312C33"
}

func (st *step) stage(value []byte) {
	st.sql("SELECT pg_catalog.set_config('koldstore.staged', $1, true) IS NULL", value) // and not the value, which may be large
}

func (st *step) sync() {
	st.messages = appendSync(st.messages)
	st.answers += "Z"
}

func (st *step) flush() { st.messages = appendFlush(st.messages) }

// meet gets the answer to a demand and stages it. If it is false, the client has got the error that it led to.
func (c *conversation) meet(ctx context.Context, o outcome) (bool, error) {
	if c.way == wayBatch && c.before == nil {
		c.before = append([]byte{}, c.hold.held...)
	}
	c.hold.discard()
	if o.demand == nil { // a cursor has been read, and is declared again
		_, failed, err := c.ask(o, nil)
		if err == nil && failed != nil {
			err = c.fail(failed, true)
		}
		return failed == nil, err
	}
	leave, failed, err := c.ask(o, o.demand)
	skipping := failed != nil && c.way == waySaved
	switch {
	case err != nil:
		return false, err
	case failed != nil:
		c.count("failed")
		return false, c.fail(failed, skipping)
	case leave == nil:
		c.count("denied")
		return false, c.fail(denied(o.failed), false)
	}
	s := c.session
	ctx, stop, failed, err := c.bound(ctx)
	if err != nil {
		return false, err
	}
	if failed != nil { // a cancel request
		c.count("failed")
		return false, c.fail(failed, c.way == waySaved)
	}
	defer stop()
	answer, err := s.fulfil(ctx, *leave, o.demand)
	if err != nil {
		c.count("failed")
		fs, _ := parseFields(o.failed[headerLen:])
		return false, c.fail(fs.replaced(asError(err)).appendTo(nil, msgError), false)
	}
	next := page{o.demand, answer}
	if !s.pages.afford(sizeOf(s.pinned) + sizeOf(c.staged) + next.size()) {
		c.count("failed")
		fs, _ := parseFields(o.failed[headerLen:])
		return false, c.fail(fs.replaced(tooManyRows(&s.server.held)).appendTo(nil, msgError), false)
	}
	c.count("fulfilled")
	c.staged = append(c.staged, next)
	return true, nil
}

// denied is the error of a demand that the session's current user is not entitled to, although somebody has raised it: a
// function that runs as its owner, or one that forges demands.
func denied(message []byte) []byte {
	fs, _ := parseFields(message[headerLen:])
	return fs.with(fieldHint, "koldproxy gives cold history to roles that may read the whole table. The session's current user may not; "+
		"that a function with SECURITY DEFINER may does not count.").appendTo(nil, msgError)
}

// fulfil asks the Fulfiller and seals what it says. The statement's cancellation is the error when ctx has ended.
func (s *session) fulfil(ctx context.Context, leave pass, demand json.RawMessage) (sealed, error) {
	answer, err := s.answer(ctx, leave, demand)
	switch {
	case ctx.Err() != nil:
		if cause, ok := errors.AsType[*koldproxy.Error](context.Cause(ctx)); ok {
			return sealed{}, cause
		}
		return sealed{}, errCancelled
	case err != nil:
		if _, expected := errors.AsType[*koldproxy.Error](err); !expected {
			s.log().Error().Err(err).Msg("cannot fulfil a demand")
		}
	}
	return answer, err
}

func (s *session) answer(ctx context.Context, leave pass, demand json.RawMessage) (sealed, error) {
	if err := context.Cause(ctx); err != nil {
		return sealed{}, err
	}
	f := s.server.deps.Fulfiller
	secret, mac, err := f.StageSecrets(ctx, s.database, leave.Secret)
	if err != nil {
		return sealed{}, err
	}
	answer, err := f.Fulfil(ctx, s.database, demand)
	if err != nil {
		return sealed{}, err
	}
	if !json.Valid(answer) {
		return sealed{}, errors.New("the answer to a demand is not JSON")
	}
	return seal(leave, secret, mac, demand, answer)
}

// ask takes the session out of the failed state, up to the savepoint in a block, and asks the server whether the session's current
// user is entitled to what is demanded: anybody can raise KS003. leave is nil if it is not. Without a demand nothing is asked. failed
// is the server's error, if it has one; behind a savepoint it then waits for a Sync.
func (c *conversation) ask(o outcome, demand json.RawMessage) (leave *pass, failed []byte, err error) {
	s := c.session
	var st step
	if o.skipping { // the failure has ended the client's implicit transaction, if it was in one
		st.sync()
	}
	s.mu.Lock()
	opened := c.way == wayAlone && s.tracker.status == 'E'
	s.mu.Unlock()
	switch {
	case c.way == waySaved:
		st.sql(`ROLLBACK TO SAVEPOINT "` + reserved + `"`)
	case opened: // by the statement itself
		st.sql("ROLLBACK")
	}
	if demand != nil {
		st.sql("SELECT koldstore.demand_allowed($1)", demand)
	}
	if c.way == waySaved {
		st.flush()
	} else {
		st.sync() // no transaction is open while the demand is being met
	}
	if err := s.toServer(st.messages); err != nil {
		return nil, nil, err
	}
	row, failed, err := c.swallow(st.answers)
	if err != nil {
		return nil, nil, err
	}
	if failed != nil && c.way != waySaved {
		_, _, err = c.swallow("Z")
		return nil, failed, err
	}
	if c.way == waySaved && failed == nil {
		s.mu.Lock()
		s.tracker.status, s.tracker.block, s.tracker.skipping = 'T', 'T', false
		s.mu.Unlock()
	}
	if demand != nil && failed == nil && len(row) > 0 {
		leave = &pass{received: time.Now()}
		if err := json.Unmarshal(row, leave); err != nil {
			return nil, nil, &failure{sideServer, "protocol", fmt.Errorf("leave to answer a demand: %w", err)}
		}
	}
	return leave, failed, nil
}

// succeed lets the answer go, after everything that was added to the transaction is gone from it, except for what a cursor
// of it will read. last is the message that completes the answer, open says that the transaction goes on.
func (c *conversation) succeed(last []byte, open bool) error {
	savepoint := open && c.way == waySaved && !c.text.savepoints.Stay()
	if c.kind == msgBind {
		c.session.planned = planned{c.detail.name, c.staged}
	}
	var st step
	if c.proven {
		c.session.pinned = append(c.session.pinned, c.staged...)
		c.staged = nil
	} else if len(c.staged) > 0 && open {
		c.staged = nil
		st.stage(c.pages()) // a later statement of the transaction has no use for these
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
	if err := c.hold.write(c.before); err != nil {
		return err
	}
	if err := c.hold.write(message); err != nil {
		return err
	}
	s := c.session
	var out []byte
	spoil := !skipping && (c.way == waySaved || c.kind != msgQuery)
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
	if c.kind != msgQuery {
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

// flush lets go what is held so far, and holds what follows.
func (h *hold) flush() error {
	if h.open {
		return nil
	}
	err := h.release()
	h.open = false
	return err
}
