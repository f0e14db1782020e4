package integration_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// subscriber is a running mosquitto_sub.
type subscriber struct {
	t     *testing.T
	lines chan string // closed when it has ended
	done  chan error
}

// subscribe starts mosquitto_sub, which prints each message as "topic payload", and returns when the broker has confirmed.
func (i *instance) subscribe(t *testing.T, user, password, topic string) *subscriber {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	// -d makes it print the broker's answers, one of which is what is waited for; stdbuf makes it print them at once.
	cmd := exec.CommandContext(ctx, findProgram(t, "stdbuf"), "-oL", findProgram(t, "mosquitto_sub"), "-d", "-F", "message %t %p", "-h", "127.0.0.1",
		"-p", fmt.Sprint(i.ports.mqtt), "-u", user, "-P", password, "-t", topic)
	cmd.Env = cleanEnv()
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &subscriber{t: t, lines: make(chan string, 1024), done: make(chan error, 1)}
	go func() {
		defer close(s.lines)
		scanner := bufio.NewScanner(out)
		scanner.Buffer(nil, 1<<20)
		for scanner.Scan() {
			s.lines <- scanner.Text()
		}
		s.done <- cmd.Wait()
	}()
	t.Cleanup(func() {
		cancel()
		for range s.lines { // until it has ended
		}
	})
	return s
}

// await returns the rest of the next line that begins with a word, or false if the program ends before.
func (s *subscriber) await(word string) (string, bool) {
	s.t.Helper()
	timeout := time.NewTimer(time.Minute)
	defer timeout.Stop()
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return "", false
			}
			if rest, found := strings.CutPrefix(line, word); found {
				return rest, true
			}
		case <-timeout.C:
			s.t.Fatalf("mosquitto_sub: nothing that begins with %q came", word)
		}
	}
}

// message is the next message.
func (s *subscriber) message() (topic, payload string) {
	s.t.Helper()
	line, ok := s.await("message ")
	if !ok {
		s.t.Fatal("mosquitto_sub has ended")
	}
	topic, payload, _ = strings.Cut(line, " ")
	return topic, payload
}

// pushed is the payload of an event.
type pushed struct {
	ID   string          `json:"id"`
	Op   string          `json:"op"`
	K    json.RawMessage `json:"k"`
	TS   int64           `json:"ts"`
	Doc  json.RawMessage `json:"doc"`
	Old  json.RawMessage `json:"old"`
	Prev *string         `json:"prev"`
}

// TestLivePush compares what mosquitto_sub prints with the log.
func TestLivePush(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY, total numeric, status text);
		CREATE STREAM big ON orders WHEN (total > 1000) WITH (pre_image = true)`)
	sub := w.inst.subscribe(t, "demo", "demo", w.topic("big"))
	if _, ok := sub.await("Subscribed"); !ok {
		t.Fatal("not subscribed")
	}
	await(t, "SHOW STREAMS to count the subscriber", func() bool {
		shown := c.rows("SHOW STREAMS")
		return find(shown, "big")[3] == "1"
	})
	c.exec("INSERT INTO orders VALUES (1, 5000, 'größer als ''groß''')")
	c.exec("UPDATE orders SET total = total + 1 WHERE id = 1")
	c.exec("UPDATE orders SET total = 1 WHERE id = 1")
	c.exec("BEGIN; INSERT INTO orders VALUES (2, 2000, NULL); DELETE FROM orders WHERE id = 2; COMMIT")

	var got []pushed
	for range 5 {
		topic, payload := sub.message()
		if topic != w.topic("big") {
			t.Errorf("topic %s, want %s", topic, w.topic("big"))
		}
		var p pushed
		decoder := json.NewDecoder(strings.NewReader(payload))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&p); err != nil {
			t.Fatalf("%s: %v", payload, err)
		}
		got = append(got, p)
	}
	events := c.rows("SELECT id, op, k, floor(extract(epoch FROM ts) * 1000)::bigint, doc, coalesce(old, 'null') FROM _stream_big ORDER BY id")
	if len(events) != len(got) {
		t.Fatalf("%d events in the log, %d pushed", len(events), len(got))
	}
	prev := ""
	for i, e := range events {
		p := got[i]
		if p.ID != e[0] || p.Op != e[1] || string(p.K) != e[2] || fmt.Sprint(p.TS) != e[3] || !sameJSON(string(p.Doc), e[4]) || !sameJSON(orNull(p.Old), e[5]) {
			t.Errorf("pushed %+v\nlogged %v", p, e)
		}
		if p.Prev == nil && prev != "" || p.Prev != nil && *p.Prev != prev {
			t.Errorf("event %s: prev is %v, want %q", p.ID, p.Prev, prev)
		}
		prev = p.ID
	}
}

func orNull(raw json.RawMessage) string {
	if raw == nil {
		return "null"
	}
	return string(raw)
}

// find returns the row whose first column is name.
func find(rows [][]string, name string) []string {
	for _, r := range rows {
		if r[0] == name {
			return r
		}
	}
	return make([]string, 16)
}

// TestLivePushIsRefused: a wrong password, an unknown role, and a role that may not read the table.
func TestLivePushIsRefused(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000)")
	stranger := w.schema + "_stranger"
	admin := w.connectAs(t, "postgres")
	admin.exec(fmt.Sprintf("CREATE ROLE %[1]s LOGIN PASSWORD '%[1]s'", stranger))
	t.Cleanup(func() { admin.exec("DROP ROLE " + stranger) })

	for _, login := range [][2]string{{"demo", "wrong"}, {"demo", ""}, {"nobody_of_this_name", "demo"}, {"", ""}} {
		sub := w.inst.subscribe(t, login[0], login[1], w.topic("big"))
		if _, ok := sub.await("Subscribed"); ok {
			t.Errorf("subscribed as %q with password %q", login[0], login[1])
		}
	}
	// Everything else is granted with QoS 0; 128 is a refusal.
	sub := w.inst.subscribe(t, stranger, stranger, w.topic("big"))
	if granted, ok := sub.await("Subscribed"); ok && !strings.Contains(granted, "128") {
		t.Errorf("a role without SELECT may subscribe: %s", granted)
	}
	// A wildcard brings what the role may read, which is nothing; and # never matches $stream.
	wild := w.inst.subscribe(t, stranger, stranger, "$stream/#")
	all := w.inst.subscribe(t, "demo", "demo", "#")
	mine := w.inst.subscribe(t, "demo", "demo", "$stream/"+database+"/#")
	for _, s := range []*subscriber{wild, all, mine} {
		if _, ok := s.await("Subscribed"); !ok {
			t.Fatal("not subscribed")
		}
	}
	c.exec("INSERT INTO orders VALUES (1, 5000)")
	for { // other tests publish too
		if topic, _ := mine.message(); topic == w.topic("big") {
			break
		}
	}
	for name, s := range map[string]*subscriber{"a stranger's $stream/#": wild, "#": all} {
		select {
		case line := <-s.lines:
			if strings.HasPrefix(line, "message ") {
				t.Errorf("%s received %s", name, line)
			}
		default:
		}
	}
}
