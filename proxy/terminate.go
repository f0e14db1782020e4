package proxy

import (
	"bytes"
	"context"
	"crypto/hmac"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/koldproxy/koldproxy"
)

// Verifiers knows what the server stores of its users' passwords.
type Verifiers interface {
	// Verifier returns what pg_authid.rolpassword holds for a role, empty when there is no such role or it has no password.
	// It is called for each login, from many sessions at once; ctx ends with the time for the handshake.
	Verifier(ctx context.Context, user string) (string, error)
}

// errProof says that the client does not know the password. The server refuses it, in its own words.
var errProof = errors.New("wrong proof")

// scramEnd ends SCRAM at koldproxy (auth = "scram"): the client proves its password to koldproxy, which has the server's
// verifier, and koldproxy proves it to the server with the client key that every correct proof reveals. So each side can be
// bound to the TLS connection that it really has. The two exchanges are interleaved:
//
//	client                 koldproxy                      server
//	                                              ◀────── mechanisms
//	                       client-first           ──────▶
//	                                              ◀────── salt, iterations
//	       ◀────────────── mechanisms
//	client-first ────────▶
//	       ◀────────────── the server's salt, iterations
//	proof  ──────────────▶ check, recover key
//	                       proof                  ──────▶
//	                                              ◀────── server signature
//	       ◀────────────── check, own signature
//
// The salt is always the server's, which answers for roles that do not exist or have no password as well; and a client
// that fails is refused by the server, on account of a proof that cannot be right. So the answers, what the server logs
// and delays, and what it says about a password that has expired are those of a direct connection.
type scramEnd struct {
	*session
	verifier scramVerifier
	known    bool // the verifier is the user's
	server   scramServerFirst
	bare     string // koldproxy's own client-first without its header
	header   string // that header
	bound    []byte // channel binding data of the server's side, nil if it is not bound
}

// endsSCRAM says whether a request of the server for SASL is one that koldproxy answers itself.
func (s *session) endsSCRAM(body []byte) bool {
	return s.server.cfg.Auth == AuthSCRAM && slices.Contains(mechanisms(body), mechanismSCRAM)
}

// endSCRAM does all of SCRAM. After it the server's AuthenticationOk follows.
func (s *session) endSCRAM(ctx context.Context, offered []string) error {
	e := &scramEnd{session: s}
	if err := e.lookUp(ctx); err != nil {
		return err
	}
	if err := e.beginServer(offered); err != nil {
		return err
	}
	key, authMessage, err := e.askClient()
	if refusal, ok := errors.AsType[*koldproxy.Error](err); ok {
		return s.refuse(refusal)
	}
	switch {
	case errors.Is(err, errProof):
		return e.letRefuse()
	case err != nil:
		return err
	}
	defer clear(key)
	if err := e.finishServer(key); err != nil {
		return err
	}
	return s.toClient(saslFinal(e.verifier.serverSignature(authMessage)))
}

// nameDataLen is PostgreSQL's limit of names, which it cuts user names to.
const nameDataLen = 64

// lookUp reads the user's verifier. The user is the startup packet's: the name in SCRAM messages means nothing.
func (e *scramEnd) lookUp(ctx context.Context) error {
	e.verifier = randomVerifier()
	user := e.user[:min(len(e.user), nameDataLen-1)]
	if !utf8.ValidString(user) {
		return nil // cannot be asked for
	}
	text, err := e.session.server.deps.Verifiers.Verifier(ctx, user)
	if err != nil {
		e.log().Error().Err(err).Msg("cannot read a password verifier")
		return e.refuse(koldproxy.Errorf(koldproxy.CodeConnectionFailure, "koldproxy cannot authenticate users").
			WithHint("The log of koldproxy says why."))
	}
	if v, ok := parseVerifier(text); ok {
		e.verifier, e.known = v, true
	}
	return nil
}

