package proxy

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// admission counts clients. Those that have not yet said what they want wait in a line of bounded length: when it is full,
// a newcomer takes the place of the one that has been silent for the longest time, so that clients which connect and say
// nothing never keep out one that speaks.
type admission struct {
	mu       sync.Mutex
	silent   list.List // of *waiting, the longest in front
	sessions int
	by       map[netip.Prefix]int
}

// waiting is a client that has not sent its startup packet yet. Its fields belong to admission's lock.
type waiting struct {
	conn    net.Conn
	place   *list.Element // nil once it has left the line
	evicted bool
}

// enter puts a client at the end of the line, of limit places.
func (a *admission) enter(conn net.Conn, limit int) *waiting {
	w := &waiting{conn: conn}
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.silent.Len() >= limit {
		victim := a.silent.Remove(a.silent.Front()).(*waiting)
		victim.place, victim.evicted = nil, true
		_ = victim.conn.Close() // its goroutine finds out
	}
	w.place = a.silent.PushBack(w)
	return w
}

// leave takes a client out of the line and says whether it was thrown out before.
func (a *admission) leave(w *waiting) (evicted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w.place != nil {
		a.silent.Remove(w.place)
		w.place = nil
	}
	return w.evicted
}

// refusal says why a session is not begun.
type refusal int

const (
	admitted refusal = iota
	tooManySessions
	tooManyOfAddress
)

// String is the reason in metrics.
func (r refusal) String() string {
	switch r {
	case tooManySessions:
		return "connections"
	case tooManyOfAddress:
		return "address"
	}
	return "none"
}

// begin counts a session of a peer if the limits allow it. byAddress zero means no limit; peers without an address have none.
func (a *admission) begin(p peer, limit, byAddress int) refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions >= limit {
		return tooManySessions
	}
	if !p.isUnix() {
		network := p.network()
		if byAddress > 0 && a.by[network] >= byAddress {
			return tooManyOfAddress
		}
		if a.by == nil {
			a.by = map[netip.Prefix]int{}
		}
		a.by[network]++ // also without a limit: a reload may bring one
	}
	a.sessions++
	return admitted
}

// end counts a session of a peer out.
func (a *admission) end(p peer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sessions--
	if p.isUnix() {
		return
	}
	network := p.network()
	if a.by[network]--; a.by[network] == 0 {
		delete(a.by, network)
	}
}
