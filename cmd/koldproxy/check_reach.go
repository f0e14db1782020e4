package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// checkSockets looks whether the addresses to listen at are free. When all of them are taken, a koldproxy with this configuration
// seems to run; when some are, another program has them.
func checkSockets(ctx context.Context, c *config) []finding {
	type socket struct{ key, address string }
	var all []socket
	for _, address := range c.proxyAddresses() {
		if strings.HasPrefix(address, systemdPrefix) {
			return nil // systemd has that one at any time, so nobody can tell
		}
		all = append(all, socket{"proxy.listen", address})
	}
	if c.MQTT.Enabled {
		for _, l := range c.MQTT.listeners() {
			if l.address != "" {
				all = append(all, socket{l.key, l.address})
			}
		}
	}
	if c.HTTP.Listen != "" {
		all = append(all, socket{"http.listen", c.HTTP.Listen})
	}
	var findings []finding
	taken := 0
	for _, s := range all {
		f := finding{Check: s.key, Result: resultOK, Found: s.address + " is free"}
		switch err := tryListen(ctx, s.address); {
		case errors.Is(err, syscall.EADDRINUSE):
			taken++
			f.Found = s.address + " is taken by another program"
			f.problem("end that program, or choose another address")
		case err != nil:
			f.Found = err.Error()
			f.problem("choose an address of this machine, and a port above 1023 unless koldproxy may have a lower one")
		}
		findings = append(findings, f)
	}
	if taken > 0 && taken == len(all) {
		for i, s := range all {
			findings[i] = finding{Check: s.key, Result: resultOK, Found: s.address + " is taken, as every other address: koldproxy seems to run"}
		}
	}
	return findings
}

// tryListen opens a socket for a moment. A Unix socket that nobody serves any more counts as free: serve replaces it.
func tryListen(ctx context.Context, address string) error {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err != nil {
			return nil //nolint:nilerr // nobody is there
		}
		return errors.Join(syscall.EADDRINUSE, conn.Close())
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return ln.Close()
}

// serviceRemedy says what to do when the service connection cannot be made.
func (c *config) serviceRemedy(ctx context.Context, err error, database string) string {
	if isRefusedPlain(err) {
		cc, parseErr := c.pgxConfigWith(map[string]string{"dbname": database, "sslmode": "require"})
		if parseErr == nil {
			conn, other := pgx.ConnectConfig(ctx, cc)
			if other == nil {
				_ = conn.Close(context.WithoutCancel(ctx))
			}
			if isLetIn(other) {
				return "put sslmode=require, or verify-full with sslrootcert, into postgres.dsn: pg_hba.conf lets the role in with TLS"
			}
		}
	}
	return connectRemedy(err, database)
}

// checkDirect finds out whether a connection reaches the server itself: poolers give out process numbers of their own.
func checkDirect(ctx context.Context, conn *pgx.Conn, database string) finding {
	return ask(ctx, conn, finding{Check: "connection", Database: database}, "SELECT pg_backend_pid()::text", func(f *finding, value string) {
		f.Found = "reaches the server"
		if value != fmt.Sprint(conn.PgConn().PID()) {
			f.Found = "postgres.dsn leads through a pooler"
			f.problem("%s", poolerRemedy)
		}
	}, pgx.QueryExecModeSimpleProtocol)
}

const poolerRemedy = "name the server itself in postgres.dsn: a pooler does not replicate, and may not keep sessions apart; for clients, proxy.upstream may name one"

// poolPatience is how long a second session may take to be opened. A pooler in session mode that has no connection left makes it wait.
const poolPatience = 2 * time.Second

// checkPooled finds out whether a pooler separates the statements of a session that goes on: in transaction mode a second session gets
// the server session of a first one that is idle, in session mode it does not.
func (c *config) checkPooled(ctx context.Context, f finding, first *pgx.Conn, address string) finding {
	var own uint32
	if err := first.QueryRow(ctx, "SELECT pg_backend_pid()", pgx.QueryExecModeSimpleProtocol).Scan(&own); err != nil {
		f.Found = err.Error()
		f.problem("see the error")
		return f
	}
	if own == first.PgConn().PID() {
		return f
	}
	f.Found = "can be opened, through a pooler in session mode, server_tls = " + c.Proxy.ServerTLS
	patient, cancel := context.WithTimeout(ctx, poolPatience)
	defer cancel()
	second, err := c.openSession(patient, address, c.Proxy.ServerTLS)
	if err != nil {
		return f
	}
	defer second.Close(context.WithoutCancel(ctx))
	var others uint32
	if err := second.QueryRow(patient, "SELECT pg_backend_pid()", pgx.QueryExecModeSimpleProtocol).Scan(&others); err == nil && others == own {
		f.Found = "go through a pooler that hands one server session to several clients"
		f.problem("put koldproxy between the pooler and the server, or set pool_mode = session (docs/deployment.md): cold pages need one server session for each client")
	}
	return f
}
