package proxy

import (
	"crypto/tls"
	"fmt"
)

// tlsConn writes records of at most 8 KB of plaintext, as PostgreSQL does: a libpq that waits in select does not see the
// rest of a larger record that its TLS library has read already.
type tlsConn struct{ *tls.Conn }

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

// clientTLS loads the certificate for client connections; nil means that TLS is off.
func (c Config) clientTLS() (*tls.Config, error) {
	if c.ClientTLS == TLSDisable {
		return nil, nil
	}
	certificate, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("load proxy.tls_cert and proxy.tls_key: %w", err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{certificate},
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"postgresql"},
	}, nil
}
