package mqtt

import (
	"bufio"
	"context"
	"crypto/tls"
	"net"
	"net/http/httptest"
	"testing"

	"github.com/mochi-mqtt/server/v2/packets"
)

// Two listeners share one broker; ending one leaves the clients of the other alone.
func TestTLSBesidePlain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	certified := httptest.NewTLSServer(nil) // has a certificate
	defer certified.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- w.broker.Serve(ctx, tls.NewListener(ln, certified.TLS.Clone())) }()

	plain := login(t, w.addr, 4, user, password)
	conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	secure := &client{t: t, conn: conn, reader: bufio.NewReader(conn), version: 5}
	if ack := secure.connect(connectPacket(user, password)); ack.ReasonCode != 0 {
		t.Fatalf("CONNACK %#x", ack.ReasonCode)
	}
	for _, c := range []*client{plain, secure} {
		c.mustSubscribe(topicA)
	}
	w.broker.Publish(topicA, []byte("both"))
	for _, c := range []*client{plain, secure} {
		if got := c.next(); got != topicA+" both" {
			t.Errorf("got %s", got)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if reason := secure.expectEnd(); reason != packets.ErrServerShuttingDown.Code {
		t.Errorf("DISCONNECT %#x", reason)
	}
	w.broker.Publish(topicA, []byte("one"))
	if got := plain.next(); got != topicA+" one" {
		t.Errorf("got %s", got)
	}
}
