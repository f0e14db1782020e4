package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// smallStreams makes a database with the empty table t0, which is not managed, with streams, and koldproxy running.
func (b *bench) smallStreams(ctx context.Context, streams int, set func(*database)) (*database, error) {
	d, err := b.newDatabase(ctx)
	if err != nil {
		return nil, err
	}
	set(d)
	if err = exec1(ctx, d.source, fmt.Sprintf(`CREATE TABLE t0 (%s)`, narrow.columns)); err == nil {
		err = d.serve(ctx)
	}
	if err == nil {
		err = await(ctx, d.source, 20*time.Millisecond, startedSQL)
	}
	if err == nil {
		err = d.stream(ctx, streams)
	}
	return d, err
}

// replay reads a log from its beginning to its end in pages of 500, through koldproxy with AFTER and directly by the key, in turns,
// until either has been read for the length of a measurement in each round.
func replay(ctx context.Context, b *bench) (err error) {
	d, err := b.smallStreams(ctx, 1, func(*database) {})
	if d != nil {
		defer func() { err = errors.Join(err, d.drop(ctx)) }()
	}
	if err != nil {
		return err
	}
	n := b.scaled(1_000_000)
	if err := exec1(ctx, d.source, fmt.Sprintf(`INSERT INTO t0 SELECT %s FROM generate_series(1, %d) AS i`, narrow.values, n)); err != nil {
		return err
	}
	if err := await(ctx, d.source, 100*time.Millisecond, `SELECT events >= $1 FROM koldstore.stream_status`, n); err != nil {
		return err
	}
	if err := exec1(ctx, d.source, `VACUUM ANALYZE _stream_s0`); err != nil {
		return err
	}
	through, err := d.proxied(ctx)
	if err != nil {
		return err
	}
	defer through.Close(ctx)
	const page = `SELECT id, op, k, ts, doc FROM _stream_s0 %s ORDER BY id LIMIT 500 %s`
	ways := []replayWay{
		{conn: d.source, sql: fmt.Sprintf(page, "WHERE id > $1", "")},
		{conn: through, sql: fmt.Sprintf(page, "", "AFTER ($1)")},
	}
	length := time.Duration(b.seconds) * time.Second
	var direct, proxied, ratios []float64
	for range b.rounds {
		ways[0].took, ways[1].took = 0, 0
		passes := 0
		for ; ways[0].took < length || ways[1].took < length; passes++ {
			for i := range ways {
				if err := ways[(i+passes)%2].read(ctx, n); err != nil {
					return err
				}
			}
		}
		rate := func(w replayWay) float64 { return float64(n*passes) / w.took.Seconds() }
		direct, proxied = append(direct, rate(ways[0])), append(proxied, rate(ways[1]))
		ratios = append(ratios, rate(ways[1])/rate(ways[0]))
	}
	fmt.Printf("\n| Replay in pages of 500 | Directly, rows/s | Through koldproxy with AFTER, rows/s | Ratio (lowest, highest) |\n|---|---|---|---|\n| %d events, %d rounds of %d s | %.0f | %.0f | %.2f (%.2f, %.2f) |\n",
		n, b.rounds, b.seconds, median(direct), median(proxied), median(ratios), slices.Min(ratios), slices.Max(ratios))
	return nil
}

// replayWay is a way to read a log, and for how long it was read.
type replayWay struct {
	conn *pgx.Conn
	sql  string
	took time.Duration
}

// read reads the log once; it wants n events.
func (w *replayWay) read(ctx context.Context, n int) error {
	begun := time.Now()
	read, err := readPages(ctx, w.conn, w.sql)
	w.took += time.Since(begun)
	if err == nil && read != n {
		err = fmt.Errorf("%d of %d events were read", read, n)
	}
	return err
}

func readPages(ctx context.Context, conn *pgx.Conn, sql string) (n int, err error) {
	for after := ""; ; {
		rows, err := conn.Query(ctx, sql, after)
		if err != nil {
			return n, err
		}
		before := n
		for rows.Next() {
			after = string(rows.RawValues()[0])
			n++
		}
		if err := rows.Err(); err != nil || n-before < 500 {
			return n, err
		}
	}
}

