package integration_test

import (
	wire "encoding/binary"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	// attackGrowth is by how many bytes an attack may make the process grow: what its sessions and the bounded buffers take, ten times as
	// much under the race detector.
	attackGrowth = 400 << 20
	// repeatedGrowth is what repeating the attack three times may add. If all that it sends stayed, that would be 300 MB; freed memory is given
	// back late, though, and later under the race detector.
	repeatedGrowth = 200 << 20
)

// TestHostileClientsLeaveRoom measures the process of koldproxy, with event loops and without, while clients say nothing, never finish what
// they begin, never read what they ask for and send requests to cancel what is not there; proxy.TestHostileClients has more of them. A
// bystander goes on working all the time.
func TestHostileClientsLeaveRoom(t *testing.T) {
	if !longTests {
		t.Skip("part of `make test-long`: it has an instance to itself")
	}
	t.Parallel()
	for name, loops := range map[string]string{"event loops": "0", "pumps": "-1"} {
		t.Run(name, func(t *testing.T) {
			inst, err := startInstance(demo, []string{"KOLDPROXY_PROXY_EVENT_LOOPS=" + loops})
			must(t, err)
			t.Cleanup(func() {
				must(t, inst.stop(syscall.SIGTERM))
				must(t, os.RemoveAll(inst.home))
			})
			bystander := inst.connect(t, "demo", nil)
			var sizes []int64
			for range 4 {
				done := make(chan struct{})
				go func() { defer close(done); inst.attack(t) }()
				for answered := 0; answered < 200 || !isClosed(done); answered++ {
					bystander.exec("SELECT 1")
				}
				sizes = append(sizes, inst.resident(t))
			}
			t.Logf("bytes in memory after each attack: %d", sizes)
			if sizes[0] > attackGrowth {
				t.Errorf("the process has %d MB after an attack", sizes[0]>>20)
			}
			if last := sizes[3]; last > sizes[0]+repeatedGrowth {
				t.Errorf("the process has grown from %d to %d MB by repeating the attack", sizes[0]>>20, last>>20)
			}
		})
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// resident is what the process has in memory, in bytes.
func (i *instance) resident(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.cmd.Process.Pid))
	must(t, err)
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	var kilobytes int64
	if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
		t.Fatal(err)
	}
	return kilobytes << 10
}

// attack does all that at a time and leaves when everything is said. It returns with all of its connections closed.
func (i *instance) attack(t *testing.T) {
	t.Helper()
	var open []net.Conn
	defer func() {
		for _, conn := range open {
			_ = conn.Close()
		}
	}()
	dial := func(say []byte) {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", i.ports.proxy))
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = conn.Write(say) // it may have been thrown out
		open = append(open, conn)
	}
	startup, err := (&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersionNumber, Parameters: map[string]string{"user": "demo", "database": database}}).Encode(nil)
	if err != nil {
		t.Error(err)
		return
	}
	for range 300 {
		dial(nil)
		dial(startup[:7])
	}
	for range 20 {
		dial(startup) // and never a password
	}
	for n := range 1000 {
		dial(wire.BigEndian.AppendUint32([]byte("\x00\x00\x00\x10\x04\xd2\x16\x2e\x00\x00\x00\x01"), uint32(n)))
	}
	session := func(say []byte) {
		conn, err := pgconn.Connect(t.Context(), i.dsn("demo", nil))
		if err != nil {
			t.Error(err)
			return
		}
		hijacked, err := conn.Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		open = append(open, hijacked.Conn)
		_, _ = hijacked.Conn.Write(say)
	}
	for range 10 {
		for _, kind := range "QPd" { // a message without end
			session(append(wire.BigEndian.AppendUint32([]byte{byte(kind)}, 1<<29), make([]byte, 3<<20)...))
		}
		ask, err := (&pgproto3.Query{String: "SELECT repeat('x', 100000) FROM generate_series(1, 1000)"}).Encode(nil)
		if err != nil {
			t.Error(err)
		}
		session(ask) // and the answer is never read
	}
}
