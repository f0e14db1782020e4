package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/koldproxy/koldproxy/statuspage"
)

// newHTTPServer serves /metrics, /healthz (the process works), /readyz (ready says nil; its error is the body otherwise), events of
// streams, and page everywhere else. With profiles, those who may see the page find Go's profiler at /debug/pprof/.
func newHTTPServer(gatherer prometheus.Gatherer, ready func() error, page *statuspage.Page, events http.Handler, profiles bool) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /streams/{db}/{name}", events)
	mux.Handle("/", page)
	if profiles {
		for path, h := range map[string]http.HandlerFunc{
			"": pprof.Index, "cmdline": commandName, "symbol": pprof.Symbol, "profile": unhurried(pprof.Profile), "trace": unhurried(pprof.Trace),
		} {
			mux.Handle("GET /debug/pprof/"+path, page.Guard(h))
		}
	}
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			answer(w, http.StatusServiceUnavailable, err.Error())
			return
		}
		answer(w, http.StatusOK, "ok")
	})
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
}

// commandName is pprof's cmdline without arguments: --set may have brought secrets.
func commandName(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, filepath.Base(os.Args[0]))
}

// unhurried lets a handler write for longer than the server's limit: a profile takes as long as it is asked to.
func unhurried(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // a profile that is cut short says so itself
		h(w, r)
	}
}

func answer(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text + "\n")) //nolint:gosec // plain text; and a client that went away has nothing to be told
}

// serveHTTP serves until ctx ends, then lets running requests finish for a moment.
func serveHTTP(ctx context.Context, ln net.Listener, server *http.Server) error {
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := server.Shutdown(grace); err != nil {
			_ = server.Close() // what did not finish in time is cut
		}
		stopped <- nil
	})
	err := server.Serve(ln)
	if !stop() {
		<-stopped
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
