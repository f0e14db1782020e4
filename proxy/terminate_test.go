package proxy

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// TestOtherMethodsAreRelayed: auth = "scram" is about SCRAM and nothing else.
func TestOtherMethodsAreRelayed(t *testing.T) {
	t.Parallel()
	for _, tls := range []option{func(*Config, *Deps) {}, clientTLSWith(t, issued(t, "koldproxy"))} {
		p := startSecureProxy(t, endsSCRAM, tls, serverTLSMode(ServerTLSPrefer))
		for _, user := range []string{"md5_user", "password_user", "trust_user", "scram_user"} {
			conn, err := pgconn.Connect(within(t), p.dsnFor(user, rolePassword, "sslmode", "prefer"))
			if err != nil {
				t.Errorf("%s: %v", user, err)
				continue
			}
			_ = conn.Close(within(t))
		}
	}
}

// saslTry is one attempt to log in with SCRAM whose messages can be spoilt.
type saslTry struct {
	user, mechanism, first string
	typ                    byte
	final                  func(challenge, final string) string
	late                   bool // the mechanism's first message comes when asked for
}

const tryNonce = "fyko+d2lbbFgONRv9qkxdawL"

// play returns the challenge and what ends the attempt.
func (c saslTry) play(t *testing.T, dsn string) (challenge, end string) {
	t.Helper()
	w, cfg := dialOnly(t, dsn)
	defer w.conn.Close()
	user := cfg.User
	if c.user != "" {
		user = c.user
	}
	w.send(t, startupPacketFor("user", user, "database", "postgres"), 0)
	receive := func() []byte {
		message, err := w.read()
		if err != nil {
			return []byte("E\x00\x00\x00\x05\x00")
		}
		return append([]byte(nil), message...)
	}
	if m := receive(); m[0] != 'R' || authKind(m[5:]) != authSASL {
		return "", showMessage(m)
	}
	mechanism, first, typ := mechanismSCRAM, "n,,n=,r="+tryNonce, byte('p')
	if c.mechanism != "" {
		mechanism = c.mechanism
	}
	if c.first != "" {
		first = c.first
	}
	if c.typ != 0 {
		typ = c.typ
	}
	body := zeroTerminated(mechanism)
	if c.late {
		w.send(t, appendMessage(nil, typ, append(body, 0xff, 0xff, 0xff, 0xff)), 0)
		if m := receive(); m[0] != 'R' || authKind(m[5:]) != authSASLContinue || len(m) != 9 {
			return "", showMessage(m)
		}
		body = nil
	} else {
		body = binary.BigEndian.AppendUint32(body, uint32(len(first)))
	}
	w.sendMore(appendMessage(nil, typ, append(body, first...)), 0)
	m := receive()
	if m[0] != 'R' || authKind(m[5:]) != authSASLContinue {
		return "", showMessage(m)
	}
	challenge = string(m[9:])
	server, _ := parseServerFirst([]byte(challenge))
	key, v := scramKeys(t, cfg.Password, server.salt, server.iterations)
	withoutProof := "c=biws,r=" + server.nonce
	_, bare, _ := strings.Cut(first, ",,")
	proof := proofOf(key, v.storedKey, bare+","+challenge+","+withoutProof)
	final := withoutProof + ",p=" + base64.StdEncoding.EncodeToString(proof)
	if c.final != nil {
		final = c.final(challenge, final)
	}
	w.sendMore(appendMessage(nil, 'p', []byte(final)), 0)
	m = receive()
	if m[0] == 'R' && authKind(m[5:]) == authSASLFinal {
		m = receive()
	}
	return challenge, showMessage(m)
}

// TestSCRAMAnswers: koldproxy ends SCRAM with the words of PostgreSQL, the details of damaged messages aside.
func TestSCRAMAnswers(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, endsSCRAM)
	direct := p.cluster.DSN("postgres", "scram_user", rolePassword)
	for name, c := range map[string]saslTry{
		"right":                        {},
		"first message when asked for": {late: true},
		"another name in the message":  {first: "n,,n=postgres,r=" + tryNonce},
		"unknown user":                 {user: "nobody"},
		"no password":                  {user: "no_password"},
		"md5 password":                 {user: "old_user"},
		"expired password":             {user: "expired_user"},
		"no UTF-8 in the name":         {user: "scram_\xff"},
		"long name":                    {user: strings.Repeat("x", 70)},
		"wrong proof": {final: func(_, final string) string {
			return final[:len(final)-44] + base64.StdEncoding.EncodeToString(make([]byte, 32))
		}},
		"short proof":                 {final: func(_, final string) string { return final[:len(final)-44] + "AAAA" }},
		"no proof":                    {final: func(_, final string) string { return final[:len(final)-47] }},
		"something behind the proof":  {final: func(_, final string) string { return final + ",x=y" }},
		"an extension":                {final: func(_, final string) string { return strings.Replace(final, ",p=", ",x=y,p=", 1) }},
		"another nonce":               {final: func(_, final string) string { return strings.Replace(final, "r="+tryNonce, "r=x"+tryNonce, 1) }},
		"another header":              {final: func(_, final string) string { return strings.Replace(final, "biws", "eSws", 1) }},
		"damaged header":              {final: func(_, final string) string { return strings.Replace(final, "biws", "!", 1) }},
		"nothing":                     {final: func(_, _ string) string { return "" }},
		"binding without TLS":         {first: "p=tls-server-end-point,,n=,r=" + tryNonce},
		"client could bind":           {first: "y,,n=,r=" + tryNonce, final: func(_, f string) string { return strings.Replace(f, "biws", "eSws", 1) }},
		"authorization identity":      {first: "n,a=postgres,n=,r=" + tryNonce},
		"mandatory extension":         {first: "n,,m=x,n=,r=" + tryNonce},
		"unknown flag":                {first: "x,,n=,r=" + tryNonce},
		"no nonce":                    {first: "n,,n="},
		"an unprintable nonce":        {first: "n,,n=,r=\x01"},
		"unknown mechanism":           {mechanism: "SCRAM-SHA-1"},
		"a mechanism not offered":     {mechanism: mechanismPlus, first: "p=tls-server-end-point,,n=,r=" + tryNonce},
		"another message than asked":  {typ: 'Q'},
		"a first message that is cut": {first: "n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, want := c.play(t, direct)
			_, got := c.play(t, p.dsnFor("scram_user", rolePassword, "sslmode", "disable"))
			if withoutDetail(got) != withoutDetail(want) {
				t.Errorf("got %s\nwant %s", got, want)
			}
		})
	}
}

