package mqtt

import (
	"context"
	"net"
	"sync"
	"time"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// farewellTimeout is the time for the DISCONNECT packet of a session that the broker ends, and for what is being written
// at that moment.
const farewellTimeout = time.Second

// conn is a client's connection as mochi sees it. It has its own idea of deadlines (mochi sets none at all before CONNECT,
// overflows for keepalives above 43690 seconds, and lets writes wait as long as reads), and it is where the hooks find
// what belongs to the client.
type conn struct {
	net.Conn
	//nolint:containedctx // mochi's hooks take no context; this one ends with the connection
	ctx          context.Context
	cancel       context.CancelFunc
	writeTimeout time.Duration

	// Set by hooks in the goroutine that reads the connection, and read there.
	connect   connectInfo
	client    *mochi.Client
	user      string // empty until PostgreSQL has let the client in
	connected bool   // CONNECT has been read

	writing sync.Mutex // held while bytes of one packet, or of several whole ones, go out

	mu      sync.Mutex
	session *session      // written in the goroutine that reads
	ended   *packets.Code // set when the broker has decided to end the connection
}

// connectInfo is what a CONNECT packet said and mochi is not told.
type connectInfo struct {
	clientID  string
	keepalive time.Duration
	clean     bool
}

func newConn(ctx context.Context, nc net.Conn, writeTimeout time.Duration) *conn {
	ctx, cancel := context.WithCancel(ctx)
	return &conn{Conn: nc, ctx: ctx, cancel: cancel, writeTimeout: writeTimeout}
}

// SetDeadline is what mochi calls before each read. The value is its idea of one and a half keepalives; ours replaces it.
func (c *conn) SetDeadline(time.Time) error {
	var deadline time.Time
	if c.connect.keepalive > 0 {
		deadline = time.Now().Add(c.connect.keepalive * 3 / 2)
	}
	return c.Conn.SetReadDeadline(deadline)
}

// Write sends one packet of mochi's.
func (c *conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.allowWrite()
	n, err := c.Conn.Write(p)
	if err != nil {
		c.Conn.Close() // part of a packet may be out; mochi would go on writing
	}
	return n, err
}

// writeFrames sends whole packets, with one system call where the connection can.
func (c *conn) writeFrames(frames *net.Buffers) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.allowWrite()
	_, err := frames.WriteTo(c.Conn)
	if err != nil {
		c.Conn.Close()
	}
	return err
}

// allowWrite sets the deadline of the next write, unless the last one has been set already.
func (c *conn) allowWrite() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended == nil {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(c.writeTimeout)) // the write reports a closed connection
	}
}

// attach makes s the session of the connection.
func (c *conn) attach(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	if c.ended != nil {
		close(s.ending)
	}
}

// end makes the connection end soon, telling an MQTT 5 client why. It does not wait. Only the first call counts.
func (c *conn) end(why packets.Code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return
	}
	c.ended = &why
	if c.session == nil {
		c.Conn.Close()
		return
	}
	_ = c.Conn.SetWriteDeadline(time.Now().Add(farewellTimeout))
	close(c.session.ending)
}

// why is the reason given to end.
func (c *conn) why() packets.Code {
	c.mu.Lock()
	defer c.mu.Unlock()
	return *c.ended
}
