package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/koldproxy/koldproxy"
)

// connect opens the session's server connection: it goes through the servers until one accepts the startup packet, which
// may still refuse the client. What the server has answered is in the buffer of back. Nothing of a server that was tried in
// vain reaches the client, except for the last one's refusal.
func (s *session) connect(ctx context.Context, packet startupPacket) error {
	order := s.set.inOrder()
	passes := s.set.TargetSessionAttrs.passes()
	var failed []error
	for i, wanted := range passes {
		for j, e := range order {
			last := i == len(passes)-1 && j == len(order)-1
			err := s.try(ctx, e, wanted, packet, last)
			if err == nil {
				s.target = wanted
				return nil
			}
			if ctx.Err() != nil {
				return &failure{sideServer, "dial", ctx.Err()}
			}
			failed = append(failed, fmt.Errorf("%s: %w", e.address, err))
		}
	}
	if len(failed) == 1 {
		return errors.Unwrap(failed[0])
	}
	return &failure{sideServer, "dial", errors.Join(failed...)}
}

// errWrongState means that a server is not what target_session_attrs asks for.
var errWrongState = errors.New("the server is not of the kind that proxy.target_session_attrs asks for")

// errNotYet means that a server takes no connections at the moment.
var errNotYet = errors.New("the server takes no connections now")

// try opens the server connection to one server. last says that there is none left to try, so that what it answers is final.
func (s *session) try(ctx context.Context, e endpoint, wanted SessionAttrs, packet startupPacket, last bool) error {
	if wanted != SessionAny {
		state, err := s.server.states.of(ctx, e, s.set.ConnectTimeout)
		if err != nil {
			return &failure{sideServer, "dial", err}
		}
		if !wanted.accepts(state) {
			return errWrongState
		}
	}
	until := time.Now().Add(s.set.ConnectTimeout)
	conn, err := s.server.dial(ctx, s.set, e)
	if err != nil {
		return err
	}
	_ = conn.SetDeadline(earlier(until, s.deadline))
	back := newStream(conn)
	if err := s.offerTo(back, packet, last); err != nil {
		_ = conn.Close()
		return err
	}
	_ = conn.SetDeadline(s.deadline)
	s.mu.Lock()
	s.back = back
	// A name may stand for several addresses: a cancel request has to go to this one.
	s.endpoint = endpoint{network: e.network, address: conn.RemoteAddr().String(), host: e.host}
	s.tried = e
	s.mu.Unlock()
	return nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// offerTo sends the startup packet to a server. If there is another one left to try it waits for the first message, and one
// that says "not now" is an error; so is none within ConnectTimeout, since a server may take connections and be stuck.
func (s *session) offerTo(back *stream, packet startupPacket, last bool) error {
	n, err := back.conn.Write(packet.raw)
	s.server.metrics.toServer.Add(float64(n))
	if err != nil {
		return &failure{sideServer, "write", err}
	}
	if last || packet.code>>16 != protocolMajor {
		return nil
	}
	message, err := next(back, maxAuthentication, back.more(maxAuthentication))
	if err != nil {
		return &failure{sideServer, "read", err}
	}
	if message[0] != msgError {
		return nil
	}
	if fields, ok := parseFields(message[headerLen:]); ok && fields.get(fieldCode) == koldproxy.CodeCannotConnectNow {
		return fmt.Errorf("%w: %s", errNotYet, fields.get(fieldMessage))
	}
	return nil
}

// notConnected tells the client that there is no server for it.
func (s *session) notConnected(err error) {
	s.note(err)
	if errors.Is(err, errWrongState) {
		_ = s.refusedBecause("session_attrs", s.wrongState())
		return
	}
	_ = s.toClient(fatal(koldproxy.CodeConnectionFailure, "koldproxy cannot connect to the PostgreSQL server"))
}

// wrongState is what a client is told when there is no server of the right kind. It may try again: servers change.
func (s *session) wrongState() *koldproxy.Error {
	return koldproxy.Errorf(koldproxy.CodeCannotConnectNow, "koldproxy has no server for this session").
		WithDetail("None of them is at the moment what proxy.target_session_attrs = \"" + string(s.set.TargetSessionAttrs) + "\" asks for.")
}

// dial opens a connection to a server, encrypted as configured.
func (s *Server) dial(ctx context.Context, set *settings, e endpoint) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, set.ConnectTimeout)
	defer cancel()
	dialer := net.Dialer{KeepAliveConfig: set.keepAlive()}
	conn, err := dialer.DialContext(ctx, e.network, e.address)
	if err != nil {
		return nil, &failure{sideServer, "dial", err}
	}
	setUserTimeout(conn, set.userTimeout())
	secure, err := s.encryptServer(ctx, set, conn, e)
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
func (c Config) tuneClient(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(c.keepAlive()) // the connection works without
		setUserTimeout(conn, c.userTimeout())
	}
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

// peerRefusal judges a server that asks a client for no proof over a Unix socket. There it judges by peer, that is
// koldproxy's own operating system user, or by trust, that is nobody: either way each client could be any user. Over TCP the
// server sees koldproxy's address, which its operator wrote down.
func (s *session) peerRefusal() *koldproxy.Error {
	if s.endpoint.network != "unix" || s.certified || s.set.AllowPeer {
		return nil
	}
	return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "koldproxy refuses the session: the server has asked user %q for no proof of identity", s.user).
		WithDetail("Over a Unix socket pg_hba.conf with peer or trust lets every client of koldproxy be any user that koldproxy may be.").
		WithHint(strings.Join([]string{
			"Use scram-sha-256 on the line for local connections in pg_hba.conf,",
			`require client certificates with proxy.client_cert = "verify-full",`,
			"or set proxy.allow_peer = true if all clients may pass.",
		}, " "))
}
