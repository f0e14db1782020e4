package proxy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// secure is a PostgreSQL with TLS and roles for each way to log in, shared by the tests that need one.
var secure struct {
	once    sync.Once
	cluster *localpg.Cluster
	ca      *authority
	server  keyPair
	err     error
}

const rolePassword = "geheim"

var secureHBA = []string{
	"hostssl all tls_user all scram-sha-256", "hostnossl all tls_user all reject",
	"hostnossl all plain_user all scram-sha-256", "hostssl all plain_user all reject",
	"hostssl all cert_user all cert",
	"host all md5_user all md5",
	"host all password_user all password",
	"host all trust_user all trust", "local all trust_user trust",
}

const secureRoles = `
CREATE ROLE scram_user LOGIN PASSWORD 'geheim'; CREATE ROLE tls_user LOGIN PASSWORD 'geheim';
CREATE ROLE plain_user LOGIN PASSWORD 'geheim'; CREATE ROLE password_user LOGIN PASSWORD 'geheim';
CREATE ROLE expired_user LOGIN PASSWORD 'geheim' VALID UNTIL '2000-01-01';
CREATE ROLE no_password LOGIN; CREATE ROLE cert_user LOGIN; CREATE ROLE trust_user LOGIN;
SET password_encryption = md5; CREATE ROLE md5_user LOGIN PASSWORD 'geheim'; CREATE ROLE old_user LOGIN PASSWORD 'geheim';
RESET password_encryption`

func secureCluster(t testing.TB) *localpg.Cluster {
	t.Helper()
	secure.once.Do(func() { secure.err = startSecure() })
	if secure.err != nil {
		t.Fatal(secure.err)
	}
	return secure.cluster
}

func startSecure() error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	cluster, err := localpg.Start(ctx, localpg.Config{HBA: secureHBA})
	if err != nil {
		return err
	}
	secure.cluster = cluster
	if secure.ca, err = newAuthority(); err != nil {
		return err
	}
	if secure.server, err = secure.ca.issue("postgres"); err != nil {
		return err
	}
	owner, err := os.Stat(cluster.DataDir)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{"server.crt": secure.server.cert, "server.key": secure.server.key, "root.crt": secure.ca.pem} {
		path := filepath.Join(cluster.DataDir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return err
		}
		stat := owner.Sys().(*syscall.Stat_t)
		if err := os.Chown(path, int(stat.Uid), int(stat.Gid)); err != nil {
			return err
		}
	}
	conn, err := pgx.Connect(ctx, cluster.DSN("postgres", "", ""))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, sql := range []string{
		secureRoles, "ALTER SYSTEM SET ssl_ca_file = 'root.crt'", "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()",
	} {
		if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	for { // until the postmaster has read it
		conn, err := pgx.Connect(ctx, cluster.DSN("postgres", "", "")+"?sslmode=require")
		if err == nil {
			return conn.Close(ctx)
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// keyPair is a certificate and its key in PEM.
type keyPair struct{ cert, key []byte }

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, err
}

// issue makes a certificate for a name and 127.0.0.1.
func (a *authority) issue(name string) (keyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return keyPair{}, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return keyPair{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return keyPair{}, err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	return keyPair{
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}),
	}, err
}

// files writes the pair into files of a folder.
func (k keyPair) files(t testing.TB, dir string) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeFile(t, cert, k.cert)
	writeFile(t, key, k.key)
	return cert, key
}

func writeFile(t testing.TB, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// issued is a fresh certificate of the shared authority.
func issued(t testing.TB, name string) keyPair {
	t.Helper()
	secureCluster(t)
	pair, err := secure.ca.issue(name)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// startSecureProxy starts a proxy in front of the cluster with TLS.
func startSecureProxy(t testing.TB, options ...option) *proxied {
	t.Helper()
	cluster := secureCluster(t)
	p := startProxy(t, append([]option{func(c *Config, d *Deps) {
		c.Upstream = net.JoinHostPort(cluster.Host, strconv.Itoa(cluster.Port))
		d.Verifiers = authid{cluster.DSN("postgres", "", "")}
	}}, options...)...)
	p.cluster = cluster
	return p
}

// authid reads verifiers as the real thing does, over a connection for each.
type authid struct{ dsn string }

func (a authid) Verifier(ctx context.Context, user string) (string, error) {
	conn, err := pgx.Connect(ctx, a.dsn)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	var password string
	err = conn.QueryRow(ctx, "SELECT coalesce(max(rolpassword), '') FROM pg_authid WHERE rolname = $1", user).Scan(&password)
	return password, err
}

// clientTLSWith turns on TLS towards clients.
func clientTLSWith(t testing.TB, pair keyPair) option {
	t.Helper()
	cert, key := pair.files(t, t.TempDir())
	return func(c *Config, _ *Deps) { c.ClientTLS, c.TLSCert, c.TLSKey = TLSAllow, cert, key }
}

func serverTLSMode(mode ServerTLSMode) option { return func(c *Config, _ *Deps) { c.ServerTLS = mode } }
func endsSCRAM(c *Config, _ *Deps)            { c.Auth = AuthSCRAM }

// dsnFor is a DSN through the proxy; parameters are names and values of libpq.
func (p *proxied) dsnFor(user, password string, parameters ...string) string {
	query := url.Values{}
	for i := 0; i < len(parameters); i += 2 {
		query.Set(parameters[i], parameters[i+1])
	}
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(user, password), Host: p.addr.String(), Path: "/postgres", RawQuery: query.Encode(),
	}
	return u.String()
}

// gate is a listener that does something to each connection before it is relayed to an address.
func gate(t testing.TB, upstream string, open func(net.Conn) (client net.Conn, ok bool), dial func() (net.Conn, error)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if dial == nil {
		dial = func() (net.Conn, error) { return net.Dial("tcp", upstream) }
	}
	var wg sync.WaitGroup
	serve := func(raw net.Conn) {
		defer raw.Close()
		client, ok := open(raw)
		if !ok {
			return
		}
		server, err := dial()
		if err != nil {
			return
		}
		defer server.Close()
		wg.Go(func() {
			_, _ = io.Copy(server, client)
			_ = server.Close()
		})
		_, _ = io.Copy(client, server)
		_ = client.Close()
	}
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// tlsGate speaks only TLS, as PostgreSQL 17 understands it, and relays what is inside to a server without TLS.
func tlsGate(t testing.TB, upstream string, protocols ...string) string {
	t.Helper()
	pair, err := tls.X509KeyPair(issuedPair(t))
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: protocols}
	return gate(t, upstream, func(conn net.Conn) (net.Conn, bool) {
		server := tls.Server(conn, config)
		return server, server.Handshake() == nil
	}, nil)
}

func issuedPair(t testing.TB) (cert, key []byte) {
	t.Helper()
	pair := issued(t, "gate")
	return pair.cert, pair.key
}
