//go:build !linux

package proxy

import (
	"errors"
	"net"
	"syscall"
	"time"
)

// setUserTimeout is for Linux only; elsewhere keepalive has to do.
func setUserTimeout(net.Conn, time.Duration) {}

func reusePort(string, string, syscall.RawConn) error {
	return errors.New("sharing an address with another process is for Linux only")
}

func dropNewcomers(int) error { return errors.ErrUnsupported }
