package proxy

import "encoding/binary"

// batch is what the client has sent in the extended protocol since its last Sync, kept so that it can be sent again: an
// error takes back all of it, as long as there is no transaction block. It belongs to pumpClient's goroutine, and only
// sessions in which a statement may demand have one.
type batch struct {
	messages []logged
	size     int
	broken   bool // it is not whole, or sending it again would mean something else
	share    share

	parsed map[string]bool // statements that it has made
	relied map[string]bool // statements that it has used and not made
}

// logged is a message as it was sent.
type logged struct {
	kind    byte
	message []byte
	detail  *detail
}

// reset begins a new batch.
func (b *batch) reset() {
	b.share.release()
	*b = batch{share: b.share}
}

// add notes a message. limit bounds how many bytes are kept.
func (b *batch) add(m logged, limit int) {
	switch m.kind {
	case msgSync, msgQuery, msgFunction: // the implicit transaction ends with it
		b.reset()
		return
	case msgFlush:
		return
	case msgParse, msgBind, msgDescribe, msgExecute, msgClose:
	default:
		b.broken = true
		return
	}
	b.size += len(m.message)
	if b.size > limit || !b.share.afford(b.size) {
		b.broken = true
	}
	if b.broken {
		b.messages = nil
		b.share.release()
		return
	}
	b.messages = append(b.messages, m)
	b.names(m)
}

// names finds out whether the statements that the batch uses are the same when it is sent again. Statements, unlike
// portals, outlive an error.
func (b *batch) names(m logged) {
	if b.parsed == nil {
		b.parsed, b.relied = map[string]bool{}, map[string]bool{}
	}
	d := names(m.kind, m.message[headerLen:])
	use := func(statement string) {
		if !b.parsed[statement] {
			b.relied[statement] = true
		}
	}
	switch {
	case m.kind == msgParse:
		b.broken = b.broken || b.relied[d.name]
		b.parsed[d.name] = true
	case m.kind == msgBind:
		use(d.source)
	case m.kind == msgDescribe && d.target == 'S':
		use(d.name)
	case m.kind == msgClose && d.target == 'S':
		b.broken = b.broken || b.relied[d.name]
	}
}

// again appends the messages that send the batch once more, behind those that take away the statements it has made; answers
// are the types of the answers to the latter.
func (b *batch) again(dst []byte) (messages []byte, answers string) {
	for name := range b.parsed {
		if name != "" {
			dst = appendClose(dst, 'S', name)
			answers += "3"
		}
	}
	for _, m := range b.messages {
		dst = append(dst, m.message...)
	}
	return dst, answers
}

// whole says that the batch can be sent again.
func (b *batch) whole() bool { return !b.broken && len(b.messages) > 0 }

// begun takes over what of a batch is about to be sent and was not noted; run is whole messages, the newest ones. before
// says that others of the batch have been sent before these.
func (b *batch) begun(run []byte, before bool, limit int) {
	b.reset()
	b.broken = before
	for len(run) >= headerLen {
		total := min(messageSize(run), len(run))
		b.add(logged{kind: run[0], message: append([]byte(nil), run[:total]...)}, limit)
		run = run[total:]
	}
}

// keep keeps what is about to be sent of a batch. run is what of the messages in front of it has not been sent.
func (s *session) keep(kind byte, m looked, seen []byte, whole bool, run []byte) {
	s.mu.Lock()
	demanded := s.tracker.demanded
	s.mu.Unlock()
	limit := s.server.cfg.HoldBytes
	switch {
	case m.detail != nil && m.detail.text != nil && m.detail.text.mayDemand && kind == msgParse && !s.batching:
		s.batching = true
		s.batch.begun(run, s.open, limit)
	case !s.batching && !demanded:
		return
	case !s.batching:
		s.batching = true
		s.batch.begun(nil, s.open, limit)
	}
	message := m.rewritten
	if message == nil {
		message = append([]byte(nil), seen...)
	}
	if !whole && kind != msgSync && kind != msgQuery {
		s.batch.broken = true
		return
	}
	s.batch.add(logged{kind, message, m.detail}, limit)
}

// nextOfClient waits for the next message of the client; ok is false when it is too large to be seen as a whole, or when
// there will be none.
func (s *session) nextOfClient() (message []byte, ok bool) {
	for {
		if b := s.front.buffered(); len(b) >= headerLen {
			size := int64(binary.BigEndian.Uint32(b[1:])) + 1
			if size < headerLen || size > int64(s.server.cfg.HoldBytes) {
				return nil, false
			}
			if int64(len(b)) >= size {
				return b[:size], true
			}
		}
		if err := s.front.fill(s.frontLimit()); err != nil {
			if !interrupted(err) {
				s.front.err = err
			}
			return nil, false
		}
	}
}

func (s *session) isSkipping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker.skipping
}
