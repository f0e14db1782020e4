package main

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/proxy"
)

// proxySection is section [proxy].
type proxySection struct {
	// Listen is where clients connect: host:port, or unix:/path with the path of the socket itself (clients look for
	// /dir/.s.PGSQL.6543), or systemd:NAME for a socket that systemd holds; several separated by commas. Empty turns the
	// proxy off.
	Listen string `toml:"listen"`
	// ReusePort lets a second koldproxy listen at the same addresses (those of [mqtt] and [http] too), so that it can take
	// over without a refused connection. Linux and TCP only.
	ReusePort bool `toml:"reuse_port"`
	// Upstream are the servers: host:port or unix:/path, several separated by commas, which are tried one after the other.
	// Empty: those of postgres.dsn.
	Upstream string `toml:"upstream"`
	// TargetSessionAttrs is what kind of server sessions go to, as in libpq: any, read-write, read-only, primary, standby or
	// prefer-standby. LoadBalanceHosts is disable (servers are tried as they are listed) or random.
	TargetSessionAttrs string `toml:"target_session_attrs"`
	LoadBalanceHosts   string `toml:"load_balance_hosts"`
	// AllowPeer lets clients in whom a server on a Unix socket asks for no proof of identity (peer or trust in pg_hba.conf).
	AllowPeer bool `toml:"allow_peer"`
	// ClientTLS is disable, allow (the client decides) or require, for clients over TCP. TLSCert and TLSKey are PEM files
	// with what they are shown. All TLS files are read again when they change, and at SIGHUP.
	ClientTLS string `toml:"client_tls"`
	TLSCert   string `toml:"tls_cert"`
	TLSKey    string `toml:"tls_key"`
	// ClientCA is a PEM file with the authorities of client certificates; empty: clients are not asked for any.
	// ClientCert is optional (one that is shown must be valid), verify-ca (one is required) or verify-full (and its
	// common name must be the user).
	ClientCA   string `toml:"client_ca"`
	ClientCert string `toml:"client_cert"`
	// Auth is relay (the server authenticates the client) or scram (koldproxy checks SCRAM passwords with the verifiers
	// in pg_authid, which the service role must be able to read). See docs/security.md for when scram is needed.
	Auth string `toml:"auth"`
	// ServerTLS protects connections to the server as libpq's sslmode does: disable, prefer, require, verify-ca or
	// verify-full. ServerTLSNegotiation is postgres, or direct for PostgreSQL 17 and later.
	ServerTLS            string `toml:"server_tls"`
	ServerTLSNegotiation string `toml:"server_tls_negotiation"`
	// ServerCA is a PEM file with the authorities of the server's certificate; verify-full trusts the system's without it.
	ServerCA string `toml:"server_ca"`
	// ServerCert and ServerKey are PEM files with a certificate to show to the server, for all users.
	ServerCert string `toml:"server_cert"`
	ServerKey  string `toml:"server_key"`
	// MaxConnections bounds the sessions, MaxConnectionsPerAddress those of one client address (0: no limit), MaxHandshakes
	// the clients that have not said anything yet, MaxCancels the cancel requests that are forwarded at a time.
	MaxConnections           int `toml:"max_connections"`
	MaxConnectionsPerAddress int `toml:"max_connections_per_address"`
	MaxHandshakes            int `toml:"max_handshakes"`
	MaxCancels               int `toml:"max_cancels"`
	// ForwardUnknownCancels forwards cancel requests with keys that koldproxy has not seen, for several koldproxys behind
	// one address.
	ForwardUnknownCancels bool `toml:"forward_unknown_cancels"`
	// ProxyProtocolFrom are networks, addresses or "unix" whose connections begin with a PROXY protocol header.
	ProxyProtocolFrom []string `toml:"proxy_protocol_from"`
	// ApplicationNameAddHost appends the client's address to application_name.
	ApplicationNameAddHost bool `toml:"application_name_add_host"`
	// HandshakeTimeout is the time for everything from accept to the first ReadyForQuery; ConnectTimeout bounds opening a
	// connection to one server, CancelTimeout the forwarding of a cancel request.
	HandshakeTimeout duration `toml:"handshake_timeout"`
	ConnectTimeout   duration `toml:"connect_timeout"`
	CancelTimeout    duration `toml:"cancel_timeout"`
	// DrainTimeout is how long open transactions may go on after SIGTERM.
	DrainTimeout duration `toml:"drain_timeout"`
	// KeepAlive is the time between TCP keepalive probes on both sides; a peer that is silent for four of them is gone. 0
	// turns this off.
	KeepAlive duration `toml:"keepalive"`
	// EventLoops is how many event loops carry the sessions, on Linux: 0 is one per four processors, -1 none (each session has
	// goroutines of its own). BusyPoll is how long a loop without work looks for some before it sleeps: processor time for
	// latency; 0 is not at all.
	EventLoops int      `toml:"event_loops"`
	BusyPoll   duration `toml:"busy_poll"`
	// InspectBytes is the largest statement that is searched for statements of koldproxy's; HoldBytes bounds an answer that
	// is held back while cold rows are fetched.
	InspectBytes int `toml:"inspect_bytes"`
	HoldBytes    int `toml:"hold_bytes"`
}

