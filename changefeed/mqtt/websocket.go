package mqtt

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

// WebsocketListener turns HTTP connections on ln into MQTT connections: what [Broker.Serve] accepts from it are clients that
// speak MQTT in binary websocket messages, subprotocol mqtt, on any path [MQTT-6.0.0]. Closing it closes ln. Browsers are let
// in from every origin: a login is needed in any case, and no browser adds one by itself.
func WebsocketListener(ln net.Listener) net.Listener {
	w := &websocketListener{ln: ln, conns: make(chan net.Conn), closed: make(chan struct{})}
	upgrader := websocket.Upgrader{
		HandshakeTimeout: 10 * time.Second,
		Subprotocols:     []string{"mqtt", "mqttv3.1"},
		CheckOrigin:      func(*http.Request) bool { return true },
	}
	w.server = &http.Server{
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       10 * time.Second, // who was refused may try again, not stay
		MaxHeaderBytes:    16 << 10,
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if !slices.ContainsFunc(websocket.Subprotocols(r), func(p string) bool { return p == "mqtt" || p == "mqttv3.1" }) {
				http.Error(rw, "this is an MQTT broker: the websocket subprotocol mqtt is needed", http.StatusBadRequest)
				return
			}
			ws, err := upgrader.Upgrade(rw, r, nil)
			if err != nil {
				return // the client was told
			}
			select {
			case w.conns <- &websocketConn{ws: ws}:
			case <-w.closed:
				_ = ws.Close() // nobody takes it any more
			}
		}),
	}
	w.served.Go(func() {
		err := w.server.Serve(ln)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = err
		w.close()
	})
	return w
}

type websocketListener struct {
	ln     net.Listener
	server *http.Server
	conns  chan net.Conn
	closed chan struct{}
	served sync.WaitGroup

	mu  sync.Mutex
	err error
}

// Accept waits for a client whose websocket is open.
func (w *websocketListener) Accept() (net.Conn, error) {
	select {
	case c := <-w.conns:
		return c, nil
	case <-w.closed:
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.err != nil && !errors.Is(w.err, http.ErrServerClosed) {
			return nil, w.err
		}
		return nil, net.ErrClosed
	}
}

// close tells Accept; mu is held.
func (w *websocketListener) close() {
	select {
	case <-w.closed:
	default:
		close(w.closed)
	}
}

// Close ends accepting. Connections that were accepted go on.
func (w *websocketListener) Close() error {
	w.mu.Lock()
	w.close()
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := w.server.Shutdown(ctx)
	w.served.Wait()
	return err
}

func (w *websocketListener) Addr() net.Addr { return w.ln.Addr() }

// websocketConn is the byte stream that MQTT runs on: packets and messages need not begin together. Reads belong to one
// goroutine, writes to another; Close may come from anywhere.
type websocketConn struct {
	ws     *websocket.Conn
	reader io.Reader // the rest of a message; nil between messages
}

func (c *websocketConn) Read(p []byte) (int, error) {
	for {
		if c.reader == nil {
			kind, r, err := c.ws.NextReader()
			if err != nil {
				var closed *websocket.CloseError
				if errors.As(err, &closed) {
					return 0, io.EOF
				}
				return 0, err
			}
			if kind != websocket.BinaryMessage {
				return 0, errors.New("mqtt: a websocket message that is not binary") // [MQTT-6.0.0-1]
			}
			c.reader = r
		}
		n, err := c.reader.Read(p)
		if errors.Is(err, io.EOF) {
			c.reader, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (c *websocketConn) Write(p []byte) (int, error) {
	if err := c.ws.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c *websocketConn) Close() error                       { return c.ws.Close() }
func (c *websocketConn) LocalAddr() net.Addr                { return c.ws.LocalAddr() }
func (c *websocketConn) RemoteAddr() net.Addr               { return c.ws.RemoteAddr() }
func (c *websocketConn) SetReadDeadline(t time.Time) error  { return c.ws.SetReadDeadline(t) }
func (c *websocketConn) SetWriteDeadline(t time.Time) error { return c.ws.SetWriteDeadline(t) }

func (c *websocketConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}
