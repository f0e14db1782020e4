package statuspage

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// cookieName holds the token of a browser that has typed it once.
const cookieName = "koldproxy_token"

// guard decides who may see the page.
type guard struct {
	token    string
	loopback bool // the listener is at a loopback address
}

// verdict is what a request may see.
type verdict int

const (
	refused  verdict = iota // nothing: the page is turned off for everybody
	stranger                // the form that asks for the token
	reader                  // everything but values of rows
	trusted                 // everything
)

func (g guard) judge(r *http.Request) verdict {
	if g.token != "" {
		if g.accepts(bearer(r)) || g.accepts(cookie(r)) {
			return trusted
		}
		return stranger
	}
	if g.loopback && isLocalName(r.Host) {
		return reader
	}
	return refused
}

// accepts compares in constant time, whatever the lengths.
func (g guard) accepts(token string) bool {
	want, got := sha256.Sum256([]byte(g.token)), sha256.Sum256([]byte(token))
	return token != "" && subtle.ConstantTimeCompare(want[:], got[:]) == 1
}

func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

func cookie(r *http.Request) string {
	c, err := r.Cookie(cookieName)
	if err != nil {
		return ""
	}
	return c.Value
}

// isLocalName says whether a Host header names this machine. A page elsewhere can make a browser ask a loopback address, under
// a name that it controls (DNS rebinding), but not under one of these.
func isLocalName(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && addr.IsLoopback()
}
