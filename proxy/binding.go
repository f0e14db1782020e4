package proxy

import (
	"bytes"
	"crypto"
	_ "crypto/sha256" // the hashes that certificates are signed with
	_ "crypto/sha512"
	"crypto/x509"
	"slices"

	"github.com/koldproxy/koldproxy"
)

// Channel binding ties a SCRAM exchange to the TLS connection that it happens on, by a hash of the server's certificate
// (tls-server-end-point, RFC 5929). koldproxy is in the middle of that by design, so what it can do depends on both sides:
//
//	client   server   relayed SCRAM
//	plain    any      works; SCRAM-SHA-256-PLUS is taken off the server's list, clients refuse it without TLS
//	TLS      plain    works; the server offers no channel binding
//	TLS      TLS      works for clients that bind if both show the same certificate, and for those that do not bind
//
// With auth = "scram" each side is bound to its own certificate and all of it works.

const bindingType = "tls-server-end-point"

// endPointHash is the channel binding data of a certificate. ok is false for certificates whose signature has no hash of
// its own (Ed25519, RSA-PSS): PostgreSQL and its clients do not agree on what to do with them.
func endPointHash(der []byte) (hash []byte, ok bool) {
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, false
	}
	var h crypto.Hash
	switch certificate.SignatureAlgorithm {
	case x509.MD5WithRSA, x509.SHA1WithRSA, x509.ECDSAWithSHA1, x509.SHA256WithRSA, x509.ECDSAWithSHA256:
		h = crypto.SHA256
	case x509.SHA384WithRSA, x509.ECDSAWithSHA384:
		h = crypto.SHA384
	case x509.SHA512WithRSA, x509.ECDSAWithSHA512:
		h = crypto.SHA512
	default:
		return nil, false
	}
	sum := h.New()
	sum.Write(der)
	return sum.Sum(nil), true
}

// bindingOf is the channel binding data of a side of the session, nil when it cannot be bound.
func bindingOf(side *stream) []byte {
	conn, ok := side.conn.(*tlsConn)
	if !ok {
		return nil
	}
	hash, _ := endPointHash(conn.leaf)
	return hash
}

// mechanisms reads the list of an AuthenticationSASL body; nil if it is damaged.
func mechanisms(body []byte) []string {
	var list []string
	rest := body[4:]
	for {
		name, more, ok := cString(rest)
		switch {
		case !ok:
			return nil
		case len(name) == 0:
			return list
		}
		list = append(list, string(name))
		rest = more
	}
}

func authenticationSASL(list ...string) []byte {
	body := []byte{0, 0, 0, authSASL}
	for _, name := range list {
		body = append(append(body, name...), 0)
	}
	return appendMessage(nil, msgAuth, append(body, 0))
}

// offer is the server's AuthenticationSASL as the client may see it: without channel binding when the server speaks TLS
// and the client does not.
func (s *session) offer(message []byte) []byte {
	_, secureClient := s.front.conn.(*tlsConn)
	list := mechanisms(message[headerLen:])
	if secureClient || !slices.Contains(list, mechanismPlus) {
		return message
	}
	list = slices.DeleteFunc(list, func(name string) bool { return name == mechanismPlus })
	if len(list) == 0 {
		return message
	}
	return authenticationSASL(list...)
}

// checkBinding refuses a client that is about to bind its login to koldproxy's certificate when the server is going to
// compare that with another one.
func (s *session) checkBinding(initial []byte) *koldproxy.Error {
	mechanism, _, _ := cString(initial[headerLen:])
	client, ok1 := s.front.conn.(*tlsConn)
	server, ok2 := s.back.conn.(*tlsConn)
	if string(mechanism) != mechanismPlus || !ok1 || !ok2 || bytes.Equal(client.leaf, server.leaf) {
		return nil
	}
	return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization,
		"SCRAM authentication with channel binding cannot pass through koldproxy, whose certificate is not the server's").
		WithDetail("The client proves the certificate that it sees, and the server compares it with its own.").
		WithHint(`Give koldproxy the server's certificate and key (tls_cert, tls_key), or let it reach the server without TLS, ` +
			`for example over a Unix socket, or set auth = "scram" in section [proxy]. ` +
			`A client that connects with channel_binding=disable is let through.`)
}
