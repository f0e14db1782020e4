package proxy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func TestPgx(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn+"CREATE TABLE orders (id int PRIMARY KEY, total int)")
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			ctx := within(t)
			cfg, err := pgx.ParseConfig(p.dsn(t, direct))
			if err != nil {
				t.Fatal(err)
			}
			cfg.DefaultQueryExecMode = mode
			conn, err := pgx.ConnectConfig(ctx, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(ctx)
			for range 3 {
				rows, err := conn.Query(ctx, "SELECT n FROM koldstore.changes_since($1)", 2)
				if err != nil {
					t.Fatal(err)
				}
				got, err := pgx.CollectRows(rows, pgx.RowTo[int64])
				if err != nil || !slices.Equal(got, []int64{10, 11, 20, 21}) {
					t.Errorf("changes_since: %v, %v", got, err)
				}
			}
			err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
				var n int64
				if err := tx.QueryRow(ctx, "SELECT sum(n) FROM koldstore.changes_since($1)", 1).Scan(&n); err != nil || n != 21 {
					return fmt.Errorf("sum %d: %w", n, err)
				}
				tag, err := tx.Exec(ctx, "CREATE STREAM s ON orders WHEN (total > 1)")
				if err == nil && tag.String() != "CREATE STREAM" {
					err = fmt.Errorf("tag is %s", tag)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			if tag, err := conn.Exec(ctx, "DROP STREAM s"); err != nil || tag.String() != "DROP STREAM" {
				t.Errorf("%s, %v", tag, err)
			}
		})
	}
}

// psqlPath finds psql, which need not be where the server's binaries are.
func psqlPath(t *testing.T) string {
	t.Helper()
	if path, err := exec.LookPath("psql"); err == nil {
		return path
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/psql")
	if len(found) == 0 {
		t.Fatal("psql is not installed")
	}
	return found[len(found)-1]
}

func TestPsql(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	script := `CREATE TABLE t (i int, v text);
\copy t from stdin
1	one
2	two
\.
\copy t to stdout
SELECT n FROM koldstore.changes_since(1);
\bind 2
SELECT n FROM koldstore.changes_since($1) \g
CREATE STREAM s ON t WHEN (i > 1);
DROP STREAM s;
CREATE STREAM s ON t;
\d t
`
	cmd := exec.CommandContext(within(t), psqlPath(t), "-X", "-At", p.dsn(t, direct))
	cmd.Stdin = strings.NewReader(strings.ReplaceAll(script, "\\bind 2\nSELECT n FROM koldstore.changes_since($1) \\g\n", ""))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatal(err, string(out))
	}
	want := `CREATE TABLE
COPY 2
1	one
2	two
10
11
CREATE STREAM
DROP STREAM
ERROR:  WHEN is required in CREATE STREAM
LINE 1: CREATE STREAM s ON t;
                            ^
`
	if !strings.HasPrefix(string(out), want) {
		t.Errorf("got:\n%s\nwant:\n%s", out, want)
	}
}

func TestOtherDatabasesArePassedThrough(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) { c.Databases = []string{"another"} })
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	_, err := conn.Exec(within(t), "CREATE STREAM s ON t")
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Message != `syntax error at or near "STREAM"` {
		t.Errorf("%v", err)
	}
}

func TestUnixSockets(t *testing.T) {
	t.Parallel()
	cluster := startProxy(t).cluster
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.Upstream = fmt.Sprintf("unix:%s/.s.PGSQL.%d", cluster.SocketDir, cluster.Port)
	})
	dir := t.TempDir()
	path := filepath.Join(dir, ".s.PGSQL.1")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	_ = stale.Close()
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := Listen(ctx, "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(ctx, "unix:"+path); err == nil {
		t.Error("a socket in use was taken over")
	}
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(ctx, ln) }()
	cfg, err := pgx.ParseConfig(cluster.DSN("postgres", "", ""))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Host, cfg.Port = dir, 1
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, conn, "SELECT 1")
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	_ = conn.Close(context.Background())
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestClientTLS(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	p := startProxy(t, func(c *Config, _ *Deps) { c.ClientTLS, c.TLSCert, c.TLSKey = TLSRequire, cert, key })
	direct := p.cluster.DSN("postgres", "", "")
	_, err := pgconn.Connect(within(t), p.dsn(t, direct))
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "28000" {
		t.Errorf("a plain session: %v", err)
	}
	conn := connect(t, strings.Replace(p.dsn(t, direct), "sslmode=disable", "sslmode=require", 1))
	var size int
	if err := conn.QueryRow(within(t), "SELECT length(repeat('x', 1000000))").Scan(&size); err != nil {
		t.Error(err)
	}
	if err := conn.PgConn().CancelRequest(within(t)); err != nil {
		t.Errorf("cancel over TLS: %v", err)
	}
	w, cfg := dialOnly(t, p.dsn(t, direct))
	w.send(t, joined(request(codeSSL), startupPacketFor("user", cfg.User)), 0)
	if err := w.in.fill(bufferSize); err != nil || w.in.buffered()[0] != 'S' {
		t.Fatal("SSLRequest is not answered with S")
	}
	w.in.r++
	if got := w.until('Z', 1); !strings.Contains(got[0], `C="08P01"`) {
		t.Errorf("bytes stuffed before TLS got %q", got)
	}
}

func selfSigned(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, typ string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", keyDER)
}

// TestRoles: what the server does for walsenders is not looked at.
func TestReplicationSessionsPass(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	dsn := p.dsn(t, p.cluster.TestDatabase(t)) + "&replication=database"
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	results, err := conn.Exec(ctx, "IDENTIFY_SYSTEM").ReadAll()
	if err != nil || len(results[0].Rows) != 1 {
		t.Errorf("%v", err)
	}
	if _, err := conn.Exec(ctx, "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput").ReadAll(); err != nil {
		t.Error(err)
	}
}
