package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/koldproxy/koldproxy"
)

// longAgo is a deadline that interrupts I/O at once.
var longAgo = time.Unix(1, 0)

var sessionNumbers atomic.Uint64

// session is one client and its server connection. After the handshake two goroutines run it: pumpClient owns front and
// everything it sends to the server, pumpServer owns back and everything that goes to the client. While a takeover lasts,
// pumpClient's goroutine owns all of it.
type session struct {
	server    *Server
	group     *group
	set       *settings // as they were when the client came
	number    uint64
	peer      peer
	certified bool         // the client's certificate proves who it is
	target    SessionAttrs // what the server has to be
	tried     endpoint     // the server as it is configured
	endpoint  endpoint     // the server as it was reached, for cancel requests
	user      string
	database  string
	deadline  time.Time // of the handshake
	tracked   bool      // false in replication sessions, whose protocol is another one
	intercept bool
	names     *databaseNames // nil when nobody knows any

	front     *stream // from the client
	back      *stream // from the server
	frontRest int64   // bytes of a client message that are still to be forwarded unseen
	backRest  int64   // the same for the server

	// What pumpClient knows about the batch that is being sent; see batch.go.
	batch    batch
	batching bool   // it is kept
	inBatch  bool   // something of it has been sent or is about to be
	open     bool   // the same without what is about to be sent
	pinned   []page // what cursors of the transaction need
	planned  planned
	pages    share // for what is staged
	prepared bool  // SQL's PREPARE was used for something that may demand
	// preparedLasting says that what was prepared may do what no error takes back.
	preparedLasting bool
	renewing        sync.WaitGroup
	life            context.Context // of what is done for the session; ends with it
	endLife         context.CancelFunc

	process [4]byte // process number and key of BackendKeyData; key is nil if there was none
	key     []byte

	mu         sync.Mutex // guards the fields below, and back's read deadline
	tracker    *tracker
	last       byte // type of the last message of the server
	terminated bool // the client has said goodbye
	wanted     bool // a takeover waits for pumpServer to park
	draining   bool
	severed    bool                    // the drain timeout has passed
	over       bool                    // no message of the client is forwarded any more
	demand     context.CancelCauseFunc // ends the demand that is being fulfilled

	looped *looped // while an event loop carries the session; changes under mu, when nobody else runs it

	parked    chan struct{}
	resume    chan struct{}
	pumped    chan struct{} // pumpServer has returned
	ended     chan struct{} // closed by finish
	left      leftOver
	ahead     *looked // what became of looking at the message in front of the client's buffer
	homeward  bool    // the session is to go back into the loop when it is quiet
	returning bool    // it does so now
}

// leftOver is what an event loop leaves to the pumps, besides what is in the buffers.
type leftOver struct {
	toClient, toServer []byte // to be written first
	front, back        error  // why a direction cannot go on
}

func newSession(s *Server, front *stream, p startupParameters) *session {
	session := &session{
		server:   s,
		user:     p.user,
		database: p.database,
		number:   sessionNumbers.Add(1),
		front:    front,
		tracker:  newTracker(),
		ended:    make(chan struct{}),
		life:     context.Background(),
	}
	session.batch.share.of, session.pages.of = &s.held, &s.held
	session.tracked = p.understood && !p.replication
	if session.intercept = session.tracked && s.intercepts(p.database); session.intercept {
		session.names = s.demandNames(p.database)
	}
	return session
}

// log is a logger that names the session. It is made when there is something to say: it needs half a kilobyte.
func (s *session) log() *zerolog.Logger {
	named := s.server.log.With().Uint64("conn", s.number).Str("db", s.database).Stringer("client", s.peer).Logger()
	return &named
}

// run connects to the server, relays the authentication and then everything else. shaken is called when the handshake is
// over. It is true when a loop carries the session; otherwise the session is over, but for finish.
func (s *session) run(ctx context.Context, packet startupPacket, shaken func()) (carried bool) {
	s.life, s.endLife = context.WithCancel(ctx)
	if !s.shake(ctx, packet) {
		return false
	}
	shaken()
	s.log().Debug().Msg("session begins")
	return s.relay()
}

