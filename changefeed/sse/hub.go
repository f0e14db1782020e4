package sse

import "sync"

// hub wakes the clients of a topic. It is a changefeed.Publisher that throws the payload away: the log has it.
type hub struct {
	mu      sync.Mutex
	waiting map[string]map[chan struct{}]struct{}
}

// join returns a channel that receives something when there may be new events on a topic.
func (h *hub) join(topic string) chan struct{} {
	wake := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting == nil {
		h.waiting = make(map[string]map[chan struct{}]struct{})
	}
	if h.waiting[topic] == nil {
		h.waiting[topic] = make(map[chan struct{}]struct{})
	}
	h.waiting[topic][wake] = struct{}{}
	return wake
}

func (h *hub) leave(topic string, wake chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.waiting[topic], wake)
	if len(h.waiting[topic]) == 0 {
		delete(h.waiting, topic)
	}
}

func (h *hub) wake(topic string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for wake := range h.waiting[topic] {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

func (h *hub) count(topic string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.waiting[topic])
}
