package coldstore

import (
	"container/list"
	"sync"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

// cache keeps things that were read from segments, the most recently used, within a bound of memory. It may be used concurrently.
type cache struct {
	mu    sync.Mutex
	limit int64
	bytes int64
	order *list.List // of *cached, the most recently used in front
	byKey map[cacheKey]*list.Element
	gauge prometheus.Gauge // shared with other caches
}

// cacheKey names a segment's opened file or object (batch wholeFile), or its rows from batch times batchRows on.
type cacheKey struct {
	segment uuid.UUID
	batch   int
}

const wholeFile = -1

type cached struct {
	key   cacheKey
	value any // not changed once it is here
	bytes int64
}

func newCache(limit int64, gauge prometheus.Gauge) *cache {
	return &cache{limit: limit, order: list.New(), byKey: map[cacheKey]*list.Element{}, gauge: gauge}
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
	c.gauge.Add(float64(bytes))
	for c.bytes > c.limit && c.order.Len() > 1 {
		c.remove(c.order.Back())
	}
}

func (c *cache) drop(key cacheKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[key]; ok {
		c.remove(e)
	}
}

func (c *cache) remove(e *list.Element) {
	entry := c.order.Remove(e).(*cached)
	delete(c.byKey, entry.key)
	c.bytes -= entry.bytes
	c.gauge.Sub(float64(entry.bytes))
}

// opened keeps the files of segments, and for longer than those what was verified of their objects: a file that had to give
// way is opened again without its object being read from end to end.
type opened struct {
	files    *cache // of *segmentFile
	verified *cache // of verified
}

func newOpened(limit int64, gauge prometheus.Gauge) opened {
	return opened{files: newCache(limit, gauge), verified: newCache(limit/8, gauge)}
}

func (o *opened) file(id uuid.UUID) *segmentFile {
	f, _ := o.files.get(cacheKey{id, wholeFile}).(*segmentFile)
	return f
}

// known is what was verified of an object in this process.
func (o *opened) known(id uuid.UUID) (verified, bool) {
	v, ok := o.verified.get(cacheKey{id, wholeFile}).(verified)
	return v, ok
}

func (o *opened) put(id uuid.UUID, f *segmentFile) {
	key := cacheKey{id, wholeFile}
	o.files.put(key, f, f.memory())
	if v := f.verified; v.version != "" {
		o.verified.put(key, v, int64(len(v.version)+8*len(v.blocks))+208)
	}
}

// drop forgets a segment's file, and that it was verified. Its rows may stay in their cache: what a segment holds never changes.
func (o *opened) drop(id uuid.UUID) {
	o.files.drop(cacheKey{id, wholeFile})
	o.verified.drop(cacheKey{id, wholeFile})
}
