package coldstore

import (
	"container/list"
	"sync"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

// cache keeps what was read from segments, the most recently used, within a bound of memory. It may be used concurrently.
type cache struct {
	mu    sync.Mutex
	limit int64
	bytes int64
	order *list.List // of *cached, the most recently used in front
	byKey map[cacheKey]*list.Element
	gauge prometheus.Gauge
}

// cacheKey names a segment's opened file (batch wholeFile), or its rows from batch times batchRows on.
type cacheKey struct {
	segment uuid.UUID
	batch   int
}

const wholeFile = -1

type cached struct {
	key   cacheKey
	value any // *segmentFile or []Row; not changed once it is here
	bytes int64
}

func newCache(limit int64, gauge prometheus.Gauge) *cache {
	return &cache{limit: limit, order: list.New(), byKey: map[cacheKey]*list.Element{}, gauge: gauge}
}

func (c *cache) file(id uuid.UUID) *segmentFile {
	f, _ := c.get(cacheKey{id, wholeFile}).(*segmentFile)
	return f
}

func (c *cache) get(key cacheKey) any {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byKey[key]
	if !ok {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).value
}

func (c *cache) put(key cacheKey, value any, bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[key]; ok {
		c.remove(e)
	}
	c.byKey[key] = c.order.PushFront(&cached{key, value, bytes})
	c.bytes += bytes
	for c.bytes > c.limit && c.order.Len() > 1 {
		c.remove(c.order.Back())
	}
	c.gauge.Set(float64(c.bytes))
}

// drop forgets the opened file of a segment. Its rows may stay: they were verified, and what a segment holds never changes.
func (c *cache) drop(id uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[cacheKey{id, wholeFile}]; ok {
		c.remove(e)
	}
	c.gauge.Set(float64(c.bytes))
}

func (c *cache) remove(e *list.Element) {
	entry := c.order.Remove(e).(*cached)
	delete(c.byKey, entry.key)
	c.bytes -= entry.bytes
}
