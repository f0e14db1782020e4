package proxy

import (
	"errors"
	"fmt"
	"runtime"
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

// ClientCertMode says what certificate a client has to show. The words are those of clientcert in pg_hba.conf.
type ClientCertMode string

const (
	ClientCertOptional   ClientCertMode = "optional"    // one that is shown must be valid
	ClientCertVerifyCA   ClientCertMode = "verify-ca"   // one is required
	ClientCertVerifyFull ClientCertMode = "verify-full" // and its common name must be the user
)

// ServerTLSMode says how far the connection to the server is protected. The words are libpq's sslmode.
type ServerTLSMode string

const (
	ServerTLSDisable    ServerTLSMode = "disable"     // no TLS
	ServerTLSPrefer     ServerTLSMode = "prefer"      // TLS if the server has it
	ServerTLSRequire    ServerTLSMode = "require"     // TLS, whoever the server may be
	ServerTLSVerifyCA   ServerTLSMode = "verify-ca"   // its certificate must come from ServerCA
	ServerTLSVerifyFull ServerTLSMode = "verify-full" // and name the host of Upstream
)

// Negotiation says how TLS with the server begins.
type Negotiation string

const (
	NegotiationPostgres Negotiation = "postgres" // by an SSLRequest
	NegotiationDirect   Negotiation = "direct"   // at once, a round trip less; PostgreSQL 17 and later
)

// AuthMode says who authenticates clients.
type AuthMode string

const (
	// AuthRelay passes the server's questions and the client's answers on.
	AuthRelay AuthMode = "relay"
	// AuthSCRAM has koldproxy check SCRAM passwords itself, with the verifiers that Deps.Verifiers reads from the server, and
	// log in with what a correct answer reveals. Other methods are relayed.
	AuthSCRAM AuthMode = "scram"
)

// Config is what the operator can say about the proxy. Start from [DefaultConfig].
type Config struct {
	// Upstream is the PostgreSQL server: host:port, or unix:/path/.s.PGSQL.5432; or several separated by commas, which are
	// tried one after the other.
	Upstream string
	// TargetSessionAttrs says what kind of server sessions may go to; anything but "any" needs Deps.Prober.
	TargetSessionAttrs SessionAttrs
	// LoadBalanceHosts is the order in which several servers are tried.
	LoadBalanceHosts LoadBalance
	// AllowPeer lets clients in whom a server on a Unix socket asks for no proof of who they are. It judges koldproxy
	// instead (peer in pg_hba.conf) or nobody (trust). Clients whose certificate has been verified in full need no permission.
	AllowPeer bool
	// ServerTLS is the TLS mode of connections to the server, those for cancel requests included. A Unix socket has no TLS.
	ServerTLS ServerTLSMode
	// ServerTLSNegotiation is how TLS with the server begins; "direct" needs ServerTLS "require" or stronger.
	ServerTLSNegotiation Negotiation
	// ServerCA is a PEM file with the authorities that may have signed the server's certificate. "verify-ca" needs it;
	// "verify-full" without it trusts those of the system.
	ServerCA string
	// ServerCert and ServerKey are PEM files with the certificate that koldproxy shows to the server, for all users.
	// Both or none.
	ServerCert string
	ServerKey  string

	// ClientTLS is the TLS mode of client connections over TCP; anything but "disable" needs TLSCert and TLSKey, PEM files.
	// All TLS files are read again when they change.
	ClientTLS TLSMode
	TLSCert   string
	TLSKey    string
	// ClientCA is a PEM file with the authorities that may have signed clients' certificates. Empty: clients are not asked.
	ClientCA string
	// ClientCert says what certificate a client with TLS has to show when ClientCA is set.
	ClientCert ClientCertMode

	// Auth says who authenticates clients.
	Auth AuthMode

	// Databases are those in which statements are intercepted. Empty means all. Sessions of other databases are passed
	// through as they are.
	Databases []string

	// MaxConnections bounds the sessions; one more client gets 53300.
	MaxConnections int
	// MaxConnectionsPerAddress bounds the sessions of one address (IPv6: of one network of 64 bits), those of Unix sockets
	// excepted; one more gets 53300. Zero means no limit.
	MaxConnectionsPerAddress int
	// MaxHandshakes bounds the clients that have connected but not said what they want. One more takes the place of the one
	// that has been silent for the longest time, which is closed without a word.
	MaxHandshakes int
	// MaxCancels bounds the cancel requests that are being forwarded; one more waits, for CancelTimeout at most. Sixteen times
	// as many may wait; those beyond are dropped.
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

	// EventLoops is how many event loops carry the sessions, on Linux. Zero, the default, is one per four processors, and one at
	// least; with a negative number, and on other systems, each session has goroutines of its own.
	EventLoops int
	// BusyPoll is how long an event loop without work looks for some before it sleeps. It takes processor time and saves
	// the time of waking up; zero, the default, is not to. It is 10 ms at most.
	BusyPoll time.Duration
	// ProxyProtocolFrom are the networks (CIDR notation, single addresses, "unix") whose connections begin with a header of
	// the PROXY protocol, version 1 or 2, that says who the client is. Connections from elsewhere must not have one.
	ProxyProtocolFrom []string
	// ApplicationNameAddHost appends the client's address and port to the application_name of the startup packet.
	ApplicationNameAddHost bool

	// InspectBytes is the largest Query or Parse that is searched; larger ones are streamed through unseen.
	InspectBytes int
	// HoldBytes bounds the answer of a statement that may demand cold rows while it is held back, and the Bind message
	// that is kept to run it again. Beyond it the answer is let go and the statement is not repeated.
	HoldBytes int
}

// maxBusyPoll bounds BusyPoll: beyond the time that a wake-up takes, looking on saves nothing.
const maxBusyPoll = 10 * time.Millisecond

// DefaultConfig returns the defaults. Only Upstream is left to say.
func DefaultConfig() Config {
	return Config{
		ServerTLS:            ServerTLSDisable,
		ServerTLSNegotiation: NegotiationPostgres,
		TargetSessionAttrs:   SessionAny,
		LoadBalanceHosts:     LoadBalanceDisable,
		ClientTLS:            TLSDisable,
		ClientCert:           ClientCertVerifyCA,
		Auth:                 AuthRelay,
		MaxConnections:       10_000,
		MaxHandshakes:        1000,
		MaxCancels:           64,
		HandshakeTimeout:     60 * time.Second,
		ConnectTimeout:       10 * time.Second,
		CancelTimeout:        10 * time.Second,
		DrainTimeout:         30 * time.Second,
		KeepAlive:            30 * time.Second,
		InspectBytes:         1 << 20,
		HoldBytes:            16 << 20,
	}
}

// Validate reports every problem at once, in the names of the configuration file.
func (c Config) Validate() error {
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if _, err := parseEndpoints(c.Upstream); err != nil {
		problem("proxy.upstream: %w", err)
	}
	if !slices.Contains(allSessionAttrs, c.TargetSessionAttrs) {
		problem("proxy.target_session_attrs: must be any, read-write, read-only, primary, standby or prefer-standby, not %q", c.TargetSessionAttrs)
	}
	if c.LoadBalanceHosts != LoadBalanceDisable && c.LoadBalanceHosts != LoadBalanceRandom {
		problem("proxy.load_balance_hosts: must be disable or random, not %q", c.LoadBalanceHosts)
	}
	if _, err := parseSources(c.ProxyProtocolFrom); err != nil {
		problem("proxy.proxy_protocol_from: %w", err)
	}
	if c.MaxConnectionsPerAddress < 0 {
		problem("proxy.max_connections_per_address: is negative; 0 means no limit")
	}
	c.validateLoops(problem)
	c.validateTLS(problem)
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

// validateLoops refuses what there are no loops for.
func (c Config) validateLoops(problem func(format string, args ...any)) {
	if c.EventLoops > 0 && !loopsExist {
		problem("proxy.event_loops: there are none on %s; leave it out, or set it to -1", runtime.GOOS)
	}
	if c.BusyPoll != 0 && (c.EventLoops < 0 || !loopsExist) {
		problem("proxy.busy_poll: only event loops look for events; set proxy.event_loops to 0 or more (on Linux), or leave busy_poll out")
	}
	if c.BusyPoll < 0 || c.BusyPoll > maxBusyPoll {
		problem("proxy.busy_poll: must be between 0 and %s, not %s", maxBusyPoll, c.BusyPoll)
	}
}

// validateTLS names combinations that cannot work together with the ways out.
func (c Config) validateTLS(problem func(format string, args ...any)) {
	if !slices.Contains([]TLSMode{TLSDisable, TLSAllow, TLSRequire}, c.ClientTLS) {
		problem("proxy.client_tls: must be disable, allow or require, not %q", c.ClientTLS)
	}
	if c.ClientTLS != TLSDisable && (c.TLSCert == "" || c.TLSKey == "") {
		problem("proxy.client_tls: %q needs proxy.tls_cert and proxy.tls_key", c.ClientTLS)
	}
	if !slices.Contains([]ClientCertMode{ClientCertOptional, ClientCertVerifyCA, ClientCertVerifyFull}, c.ClientCert) {
		problem("proxy.client_cert: must be optional, verify-ca or verify-full, not %q", c.ClientCert)
	}
	if c.ClientCA != "" && c.ClientTLS == TLSDisable {
		problem(`proxy.client_ca: certificates come with TLS only; set proxy.client_tls to "require", or leave client_ca out`)
	}
	if c.ClientCA != "" && c.ClientTLS == TLSAllow && c.ClientCert != ClientCertOptional {
		problem(`proxy.client_cert: %q can be evaded by connecting without TLS; set proxy.client_tls to "require", or client_cert to "optional"`,
			c.ClientCert)
	}
	if !slices.Contains([]AuthMode{AuthRelay, AuthSCRAM}, c.Auth) {
		problem("proxy.auth: must be relay or scram, not %q", c.Auth)
	}
	c.validateServerTLS(problem)
}

func (c Config) validateServerTLS(problem func(format string, args ...any)) {
	modes := []ServerTLSMode{ServerTLSDisable, ServerTLSPrefer, ServerTLSRequire, ServerTLSVerifyCA, ServerTLSVerifyFull}
	strength := slices.Index(modes, c.ServerTLS)
	requires, verifies := strength >= 2, strength >= 3
	if strength < 0 {
		problem("proxy.server_tls: must be disable, prefer, require, verify-ca or verify-full, not %q", c.ServerTLS)
		return
	}
	if strings.Contains(c.Upstream, "unix:") && requires {
		problem(`proxy.server_tls: %q is impossible over a Unix socket, which needs no TLS; set it to "disable", or reach the server by host:port`,
			c.ServerTLS)
	}
	switch c.ServerTLSNegotiation {
	case NegotiationPostgres:
	case NegotiationDirect:
		if !requires {
			problem(`proxy.server_tls_negotiation: "direct" cannot fall back to plain connections; ` +
				`set proxy.server_tls to "require" or stronger, or the negotiation to "postgres"`)
		}
	default:
		problem("proxy.server_tls_negotiation: must be postgres or direct, not %q", c.ServerTLSNegotiation)
	}
	if c.ServerCA != "" && !verifies {
		problem(`proxy.server_ca: %q does not look at it; set proxy.server_tls to "verify-ca" or "verify-full", or leave server_ca out`,
			c.ServerTLS)
	}
	if c.ServerCA == "" && c.ServerTLS == ServerTLSVerifyCA {
		problem(`proxy.server_tls: "verify-ca" needs proxy.server_ca; with the system's authorities only "verify-full" means something`)
	}
	if (c.ServerCert == "") != (c.ServerKey == "") {
		problem("proxy.server_cert: needs proxy.server_key, and the other way round")
	}
	if c.ServerCert != "" && c.ServerTLS == ServerTLSDisable {
		problem(`proxy.server_cert: certificates come with TLS only; set proxy.server_tls to "require" or stronger, or leave server_cert out`)
	}
}
