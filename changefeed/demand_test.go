package changefeed_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
)

// shelf is cold storage with a few rows.
type shelf struct {
	mu   sync.Mutex
	rows []changefeed.PageRow
	err  error
	last changefeed.PageRequest
	// silent makes Page wait for the end of its context.
	silent bool
}

// fail makes reading fail from now on, or work again.
func (s *shelf) fail(err error, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err, s.silent = err, silent
}

func (s *shelf) Page(ctx context.Context, r changefeed.PageRequest) (changefeed.Page, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silent {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return changefeed.Page{}, ctx.Err()
	}
	s.last = r
	var page changefeed.Page
	for _, row := range s.rows {
		if row.Seq > r.After && len(page.Rows) < r.Limit {
			page.Rows = append(page.Rows, row)
			page.Through = row.Seq
		}
	}
	page.Complete = len(page.Rows) == 0 || page.Through == s.rows[len(s.rows)-1].Seq
	return page, s.err
}

func fulfiller(pool *pgxpool.Pool, cold changefeed.ColdPages) *changefeed.Fulfiller {
	return changefeed.NewFulfiller(func(database string) (*pgxpool.Pool, bool) { return pool, database == "db" }, cold, zerolog.Nop(), nil)
}

func TestColdPageDemand(t *testing.T) {
	t.Parallel()
	cold := &shelf{rows: []changefeed.PageRow{
		{Seq: 5, Op: 1, PK: json.RawMessage(`{"id":1}`), Image: json.RawMessage(`{"id":1,"v":"<&>"}`)},
		{Seq: 9, Op: 3, PK: json.RawMessage(`{"id":2}`)},
	}}
	f := fulfiller(nil, cold)
	segment := uuid.New()
	text := fmt.Sprintf(`{"kind":"cold_page","table":4294967295,"generation":7,"segments":["%s"],"mode":"forward","after":4,"limit":10}`, segment)
	answer, err := f.Fulfil(t.Context(), "db", json.RawMessage(text))
	must(t, err)
	want := text[:len(text)-1] + `,"rows":[{"seq":5,"op":1,"pk":{"id":1},"image":{"id":1,"v":"<&>"}},{"seq":9,"op":3,"pk":{"id":2},"image":null}],"through":9,"complete":true}`
	if string(answer) != want {
		t.Errorf("got  %s\nwant %s", answer, want)
	}
	if r := cold.last; r.Database != "db" || r.Table != 4294967295 || r.Generation != 7 || len(r.Segments) != 1 || r.Segments[0] != segment || r.After != 4 || r.Limit != 10 {
		t.Errorf("asked for %+v", r)
	}
	answer, err = f.Fulfil(t.Context(), "db", json.RawMessage(`{"kind":"cold_page","table":1,"generation":0,"segments":[],"mode":"last","limit":1}`))
	must(t, err)
	if want := `{"kind":"cold_page","table":1,"generation":0,"segments":[],"mode":"last","limit":1,"rows":[{"seq":5,"op":1,"pk":{"id":1},"image":{"id":1,"v":"<&>"}}],"through":5,"complete":false}`; string(answer) != want {
		t.Errorf("got  %s\nwant %s", answer, want)
	}
	cold.err = koldproxy.Errorf(koldproxy.CodeColdUnreadable, "segment x is damaged")
	_, err = f.Fulfil(t.Context(), "db", json.RawMessage(text))
	var kold *koldproxy.Error
	if !errors.As(err, &kold) || kold.Code != koldproxy.CodeColdUnreadable {
		t.Errorf("got %v", err)
	}
}

// What is answered is the demand itself: a text that could be taken for another one is refused, whoever asks.
func TestAmbiguousDemandsAreRefused(t *testing.T) {
	t.Parallel()
	cold := &shelf{}
	f := fulfiller(nil, cold)
	for _, text := range []string{
		`{"kind":"cold_page","table":1,"Table":2,"generation":1,"segments":[],"mode":"forward","after":0,"limit":3}`,
		`{"kind":"cold_page","Kind":"flush","table":1,"Table":2,"force":true}`,
	} {
		_, err := f.Fulfil(t.Context(), "db", json.RawMessage(text))
		if e, ok := errors.AsType[*koldproxy.Error](err); !ok || e.Code != koldproxy.CodeProtocolViolation || cold.last.Table != 0 {
			t.Errorf("%s: %v, and of table %d", text, err, cold.last.Table)
		}
	}
}

