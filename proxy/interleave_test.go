package proxy

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"
)

// interleaved is a conversation: what a client sends without waiting for answers, and for each message whether the server
// fails to carry it out.
type interleaved struct {
	messages [][]byte
	fails    []bool
	notices  []bool // the server says something else first
}

// conversationOf makes a conversation of arbitrary bytes.
func conversationOf(data []byte) *interleaved {
	c := &interleaved{}
	for _, b := range data {
		name := []byte{"n\x00"[b>>4&1], 0}[b>>4&1:] // "n" or the unnamed one
		add := func(fails bool, kind byte, parts ...[]byte) {
			c.messages = append(c.messages, appendMessage(nil, kind, parts...))
			c.fails = append(c.fails, fails)
			c.notices = append(c.notices, b&0x20 != 0)
		}
		fails := b >= 0xc0
		query := func(sql string) { add(fails, msgQuery, zeroTerminated(sql)) }
		parse := func(name []byte, sql string) { add(fails, msgParse, name, zeroTerminated(sql), []byte{0, 0}) }
		switch b & 15 {
		case 0:
			query("SELECT 1")
		case 1:
			query("CREATE STREAM s ON t WHEN (a)")
		case 2:
			query("SELECT 1; DROP STREAM s; SELECT 2")
		case 3:
			parse(name, "SELECT 1")
		case 4:
			parse(name, "DROP STREAM s")
		case 5:
			add(fails, msgBind, name, name, make([]byte, 6))
		case 6:
			add(fails, msgDescribe, []byte("S"), name)
		case 7:
			add(fails, msgDescribe, []byte("P"), name)
		case 8:
			add(fails, msgExecute, name, make([]byte, 4))
		case 9, 10:
			add(false, msgSync)
		case 11:
			add(false, msgFlush)
		case 12:
			add(fails, msgClose, []byte("S"), name)
		case 13:
			add(fails, msgFunction, make([]byte, 10))
		case 14:
			query("COPY t FROM STDIN")
			add(false, 'd', []byte("row\n"))
			add(false, []byte{msgCopyDone, msgCopyFail}[b>>4&1], []byte("\x00")[:b>>4&1])
		case 15: // as libpq does it: the server ignores the first Sync if the COPY begins, otherwise the data
			add(false, msgSync)
			add(false, msgParse, []byte{0}, zeroTerminated("COPY t FROM STDIN"), []byte{0, 0})
			add(false, msgBind, []byte{0, 0}, make([]byte, 6))
			add(fails, msgExecute, make([]byte, 5))
			add(false, msgSync)
			add(false, 'd', []byte("row\n"))
			add(false, msgCopyDone)
			add(false, msgSync)
		}
	}
	return c
}

// modelServer answers messages as PostgreSQL does.
type modelServer struct {
	*interleaved
	count                int // messages that it has seen
	statements, portals  map[string]string
	skipping             bool
	copying, copiesAlone bool
	misplaced            bool // a message came that has no place in a COPY
}

// answer appends the answer to the next message.
func (m *modelServer) answer(out, message []byte) []byte {
	kind, body := message[0], message[headerLen:]
	fails, notice := m.fails[m.count], m.notices[m.count]
	m.count++
	if m.copying {
		return m.copy(out, kind)
	}
	if m.skipping && kind != msgSync {
		return out
	}
	if notice {
		out = appendMessage(out, msgNotice, []byte("SNOTICE\x00C00000\x00Mhello\x00\x00"))
	}
	switch kind {
	case msgQuery:
		delete(m.statements, "")
		delete(m.portals, "")
		return m.query(out, string(body[:len(body)-1]), fails)
	case msgFunction:
		if fails {
			return m.ready(m.fail(out))
		}
		return m.ready(appendMessage(out, msgFunctionResult, []byte{255, 255, 255, 255}))
	case msgSync:
		m.skipping = false
		return m.ready(out)
	}
	d := names(kind, body)
	if kind == msgParse {
		name, rest, _ := cString(body)
		d.name = string(name)
		if _, exists := m.statements[d.name]; fails || exists && d.name != "" {
			m.skipping = true
			return m.fail(out)
		}
		sql, _, _ := cString(rest)
		m.statements[d.name] = string(sql)
		return appendMessage(out, msgParsed)
	}
	return m.extended(out, kind, d, fails)
}

func (m *modelServer) extended(out []byte, kind byte, d *detail, fails bool) []byte {
	var text string
	known := true
	switch {
	case kind == msgBind:
		text, known = m.statements[d.source]
		if _, exists := m.portals[d.name]; exists && d.name != "" {
			known = false
		}
	case kind == msgExecute, kind == msgDescribe && d.target == 'P':
		text, known = m.portals[d.name]
	case kind == msgDescribe:
		text, known = m.statements[d.name]
	case kind != msgClose: // Flush, data and ends of a COPY that has not begun
		return out
	}
	if fails || !known {
		m.skipping = true
		return m.fail(out)
	}
	switch kind {
	case msgBind:
		m.portals[d.name] = text
		return appendMessage(out, msgBound)
	case msgClose:
		delete(m.statements, d.name)
		return appendMessage(out, msgClosed)
	case msgDescribe:
		if d.target == 'S' {
			out = appendMessage(out, 't', []byte{0, 0})
		}
		return appendMessage(out, msgNoData)
	}
	return m.run(out, text, false)
}