// shake connects to the server and relays the authentication. It is false when that did not work out.
func (s *session) shake(ctx context.Context, packet startupPacket) bool {
	ctx, stop := context.WithDeadline(ctx, s.deadline)
	defer stop()
	if err := s.connect(ctx, packet); err != nil {
		s.notConnected(err)
		return false
	}
	if err := s.begin(ctx, packet); err != nil {
		s.notBegun(err)
		return false
	}
	_ = s.front.conn.SetDeadline(time.Time{})
	_ = s.back.conn.SetDeadline(time.Time{})
	s.prime(ctx)
	return true
}

// finish is the last thing that happens to a session. Nobody runs it any more.
func (s *session) finish() {
	s.forget()
	s.closeSide(func() *stream { return s.back })
	s.batch.reset()
	s.pages.release()
	if s.endLife != nil {
		s.endLife()
	}
	s.renewing.Wait()
	close(s.ended)
	s.log().Debug().Msg("session ends")
	s.group.leave(s)
	s.server.admission.end(s.peer)
}

// relay forwards in both directions: in an event loop as long as there is nothing to it, otherwise with two pumps. Both call
// relayClient and relayServer and leave everything else in the session as they found it, so that they can take turns at any
// moment. It is true when a loop carries the session, which goes on without the calling goroutine; otherwise the session is over.
func (s *session) relay() (carried bool) {
	for {
		if loop := s.server.pickLoop(); loop != nil && s.loopable() {
			err := loop.carry(s)
			if err != nil {
				s.note(err)
			}
			return err == nil
		}
		if !s.pump(s.life) {
			return false
		}
	}
}

// pump runs the pumps. It is true when the session may go back into the loop.
func (s *session) pump(ctx context.Context) bool {
	s.parked, s.resume, s.pumped = make(chan struct{}), make(chan struct{}), make(chan struct{})
	s.returning = false
	front, back := s.front.conn, s.back.conn
	defer func() {
		if !s.returning {
			_ = front.Close()
			_ = back.Close()
		}
	}()
	s.mu.Lock()
	if s.draining || s.severed { // told when there was nothing to interrupt
		_ = back.SetReadDeadline(longAgo)
	}
	if s.severed {
		_ = front.SetWriteDeadline(time.Now().Add(cutWrite))
	}
	s.mu.Unlock()
	var pumps errgroup.Group
	pumps.Go(func() error { return s.guard(func() error { return s.pumpServer() }) })
	pumps.Go(func() error { return s.guard(func() error { return s.pumpClient(ctx) }) })
	_ = pumps.Wait() // the pumps have noted why
	return s.returning
}

// guard ends the session, and nothing else, if one of its pumps panics.
func (s *session) guard(pump func() error) error {
	finished := false
	defer func() {
		if !finished {
			_ = s.front.conn.Close()
			_ = s.back.conn.Close()
		}
	}()
	defer s.server.recovered()
	err := pump()
	finished = true
	return err
}

// begin relays the handshake behind the startup packet, which the server has.
func (s *session) begin(ctx context.Context, packet startupPacket) error {
	if packet.code>>16 != protocolMajor { // refused, in the form of whatever protocol it is
		_, _ = io.Copy(s.front.conn, io.LimitReader(rest{s.back}, maxStartup))
		return errRefused
	}
	return s.authenticate(ctx)
}

// notBegun tells the client why the handshake did not work out, unless the server has done so.
func (s *session) notBegun(err error) {
	if errors.Is(err, errRefused) {
		return
	}
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	if draining && interrupted(err) {
		_ = s.toClient(shuttingDown())
		return
	}
	s.note(err)
	if f, ok := errors.AsType[*failure](err); ok && f.side == sideServer {
		_ = s.front.conn.SetWriteDeadline(time.Now().Add(linger)) // that of the handshake may be what has passed
		_ = s.toClient(lost())
	}
}

func shuttingDown() []byte {
	return fatal(koldproxy.CodeCannotConnectNow, "koldproxy is shutting down")
}

