package statuspage

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func TestWhoMaySeeThePage(t *testing.T) {
	t.Parallel()
	const token = "correct horse battery staple"
	for name, c := range map[string]struct {
		guard  guard
		host   string
		header http.Header
		want   verdict
	}{
		"loopback, localhost":              {guard{"", true}, "localhost:9632", nil, reader},
		"loopback, IPv4":                   {guard{"", true}, "127.0.0.1:9632", nil, reader},
		"loopback, IPv6":                   {guard{"", true}, "[::1]:9632", nil, reader},
		"loopback, no port":                {guard{"", true}, "127.0.0.1", nil, reader},
		"loopback, a name of somebody":     {guard{"", true}, "evil.example:9632", nil, refused},
		"loopback, like localhost":         {guard{"", true}, "localhost.evil.example", nil, refused},
		"loopback, no name":                {guard{"", true}, "", nil, refused},
		"everywhere, no token":             {guard{"", false}, "localhost:9632", nil, refused},
		"everywhere, empty bearer":         {guard{"", false}, "db:9632", http.Header{"Authorization": {"Bearer "}}, refused},
		"token, not shown":                 {guard{token, true}, "localhost:9632", nil, stranger},
		"token, bearer":                    {guard{token, false}, "db:9632", http.Header{"Authorization": {"Bearer " + token}}, trusted},
		"token, bearer in small letters":   {guard{token, false}, "db:9632", http.Header{"Authorization": {"bearer " + token}}, trusted},
		"token, wrong bearer":              {guard{token, false}, "db:9632", http.Header{"Authorization": {"Bearer " + token + "x"}}, stranger},
		"token, prefix of it":              {guard{token, false}, "db:9632", http.Header{"Authorization": {"Bearer c"}}, stranger},
		"token, other scheme":              {guard{token, false}, "db:9632", http.Header{"Authorization": {"Basic " + token}}, stranger},
		"token, cookie":                    {guard{"0123456789abcdef", false}, "db:9632", http.Header{"Cookie": {cookieName + "=0123456789abcdef"}}, trusted},
		"token, wrong cookie":              {guard{"0123456789abcdef", false}, "db:9632", http.Header{"Cookie": {cookieName + "="}}, stranger},
		"token, loopback makes no trusted": {guard{token, true}, "127.0.0.1", nil, stranger},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Host = c.host
		if c.header != nil {
			r.Header = c.header
		}
		if got := c.guard.judge(r); got != c.want {
			t.Errorf("%s: verdict %d, want %d", name, got, c.want)
		}
	}
}

// A page without databases answers as its guard says, and its form gives a cookie for the right token only.
func TestLogin(t *testing.T) {
	t.Parallel()
	const token = "0123456789abcdef"
	p := New(Config{Token: token, Version: "1.2.3"}, nil, zerolog.Nop())
	ask := func(r *http.Request) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, r)
		return w
	}
	form := func(token string) *http.Request {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/login", strings.NewReader(url.Values{"token": {token}}.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return r
	}
	if w := ask(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)); w.Code != http.StatusUnauthorized || !strings.Contains(w.Body.String(), "<form") {
		t.Errorf("a stranger gets %d\n%s", w.Code, w.Body)
	}
	for _, wrong := range []string{"", "x", token + token, strings.Repeat("x", 1<<20)} {
		if w := ask(form(wrong)); w.Code != http.StatusUnauthorized || len(w.Result().Cookies()) != 0 {
			t.Errorf("a wrong token gets %d and %d cookies", w.Code, len(w.Result().Cookies()))
		}
	}
	w := ask(form(token))
	if w.Code != http.StatusSeeOther || len(w.Result().Cookies()) != 1 {
		t.Fatalf("the token gets %d and %d cookies", w.Code, len(w.Result().Cookies()))
	}
	c := w.Result().Cookies()[0]
	if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode {
		t.Errorf("the cookie is %v", c)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	r.AddCookie(c)
	if w := ask(r); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "koldproxy 1.2.3") {
		t.Errorf("a reader with the cookie gets %d\n%s", w.Code, w.Body)
	}
	for _, path := range []string{"/assets/page.css", "/assets/page.js"} {
		if w := ask(httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)); w.Code != http.StatusOK || w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
	if w := ask(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/assets/page.html", nil)); w.Code != http.StatusNotFound {
		t.Errorf("the template can be fetched: %d", w.Code)
	}
}