// defaultProxySection takes the defaults from package proxy.
func defaultProxySection() proxySection {
	pc := proxy.DefaultConfig()
	return proxySection{
		Listen:               "127.0.0.1:6543",
		TargetSessionAttrs:   string(pc.TargetSessionAttrs),
		LoadBalanceHosts:     string(pc.LoadBalanceHosts),
		ClientTLS:            string(pc.ClientTLS),
		ClientCert:           string(pc.ClientCert),
		Auth:                 string(pc.Auth),
		ServerTLS:            string(pc.ServerTLS),
		ServerTLSNegotiation: string(pc.ServerTLSNegotiation),
		MaxConnections:       pc.MaxConnections,
		MaxHandshakes:        pc.MaxHandshakes,
		MaxCancels:           pc.MaxCancels,
		HandshakeTimeout:     duration(pc.HandshakeTimeout),
		ConnectTimeout:       duration(pc.ConnectTimeout),
		CancelTimeout:        duration(pc.CancelTimeout),
		DrainTimeout:         duration(3 * time.Second), // SIGTERM ends the process within five seconds
		KeepAlive:            duration(pc.KeepAlive),
		EventLoops:           pc.EventLoops,
		BusyPoll:             duration(pc.BusyPoll),
		InspectBytes:         pc.InspectBytes,
		HoldBytes:            pc.HoldBytes,
	}
}

// proxyConfig is what package proxy has to know, in front of the servers of a service connection unless others are named.
func (c *config) proxyConfig(pg *pgx.ConnConfig) proxy.Config {
	p := c.Proxy
	pc := proxy.Config{
		Upstream:                 p.Upstream,
		TargetSessionAttrs:       proxy.SessionAttrs(p.TargetSessionAttrs),
		LoadBalanceHosts:         proxy.LoadBalance(p.LoadBalanceHosts),
		AllowPeer:                p.AllowPeer,
		ServerTLS:                proxy.ServerTLSMode(p.ServerTLS),
		ServerTLSNegotiation:     proxy.Negotiation(p.ServerTLSNegotiation),
		ServerCA:                 p.ServerCA,
		ServerCert:               p.ServerCert,
		ServerKey:                p.ServerKey,
		ClientTLS:                proxy.TLSMode(p.ClientTLS),
		TLSCert:                  p.TLSCert,
		TLSKey:                   p.TLSKey,
		ClientCA:                 p.ClientCA,
		ClientCert:               proxy.ClientCertMode(p.ClientCert),
		Auth:                     proxy.AuthMode(p.Auth),
		MaxConnections:           p.MaxConnections,
		MaxConnectionsPerAddress: p.MaxConnectionsPerAddress,
		MaxHandshakes:            p.MaxHandshakes,
		MaxCancels:               p.MaxCancels,
		ForwardUnknownCancels:    p.ForwardUnknownCancels,
		HandshakeTimeout:         time.Duration(p.HandshakeTimeout),
		ConnectTimeout:           time.Duration(p.ConnectTimeout),
		CancelTimeout:            time.Duration(p.CancelTimeout),
		DrainTimeout:             time.Duration(p.DrainTimeout),
		KeepAlive:                time.Duration(p.KeepAlive),
		EventLoops:               p.EventLoops,
		BusyPoll:                 time.Duration(p.BusyPoll),
		ProxyProtocolFrom:        p.ProxyProtocolFrom,
		ApplicationNameAddHost:   p.ApplicationNameAddHost,
		InspectBytes:             p.InspectBytes,
		HoldBytes:                p.HoldBytes,
	}
	if pc.Upstream == "" {
		pc.Upstream = upstreamOf(pg)
	}
	return pc
}

// upstreamOf lists the servers of a service connection. pgx has an entry for each server and each way to encrypt.
func upstreamOf(pg *pgx.ConnConfig) string {
	var list []string
	add := func(host string, port uint16) {
		network, address := pgconn.NetworkAddress(host, port)
		if network == "unix" {
			address = "unix:" + address
		}
		if !slices.Contains(list, address) {
			list = append(list, address)
		}
	}
	add(pg.Host, pg.Port)
	for _, f := range pg.Fallbacks {
		add(f.Host, f.Port)
	}
	return strings.Join(list, ",")
}

// hostAndPort splits the address of a server as pgx wants it, which knows Unix sockets by their folder.
func hostAndPort(network, address string) (host, port string) {
	if network == "unix" {
		if folder, number, ok := strings.Cut(address, "/.s.PGSQL."); ok {
			if _, err := strconv.ParseUint(number, 10, 16); err == nil {
				return folder, number
			}
		}
		return address, "5432"
	}
	host, port, _ = net.SplitHostPort(address) // it was made by net.JoinHostPort
	return host, port
}
