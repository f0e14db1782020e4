package mqtt

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/gorilla/websocket"
	"github.com/mochi-mqtt/server/v2/packets"
)

// MQTT in websockets: login, rights and delivery are the same; packets may be cut across messages; another subprotocol and a
// text message are refused.
func TestWebsocket(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- w.broker.Serve(ctx, WebsocketListener(ln)) }()
	open := func(version byte) *client {
		ws, _, err := (&websocket.Dialer{Subprotocols: []string{"mqtt"}}).Dial("ws://"+ln.Addr().String()+"/mqtt", nil) //nolint:bodyclose // the dialer reads it to its end
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ws.Close() })
		conn := &choppyConn{websocketConn{ws: ws}}
		return &client{t: t, conn: conn, reader: bufio.NewReader(conn), version: version}
	}
	for _, version := range []byte{4, 5} {
		c := open(version)
		if ack := c.connect(connectPacket(user, password)); ack.ReasonCode != 0 {
			t.Fatalf("CONNACK %#x", ack.ReasonCode)
		}
		c.mustSubscribe(topicA)
		w.broker.Publish(topicA, []byte("one"))
		if got := c.next(); got != topicA+" one" {
			t.Errorf("got %s", got)
		}
		c.conn.Close()
	}
	if ack := open(5).connect(connectPacket(user, "wrong")); ack.ReasonCode != packets.ErrBadUsernameOrPassword.Code {
		t.Errorf("CONNACK %#x for a wrong password", ack.ReasonCode)
	}
	if _, response, err := websocket.DefaultDialer.Dial("ws://"+ln.Addr().String(), nil); err == nil || response.StatusCode != http.StatusBadRequest { //nolint:bodyclose // the dialer reads it to its end
		t.Errorf("without the subprotocol: %v", err)
	}
	ws, _, err := (&websocket.Dialer{Subprotocols: []string{"mqtt"}}).Dial("ws://"+ln.Addr().String(), nil) //nolint:bodyclose // the dialer reads it to its end
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	if err := ws.WriteMessage(websocket.TextMessage, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ws.ReadMessage(); err == nil {
		t.Error("a text message was answered")
	}
	last := open(5)
	if ack := last.connect(connectPacket(user, password)); ack.ReasonCode != 0 {
		t.Fatalf("CONNACK %#x", ack.ReasonCode)
	}
	last.mustSubscribe(topicA)
	cancel()
	if reason := last.expectEnd(); reason != packets.ErrServerShuttingDown.Code {
		t.Errorf("DISCONNECT %#x", reason)
	}
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

// choppyConn sends each byte in a message of its own.
type choppyConn struct{ websocketConn }

func (c *choppyConn) Write(p []byte) (int, error) {
	for i := range p {
		if _, err := c.websocketConn.Write(p[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(p), nil
}
