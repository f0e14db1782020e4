package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/pires/go-proxyproto"
)

// peer is who is at the other end of a client's connection. The zero peer is one without an address: on a Unix socket.
type peer struct{ address netip.AddrPort }

func peerOf(addr net.Addr) peer {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok {
		return peer{}
	}
	p := tcp.AddrPort()
	return peer{netip.AddrPortFrom(p.Addr().Unmap().WithZone(""), p.Port())}
}

func (p peer) isUnix() bool { return !p.address.IsValid() }

// String is for logs and application_name.
func (p peer) String() string {
	if p.isUnix() {
		return "unix"
	}
	return p.address.String()
}

// network is what a peer counts as where peers are counted: an IPv4 address, or the network of 64 bits that a host with
// IPv6 has to itself.
func (p peer) network() netip.Prefix {
	address := p.address.Addr()
	bits := address.BitLen()
	if address.Is6() {
		bits = 64
	}
	network, _ := address.Prefix(bits) // cannot fail for so many bits
	return network
}

// errProxyHeader marks PROXY headers that are missing, damaged or not allowed.
var errProxyHeader = errors.New("PROXY protocol")

// Beginnings of the two versions of the PROXY protocol. No startup packet begins so: read as a length they are far too
// large.
var (
	proxyV1 = proxyproto.SIGV1
	proxyV2 = proxyproto.SIGV2
)

// identify finds out who the client is. Behind a load balancer that is what its PROXY header says, and a header must come;
// from elsewhere none may.
func identify(in *stream, direct peer, from sources) (peer, error) {
	if err := in.fill(startupBuffer); err != nil {
		return direct, err
	}
	if !from.include(direct) {
		if begins(in.buffered(), proxyV1) || begins(in.buffered(), proxyV2) {
			return direct, fmt.Errorf("%w: a header from %s, which is not in proxy.proxy_protocol_from", errProxyHeader, direct)
		}
		return direct, nil
	}
	if err := awaitHeader(in); err != nil {
		return direct, err
	}
	reader := bufio.NewReader(rest{in})
	header, err := proxyproto.Read(reader)
	if err != nil {
		return direct, fmt.Errorf("%w: %w", errProxyHeader, err)
	}
	ahead, _ := reader.Peek(reader.Buffered())
	// What was read ahead goes in front of what is left.
	left := append(bytes.Clone(ahead), in.buffered()...)
	in.buf = make([]byte, max(startupBuffer, len(left)))
	in.r, in.w = 0, copy(in.buf, left)
	if header.Command.IsLocal() { // the load balancer's own business, a health check
		return direct, nil
	}
	switch source := header.SourceAddr.(type) {
	case *net.TCPAddr:
		return peerOf(source), nil
	case *net.UnixAddr:
		return peer{}, nil
	}
	return direct, nil // UNKNOWN: the load balancer does not say
}

// maxProxyV1 is the longest header of version 1.
const maxProxyV1 = 107

// awaitHeader reads on until a header of version 1 is whole: unlike one of version 2 it does not say how long it is, and the
// parser wants to see its end.
func awaitHeader(in *stream) error {
	for len(in.buffered()) < len(proxyV1) ||
		begins(in.buffered(), proxyV1) && len(in.buffered()) < maxProxyV1 && !bytes.Contains(in.buffered(), []byte("\n")) {
		if err := in.fill(startupBuffer); err != nil {
			return err
		}
	}
	return nil
}

// begins says whether b begins with a signature, or may do so as far as it goes. A packet's length begins with zero bytes,
// so four bytes are enough to know.
func begins(b, signature []byte) bool {
	n := min(len(b), len(signature))
	return n >= 4 && bytes.Equal(b[:n], signature[:n])
}

// rest reads a stream from where it is.
type rest struct{ in *stream }

func (r rest) Read(b []byte) (int, error) {
	if len(r.in.buffered()) == 0 {
		return r.in.conn.Read(b)
	}
	n := copy(b, r.in.buffered())
	r.in.r += n
	return n, nil
}
