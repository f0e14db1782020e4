package proxy

import (
	"context"
	"encoding/binary"
	"errors"

	"github.com/koldproxy/koldproxy"
)

const (
	maxPassword       = 64 << 10 // a client's answer to an authentication request
	maxAuthentication = 1 << 20  // one message of the server before the session begins
)

// Kinds of authentication messages that more than one place speaks about.
const (
	authOK           = 0
	authGSS          = 7
	authSSPI         = 9
	authSASL         = 10
	authSASLContinue = 11
	authSASLFinal    = 12
)

// authKind is the kind of an authentication message. What is damaged counts as Ok, which asks the client for nothing.
func authKind(body []byte) uint32 {
	if len(body) < 4 {
		return authOK
	}
	return binary.BigEndian.Uint32(body)
}

// errRefused says that the session has been refused, by the server or by koldproxy, and that the client has been told.
var errRefused = errors.New("the session is refused")

// refuse tells the client why it is not let in.
func (s *session) refuse(e *koldproxy.Error) error {
	if err := s.toClient(errorFields("FATAL", e).appendTo(nil, msgError)); err != nil {
		return err
	}
	return errRefused
}

// refusedBecause is refuse for reasons that are counted.
func (s *session) refusedBecause(reason string, e *koldproxy.Error) error {
	s.server.metrics.refused.WithLabelValues(reason).Inc()
	s.log().Warn().Err(e).Str("reason", reason).Msg("session refused")
	return s.refuse(e)
}

// authenticate passes messages on one by one until the server is ready for queries. The client gets a turn only when the
// server asks, so that it cannot send anything ahead of being let in. The messages are not changed, but for what channel
// binding needs (binding.go): the server authenticates the client, and koldproxy learns no more than it has to relay.
// Only with auth = "scram" does it answer the server's request for SCRAM itself (terminate.go).
func (s *session) authenticate(ctx context.Context) error {
	asked := false // the server has asked the client for something
	var state ServerState
	for {
		message, err := next(s.back, maxAuthentication, s.back.more(maxAuthentication))
		if err != nil {
			return &failure{sideServer, "read", err}
		}
		typ, body := message[0], message[headerLen:]
		if typ == msgKeyData {
			s.keepKey(body) // before the client has it: it may cancel at once
		}
		s.tracker.received(typ, body)
		switch {
		case typ == msgAuth && authKind(body) != authOK:
			asked = true
			if err := s.prove(ctx, message); err != nil {
				return err
			}
			continue
		case typ == msgAuth && !asked:
			if refusal := s.peerRefusal(); refusal != nil {
				return s.refusedBecause("peer", refusal)
			}
		case typ == msgParameterStatus:
			state.note(body)
		case typ == msgReady && !s.target.accepts(state): // it was another one a moment ago
			s.server.states.forget(s.tried)
			return s.refusedBecause("session_attrs", s.wrongState())
		}
		if err := s.toClient(message); err != nil {
			return err
		}
		s.back.r += len(message)
		switch typ {
		case msgError:
			return errRefused
		case msgReady:
			return nil
		}
	}
}

// prove answers the server's request for a proof of who the client is. It consumes the request, which is in front of back.
func (s *session) prove(ctx context.Context, request []byte) error {
	body := request[headerLen:]
	kind := authKind(body)
	switch kind {
	case authGSS, authSSPI: // their tickets are made out to the host that the client connected to, which is not the server
		return s.refuse(koldproxy.Errorf(koldproxy.CodeFeatureNotSupported, "koldproxy cannot relay GSSAPI or SSPI authentication"))
	case authSASL:
		if s.endsSCRAM(body) {
			offered := mechanisms(body)
			s.back.r += len(request)
			return s.endSCRAM(ctx, offered)
		}
	}
	message := request
	if kind == authSASL {
		message = s.offer(request)
	}
	if err := s.toClient(message); err != nil {
		return err
	}
	s.back.r += len(request)
	if kind == authSASLFinal {
		return nil // the server's proof, which needs no answer
	}
	answer, err := s.nextFromClient()
	if err != nil {
		return err
	}
	if kind == authSASL {
		if refusal := s.checkBinding(answer); refusal != nil {
			s.log().Warn().Msg("channel binding cannot be relayed: server and koldproxy show different certificates")
			return s.refuse(refusal)
		}
	}
	if err := s.toServer(answer); err != nil {
		return err
	}
	s.front.r += len(answer)
	return nil
}

// nextFromClient is the client's answer to an authentication request. It stays in the buffer.
func (s *session) nextFromClient() ([]byte, error) {
	message, err := next(s.front, maxPassword, s.front.more(maxPassword))
	if errors.Is(err, errMessageTooLarge) {
		_ = s.toClient(fatal(koldproxy.CodeProtocolViolation, "koldproxy: the answer to an authentication request is too long"))
		return nil, err
	}
	if err != nil {
		return nil, &failure{sideClient, "read", err}
	}
	return message, nil
}

// next is the message in front of a stream, whole; it stays in the buffer. more reads on. A message of more than limit
// bytes is errMessageTooLarge before its bytes are read.
func next(in *stream, limit int, more func() error) ([]byte, error) {
	for {
		b := in.buffered()
		if len(b) >= headerLen {
			size := binary.BigEndian.Uint32(b[1:])
			if size < 4 || int64(size) >= int64(limit) {
				return nil, errMessageTooLarge
			}
			if total := int(size) + 1; len(b) >= total {
				return b[:total], nil
			}
		}
		if err := more(); err != nil {
			return nil, err
		}
	}
}
