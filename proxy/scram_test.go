package proxy

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"math/big"
	"strings"
	"testing"
	"time"
)

// The example of RFC 7677, section 3.
const (
	rfcPassword    = "pencil"
	rfcClientFirst = "n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
	rfcServerFirst = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
	rfcClientFinal = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
	rfcServerFinal = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
)

// scramKeys derives a client key and a verifier from a password.
func scramKeys(t testing.TB, password string, salt []byte, iterations int) (clientKey []byte, v scramVerifier) {
	t.Helper()
	salted, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	if err != nil {
		t.Fatal(err)
	}
	clientKey = hmacSHA256(salted, "Client Key")
	stored := sha256.Sum256(clientKey)
	return clientKey, scramVerifier{iterations, salt, stored[:], hmacSHA256(salted, "Server Key")}
}

func TestRFC7677(t *testing.T) {
	t.Parallel()
	first, err := parseClientFirst([]byte(rfcClientFirst))
	if err != nil || first.flag != 'n' || first.header != "n,," || first.nonce != "rOprNGfwEbeRWgbNEkqO" {
		t.Fatalf("%+v, %v", first, err)
	}
	challenge, ok := parseServerFirst([]byte(rfcServerFirst))
	if !ok || challenge.iterations != 4096 || newServerFirst(challenge.nonce, challenge.salt, challenge.iterations).text != rfcServerFirst {
		t.Fatalf("%+v", challenge)
	}
	final, err := parseClientFinal([]byte(rfcClientFinal))
	if err != nil {
		t.Fatal(err)
	}
	if err := final.judge(first, challenge, nil); err != nil {
		t.Error(err)
	}
	clientKey, v := scramKeys(t, rfcPassword, challenge.salt, challenge.iterations)
	authMessage := first.bare + "," + challenge.text + "," + final.withoutProof
	recovered, ok := v.clientKey(final.proof, authMessage)
	if !ok || !bytes.Equal(recovered, clientKey) {
		t.Errorf("recovered %x, want %x", recovered, clientKey)
	}
	if !bytes.Equal(proofOf(clientKey, v.storedKey, authMessage), final.proof) {
		t.Error("another proof than the RFC's")
	}
	signature, ok := parseServerFinal([]byte(rfcServerFinal))
	if !ok || !bytes.Equal(signature, v.serverSignature(authMessage)) {
		t.Error("another signature than the RFC's")
	}
	for i := range final.proof {
		final.proof[i] ^= 1
		if _, ok := v.clientKey(final.proof, authMessage); ok {
			t.Errorf("a proof that is wrong in byte %d is accepted", i)
		}
		final.proof[i] ^= 1
	}
	for _, proof := range [][]byte{nil, {}, final.proof[:31], append(bytes.Clone(final.proof), 0)} {
		if _, ok := v.clientKey(proof, authMessage); ok {
			t.Errorf("a proof of %d bytes is accepted", len(proof))
		}
	}
}

