package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// playSystemd is where a koldproxy with the socket's address in NOTIFY_SOCKET tells how it is.
func playSystemd(t *testing.T) *net.UnixConn {
	t.Helper()
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = notify.Close() })
	return notify
}

// told waits until p tells the service manager a text.
func told(p *process, manager *net.UnixConn, text string) {
	p.t.Helper()
	message := make([]byte, 4<<10)
	var all []string
	for {
		_ = manager.SetReadDeadline(time.Now().Add(processTimeout))
		n, err := manager.Read(message)
		if err != nil {
			p.t.Fatalf("the service manager is not told %q but %q (%v)\n%s", text, all, err, p.output())
		}
		if all = append(all, string(message[:n])); strings.Contains(all[len(all)-1], text) {
			return
		}
	}
}

// A socket that the service manager holds (this test plays systemd) is taken over, readiness is told, and a client that
// connects while koldproxy restarts waits instead of being refused.
func TestSocketActivation(t *testing.T) {
	t.Parallel()
	i := install(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	held, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	notify := playSystemd(t)

	serve := func(name string) *process {
		// LISTEN_PID is the process that the sockets are meant for.
		cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`, os.Args[0], "serve", "--config", i.config, "--set", "proxy.listen=systemd:"+name)
		cmd.Env = []string{"LISTEN_FDS=1", "LISTEN_FDNAMES=proxy", "NOTIFY_SOCKET=" + notify.LocalAddr().String()}
		cmd.ExtraFiles = []*os.File{held}
		return startCommand(t, cmd)
	}

	p := serve("proxy")
	told(p, notify, "READY=1")
	cc, err := pgx.ParseConfig(i.dsn)
	if err != nil {
		t.Fatal(err)
	}
	address := ln.Addr().(*net.TCPAddr)
	cc.Host, cc.Port = "127.0.0.1", uint16(address.Port)
	query := func(ctx context.Context) error {
		conn, err := pgx.ConnectConfig(ctx, cc.Copy())
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		return conn.Ping(ctx)
	}
	if err := query(t.Context()); err != nil {
		t.Fatalf("a query through the socket: %v\n%s", err, p.output())
	}
	p.stop(syscall.SIGTERM)

	waiting := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), processTimeout)
	defer cancel()
	go func() { waiting <- query(ctx) }()
	p = serve("proxy")
	told(p, notify, "READY=1")
	if err := <-waiting; err != nil {
		t.Errorf("a client that came in between: %v\n%s", err, p.output())
	}
	p.stop(syscall.SIGTERM)

	p = serve("other")
	if code := p.wait(); code != exitFailed {
		t.Errorf("a socket that is not passed: exit code %d\n%s", code, p.output())
	}
}
