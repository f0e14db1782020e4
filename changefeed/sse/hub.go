package sse

import (
	"context"
	"sync"
)

// hub wakes the clients of a topic. It is a changefeed.Publisher that throws the payload away: the log has it.
type hub struct {
	mu     sync.Mutex
	topics map[string]*topic
}

// topic has clients.
type topic struct {
	clients map[chan struct{}]struct{}
	stop    context.CancelFunc // ends who looks for them
	stopped chan struct{}
}

// join returns a channel that receives something when there may be new events on a topic. While a topic has clients, look runs;
// it outlives ctx, which is that of the first of them.
func (h *hub) join(ctx context.Context, name string, look func(context.Context)) chan struct{} {
	wake := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.topics == nil {
		h.topics = make(map[string]*topic)
	}
	t := h.topics[name]
	if t == nil {
		ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
		t = &topic{clients: make(map[chan struct{}]struct{}), stop: stop, stopped: make(chan struct{})}
		h.topics[name] = t
		go func() {
			defer close(t.stopped)
			look(ctx)
		}()
	}
	t.clients[wake] = struct{}{}
	return wake
}

// leave undoes join. The last client waits until look has returned.
func (h *hub) leave(name string, wake chan struct{}) {
	h.mu.Lock()
	t := h.topics[name]
	delete(t.clients, wake)
	last := len(t.clients) == 0
	if last {
		delete(h.topics, name)
		t.stop()
	}
	h.mu.Unlock()
	if last {
		<-t.stopped
	}
}

func (h *hub) wake(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.topics[name]
	if t == nil {
		return
	}
	for wake := range t.clients {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

func (h *hub) count(name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.topics[name]; t != nil {
		return len(t.clients)
	}
	return 0
}
