package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// login logs in with a driver and says whether the server side of the session has TLS.
type login struct {
	name string
	in   func(t *testing.T, dsn string) (ssl string, err error)
}

var logins = []login{
	{"pgx", func(t *testing.T, dsn string) (string, error) {
		conn, err := pgx.Connect(within(t), dsn)
		if err != nil {
			return "", err
		}
		defer conn.Close(within(t))
		var ssl bool
		err = conn.QueryRow(within(t), "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&ssl)
		return strconv.FormatBool(ssl), err
	}},
	{"psql", func(t *testing.T, dsn string) (string, error) {
		cmd := exec.CommandContext(within(t), psqlPath(t), "-XAtc", "SELECT ssl::text FROM pg_stat_ssl WHERE pid = pg_backend_pid()", dsn)
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
		return strings.TrimSpace(string(out)), nil
	}},
}

// TestChannelBinding is the table of what can be relayed, and what auth = "scram" adds.
func TestChannelBinding(t *testing.T) {
	t.Parallel()
	cluster := secureCluster(t)
	own := clientTLSWith(t, issued(t, "koldproxy"))
	same := clientTLSWith(t, secure.server)
	unix := func(c *Config, _ *Deps) {
		c.Upstream = fmt.Sprintf("unix:%s/.s.PGSQL.%d", cluster.SocketDir, cluster.Port)
	}
	const (
		fine     = ""
		differs  = "whose certificate is not the server's"
		required = "channel binding" // is missing, says the client
	)
	for _, c := range []struct {
		name                     string
		options                  []option
		sslmode                  string
		serverTLS                bool
		disable, prefer, require string // the error with each channel_binding
	}{
		{"TLS, TLS, other certificate", []option{own, serverTLSMode(ServerTLSRequire)}, "require", true, fine, differs, differs},
		{"TLS, TLS, same certificate", []option{same, serverTLSMode(ServerTLSRequire)}, "require", true, fine, fine, fine},
		{"TLS, plain", []option{own}, "require", false, fine, fine, required},
		{"TLS, Unix socket", []option{own, unix}, "require", false, fine, fine, required},
		{"plain, TLS", []option{serverTLSMode(ServerTLSPrefer)}, "disable", true, fine, fine, required},
		{"scram: TLS, TLS, other certificate", []option{endsSCRAM, own, serverTLSMode(ServerTLSRequire)}, "require", true, fine, fine, fine},
		{"scram: TLS, plain", []option{endsSCRAM, own}, "require", false, fine, fine, fine},
		{"scram: TLS, Unix socket", []option{endsSCRAM, own, unix}, "require", false, fine, fine, fine},
		{"scram: plain, TLS", []option{endsSCRAM, serverTLSMode(ServerTLSRequire)}, "disable", true, fine, fine, required},
		{"scram: plain, plain", []option{endsSCRAM}, "disable", false, fine, fine, required},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := startSecureProxy(t, c.options...)
			for binding, want := range map[string]string{"disable": c.disable, "prefer": c.prefer, "require": c.require} {
				for _, l := range logins {
					ssl, err := l.in(t, p.dsnFor("scram_user", rolePassword, "sslmode", c.sslmode, "channel_binding", binding))
					switch {
					case want == fine && (err != nil || ssl != strconv.FormatBool(c.serverTLS)):
						t.Errorf("%s, channel_binding=%s: ssl %s, %v", l.name, binding, ssl, err)
					case want != fine && (err == nil || !strings.Contains(err.Error(), want)):
						t.Errorf("%s, channel_binding=%s: %v, want %s", l.name, binding, err, want)
					}
					if want != fine {
						continue
					}
					_, err = l.in(t, p.dsnFor("scram_user", "wrong", "sslmode", c.sslmode, "channel_binding", binding))
					if err == nil || !strings.Contains(err.Error(), `password authentication failed for user "scram_user"`) {
						t.Errorf("%s, channel_binding=%s, wrong password: %v", l.name, binding, err)
					}
				}
			}
		})
	}
}