func (m *modelServer) copy(out []byte, kind byte) []byte {
	if kind == 'd' || kind == msgFlush || kind == msgSync {
		return out
	}
	m.copying = false
	m.misplaced = m.misplaced || kind != msgCopyDone && kind != msgCopyFail
	if kind != msgCopyDone { // whatever else comes ends it, and is lost
		m.skipping = !m.copiesAlone
		out = m.fail(out)
	} else {
		out = appendMessage(out, msgComplete, zeroTerminated("COPY 1"))
	}
	if m.copiesAlone {
		out = m.ready(out)
	}
	return out
}

func (m *modelServer) query(out []byte, sql string, fails bool) []byte {
	statements := strings.Split(sql, "; ")
	for i, sql := range statements {
		if fails && i == len(statements)/2 {
			return m.ready(m.fail(out))
		}
		out = m.run(out, sql, true)
	}
	if m.copying {
		return out
	}
	return m.ready(out)
}

func (m *modelServer) run(out []byte, sql string, alone bool) []byte {
	switch {
	case strings.HasPrefix(sql, "COPY"):
		m.copying, m.copiesAlone = true, alone
		return appendMessage(out, msgCopyIn, []byte{0, 0, 0})
	case strings.HasPrefix(sql, "CALL"):
		return appendMessage(out, msgComplete, zeroTerminated("CALL"))
	}
	out = appendMessage(out, msgDataRow, []byte{0, 1, 0, 0, 0, 1, '1'})
	return appendMessage(out, msgComplete, zeroTerminated("SELECT 1"))
}

func (m *modelServer) fail(out []byte) []byte {
	return appendMessage(out, msgError, []byte("SERROR\x00C42601\x00Mno\x00P8\x00\x00"))
}

func (m *modelServer) ready(out []byte) []byte {
	clear(m.portals)
	return appendMessage(out, msgReady, []byte("I"))
}

// play has the conversation and returns what each side was sent. at decides who is next, and how many bytes come at a time.
// lost says that a message was lost in a COPY; what koldproxy makes of such clients is not looked at here.
func (c *interleaved) play(t *testing.T, seed uint64) (toServer, toClient []byte, lost bool) {
	rnd := rand.New(rand.NewPCG(seed, 3))
	client := &pieces{in: bytes.Join(c.messages, nil), rnd: rnd}
	server := &pieces{rnd: rnd}
	s := fuzzSession(client, server)
	model := &modelServer{interleaved: c, statements: map[string]string{}, portals: map[string]string{}}
	seen := 0 // bytes of server.out that the model has answered
	next := func() []byte {
		if b := server.out.Bytes()[seen:]; len(b) >= headerLen && len(b) >= messageSize(b) {
			return b[:messageSize(b)]
		}
		return nil
	}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for {
		message := next()
		var can []int
		if len(client.in) > 0 {
			can = append(can, 0)
		}
		if message != nil {
			can = append(can, 1)
		}
		if len(server.in) > 0 {
			can = append(can, 2)
		}
		if len(can) == 0 {
			break
		}
		turn := can[len(can)-1] // one message after the other
		if seed > 0 {
			turn = can[rnd.IntN(len(can))]
		}
		switch turn {
		case 0:
			must(s.front.fill(s.frontLimit()))
			must(s.relayClient(t.Context()))
		case 1:
			seen += len(message)
			server.in = model.answer(server.in, message)
		case 2:
			must(s.back.fill(s.backLimit()))
			_, err := s.relayServer(s.toClient, "")
			must(err)
		}
	}
	if model.misplaced {
		return nil, nil, true
	}
	// A conversation may end in the middle of a COPY.
	if s.tracker.settled() == model.copying || s.tracker.skipping != model.skipping || s.tracker.copying != model.copying {
		t.Errorf("seed %d: settled %t, skipping %t, copying %t; the server skips: %t, copies: %t",
			seed, s.tracker.settled(), s.tracker.skipping, s.tracker.copying, model.skipping, model.copying)
	}
	return server.out.Bytes(), client.out.Bytes(), false
}

// FuzzInterleaving has arbitrary conversations with a model of PostgreSQL, cut and interleaved at random. Both sides must get
// what they get when one message follows the other, with each statement of koldproxy's under its own name.
func FuzzInterleaving(f *testing.F) {
	f.Add([]byte{3, 5, 7, 8, 9, 1, 2, 14, 15, 13}, uint64(1))
	f.Add([]byte{4, 5, 8, 0xc8, 0, 9, 0x14, 0x15, 0x18, 0x1c, 0x0b, 0x29}, uint64(2))
	f.Add([]byte{0xcf, 4, 0xc5, 1, 9, 0x1e, 0xce, 2, 0xc2, 0xe1, 0xcd}, uint64(3))
	f.Fuzz(func(t *testing.T, data []byte, seed uint64) {
		if len(data) > 200 {
			return
		}
		c := conversationOf(data)
		toServer, toClient, lost := c.play(t, 0)
		if lost {
			return
		}
		if whole := binary.BigEndian.Uint32(append(toClient, 0, 0, 0, 0, 0, 0)[1:]); len(toClient) > 0 && int(whole) > len(toClient) {
			t.Fatalf("the client got half a message: %q", toClient)
		}
		if called := appendMessage(nil, msgComplete, zeroTerminated("CALL")); bytes.Contains(toClient, called) {
			t.Errorf("the client sees how a statement was carried out: %q", toClient)
		}
		otherServer, otherClient, _ := c.play(t, seed|1)
		if !bytes.Equal(otherServer, toServer) {
			t.Errorf("the server got\n%q, one after the other\n%q", otherServer, toServer)
		}
		if !bytes.Equal(otherClient, toClient) {
			t.Errorf("the client got\n%q, one after the other\n%q", otherClient, toClient)
		}
	})
}
