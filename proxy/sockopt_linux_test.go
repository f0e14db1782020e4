package proxy

import (
	"context"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSocketOptions asks the kernel what it has noted for the connections on both sides.
func TestSocketOptions(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.KeepAlive = 7 * time.Second })
	set := p.server.current()
	server, err := p.server.dial(within(t), set, set.endpoints[0])
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	var dialer net.Dialer
	client, err := dialer.DialContext(context.Background(), "tcp", p.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	set.tuneClient(client)
	for side, conn := range map[string]net.Conn{"client": client, "server": server} {
		raw, err := conn.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		for _, option := range []struct {
			name                string
			level, number, want int
		}{
			{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 7},
			{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 7},
			{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
			{"TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 28_000},
			{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		} {
			err := raw.Control(func(fd uintptr) {
				if got, err := unix.GetsockoptInt(int(fd), option.level, option.number); err != nil || got != option.want {
					t.Errorf("%s: %s is %d, want %d, %v", side, option.name, got, option.want, err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}
