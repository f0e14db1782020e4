package proxy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"strconv"
	"strings"

	"github.com/koldproxy/koldproxy"
)

// SCRAM-SHA-256 as in RFC 5802 and RFC 7677, as far as a man in the middle with the verifier needs it: values in, values
// out. It never sees a password, so there is no key derivation here.

// SASL mechanisms.
const (
	mechanismSCRAM = "SCRAM-SHA-256"
	mechanismPlus  = "SCRAM-SHA-256-PLUS" // with channel binding
)

// scramVerifier is what PostgreSQL stores of a password (pg_authid.rolpassword):
//
//	SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>
type scramVerifier struct {
	iterations           int
	salt                 []byte
	storedKey, serverKey []byte
}

// parseVerifier reads a stored password; ok is false for one of another kind.
func parseVerifier(text string) (v scramVerifier, ok bool) {
	text, ok = strings.CutPrefix(text, mechanismSCRAM+"$")
	derivation, keys, ok2 := strings.Cut(text, "$")
	iterations, salt, ok3 := strings.Cut(derivation, ":")
	stored, server, ok4 := strings.Cut(keys, ":")
	if !ok || !ok2 || !ok3 || !ok4 {
		return scramVerifier{}, false
	}
	n, valid := scramIterations(iterations)
	v.iterations = n
	for _, part := range []struct {
		text string
		into *[]byte
		size int
	}{{salt, &v.salt, 0}, {stored, &v.storedKey, sha256.Size}, {server, &v.serverKey, sha256.Size}} {
		raw, good := scramBase64(part.text)
		valid = valid && good && len(raw) > 0 && (part.size == 0 || len(raw) == part.size)
		*part.into = raw
	}
	if !valid {
		return scramVerifier{}, false
	}
	return v, true
}

// randomVerifier is one that nobody has the password of.
func randomVerifier() scramVerifier {
	return scramVerifier{storedKey: randomKey(), serverKey: randomKey()}
}

func randomKey() []byte {
	key := make([]byte, sha256.Size)
	_, _ = rand.Read(key) // never fails
	return key
}

// randomNonce is as long as PostgreSQL's.
func randomNonce() string {
	raw := make([]byte, 18)
	_, _ = rand.Read(raw) // never fails
	return base64.StdEncoding.EncodeToString(raw)
}

// clientKey recovers the key that proves the knowledge of the password from a client's proof; ok is false when the proof
// is wrong.
func (v scramVerifier) clientKey(proof []byte, authMessage string) (key []byte, ok bool) {
	if len(proof) != sha256.Size {
		return nil, false
	}
	key = proofOf(proof, v.storedKey, authMessage)
	stored := sha256.Sum256(key)
	return key, subtle.ConstantTimeCompare(stored[:], v.storedKey) == 1
}

// serverSignature proves the knowledge of the verifier to the client.
func (v scramVerifier) serverSignature(authMessage string) []byte {
	return hmacSHA256(v.serverKey, authMessage)
}

// proofOf is key XOR ClientSignature: the proof for a client key, and the client key for a proof.
func proofOf(key, storedKey []byte, authMessage string) []byte {
	out := hmacSHA256(storedKey, authMessage)
	subtle.XORBytes(out, out, key)
	return out
}

func hmacSHA256(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}

// scramClientFirst is "<flag>[=type],,n=…,r=<nonce>".
type scramClientFirst struct {
	header  string // up to and with the second comma
	flag    byte   // n: no channel binding, y: the client could but thinks that the server cannot, p: channel binding
	binding string // its type
	bare    string // what follows the header
	nonce   string
}