func TestFlushDemand(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `CREATE TABLE u (id int PRIMARY KEY)`)
	h.exec(`SELECT koldstore.manage_table('t', hot_row_limit => 10, min_flush_rows => 1)`)
	h.fence()
	f := fulfiller(h.pool, &shelf{})
	flush := func(table string, force bool) string {
		oid := h.rows(`SELECT '` + table + `'::regclass::oid`)[0]
		answer, err := f.Fulfil(t.Context(), "db", json.RawMessage(fmt.Sprintf(`{"kind":"flush","table":%s,"force":%v}`, oid, force)))
		if err != nil {
			return err.Error()
		}
		var a struct{ Result json.RawMessage }
		must(t, json.Unmarshal(answer, &a))
		return string(a.Result)
	}
	if got := flush("t", false); got != `{"ok":true,"job_id":null,"status":"not_due","rows_flushed":0,"segments":0,"error":null}` {
		t.Errorf("got %s", got)
	}
	if got := flush("u", true); got != fmt.Sprintf("the table with OID %s is not managed by koldstore (SQLSTATE 55000)", h.rows(`SELECT 'u'::regclass::oid`)[0]) {
		t.Errorf("got %s", got)
	}

	// One that is on its way is waited for, then ours is queued and waited for.
	h.admin(`INSERT INTO koldstore.job (job_type, table_oid, status) VALUES ('flush', 't'::regclass, 'running')`)
	running := h.rows(`SELECT job_id FROM koldstore.job WHERE job_type = 'flush'`)[0]
	got := make(chan string, 1)
	go func() { got <- flush("t", true) }()
	h.admin(`UPDATE koldstore.job SET status = 'completed' WHERE job_id = '` + running + `'`)
	h.eventually("ours is queued", func() bool {
		return h.rows(`SELECT count(*) FROM koldstore.job WHERE status = 'queued' AND args = '{"force": true}'`)[0] == "1"
	})
	ours := h.rows(`UPDATE koldstore.job SET status = 'error', error = 'disk full', progress = '{"rows_flushed": 5, "segments": 1}' WHERE status = 'queued' RETURNING job_id`)[0]
	if got, want := <-got, fmt.Sprintf(`{"ok":false,"job_id":"%s","status":"error","rows_flushed":5,"segments":1,"error":"disk full"}`, ours); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}

	// The client goes away.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	oid := h.rows(`SELECT 't'::regclass::oid`)[0]
	if _, err := f.Fulfil(ctx, "db", json.RawMessage(fmt.Sprintf(`{"kind":"flush","table":%s,"force":true}`, oid))); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

// TRUNCATE of a table with cold rows: those that are live and not in the mirror get tombstones, too.
func TestTruncateWithColdRows(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `INSERT INTO t SELECT generate_series(1, 3)`)
	h.manage("t")
	h.fence()
	h.stopApplier()
	cold := &shelf{}
	for i := range 25_000 {
		op := koldproxy.OpInsert
		if i%5 == 0 {
			op = koldproxy.OpDelete
		}
		cold.rows = append(cold.rows, changefeed.PageRow{Seq: koldproxy.Seq(i + 1), Op: op, PK: json.RawMessage(fmt.Sprintf(`{"id": %d}`, i+1)), Image: json.RawMessage(fmt.Sprintf(`{"id":%d}`, i+1))})
	}
	h.config.Cold = cold
	h.admin(`INSERT INTO koldstore.segment (segment_id, table_oid, storage, object_key, state, min_seq, max_seq, row_count, sha256)
		VALUES (gen_random_uuid(), 't'::regclass, 'default', 'k', 'active', 1, 25000, 25000, '\x00')`)
	h.startApplier()
	h.exec(`TRUNCATE t`, `INSERT INTO t VALUES (7)`)
	h.fence()
	h.expect(`SELECT op, count(*), bool_and(row_image IS NULL) FROM koldstore.t__cl GROUP BY op ORDER BY op`, "1 1 f", "3 20000 t")
	h.expect(`SELECT count(*) FROM koldstore.t__cl WHERE id IN (1, 2, 3) AND op = 3`, "3")
	h.expect(`SELECT state, reason FROM koldstore.managed_table`, "active NULL")
}
