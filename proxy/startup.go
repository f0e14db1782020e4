package proxy

import (
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"net"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// Codes in the place of the protocol version, and limits, of the first packets.
const (
	codeCancel    = 80877102
	codeSSL       = 80877103
	codeGSSENC    = 80877104
	minStartup    = 8
	maxStartup    = 10_004 // PostgreSQL takes 10000 bytes behind the length
	tlsHandshake  = 0x16   // first byte of a TLS record; no length of a packet begins with it
	protocolMajor = 3

	// startupBuffer is a stream's buffer until the client has said something: those that say nothing should cost little.
	startupBuffer = 512
)

// errClosed ends a connection without a word, as PostgreSQL does with what is no startup packet.
var errClosed = errors.New("not a startup packet")

// startupPacket is the client's first real packet, with the bytes as they came.
type startupPacket struct {
	raw  []byte
	code uint32
}

// readStartup answers requests for encryption until the client sends a startup packet or a cancel request. The connection
// to go on with, which is another one after a TLS handshake, is in's. An error that is a *koldproxy.Error is for the client.
func readStartup(in *stream, policy clientPolicy) (startupPacket, error) {
	var tlsDone, gssDone bool
	if len(in.buffered()) == 0 {
		if err := in.fill(bufferSize); err != nil {
			return startupPacket{}, err
		}
	}
	if in.buffered()[0] == tlsHandshake {
		tlsDone = true
		if err := policy.encryptDirectly(in); err != nil {
			return startupPacket{}, err
		}
	}
	for {
		raw, err := readStartupPacket(in)
		if err != nil {
			return startupPacket{}, err
		}
		code := binary.BigEndian.Uint32(raw[4:])
		switch code {
		case codeSSL:
			if tlsDone || len(raw) != minStartup {
				return startupPacket{}, unsupportedVersion(code)
			}
			tlsDone = true
			if err := answerSSL(in, policy); err != nil {
				return startupPacket{}, err
			}
		case codeGSSENC:
			if gssDone || len(raw) != minStartup {
				return startupPacket{}, unsupportedVersion(code)
			}
			gssDone = true
			if err := refuseEncryption(in, "GSSAPI encryption"); err != nil {
				return startupPacket{}, err
			}
		default:
			packet := startupPacket{raw: raw, code: code}
			if code == codeCancel { // may come in any way, as with PostgreSQL
				return packet, nil
			}
			return packet, policy.permits(in.conn, packet)
		}
	}
}

// readStartupPacket reads one packet and leaves what follows it in the buffer. The slice is the caller's.
func readStartupPacket(in *stream) ([]byte, error) {
	for {
		b := in.buffered()
		if len(b) >= 4 {
			size := binary.BigEndian.Uint32(b)
			if size < minStartup || size > maxStartup {
				return nil, errClosed
			}
			if len(b) >= int(size) {
				in.r += int(size)
				return append([]byte(nil), b[:size]...), nil
			}
		}
		if err := in.fill(bufferSize); err != nil {
			return nil, err
		}
	}
}

func unsupportedVersion(code uint32) error {
	return koldproxy.Errorf(koldproxy.CodeFeatureNotSupported,
		"unsupported frontend protocol %d.%d: server supports 3.0 to 3.0", code>>16, code&0xffff)
}

// answerSSL answers an SSLRequest and makes the handshake if TLS is configured.
func answerSSL(in *stream, policy clientPolicy) error {
	if policy.config == nil {
		return refuseEncryption(in, "SSL")
	}
	if _, err := in.conn.Write([]byte{'S'}); err != nil {
		return err
	}
	if len(in.buffered()) > 0 {
		return stuffed("SSL")
	}
	return policy.encrypt(in)
}

func refuseEncryption(in *stream, what string) error {
	if _, err := in.conn.Write([]byte{'N'}); err != nil {
		return err
	}
	if len(in.buffered()) > 0 {
		return stuffed(what)
	}
	return nil
}

// stuffed is PostgreSQL's answer to bytes that were sent in plain before they could be encrypted: whoever sits in between
// may have put them there.
func stuffed(what string) error {
	return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "received unencrypted data after %s request", what).
		WithDetail("This could be either a client-software bug or evidence of an attempted man-in-the-middle attack.")
}

// startupParameters are the parameters that koldproxy itself needs to know. Of duplicates the last one counts, as in
// PostgreSQL.
type startupParameters struct {
	user, database string
	replication    bool
	// understood is false when PostgreSQL is going to refuse the packet, or speak another protocol than 3.
	understood bool
}

func parseStartup(packet startupPacket) startupParameters {
	var p startupParameters
	if packet.code>>16 != protocolMajor {
		return p
	}
	body := packet.raw[minStartup:]
	for {
		name, rest, ok := cString(body)
		if !ok {
			return p
		}
		if len(name) == 0 {
			p.understood = len(rest) == 0
			break
		}
		value, rest, ok := cString(rest)
		if !ok {
			return p
		}
		switch string(name) {
		case "user":
			p.user = string(value)
		case "database":
			p.database = string(value)
		case "replication":
			p.replication = !isFalse(string(value))
		}
		body = rest
	}
	if p.database == "" {
		p.database = p.user
	}
	return p
}

// maxApplicationName is what PostgreSQL cuts application_name to.
const maxApplicationName = nameDataLen - 1

// withClientAddress is the packet with the client's address behind its application_name, which is cut so that the address
// has room. It goes in as one more parameter at the end, because of duplicates PostgreSQL takes the last. A packet stays as
// it is when it would become too long, or when the name is hidden in its options.
func (p startupPacket) withClientAddress(client peer) startupPacket {
	name, options := "", ""
	for key, value := range p.parameters() {
		switch key {
		case "application_name":
			name = value
		case "options":
			options = value
		}
	}
	if name == "" && strings.Contains(options, "application_name") {
		return p
	}
	suffix := client.String()
	if name != "" {
		suffix = " - " + suffix
		name = name[:min(len(name), max(0, maxApplicationName-len(suffix)))]
	}
	raw := append([]byte(nil), p.raw[:len(p.raw)-1]...)
	for _, s := range []string{"application_name", name + suffix} {
		raw = append(append(raw, s...), 0)
	}
	if raw = append(raw, 0); len(raw) > maxStartup {
		return p
	}
	binary.BigEndian.PutUint32(raw, uint32(len(raw)))
	return startupPacket{raw: raw, code: p.code}
}

// parameters yields the names and values of a startup packet in order, as far as it is well-formed.
func (p startupPacket) parameters() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		rest := p.raw[minStartup:]
		for {
			name, more, ok := cString(rest)
			if !ok || len(name) == 0 {
				return
			}
			value, more, ok := cString(more)
			if !ok || !yield(string(name), string(value)) {
				return
			}
			rest = more
		}
	}
}

// isFalse is PostgreSQL's parse_bool for the false side; what it does not know counts as true here, so that nothing is
// intercepted in doubt.
func isFalse(value string) bool {
	v := strings.ToLower(value)
	switch {
	case v == "":
		return false
	case strings.HasPrefix("false", v), strings.HasPrefix("no", v), v == "0":
		return true
	case len(v) >= 2 && strings.HasPrefix("off", v):
		return true
	}
	return false
}

// isEOF says whether a connection ended the ordinary way.
func isEOF(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