// beginServer sends the client's part to the server and gets salt and iterations.
func (e *scramEnd) beginServer(offered []string) error {
	mechanism := mechanismSCRAM
	e.header = "n,,"
	if e.bound = bindingOf(e.back); e.bound != nil {
		if slices.Contains(offered, mechanismPlus) {
			mechanism, e.header = mechanismPlus, "p="+bindingType+",,"
		} else {
			e.header, e.bound = "y,,", nil // a server that did offer it, to somebody in between, refuses this
		}
	}
	nonce := randomNonce()
	e.bare = "n=,r=" + nonce
	first := e.header + e.bare
	body := binary.BigEndian.AppendUint32(zeroTerminated(mechanism), uint32(len(first)))
	if err := e.toServer(appendMessage(nil, msgPassword, body, []byte(first))); err != nil {
		return err
	}
	message, err := e.fromServer(authSASLContinue)
	if err != nil {
		return err
	}
	var ok bool
	e.server, ok = parseServerFirst(message)
	if !ok || !strings.HasPrefix(e.server.nonce, nonce) || len(e.server.nonce) == len(nonce) {
		return &failure{sideServer, "protocol", errors.New("the server's first SCRAM message makes no sense")}
	}
	// A password that has changed since it was looked up has another salt.
	e.known = e.known && e.server.iterations == e.verifier.iterations && bytes.Equal(e.server.salt, e.verifier.salt)
	return nil
}

// askClient has the exchange with the client and returns its key. An error that is a *koldproxy.Error is for the client.
func (e *scramEnd) askClient() (key []byte, authMessage string, err error) {
	binding := bindingOf(e.front)
	offer := []string{mechanismSCRAM}
	if binding != nil {
		offer = []string{mechanismPlus, mechanismSCRAM}
	}
	if err := e.toClient(authenticationSASL(offer...)); err != nil {
		return nil, "", err
	}
	initial, err := e.fromClient()
	if err != nil {
		return nil, "", err
	}
	mechanism, message, ok := parseSASLInitial(initial)
	if !ok {
		return nil, "", koldproxy.Errorf(koldproxy.CodeProtocolViolation, "invalid SASL initial response")
	}
	if !slices.Contains(offer, mechanism) {
		return nil, "", koldproxy.Errorf(koldproxy.CodeProtocolViolation, "client selected an invalid SASL authentication mechanism")
	}
	if message == nil { // the client wants to be asked
		if err := e.toClient(saslContinue("")); err != nil {
			return nil, "", err
		}
		if message, err = e.fromClient(); err != nil {
			return nil, "", err
		}
	}
	first, err := parseClientFirst(message)
	if err != nil {
		return nil, "", err
	}
	if err := first.judge(mechanism, binding != nil); err != nil {
		return nil, "", err
	}
	challenge := newServerFirst(first.nonce+randomNonce(), e.server.salt, e.server.iterations)
	if err := e.toClient(saslContinue(challenge.text)); err != nil {
		return nil, "", err
	}
	if message, err = e.fromClient(); err != nil {
		return nil, "", err
	}
	final, err := parseClientFinal(message)
	if err != nil {
		return nil, "", err
	}
	if err := final.judge(first, challenge, binding); err != nil {
		return nil, "", err
	}
	authMessage = first.bare + "," + challenge.text + "," + final.withoutProof
	key, ok = e.verifier.clientKey(final.proof, authMessage)
	if !ok || !e.known {
		return nil, "", errProof
	}
	return key, authMessage, nil
}

// judge checks what the client says about channel binding. offered says whether koldproxy offers it.
func (f scramClientFirst) judge(mechanism string, offered bool) error {
	switch {
	case mechanism == mechanismPlus && f.flag != 'p':
		return malformedSCRAM("The client selected SCRAM-SHA-256-PLUS, but the SCRAM message does not include channel binding data.")
	case mechanism != mechanismPlus && f.flag == 'p':
		return malformedSCRAM("The client selected SCRAM-SHA-256 without channel binding, but the SCRAM message includes channel binding data.")
	case f.flag == 'p' && f.binding != bindingType:
		return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "unsupported SCRAM channel-binding type %q", f.binding)
	case f.flag == 'y' && offered:
		return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "SCRAM channel binding negotiation error").
			WithDetail("The client supports SCRAM channel binding but thinks the server does not.  " +
				"However, this server does support channel binding.")
	}
	return nil
}

// judge checks that the client's last message belongs to this exchange and this connection.
func (f scramClientFinal) judge(first scramClientFirst, challenge scramServerFirst, binding []byte) error {
	want := []byte(first.header)
	if first.flag == 'p' {
		want = append(want, binding...)
	}
	switch {
	case f.nonce != challenge.nonce:
		return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "invalid SCRAM response").WithDetail("Nonce does not match.")
	case f.binding == base64.StdEncoding.EncodeToString(want):
		return nil
	case first.flag == 'p':
		return koldproxy.Errorf(koldproxy.CodeInvalidAuthorization, "SCRAM channel binding check failed")
	}
	return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "unexpected SCRAM channel-binding attribute in client-final-message")
}

