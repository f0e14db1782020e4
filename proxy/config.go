package proxy

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
)

// TLSMode says what clients may do about TLS.
type TLSMode string

const (
	TLSDisable TLSMode = "disable" // SSLRequest is answered with N
	TLSAllow   TLSMode = "allow"   // the client decides
	TLSRequire TLSMode = "require" // plain sessions are refused; cancel requests may be plain, as with PostgreSQL
)

// Config is what the operator can say about the proxy. Start from [DefaultConfig].
type Config struct {
	// Upstream is the PostgreSQL server: host:port, or unix:/path/.s.PGSQL.5432.
	Upstream string
	// ServerTLS is the TLS mode of the connection to the server. Only "disable" is supported.
	ServerTLS TLSMode

	// ClientTLS is the TLS mode of client connections; anything but "disable" needs TLSCert and TLSKey, PEM files.
	ClientTLS TLSMode
	TLSCert   string
	TLSKey    string

	// Databases are those in which statements are intercepted. Empty means all. Sessions of other databases are passed
	// through as they are.
	Databases []string

	// MaxConnections bounds the sessions; one more client gets 53300.
	MaxConnections int
	// MaxHandshakes bounds the clients that have connected but have no session yet; one more is closed without a word.
	MaxHandshakes int
	// MaxCancels bounds the cancel requests that are being forwarded; one more waits, for HandshakeTimeout at most.
	MaxCancels int
	// ForwardUnknownCancels also forwards cancel requests whose key belongs to no session of this server, as is needed
	// where several koldproxys share one address.
	ForwardUnknownCancels bool

	// HandshakeTimeout is the time from accept to the first ReadyForQuery, everything in between included.
	HandshakeTimeout time.Duration
	// ConnectTimeout bounds opening one connection to the server.
	ConnectTimeout time.Duration
	// CancelTimeout bounds the forwarding of one cancel request.
	CancelTimeout time.Duration
	// DrainTimeout is how long transactions may go on after Serve's context has ended. Zero cuts them at once.
	DrainTimeout time.Duration
	// KeepAlive is the idle time after which TCP probes the peer, and the interval between probes; a peer that answers
	// three of them with silence is gone. It also bounds how long sent data may stay unacknowledged. Zero turns both off.
	KeepAlive time.Duration

	// InspectBytes is the largest Query or Parse that is searched; larger ones are streamed through unseen.
	InspectBytes int
	// HoldBytes bounds the answer of a statement that may demand cold rows while it is held back, and the Bind message
	// that is kept to run it again. Beyond it the answer is let go and the statement is not repeated.
	HoldBytes int
}

// DefaultConfig returns the defaults. Only Upstream is left to say.
func DefaultConfig() Config {
	return Config{
		ServerTLS:        TLSDisable,
		ClientTLS:        TLSDisable,
		MaxConnections:   10_000,
		MaxHandshakes:    1000,
		MaxCancels:       64,
		HandshakeTimeout: 60 * time.Second,
		ConnectTimeout:   10 * time.Second,
		CancelTimeout:    10 * time.Second,
		DrainTimeout:     30 * time.Second,
		KeepAlive:        30 * time.Second,
		InspectBytes:     1 << 20,
		HoldBytes:        16 << 20,
	}
}

// Validate reports every problem at once, in the names of the configuration file.
func (c Config) Validate() error {
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if _, _, err := splitAddress(c.Upstream); err != nil {
		problem("proxy.upstream: %w", err)
	}
	if c.ServerTLS != TLSDisable {
		problem("proxy.server_tls: only %q is supported, not %q; connect to the server over a Unix socket or a trusted network",
			TLSDisable, c.ServerTLS)
	}
	if !slices.Contains([]TLSMode{TLSDisable, TLSAllow, TLSRequire}, c.ClientTLS) {
		problem("proxy.client_tls: must be disable, allow or require, not %q", c.ClientTLS)
	}
	if c.ClientTLS != TLSDisable && (c.TLSCert == "" || c.TLSKey == "") {
		problem("proxy.client_tls: %q needs proxy.tls_cert and proxy.tls_key", c.ClientTLS)
	}
	for _, limit := range []struct {
		name  string
		value int
	}{
		{"max_connections", c.MaxConnections},
		{"max_handshakes", c.MaxHandshakes},
		{"max_cancels", c.MaxCancels},
		{"inspect_bytes", c.InspectBytes},
		{"hold_bytes", c.HoldBytes},
	} {
		if limit.value <= 0 {
			problem("proxy.%s: must be positive, not %d", limit.name, limit.value)
		}
	}
	for _, limit := range []struct {
		name  string
		value time.Duration
		min   time.Duration
	}{
		{"handshake_timeout", c.HandshakeTimeout, 1},
		{"connect_timeout", c.ConnectTimeout, 1},
		{"cancel_timeout", c.CancelTimeout, 1},
		{"drain_timeout", c.DrainTimeout, 0},
		{"keepalive", c.KeepAlive, 0},
	} {
		if limit.value < limit.min {
			problem("proxy.%s: %s is too short", limit.name, limit.value)
		}
	}
	return errors.Join(problems...)
}

// splitAddress understands host:port and unix:/path.
func splitAddress(address string) (network, addr string, err error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if path == "" {
			return "", "", errors.New("unix: needs the path of a socket")
		}
		return "unix", path, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", "", fmt.Errorf("%q is neither host:port nor unix:/path", address)
	}
	if port == "" {
		return "", "", fmt.Errorf("%q has no port", address)
	}
	return "tcp", net.JoinHostPort(host, port), nil
}
