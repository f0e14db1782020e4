package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// binariesOf finds a PostgreSQL of a major version where .ci/postgres-versions or the environment puts one.
func binariesOf(t *testing.T, major string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv(localpg.BinsEnv)), "../.tools/pg/"+major+"/bin") {
		if strings.Contains(dir, major) {
			if found, err := localpg.FindBinaries(dir); err == nil {
				return found
			}
		}
	}
	t.Skipf("no PostgreSQL %s here: run .ci/postgres-versions %s; TestProtocol32 plays its part", major, major)
	return ""
}

// TestPostgres18 has a server that really speaks protocol 3.2: long cancel keys, and an answer to what libpq 19 asks.
func TestPostgres18(t *testing.T) {
	t.Parallel()
	cluster, err := localpg.Start(within(t), localpg.Config{BinDir: binariesOf(t, "18")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Stop(context.Background()) })
	p := startProxy(t, func(c *Config, _ *Deps) { c.Upstream = net.JoinHostPort(cluster.Host, strconv.Itoa(cluster.Port)) })
	p.cluster = cluster
	direct := cluster.DSN("postgres", "", "")
	cfg, err := pgx.ParseConfig(direct)
	if err != nil {
		t.Fatal(err)
	}
	start := startupPacketFor("user", cfg.User, "database", "postgres", "_pq_.test_protocol_negotiation", "")
	for _, version := range []uint32{3 << 16, 3<<16 | 1, 3<<16 | 2, 3<<16 | 9999} {
		packet := withVersion(start, version)
		want := firstAnswers(t, direct, [][]byte{packet}, 0)
		if got := firstAnswers(t, p.dsn(t, direct), [][]byte{packet}, 0); got != want || !strings.HasPrefix(got, "v ") {
			t.Errorf("protocol 3.%d:\ngot:\n%s\nwant:\n%s", version&0xffff, indent(got), indent(want))
		}
	}
	w, _ := dialOnly(t, p.dsn(t, direct))
	w.send(t, withVersion(startupPacketFor("user", cfg.User, "database", "postgres"), 3<<16|2), 0)
	key, _ := w.login(t, cfg.Password)
	if len(key) <= 4+minKey {
		t.Fatalf("a key of %d bytes", len(key)-4)
	}
	w.send(t, parseMessage(t, `Q "SELECT pg_sleep(60)"`), 0)
	answer := make(chan []string, 1)
	go func() { answer <- w.until('Z', 1) }()
	for ctx := within(t); ctx.Err() == nil; {
		c, _ := dialOnly(t, p.dsn(t, direct))
		c.send(t, cancelRequest([4]byte(key), key[4:]), 0)
		_ = c.until('?', 1)
		select {
		case got := <-answer:
			if !strings.Contains(strings.Join(got, "\n"), `C="57014"`) {
				t.Errorf("cancelled: %q", got)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
	t.Error("the statement was not cancelled")
}

// TestLargeObjects writes and reads one through the functions that libpq calls with FunctionCall, and pgx with statements.
func TestLargeObjects(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	tx, err := conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	objects := tx.LargeObjects()
	oid, err := objects.Create(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	object, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
	if err != nil {
		t.Fatal(err)
	}
	content := strings.Repeat("0123456789", 300_000)
	if n, err := object.Write([]byte(content)); err != nil || n != len(content) {
		t.Fatalf("%d bytes written, %v", n, err)
	}
	if _, err := object.Seek(1, 0); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, 10)
	if _, err := object.Read(back); err != nil || string(back) != "1234567890" {
		t.Errorf("read %q, %v", back, err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Error(err)
	}
	_, err = conn.Exec(ctx, "SELECT lo_get($1)", oid+1)
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "42704" {
		t.Errorf("an object that is not there: %v", err)
	}
}
