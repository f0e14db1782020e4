package proxy

import (
	"net"
	"runtime"
	"sync"
)

// loops are a Server's event loops. They are started when the first session needs one and end with the last Serve.
type loops struct {
	mu    sync.Mutex
	users int // Serves
	all   []*loop
	next  int
	none  bool // they cannot be had, or are not wanted
}

// processorsPerLoop is how many processors one loop is thought to keep busy: those of its sessions' clients and servers
// take several times what it takes itself.
const processorsPerLoop = 4

// use has the loops stay until the returned function is called.
func (l *loops) use() (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.users--; l.users > 0 {
			return
		}
		for _, one := range l.all {
			one.close()
		}
		l.all = nil
	}
}

// pick returns the loop for one more session, nil if it has to do without.
func (s *Server) pickLoop() *loop {
	l := &s.loops
	l.mu.Lock()
	defer l.mu.Unlock()
	if !loopsExist || s.cfg.EventLoops < 0 || l.none || l.users == 0 {
		return nil
	}
	wanted := s.cfg.EventLoops
	if wanted == 0 {
		wanted = max(1, runtime.GOMAXPROCS(0)/processorsPerLoop)
	}
	if len(l.all) < wanted {
		one, err := newLoop(s.cfg.BusyPoll)
		if err != nil {
			l.none = len(l.all) == 0
			s.log.Warn().Err(err).Msg("no event loop: sessions have goroutines of their own")
		} else {
			l.all = append(l.all, one)
		}
	}
	if len(l.all) == 0 {
		return nil
	}
	l.next++
	return l.all[l.next%len(l.all)]
}

// loopable says whether a loop can carry the session: there are sockets underneath.
func (s *session) loopable() bool { return isSocket(s.front.conn) && isSocket(s.back.conn) }

func isSocket(conn net.Conn) bool {
	switch underneath(conn).(type) {
	case *net.TCPConn, *net.UnixConn:
		return true
	}
	return false
}
