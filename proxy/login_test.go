package proxy

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// dialWire connects and authenticates byte by byte, so that nothing but the test reads from the connection.
func dialWire(t testing.TB, dsn string) *wire {
	t.Helper()
	w, cfg := dialOnly(t, dsn)
	w.send(t, startupPacketFor("user", cfg.User, "database", cfg.Database, "client_encoding", "UTF8"), 0)
	w.login(t, cfg.Password)
	return w
}

// dialOnly connects and says nothing.
func dialOnly(t testing.TB, dsn string) (*wire, *pgx.ConnConfig) {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(context.Background(), "tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testTimeout))
	return &wire{conn: conn, in: newStream(conn)}, cfg
}

// startupPacketFor makes a startup packet of protocol 3.0 from names and values.
func startupPacketFor(parameters ...string) []byte {
	packet := []byte{0, 0, 0, 0, 0, 3, 0, 0}
	for _, p := range parameters {
		packet = append(append(packet, p...), 0)
	}
	packet = append(packet, 0)
	binary.BigEndian.PutUint32(packet, uint32(len(packet)))
	return packet
}

// login answers a SCRAM exchange and returns what the server said afterwards, BackendKeyData's body first.
func (w *wire) login(t testing.TB, password string) (key []byte, rest []string) {
	t.Helper()
	receive := func() []byte {
		message, err := w.read()
		if err != nil {
			t.Fatalf("login: %v", err)
		}
		return bytes.Clone(message)
	}
	auth := func(kind uint32) []byte {
		m := receive()
		if m[0] != 'R' || binary.BigEndian.Uint32(m[5:]) != kind {
			t.Fatalf("login: want authentication %d, got %s", kind, showMessage(m))
		}
		return m[9:]
	}
	auth(10)
	const bare = "n=,r=fyko+d2lbbFgONRv9qkxdawL"
	first := append(zeroTerminated("SCRAM-SHA-256"), 0, 0, 0, byte(len(bare)+3))
	w.send(t, appendMessage(nil, 'p', first, []byte("n,,"+bare)), 0)
	challenge := string(auth(11))
	fields := map[byte]string{}
	for _, f := range strings.Split(challenge, ",") {
		fields[f[0]] = f[2:]
	}
	salt, _ := base64.StdEncoding.DecodeString(fields['s'])
	rounds, _ := strconv.Atoi(fields['i'])
	salted, err := pbkdf2.Key(sha256.New, password, salt, rounds, 32)
	if err != nil {
		t.Fatal(err)
	}
	mac := func(key []byte, text string) []byte {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	proof := mac(salted, "Client Key")
	stored := sha256.Sum256(proof)
	final := "c=biws,r=" + fields['r']
	for i, b := range mac(stored[:], bare+","+challenge+","+final) {
		proof[i] ^= b
	}
	w.send(t, appendMessage(nil, 'p', []byte(final+",p="+base64.StdEncoding.EncodeToString(proof))), 0)
	auth(12)
	auth(0)
	for {
		m := receive()
		switch m[0] {
		case 'K':
			key = m[headerLen:]
			continue
		case 'Z':
			return key, rest
		}
		rest = append(rest, showMessage(m))
	}
}
