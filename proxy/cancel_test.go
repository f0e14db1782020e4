package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// TestCancelHitsOnlyWhatItWasSentFor: once the cancel connection is closed, the next query must be safe.
func TestCancelHitsOnlyWhatItWasSentFor(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	for i := range 100 {
		done := make(chan error, 1)
		go func() { done <- conn.PgConn().CancelRequest(ctx) }()
		_, err := conn.Exec(ctx, fmt.Sprintf("SELECT pg_sleep(%g)", float64(i%3)*0.01))
		if e, ok := errors.AsType[*pgconn.PgError](err); err != nil && (!ok || e.Code != koldproxy.CodeQueryCanceled) {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(ctx, "SELECT 1"); err != nil {
			t.Fatalf("the query after cancel request %d: %v", i, err)
		}
	}
}

func TestCancelStormWithWrongKeys(t *testing.T) {
	t.Parallel()
	for _, forward := range []bool{false, true} {
		p := startProxy(t, func(c *Config, _ *Deps) { c.ForwardUnknownCancels, c.MaxCancels = forward, 4 })
		var storm sync.WaitGroup
		for i := range 100 {
			storm.Go(func() {
				w, _ := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
				w.send(t, cancelRequest([4]byte{0, 0, 1, byte(i)}, []byte{1, 2, 3, byte(i)}), 0)
				if err := w.in.fill(bufferSize); err == nil || len(w.in.buffered()) > 0 {
					t.Errorf("a cancel request was answered with %q", w.in.buffered())
				}
			})
		}
		storm.Wait()
		mustExec(t, connect(t, p.dsn(t, p.cluster.DSN("postgres", "", ""))), "SELECT 1")
	}
}

func TestCancelWhileADemandIsBeingFulfilled(t *testing.T) {
	t.Parallel()
	f := &fakeFulfiller{block: make(chan struct{})}
	p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = f })
	direct := p.cluster.TestDatabase(t)
	p.prepare(t, direct, standIn)
	ctx := within(t)
	conn := connect(t, p.dsn(t, direct))
	for _, begin := range []string{"", "BEGIN"} {
		mustExec(t, conn, begin)
		cancelled := make(chan error, 1)
		go func() {
			<-f.block
			cancelled <- conn.PgConn().CancelRequest(ctx)
		}()
		_, err := conn.Exec(ctx, "SELECT koldstore.changes_since(1)")
		if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled {
			t.Errorf("got %v", err)
		}
		if err := <-cancelled; err != nil {
			t.Error(err)
		}
		if begin == "" {
			mustExec(t, conn, "SELECT 1")
		} else if conn.PgConn().TxStatus() != 'E' {
			t.Errorf("transaction status %c", conn.PgConn().TxStatus())
		}
	}
}

// A server that says nothing does not keep a cancel request from the others.
func TestUnknownCancelsReachEveryServer(t *testing.T) {
	t.Parallel()
	stuck := scripted(t, "")
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.ForwardUnknownCancels, c.Upstream, c.CancelTimeout = true, stuck+","+c.Upstream, time.Second
	})
	conn := connect(t, p.cluster.DSN("postgres", "", "")).PgConn() // past this koldproxy, as through another one
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Exec(within(t), "SELECT pg_sleep(60)").ReadAll()
		ended <- err
	}()
	var process [4]byte
	binary.BigEndian.PutUint32(process[:], conn.PID())
	for {
		client, err := net.Dial("tcp", p.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write(cancelRequest(process, conn.SecretKey())); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, client)
		_ = client.Close()
		select {
		case err := <-ended:
			if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != koldproxy.CodeQueryCanceled {
				t.Errorf("got %v", err)
			}
			return
		default:
		}
	}
}

func TestCancelRequestLayout(t *testing.T) {
	t.Parallel()
	got := cancelRequest([4]byte{1, 2, 3, 4}, bytes.Repeat([]byte{9}, 256))
	if binary.BigEndian.Uint32(got) != uint32(len(got)) || len(got) != 268 {
		t.Errorf("length %d", len(got))
	}
}
