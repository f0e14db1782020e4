package proxy

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

// Limits of a cancel key in BackendKeyData: four bytes up to protocol 3.0, up to 256 since 3.2.
const (
	minKey = 4
	maxKey = 256
)

// keyTable knows the sessions by what a cancel request says: the server process's number and the secret key. The process
// number is no secret, so it may be an index; keys are compared in constant time.
type keyTable struct {
	mu       sync.Mutex
	sessions map[[4]byte][]*session // several when numbers repeat behind an address with more than one server
}

func (k *keyTable) add(s *session) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.sessions == nil {
		k.sessions = map[[4]byte][]*session{}
	}
	k.sessions[s.process] = append(k.sessions[s.process], s)
}

func (k *keyTable) remove(s *session) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var rest []*session
	for _, other := range k.sessions[s.process] {
		if other != s {
			rest = append(rest, other)
		}
	}
	if rest == nil {
		delete(k.sessions, s.process)
	} else {
		k.sessions[s.process] = rest
	}
}

// find returns the session that a cancel request (process number and key) belongs to, nil if there is none.
func (k *keyTable) find(request []byte) *session {
	if len(request) < 4+minKey || len(request) > 4+maxKey {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var found *session
	for _, s := range k.sessions[[4]byte(request)] {
		if subtle.ConstantTimeCompare(s.key, request[4:]) == 1 {
			found = s
		}
	}
	return found
}

// keepKey notes the key of the session from a BackendKeyData body. Servers that send none are served all the same.
func (s *session) keepKey(body []byte) {
	if len(body) < 4+minKey || len(body) > 4+maxKey || s.key != nil {
		return
	}
	s.mu.Lock()
	copy(s.process[:], body)
	s.key = append([]byte(nil), body[4:]...)
	s.mu.Unlock()
	s.server.keys.add(s)
}

// cancelRequest is the packet that a client would send to cancel what the session does.
func cancelRequest(process [4]byte, key []byte) []byte {
	request := binary.BigEndian.AppendUint32(nil, uint32(12+len(key)))
	request = binary.BigEndian.AppendUint32(request, codeCancel)
	return append(append(request, process[:]...), key...)
}

// waitingCancels is how many cancel requests may wait or be under way for each one that may be under way.
const waitingCancels = 16

// errTooManyCancels means that a cancel request was dropped.
var errTooManyCancels = errors.New("too many cancel requests at a time")

// cancel handles a cancel request. It returns, and the caller closes the client's connection, only after the server has
// closed its side: by then the request has been carried out, so that it cannot hit the client's next query.
func (s *Server) cancel(ctx context.Context, packet startupPacket) error {
	s.metrics.cancels.Inc()
	target := s.keys.find(packet.raw[minStartup:])
	if target == nil && !s.current().ForwardUnknownCancels {
		s.metrics.refused.WithLabelValues("cancel_key").Inc()
		return nil
	}
	select {
	case s.waiting <- struct{}{}:
		defer func() { <-s.waiting }()
	default:
		return errTooManyCancels
	}
	ctx, stop := context.WithTimeout(ctx, s.current().CancelTimeout)
	defer stop()
	select {
	case s.cancels <- struct{}{}:
		defer func() { <-s.cancels }()
	case <-ctx.Done():
		return errTooManyCancels
	}
	if target != nil {
		target.cancelDemand()
		return s.sendCancel(ctx, target.set, target.endpoint, packet.raw)
	}
	endpoints := s.current().endpoints
	errs := make([]error, len(endpoints))
	var all sync.WaitGroup
	for i, e := range endpoints { // at once: one may be stuck, and a server that does not know the key says nothing
		all.Go(func() {
			defer s.recovered()
			errs[i] = s.sendCancel(ctx, s.current(), e, packet.raw)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// cancelFailed notes why a cancel request was not carried out.
func (s *Server) cancelFailed(err error) {
	if errors.Is(err, errTooManyCancels) {
		s.metrics.refused.WithLabelValues("cancels").Inc()
		s.log.Debug().Err(err).Msg("cancel request dropped") // there are many
		return
	}
	if f, ok := errors.AsType[*failure](err); ok {
		s.metrics.errors.WithLabelValues(string(f.side), f.direction).Inc()
	}
	s.log.Warn().Err(err).Msg("cannot forward a cancel request")
}

// sendCancel sends a cancel request to a server, encrypted like a session, and waits until the server closes the
// connection.
func (s *Server) sendCancel(ctx context.Context, set *settings, e endpoint, request []byte) error {
	ctx, stop := context.WithTimeout(ctx, set.CancelTimeout)
	defer stop()
	conn, err := s.dial(ctx, set, e)
	if err != nil {
		return err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	release := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(longAgo) })
	defer release()
	if _, err := conn.Write(request); err != nil {
		return &failure{sideServer, "write", err}
	}
	if _, err := io.Copy(io.Discard, io.LimitReader(conn, maxStartup)); err != nil && !isEOF(err) && !isReset(err) {
		return &failure{sideServer, "read", err}
	}
	return nil
}
