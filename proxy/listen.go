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

// ListenShared is Listen for an address on which another process that uses it may listen at the same time: a successor is
// started before its predecessor ends, and no client is refused in between. It is for TCP on Linux; a Unix socket, whose
// path belongs to one process, and other systems are errors.
func ListenShared(ctx context.Context, address string) (net.Listener, error) {
	network, addr, err := splitAddress(address)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		return nil, errors.New("a Unix socket cannot be shared with another process")
	}
	config := net.ListenConfig{Control: reusePort}
	ln, err := config.Listen(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &sharedListener{ln.(*net.TCPListener)}, nil
}

// sharedListener is a listener that may have a successor.
type sharedListener struct{ *net.TCPListener }

const (
	// handOverTime is how long a shared listener still accepts clients whose connections were being made when it stopped
	// taking new ones.
	handOverTime = 300 * time.Millisecond
	// silenceTime is how long clients whose connection it has accepted may then take to say something.
	silenceTime = time.Second
)

// handOver makes a shared listener take no new connections, without refusing any: the first packet of those that the kernel
// still sends here is dropped, so that it comes again, after a second, to whoever then listens. Connections under way are
// accepted. It is false when ln is not shared. Where the kernel has no such filters (err), connections whose first packet
// arrives within the moment in which the listener is closed are reset.
func handOver(ln net.Listener) (shared bool, err error) {
	l, ok := ln.(*sharedListener)
	if !ok {
		return false, nil
	}
	raw, err := l.SyscallConn()
	if err != nil {
		return true, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = dropNewcomers(int(fd)) })
	return true, errors.Join(err, failed)
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
