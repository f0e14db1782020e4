package sse_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/changefeed/mqtt"
	"github.com/koldproxy/koldproxy/changefeed/sse"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

type auth struct{ *mqtt.PostgresAuth }

func (auth) Refused(err error) bool    { return errors.Is(err, mqtt.ErrRefused) }
func (auth) NoPassword(err error) bool { return errors.Is(err, mqtt.ErrNoPassword) }

const patience = 30 * time.Second

// world is a handler in front of a database with the catalog. The log of stream s is written by the test itself.
type world struct {
	t       *testing.T
	pool    *pgxpool.Pool
	handler *sse.Handler
	url     string
	reader  string // a role that may subscribe
	other   string // one that may not
	seq     int64
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newWorld(t *testing.T, change ...func(*sse.Config)) *world {
	t.Helper()
	ctx := t.Context()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	admin, err := pgx.Connect(ctx, dsn)
	must(t, err)
	defer admin.Close(context.Background())
	must(t, migrations.Up(ctx, admin))
	name := admin.Config().Database
	w := &world{t: t, reader: "reader_" + name, other: "other_" + name}
	w.pool, err = pgxpool.New(ctx, dsn)
	must(t, err)
	t.Cleanup(func() {
		w.exec(fmt.Sprintf(`DROP OWNED BY %s, %[2]s CASCADE; DROP ROLE %[1]s, %[2]s`, w.reader, w.other))
		w.pool.Close()
	})
	w.exec(fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD 'pw'; CREATE ROLE %s LOGIN PASSWORD 'pw'`, w.reader, w.other))
	w.exec(`SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'pgoutput');
		CREATE SCHEMA "Odd Schema"; CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY);
		CALL koldstore.create_stream(NULL, 's', NULL, 't', 'true', options => '{"pre_image": "true"}');
		CALL koldstore.create_stream('Odd Schema', 'a/b.c', NULL, 'u', 'true');
		UPDATE koldstore.stream SET state = 'active'`)
	for _, topic := range []string{w.topic(), koldproxy.StreamTopic(name, "Odd Schema", "a/b.c")} {
		w.exec(fmt.Sprintf(`CALL koldstore.grant_subscribe(ARRAY['%s'], ARRAY['%s']::name[])`, topic, w.reader))
	}
	cfg := sse.DefaultConfig()
	cfg.Poll, cfg.Heartbeat, cfg.PageRows = 100*time.Millisecond, 200*time.Millisecond, 3
	for _, f := range change {
		f(&cfg)
	}
	login, err := pgx.ParseConfig(dsn)
	must(t, err)
	pools := map[string]*pgxpool.Pool{name: w.pool}
	w.handler = sse.New(cfg, auth{mqtt.NewPostgresAuth(login, pools)}, pools, zerolog.Nop())
	mux := http.NewServeMux()
	mux.Handle("GET /streams/{db}/{name}", w.handler)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	w.url = server.URL + "/streams" + strings.TrimPrefix(w.topic(), "$stream")
	return w
}

func (w *world) topic() string {
	return koldproxy.StreamTopic(strings.TrimPrefix(w.reader, "reader_"), "public", "s")
}

func (w *world) exec(sql string) {
	w.t.Helper()
	_, err := w.pool.Exec(context.Background(), sql)
	must(w.t, err)
}

// write appends n events to the log, as the applier does, and returns their ids.
func (w *world) write(n int) (ids []string) {
	w.t.Helper()
	for range n {
		w.seq++
		id := koldproxy.EventID(koldproxy.SeqAt(time.Now())+koldproxy.Seq(w.seq), 1)
		_, err := w.pool.Exec(w.t.Context(), `INSERT INTO _stream_s (id, op, k, ts, doc, old) VALUES ($1, 'put', $2::text::jsonb, now(), '{"a": "line\nbreak"}', NULL)`, id, fmt.Sprint(w.seq))
		must(w.t, err)
		ids = append(ids, id)
	}
	w.exec(`UPDATE koldstore.stream_status SET events = events + 1`)
	w.handler.Publish(w.topic(), nil)
	return ids
}

// stream is an open response.
type stream struct {
	t      *testing.T
	began  string // the position that it was given where it had none
	lines  chan string
	cancel context.CancelFunc
}

func (w *world) get(url, user, password, last string) *http.Response {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w.t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	must(w.t, err)
	if user != "" {
		r.SetBasicAuth(user, password)
	}
	if last != "" {
		r.Header.Set("Last-Event-ID", last)
	}
	response, err := http.DefaultClient.Do(r)
	must(w.t, err)
	w.t.Cleanup(func() { response.Body.Close() })
	return response
}

func (w *world) open(last string) *stream {
	w.t.Helper()
	s := w.begin(last)
	s.expectLine(": ready")
	if last == "" {
		s.began = strings.TrimPrefix(s.line(), "id: ")
		if !koldproxy.IsEventID(s.began) {
			w.t.Fatalf("it begins behind %q", s.began)
		}
	}
	return s
}

// begin is open for a client that is told something else first.
func (w *world) begin(last string) *stream {
	w.t.Helper()
	response := w.get(w.url, w.reader, "pw", last) //nolint:bodyclose // get does
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" {
		w.t.Fatalf("answer %s, %s", response.Status, response.Header.Get("Content-Type"))
	}
	s := &stream{t: w.t, lines: make(chan string, 10_000), cancel: func() { response.Body.Close() }}
	go func() {
		defer close(s.lines)
		for scan := bufio.NewScanner(response.Body); scan.Scan(); {
			s.lines <- scan.Text()
		}
	}()
	return s
}

func (s *stream) line() string {
	s.t.Helper()
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return "EOF"
			}
			if line != "" {
				return line
			}
		case <-time.After(patience):
			s.t.Fatal("nothing comes")
		}
	}
}

func (s *stream) expectLine(want string) {
	s.t.Helper()
	if got := s.line(); got != want {
		s.t.Errorf("got %q, want %q", got, want)
	}
}

// event skips heartbeats.
func (s *stream) event() (id string, data map[string]any) {
	s.t.Helper()
	line := s.line()
	for strings.HasPrefix(line, ":") {
		line = s.line()
	}
	id, found := strings.CutPrefix(line, "id: ")
	if !found {
		s.t.Fatalf("got %q", line)
	}
	text, _ := strings.CutPrefix(s.line(), "data: ")
	must(s.t, json.Unmarshal([]byte(text), &data))
	if data["id"] != id {
		s.t.Errorf("event %s says it is %v", id, data["id"])
	}
	return id, data
}

func (s *stream) expectEvents(ids []string) {
	s.t.Helper()
	for _, want := range ids {
		if got, _ := s.event(); got != want {
			s.t.Fatalf("got event %s, want %s", got, want)
		}
	}
}

// A client sees every event once, in order: from now on, behind any id, from the beginning, and after it was away.
func TestEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.write(7)
	now := w.open("")
	replay := w.open(before[1])
	replay.expectEvents(before[2:])
	after := w.write(8)
	now.expectEvents(after)
	replay.expectEvents(after)
	replay.cancel()
	more := w.write(4)
	w.open(after[7]).expectEvents(more)
	now.expectEvents(more)
	all := append(append(before, after...), more...)
	response := w.get(w.url+"?from=earliest", w.reader, "pw", "") //nolint:bodyclose // get does
	count := 0
	for scan := bufio.NewScanner(response.Body); count < len(all) && scan.Scan(); {
		if id, found := strings.CutPrefix(scan.Text(), "id: "); found {
			if id != all[count] {
				t.Fatalf("event %d is %s, want %s", count, id, all[count])
			}
			count++
		}
	}
	if n := w.handler.Consumers(w.topic()); n < 2 {
		t.Errorf("%d consumers", n)
	}
	w.exec(`UPDATE koldstore.stream_status SET events = events + 1; INSERT INTO _stream_s (id, op, k, ts, doc, old) VALUES ('` + koldproxy.EventID(koldproxy.SeqAt(time.Now())+1<<20, 1) + `', 'exit', '"x"', '2030-01-01 00:00:00.5+00', NULL, '{"b": 1}')`)
	_, data := now.event() // nobody said anything: it is found by looking
	if text := fmt.Sprint(data["op"], data["k"], data["doc"], data["old"], data["prev"]); text != fmt.Sprint("exit", "x", nil, map[string]any{"b": 1.0}, more[3]) {
		t.Errorf("the event is %s", text)
	}
}

// A browser whose connection ends before the first event comes back with the position that it was given.
func TestConnectionEndsBeforeTheFirstEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	empty := w.open("")
	empty.cancel()
	first := w.write(2)
	w.open(empty.began).expectEvents(first)
	quiet := w.open("")
	quiet.cancel()
	second := w.write(2)
	w.open(quiet.began).expectEvents(second)
	// Events that retention has taken away meanwhile are missing.
	w.exec(`CALL koldstore.alter_stream(NULL, 's', '{"retention": "1h"}'); UPDATE _stream_s SET ts = ts - interval '2 h'`)
	w.begin(quiet.began).expectGap(second[1], "retention")
}

// Large events are read a few at a time.
func TestLargeEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(3)
	w.exec(`INSERT INTO _stream_s (id, op, k, ts, doc, old) SELECT koldstore.event_id(koldstore.seq_at(now()) + 1000 + g, '0/1'), 'put', to_jsonb(g), now(),
		CASE WHEN g % 2 = 0 THEN d END, CASE WHEN g % 2 = 1 THEN d END
		FROM generate_series(1, 12) g, LATERAL (SELECT to_jsonb(string_agg(md5((g * 100000 + i)::text), '')) FROM generate_series(1, 25000) i) AS x(d)`)
	w.write(4)
	replay, err := changefeed.OpenReplay(t.Context(), w.pool, "public", "s")
	must(t, err)
	events := 0
	for after, more := changefeed.FromEarliest, true; more; {
		var page []changefeed.ReplayEvent
		page, more, err = replay.Page(t.Context(), after, 1000)
		must(t, err)
		size := 0
		for _, e := range page {
			size += len(e.Payload)
			if e.ID <= after {
				t.Fatalf("event %s comes after %s", e.ID, after)
			}
			after = e.ID
		}
		if events += len(page); size > 3<<20 {
			t.Errorf("%d bytes in one page", size)
		}
	}
	if events != 19 {
		t.Errorf("%d events", events)
	}
}

// Who misses something is told; expired events are not served.
func TestGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.write(3)
	w.exec(`CALL koldstore.alter_stream(NULL, 's', '{"retention": "1h"}'); UPDATE _stream_s SET ts = ts - interval '2 h' WHERE k IN ('1', '2')`)
	response := w.get(w.url, w.reader, "pw", ids[0]) //nolint:bodyclose // get does
	scan := bufio.NewScanner(response.Body)
	var lines []string
	for len(lines) < 3 && scan.Scan() {
		if scan.Text() != "" {
			lines = append(lines, scan.Text())
		}
	}
	if want := []string{"event: gap", fmt.Sprintf(`data: {"floor":%q,"reason":"retention"}`, ids[1]), "id: " + ids[2]}; strings.Join(lines, "\n") != strings.Join(want, "\n") {
		t.Errorf("got %q, want %q", lines, want)
	}
}

// A client with a position of the future is told that it is none, and gets what is new. The present is no such position, although the
// newest event is older.
func TestPositionAhead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.write(2)
	ahead := w.begin(koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(time.Hour)), 1))
	ahead.expectGap(ids[1], "ahead")
	moment := w.open(koldproxy.EventID(koldproxy.SeqAt(time.Now()), 1))
	ids = w.write(1)
	ahead.expectEvents(ids)
	moment.expectEvents(ids)
}

// What happened before a stream began is not in its log, and the position of another stream is no event of it.
func TestPositionFromBeforeTheStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	foreign := koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(-time.Hour)), 1)
	began := koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(-time.Minute)), 0)
	w.exec(`UPDATE koldstore.stream SET began = '` + began + `' WHERE name = 's'`)
	late := w.begin(foreign)
	late.expectGap(began, "retention")
	between := w.open(koldproxy.EventID(koldproxy.SeqAt(time.Now()), 1))
	ids := w.write(2)
	for _, s := range []*stream{late, between} {
		_, first := s.event()
		_, second := s.event()
		if first["prev"] != nil || second["prev"] != ids[0] {
			t.Errorf("the predecessors are %v and %v, want none and %s", first["prev"], second["prev"], ids[0])
		}
	}
}

// Where PostgreSQL asks for no password there is none to check, and the answer says so.
func TestServerThatTrusts(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cluster, err := localpg.Start(ctx, localpg.Config{HBA: []string{"host all trusted all trust", "local all trusted trust"}})
	must(t, err)
	t.Cleanup(func() {
		if err := cluster.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	login, err := pgx.ParseConfig(cluster.DSN("postgres", "", ""))
	must(t, err)
	server := httptest.NewServer(sse.New(sse.DefaultConfig(), auth{mqtt.NewPostgresAuth(login, nil)}, nil, zerolog.Nop()))
	t.Cleanup(server.Close)
	w := &world{t: t}
	response := w.get(server.URL, "trusted", "anything", "") //nolint:bodyclose // get does
	body, err := io.ReadAll(response.Body)
	must(t, err)
	if response.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), "pg_hba.conf") {
		t.Errorf("%s: %s", response.Status, body)
	}
}

// Login and rights are PostgreSQL's; a right that is revoked, and a stream that is dropped, end the response.
func TestRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		url, user, password, last string
		status                    int
	}{
		{w.url, "", "", "", 401},
		{w.url, w.reader, "wrong", "", 401},
		{w.url, w.reader, "", "", 401},
		{w.url, w.reader + strings.Repeat("x", 60), "pw", "", 401},
		{w.url, w.other, "pw", "", 403},
		{w.url + "x", w.reader, "pw", "", 403},
		{strings.Replace(w.url, "/streams/", "/streams/other", 1), w.reader, "pw", "", 403},
		{w.url, w.reader, "pw", "'; DROP TABLE t", 400},
		{w.url, w.reader, "pw", strings.Repeat("f", koldproxy.EventIDLen), 400},
		{strings.TrimSuffix(w.url, "s") + "Odd%20Schema.a%252Fb%252Ec", w.reader, "pw", "", 200},
		{strings.TrimSuffix(w.url, "s") + "Odd%20Schema.a%2Fb%2Ec", w.reader, "pw", "", 403},
	} {
		response := w.get(c.url, c.user, c.password, c.last) //nolint:bodyclose // get does
		if response.StatusCode != c.status {
			t.Errorf("%s as %q: %s, want %d", c.url, c.user, response.Status, c.status)
		}
		if (response.Header.Get("WWW-Authenticate") != "") != (c.status == 401) {
			t.Errorf("%s as %q: WWW-Authenticate %q", c.url, c.user, response.Header.Get("WWW-Authenticate"))
		}
	}
	s := w.open("")
	w.exec(fmt.Sprintf(`CALL koldstore.revoke_subscribe(ARRAY['%s'], ARRAY['%s']::name[])`, w.topic(), w.reader))
	s.expectEnd("permission denied")
}

// expectEnd skips heartbeats.
func (s *stream) expectEnd(reason string) {
	s.t.Helper()
	for line := s.line(); line != "event: end"; line = s.line() {
		if !strings.HasPrefix(line, ":") {
			s.t.Fatalf("got %q", line)
		}
	}
	s.expectLine(fmt.Sprintf(`data: {"reason":%q}`, reason))
	s.expectLine("EOF")
}

// A response ends with the role that asked for it and with its stream; a new stream of the name is another one. A log that is
// moved is followed.
func TestEndsOfAStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	guest := "guest_" + strings.TrimPrefix(w.reader, "reader_")
	w.exec(fmt.Sprintf(`CREATE ROLE %[2]s LOGIN PASSWORD 'pw'; CALL koldstore.grant_subscribe(ARRAY['%[1]s'], ARRAY['%[2]s']::name[])`, w.topic(), guest))
	live := w.open("")
	response := w.get(w.url, guest, "pw", "") //nolint:bodyclose // get does
	if response.StatusCode != http.StatusOK {
		t.Fatalf("the guest: %s", response.Status)
	}
	w.exec(`DROP ROLE ` + guest)
	body, err := io.ReadAll(response.Body)
	must(t, err)
	if !strings.HasSuffix(string(body), "event: end\ndata: {\"reason\":\"permission denied\"}\n\n") {
		t.Errorf("the role is dropped: %q", body)
	}
	w.exec(`ALTER TABLE _stream_s SET SCHEMA "Odd Schema"`) // nobody but the service role can
	w.exec(`INSERT INTO "Odd Schema"._stream_s (id, op, k, ts) VALUES ('` + koldproxy.EventID(koldproxy.SeqAt(time.Now())+1<<20, 1) + `', 'put', '1', now()); UPDATE koldstore.stream_status SET events = events + 1`)
	live.event()
	w.exec(`ALTER TABLE "Odd Schema"._stream_s SET SCHEMA public; CALL koldstore.drop_stream(NULL, 's'); CALL koldstore.create_stream(NULL, 's', NULL, 't', 'true'); UPDATE koldstore.stream SET state = 'active'`)
	w.exec(fmt.Sprintf(`CALL koldstore.grant_subscribe(ARRAY['%s'], ARRAY['%s']::name[])`, w.topic(), w.reader))
	w.handler.Publish(w.topic(), nil)
	for line := live.line(); line != "event: end"; line = live.line() {
		if !strings.HasPrefix(line, ":") {
			t.Fatalf("got %q", line)
		}
	}
	live.expectLine(`data: {"reason":"the stream was dropped"}`)
}

// What is not a GET, asks for the end only, or has not logged in, costs nothing that lasts.
func TestRequests(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *sse.Config) { c.MaxClients = 1; c.LoginConcurrency = 1; c.LoginTimeout = 300 * time.Millisecond })
	ids := w.write(2)
	for _, c := range []struct {
		method string
		status int
	}{{http.MethodHead, 200}, {http.MethodPost, 405}, {http.MethodOptions, 405}, {http.MethodPut, 405}, {http.MethodDelete, 405}} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, w.url, nil)
		must(t, err)
		r.SetBasicAuth(w.reader, "pw")
		r.Header.Set("Origin", "https://elsewhere.example")
		r.Header.Set("Accept-Encoding", "gzip")
		response, err := http.DefaultClient.Do(r) // returns when the response is over, or hangs
		must(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		must(t, err)
		response.Body.Close()
		if response.StatusCode != c.status || response.Header.Get("Access-Control-Allow-Origin") != "" || response.Header.Get("Content-Encoding") != "" {
			t.Errorf("%s: %s, %v", c.method, response.Status, response.Header)
		}
	}
	// The id of another stream is a moment, and so is one that never was.
	other := koldproxy.EventID(koldproxy.SeqAt(time.Now().Add(-time.Hour)), 77)
	s := w.open(other)
	s.expectEvents(ids)
	s.cancel()
	w.awaitPlace()
}

// awaitPlace connects once there is a place for a client.
func (w *world) awaitPlace() {
	w.t.Helper()
	deadline := time.Now().Add(patience)
	for w.get(w.url, w.reader, "pw", "").StatusCode != http.StatusOK { //nolint:bodyclose // get does
		if time.Now().After(deadline) {
			w.t.Fatal("a client that is gone stays")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A client that falls behind what is retained while it is connected is told so, in the place of what it has missed.
func TestGapWhileConnected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *sse.Config) { c.Poll = time.Hour }) // it looks when it is told to
	w.exec(`CALL koldstore.alter_stream(NULL, 's', '{"retention": "1h"}')`)
	before := w.write(1)
	s := w.open("")
	expired := func(id string) string {
		return fmt.Sprintf(`UPDATE _stream_s SET ts = ts - interval '2 h' WHERE id <= '%s'`, id)
	}
	w.exec(expired(before[0])) // what the client has had may go
	seen := w.write(1)
	s.expectEvents(seen)
	w.seq++
	missed := koldproxy.EventID(koldproxy.SeqAt(time.Now())+koldproxy.Seq(w.seq), 1)
	w.exec(`INSERT INTO _stream_s (id, op, k, ts) VALUES ('` + missed + `', 'put', '1', now()); ` + expired(missed))
	after := w.write(1)
	s.expectGap(missed, "retention")
	s.expectEvents(after)
}

// expectGap skips heartbeats.
func (s *stream) expectGap(floor, reason string) {
	s.t.Helper()
	line := s.line()
	for strings.HasPrefix(line, ":") {
		line = s.line()
	}
	if line != "event: gap" {
		s.t.Errorf("got %q, want a gap", line)
	}
	s.expectLine(fmt.Sprintf(`data: {"floor":%q,"reason":%q}`, floor, reason))
}

// Where changes were never captured, whoever passes by is told so; whoever begins behind it is not.
func TestHole(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.write(2)
	waiting, old := w.open(""), w.open(ids[0])
	old.expectEvents(ids[1:])
	w.exec(`UPDATE koldstore.stream SET gap = jsonb_build_object('after', '` + ids[1] + `', 'reason', 'the slot was lost', 'noticed_at', clock_timestamp()) WHERE name = 's'`)
	fresh := w.open("")
	behind := w.write(2)
	for _, s := range []*stream{old, waiting} {
		s.expectGap(ids[1], "the slot was lost")
		s.expectEvents(behind)
	}
	fresh.expectEvents(behind)
	again := w.open(ids[0])
	again.expectEvents(ids[1:])
	again.expectGap(ids[1], "the slot was lost")
	again.expectEvents(behind)
	w.open(behind[0]).expectEvents(behind[1:])
}

// The same where the stream has had no event yet.
func TestHoleBeforeTheFirstEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	waiting := w.open("")
	w.exec(`SELECT koldstore.note_hole('t'::regclass, 'the slot was lost', '0/1', '0/2')`)
	fresh := w.open("")
	behind := w.write(1)
	waiting.expectGap(waiting.began, "the slot was lost")
	waiting.expectEvents(behind)
	fresh.expectEvents(behind)
}

// One client that does not read, and many that do, leave each other alone.
func TestStuckClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *sse.Config) { c.WriteTimeout = 300 * time.Millisecond; c.PageRows = 100 })
	w.exec(`INSERT INTO _stream_s (id, op, k, ts, doc) SELECT koldstore.event_id(koldstore.seq_at(now()) + g, '0/1'), 'put', to_jsonb(g), now(), jsonb_build_object('x', repeat(md5(g::text), 4000)) FROM generate_series(1, 300) g`)
	address, path, _ := strings.Cut(strings.TrimPrefix(w.url, "http://"), "/")
	stuck, err := net.Dial("tcp", address)
	must(t, err)
	defer stuck.Close()
	must(t, stuck.(*net.TCPConn).SetReadBuffer(4096))
	request := httptest.NewRequest(http.MethodGet, "/"+path+"?from=earliest", nil)
	request.SetBasicAuth(w.reader, "pw")
	must(t, request.Write(stuck)) // and nothing is ever read
	live := w.open("")
	live.expectEvents(w.write(5))
	deadline := time.Now().Add(patience)
	for w.handler.Consumers(w.topic()) > 1 {
		if time.Now().After(deadline) {
			t.Fatal("a client that takes nothing stays")
		}
		time.Sleep(10 * time.Millisecond)
	}
	live.expectEvents(w.write(5))
}

func TestTooManyClients(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *sse.Config) { c.MaxClients = 1 })
	first := w.open("")
	for range 2 {
		if response := w.get(w.url, w.reader, "pw", ""); response.StatusCode != http.StatusServiceUnavailable { //nolint:bodyclose // get does
			t.Errorf("the second client: %s", response.Status)
		}
	}
	first.cancel()
	w.awaitPlace() // which those who were refused do not take
}
