package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/koldproxy/koldproxy"
)

// alpn is the protocol name under which PostgreSQL is known to TLS.
const alpn = "postgresql"

// tlsConn writes records of at most 8 KB of plaintext, as PostgreSQL does: a libpq that waits in select does not see the
// rest of a larger record that its TLS library has read already.
type tlsConn struct {
	*tls.Conn
	socket *socket
	// leaf is the certificate that the server end of this connection has shown, in DER: koldproxy's on a client's
	// connection, PostgreSQL's on the other side.
	leaf []byte
}

const maxTLSWrite = 8 << 10

func (c *tlsConn) Write(b []byte) (int, error) {
	written := 0
	for {
		n, err := c.Conn.Write(b[written:min(len(b), written+maxTLSWrite)])
		written += n
		if err != nil || written >= len(b) {
			return written, err
		}
	}
}

// clientPolicy is what a client has to do about encryption before it may start a session.
type clientPolicy struct {
	config *tls.Config // nil: there is no TLS
	mode   TLSMode
	cert   ClientCertMode // empty: certificates are not asked for
}

// policyFor is the policy for a connection. As with PostgreSQL there is no TLS on Unix sockets.
func (s *Server) policyFor(conn net.Conn, set *settings) clientPolicy {
	if conn.LocalAddr().Network() == "unix" {
		return clientPolicy{mode: TLSDisable}
	}
	p := clientPolicy{config: s.certs.current().client, mode: set.ClientTLS}
	if set.ClientCA != "" {
		p.cert = set.ClientCert
	}
	return p
}

// certifies says whether the client's certificate proves that it is the user.
func (p clientPolicy) certifies(conn net.Conn, user string) bool {
	secure, encrypted := conn.(*tlsConn)
	if !encrypted || p.cert != ClientCertVerifyFull {
		return false
	}
	chains := secure.ConnectionState().VerifiedChains
	return len(chains) > 0 && chains[0][0].Subject.CommonName == user
}

// errHandshake marks TLS handshakes that failed; the client has its alert.
var errHandshake = errors.New("TLS handshake")

// encrypt makes the handshake with the client. What the stream has buffered is the beginning of the client's handshake.
func (p clientPolicy) encrypt(in *stream) error {
	raw := &socket{Conn: in.conn, first: bytes.Clone(in.buffered())}
	in.r, in.w = 0, 0
	conn := tls.Server(raw, p.config)
	if err := conn.Handshake(); err != nil { // bounded by the connection's deadline
		return fmt.Errorf("%w: %w", errHandshake, err)
	}
	in.conn = &tlsConn{Conn: conn, socket: raw, leaf: p.config.Certificates[0].Certificate[0]}
	return nil
}

// encryptDirectly serves a client that begins with TLS instead of asking for it. It must name the protocol: that is what
// keeps a browser or a mail client from being led here. Without TLS it is closed without a word, as by PostgreSQL.
func (p clientPolicy) encryptDirectly(in *stream) error {
	if p.config == nil {
		return errClosed
	}
	if err := p.encrypt(in); err != nil {
		return err
	}
	if conn, ok := in.conn.(*tlsConn); !ok || conn.ConnectionState().NegotiatedProtocol != alpn {
		return fmt.Errorf("%w: direct TLS without ALPN %q", errHandshake, alpn)
	}
	return nil
}

// permits judges a startup packet by how it came. The errors are PostgreSQL's.
func (p clientPolicy) permits(conn net.Conn, packet startupPacket) error {
	secure, encrypted := conn.(*tlsConn)
	if p.mode == TLSRequire && !encrypted {
		return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "koldproxy accepts encrypted connections only").
			WithHint("Connect with sslmode=require or stronger.")
	}
	if !encrypted || p.cert == "" || p.cert == ClientCertOptional {
		return nil
	}
	chains := secure.ConnectionState().VerifiedChains
	if len(chains) == 0 {
		return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "connection requires a valid client certificate")
	}
	if user := parseStartup(packet).user; p.cert == ClientCertVerifyFull && !p.certifies(conn, user) {
		return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "certificate authentication failed for user %q", user)
	}
	return nil
}

// encryptServer makes a fresh connection to the server what ServerTLS asks for. Nothing that the server says in plain
// before that is believed or passed on: anybody on the way could have said it.
func (s *Server) encryptServer(ctx context.Context, set *settings, conn net.Conn, e endpoint) (net.Conn, error) {
	if set.ServerTLS == ServerTLSDisable || e.network == "unix" {
		return conn, nil
	}
	direct := set.ServerTLSNegotiation == NegotiationDirect
	if !direct {
		answer, err := requestSSL(ctx, conn)
		if err != nil {
			return nil, &failure{sideServer, "handshake", err}
		}
		if answer == 'N' {
			if set.ServerTLS == ServerTLSPrefer {
				return conn, nil
			}
			return nil, &failure{sideServer, "handshake", errors.New("the server does not accept TLS, which proxy.server_tls requires")}
		}
	}
	config := s.certs.current().server.Clone()
	config.ServerName = e.host
	raw := &socket{Conn: conn}
	secure := tls.Client(raw, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, &failure{sideServer, "handshake", err}
	}
	state := secure.ConnectionState()
	if direct && state.NegotiatedProtocol != alpn {
		return nil, &failure{sideServer, "handshake", fmt.Errorf("the server accepts direct TLS but not ALPN %q", alpn)}
	}
	return &tlsConn{Conn: secure, socket: raw, leaf: state.PeerCertificates[0].Raw}, nil
}

// requestSSL asks the server for TLS and returns its answer, S or N. The answer is one byte; more than that, ahead of what
// it answers, is not from the server.
func requestSSL(ctx context.Context, conn net.Conn) (byte, error) {
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	release := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(longAgo) })
	defer release()
	request := binary.BigEndian.AppendUint32([]byte{0, 0, 0, minStartup}, codeSSL)
	if _, err := conn.Write(request); err != nil {
		return 0, err
	}
	var answer [2]byte // room for what must not be there
	n, err := conn.Read(answer[:])
	switch {
	case n == 0:
		return 0, fmt.Errorf("no answer to SSLRequest: %w", err)
	case answer[0] == msgError:
		return 0, errors.New("the server answers SSLRequest with an error")
	case answer[0] != 'S' && answer[0] != 'N':
		return 0, fmt.Errorf("the server answers SSLRequest with %q", answer[:1])
	case n > 1:
		return 0, errors.New("the server sent unencrypted data behind its answer to SSLRequest")
	}
	if !release() {
		return 0, ctx.Err()
	}
	return answer[0], conn.SetDeadline(time.Time{})
}

// chainOnly verifies that a certificate comes from one of roots, and no name.
func chainOnly(roots *x509.CertPool) func(tls.ConnectionState) error {
	return func(state tls.ConnectionState) error {
		options := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool()}
		for _, c := range state.PeerCertificates[1:] {
			options.Intermediates.AddCert(c)
		}
		_, err := state.PeerCertificates[0].Verify(options)
		return err
	}
}
