package changefeed_test

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
)

// syncLog is what a log has written.
type syncLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *syncLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// dropper drops a stream when it is told about an event of another one.
type dropper struct {
	board
	topic string
	drop  func()
}

func (d *dropper) Publish(topic string, payload []byte) {
	d.board.Publish(topic, payload)
	if topic == d.topic {
		d.drop()
	}
}

// A stream that is dropped between the look at the catalog and the reading of its log is no trouble.
func TestTailPassesOverStreamsThatAreDroppedMeanwhile(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("first", "t", "id > 0")
	h.stream("second", "t", "id > 0")
	h.exec(`INSERT INTO t VALUES (1)`)
	h.fence()
	d := &dropper{topic: "$stream/db/first", drop: sync.OnceFunc(func() { h.exec(`CALL koldstore.drop_stream('public', 'second')`) })}
	var log syncLog
	cfg := changefeed.DefaultTailConfig("db")
	cfg.Interval = 20 * time.Millisecond
	tail := changefeed.NewTail(cfg, h.pool, d, zerolog.New(&log), nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- tail.Run(ctx) }()
	h.eventually("the second one is forgotten", func() bool { return string(tail.Stats()) == `{"public.first":{"consumers":16,"lag":0}}` })
	cancel()
	must(t, <-done)
	if text := log.String(); text != "" {
		t.Errorf("the log says:\n%s", text)
	}
}
