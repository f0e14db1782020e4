package proxy

// queue is a ring of entries, whose size is a power of two. done counts the statements that the Query in front has completed.
type queue struct {
	ring  []entry
	first int
	count int
	done  int
}

func (q *queue) len() int { return q.count }

func (q *queue) at(i int) *entry { return &q.ring[(q.first+i)&(len(q.ring)-1)] }

func (q *queue) front() *entry {
	if q.count == 0 {
		return nil
	}
	return q.at(0)
}

func (q *queue) push(e entry) {
	if q.count == len(q.ring) {
		grown := make([]entry, max(8, 2*len(q.ring)))
		for i := range q.count {
			grown[i] = *q.at(i)
		}
		q.ring, q.first = grown, 0
	}
	q.count++
	*q.at(q.count - 1) = e
}

// maxIdleRing is the size above which an empty ring gives its memory back.
const maxIdleRing = 1024

func (q *queue) pop() {
	*q.at(0) = entry{}
	q.first = (q.first + 1) & (len(q.ring) - 1)
	q.count--
	q.done = 0
	if q.count == 0 && len(q.ring) > maxIdleRing {
		q.ring, q.first = nil, 0
	}
}

// filterTail keeps the front and those behind it that keep approves, asked in order.
func (q *queue) filterTail(keep func(entry) bool) {
	kept := min(q.count, 1)
	for i := 1; i < q.count; i++ {
		if e := *q.at(i); keep(e) {
			*q.at(kept) = e
			kept++
		}
	}
	for i := kept; i < q.count; i++ {
		*q.at(i) = entry{}
	}
	q.count = kept
}
