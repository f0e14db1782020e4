package coldstore_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

func TestFlushMovesRowsAndTheFeedStaysTheSame(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("")
	want := map[string]version{}
	for i := range 100 {
		tab.put(i, fmt.Sprintf("message %d", i))
	}
	tab.remove(7)
	tab.put(8, "changed")
	before, err := tab.drain(t.Context(), f.store, 17)
	ok(t, err)
	maps.Copy(want, before)

	tab.mustFlush(100, 1)
	if n := tab.hot(); n != 0 {
		t.Errorf("%d rows are left in the mirror", n)
	}
	for _, limit := range []int{1, 17, 100, 1000} {
		after, err := tab.drain(t.Context(), f.store, limit)
		ok(t, err)
		if !maps.Equal(after, want) {
			t.Errorf("limit %d: the feed changed by being flushed", limit)
		}
	}
	tab.verified()

	// Update, delete and revive rows that are cold by now; the feed shows one row for each key all the time.
	tab.put(1, "hot again")
	tab.remove(2)
	tab.put(7, "revived")
	now, err := tab.drain(t.Context(), f.store, 10)
	ok(t, err)
	if len(now) != 100 || now[`{"id": 1}`].Op != 2 && now[`{"id": 1}`].Op != 1 || now[`{"id": 2}`].Op != 3 || now[`{"id": 7}`].Image == "" {
		t.Errorf("after changes: %d keys, %v %v %v", len(now), now[`{"id": 1}`], now[`{"id": 2}`], now[`{"id": 7}`])
	}
	tab.mustFlush(3, 1)
	again, err := tab.drain(t.Context(), f.store, 10)
	ok(t, err)
	if !maps.Equal(again, now) {
		t.Error("the feed changed by the second flush")
	}
	segments := tab.segments()
	if len(segments) != 2 || segments[0].Dead != 3 || segments[1].Tombstones != 1 {
		t.Errorf("segments: %+v", segments)
	}
	tab.verified()
}

func TestFilesAreCutAtTheTablesLimit(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("max_rows_per_file = 30")
	for i := range 100 {
		tab.put(i, "x")
	}
	tab.mustFlush(100, 4)
	for i, s := range tab.segments() {
		if want := []int64{30, 30, 30, 10}[i]; s.Rows != want {
			t.Errorf("segment %d has %d rows, want %d", i, s.Rows, want)
		}
	}
	tab.verified()
}

func TestFilesAreCutAtTheByteLimit(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(cfg *coldstore.Config) { cfg.MaxFileBytes, cfg.RowGroupBytes = 5000, 1000 })
	tab := f.messages("")
	for i := range 20 {
		tab.put(i, fmt.Sprintf("%01000d", i))
	}
	r := tab.flush(f.store, true)
	if r.Status != "completed" || r.RowsFlushed != 20 || r.Segments != 4 {
		t.Errorf("%+v", r)
	}
	tab.verified()
}

func TestWhenAFlushIsDue(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("hot_row_limit = 20, min_flush_rows = 10")
	flush := func(status string, rows int64) {
		t.Helper()
		if r := tab.flush(f.store, false); r.Status != status || r.RowsFlushed != rows || !r.OK {
			t.Errorf("%+v, want %s with %d rows", r, status, rows)
		}
	}
	for i := range 29 {
		tab.put(i, "x")
	}
	flush("not_due", 0)
	tab.put(29, "x")
	flush("completed", 10)
	if s := tab.segments(); len(s) != 1 || s[0].MaxSeq != tab.seq-20 {
		t.Errorf("not the oldest rows: %+v", s)
	}
	flush("not_due", 0)
	f.exec("UPDATE koldstore.managed_table SET hot_row_limit = NULL, move_after = '1 hour'")
	flush("not_due", 0)
	f.exec("UPDATE koldstore.managed_table SET move_after = '0'")
	flush("completed", 20)
	f.exec("UPDATE koldstore.managed_table SET move_after = '100000 years'")
	tab.put(100, "x")
	flush("not_due", 0)
	f.exec("UPDATE koldstore.managed_table SET move_after = NULL")
	flush("not_due", 0)
	if r := tab.flush(f.store, true); r.Status != "completed" || r.RowsFlushed != 1 {
		t.Errorf("force: %+v", r)
	}
	if r := tab.flush(f.store, true); r.Status != "completed" || r.RowsFlushed != 0 || r.Segments != 0 {
		t.Errorf("force with nothing there: %+v", r)
	}
	tab.verified()
}