func TestTheWaysOutAreNamed(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire))
	_, err := pgconn.Connect(within(t), p.dsnFor("scram_user", rolePassword, "sslmode", "require"))
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || e.Severity != "FATAL" || e.Code != koldproxy.CodeInvalidAuthorization {
		t.Fatal(err)
	}
	for _, way := range []string{"tls_cert", "Unix socket", `auth = "scram"`, "channel_binding=disable"} {
		if !strings.Contains(e.Hint, way) {
			t.Errorf("%s is not in the hint %q", way, e.Hint)
		}
	}
}

func TestServerTLSModes(t *testing.T) {
	t.Parallel()
	secureCluster(t)
	ca := writeFile(t, filepath.Join(t.TempDir(), "ca.pem"), secure.ca.pem)
	stranger, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	strange := writeFile(t, filepath.Join(t.TempDir(), "ca.pem"), stranger.pem)
	cert, key := issued(t, "cert_user").files(t, t.TempDir())
	mode := func(mode ServerTLSMode, ca string) option {
		return func(c *Config, _ *Deps) { c.ServerTLS, c.ServerCA = mode, ca }
	}
	byName := func(c *Config, _ *Deps) { c.Upstream = strings.Replace(c.Upstream, "127.0.0.1", "localhost", 1) }
	const (
		unreachable = "koldproxy cannot connect to the PostgreSQL server"
		refused     = "pg_hba.conf rejects connection"
	)
	direct := unreachable
	if secureCluster(t).Major >= 17 { // the first one that takes it
		direct = ""
	}
	for _, c := range []struct {
		name    string
		options []option
		user    string
		want    string // an error; empty: it works
	}{
		{"disable", []option{mode(ServerTLSDisable, "")}, "plain_user", ""},
		{"disable, hostssl", []option{mode(ServerTLSDisable, "")}, "tls_user", refused},
		{"prefer, hostssl", []option{mode(ServerTLSPrefer, "")}, "tls_user", ""},
		{"require, hostssl", []option{mode(ServerTLSRequire, "")}, "tls_user", ""},
		{"require, hostnossl", []option{mode(ServerTLSRequire, "")}, "plain_user", refused},
		{"verify-ca", []option{mode(ServerTLSVerifyCA, ca), byName}, "tls_user", ""},
		{"verify-ca, another authority", []option{mode(ServerTLSVerifyCA, strange)}, "tls_user", unreachable},
		{"verify-full", []option{mode(ServerTLSVerifyFull, ca)}, "tls_user", ""},
		{"verify-full, another host", []option{mode(ServerTLSVerifyFull, ca), byName}, "tls_user", unreachable},
		{"verify-full, another authority", []option{mode(ServerTLSVerifyFull, strange)}, "tls_user", unreachable},
		{"verify-full, the system's authorities", []option{mode(ServerTLSVerifyFull, "")}, "tls_user", unreachable},
		{"own certificate", []option{mode(ServerTLSRequire, ""), func(c *Config, _ *Deps) {
			c.ServerCert, c.ServerKey = cert, key
		}}, "cert_user", ""},
		{"no certificate", []option{mode(ServerTLSRequire, "")}, "cert_user", "connection requires a valid client certificate"},
		{"direct", []option{mode(ServerTLSRequire, ""), func(c *Config, _ *Deps) {
			c.ServerTLSNegotiation = NegotiationDirect
		}}, "tls_user", direct},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := startSecureProxy(t, c.options...)
			conn, err := pgconn.Connect(within(t), p.dsnFor(c.user, rolePassword, "sslmode", "disable"))
			if err == nil {
				_ = conn.Close(within(t))
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	t.Run("a server without TLS", func(t *testing.T) {
		t.Parallel()
		for mode, works := range map[ServerTLSMode]bool{ServerTLSPrefer: true, ServerTLSRequire: false} {
			p := startProxy(t, serverTLSMode(mode))
			conn, err := pgconn.Connect(within(t), p.dsn(t, p.cluster.DSN("postgres", "", "")))
			if (err == nil) != works || err != nil && !strings.Contains(err.Error(), unreachable) {
				t.Errorf("%s: %v", mode, err)
			}
			if err == nil {
				_ = conn.Close(within(t))
			}
		}
	})
}

// TestAnswersToSSLRequest has servers, or somebody on the way to them, answer what is not to be believed.
func TestAnswersToSSLRequest(t *testing.T) {
	t.Parallel()
	forged := string(fatal("28000", "send your password to example.org"))
	for name, answer := range map[string]string{
		"an error": forged, "bytes behind S": "S" + forged, "bytes behind N": "N" + forged, "another letter": "X", "nothing": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := gate(t, "", func(conn net.Conn) (net.Conn, bool) {
				_, _ = io.ReadFull(conn, make([]byte, minStartup))
				_, _ = io.WriteString(conn, answer)
				return nil, false
			}, nil)
			p := startProxy(t, func(c *Config, _ *Deps) { c.Upstream, c.ServerTLS = address, ServerTLSPrefer })
			_, err := pgconn.Connect(within(t), p.dsnFor("x", "y", "sslmode", "disable"))
			e, ok := errors.AsType[*pgconn.PgError](err)
			if !ok || e.Code != koldproxy.CodeConnectionFailure || strings.Contains(err.Error(), "example.org") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestDirectTLSToTheServer(t *testing.T) {
	t.Parallel()
	cluster := startProxy(t).cluster
	upstream := net.JoinHostPort(cluster.Host, strconv.Itoa(cluster.Port))
	direct := func(address string) option {
		return func(c *Config, _ *Deps) {
			c.Upstream, c.ServerTLS, c.ServerTLSNegotiation = address, ServerTLSRequire, NegotiationDirect
		}
	}
	p := startProxy(t, direct(tlsGate(t, upstream, alpn)))
	conn := connect(t, p.dsn(t, cluster.DSN("postgres", "", "")))
	cancelled := make(chan error, 1)
	time.AfterFunc(10*time.Millisecond, func() { cancelled <- conn.PgConn().CancelRequest(within(t)) })
	_, err := conn.Exec(within(t), "SELECT pg_sleep(60)") // the gate would not let a plain cancel request through
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled {
		t.Errorf("%v", err)
	}
	if err := <-cancelled; err != nil {
		t.Error(err)
	}
	p = startProxy(t, direct(tlsGate(t, upstream)))
	if _, err := pgconn.Connect(within(t), p.dsn(t, cluster.DSN("postgres", "", ""))); err == nil {
		t.Error("a server that does not speak ALPN was accepted")
	}
}

func TestDirectTLSFromClients(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")))
	conn, err := pgconn.Connect(within(t), p.dsnFor("scram_user", rolePassword, "sslmode", "require", "sslnegotiation", "direct"))
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close(within(t))
	for _, c := range []struct {
		name   string
		config *tls.Config
	}{
		{"without ALPN", &tls.Config{}},
		{"with another protocol", &tls.Config{NextProtos: []string{"h2"}}},
		{"with TLS 1.1", &tls.Config{NextProtos: []string{alpn}, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}},
	} {
		c.config.InsecureSkipVerify = true
		conn, err := tls.Dial("tcp", p.addr.String(), c.config)
		if err != nil {
			continue
		}
		_, _ = conn.Write(startupPacketFor("user", "scram_user"))
		if n, err := conn.Read(make([]byte, 1)); err == nil || n > 0 {
			t.Errorf("%s: it is answered", c.name)
		}
		_ = conn.Close()
	}
	// A request for encryption inside of TLS is none.
	inside, err := tls.Dial("tcp", p.addr.String(), &tls.Config{NextProtos: []string{alpn}, InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	w := &wire{conn: inside, in: newStream(inside)}
	w.send(t, request(codeSSL), 0)
	if got := w.until('Z', 1); !strings.Contains(got[0], `C="0A000"`) {
		t.Errorf("SSLRequest inside of TLS got %q", got)
	}
}

func TestCancelOverTLS(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), endsSCRAM)
	config, err := pgx.ParseConfig(p.dsnFor("scram_user", rolePassword, "sslmode", "require"))
	if err != nil {
		t.Fatal(err)
	}
	cancelled := make(chan error, 1)
	config.OnNotice = func(conn *pgconn.PgConn, _ *pgconn.Notice) { // the statement runs: before, there is nothing to cancel
		go func() { cancelled <- conn.CancelRequest(within(t)) }()
	}
	conn, err := pgx.ConnectConfig(within(t), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	for range 10 {
		_, err := conn.Exec(within(t), "DO $$ BEGIN RAISE NOTICE 'asleep'; PERFORM pg_sleep(60); END $$")
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled {
			t.Fatalf("%v", err)
		}
		if err := <-cancelled; err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(within(t), "SELECT 1"); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificateReload(t *testing.T) {
	t.Parallel()
	first, second, third := issued(t, "first"), issued(t, "second"), issued(t, "third")
	dir := t.TempDir()
	cert, key := first.files(t, dir)
	p := startSecureProxy(t, func(c *Config, _ *Deps) { c.ClientTLS, c.TLSCert, c.TLSKey = TLSRequire, cert, key })
	shown := func() string {
		conn, err := tls.Dial("tcp", p.addr.String(), &tls.Config{NextProtos: []string{alpn}, InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	old := connect(t, p.dsnFor("scram_user", rolePassword, "sslmode", "require"))
	if got := shown(); got != "first" {
		t.Errorf("%s is shown at first", got)
	}
	second.files(t, dir)
	if _, err := p.server.Reload(p.server.current().Config); err != nil {
		t.Error(err)
	}
	if got := shown(); got != "second" {
		t.Errorf("%s is shown after a reload", got)
	}
	writeFile(t, cert, third.cert) // whose key is not there yet
	if _, err := p.server.Reload(p.server.current().Config); err == nil {
		t.Error("a certificate with another key was loaded")
	}
	if got := shown(); got != "second" {
		t.Errorf("%s is shown after a failed reload", got)
	}
	writeFile(t, key, third.key)
	for ctx := within(t); shown() != "third"; { // found without being told
		if ctx.Err() != nil {
			t.Fatal("changed files are not read")
		}
	}
	mustExec(t, old, "SELECT 1")
}

func TestClientCertificates(t *testing.T) {
	t.Parallel()
	stranger, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	strange, err := stranger.issue("trust_user")
	if err != nil {
		t.Fatal(err)
	}
	own := issued(t, "koldproxy")
	ca := writeFile(t, filepath.Join(t.TempDir(), "ca.pem"), secure.ca.pem)
	mine, other := issued(t, "trust_user"), issued(t, "somebody")
	for mode, want := range map[ClientCertMode]map[string]string{
		ClientCertOptional:   {"none": "", "mine": "", "other": "", "strange": "unknown certificate authority"},
		ClientCertVerifyCA:   {"none": "connection requires a valid client certificate", "mine": "", "other": "", "strange": "unknown certificate authority"},
		ClientCertVerifyFull: {"none": "connection requires a valid client certificate", "mine": "", "other": `failed for user "trust_user"`},
	} {
		p := startSecureProxy(t, clientTLSWith(t, own), func(c *Config, _ *Deps) {
			c.ClientTLS, c.ClientCA, c.ClientCert = TLSRequire, ca, mode
		})
		for who, pair := range map[string]keyPair{"none": {}, "mine": mine, "other": other, "strange": strange} {
			parameters := []string{"sslmode", "require"}
			if pair.cert != nil {
				cert, key := pair.files(t, t.TempDir())
				parameters = append(parameters, "sslcert", cert, "sslkey", key)
			}
			expected, known := want[who]
			for _, l := range logins {
				_, err := l.in(t, p.dsnFor("trust_user", "", parameters...))
				if l.name == "psql" && who == "strange" { // OpenSSL has words of its own
					expected = ""
					known = false
				}
				switch {
				case !known && err == nil, known && (err == nil) != (expected == ""):
					t.Errorf("%s, certificate %s, %s: %v", mode, who, l.name, err)
				case known && err != nil && !strings.Contains(err.Error(), expected):
					t.Errorf("%s, certificate %s, %s: %v, want %s", mode, who, l.name, err, expected)
				}
			}
		}
	}
}

// TestSlowHandshakes: whatever it is that does not come, the deadline ends it.
func TestSlowHandshakes(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), func(c *Config, _ *Deps) {
		c.HandshakeTimeout = 200 * time.Millisecond
	})
	for name, c := range map[string]struct{ send, want string }{
		"nothing": {"", ""}, "SSLRequest": {string(request(codeSSL)), "S"}, "a byte of TLS": {"\x16", ""},
		"half a ClientHello": {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", ""},
	} {
		w, _ := dialOnly(t, p.dsnFor("x", "y", "sslmode", "disable"))
		w.send(t, []byte(c.send), 0)
		if got, err := io.ReadAll(w.conn); string(got) != c.want || err != nil && !isReset(err) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	silent := gate(t, "", func(conn net.Conn) (net.Conn, bool) {
		_, _ = io.ReadFull(conn, make([]byte, minStartup))
		_, _ = conn.Write([]byte{'S'})
		_, _ = io.Copy(io.Discard, conn)
		return nil, false
	}, nil)
	p = startProxy(t, func(c *Config, _ *Deps) {
		c.Upstream, c.ServerTLS, c.ConnectTimeout = silent, ServerTLSRequire, 200*time.Millisecond
	})
	_, err := pgconn.Connect(within(t), p.dsnFor("x", "y", "sslmode", "disable"))
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeConnectionFailure {
		t.Errorf("a server that does not shake hands: %v", err)
	}
}

func TestBulkOverTLS(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), endsSCRAM)
	conn := connect(t, p.dsnFor("scram_user", rolePassword, "sslmode", "require"))
	const rows, width = 100_000, 1000
	var out counter
	if _, err := conn.PgConn().CopyTo(within(t), &out, fmt.Sprintf("COPY (SELECT repeat('x', %d) FROM generate_series(1, %d)) TO STDOUT", width, rows)); err != nil {
		t.Fatal(err)
	}
	if out != rows*(width+1) {
		t.Errorf("%d bytes came out", out)
	}
	mustExec(t, conn, "CREATE TEMP TABLE t (v text)")
	line := append(bytes.Repeat([]byte{'y'}, width), '\n')
	in := io.LimitReader(&repeated{line: line}, rows*int64(len(line)))
	if _, err := conn.PgConn().CopyFrom(within(t), in, "COPY t FROM STDIN"); err != nil {
		t.Fatal(err)
	}
	var n, sum int64
	if err := conn.QueryRow(within(t), "SELECT count(*), sum(length(v)) FROM t").Scan(&n, &sum); err != nil || n != rows || sum != rows*width {
		t.Errorf("%d rows, %d bytes went in: %v", n, sum, err)
	}
	cmd := exec.CommandContext(within(t), psqlPath(t), "-XAtqc", fmt.Sprintf("SELECT repeat('x', %d) FROM generate_series(1, %d)", width, rows/10),
		p.dsnFor("scram_user", rolePassword, "sslmode", "require"))
	if got, err := cmd.Output(); err != nil || len(got) != rows/10*(width+1) {
		t.Errorf("psql got %d bytes: %v", len(got), err)
	}
}

type counter int64

func (c *counter) Write(b []byte) (int, error) { *c += counter(len(b)); return len(b), nil }

// repeated is an endless text of one line.
type repeated struct {
	line []byte
	at   int
}

func (r *repeated) Read(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		copied := copy(b[n:], r.line[r.at:])
		r.at = (r.at + copied) % len(r.line)
		n += copied
	}
	return n, nil
}

// TestSessionsOverTLS has the parts of a session that interrupt reading work on TLS: demands and draining.
func TestSessionsOverTLS(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), serverTLSMode(ServerTLSRequire), endsSCRAM, func(c *Config, d *Deps) {
		d.Fulfiller = &fakeFulfiller{}
		c.DrainTimeout = testTimeout
	})
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	dsn := strings.Replace(p.dsn(t, direct), "sslmode=disable", "sslmode=require", 1)
	conn, idle := connect(t, dsn), connect(t, dsn)
	for range 50 {
		var n int64
		if err := conn.QueryRow(within(t), "SELECT sum(n) FROM koldstore.changes_since($1)", 2).Scan(&n); err != nil || n != 62 {
			t.Fatalf("%d, %v", n, err)
		}
	}
	tx, err := conn.Begin(within(t))
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() { p.stop(); close(stopped) }()
	if err := idle.PgConn().WaitForNotification(within(t)); err == nil || !strings.Contains(err.Error(), koldproxy.CodeAdminShutdown) {
		t.Errorf("the idle session gets %v", err)
	}
	if _, err := tx.Exec(within(t), "SELECT 1"); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(within(t)); err != nil {
		t.Error(err)
	}
	<-stopped
}

func TestTLSWritesAreSmall(t *testing.T) {
	t.Parallel()
	client, server := net.Pipe()
	defer client.Close()
	pair, err := tls.X509KeyPair(issuedPair(t))
	if err != nil {
		t.Fatal(err)
	}
	sizes := &recordSizes{Conn: server}
	conn := tls.Server(sizes, &tls.Config{Certificates: []tls.Certificate{pair}, DynamicRecordSizingDisabled: true})
	go func() {
		_, _ = (&tlsConn{Conn: conn}).Write(make([]byte, 100_000))
		_ = conn.Close()
	}()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(secure.ca.pem)
	got, err := io.ReadAll(tls.Client(client, &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"}))
	if err != nil || len(got) != 100_000 {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if sizes.largest > maxTLSWrite+256 || sizes.largest < maxTLSWrite {
		t.Errorf("records of up to %d bytes", sizes.largest)
	}
}

// recordSizes knows the longest write, which is a TLS record.
type recordSizes struct {
	net.Conn
	largest int
}

func (r *recordSizes) Write(b []byte) (int, error) {
	r.largest = max(r.largest, len(b))
	return r.Conn.Write(b)
}

func TestNoTLSOnUnixSockets(t *testing.T) {
	t.Parallel()
	p := startSecureProxy(t, clientTLSWith(t, issued(t, "koldproxy")), func(c *Config, _ *Deps) { c.ClientTLS = TLSRequire })
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := Listen(ctx, "unix:"+filepath.Join(dir, ".s.PGSQL.1"))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(ctx, ln) }()
	conn, err := net.Dial("unix", filepath.Join(dir, ".s.PGSQL.1"))
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{conn: conn, in: newStream(conn)}
	w.send(t, request(codeSSL), 0)
	if err := w.in.fill(bufferSize); err != nil || w.in.buffered()[0] != 'N' {
		t.Errorf("SSLRequest got %q, %v", w.in.buffered(), err)
	}
	w.in.r++
	w.send(t, startupPacketFor("user", "trust_user", "database", "postgres"), 0)
	if got := w.until('Z', 1); got[len(got)-1] != "Z I" {
		t.Errorf("%q", got)
	}
	_ = conn.Close()
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
