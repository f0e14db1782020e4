package sse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
)

// Auth answers from PostgreSQL who may do what. Its methods run concurrently.
type Auth interface {
	// Login returns nil if user is a role that may log in with password.
	Login(ctx context.Context, user, password string) error
	// Refused says whether an error of Login is PostgreSQL's no, rather than that it could not be asked.
	Refused(err error) bool
	// NoPassword says whether an error of Login is that PostgreSQL does not ask for a password, so that there is none to check.
	NoPassword(err error) bool
	// MaySubscribe tells whether a role may receive what is published on a topic.
	MaySubscribe(ctx context.Context, user, topic string) (bool, error)
}

// Config is what can be set about a [Handler]. Start from [DefaultConfig].
type Config struct {
	// MaxClients bounds the responses under way; further ones are 503. Default 1000.
	MaxClients int
	// LoginConcurrency bounds logins under way, each of which is a connection to PostgreSQL; sixteen times as many may wait.
	// Default 8.
	LoginConcurrency int
	// LoginTimeout is the time for a login, waiting included. Default 10 s.
	LoginTimeout time.Duration
	// PageRows is how many events are read from a log at once, at most. Default 500.
	PageRows int
	// Poll is how often a stream with clients is looked at without being told of anything, once for all of them, and how
	// often [Auth] is asked about the right of each. Default 1 s.
	Poll time.Duration
	// Heartbeat is how often a client that nothing happens for is sent a comment. Default 15 s.
	Heartbeat time.Duration
	// WriteTimeout is how long a client may keep a write waiting. Default 30 s.
	WriteTimeout time.Duration
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		MaxClients: 1000, LoginConcurrency: 8, LoginTimeout: 10 * time.Second, PageRows: 500,
		Poll: time.Second, Heartbeat: 15 * time.Second, WriteTimeout: 30 * time.Second,
	}
}

// Handler serves the pattern GET /streams/{db}/{name} of an [http.ServeMux]; together the two are a topic. It is also a
// changefeed.Publisher, which tells it that there is something new; where nobody tells it (another instance applies the changes)
// it finds out within [Config].Poll.
type Handler struct {
	cfg     Config
	auth    Auth
	pools   map[string]*pgxpool.Pool
	log     zerolog.Logger
	hub     hub
	clients atomic.Int64
	logins  chan struct{} // one element for each login under way
	waiting atomic.Int64  // logins, those under way included
}

// New makes a Handler. pools are connections of koldproxy's own role by the name of the database; the caller goes on owning
// them.
func New(cfg Config, auth Auth, pools map[string]*pgxpool.Pool, log zerolog.Logger) *Handler {
	return &Handler{cfg: cfg, auth: auth, pools: pools, log: log, logins: make(chan struct{}, cfg.LoginConcurrency)}
}

// Publish wakes the clients of a topic. It never blocks.
func (h *Handler) Publish(topic string, _ []byte) { h.hub.wake(topic) }

// Consumers is the number of clients of a topic.
func (h *Handler) Consumers(topic string) int { return h.hub.count(topic) }

// Wants says whether the topic has clients.
func (h *Handler) Wants(topic string) bool { return h.Consumers(topic) > 0 }

