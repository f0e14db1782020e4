package changefeed_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
)

// ahead makes the applier's clock run ahead, so that a test meets the next partition of a log without waiting for it.
func ahead(h *host) (forward func(time.Duration)) {
	var offset atomic.Int64
	h.stopApplier()
	h.config.Now = func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }
	h.startApplier()
	return func(d time.Duration) { offset.Add(int64(d)) }
}

func sweeper(h *host) *changefeed.Sweeper {
	return changefeed.NewSweeper(time.Hour, h.pool, zerolog.Nop(), nil)
}

func sweep(h *host) int64 {
	h.t.Helper()
	removed, err := sweeper(h).Sweep(h.t.Context())
	must(h.t, err)
	return removed
}

// partitionsSQL counts partitions without those that were made ahead of time.
const partitionsSQL = `SELECT count(*) FROM koldstore.log_partitions('_stream_s'::regclass) WHERE coalesce(lower, '') <= (SELECT max(id) FROM _stream_s)`

// The sweep removes what has been invisible since it expired by dropping partitions, and raises the floor with it.
func TestSweepDropsPartitions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	forward := ahead(h)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "90m")
	h.stream("forever", "t", "true")
	h.exec(`INSERT INTO t SELECT generate_series(1, 12000)`)
	h.fence()
	forward(10 * time.Minute) // a partition of this stream covers 225 s
	h.exec(`INSERT INTO t SELECT generate_series(12001, 12010)`)
	h.fence()
	h.expect(partitionsSQL, "2")
	for _, log := range []string{"_stream_s", "_stream_forever"} {
		h.admin(fmt.Sprintf(`UPDATE %s SET ts = ts - interval '91 m' WHERE k <= '11999'`, log))
	}
	last := h.rows(`SELECT max(id) FROM _stream_s WHERE k <= '12000'`)[0]
	if removed := sweep(h); removed != 0 {
		t.Errorf("%d events went with one that is to stay", removed)
	}
	h.admin(`UPDATE _stream_s SET ts = ts - interval '91 m' WHERE k = '12000'`)
	var visible int
	must(t, h.app.QueryRow(t.Context(), `SELECT count(*) FROM _stream_s`).Scan(&visible))
	if visible != 10 {
		t.Errorf("%d events are visible", visible)
	}
	for i, want := range []int64{12000, 0} {
		if removed := sweep(h); removed != want {
			t.Errorf("sweep %d removed %d events, want %d", i+1, removed, want)
		}
		h.expect(`SELECT name, floor FROM koldstore.stream ORDER BY name`, "forever NULL", "s "+last)
	}
	h.expect(partitionsSQL, "1")
	h.expect(`SELECT (SELECT count(*) FROM _stream_s), (SELECT count(*) FROM _stream_forever)`, "10 12010")
	h.expect(`SELECT count(*) FROM pg_class c WHERE relname LIKE '\_stream\_%\_%' AND relkind = 'r' AND NOT relispartition`, "0")

	// The log goes on behind it, the floor never falls, and the newest partition stays until it is over.
	h.exec(`INSERT INTO t VALUES (12011)`)
	h.fence()
	h.expect(`SELECT count(*), (SELECT floor FROM koldstore.stream WHERE name = 's') FROM _stream_s`, "11 "+last)
}

// A partition that was made while events were kept for ever covers too much time to wait for its end: its events are deleted.
func TestSweepAfterRetentionIsShortened(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true")
	h.exec(`INSERT INTO t SELECT generate_series(1, 12000)`, `INSERT INTO t SELECT generate_series(12001, 12010)`)
	h.fence()
	h.admin(`UPDATE _stream_s SET ts = ts - interval '91 m' WHERE k <= '12000' OR k IN ('12002', '12004')`)
	if removed := sweep(h); removed != 0 {
		t.Errorf("%d events are gone, without a retention", removed)
	}
	h.exec(`CALL koldstore.alter_stream(NULL, 's', '{"retention": "90m"}')`)
	for i, want := range []int64{12002, 0} {
		if removed := sweep(h); removed != want {
			t.Errorf("sweep %d removed %d events, want %d", i+1, removed, want)
		}
	}
	h.expect(`SELECT count(*) FROM _stream_s`, "8")
}

