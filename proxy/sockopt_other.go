//go:build !linux

package proxy

import (
	"net"
	"time"
)

// setUserTimeout is for Linux only; elsewhere keepalive has to do.
func setUserTimeout(net.Conn, time.Duration) {}