func withoutDetail(answer string) string {
	answer, _, _ = strings.Cut(answer, " D=")
	return answer
}

// TestSaltsOfUnknownUsers: whoever asks cannot tell roles that exist from others, here or at the server.
func TestSaltsOfUnknownUsers(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, endsSCRAM)
	rest := func(challenge string) string { // behind the nonce
		_, salt, _ := strings.Cut(challenge, ",")
		return salt
	}
	for _, user := range []string{"nobody", "scram_user", "no_password", "old_user"} {
		want, _ := saslTry{user: user}.play(t, p.cluster.DSN("postgres", user, "x"))
		for range 2 {
			got, _ := saslTry{user: user}.play(t, p.dsnFor(user, "x", "sslmode", "disable"))
			if rest(got) != rest(want) || rest(got) == "" {
				t.Errorf("%s: %s, the server says %s", user, got, want)
			}
		}
	}
}

// TestImpostor: with auth = "scram" nobody between koldproxy and the server can pass a login on, even where koldproxy
// does not verify certificates, and a server that does not know the verifier is not believed.
func TestImpostor(t *testing.T) {
	t.Parallel()
	cluster := secureCluster(t)
	pair, err := tls.X509KeyPair(issuedPair(t))
	if err != nil {
		t.Fatal(err)
	}
	answerSSL := func(conn net.Conn) (net.Conn, bool) {
		_, _ = io.ReadFull(conn, make([]byte, minStartup))
		_, _ = conn.Write([]byte{'S'})
		server := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{alpn}})
		return server, server.Handshake() == nil
	}
	middle := gate(t, "", answerSSL, func() (net.Conn, error) {
		conn, err := net.Dial("tcp", net.JoinHostPort(cluster.Host, strconv.Itoa(cluster.Port)))
		if err != nil {
			return nil, err
		}
		_, _ = conn.Write(request(codeSSL))
		_, _ = io.ReadFull(conn, make([]byte, 1))
		return tls.Client(conn, &tls.Config{InsecureSkipVerify: true}), nil
	})
	p := startSecureProxy(t, endsSCRAM, serverTLSMode(ServerTLSRequire), func(c *Config, _ *Deps) { c.Upstream = middle })
	_, err = pgconn.Connect(within(t), p.dsnFor("scram_user", rolePassword, "sslmode", "disable"))
	if err == nil || !strings.Contains(err.Error(), "SCRAM channel binding check failed") {
		t.Errorf("with somebody in the middle: %v", err)
	}

	impostor := gate(t, "", func(conn net.Conn) (net.Conn, bool) {
		w := &wire{conn: conn, in: newStream(conn)}
		_ = conn.SetDeadline(time.Now().Add(testTimeout))
		if _, err := readStartupPacket(w.in); err != nil {
			return nil, false
		}
		w.sendMore(authenticationSASL(mechanismSCRAM), 0)
		m, err := w.read()
		if err != nil {
			return nil, false
		}
		_, first, _ := parseSASLInitial(m[headerLen:])
		client, _ := parseClientFirst(first)
		text, _ := authid{cluster.DSN("postgres", "", "")}.Verifier(context.Background(), "scram_user")
		v, _ := parseVerifier(text) // it has got the salt from somewhere
		w.sendMore(saslContinue(newServerFirst(client.nonce+"x", v.salt, v.iterations).text), 0)
		if _, err := w.read(); err == nil {
			w.sendMore(joined(saslFinal(randomKey()), appendMessage(nil, msgAuth, []byte{0, 0, 0, authOK}), appendMessage(nil, 'Z', []byte("I"))), 0)
		}
		return nil, false
	}, nil)
	p = startSecureProxy(t, endsSCRAM, func(c *Config, _ *Deps) { c.Upstream = impostor })
	for _, password := range []string{rolePassword, "wrong"} {
		_, err = pgconn.Connect(within(t), p.dsnFor("scram_user", password, "sslmode", "disable"))
		if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
			t.Errorf("with an impostor, password %s: %v", password, err)
		}
	}
}

type brokenVerifiers struct{}

func (brokenVerifiers) Verifier(context.Context, string) (string, error) {
	return "", errors.New("permission denied for table pg_authid")
}

func TestVerifiersThatCannotBeRead(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, endsSCRAM, func(_ *Config, d *Deps) { d.Verifiers = brokenVerifiers{} })
	_, err := pgconn.Connect(within(t), p.dsnFor("scram_user", rolePassword, "sslmode", "disable"))
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || e.Code != koldproxy.CodeConnectionFailure || strings.Contains(err.Error(), "pg_authid") || !strings.Contains(e.Hint, "log") {
		t.Errorf("%v", err)
	}
}