// Nobody waits for a sweep: while it waits for somebody who reads the log, others read and the applier writes.
func TestSweepLetsNobodyWait(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	forward := ahead(h)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "90m")
	h.exec(`INSERT INTO t SELECT generate_series(1, 100)`)
	h.fence()
	forward(10 * time.Minute)
	h.exec(`INSERT INTO t VALUES (101)`)
	h.fence()
	if removed := sweep(h); removed != 0 { // a partition that was over before the first event would keep the sweep below
		t.Fatalf("%d events are gone", removed)
	}
	h.admin(`UPDATE _stream_s SET ts = ts - interval '91 m' WHERE k <= '100'`)
	var left float64 // of the newest partition, in milliseconds
	must(t, h.pool.QueryRow(t.Context(), `SELECT left(koldstore.log_end('_stream_s'::regclass), 17)::bigint - ((watermark >> 22) + 1704067200000) FROM koldstore.checkpoint`).Scan(&left))
	if spare := time.Duration(left)*time.Millisecond - 20*time.Second; spare > 0 {
		forward(spare)
		h.exec(`UPDATE t SET id = 101 WHERE id = 101`)
		h.fence()
	}
	h.admin(`DELETE FROM _stream_s WHERE id > (SELECT min(id) FROM _stream_s WHERE k = '101')`)

	reader, err := h.pool.Begin(t.Context())
	must(t, err)
	defer reader.Rollback(context.Background())
	var n int
	must(t, reader.QueryRow(t.Context(), `SELECT count(*) FROM _stream_s`).Scan(&n))
	done := make(chan error, 1)
	go func() {
		removed, err := sweeper(h).Sweep(context.Background())
		if err == nil && removed != 100 {
			err = fmt.Errorf("%d events were removed", removed)
		}
		done <- err
	}()
	h.eventually("the sweep waits for the reader", func() bool {
		return h.rows(`SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)`)[0] == "t"
	})
	h.exec(`INSERT INTO t VALUES (102)`)
	h.fence()
	h.expect(`SELECT count(*) FROM _stream_s`, "2")
	forward(30 * time.Second) // into a partition that there was none of when the sweep began
	h.exec(`INSERT INTO t VALUES (103)`)
	h.fence()
	h.expect(`SELECT count(*) FROM _stream_s`, "3")
	must(t, reader.QueryRow(t.Context(), `SELECT count(*) FROM _stream_s`).Scan(&n))
	must(t, reader.Rollback(t.Context()))
	must(t, <-done)
	h.expect(partitionsSQL, "2")
}

// A sweep that was interrupted is finished by the next one, whichever step it was in.
func TestSweepGoesOnAfterAnInterruption(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	forward := ahead(h)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "90m")
	for i := range 3 {
		h.exec(fmt.Sprintf(`INSERT INTO t VALUES (%d)`, i))
		h.fence()
		forward(10 * time.Minute)
	}
	h.expect(partitionsSQL, "3")
	h.admin(`UPDATE _stream_s SET ts = ts - interval '91 m' WHERE k < '2'`)
	parts := h.rows(`SELECT part::regclass FROM koldstore.log_partitions('_stream_s'::regclass)`)

	// Detached and not dropped.
	h.admin(fmt.Sprintf(`ALTER TABLE _stream_s DETACH PARTITION %s`, parts[0]))
	// Being detached: the session ends while it waits for a reader.
	reader, err := h.pool.Begin(t.Context())
	must(t, err)
	_, err = reader.Exec(t.Context(), `SELECT FROM _stream_s`)
	must(t, err)
	conn, err := pgx.Connect(t.Context(), h.dsn)
	must(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `SET statement_timeout = '200ms'`)
	must(t, err)
	_, err = conn.Exec(t.Context(), fmt.Sprintf(`ALTER TABLE _stream_s DETACH PARTITION %s CONCURRENTLY`, parts[1]))
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "57014" {
		t.Fatalf("the detaching was not interrupted: %v", err)
	}
	must(t, reader.Rollback(t.Context()))

	if removed := sweep(h); removed != 0 {
		t.Errorf("%d events were counted twice", removed)
	}
	h.expect(`SELECT count(*) FROM pg_class WHERE relname LIKE '\_stream\_%\_%' AND relkind = 'r' AND NOT relispartition`, "0")
	h.expect(partitionsSQL, "1")
	h.expect(`SELECT count(*) FROM _stream_s`, "1")
}

