package mqtt

import (
	"sync"
	"sync/atomic"
)

// maxRoutes bounds the cache of routes; there are as many as topics that are published to or asked about.
const maxRoutes = 4096

// router knows who is subscribed to what, and remembers the answer for each topic until a subscription changes.
type router struct {
	subscriptions atomic.Int64

	mu       sync.RWMutex
	sessions map[*session]map[string]subscription // by filter as the client wrote it
	routes   map[string]*route
}

// subscription is one filter of one client.
type subscription struct {
	group      string // of a shared subscription, otherwise empty
	pattern    string
	identifier int // of MQTT 5; 0 is none
}

// route is where messages of a topic go. It is never changed, but for the turn of its groups.
type route struct {
	direct    []target
	groups    []*group
	consumers int // sessions
}

// target is a session with the identifiers of those of its subscriptions that match.
type target struct {
	session     *session
	identifiers []int
}

// group holds the members of one shared subscription.
type group struct {
	members []*target
	turn    int // used by the dispatcher only
}

// next returns all members, beginning with the one whose turn it is.
func (g *group) next() []*target {
	order := make([]*target, 0, len(g.members))
	order = append(append(order, g.members[g.turn:]...), g.members[:g.turn]...)
	g.turn = (g.turn + 1) % len(g.members)
	return order
}

func newRouter() *router {
	return &router{sessions: make(map[*session]map[string]subscription), routes: make(map[string]*route)}
}

// empty tells whether there is no subscription at all.
func (r *router) empty() bool { return r.subscriptions.Load() == 0 }

// join makes a session known.
func (r *router) join(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sessions[s] = make(map[string]subscription)
}

// drop forgets a session and its subscriptions.
func (r *router) drop(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.subscriptions.Add(-int64(len(r.sessions[s])))
	delete(r.sessions, s)
	clear(r.routes)
}

// subscribe adds a subscription or replaces the one with the same filter. A session that was dropped stays so.
func (r *router) subscribe(s *session, filter string, sub subscription) {
	r.mu.Lock()
	defer r.mu.Unlock()
	subs, known := r.sessions[s]
	if !known {
		return
	}
	if _, replaced := subs[filter]; !replaced {
		r.subscriptions.Add(1)
	}
	subs[filter] = sub
	clear(r.routes)
}

// unsubscribe removes a subscription if it is there.
func (r *router) unsubscribe(s *session, filter string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, found := r.sessions[s][filter]; !found {
		return
	}
	delete(r.sessions[s], filter)
	r.subscriptions.Add(-1)
	clear(r.routes)
}

// exact are the sessions with a subscription to one stream topic, without a wildcard.
func (r *router) exact() []exactSubscription {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var list []exactSubscription
	for s, subs := range r.sessions {
		for filter, sub := range subs {
			if _, _, kind := parseFilter(filter); kind == filterExact {
				list = append(list, exactSubscription{s, sub.pattern})
			}
		}
	}
	return list
}

type exactSubscription struct {
	session *session
	topic   string
}

// filters is the number of subscriptions that a session would have after adding some.
func (r *router) filters(s *session, added []string) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	subs := r.sessions[s]
	n := len(subs)
	for _, f := range added {
		if _, found := subs[f]; !found {
			n++
		}
	}
	return n
}

// route returns where messages of a topic go.
func (r *router) route(topic string) *route {
	r.mu.RLock()
	found := r.routes[topic]
	r.mu.RUnlock()
	if found != nil {
		return found
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	found = r.find(topic)
	if len(r.routes) >= maxRoutes {
		clear(r.routes)
	}
	r.routes[topic] = found
	return found
}

// find computes a route; the lock is held.
func (r *router) find(topic string) *route {
	found := new(route)
	groups := make(map[string]*group)
	for s, subs := range r.sessions {
		direct := target{session: s}
		isDirect, isMember := false, false
		for filter, sub := range subs {
			if !matches(sub.pattern, topic) {
				continue
			}
			t := &direct
			if sub.group != "" {
				g := groups[filter]
				if g == nil {
					g = new(group)
					groups[filter] = g
					found.groups = append(found.groups, g)
				}
				t = &target{session: s}
				g.members = append(g.members, t)
				isMember = true
			} else {
				isDirect = true
			}
			if sub.identifier != 0 {
				t.identifiers = append(t.identifiers, sub.identifier)
			}
		}
		if isDirect {
			found.direct = append(found.direct, direct)
		}
		if isDirect || isMember {
			found.consumers++
		}
	}
	return found
}