// ServeHTTP answers with events until the client goes, the right ends, or the server does.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	topic := koldproxy.TopicRoot + "/" + r.PathValue("db") + "/" + r.PathValue("name")
	database, schema, name, ok := koldproxy.ParseStreamTopic(topic)
	user, status, err := h.login(r)
	if err != nil {
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", `Basic realm="koldproxy", charset="UTF-8"`)
		}
		http.Error(w, err.Error(), status)
		return
	}
	if h.clients.Add(1) > int64(h.cfg.MaxClients) { // who has not logged in takes no place
		h.clients.Add(-1)
		http.Error(w, "too many clients", http.StatusServiceUnavailable)
		return
	}
	defer h.clients.Add(-1)
	after, err := position(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	allowed := false
	if ok && h.pools[database] != nil {
		if allowed, err = h.auth.MaySubscribe(r.Context(), user, topic); err != nil {
			h.log.Warn().Str("user", user).Str("topic", topic).Err(err).Msg("right to subscribe cannot be checked")
			http.Error(w, "PostgreSQL cannot be asked", http.StatusServiceUnavailable)
			return
		}
	}
	if !allowed { // a stream that does not exist looks the same
		http.Error(w, "permission denied for topic "+topic, http.StatusForbidden)
		return
	}
	replay, err := changefeed.OpenReplay(r.Context(), h.pools[database], schema, name)
	if errors.Is(err, changefeed.ErrNoStream) {
		http.Error(w, "there is no such stream", http.StatusNotFound)
		return
	}
	if err != nil {
		h.log.Warn().Str("topic", topic).Err(err).Msg("stream cannot be read")
		http.Error(w, "PostgreSQL cannot be asked", http.StatusServiceUnavailable)
		return
	}
	wake := h.hub.join(r.Context(), topic, func(ctx context.Context) { h.look(ctx, topic, database, schema, name) }) // before the first page: nothing is missed
	defer h.hub.leave(topic, wake)
	c := &client{
		handler: h, user: user, topic: topic, replay: replay, wake: wake,
		w: w, rc: http.NewResponseController(w), asked: time.Now(),
	}
	c.serve(r.Context(), after, r.Method == http.MethodHead)
}

// look wakes the clients of a topic when its stream has new events, or is gone, until ctx ends.
func (h *Handler) look(ctx context.Context, topic, database, schema, name string) {
	poll := time.NewTicker(h.cfg.Poll)
	defer poll.Stop()
	var replay *changefeed.Replay
	seen := int64(-1)
	for {
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		}
		var err error
		if replay == nil {
			replay, err = changefeed.OpenReplay(ctx, h.pools[database], schema, name)
		}
		events := int64(-1)
		if err == nil {
			events, err = replay.Events(ctx)
		}
		if errors.Is(err, changefeed.ErrNoStream) {
			replay = nil // there may be another one of this name
		} else if err != nil {
			continue
		}
		if events != seen || err != nil {
			seen = events
			h.hub.wake(topic)
		}
	}
}

// login checks HTTP Basic credentials. Its errors are for the client.
func (h *Handler) login(r *http.Request) (user string, status int, err error) {
	user, password, given := r.BasicAuth()
	// PostgreSQL cuts longer names off, and so would let in one name as another.
	const longestName = 63
	if !given || user == "" || password == "" || len(user) > longestName || !utf8.ValidString(user) || strings.ContainsRune(user+password, 0) {
		return "", http.StatusUnauthorized, errors.New("user and password of a PostgreSQL role are needed")
	}
	defer h.waiting.Add(-1)
	if h.waiting.Add(1) > 17*int64(h.cfg.LoginConcurrency) {
		return "", http.StatusServiceUnavailable, errors.New("too many logins at a time")
	}
	ctx, cancel := context.WithTimeout(r.Context(), h.cfg.LoginTimeout)
	defer cancel()
	select {
	case h.logins <- struct{}{}:
		defer func() { <-h.logins }()
	case <-ctx.Done():
		return "", http.StatusServiceUnavailable, errors.New("too many logins at a time")
	}
	err = h.auth.Login(ctx, user, password)
	switch {
	case err == nil:
		return user, 0, nil
	case h.auth.Refused(err):
		h.log.Info().Str("remote", r.RemoteAddr).Err(err).Msg("login for server-sent events refused")
		return "", http.StatusUnauthorized, errors.New("the login was refused")
	case h.auth.NoPassword(err):
		h.log.Warn().Str("remote", r.RemoteAddr).Err(err).Msg("login for server-sent events cannot be checked")
		return "", http.StatusServiceUnavailable, errors.New("PostgreSQL does not ask koldproxy for a password of this role, so that none can be checked: pg_hba.conf has to")
	default:
		h.log.Warn().Str("remote", r.RemoteAddr).Err(err).Msg("login for server-sent events cannot be checked")
		return "", http.StatusServiceUnavailable, errors.New("PostgreSQL cannot be asked")
	}
}

// position is where a client wants to begin.
func position(r *http.Request) (string, error) {
	after := r.Header.Get("Last-Event-ID")
	if after == "" {
		after = r.URL.Query().Get("from")
	}
	switch {
	case after == "":
		return changefeed.FromNewest, nil
	case after == "earliest":
		return changefeed.FromEarliest, nil
	case !koldproxy.IsEventID(after):
		return "", errors.New("Last-Event-ID, or from, is the id of no event")
	}
	return after, nil
}

