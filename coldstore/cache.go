package coldstore

import (
	"container/list"
	"sync"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

// cache keeps opened segments, the most recently used ones, within a bound of memory. It may be used concurrently.
type cache struct {
	mu    sync.Mutex
	limit int64
	bytes int64
	order *list.List // of *cached, the most recently used in front
	byID  map[uuid.UUID]*list.Element
	gauge prometheus.Gauge
}

type cached struct {
	id   uuid.UUID
	file *segmentFile
}

func newCache(limit int64, gauge prometheus.Gauge) *cache {
	return &cache{limit: limit, order: list.New(), byID: map[uuid.UUID]*list.Element{}, gauge: gauge}
}

func (c *cache) get(id uuid.UUID) *segmentFile {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byID[id]
	if !ok {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).file
}

func (c *cache) put(id uuid.UUID, f *segmentFile) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byID[id]; ok {
		c.remove(e)
	}
	c.byID[id] = c.order.PushFront(&cached{id, f})
	c.bytes += f.memory()
	for c.bytes > c.limit && c.order.Len() > 1 {
		c.remove(c.order.Back())
	}
	c.gauge.Set(float64(c.bytes))
}

func (c *cache) drop(id uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byID[id]; ok {
		c.remove(e)
	}
	c.gauge.Set(float64(c.bytes))
}

func (c *cache) remove(e *list.Element) {
	entry := c.order.Remove(e).(*cached)
	delete(c.byID, entry.id)
	c.bytes -= entry.file.memory()
}
