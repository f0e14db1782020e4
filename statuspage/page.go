package statuspage

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"html/template"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
)

// Config says who may see the page and how far its charts go back.
type Config struct {
	// Token is what a reader has to show, as a bearer token or in the form that the page offers. Empty: only clients of a
	// loopback listener may read, and they see no values of rows.
	Token string
	// Loopback says that the listener is at a loopback address.
	Loopback bool
	// Version is shown at the foot of the page.
	Version string
	// Interval is the time between two samples, and Samples how many are kept. At least one second and two samples.
	Interval time.Duration
	Samples  int
}

// DefaultConfig is a quarter of an hour in steps of five seconds.
func DefaultConfig() Config {
	return Config{Interval: 5 * time.Second, Samples: 180}
}

// Database is one database that the page shows.
type Database struct {
	Name string
	Pool *pgxpool.Pool
	// Live is what this instance knows about live subscribers, as proxy.StreamStats answers it. Nil: nothing.
	Live func() json.RawMessage
	// Unfit, if it is set, says why nothing is done in the database yet.
	Unfit func() error
}

// readTimeout bounds what a request or a sample may wait for a database, and freshness how long an answer serves others.
const (
	readTimeout = 5 * time.Second
	freshness   = time.Second
	eventLimit  = 50
)

// Page is the status page. It may be used concurrently.
type Page struct {
	guard     guard
	config    Config
	databases []Database
	log       zerolog.Logger
	mux       *http.ServeMux

	mu        sync.Mutex
	histories []history // in the order of databases

	reading sync.Mutex // held while a snapshot is read
	read    time.Time
	latest  []snapshot
}

// New makes the page. It reads nothing before Run or a request.
func New(config Config, databases []Database, log zerolog.Logger) *Page {
	p := &Page{
		guard:     guard{token: config.Token, loopback: config.Loopback},
		config:    config,
		databases: databases,
		log:       log,
		mux:       http.NewServeMux(),
		histories: make([]history, len(databases)),
	}
	for i := range p.histories {
		p.histories[i].capacity = max(config.Samples, 2)
	}
	p.mux.HandleFunc("GET /{$}", p.guarded(p.overview))
	p.mux.HandleFunc("GET /stream", p.guarded(p.stream))
	p.mux.HandleFunc("POST /login", p.login)
	for _, name := range []string{"page.css", "page.js"} {
		p.mux.Handle("GET /assets/"+name, asset(name))
	}
	return p
}

// ServeHTTP answers / (everything), /stream?db=…&schema=…&name=… (the newest events of one stream), /login and /assets/….
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	p.mux.ServeHTTP(w, r)
}

// Run samples every database until ctx ends, and returns nil then. A database that cannot be read is left out of the samples.
func (p *Page) Run(ctx context.Context) error {
	tick := time.NewTicker(max(p.config.Interval, time.Second))
	defer tick.Stop()
	for {
		p.sample(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (p *Page) sample(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var group errgroup.Group
	for i, d := range p.databases {
		group.Go(func() error {
			s, err := readSample(ctx, d.Pool)
			if err != nil {
				p.log.Debug().Err(err).Str("db", d.Name).Msg("status page: no sample")
				return nil
			}
			s.at = time.Now()
			p.mu.Lock()
			defer p.mu.Unlock()
			p.histories[i].add(s)
			return nil
		})
	}
	_ = group.Wait() // there are no errors
}

// snapshots are at most freshness old.
func (p *Page) snapshots(ctx context.Context) []snapshot {
	p.reading.Lock()
	defer p.reading.Unlock()
	if time.Since(p.read) < freshness {
		return p.latest
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout) // others wait for the answer, too
	defer cancel()
	list := make([]snapshot, len(p.databases))
	var group errgroup.Group
	for i := range p.databases {
		group.Go(func() error {
			list[i] = p.databases[i].read(ctx)
			return nil
		})
	}
	_ = group.Wait() // there are no errors
	p.latest, p.read = list, time.Now()
	return list
}

// Guard shows h to those only who may see the page.
func (p *Page) Guard(h http.Handler) http.Handler {
	return p.guarded(func(w http.ResponseWriter, r *http.Request, _ verdict) { h.ServeHTTP(w, r) })
}

func (p *Page) guarded(show func(http.ResponseWriter, *http.Request, verdict)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch v := p.guard.judge(r); v {
		case refused:
			p.render(w, http.StatusForbidden, "refused", nil)
		case stranger:
			w.Header().Set("WWW-Authenticate", `Bearer realm="koldproxy"`)
			p.render(w, http.StatusUnauthorized, "login", nil)
		default:
			show(w, r, v)
		}
	}
}

// login takes the token from the form and gives it back as a cookie that only this host and no script sees.
func (p *Page) login(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	token := r.PostFormValue("token")
	if p.guard.token == "" || !p.guard.accepts(token) {
		p.render(w, http.StatusUnauthorized, "login", "That is not the token.")
		return
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // Secure would lock out those who reach the port over a tunnel
		Name: cookieName, Value: token, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

// view is one database as the template sees it.
type view struct {
	snapshot
	History history
}

func (p *Page) overview(w http.ResponseWriter, r *http.Request, _ verdict) {
	var views []view
	for i, s := range p.snapshots(r.Context()) {
		p.mu.Lock()
		h := p.histories[i].clone()
		p.mu.Unlock()
		views = append(views, view{s, h})
	}
	p.render(w, http.StatusOK, "overview", views)
}

// streamView is one stream's page.
type streamView struct {
	Database string
	Stream   *stream
	History  history
	Events   []event
	Values   bool // values of rows may be shown
}

func (p *Page) stream(w http.ResponseWriter, r *http.Request, v verdict) {
	query := r.URL.Query()
	for i, s := range p.snapshots(r.Context()) {
		if s.Name != query.Get("db") {
			continue
		}
		page := streamView{Database: s.Name, Values: v == trusted}
		for _, one := range s.Streams {
			if one.Schema == query.Get("schema") && one.Name == query.Get("name") {
				page.Stream = &one
			}
		}
		if page.Stream == nil {
			break
		}
		p.mu.Lock()
		page.History = p.histories[i].clone()
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
		defer cancel()
		var err error
		page.Events, err = readEvents(ctx, p.databases[i].Pool, page.Stream.Schema, page.Stream.Name, eventLimit)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
		case err != nil:
			p.render(w, http.StatusServiceUnavailable, "missing", err.Error())
			return
		default:
			p.render(w, http.StatusOK, "stream", page)
			return
		}
		break
	}
	p.render(w, http.StatusNotFound, "missing", "There is no such stream.")
}

//go:embed assets
var assets embed.FS

func asset(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-cache")
		http.ServeFileFS(w, r, assets, "assets/"+name)
	})
}

var templates = template.Must(template.New("").Funcs(formats).ParseFS(assets, "assets/page.html"))

// render writes a whole page. body names the template of its content.
func (p *Page) render(w http.ResponseWriter, status int, body string, data any) {
	content, err := execute(body, data)
	if err != nil {
		p.log.Error().Err(err).Str("page", body).Msg("status page: cannot render")
		http.Error(w, "koldproxy cannot render this page", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	err = templates.ExecuteTemplate(w, "frame", frame{Content: content, Live: status == http.StatusOK, Version: p.config.Version, At: time.Now()})
	if err != nil {
		p.log.Debug().Err(err).Msg("status page: the browser went away")
	}
}

// frame is what every page has around it.
type frame struct {
	Content template.HTML
	Live    bool
	Version string
	At      time.Time
}