func TestTablesThatCannotBeFlushed(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("state = 'broken', reason = 'lost slot'")
	tab.put(1, "x")
	if r := tab.flush(f.store, true); r.OK || r.Status != "error" || r.Error == nil || tab.hot() != 1 {
		t.Errorf("broken: %+v", r)
	}
	f.exec("INSERT INTO koldstore.storage (name, storage_type) VALUES ('other', 's3')")
	f.exec("UPDATE koldstore.managed_table SET state = 'active', storage = 'other'")
	if r := tab.flush(f.store, true); r.OK || r.Status != "error" {
		t.Errorf("another storage: %+v", r)
	}
	f.exec("UPDATE koldstore.managed_table SET storage = 'default'")
	tab.mustFlush(1, 1)
	if _, err := f.store.Enqueue(t.Context(), 1, true); err == nil {
		t.Error("a table that is not managed was queued")
	}
}

// Keys that PostgreSQL takes for equal and that look different as text are still one key.
func TestKeysAreEqualWherePostgreSQLSaysSo(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.manage("prices", "id numeric PRIMARY KEY, v text", "id numeric PRIMARY KEY", "")
	write := func(id string, op int) {
		tab.seq++
		f.exec("INSERT INTO "+tab.mirror+` (id, seq, op, row_image) VALUES ($1::text::numeric, $2, $3, jsonb_build_object('id', $1::text::numeric, 'v', 'x'))`, id, tab.seq, op)
	}
	write("1.0", 1)
	write("2.50", 1)
	write("3", 1)
	tab.mustFlush(3, 1)
	write("1.000", 1)
	write("2.5", 3)
	write("4", 1)
	tab.mustFlush(3, 1)
	if s := tab.segments(); s[0].Dead != 2 {
		t.Errorf("%d dead rows, want 2", s[0].Dead)
	}
	tab.verified()
}

func TestKeysOfSeveralColumnsAndStrangeNames(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	name := `we"ird "é` + "\t"
	keys := `"the key" text COLLATE "C" NOT NULL, "Op.x" bit(3) NOT NULL, ünï date NOT NULL, PRIMARY KEY ("the key", "Op.x", ünï)`
	tab := f.manage(name, `v "char", `+keys, keys, "")
	for round := range 2 {
		for _, day := range []string{"2024-01-01", "infinity", "0044-03-15 BC"} {
			tab.seq++
			f.exec("INSERT INTO "+tab.mirror+` VALUES ($1, B'101', $2, $3, 1, jsonb_build_object('the key', $1::text, 'Op.x', B'101', 'ünï', $2::date, 'v', 'x'::"char"))`,
				`a"\	b`, day, tab.seq)
		}
		tab.mustFlush(3, 1)
		if s := tab.segments(); round == 1 && s[0].Dead != 3 {
			t.Errorf("%d dead rows, want 3", s[0].Dead)
		}
	}
	tab.verified()
	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeLast, Limit: 10})
	ok(t, err)
	for _, r := range page.Rows {
		var same bool
		f.scan(`SELECT $1::jsonb = $2::jsonb - 'v' AND $2::jsonb ->> 'the key' = $3`, []any{string(r.PK), string(r.Image), `a"\	b`}, &same)
		if !same {
			t.Errorf("key %s of %s", r.PK, r.Image)
		}
	}
}

// TestPagesNameWhatIsBehindTheCursorsSegment has a cursor shortly before the end of a segment: the next one is needed, too.
func TestPagesNameWhatIsBehindTheCursorsSegment(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	tab := f.messages("max_rows_per_file = 100")
	for i := range 300 {
		tab.put(i, "x")
	}
	tab.mustFlush(300, 3)
	infos := tab.segments()
	for _, c := range []struct {
		mode   string
		after  koldproxy.Seq
		wanted int
		want   []uuid.UUID
	}{
		{"forward", infos[0].MaxSeq - 2, 50, []uuid.UUID{infos[0].ID, infos[1].ID}},
		{"forward", infos[0].MaxSeq, 50, []uuid.UUID{infos[1].ID}},
		{"forward", 0, 150, []uuid.UUID{infos[0].ID, infos[1].ID}},
		{"last", 0, 100, []uuid.UUID{infos[2].ID}},
		{"last", 0, 101, []uuid.UUID{infos[1].ID, infos[2].ID}},
	} {
		var got []uuid.UUID
		f.scan("SELECT array_agg(s::uuid ORDER BY n) FROM jsonb_array_elements_text(koldstore.segments_for($1, $2, $3, $4)) WITH ORDINALITY e(s, n)", []any{tab.oid, c.mode, c.after, c.wanted}, &got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%d rows %s from %d: %v, want %v", c.wanted, c.mode, c.after, got, c.want)
		}
	}
}
