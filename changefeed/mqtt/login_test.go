package mqtt

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/mochi-mqtt/server/v2/packets"
)

func TestLogin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	known, sleeping := w.role("known"), w.role("sleeping")
	w.exec("ALTER ROLE " + sleeping + " NOLOGIN")
	for _, c := range []struct {
		name, user, password string
		v4, v5               byte
	}{
		{"right password", known, password, 0, 0},
		{"wrong password", known, "s3cr3t-wrong", 5, 0x86},
		{"no such role", "nobody" + w.suffix, "s3cr3t-wrong", 5, 0x86},
		{"role without LOGIN", sleeping, password, 5, 0x86},
		{"anonymous", "", "", 5, 0x86},
		{"no password", known, "", 5, 0x86},
		{"NUL in the user", known + "\x00options\x00-crole=postgres", password, 5, 0x86},
		{"NUL in the password", known, password + "\x00", 5, 0x86},
		{"invalid UTF-8", known + "\xff", password, 5, 0x86},
		{"a user that PostgreSQL would cut to a role's name", strings.Repeat("x", 64), password, 5, 0x86},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for version, want := range map[byte]byte{4: c.v4, 5: c.v5} {
				cl := dial(t, w.addr, version)
				if ack := cl.connect(connectPacket(c.user, c.password)); ack.ReasonCode != want {
					t.Errorf("version %d: CONNACK %#x, want %#x", version, ack.ReasonCode, want)
				}
				if want != 0 {
					cl.expectEnd()
				}
			}
		})
	}
	t.Cleanup(func() {
		if log := w.logs.String(); strings.Contains(log, "s3cr3t") || strings.Contains(log, password) {
			t.Errorf("a password is in the log:\n%s", log)
		} else if !strings.Contains(log, "mqtt login refused") {
			t.Errorf("refused logins are not in the log:\n%s", log)
		}
	})
}

func TestLoginWithoutServer(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().(*net.TCPAddr)
	ln.Close()
	w := &world{t: t, logs: new(logBuffer)}
	w.serve(NewPostgresAuth(mustConfig(t, addr), nil))
	for version, want := range map[byte]byte{4: 3, 5: 0x88} {
		if ack := dial(t, w.addr, version).connect(connectPacket("u", "s3cr3t")); ack.ReasonCode != want {
			t.Errorf("version %d: CONNACK %#x, want %#x", version, ack.ReasonCode, want)
		}
	}
	if strings.Contains(w.logs.String(), "s3cr3t") {
		t.Error("a password is in the log")
	}
}

// A server that trusts koldproxy's address does not thereby trust whoever talks MQTT to koldproxy.
func TestTrustIsNoLogin(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	t.Cleanup(func() { ln.Close(); <-served })
	go func() {
		defer close(served)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			backend := pgproto3.NewBackend(conn, conn)
			if _, err := backend.ReceiveStartupMessage(); err == nil {
				backend.Send(&pgproto3.AuthenticationOk{})
				backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
				_ = backend.Flush()
			}
			conn.Close()
		}
	}()
	auth := NewPostgresAuth(mustConfig(t, ln.Addr().(*net.TCPAddr)), nil)
	err = auth.Login(t.Context(), "postgres", "anything")
	if !errors.Is(err, ErrNoPassword) || errors.Is(err, ErrRefused) {
		t.Errorf("Login = %v, want ErrNoPassword", err)
	}
}

