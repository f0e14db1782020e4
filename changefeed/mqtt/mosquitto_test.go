package mqtt

import (
	"bytes"
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// run runs one of the mosquitto tools against the broker and returns what it printed.
func (w *world) run(ctx context.Context, tool, user string, args ...string) (string, error) {
	host, port, _ := net.SplitHostPort(w.addr)
	cmd := exec.CommandContext(ctx, tool, append([]string{"-h", host, "-p", port, "-u", user, "-P", password}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func TestMosquitto(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.role("reader", "a")
	for _, version := range []string{"mqttv311", "mqttv5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			type result struct {
				out string
				err error
			}
			got := make(chan result, 1)
			go func() {
				out, err := w.run(ctx, "mosquitto_sub", user, "-V", version, "-t", topicA, "-C", "2", "-v")
				got <- result{out, err}
			}()
			// It does not tell when it has subscribed, so publish until both messages are there.
			var r result
			for r.out == "" && r.err == nil {
				select {
				case r = <-got:
				case <-time.After(10 * time.Millisecond):
					w.broker.Publish(topicA, []byte(`{"id":"00001","op":"put"}`))
				}
			}
			if want := strings.Repeat(topicA+` {"id":"00001","op":"put"}`+"\n", 2); r.err != nil || r.out != want {
				t.Errorf("mosquitto_sub printed %q (%v), want %q", r.out, r.err, want)
			}

			// Old versions exit 0 after this, new ones do not.
			out, _ := w.run(ctx, "mosquitto_sub", user, "-V", version, "-t", topicB)
			if !strings.Contains(out, "denied") {
				t.Errorf("mosquitto_sub on a topic it may not read: %q", out)
			}
			out, err := w.run(ctx, "mosquitto_sub", "nobody"+w.suffix, "-V", version, "-t", topicA)
			if err == nil || !strings.Contains(out, "Connection error") {
				t.Errorf("mosquitto_sub with a wrong login: %q, %v", out, err)
			}
			refused := w.refused("publish")
			_, _ = w.run(ctx, "mosquitto_pub", user, "-V", version, "-t", topicA, "-m", "forged") // QoS 0: it does not wait for an answer
			eventually(t, "mosquitto_pub is refused", func() bool { return w.refused("publish") > refused })
		})
	}
}