// What the README says about reading: a page behind an id is an index scan, whatever the number of partitions.
func TestPagesWalkTheIndex(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	forward := ahead(h)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "90m")
	for i := range 5 {
		h.exec(fmt.Sprintf(`INSERT INTO t SELECT generate_series(%d, %d)`, i*2000, i*2000+1999))
		h.fence()
		forward(10 * time.Minute)
	}
	h.expect(partitionsSQL, "5")
	h.admin(`ANALYZE _stream_s`)
	middle := h.rows(`SELECT id FROM _stream_s ORDER BY id OFFSET 3000 LIMIT 1`)[0]
	rows, err := h.app.Query(t.Context(), `EXPLAIN (COSTS OFF) SELECT id, op, k, ts, doc FROM _stream_s WHERE id > '`+middle+`' ORDER BY id LIMIT 500`)
	must(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	scans := 0
	for _, line := range lines {
		if strings.Contains(line, "Sort") || strings.Contains(line, "Seq Scan") {
			t.Errorf("not an index scan: %s", line)
		}
		if strings.Contains(line, "Index Scan") {
			scans++
		}
	}
	if scans == 0 || scans > 4 {
		t.Errorf("%d index scans for the 4 partitions from there on:\n%v", scans, lines)
	}
}

// The sweep also takes the last event of a log that is not written to any more, in a database in which nothing happens.
func TestSweepTakesTheLastEvent(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.admin(secondsWide)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "1s")
	h.exec(`INSERT INTO t VALUES (1)`)
	h.fence()
	last := h.rows(`SELECT max(id) FROM _stream_s`)[0]
	h.eventually("the event is gone", func() bool { return sweep(h) == 1 })
	h.expect(`SELECT count(*), koldstore.stream_floor('s') FROM _stream_s`, "0 "+last)
	h.exec(`INSERT INTO t VALUES (2)`)
	h.fence()
	h.expect(`SELECT k FROM _stream_s`, "2")
}

// secondsWide makes partitions that cover a second.
const secondsWide = `CREATE OR REPLACE FUNCTION koldstore.log_width(keep interval) RETURNS interval LANGUAGE sql IMMUTABLE BEGIN ATOMIC SELECT interval '1 second'; END`

// Roles that retention's policy does not bind see expired events until their partition goes: within seconds of its end, not at the
// next sweep only.
func TestExpiredPartitionsGoSoon(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.admin(secondsWide)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	s := sweeper(h) // with an hour between two sweeps
	go func() { done <- s.Run(ctx) }()
	defer func() { cancel(); must(t, <-done) }()
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`, `CREATE TABLE other (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "1s")
	h.stream("other", "other", "true")
	h.exec(`INSERT INTO t VALUES (1)`)
	h.fence()
	h.expect(`SELECT count(*) FROM _stream_s`, "1")
	n := 0
	h.eventually("the event is gone", func() bool {
		n++
		h.exec(fmt.Sprintf(`INSERT INTO other VALUES (%d)`, n)) // the position moves on with whatever is written
		return h.rows(`SELECT count(*) FROM _stream_s`)[0] == "0"
	})
	h.exec(`INSERT INTO t VALUES (2)`)
	h.fence()
	h.expect(`SELECT k FROM _stream_s`, "2")
}
