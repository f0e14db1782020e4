package cold_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/cloud"
)

// faulty stands between the client and a store and spoils some requests.
type faulty struct {
	*httptest.Server
	mu    sync.Mutex
	spoil func(w http.ResponseWriter, r *http.Request, next http.Handler) bool // true: it has answered
	count int
}

func newFaulty(t *testing.T, store http.Handler) *faulty {
	t.Helper()
	f := &faulty{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		spoil := f.spoil
		f.mu.Unlock()
		if spoil == nil || !spoil(w, r, store) {
			store.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(f.Close)
	return f
}

// arm spoils the given number of requests of a method, after the first skip.
func (f *faulty) arm(method string, skip, times int, how func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count = 0
	f.spoil = func(w http.ResponseWriter, r *http.Request, next http.Handler) bool {
		if r.Method != method {
			return false
		}
		f.mu.Lock()
		f.count++
		hit := f.count > skip && f.count <= skip+times
		f.mu.Unlock()
		if hit {
			how(w, r, next)
		}
		return hit
	}
}

func (f *faulty) disarm() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.spoil = nil
}

func unavailable(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
	w.WriteHeader(http.StatusServiceUnavailable)
	_, _ = io.WriteString(w, `<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>`)
}

// lost does the work and cuts the connection instead of answering.
func lost(w http.ResponseWriter, r *http.Request, next http.Handler) {
	next.ServeHTTP(httptest.NewRecorder(), r)
	cut(w)
}

func cut(w http.ResponseWriter) {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		_ = conn.Close()
	}
}

// truncated announces the whole body and sends half of it.
func truncated(w http.ResponseWriter, r *http.Request, next http.Handler) {
	whole := httptest.NewRecorder()
	next.ServeHTTP(whole, r)
	for name, values := range whole.Header() {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Length", fmt.Sprint(whole.Body.Len()))
	w.WriteHeader(whole.Code)
	_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()/2])
	w.(http.Flusher).Flush()
	cut(w)
}

// silent never answers; the client has to give up.
func silent(_ http.ResponseWriter, r *http.Request, _ http.Handler) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// TestFaultsOfTheStoreLoseNothing flushes and reads while the store misbehaves in every way that stores are known to. Whatever the flush
// says, no row is lost or doubled, and when the store is well again everything works.
func TestFaultsOfTheStoreLoseNothing(t *testing.T) {
	server := fakeS3(t)
	faults := newFaulty(t, server.Config.Handler)
	where := s3URL(t, faults.URL, "faulty")
	b, err := cloud.Open(t.Context(), where, s3Credentials, cloud.Options{Timeout: time.Second})
	ok(t, err)
	t.Cleanup(func() { _ = b.Close() })
	f := newFixture(t, b)
	tab := f.manage("messages", "id bigint PRIMARY KEY, body text", "")
	next := 0
	for _, c := range []struct {
		name        string
		method      string
		skip, times int
		how         func(w http.ResponseWriter, r *http.Request, next http.Handler)
		must        bool // the flush has to succeed all the same
	}{
		{"503 once at the put", http.MethodPut, 0, 1, unavailable, true},
		{"503 always at the put", http.MethodPut, 0, 1000, unavailable, false},
		{"lost answer of the put", http.MethodPut, 0, 1, lost, true},
		{"lost answers of every put", http.MethodPut, 0, 1000, lost, false},
		{"silence at the put", http.MethodPut, 0, 1, silent, false},
		{"503 once at the reading back", http.MethodGet, 0, 1, unavailable, true},
		{"truncated reading back", http.MethodGet, 0, 1, truncated, true},
		{"truncated ranges", http.MethodGet, 1, 1, truncated, true},
		{"silence at the reading back", http.MethodGet, 0, 1, silent, true},
	} {
		for range 20 {
			next++
			f.exec("INSERT INTO messages VALUES ($1, $2)", next, fmt.Sprint("message ", next))
		}
		tab.capture(fmt.Sprintf("id > %d", next-20))
		faults.arm(c.method, c.skip, c.times, c.how)
		r := tab.flush()
		faults.disarm()
		var hot int
		ok(t, f.pool.QueryRow(t.Context(), "SELECT count(*) FROM koldstore.messages__cl").Scan(&hot))
		if completed := r.Status == "completed"; completed != (hot == 0) || c.must && !completed {
			message := ""
			if r.Error != nil {
				message = *r.Error
			}
			t.Errorf("%s: %s with %d rows left in the mirror: %s", c.name, r.Status, hot, message)
		}
		if hot > 0 {
			tab.mustFlush()
		}
		if n := len(coldRows(t, tab)); n != next {
			t.Fatalf("%s: %d rows of %d", c.name, n, next)
		}
	}
	cfg := coldstore.DefaultConfig()
	cfg.DeleteGrace = 0 // who leads alone need not wait until that is sure
	f.openStore(b, cfg)
	f.exec("UPDATE koldstore.segment SET ended_at = now() - interval '1 day' WHERE state = 'deleted'")
	for worked := true; worked; {
		worked, err = f.store.RunJobs(t.Context())
		ok(t, err)
	}
	f.exec("UPDATE koldstore.segment SET ended_at = now() - interval '1 day' WHERE state = 'deleted'")
	_, err = f.store.RunJobs(t.Context())
	ok(t, err)
	objects, err := b.List(t.Context(), "")
	ok(t, err)
	infos, err := f.store.Segments(t.Context(), tab.oid)
	ok(t, err)
	if len(objects) != len(infos) {
		t.Errorf("%d objects for %d segments", len(objects), len(infos))
	}
	report, err := f.store.Verify(t.Context(), tab.oid)
	ok(t, err)
	if !report.OK {
		t.Errorf("verify: %+v", report.Problems)
	}
}

func coldRows(t *testing.T, tab *table) []coldstore.Row {
	t.Helper()
	infos, err := tab.store.Segments(t.Context(), tab.oid)
	ok(t, err)
	ids := make([]uuid.UUID, len(infos))
	for i := range infos {
		ids[i] = infos[i].ID
	}
	page, err := tab.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: ids, Mode: coldstore.ModeForward, Limit: 100_000})
	ok(t, err)
	return page.Rows
}
