package proxy

import (
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// What other listeners show follows its files as the proxy's own certificates do, and stays while they cannot be used.
func TestReloadedTLS(t *testing.T) {
	t.Parallel()
	a, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := ReloadedTLS(dir+"/cert.pem", dir+"/key.pem", zerolog.Nop()); err == nil {
		t.Error("files that are missing can be used")
	}
	write := func(name string) (cert, key string) {
		pair, err := a.issue(name)
		if err != nil {
			t.Fatal(err)
		}
		return pair.files(t, dir)
	}
	cert, key := write("one")
	config, err := ReloadedTLS(cert, key, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	shown := func() string {
		c, err := config.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return c.Leaf.Subject.CommonName
	}
	if got := shown(); got != "one" {
		t.Errorf("%s is shown at first", got)
	}
	writeFile(t, key, []byte("half written"))
	for end := time.Now().Add(2 * recheck); time.Now().Before(end); time.Sleep(10 * time.Millisecond) { // nothing tells when it looks
		if got := shown(); got != "one" {
			t.Fatalf("%s is shown while the key cannot be used", got)
		}
	}
	write("two")
	for end := time.Now().Add(time.Minute); shown() != "two"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the new certificate is not shown")
		}
	}
}