// sweep puts many expired events into a log of 24 hours and measures how long they take to go, and what a writer notices of it.
func sweep(ctx context.Context, b *bench) (err error) {
	d, err := b.smallStreams(ctx, 1, func(*database) {})
	if d != nil {
		defer func() { err = errors.Join(err, d.drop(ctx)) }()
	}
	if err != nil {
		return err
	}
	n := b.expired
	if n == 0 {
		n = b.scaled(10_000_000)
	}
	size := func() (bytes int64, err error) {
		return value[int64](ctx, d.source, `SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relname LIKE '\_stream\_%' AND c.relkind = 'r'`)
	}
	empty, err := size()
	if err != nil {
		return err
	}
	// The log gets a partition of its own for events of yesterday.
	err = exec1(ctx, d.source, `DO $$
		DECLARE
			part regclass; upper text; id bigint;
			old  text := koldstore.millis_prefix(floor(extract(epoch FROM now() - interval '26 hours') * 1000)::bigint);
		BEGIN
			SELECT l.part, l.upper, s.stream_id INTO part, upper, id FROM koldstore.stream s, koldstore.log_partitions(s.log_oid) AS l;
			EXECUTE format('ALTER TABLE _stream_s0 DETACH PARTITION %s', part);
			EXECUTE format('CREATE TABLE koldstore._stream_%s_0 (LIKE _stream_s0 INCLUDING INDEXES)', id);
			EXECUTE format('ALTER TABLE _stream_s0 ATTACH PARTITION koldstore._stream_%s_0 FOR VALUES FROM (MINVALUE) TO (%L)', id, old);
			EXECUTE format('ALTER TABLE _stream_s0 ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', part, old, upper);
		END $$`,
		fmt.Sprintf(`INSERT INTO _stream_s0 (id, op, k, ts, doc) SELECT koldstore.event_id(koldstore.seq_at(now() - interval '30 hours') + i, '0/1'), 'put', to_jsonb(i), now() - interval '30 hours',
			jsonb_build_object('id', i, 'bucket', i %% 1000, 'note', md5(i::text)) FROM generate_series(1, %d) AS i`, n),
		`VACUUM ANALYZE _stream_s0`)
	if err != nil {
		return err
	}
	full, err := size()
	if err != nil {
		return err
	}
	// These events were one transaction, which no real ones are; the walsender has to be through with it.
	end, err := logEnd(ctx, d)
	if err != nil {
		return err
	}
	begunReading := time.Now()
	if err := await(ctx, d.source, pollPause, slotPassedSQL, end); err != nil {
		return err
	}
	decoded := time.Since(begunReading)
	calmRate, err := d.appendRate(ctx)
	if err != nil {
		return err
	}
	watch, err := pgx.Connect(ctx, b.cluster.DSN(d.name, "", ""))
	if err != nil {
		return err
	}
	defer watch.Close(ctx)
	begun := time.Now()
	if err := exec1(ctx, watch, `CALL koldstore.alter_stream(NULL, 's0', '{"retention": "24h"}')`); err != nil {
		return err
	}
	gone := make(chan error, 1)
	var took time.Duration
	go func() {
		err := await(ctx, watch, 20*time.Millisecond, `SELECT count(*) = 0 FROM pg_class WHERE relname LIKE '\_stream\_%\_0'`)
		took = time.Since(begun)
		gone <- err
	}()
	sweptRate, err := d.appendRate(ctx)
	if err := errors.Join(err, <-gone); err != nil {
		return err
	}
	left, err := size()
	if err != nil {
		return err
	}
	dead, err := value[int64](ctx, d.source, `SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables WHERE relname LIKE '\_stream\_%'`)
	if err != nil {
		return err
	}
	fmt.Printf("\n(The walsender went on reading the events for %.1f s.)\n", decoded.Seconds())
	fmt.Printf("\n| Expired events | Gone after, s | Log before, MB | and after | Dead rows | Appended, events/s, before | meanwhile |\n|---|---|---|---|---|---|---|\n| %d | %.1f | %d | %d | %d | %.0f | %.0f |\n",
		n, took.Seconds(), (full-empty)>>20, (left-empty)>>20, dead, calmRate, sweptRate)
	return nil
}

// appendRate is how many events a second come into the log while four sessions insert as fast as they can, for the length of a measurement.
func (d *database) appendRate(ctx context.Context) (float64, error) {
	const events = `SELECT sum(events)::bigint FROM koldstore.stream_status`
	before, err := value[int64](ctx, d.source, events)
	if err != nil {
		return 0, err
	}
	begun := time.Now()
	const script = "\\set id random(1000000, 1000000000000000)\nINSERT INTO t0 (id, bucket, amount, at) VALUES (:id, 0, 1, now()) ON CONFLICT DO NOTHING;\n"
	if _, err := d.pgbench(ctx, script, "-c", "4", "-j", "1", "-M", "prepared", "-T", strconv.Itoa(d.b.seconds)); err != nil {
		return 0, err
	}
	if err := exec1(ctx, d.source, `SELECT koldstore.wait_for_async_mirror()`); err != nil {
		return 0, err
	}
	took := time.Since(begun)
	after, err := value[int64](ctx, d.source, events)
	return float64(after-before) / took.Seconds(), err
}