func mustConfig(t *testing.T, addr *net.TCPAddr) *pgx.ConnConfig {
	t.Helper()
	cfg, err := pgx.ParseConfig(fmt.Sprintf("postgres://service:service@%s/x?sslmode=disable", addr))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// stalledAuth is a server that does not answer logins until it is told to.
type stalledAuth struct {
	begun   chan struct{}
	release chan struct{}
	ended   atomic.Int32 // logins that gave up
}

func (a *stalledAuth) Login(ctx context.Context, _, _ string) error {
	a.begun <- struct{}{}
	select {
	case <-a.release:
		return nil
	case <-ctx.Done():
		a.ended.Add(1)
		return ctx.Err()
	}
}

func (a *stalledAuth) MaySubscribe(context.Context, string, string) (bool, error) { return true, nil }

func TestLoginsAreBounded(t *testing.T) {
	t.Parallel()
	auth := &stalledAuth{begun: make(chan struct{}), release: make(chan struct{})}
	w := &world{t: t, logs: new(logBuffer)}
	w.serve(auth, func(c *Config) { c.LoginConcurrency, c.LoginTimeout = 2, 200*time.Millisecond })
	clients := make([]*client, 3)
	for i := range clients {
		clients[i] = dial(t, w.addr, 5)
		clients[i].send(connectPacket("u", "p"))
	}
	<-auth.begun
	<-auth.begun
	select {
	case <-auth.begun: // only after one of the first two has given up
		if auth.ended.Load() == 0 {
			t.Error("a third login is under way beside two others")
		}
	case <-time.After(patience): // or not at all: it waited too long itself
		t.Fatal("no login came to an end")
	case <-eventuallyRefused(w, 3):
	}
	for _, c := range clients {
		if ack := c.expect(packets.Connack); ack.ReasonCode != 0x88 {
			t.Errorf("CONNACK %#x, want 0x88", ack.ReasonCode)
		}
	}
}

// eventuallyRefused is closed when n logins could not be checked.
func eventuallyRefused(w *world, n float64) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		eventually(w.t, "all logins time out", func() bool { return w.refused("login_unavailable") == n })
	}()
	return done
}

func TestSilentAndSurplusConnections(t *testing.T) {
	t.Parallel()
	w := &world{t: t, logs: new(logBuffer)}
	w.serve(&stalledAuth{}, func(c *Config) { c.HandshakeTimeout, c.MaxConnections = 300*time.Millisecond, 1 })
	silent := dial(t, w.addr, 4)
	eventually(t, "the silent client is counted", func() bool { return w.broker.connections.Load() == 1 })
	dial(t, w.addr, 4).expectEnd()
	if w.refused("connections") != 1 {
		t.Error("the connection too many is not counted")
	}
	silent.sendRaw([]byte{0x10}) // one byte does not buy time
	silent.expectEnd()
	eventually(t, "its place is free again", func() bool { return w.broker.connections.Load() == 0 })
}

func TestProtocolsThatAreNotSpoken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("known")
	t.Run("MQTT 3.1", func(t *testing.T) {
		t.Parallel()
		c := dial(t, w.addr, 3)
		pk := connectPacket(user, password)
		pk.Connect.ProtocolName = []byte("MQIsdp")
		if ack := c.connect(pk); ack.ReasonCode != 1 {
			t.Errorf("CONNACK %#x, want 1", ack.ReasonCode)
		}
	})
	t.Run("enhanced authentication", func(t *testing.T) {
		t.Parallel()
		pk := connectPacket(user, password)
		pk.Properties.AuthenticationMethod = "SCRAM-SHA-256"
		if ack := dial(t, w.addr, 5).connect(pk); ack.ReasonCode != 0x8C {
			t.Errorf("CONNACK %#x, want 0x8c", ack.ReasonCode)
		}
	})
	t.Run("a session to be kept for a client without a name", func(t *testing.T) {
		t.Parallel()
		pk := connectPacket(user, password)
		pk.Connect.Clean = false
		if ack := dial(t, w.addr, 4).connect(pk); ack.ReasonCode != 2 {
			t.Errorf("CONNACK %#x, want 2", ack.ReasonCode)
		}
	})
	t.Run("something else", func(t *testing.T) {
		t.Parallel()
		c := dial(t, w.addr, 4)
		c.sendRaw([]byte("GET / HTTP/1.1\r\n\r\n"))
		c.expectEnd()
	})
	t.Run("a packet larger than any that makes sense", func(t *testing.T) {
		t.Parallel()
		c := dial(t, w.addr, 4)
		c.sendRaw([]byte{0x10, 0xff, 0xff, 0xff, 0x7f})
		c.expectEnd()
	})
	t.Run("a second CONNECT", func(t *testing.T) {
		t.Parallel()
		c := login(t, w.addr, 5, user, password)
		c.send(connectPacket(user, password))
		if reason := c.expectEnd(); reason != packets.ErrProtocolViolationSecondConnect.Code {
			t.Errorf("DISCONNECT %#x", reason)
		}
	})
}
