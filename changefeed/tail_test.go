package changefeed_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
)

// board is a publisher that remembers.
type board struct {
	mu       sync.Mutex
	messages []string // topic and payload
	wants    func(topic string) bool
}

func (b *board) Publish(topic string, payload []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.messages = append(b.messages, topic+" "+string(payload))
}

func (b *board) Consumers(topic string) int { return len(topic) }

func (b *board) Wants(topic string) bool { return b.wants == nil || b.wants(topic) }

func (b *board) all() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.messages)
}

// startTail runs a tail that the applier's commits wake.
func (h *host) startTail(b *board, change func(*changefeed.TailConfig)) (tail *changefeed.Tail, stop func()) {
	h.t.Helper()
	cfg := changefeed.DefaultTailConfig("db")
	cfg.Interval = 20 * time.Millisecond
	if change != nil {
		change(&cfg)
	}
	tail = changefeed.NewTail(cfg, h.pool, b, zerolog.New(zerolog.NewTestWriter(h.t)), nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := tail.Run(ctx); err != nil {
			h.t.Errorf("tail: %v", err)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	h.t.Cleanup(stop)
	return tail, stop
}

func TestTailPublishesEvents(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v text)`, `INSERT INTO t VALUES (1, 'old')`, `CREATE SCHEMA other`)
	h.stream("s", "t", "v IS NOT NULL", "start", "earliest")
	b := &board{}
	tail, stop := h.startTail(b, nil)
	h.stopApplier()
	h.config.Committed = tail.Wake
	h.startApplier()
	h.exec(`LISTEN koldstore_stream_s`)
	h.exec(`INSERT INTO t VALUES (2, '<a> & "b"')`, `UPDATE t SET v = NULL WHERE id = 1`)
	h.eventually("two events are published", func() bool { return len(b.all()) == 2 })
	rows := h.rows(`SELECT id, floor(extract(epoch from ts) * 1000) FROM _stream_s ORDER BY id`)
	id := func(i int) string { return strings.Fields(rows[i])[0] }
	ts := func(i int) string { return strings.Fields(rows[i])[1] }
	want := []string{
		fmt.Sprintf(`$stream/db/s {"id":"%s","op":"put","k":2,"ts":%s,"doc":{"v": "<a> & \"b\"", "id": 2},"prev":"%s"}`, id(1), ts(1), id(0)),
		fmt.Sprintf(`$stream/db/s {"id":"%s","op":"exit","k":1,"ts":%s,"doc":{"v": null, "id": 1},"prev":"%s"}`, id(2), ts(2), id(1)),
	}
	if got := b.all(); !slices.Equal(got, want) {
		t.Errorf("got %s\nwant %s", got, want)
	}
	for newest := ""; newest != id(2); {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		n, err := h.app.WaitForNotification(ctx)
		cancel()
		must(t, err)
		newest = n.Payload
	}
	if got := string(tail.Stats()); got != `{"public.s":{"consumers":12,"lag":0}}` {
		t.Errorf("stats: %s", got)
	}

	// With the old row, outside public, and a key of two columns.
	h.exec(`SET search_path = other`, `CREATE TABLE c (a int, b text, PRIMARY KEY (b, a))`)
	h.stream("S/1", "c", "a > 0", "pre_image", "true")
	h.exec(`INSERT INTO c VALUES (1, 'x')`)
	h.eventually("it is published", func() bool { return len(b.all()) == 3 })
	topic, payload, _ := strings.Cut(b.all()[2], " ")
	var event map[string]json.RawMessage
	must(t, json.Unmarshal([]byte(payload), &event))
	if topic != "$stream/db/other.S%2F1" || string(event["old"]) != "null" || string(event["prev"]) != "null" || string(event["k"]) != `{"a": 1, "b": "x"}` {
		t.Errorf("%s %s", topic, payload)
	}

	// A dropped stream is forgotten.
	h.exec(`CALL koldstore.drop_stream('public', 's')`)
	h.eventually("it is not listed", func() bool { return !strings.Contains(string(tail.Stats()), "public.s") })
	stop()
	if got := string(tail.Stats()); got != `{}` {
		t.Errorf("stats of a tail that does not run: %s", got)
	}
}

// After a restart what was missed is published, once; unless it is too much.
func TestTailAfterRestart(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	b := &board{}
	small := func(c *changefeed.TailConfig) { c.PageRows, c.MaxBehind = 7, 50 }
	_, stop := h.startTail(b, small)
	h.exec(`INSERT INTO t SELECT generate_series(1, 30)`)
	h.fence()
	h.eventually("30 events are published", func() bool { return len(b.all()) == 30 })
	stop()
	h.exec(`INSERT INTO t SELECT generate_series(31, 80)`)
	h.fence()
	_, stop = h.startTail(b, small)
	h.eventually("80 events are published", func() bool { return len(b.all()) == 80 })
	stop()
	h.exec(`INSERT INTO t SELECT generate_series(81, 131)`)
	h.fence()
	_, stop = h.startTail(b, small)
	newest := h.rows(`SELECT max(id) FROM _stream_s`)[0]
	h.eventually("the tail is at the end", func() bool { return h.rows(`SELECT tail_id FROM koldstore.stream_status`)[0] == newest })
	h.exec(`INSERT INTO t VALUES (200)`)
	h.fence()
	h.eventually("the next event is published", func() bool { return len(b.all()) == 81 })
	stop()
	var keys []int
	for _, m := range b.all() {
		var e struct {
			K    int
			Prev *string
		}
		_, payload, _ := strings.Cut(m, " ")
		must(t, json.Unmarshal([]byte(payload), &e))
		keys = append(keys, e.K)
		if e.K == 200 && (e.Prev == nil || *e.Prev != newest) {
			t.Errorf("the first event after a skip does not name the one before it: %s", payload)
		}
	}
	want := make([]int, 0, 81)
	for k := 1; k <= 80; k++ {
		want = append(want, k)
	}
	if want = append(want, 200); !slices.Equal(keys, want) {
		t.Errorf("published %v", keys)
	}
}

// What was committed while nobody applied changes counts as missed too: it is not pushed as it is applied if it is too much. Who waits for NOTIFY is told.
func TestTailWaitsForWhatIsStillApplied(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	h.fence()
	b := &board{}
	small := func(c *changefeed.TailConfig) { c.PageRows, c.MaxBehind = 7, 50 }
	missed := func(from, to int) (stop func()) {
		h.stopApplier()
		for i := from; i <= to; i++ {
			h.exec(fmt.Sprintf(`INSERT INTO t VALUES (%d)`, i))
		}
		_, stop = h.startTail(b, small)
		h.startApplier()
		h.fence()
		return stop
	}
	stop := missed(1, 50)
	h.eventually("50 events are published", func() bool { return len(b.all()) == 50 })
	stop()

	listener, err := pgx.Connect(t.Context(), h.app.Config().ConnString())
	must(t, err)
	defer listener.Close(context.Background())
	_, err = listener.Exec(t.Context(), `LISTEN koldstore_stream_s`)
	must(t, err)
	stop = missed(51, 101)
	newest := h.rows(`SELECT max(id) FROM _stream_s`)[0]
	for told := ""; told != newest; {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		n, err := listener.WaitForNotification(ctx)
		cancel()
		must(t, err)
		told = n.Payload
	}
	h.eventually("the tail is at the end", func() bool { return h.rows(`SELECT tail_id FROM koldstore.stream_status`)[0] == newest })
	h.exec(`INSERT INTO t VALUES (200)`)
	h.fence()
	h.eventually("the next event is published", func() bool { return len(b.all()) == 51 })
	stop()
	if last := b.all()[50]; !strings.Contains(last, `"k":200`) && !strings.Contains(last, `"k": 200`) {
		t.Errorf("published at last: %s", last)
	}
}

// What nobody waits for is passed over, but not silently; who subscribes while the tail looks at the log misses nothing.
func TestTailPassesOverWhatNobodyWaitsFor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	var mode, asked atomic.Int64
	const nobody, somebody, meanwhile = 0, 1, 2
	b := &board{wants: func(string) bool {
		// Each look asks before and after: a subscriber who comes in between is there for the second question.
		return mode.Load() == somebody || mode.Load() == meanwhile && asked.Add(1)%2 == 0
	}}
	tail, _ := h.startTail(b, nil)
	h.stopApplier()
	h.config.Committed = tail.Wake
	h.startApplier()
	h.exec(`LISTEN koldstore_stream_s`)
	h.exec(`INSERT INTO t VALUES (1), (2)`)
	h.fence()
	newest := h.rows(`SELECT max(id) FROM _stream_s`)[0]
	for told := ""; told != newest; {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		n, err := h.app.WaitForNotification(ctx)
		cancel()
		must(t, err)
		told = n.Payload
	}
	h.eventually("the position is stored", func() bool { return h.rows(`SELECT tail_id FROM koldstore.stream_status`)[0] == newest })
	for i, m := range []int64{somebody, meanwhile, meanwhile} {
		mode.Store(m)
		h.exec(fmt.Sprintf(`INSERT INTO t VALUES (%d)`, 3+i))
		h.eventually("the next event is published", func() bool { return len(b.all()) == i+1 })
	}
	for i, m := range b.all() {
		if want := fmt.Sprintf(`"k":%d,`, 3+i); !strings.Contains(m, want) || i == 0 && !strings.Contains(m, `"prev":"`+newest+`"`) {
			t.Errorf("published %s, want %s behind %s", m, want, newest)
		}
	}
}

// Expired events are invisible to live push, too; names that are too long for a channel are cut as LISTEN cuts them.
func TestTailLeavesOutExpiredEvents(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	name := strings.Repeat("é", 27)
	h.stream(name, "t", "true", "retention", "1h")
	h.exec(`INSERT INTO t SELECT generate_series(1, 3)`)
	h.fence()
	h.admin(fmt.Sprintf(`UPDATE "_stream_%s" SET ts = ts - interval '2 h' WHERE k <= '2'`, name))
	h.exec(fmt.Sprintf(`LISTEN "koldstore_stream_%s"`, name))
	b := &board{}
	_, stop := h.startTail(b, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := h.app.WaitForNotification(ctx)
	must(t, err)
	h.eventually("something is published", func() bool { return len(b.all()) > 0 }) // NOTIFY may come first, see Tail.hold
	stop()
	if got := b.all(); len(got) != 1 || !strings.Contains(got[0], `"k":3`) {
		t.Errorf("published %v", got)
	}
}
