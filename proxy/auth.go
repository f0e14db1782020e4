package proxy

import (
	"encoding/binary"
	"errors"

	"github.com/koldproxy/koldproxy"
)

const (
	maxPassword       = 64 << 10 // a client's answer to an authentication request
	maxAuthentication = 1 << 20  // one message of the server before the session begins
)

// errRefused says that the server has refused the session; its error has been passed on.
var errRefused = errors.New("the server refused the session")

// relayAuthentication passes messages on one by one until the server is ready for queries. The client gets a turn only
// when the server asks, so that it cannot send anything ahead of being let in. The messages are not changed: the server
// authenticates the client, and koldproxy learns no more than it has to relay.
func (s *session) relayAuthentication() error {
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
		if typ != msgAuth || !isNegotiated(body) {
			if err := s.toClient(message); err != nil {
				return err
			}
		}
		s.back.r += len(message)
		switch {
		case typ == msgError:
			return errRefused
		case typ == msgReady:
			return nil
		case typ == msgAuth && isNegotiated(body):
			if err := s.toClient(fatal(koldproxy.CodeFeatureNotSupported, "koldproxy cannot relay GSSAPI or SSPI authentication")); err != nil {
				return err
			}
			return errRefused
		case typ == msgAuth && asksClient(body):
			if err := s.relayPassword(); err != nil {
				return err
			}
		}
	}
}

// isNegotiated says whether an authentication message begins GSSAPI or SSPI, whose tickets are made out to the host that
// the client connected to, which is not the server.
func isNegotiated(body []byte) bool {
	const (
		gss  = 7
		sspi = 9
	)
	if len(body) < 4 {
		return false
	}
	kind := binary.BigEndian.Uint32(body)
	return kind == gss || kind == sspi
}

// asksClient says whether an authentication message waits for an answer: all but Ok and SASLFinal.
func asksClient(body []byte) bool {
	if len(body) < 4 {
		return false
	}
	const (
		ok        = 0
		saslFinal = 12
	)
	kind := binary.BigEndian.Uint32(body)
	return kind != ok && kind != saslFinal
}

func (s *session) relayPassword() error {
	message, err := next(s.front, maxPassword, s.front.more(maxPassword))
	if errors.Is(err, errMessageTooLarge) {
		_ = s.toClient(fatal(koldproxy.CodeProtocolViolation, "koldproxy: the answer to an authentication request is too long"))
		return err
	}
	if err != nil {
		return &failure{sideClient, "read", err}
	}
	if err := s.toServer(message); err != nil {
		return err
	}
	s.front.r += len(message)
	return nil
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
