package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certificates of live push are taken up when their files change; a pair that does not fit, or is gone, leaves the old one in use.
func TestKeyPairFollowsItsFiles(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	p := &keyPair{cert: filepath.Join(folder, "cert.pem"), key: filepath.Join(folder, "key.pem")}
	if _, err := p.get(nil); err == nil {
		t.Error("there are no files, and no error")
	}
	stamp := time.Now().Add(-time.Hour)
	write := func(path string, text []byte) {
		t.Helper()
		stamp = stamp.Add(time.Second) // file systems need not tell two writes at once apart
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, stamp, stamp); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(name string) {
		t.Helper()
		pair, err := p.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		if pair.Leaf.Subject.CommonName != name {
			t.Errorf("shown is the certificate of %s, want %s", pair.Leaf.Subject.CommonName, name)
		}
	}
	cert, key := selfSigned(t, "first")
	write(p.cert, cert)
	write(p.key, key)
	expect("first")
	cert, key = selfSigned(t, "second")
	write(p.cert, cert)
	expect("first") // its key has not arrived yet
	write(p.key, key)
	expect("second")
	if err := os.Remove(p.key); err != nil {
		t.Fatal(err)
	}
	expect("second")
	write(p.key, key)
	expect("second")
}

// selfSigned makes a certificate with its key, as PEM.
func selfSigned(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
}