// finalFor is koldproxy's last message to the server, with the proof that make makes.
func (e *scramEnd) finalFor(makeProof func(authMessage string) []byte) (message []byte, authMessage string) {
	binding := append([]byte(e.header), e.bound...)
	withoutProof := "c=" + base64.StdEncoding.EncodeToString(binding) + ",r=" + e.server.nonce
	authMessage = e.bare + "," + e.server.text + "," + withoutProof
	proof := base64.StdEncoding.EncodeToString(makeProof(authMessage))
	return appendMessage(nil, msgPassword, []byte(withoutProof+",p="+proof)), authMessage
}

// finishServer logs in with the client's key and has the server prove that it knows the verifier, too.
func (e *scramEnd) finishServer(key []byte) error {
	message, authMessage := e.finalFor(func(authMessage string) []byte {
		return proofOf(key, e.verifier.storedKey, authMessage)
	})
	if err := e.toServer(message); err != nil {
		return err
	}
	answer, err := e.fromServer(authSASLFinal)
	if err != nil {
		return err
	}
	signature, ok := parseServerFinal(answer)
	if !ok || !hmac.Equal(signature, e.verifier.serverSignature(authMessage)) {
		return &failure{sideServer, "protocol", errors.New("the server does not know the password verifier")}
	}
	return nil
}

// letRefuse has the server refuse the client. A server that does not gets no second chance.
func (e *scramEnd) letRefuse() error {
	message, _ := e.finalFor(func(string) []byte { return randomKey() })
	if err := e.toServer(message); err != nil {
		return err
	}
	if _, err := e.fromServer(authSASLFinal); err != nil {
		return err
	}
	return e.refuse(koldproxy.Errorf(koldproxy.CodeInvalidPassword, "password authentication failed for user %q", e.user))
}

// fromServer returns the body of the server's next authentication message, which must be of a kind. Errors of the server
// go to the client and are errRefused. The slice is the caller's.
func (e *scramEnd) fromServer(kind uint32) ([]byte, error) {
	for {
		message, err := next(e.back, maxAuthentication, e.back.more(maxAuthentication))
		if err != nil {
			return nil, &failure{sideServer, "read", err}
		}
		message = bytes.Clone(message)
		e.back.r += len(message)
		typ, body := message[0], message[headerLen:]
		switch {
		case typ == msgError || typ == msgNotice:
			if err := e.toClient(message); err != nil {
				return nil, err
			}
			if typ == msgError {
				return nil, errRefused
			}
		case typ == msgAuth && authKind(body) == kind:
			return body[4:], nil
		default:
			return nil, &failure{sideServer, "protocol", fmt.Errorf("message %q in the middle of SCRAM", typ)}
		}
	}
}

// fromClient returns the body of the client's next message. The slice is the caller's.
func (e *scramEnd) fromClient() ([]byte, error) {
	message, err := e.nextFromClient()
	if err != nil {
		return nil, err
	}
	if message[0] != msgPassword {
		return nil, koldproxy.Errorf(koldproxy.CodeProtocolViolation, "expected SASL response, got message type %d", message[0])
	}
	body := bytes.Clone(message[headerLen:])
	e.front.r += len(message)
	return body, nil
}

// parseSASLInitial reads a SASLInitialResponse: mechanism, length or -1, the mechanism's first message.
func parseSASLInitial(body []byte) (mechanism string, message []byte, ok bool) {
	name, rest, ok := cString(body)
	if !ok || len(rest) < 4 {
		return "", nil, false
	}
	size := binary.BigEndian.Uint32(rest)
	rest = rest[4:]
	switch {
	case size == 1<<32-1 && len(rest) == 0:
		return string(name), nil, true
	case uint64(size) != uint64(len(rest)):
		return "", nil, false
	}
	return string(name), rest, true
}

func saslContinue(text string) []byte {
	return appendMessage(nil, msgAuth, []byte{0, 0, 0, authSASLContinue}, []byte(text))
}

func saslFinal(signature []byte) []byte {
	return appendMessage(nil, msgAuth, []byte{0, 0, 0, authSASLFinal}, []byte("v="+base64.StdEncoding.EncodeToString(signature)))
}
