package mqtt

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/rs/zerolog"
)

// mosquitto runs a broker that is not ours until stop is called.
func mosquitto(t *testing.T, address string) (stop func()) {
	t.Helper()
	binary := "/usr/sbin/mosquitto"
	if path, err := exec.LookPath("mosquitto"); err == nil {
		binary = path
	}
	folder := t.TempDir()
	host, port, _ := net.SplitHostPort(address)
	config := filepath.Join(folder, "mosquitto.conf")
	passwords := filepath.Join(folder, "passwords")
	if out, err := exec.Command("mosquitto_passwd", "-b", "-c", passwords, "relay", "se:c/ret").CombinedOutput(); err != nil {
		t.Fatalf("mosquitto_passwd: %v %s", err, out)
	}
	text := fmt.Sprintf("listener %s %s\nallow_anonymous false\npassword_file %s\npersistence false\nuser root\n", port, host, passwords)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "-c", config)
	cmd.Stderr = io.Discard
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(stop)
	eventually(t, "mosquitto listens", func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return stop
}

// freeAddress is one that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// runRelay runs a relay until the end of the test.
func runRelay(t *testing.T, cfg RelayConfig) (*Relay, *lockedBuffer) {
	t.Helper()
	log := new(lockedBuffer)
	relay, err := NewRelay(cfg, zerolog.New(log), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return relay, log
}

// Events reach a broker of somebody else's under a prefix of their own. While it is away they wait, in bounds, and what
// does not fit is counted; nothing blocks; afterwards it goes on by itself.
func TestRelay(t *testing.T) {
	t.Parallel()
	address := freeAddress(t)
	cfg := DefaultRelayConfig("mqtt://relay:" + "se%3Ac%2Fret" + "@" + address)
	cfg.Prefix, cfg.Queue, cfg.RetryMax = "site/db", 100, 200*time.Millisecond
	relay, log := runRelay(t, cfg)
	eventually(t, "it says that there is no broker", func() bool { return strings.Contains(log.String(), "connection refused") })
	for range 2 {
		stop := mosquitto(t, address)
		host, port, _ := net.SplitHostPort(address)
		sub := exec.Command("mosquitto_sub", "-h", host, "-p", port, "-u", "relay", "-P", "se:c/ret", "-t", "site/db/#", "-v")
		out, err := sub.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := sub.Start(); err != nil {
			t.Fatal(err)
		}
		lines := make(chan string, 10_000)
		go func() {
			defer close(lines)
			for scan := bufio.NewScanner(out); scan.Scan(); {
				lines <- scan.Text()
			}
		}()
		n := 0
		eventually(t, "an event arrives", func() bool {
			n++
			relay.Publish(topicA, fmt.Appendf(nil, "%d", n))
			select {
			case line := <-lines:
				if !strings.HasPrefix(line, "site/db/default/a ") {
					t.Errorf("got %q", line)
				}
				return true
			case <-time.After(20 * time.Millisecond):
				return false
			}
		})
		stop()
		_ = sub.Process.Kill() // it would connect again
		_ = sub.Wait()
		eventually(t, "the loss is noticed", func() bool { return testutil.ToFloat64(relay.connected) == 0 })
		dropped := testutil.ToFloat64(relay.dropped)
		begun := time.Now()
		for range 500 {
			relay.Publish(topicA, []byte("while it is away"))
		}
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("publishing took %v", took)
		}
		if lost := testutil.ToFloat64(relay.dropped) - dropped; lost < 390 || lost > 500 {
			t.Errorf("%v of 500 messages were dropped, with a queue for 100", lost)
		}
	}
}

// lockedBuffer is a log that is read while it is written.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// A broker that refuses the login is named in the log, without the password, and is no reason to stop.
func TestRelayIsRefused(t *testing.T) {
	t.Parallel()
	address := freeAddress(t)
	mosquitto(t, address)
	_, log := runRelay(t, DefaultRelayConfig("mqtt://relay:mistaken@"+address))
	eventually(t, "the refusal is logged", func() bool { return strings.Contains(log.String(), "cannot connect") })
	if said := log.String(); strings.Contains(said, "mistaken") || !strings.Contains(said, address) || !strings.Contains(strings.ToLower(said), "not authorized") {
		t.Errorf("logged: %s", said)
	}
}

func TestRelayConfig(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"mqtt://broker": "", "mqtts://u:p@broker:8883": "", "ws://broker/mqtt": "", "wss://[::1]:443": "",
		"http://broker": "scheme", "mqtt://": "no host", "broker:1883": "scheme", "mqtt://u:secret@%": "no URL",
	} {
		err := DefaultRelayConfig(address).Validate()
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%s: %v", address, err)
		}
	}
	for _, prefix := range []string{"", "a/#", "+", "/a", "a/"} {
		cfg := DefaultRelayConfig("mqtt://broker")
		cfg.Prefix = prefix
		if cfg.Validate() == nil {
			t.Errorf("prefix %q is accepted", prefix)
		}
	}
}
