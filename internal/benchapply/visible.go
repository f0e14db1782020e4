package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// small makes a database with the table t0, managed, with streams, and koldproxy running.
func (b *bench) small(ctx context.Context, rows, streams int) (*database, error) {
	d, err := b.newDatabase(ctx)
	if err != nil {
		return nil, err
	}
	err = exec1(ctx, d.source, fmt.Sprintf(`CREATE TABLE t0 (%s)`, narrow.columns),
		fmt.Sprintf(`INSERT INTO t0 SELECT %s FROM generate_series(1, %d) AS i`, narrow.values, rows), `VACUUM ANALYZE t0`)
	if err == nil {
		err = d.serve(ctx)
	}
	if err == nil {
		err = await(ctx, d.source, 20*time.Millisecond, startedSQL)
	}
	if err == nil {
		err = d.manage(ctx, 1)
	}
	if err == nil {
		err = d.stream(ctx, streams)
	}
	return d, err
}

// latencies measures from the commit of an insert to the moment when another session finds it, in the feed and in a log, while
// nothing else happens and while pgbench commits 5000 times per second, or as often as it can.
func latencies(ctx context.Context, b *bench) (err error) {
	d, err := b.small(ctx, 10_000, 2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.drop(ctx)) }()
	fmt.Printf("\n| Commit to visible | Load | p50, ms | p99, ms |\n|---|---|---|---|\n")
	for _, load := range []int{0, 5000} {
		for _, way := range []struct{ name, sql string }{
			// The cursor is just before the row, so that the cost of a look does not grow with the load.
			{"changes_since", `SELECT EXISTS (SELECT FROM koldstore.t0__cl m CROSS JOIN LATERAL koldstore.changes_since('t0', m.seq - 1, 1) c WHERE m.id = $1 AND c.pk = jsonb_build_object('id', $1::bigint)) AND $2 <> ''`},
			{"stream log", inLogSQL},
		} {
			seen, err := d.underLoad(ctx, load, func() ([]float64, error) { return d.latency(ctx, way.sql) })
			if err != nil {
				return err
			}
			slices.Sort(seen)
			fmt.Printf("| %s | %d commits/s | %.1f | %.1f |\n", way.name, load, seen[len(seen)/2], seen[len(seen)*99/100])
		}
	}
	return nil
}

// underLoad runs a measurement next to pgbench at a rate.
func (d *database) underLoad(ctx context.Context, rate int, measure func() ([]float64, error)) (seen []float64, err error) {
	if rate == 0 {
		return measure()
	}
	ctx, cancel := context.WithCancel(ctx)
	var load sync.WaitGroup
	load.Go(func() {
		_, _ = d.pgbench(ctx, "\\set id random(1, 10000)\nUPDATE t0 SET amount = amount + 1 WHERE id = :id;\n", "-c", "4", "-j", "2", "-M", "prepared", "-R", strconv.Itoa(rate), "-T", "600")
	})
	defer func() { cancel(); load.Wait() }()
	time.Sleep(time.Second) // until it is under way
	return measure()
}

// inLogSQL asks whether the log of s0 has an event of a key after an id.
const inLogSQL = `SELECT EXISTS (SELECT FROM _stream_s0 WHERE id > $2 AND k = to_jsonb($1::bigint))`

// latency inserts rows one by one, each of which matches the stream s0, and asks again and again until one is there. The query gets the
// row's key and an event id from before it.
func (d *database) latency(ctx context.Context, sql string) (seen []float64, err error) {
	writer, err := pgx.Connect(ctx, d.b.cluster.DSN(d.name, "", ""))
	if err != nil {
		return nil, err
	}
	defer writer.Close(ctx)
	next, err := value[int64](ctx, writer, `SELECT max(id) + 1 FROM t0`)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(time.Duration(d.b.seconds) * time.Second); time.Now().Before(end); next++ {
		from, err := value[string](ctx, writer, `SELECT koldstore.event_id(watermark, '0/0') FROM koldstore.checkpoint`)
		if err != nil {
			return nil, err
		}
		if _, err := writer.Exec(ctx, `INSERT INTO t0 (id, bucket, amount, at) VALUES ($1, 0, 1, now())`, next); err != nil {
			return nil, err
		}
		committed := time.Now()
		if err := await(ctx, d.source, 200*time.Microsecond, sql, next, from); err != nil {
			return nil, err
		}
		seen = append(seen, float64(time.Since(committed).Microseconds())/1000)
		time.Sleep(5 * time.Millisecond)
	}
	return seen, nil
}

// hotPage reads pages of 1000 rows from a mirror.
func hotPage(ctx context.Context, b *bench) (err error) {
	d, err := b.small(ctx, b.scaled(500_000), 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.drop(ctx)) }()
	var took []float64
	var cursor int64
	for end := time.Now().Add(time.Duration(b.seconds) * time.Second); time.Now().Before(end); {
		begun := time.Now()
		rows, err := d.source.Query(ctx, `SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since('t0', $1, 1000)`, cursor)
		if err != nil {
			return err
		}
		n := 0
		for rows.Next() {
			if err := rows.Scan(&cursor, nil, nil, nil, nil, nil); err != nil {
				return err
			}
			n++
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if n < 1000 {
			cursor = 0
			continue
		}
		took = append(took, float64(time.Since(begun).Microseconds())/1000)
	}
	slices.Sort(took)
	fmt.Printf("\n| Page of 1000 rows, hot | p50, ms | p99, ms |\n|---|---|---|\n| %d pages | %.1f | %.1f |\n", len(took), took[len(took)/2], took[len(took)*99/100])
	return nil
}

// bigTransaction lets koldproxy apply one large transaction and says how much memory it held.
func bigTransaction(ctx context.Context, b *bench) (err error) {
	d, err := b.small(ctx, 0, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.drop(ctx)) }()
	if err := exec1(ctx, d.source, fmt.Sprintf(`INSERT INTO t0 SELECT %s FROM generate_series(1, %d) AS i`, narrow.values, b.bigRows)); err != nil {
		return err
	}
	if err := await(ctx, d.source, 100*time.Millisecond, `SELECT EXISTS (SELECT FROM koldstore.t0__cl WHERE id = $1)`, b.bigRows); err != nil {
		return err
	}
	peak, err := d.peakBytes()
	fmt.Printf("\n| One transaction | Peak of resident memory |\n|---|---|\n| %d rows | %d MB |\n", b.bigRows, peak>>20)
	return err
}
