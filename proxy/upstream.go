package proxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"time"
)

// dial opens a connection to the server, encrypted as configured.
func (s *Server) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	dialer := net.Dialer{KeepAliveConfig: s.cfg.keepAlive()}
	conn, err := dialer.DialContext(ctx, s.network, s.address)
	if err != nil {
		return nil, &failure{sideServer, "dial", err}
	}
	setUserTimeout(conn, s.cfg.userTimeout())
	host, _, _ := net.SplitHostPort(s.address)
	secure, err := s.encryptServer(ctx, conn, host)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return secure, nil
}

// probes is how many keepalive probes a silent peer gets.
const probes = 3

func (c Config) keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: c.KeepAlive > 0, Idle: c.KeepAlive, Interval: c.KeepAlive, Count: probes}
}

func (c Config) userTimeout() time.Duration { return c.KeepAlive * (probes + 1) }

// tuneClient sets on an accepted connection what dial sets on the other side.
func (s *Server) tuneClient(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(s.cfg.keepAlive()) // the connection works without
		setUserTimeout(conn, s.cfg.userTimeout())
	}
}

// Listen opens a listener on host:port or unix:/path. A socket file that a dead process left behind is replaced; one that
// answers is an error.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	network, addr, err := splitAddress(address)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		if err := removeStale(ctx, addr); err != nil {
			return nil, err
		}
	}
	var config net.ListenConfig
	return config.Listen(ctx, network, addr)
}

func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("%s exists and is no socket", path)
	}
	var dialer net.Dialer
	if conn, err := dialer.DialContext(ctx, "unix", path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("%s is in use", path)
	}
	return os.Remove(path)
}

// closeWrite ends the sending half of a connection, so that the other side still gets what is on the way. Where there are
// no halves it closes.
func closeWrite(conn net.Conn) {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	_ = conn.Close()
}
