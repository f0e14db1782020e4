package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// soon is how long before its end a certificate is worth a note.
const soon = 14 * 24 * time.Hour

// checkCertificates looks at the TLS files that are configured: whether they can be used, and for how long.
func checkCertificates(c *config) []finding {
	var findings []finding
	for _, pair := range []struct{ check, cert, key string }{
		{"proxy.tls_cert", c.Proxy.TLSCert, c.Proxy.TLSKey},
		{"proxy.server_cert", c.Proxy.ServerCert, c.Proxy.ServerKey},
		{"mqtt.tls_cert", c.MQTT.TLSCert, c.MQTT.TLSKey},
	} {
		if pair.cert == "" {
			continue
		}
		f := finding{Check: pair.check, Result: resultOK}
		if loaded, err := tls.LoadX509KeyPair(pair.cert, pair.key); err != nil {
			f.Found = err.Error()
			f.problem("give %s a PEM file with a certificate and its chain, and the key beside it the private key that belongs to it", pair.check)
		} else {
			f.judgeCertificate(loaded.Leaf, time.Now())
		}
		findings = append(findings, f)
	}
	for _, authority := range []struct{ check, file string }{{"proxy.client_ca", c.Proxy.ClientCA}, {"proxy.server_ca", c.Proxy.ServerCA}} {
		if authority.file == "" {
			continue
		}
		f := finding{Check: authority.check, Result: resultOK}
		raw, err := os.ReadFile(authority.file)
		var certificate *x509.Certificate
		if block, _ := pem.Decode(raw); err == nil && block == nil {
			err = errors.New(authority.file + " has no PEM block")
		} else if err == nil {
			certificate, err = x509.ParseCertificate(block.Bytes)
		}
		if err != nil {
			f.Found = err.Error()
			f.problem("give %s a PEM file with the certificates of authorities", authority.check)
		} else {
			f.judgeCertificate(certificate, time.Now())
		}
		findings = append(findings, f)
	}
	return findings
}

func (f *finding) judgeCertificate(certificate *x509.Certificate, now time.Time) {
	until := certificate.NotAfter
	f.Found = fmt.Sprintf("%s, valid until %s", certificate.Subject, until.UTC().Format(time.DateOnly))
	switch {
	case now.After(until):
		f.Found = fmt.Sprintf("%s has expired on %s", certificate.Subject, until.UTC().Format(time.DateOnly))
		f.problem("renew it; the files are read again when they change")
	case now.Before(certificate.NotBefore):
		f.problem("it is valid from %s on: wait, or set this machine's clock", certificate.NotBefore.UTC().Format(time.DateOnly))
	case now.Add(soon).After(until):
		f.note("renew it; the files are read again when they change")
	}
}

// checkSessions reaches each server as sessions of clients do, with [proxy] upstream and server_tls, and logs in there as the service role.
func checkSessions(ctx context.Context, c *config) []finding {
	if c.Proxy.Listen == "" {
		return nil
	}
	pg, err := c.pgxConfig("")
	if err != nil {
		return []finding{{Check: "sessions", Result: resultProblem, Found: err.Error(), Remedy: "correct postgres.dsn"}}
	}
	var findings []finding
	for address := range strings.SplitSeq(c.proxyConfig(pg).Upstream, ",") {
		address = strings.TrimSpace(address)
		f := finding{Check: "sessions to " + address, Result: resultOK, Found: "can be opened, server_tls = " + c.Proxy.ServerTLS}
		conn, err := c.openSession(ctx, address, c.Proxy.ServerTLS)
		if err != nil {
			f.Found = err.Error()
			f.problem("%s", sessionRemedy(c, err))
			if isRefusedPlain(err) {
				conn, other := c.openSession(ctx, address, "require")
				if other == nil {
					_ = conn.Close(context.WithoutCancel(ctx))
				}
				if isLetIn(other) {
					f.problem(`set proxy.server_tls = "require", or verify-full with proxy.server_ca: pg_hba.conf lets the role in with TLS`)
				}
			}
		} else {
			f = c.checkPooled(ctx, f, conn, address)
			_ = conn.Close(context.WithoutCancel(ctx))
		}
		findings = append(findings, f)
	}
	return findings
}

// isNoEntry says that pg_hba.conf has no line for a connection, isRefusedPlain that it has none without TLS.
func isNoEntry(err error) bool {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pe.Code == "28000" && strings.Contains(pe.Message, "pg_hba.conf")
}

func isRefusedPlain(err error) bool {
	return isNoEntry(err) && strings.Contains(err.Error(), "no encryption")
}

// isLetIn says that pg_hba.conf has a line for a connection that was tried, whatever else was wrong with it.
func isLetIn(err error) bool {
	_, answered := errors.AsType[*pgconn.PgError](err)
	return err == nil || answered && !isNoEntry(err)
}

// openSession opens a session to a server as the service role, with a mode of server_tls.
func (c *config) openSession(ctx context.Context, address, mode string) (*pgx.Conn, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address, mode = "unix", path, "disable"
	}
	host, port := hostAndPort(network, address)
	cc, err := c.pgxConfigWith(map[string]string{
		"host": host, "port": port, "target_session_attrs": "any", "dbname": c.Postgres.Databases[0], "sslmode": mode,
		"sslnegotiation": c.Proxy.ServerTLSNegotiation, "sslrootcert": c.Proxy.ServerCA, "sslcert": c.Proxy.ServerCert, "sslkey": c.Proxy.ServerKey,
	})
	if err != nil {
		return nil, err
	}
	cc.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		dialer := net.Dialer{Timeout: time.Duration(c.Proxy.ConnectTimeout)}
		return dialer.DialContext(ctx, network, address)
	}
	return pgx.ConnectConfig(ctx, cc)
}

func sessionRemedy(c *config, err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	_, refused := errors.AsType[*pgconn.PgError](err)
	switch {
	case errors.As(err, &unknown):
		return "set proxy.server_ca to the PEM file of the authority that has signed the server's certificate"
	case errors.As(err, &name):
		return `name the host as its certificate does, in postgres.dsn or proxy.upstream, or set proxy.server_tls = "verify-ca"`
	case strings.Contains(err.Error(), "refused TLS"):
		return `turn TLS on at the server (ssl = on), or set proxy.server_tls = "disable"`
	case refused:
		return connectRemedy(err, c.Postgres.Databases[0])
	}
	return "correct proxy.upstream (or the host in postgres.dsn), or start the server"
}
