package integration_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// feedRow is a row of koldstore.changes_since, values as PostgreSQL prints them.
type feedRow struct {
	seq     int64
	op      string
	pk      string
	deleted bool
	image   string // "NULL" for a tombstone
	source  string
}

const feedQuery = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1::text::regclass, since_seq => $2::bigint, limit_rows => $3::int)"

// page reads one page of a feed and checks what every page promises.
func (c *client) page(table string, since int64, limit int) ([]feedRow, error) {
	rows, err := c.tryRows(feedQuery, table, since, limit)
	if err != nil {
		return nil, err
	}
	return parsePage(rows, since, limit)
}

func parsePage(rows [][]string, since int64, limit int) ([]feedRow, error) {
	if len(rows) > limit {
		return nil, fmt.Errorf("a page of %d rows, the limit is %d", len(rows), limit)
	}
	page := make([]feedRow, len(rows))
	keys := map[string]bool{}
	for i, r := range rows {
		seq, err := strconv.ParseInt(r[0], 10, 64)
		if err != nil {
			return nil, err
		}
		f := feedRow{seq: seq, op: r[1], pk: r[2], deleted: r[3] == "t", image: r[4], source: r[5]}
		switch {
		case f.seq <= since:
			return nil, fmt.Errorf("row %+v does not come behind %d", f, since)
		case keys[f.pk]:
			return nil, fmt.Errorf("key %s stands twice in a page", f.pk)
		case f.deleted != (f.op == "3"), f.deleted != (f.image == "NULL"):
			return nil, fmt.Errorf("row %+v contradicts itself", f)
		case f.source != "hot" && f.source != "cold":
			return nil, fmt.Errorf("row %+v comes from nowhere", f)
		}
		since, keys[f.pk], page[i] = f.seq, true, f
	}
	return page, nil
}

// drain reads a feed from a cursor to its end in pages.
func (c *client) drain(table string, since int64, limit int) []feedRow {
	c.t.Helper()
	var all []feedRow
	for {
		page, err := c.page(table, since, limit)
		if err != nil {
			c.t.Fatalf("drain %s from %d: %v", table, since, describe(err))
		}
		all = append(all, page...)
		if len(page) < limit {
			return all
		}
		since = page[len(page)-1].seq
	}
}

// checkFeed compares a managed table, which nobody must be writing to, with its feed: each row once, with the image that
// it has, and tombstones for keys that are not there. It returns the keys of the tombstones.
func (c *client) checkFeed(table string) []string {
	c.t.Helper()
	want := c.rowsByKey(table, "true", true)
	feed := c.drain(table, 0, 1000)
	if pages := c.drain(table, 0, 97); !slices.Equal(pages, feed) {
		c.t.Fatalf("%s: pages of 97 rows give another feed than pages of 1000:\n%s", table, firstDifference(pages, feed))
	}
	var tombstones []string
	seen := map[string]int64{}
	for _, f := range feed {
		if before, twice := seen[f.pk]; twice {
			c.t.Fatalf("%s: key %s stands in the feed twice, at %d and %d", table, f.pk, before, f.seq)
		}
		seen[f.pk] = f.seq
		row, live := want[f.pk]
		switch {
		case f.deleted && live:
			c.t.Fatalf("%s: a tombstone for %s, which is there", table, f.pk)
		case f.deleted:
			tombstones = append(tombstones, f.pk)
		case !live:
			c.t.Fatalf("%s: the feed has %s, the table has not", table, f.pk)
		case row != f.image:
			c.t.Fatalf("%s: the feed has\n%s\nthe table\n%s", table, f.image, row)
		}
	}
	if missing := len(want) + len(tombstones) - len(feed); missing != 0 {
		for key := range want {
			if _, ok := seen[key]; !ok {
				c.t.Fatalf("%s: %d rows are missing in the feed, one is %s", table, missing, key)
			}
		}
	}
	slices.Sort(tombstones)
	return tombstones
}

// rowsByKey are the rows of a table for which a predicate holds, as jsonb text. The key is that of a feed, an object, or
// that of a log, which is the bare value for a single column.
func (c *client) rowsByKey(table, predicate string, object bool) map[string]string {
	c.t.Helper()
	columns := c.rows(`SELECT a.attname FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k(num, ord)
		JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.num
		WHERE i.indrelid = $1::text::regclass AND i.indisprimary ORDER BY k.ord`, table)
	var parts []string
	for _, column := range columns {
		parts = append(parts, fmt.Sprintf("'%s', t.%q", column[0], column[0]))
	}
	key := "jsonb_build_object(" + strings.Join(parts, ", ") + ")"
	if !object && len(columns) == 1 {
		key = fmt.Sprintf("to_jsonb(t.%q)", columns[0][0])
	}
	rows := map[string]string{}
	for _, r := range c.rows(fmt.Sprintf("SELECT %s, to_jsonb(t.*) FROM %s t WHERE %s", key, table, predicate)) {
		rows[r[0]] = r[1]
	}
	return rows
}