func (s *session) forget() {
	if s.key != nil {
		s.server.keys.remove(s)
	}
}

func lost() []byte {
	return fatal(koldproxy.CodeConnectionFailure, "koldproxy has lost the connection to the PostgreSQL server")
}

func (s *session) toClient(b []byte) error {
	n := len(b)
	var err error
	if x := s.looped; x != nil {
		err = x.sendTo(sideClient, b)
	} else {
		n, err = s.front.conn.Write(b)
	}
	s.server.metrics.toClient.Add(float64(n))
	if err != nil {
		return &failure{sideClient, "write", err}
	}
	return nil
}

func (s *session) toServer(b []byte) error {
	n := len(b)
	var err error
	if x := s.looped; x != nil {
		err = x.sendTo(sideServer, b)
	} else {
		n, err = s.back.conn.Write(b)
	}
	s.server.metrics.toServer.Add(float64(n))
	if err != nil {
		return &failure{sideServer, "write", err}
	}
	return nil
}

// note logs and counts why a session ended, once, where the reason is found. Ordinary ends are not worth a line.
func (s *session) note(err error) {
	f, ok := errors.AsType[*failure](err)
	if !ok {
		s.log().Debug().Err(err).Msg("session fails")
		return
	}
	if f.side == sideClient && f.direction == "read" && isEOF(f.err) {
		return // it went away
	}
	s.server.metrics.errors.WithLabelValues(string(f.side), f.direction).Inc()
	s.log().Info().Err(f.err).Str("side", string(f.side)).Str("direction", f.direction).Msg("session fails")
}

// drain tells the session to end when it is idle.
func (s *session) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	s.interrupt()
}

// interrupt has whoever waits for the server look at the session's flags; mu is held.
func (s *session) interrupt() {
	switch {
	case s.looped != nil:
		s.looped.wake()
	case s.back != nil && s.back.conn != nil: // otherwise it is on its way out of a loop, and whoever takes it looks by himself
		_ = s.back.conn.SetReadDeadline(longAgo)
	}
}

// cut ends the session whatever it is doing: it cancels the running statement, lets pumpServer say goodbye at the next
// boundary between messages, and closes both sides if that does not come.
func (s *session) cut(ctx context.Context) {
	s.cancelDemand()
	s.mu.Lock()
	s.severed, s.over = true, true
	if s.front.conn != nil { // a loop does not wait for a client
		_ = s.front.conn.SetWriteDeadline(time.Now().Add(cutWrite)) // which may not read at all
	}
	key := s.key
	s.interrupt()
	s.mu.Unlock()
	if key != nil {
		ctx, stop := context.WithTimeout(ctx, cutGrace)
		defer stop()
		_ = s.server.sendCancel(ctx, s.set, s.endpoint, cancelRequest(s.process, key))
	}
	if s.waitEnd() {
		return
	}
	s.closeSide(func() *stream { return s.front })
	if !s.waitEnd() {
		s.closeSide(func() *stream { return s.back })
	}
}

// closeSide closes a connection that may be another one at any moment.
func (s *session) closeSide(side func() *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if in := side(); in != nil && in.conn != nil {
		_ = in.conn.Close()
	}
}

// waitEnd waits for the end of run, for cutGrace at most.
func (s *session) waitEnd() bool {
	timer := time.NewTimer(cutGrace)
	defer timer.Stop()
	select {
	case <-s.ended:
		return true
	case <-timer.C:
		return false
	}
}

// cancelDemand ends the fulfilment that the session waits for, if there is one.
func (s *session) cancelDemand() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.demand != nil {
		s.demand(errCancelled)
	}
}

var (
	errCancelled  = koldproxy.Errorf(koldproxy.CodeQueryCanceled, "canceling statement due to user request")
	errClientGone = errors.New("the client has gone")
	errOver       = errors.New("the session is over")
)

// interrupted says whether an I/O error is one of our own deadlines.
func interrupted(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// isReset says whether the peer closed hard, as PostgreSQL does when it closes with unread bytes in its socket.
func isReset(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "read" && !op.Timeout()
}