// client is one response.
type client struct {
	handler *Handler
	user    string
	topic   string
	replay  *changefeed.Replay
	wake    chan struct{}
	w       http.ResponseWriter
	rc      *http.ResponseController
	asked   time.Time // when the right was asked for
}

func (c *client) serve(ctx context.Context, from string, headOnly bool) {
	after, missed, err := c.replay.Begin(ctx, from)
	if err != nil {
		http.Error(c.w, "PostgreSQL cannot be asked", http.StatusServiceUnavailable)
		return
	}
	header := c.w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Accel-Buffering", "no") // for nginx in between
	_ = c.rc.SetReadDeadline(time.Time{}) // which is meant for requests
	c.w.WriteHeader(http.StatusOK)
	if headOnly {
		return // its body would be thrown away, for ever
	}
	first := []byte(": ready\n\n")
	switch {
	case missed != nil:
		first = gap(nil, *missed)
	case from == changefeed.FromNewest:
		// What a browser reconnects with if that is before the first event.
		first = fmt.Appendf(first, "id: %s\n\n", after)
	}
	if err := c.write(first); err != nil {
		return
	}
	reason, err := c.follow(ctx, after)
	if err != nil || reason == "" {
		c.handler.log.Debug().Str("user", c.user).Str("topic", c.topic).AnErr("err", err).Msg("client of server-sent events is gone")
		return
	}
	text, _ := json.Marshal(map[string]string{"reason": reason}) // never fails
	_ = c.write(fmt.Appendf(nil, "event: end\ndata: %s\n\n", text))
}

// gap appends an event that says what is missing.
func gap(out []byte, g changefeed.ReplayGap) []byte {
	text, _ := json.Marshal(g) // never fails
	return fmt.Appendf(out, "event: gap\ndata: %s\n\n", text)
}

// dropped is why a response ends with its stream.
const dropped = "the stream was dropped"

// follow sends events until something ends it: reason is why the server does.
func (c *client) follow(ctx context.Context, after string) (reason string, err error) {
	poll := time.NewTicker(c.handler.cfg.Poll)
	defer poll.Stop()
	spoke := time.Now()
	for read := true; ; { // whether there may be something to read
		if time.Since(c.asked) >= c.handler.cfg.Poll {
			c.asked = time.Now()
			allowed, err := c.handler.auth.MaySubscribe(ctx, c.user, c.topic)
			if err != nil {
				return "", err // the client comes back with its position
			}
			if !allowed {
				if _, err := c.replay.Events(ctx); errors.Is(err, changefeed.ErrNoStream) { // the owner's right goes with it
					return dropped, nil
				}
				return "permission denied", nil
			}
		}
		var page []changefeed.ReplayEvent
		more := false
		if read {
			page, more, err = c.replay.Page(ctx, after, c.handler.cfg.PageRows)
			if errors.Is(err, changefeed.ErrNoStream) {
				return dropped, nil
			}
			if err != nil {
				return "", err
			}
		}
		if n := len(page); n > 0 {
			var out []byte
			for _, e := range page {
				if e.Gap != nil {
					out = gap(out, *e.Gap)
				}
				out = fmt.Appendf(out, "id: %s\ndata: %s\n\n", e.ID, e.Payload)
			}
			if err := c.write(out); err != nil {
				return "", err
			}
			after, spoke = page[n-1].ID, time.Now()
			if more {
				continue
			}
		} else if time.Since(spoke) >= c.handler.cfg.Heartbeat {
			if err := c.write([]byte(": \n\n")); err != nil {
				return "", err
			}
			spoke = time.Now()
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-c.wake:
			read = true
		case <-poll.C:
			read = false
		}
	}
}

func (c *client) write(b []byte) error {
	_ = c.rc.SetWriteDeadline(time.Now().Add(c.handler.cfg.WriteTimeout)) // the write reports a closed connection
	if _, err := c.w.Write(b); err != nil {
		return err
	}
	return c.rc.Flush()
}
