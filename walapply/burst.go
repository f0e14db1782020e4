package walapply

import (
	"bufio"
	"context"
	"crypto/tls"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// burstBytes is how much of the stream is read at once.
const burstBytes = 256 << 10

// burstConn reads a socket in large pieces, so that a server that sends each row on its own does not cost a system call, and
// two changes of context, for each. It is below TLS, which hands over single records. One goroutine reads.
type burstConn struct {
	net.Conn
	buffer *bufio.Reader
	// beforeRead, if set, is called before each read of the socket. It is where the reader may rest while more comes in.
	beforeRead func()
}

func newBurstConn(conn net.Conn) *burstConn {
	return &burstConn{Conn: conn, buffer: bufio.NewReaderSize(conn, burstBytes)}
}

// readInBursts makes the connections of cfg burstConns.
func readInBursts(cfg *pgconn.Config) {
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return newBurstConn(conn), nil
	}
}

// burstOf finds the burstConn of a connection that readInBursts has prepared.
func burstOf(conn *pgconn.PgConn) *burstConn {
	socket := conn.Conn()
	if encrypted, ok := socket.(*tls.Conn); ok {
		socket = encrypted.NetConn()
	}
	return socket.(*burstConn) //nolint:forcetypeassert // nothing else dials
}

// Read returns what has been read from the socket already, and reads on only if that is nothing.
func (b *burstConn) Read(p []byte) (int, error) {
	if b.buffer.Buffered() == 0 && b.beforeRead != nil {
		b.beforeRead()
	}
	return b.buffer.Read(p)
}