func TestParseVerifier(t *testing.T) {
	t.Parallel()
	b64 := base64.StdEncoding.EncodeToString
	_, want := scramKeys(t, rfcPassword, []byte("0123456789abcdef"), 4096)
	good := "SCRAM-SHA-256$4096:" + b64(want.salt) + "$" + b64(want.storedKey) + ":" + b64(want.serverKey)
	got, ok := parseVerifier(good)
	if !ok || got.iterations != 4096 || !bytes.Equal(got.salt, want.salt) || !bytes.Equal(got.storedKey, want.storedKey) ||
		!bytes.Equal(got.serverKey, want.serverKey) {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{
		"", "md5c4ca4238a0b923820dcc509a6f75849b", "SCRAM-SHA-256$", "SCRAM-SHA-256$4096:$:", good[1:], good + "A", good + "\n",
		strings.Replace(good, "4096", "0", 1), strings.Replace(good, "4096", "-1", 1), strings.Replace(good, "4096", "4294967296", 1),
		strings.Replace(good, b64(want.salt), "", 1), strings.Replace(good, b64(want.storedKey), b64(want.storedKey[1:]), 1),
	} {
		if v, ok := parseVerifier(bad); ok {
			t.Errorf("%q is read as %+v", bad, v)
		}
	}
}

// FuzzSCRAM feeds arbitrary messages to each parser. What is understood has to add up to the message again.
func FuzzSCRAM(f *testing.F) {
	for _, s := range []string{
		rfcClientFirst, rfcServerFirst, rfcClientFinal, rfcServerFinal, "p=tls-server-end-point,,n=,r=x", "y,a=me,n=,r=x", "n,,m=x,n=,r=y",
		"c=biws,r=x,e=y,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=,p=", "SCRAM-SHA-256$1:YQ==$YQ==:YQ==", "SCRAM-SHA-256\x00\xff\xff\xff\xff",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		text := string(message)
		if first, err := parseClientFirst(message); err == nil {
			if first.header+first.bare != text || !isNonce(first.nonce) || !strings.Contains(text, "r="+first.nonce) {
				t.Errorf("client-first %q becomes %+v", text, first)
			}
			_ = first.judge(mechanismPlus, true)
		}
		if f, ok := parseServerFirst(message); ok && (f.text != text || f.iterations <= 0 || len(f.salt) == 0) {
			t.Errorf("server-first %q becomes %+v", text, f)
		}
		if final, err := parseClientFinal(message); err == nil {
			proof := base64.StdEncoding.EncodeToString(final.proof)
			if final.withoutProof+",p="+proof != text {
				t.Errorf("client-final %q becomes %+v", text, final)
			}
			_ = final.judge(scramClientFirst{header: "n,,", flag: 'n'}, scramServerFirst{}, nil)
		}
		parseServerFinal(message)
		parseVerifier(text)
		if mechanism, first, ok := parseSASLInitial(message); ok && len(mechanism)+5+len(first) != len(message) {
			t.Errorf("initial response %q becomes %q, %q", message, mechanism, first)
		}
		mechanisms(append([]byte{0, 0, 0, authSASL}, message...))
	})
}

func TestEndPointHash(t *testing.T) {
	t.Parallel()
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ecKey, err := ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	certificate := func(algorithm x509.SignatureAlgorithm, public, private any) []byte {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), SignatureAlgorithm: algorithm, NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	for _, c := range []struct {
		algorithm x509.SignatureAlgorithm
		public    any
		private   any
		size      int
	}{
		{x509.SHA256WithRSA, rsaKey.Public(), rsaKey, sha256.Size},
		{x509.SHA384WithRSA, rsaKey.Public(), rsaKey, sha512.Size384},
		{x509.SHA512WithRSA, rsaKey.Public(), rsaKey, sha512.Size},
		{x509.ECDSAWithSHA256, ecKey.Public(), ecKey, sha256.Size},
		{x509.ECDSAWithSHA512, ecKey.Public(), ecKey, sha512.Size},
		{x509.SHA256WithRSAPSS, rsaKey.Public(), rsaKey, 0},
		{x509.PureEd25519, edKey.Public(), edKey, 0},
	} {
		hash, ok := endPointHash(certificate(c.algorithm, c.public, c.private))
		if ok != (c.size > 0) || len(hash) != c.size {
			t.Errorf("%s: %d bytes", c.algorithm, len(hash))
		}
	}
	if _, ok := endPointHash([]byte("no certificate")); ok {
		t.Error("there is a hash of what is no certificate")
	}
}

func TestOfferWithoutTLS(t *testing.T) {
	t.Parallel()
	s := &session{front: newStream(&pieces{})}
	for _, c := range []struct{ list, want []string }{
		{[]string{mechanismPlus, mechanismSCRAM}, []string{mechanismSCRAM}},
		{[]string{mechanismSCRAM}, []string{mechanismSCRAM}},
		{[]string{mechanismPlus}, []string{mechanismPlus}}, // nothing else to offer: the client will say what it thinks
		{[]string{"OAUTHBEARER", mechanismSCRAM, mechanismPlus}, []string{"OAUTHBEARER", mechanismSCRAM}},
	} {
		if got := s.offer(authenticationSASL(c.list...)); !bytes.Equal(got, authenticationSASL(c.want...)) {
			t.Errorf("%q becomes %q", c.list, got)
		}
	}
	damaged := binary.BigEndian.AppendUint32([]byte{'R', 0, 0, 0, 9}, authSASL)
	if got := s.offer(append(damaged, 'S')); !bytes.Equal(got, append(damaged, 'S')) {
		t.Errorf("a damaged list becomes %q", got)
	}
}
