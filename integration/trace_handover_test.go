package integration_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// TestSuccessorsRefuseNobody replaces a koldproxy process by another one on the same port, while clients come and go.
func TestSuccessorsRefuseNobody(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("reuse_port is for Linux")
	}
	s := newService(t, localpg.TestCluster(t), true)
	port := 0
	start := func() *instance {
		return newInstance(t, func(home string, p ports) ([]string, error) {
			if port == 0 {
				port = p.proxy
			}
			config := fmt.Sprintf("[postgres]\ndsn = %q\ndatabases = [%q]\n[proxy]\nlisten = \"127.0.0.1:%d\"\nreuse_port = true\n"+
				"[cold]\nurl = %q\n[mqtt]\nenabled = false\n[http]\nlisten = \"127.0.0.1:%d\"\n",
				s.cluster.DSN(s.database, s.role, s.password), s.database, port, "file://"+s.cold, p.http)
			path := filepath.Join(home, configName)
			return []string{"serve", "--config", path}, os.WriteFile(path, []byte(config), 0o600)
		})
	}
	old := start()
	dsn := s.connect(t, &instance{ports: ports{proxy: port}}).Config().ConnString()
	var served, reset atomic.Int64
	done := make(chan struct{})
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				conn, err := pgconn.Connect(t.Context(), dsn)
				if errors.Is(err, syscall.ECONNRESET) { // only where the kernel cannot hold connections back: see below
					reset.Add(1)
					continue
				}
				if err != nil {
					t.Errorf("a client is refused: %v", err)
					return
				}
				served.Add(1)
				_ = conn.Close(t.Context()) // what it does may meet the end of the old process, as in any session
			}
		})
	}
	rounds := 1 // each starts a process
	if longTests {
		rounds = 3
	}
	for range rounds {
		next := start()
		must(t, old.stop(syscall.SIGTERM))
		if n := reset.Swap(0); n > 0 && !strings.Contains(old.stderr.String(), "cannot hold back connections") {
			t.Errorf("%d clients were reset", n)
		}
		old = next
		for reached := served.Load(); served.Load() < reached+20 && !t.Failed(); {
			time.Sleep(10 * time.Millisecond)
		}
	}
	close(done)
	clients.Wait()
	if n := reset.Load(); n > 0 {
		t.Errorf("%d clients were reset behind the handover", n)
	}
}