func parseClientFirst(message []byte) (f scramClientFirst, err error) {
	text := string(message)
	flag, rest, ok := strings.Cut(text, ",")
	if !ok {
		return f, malformedSCRAM("The client's first message has no header.")
	}
	switch {
	case flag == "n", flag == "y":
	case strings.HasPrefix(flag, "p="):
		f.binding = flag[2:]
	default:
		return f, malformedSCRAM("Unexpected channel-binding flag.")
	}
	f.flag = flag[0]
	authzid, bare, ok := strings.Cut(rest, ",")
	if !ok {
		return f, malformedSCRAM("The client's first message has no header.")
	}
	if authzid != "" {
		return f, koldproxy.Errorf(koldproxy.CodeFeatureNotSupported, "client uses authorization identity, but it is not supported")
	}
	f.header, f.bare = text[:len(text)-len(bare)], bare
	attributes := scramAttributes(bare)
	if strings.HasPrefix(bare, "m=") {
		return f, koldproxy.Errorf(koldproxy.CodeFeatureNotSupported, "client requires an unsupported SCRAM extension")
	}
	if _, ok := attributes.next('n'); !ok { // the name is not used: the startup packet's counts, as in PostgreSQL
		return f, malformedSCRAM("The user name is missing.")
	}
	if f.nonce, ok = attributes.next('r'); !ok {
		return f, malformedSCRAM("The nonce is missing.")
	}
	if !isNonce(f.nonce) {
		return f, koldproxy.Errorf(koldproxy.CodeProtocolViolation, "non-printable characters in SCRAM nonce")
	}
	return f, nil
}

// scramServerFirst is "r=<nonce>,s=<salt>,i=<iterations>".
type scramServerFirst struct {
	text       string
	nonce      string
	salt       []byte
	iterations int
}

func newServerFirst(nonce string, salt []byte, iterations int) scramServerFirst {
	text := "r=" + nonce + ",s=" + base64.StdEncoding.EncodeToString(salt) + ",i=" + strconv.Itoa(iterations)
	return scramServerFirst{text, nonce, salt, iterations}
}

func parseServerFirst(message []byte) (f scramServerFirst, ok bool) {
	f.text = string(message)
	attributes := scramAttributes(f.text)
	nonce, ok1 := attributes.next('r')
	salt, ok2 := attributes.next('s')
	iterations, ok3 := attributes.next('i')
	f.nonce = nonce
	f.salt, ok = scramBase64(salt)
	var counted bool
	f.iterations, counted = scramIterations(iterations)
	return f, ok && ok1 && ok2 && ok3 && counted && isNonce(nonce) && len(f.salt) > 0
}

// scramClientFinal is "c=<header and binding data>,r=<nonce>[,…],p=<proof>".
type scramClientFinal struct {
	binding      string // in base64
	nonce        string
	withoutProof string
	proof        []byte
}

func parseClientFinal(message []byte) (f scramClientFinal, err error) {
	text := string(message)
	attributes := scramAttributes(text)
	var ok bool
	if f.binding, ok = attributes.next('c'); !ok {
		return f, malformedSCRAM("The channel-binding data is missing.")
	}
	if f.nonce, ok = attributes.next('r'); !ok {
		return f, malformedSCRAM("The nonce is missing.")
	}
	// Extensions may stand in between. The proof comes last, and its base64 has no comma.
	end := strings.Index(text, ",p=")
	if end < 0 || strings.IndexByte(text[end+3:], ',') >= 0 {
		return f, malformedSCRAM("The proof is missing.")
	}
	if f.proof, ok = scramBase64(text[end+3:]); !ok || len(f.proof) != sha256.Size {
		return f, malformedSCRAM("The proof is damaged.")
	}
	f.withoutProof = text[:end]
	return f, nil
}

// parseServerFinal reads the server's signature out of "v=<signature>".
func parseServerFinal(message []byte) (signature []byte, ok bool) {
	attributes := scramAttributes(message)
	text, ok := attributes.next('v')
	if !ok {
		return nil, false
	}
	return scramBase64(text)
}

// scramAttributes is what is left of a list "a=…,b=…".
type scramAttributes string

// next takes the next attribute, which must be the one with a name.
func (a *scramAttributes) next(name byte) (value string, ok bool) {
	attribute, rest, _ := strings.Cut(string(*a), ",")
	*a = scramAttributes(rest)
	if len(attribute) < 2 || attribute[0] != name || attribute[1] != '=' {
		return "", false
	}
	return attribute[2:], true
}

// scramBase64 decodes strictly: one spelling for each value.
func scramBase64(text string) ([]byte, bool) {
	if strings.ContainsAny(text, "\r\n") { // which the package would skip
		return nil, false
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	return raw, err == nil
}

func scramIterations(text string) (int, bool) {
	n, err := strconv.ParseUint(text, 10, 31)
	return int(n), err == nil && n > 0
}

// isNonce says whether a nonce is made of what RFC 5802 calls printable; commas cannot be in it any more.
func isNonce(s string) bool {
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return s != ""
}

func malformedSCRAM(detail string) error {
	return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "malformed SCRAM message").WithDetail(detail)
}
