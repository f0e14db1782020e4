package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

// pieces is a connection whose reads come in random sizes; what is written to it is kept.
type pieces struct {
	in  []byte
	rnd *rand.Rand
	out bytes.Buffer
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.in) == 0 {
		return 0, io.EOF
	}
	n := min(len(b), len(p.in), 1+p.rnd.IntN(40))
	copy(b, p.in[:n])
	p.in = p.in[n:]
	return n, nil
}

func (p *pieces) Write(b []byte) (int, error)      { return p.out.Write(b) }
func (p *pieces) Close() error                     { return nil }
func (p *pieces) LocalAddr() net.Addr              { return nil }
func (p *pieces) RemoteAddr() net.Addr             { return nil }
func (p *pieces) SetDeadline(time.Time) error      { return nil }
func (p *pieces) SetReadDeadline(time.Time) error  { return nil }
func (p *pieces) SetWriteDeadline(time.Time) error { return nil }

// fuzzSession is a session between two fakes.
func fuzzSession(client, server *pieces) *session {
	cfg := DefaultConfig()
	cfg.InspectBytes, cfg.HoldBytes = 4<<10, 4<<10
	s := &Server{cfg: cfg, log: zerolog.Nop(), metrics: NewMetrics(prometheus.NewRegistry())}
	session := newSession(s, newStream(client), startupParameters{user: "u", database: "d", understood: true})
	session.back = newStream(server)
	return session
}

// FuzzForwarding sends arbitrary bytes in either direction, in random pieces. What is not intercepted must arrive as it
// was, up to a message that is cut off by the end.
func FuzzForwarding(f *testing.F) {
	f.Add([]byte("Q\x00\x00\x00\x0dSELECT 1\x00S\x00\x00\x00\x04"), []byte("Z\x00\x00\x00\x05IS\x00\x00\x00\x04"), uint64(1))
	f.Add([]byte("P\x00\x00\x00\x14\x00SHOW STREAMS\x00\x00\x00"), []byte("E\x00\x00\x00\x08C1\x00\x00C\x00\x00\x00\x06A\x00"), uint64(2))
	f.Add([]byte("B\xff\xff\xff\xffx"), []byte("D\x7f\xff\xff\xffx"), uint64(3))
	f.Fuzz(func(t *testing.T, up, down []byte, seed uint64) {
		client := &pieces{in: up, rnd: rand.New(rand.NewPCG(seed, 1))}
		server := &pieces{in: down, rnd: rand.New(rand.NewPCG(seed, 2))}
		s := fuzzSession(client, server)
		for {
			if err := s.relayClient(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := s.front.fill(s.frontLimit()); err != nil {
				break
			}
		}
		sent := server.out.Bytes()
		if !s.tracker.named && !bytes.HasPrefix(up, sent) {
			t.Errorf("the server got %q for %q", sent, up)
		}
		for {
			if _, err := s.relayServer(s.toClient, ""); err != nil {
				t.Fatal(err)
			}
			if err := s.back.fill(s.backLimit()); err != nil {
				break
			}
		}
		if !s.tracker.named && !bytes.HasPrefix(down, client.out.Bytes()) {
			t.Errorf("the client got %q for %q", client.out.Bytes(), down)
		}
		if rest := len(down) - client.out.Len(); !s.tracker.named && rest > 4<<10+headerLen {
			t.Errorf("%d bytes were kept", rest)
		}
	})
}

// FuzzStartup reads arbitrary first packets.
func FuzzStartup(f *testing.F) {
	f.Add(startupPacketFor("user", "u", "database", "d", "replication", "on"), uint64(1))
	f.Add(joined(request(codeSSL), request(codeGSSENC)), uint64(2))
	f.Add([]byte{0, 0, 0, 12, 4, 0xd2, 0x16, 0x2e, 0, 0, 0, 0}, uint64(3))
	f.Fuzz(func(t *testing.T, data []byte, seed uint64) {
		conn := &pieces{in: bytes.Clone(data), rnd: rand.New(rand.NewPCG(seed, 1))}
		packet, err := readStartup(newStream(conn), clientPolicy{mode: TLSDisable})
		if err != nil {
			return
		}
		if len(packet.raw) < minStartup || len(packet.raw) > maxStartup || !bytes.Contains(data, packet.raw) {
			t.Fatalf("packet of %d bytes", len(packet.raw))
		}
		p := parseStartup(packet)
		if !p.understood || packet.code != 3<<16 {
			return
		}
		// pgproto3 keeps the last of duplicates as well.
		var other pgproto3.StartupMessage
		if err := other.Decode(packet.raw[4:]); err == nil && other.Parameters["user"] != p.user {
			t.Errorf("user %q, pgproto3 says %q", p.user, other.Parameters["user"])
		}
	})
}

// FuzzFields: what is understood is written back as it was.
func FuzzFields(f *testing.F) {
	f.Add([]byte("SERROR\x00C42601\x00Mx\x00P12\x00qSELECT /*koldstore:when*/(x)\x00p30\x00\x00"))
	f.Fuzz(func(t *testing.T, body []byte) {
		fs, ok := parseFields(body)
		if !ok {
			return
		}
		if got := fs.appendTo(nil, msgError); !bytes.Equal(got[headerLen:], body) {
			t.Errorf("%q becomes %q", body, got[headerLen:])
		}
		predicatePosition(fs, 5)
		edit(msgError, body, origin{text: &text{changed: true}})
	})
}

// FuzzNames reads names out of arbitrary bodies, and columns out of arbitrary rows.
func FuzzNames(f *testing.F) {
	f.Add([]byte("Sname\x00source\x00"))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, kind := range []byte{msgBind, msgDescribe, msgExecute, msgClose} {
			if d := names(kind, body); len(d.name)+len(d.source) > len(body) {
				t.Errorf("%+v", d)
			}
		}
		if c := firstColumn(body); len(c) > len(body) {
			t.Errorf("%q", c)
		}
	})
}

// FuzzASCII: escaping changes the spelling of a document, not its meaning.
func FuzzASCII(f *testing.F) {
	f.Add([]byte(`{"a":"é😀\u00e9"}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		var before, after any
		if json.Unmarshal(doc, &before) != nil {
			return
		}
		escaped := ascii(doc)
		if err := json.Unmarshal(escaped, &after); err != nil {
			t.Fatal(err)
		}
		a, _ := json.Marshal(before)
		b, _ := json.Marshal(after)
		if !bytes.Equal(a, b) || bytes.ContainsFunc(escaped, func(r rune) bool { return r >= 0x80 }) {
			t.Errorf("%q becomes %q", doc, escaped)
		}
	})
}

func TestNextRefusesByLength(t *testing.T) {
	t.Parallel()
	for _, size := range []uint32{0, 3, 1000, 1 << 31, 1<<32 - 1} {
		conn := &pieces{in: binary.BigEndian.AppendUint32([]byte{'p'}, size), rnd: rand.New(rand.NewPCG(1, 1))}
		in := newStream(conn)
		if _, err := next(in, 1000, in.more(1000)); !errors.Is(err, errMessageTooLarge) {
			t.Errorf("length %d: %v", size, err)
		}
	}
}
