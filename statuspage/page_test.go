package statuspage

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/migrations"
)

// newDatabase has the catalog, a managed table and a stream with names that want quoting. Nothing applies changes, which the
// page has to say; what an applier would write is written by hand, as the service role.
func newDatabase(t *testing.T) Database {
	t.Helper()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, dsn)
	must(t, err)
	defer conn.Close(context.Background())
	must(t, migrations.Up(ctx, conn))
	for _, sql := range []string{
		`SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'pgoutput')`, // not while a scan is open
		`CREATE TABLE public."T <b>q" (id bigint PRIMARY KEY, note text)`,
		`SELECT koldstore.manage_table('public."T <b>q"')`,
		`CALL koldstore.create_stream('public', 'S.é <i>', 'public', 'T <b>q', 'id > 10')`,
		`INSERT INTO public."_stream_S.é <i>" (id, op, k, ts, doc) VALUES ('0000000000000000000a', 'put', '11', now(), '{"id": 11, "note": "<script>secret</script>"}')`,
		`UPDATE koldstore.stream_status SET events = 12345, events_lost = 3`,
		`INSERT INTO koldstore.job (job_type, table_oid, status, progress, error, ended_at)
		 SELECT 'flush', '"T <b>q"'::regclass, 'error', '{"rows_flushed": 7}', 'the disk <u>is</u> full', now()`,
	} {
		_, err := conn.Exec(ctx, sql)
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	pc, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	pc.ConnConfig.RuntimeParams["search_path"] = "pg_catalog, pg_temp" // as the service has it
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	must(t, err)
	t.Cleanup(pool.Close)
	live := func() json.RawMessage { return json.RawMessage(`{"public.S.é <i>": {"consumers": 4, "lag": 9}}`) }
	return Database{Name: conn.Config().Database, Pool: pool, Live: live}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, p *Page, path, token string) (int, string) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	r.Host = "localhost"
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	w := httptest.NewRecorder()
	p.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func TestPageShowsADatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	config := DefaultConfig()
	config.Loopback = true
	p := New(config, []Database{db}, zerolog.Nop())
	for range 3 {
		p.sample(t.Context())
	}
	code, body := get(t, p, "/", "")
	if code != http.StatusOK {
		t.Fatalf("%d\n%s", code, body)
	}
	for _, want := range []string{
		"not applying", db.Name, "12\u202f345", "S.é &lt;i&gt;", "T &lt;b&gt;q", "(id &gt; 10)", "the disk &lt;u&gt;is&lt;/u&gt; full", "rows flushed 7",
		`<path class="line"`, `<td class="n" data-label="Consumers">4</td><td class="n" data-label="Lag">9</td>`, `<td class="n alarm" data-label="Lost">3</td>`, "up to", "last 0 s",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(body, "secret") {
		t.Error("the page shows a row")
	}
	link := streamLink(db.Name, stream{Schema: "public", Name: "S.é <i>"})
	code, body = get(t, p, link, "")
	if code != http.StatusOK || !strings.Contains(body, "0000000000000000000a") || strings.Contains(body, "secret") {
		t.Errorf("without a token a stream's page answers %d\n%s", code, body)
	}
	if code, body = get(t, p, "/stream?db=x&schema=public&name=y", ""); code != http.StatusNotFound {
		t.Errorf("a stream that is not there answers %d\n%s", code, body)
	}

	config.Token = "0123456789abcdef"
	p = New(config, []Database{db}, zerolog.Nop())
	code, body = get(t, p, link, config.Token)
	if code != http.StatusOK || !strings.Contains(body, "&lt;script&gt;secret&lt;/script&gt;") {
		t.Errorf("with a token a stream's page answers %d\n%s", code, body)
	}
}

// A database that does not answer is shown as such, and the others as ever.
func TestPageWithoutAServer(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing?connect_timeout=1")
	must(t, err)
	t.Cleanup(pool.Close)
	there := newDatabase(t)
	config := DefaultConfig()
	config.Loopback = true
	p := New(config, []Database{{Name: "gone", Pool: pool}, there}, zerolog.Nop())
	p.sample(t.Context())
	code, body := get(t, p, "/", "")
	if code != http.StatusOK || !strings.Contains(body, "unreachable") || !strings.Contains(body, "S.é &lt;i&gt;") {
		t.Errorf("%d\n%s", code, body)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	p := New(DefaultConfig(), nil, zerolog.Nop())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	must(t, p.Run(ctx))
}