// logEvent is a row of a stream log.
type logEvent struct{ id, op, k, ts, doc, old string }

// readLog reads a stream's log with AFTER, page by page, from behind an id.
func (c *client) readLog(stream, after string, limit int) ([]logEvent, error) {
	old := c.text("SELECT count(*) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = 'old'", "_stream_"+stream) == "1"
	columns := "id, op, k, ts, doc"
	if old {
		columns += ", old"
	}
	var all []logEvent
	for {
		rows, err := c.tryRows(fmt.Sprintf("SELECT %s FROM _stream_%s ORDER BY id LIMIT %d AFTER ($1)", columns, stream, limit), after)
		if err != nil {
			return nil, err
		}
		for _, r := range rows {
			e := logEvent{id: r[0], op: r[1], k: r[2], ts: r[3], doc: r[4]}
			if old {
				e.old = r[5]
			}
			if e.id <= after {
				return nil, fmt.Errorf("event %s does not come behind %q", e.id, after)
			}
			after = e.id
			all = append(all, e)
		}
		if len(rows) < limit {
			return all, nil
		}
	}
}

// fold replays events into what a consumer has, and refuses those that make no sense: an exit or a delete of a key that is
// not there. Only a backfill beside writers may tell that of a key that nothing was told of before: the row has left before
// it was reached.
func fold(copied map[string]string, events []logEvent, backfilled bool) error {
	told := map[string]bool{}
	for _, e := range events {
		_, there := copied[e.k]
		there = there || backfilled && !told[e.k]
		told[e.k] = true
		switch e.op {
		case "put":
			copied[e.k] = e.doc
		case "exit", "delete":
			if !there {
				return fmt.Errorf("event %s: %s of %s, which was not there", e.id, e.op, e.k)
			}
			delete(copied, e.k)
		default:
			return fmt.Errorf("event %s: op %q", e.id, e.op)
		}
	}
	return nil
}

// checkFold compares the fold of a stream whose log is complete with the rows that the predicate selects. Nobody must be
// writing. It returns the events.
func (c *client) checkFold(stream, table, predicate string) []logEvent {
	c.t.Helper()
	return c.checkFoldOf(stream, table, predicate, false)
}

// checkFoldOf is checkFold, also for a stream whose backfill had writers beside it.
func (c *client) checkFoldOf(stream, table, predicate string, backfilled bool) []logEvent {
	c.t.Helper()
	events, err := c.readLog(stream, "", 1000)
	if err != nil {
		c.t.Fatalf("read the log of %s: %s", stream, describe(err))
	}
	copied := map[string]string{}
	if err := fold(copied, events, backfilled); err != nil {
		c.t.Fatalf("stream %s: %v", stream, err)
	}
	want := c.rowsByKey(table, predicate, false)
	for key, row := range want {
		if copied[key] != row {
			c.t.Fatalf("stream %s: for key %s the fold has\n%s\nthe table\n%s", stream, key, copied[key], row)
		}
	}
	for key := range copied {
		if _, ok := want[key]; !ok {
			c.t.Fatalf("stream %s: the fold has %s, the table has not", stream, key)
		}
	}
	return events
}

func firstDifference[T comparable](a, b []T) string {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("at %d:\n%+v\n%+v", i, a[i], b[i])
		}
	}
	return fmt.Sprintf("%d and %d entries", len(a), len(b))
}

// sameJSON says whether two texts are the same JSON, whatever their spacing and order of keys.
func sameJSON(a, b string) bool {
	x, errX := canonicalJSON(a)
	y, errY := canonicalJSON(b)
	return errX == nil && errY == nil && x == y
}

func canonicalJSON(text string) (string, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return "", err
	}
	raw, err := json.Marshal(value)
	return string(raw), err
}

// splitObject takes an object apart without touching its values.
func splitObject(text string) map[string]string {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return map[string]string{"": text}
	}
	values := map[string]string{}
	for name, value := range raw {
		values[name] = string(value)
	}
	return values
}
