package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// shape is the columns of the tables t0, t1, …, and the values of a row with the key i.
type shape struct {
	name, columns, values string
}

var (
	// narrow rows have about 200 bytes.
	narrow = shape{
		"narrow", `id bigint PRIMARY KEY, bucket int NOT NULL, amount numeric(12,2) NOT NULL, at timestamptz NOT NULL, note text`,
		`i, i % 1000, (i % 100000) / 100.0, '2026-01-01'::timestamptz + i * interval '1 second', repeat(md5(i::text), 5)`,
	}
	// wide rows have 50 columns of five types.
	wide = makeWide()
)

func makeWide() shape {
	var columns, values strings.Builder
	types := []struct{ name, value string }{
		{"int", "i"}, {"text", "md5(i::text)"}, {"numeric", "i / 7.0"}, {"timestamptz", "'2026-01-01'::timestamptz + i * interval '1 second'"}, {"boolean", "i % 2 = 0"},
	}
	for i := range 45 {
		fmt.Fprintf(&columns, ", c%d %s", i, types[i%len(types)].name)
		fmt.Fprintf(&values, ", %s", types[i%len(types)].value)
	}
	return shape{"wide", narrow.columns + columns.String(), narrow.values + values.String()}
}

// workload writes into t0 … and says how many row changes that were.
type workload func(ctx context.Context, d *database, s shape, tables int) (changes int, err error)

// drainCase is a backlog to work off.
type drainCase struct {
	name            string
	shape           shape
	tables, streams int
	rows            int // in each table before
	work            workload
}

func (b *bench) drainCases() []drainCase {
	rows := b.scaled(100_000)
	return []drainCase{
		{"insert-narrow", narrow, 1, 0, 0, insertAtOnce},
		{"insert-wide", wide, 1, 0, 0, insertAtOnce},
		{"update-narrow", narrow, 1, 0, rows, updateOneByOne},
		{"update-wide", wide, 1, 0, rows, updateOneByOne},
		{"mixed-1-table", narrow, 1, 0, rows, mixed},
		{"mixed-10-tables", narrow, 10, 0, rows / 10, mixed},
	}
}

func (b *bench) streamCases() []drainCase {
	rows := b.scaled(100_000)
	return []drainCase{
		{"mixed-0-streams", narrow, 1, 0, rows, mixed},
		{"mixed-1-stream", narrow, 1, 1, rows, mixed},
		{"mixed-10-streams", narrow, 1, 10, rows, mixed},
		{"mixed-100-streams", narrow, 1, 100, rows, mixed},
	}
}

// insertAtOnce is one transaction of inserts with new keys.
func insertAtOnce(ctx context.Context, d *database, s shape, _ int) (int, error) {
	n := d.b.scaled(500_000)
	if s.name == wide.name {
		n /= 5
	}
	next, err := value[int64](ctx, d.source, `SELECT coalesce(max(id), 0) + 1 FROM t0`)
	if err != nil {
		return 0, err
	}
	return n, exec1(ctx, d.source, fmt.Sprintf(`INSERT INTO t0 SELECT %s FROM generate_series(%d, %d) AS i`, s.values, next, next+int64(n)-1))
}

// updateOneByOne is many transactions of one update each, of random rows.
func updateOneByOne(ctx context.Context, d *database, _ shape, _ int) (int, error) {
	n, rows := d.b.scaled(100_000), d.b.scaled(100_000)
	_, err := d.pgbench(ctx, fmt.Sprintf("\\set id random(1, %d)\nUPDATE t0 SET amount = amount + 1, bucket = bucket + 1 WHERE id = :id;\n", rows), "-c", "4", "-j", "2", "-M", "prepared", "-t", strconv.Itoa(n/4))
	return n / 4 * 4, err
}

// mixed is eight clients whose transactions are three updates, an insert and, once in four, a delete.
func mixed(ctx context.Context, d *database, s shape, tables int) (int, error) {
	transactions, rows := d.b.scaled(25_000)/8, d.b.scaled(100_000)/tables
	before, err := written(ctx, d, tables)
	if err != nil {
		return 0, err
	}
	script := fmt.Sprintf(`\set k random(0, %d)
\set a random(1, %d)
\set b random(1, %[2]d)
\set c random(1, %[2]d)
\set new random(%[3]d, 1000000000000)
\set coin random(0, 3)
BEGIN;
UPDATE t:k SET amount = amount + 1 WHERE id = :a;
UPDATE t:k SET bucket = bucket + 1, note = note || '!' WHERE id = :b;
INSERT INTO t:k SELECT %[4]s FROM (SELECT :new::bigint AS i) x ON CONFLICT DO NOTHING;
UPDATE t:k SET at = at + interval '1 day' WHERE id = :new;
\if :coin = 0
DELETE FROM t:k WHERE id = :c;
\endif
COMMIT;
`, tables-1, rows, rows+1, strings.ReplaceAll(s.values, "i * interval", "(i % 1000000) * interval"))
	if _, err := d.pgbench(ctx, script, "-c", "8", "-j", "2", "-t", strconv.Itoa(transactions)); err != nil {
		return 0, err
	}
	after, err := written(ctx, d, tables)
	return after - before, err
}

// written counts the row changes of the tables so far, by the statistics of the server.
func written(ctx context.Context, d *database, tables int) (int, error) {
	// Sessions that have ended have reported; this one reports with the next statement at the latest.
	return value[int](ctx, d.source, `SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::int FROM pg_stat_get_snapshot_timestamp() RIGHT JOIN pg_stat_user_tables ON true
		WHERE schemaname = 'public' AND relname = ANY (SELECT 't' || i FROM generate_series(0, $1 - 1) AS i)`, tables)
}

func drains(ctx context.Context, b *bench) error {
	return drainAll(ctx, b, "drain", b.drainCases())
}

func streamDrains(ctx context.Context, b *bench) error {
	return drainAll(ctx, b, "streams", b.streamCases())
}

func drainAll(ctx context.Context, b *bench, part string, cases []drainCase) error {
	fmt.Printf("\n| Backlog (%s) | Changes | Native, rows/s | koldproxy, rows/s | Ratio | Native, CPU µs/row | koldproxy, CPU µs/row | Ratio |\n|---|---|---|---|---|---|---|---|\n", part)
	for _, c := range cases {
		if !b.wantedCase(part, c.name) {
			continue
		}
		if err := drain(ctx, b, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// drain compares the two sides on one case.
func drain(ctx context.Context, b *bench, c drainCase) (err error) {
	d, err := b.newDatabase(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.drop(ctx)) }()
	sub, err := d.prepareDrain(ctx, c)
	if err != nil {
		return err
	}
	var natives, ours drainFigures
	changes := 0
	for round := range b.rounds {
		n, err := c.work(ctx, d, c.shape, c.tables)
		if err != nil {
			return err
		}
		changes += n
		end, err := logEnd(ctx, d)
		if err != nil {
			return err
		}
		sides := []func() error{
			func() error {
				took, err := sub.drain(ctx, end)
				natives.add(n, took)
				return err
			},
			func() error {
				took, err := d.drain(ctx, end, b.perf)
				ours.add(n, took)
				return err
			},
		}
		for i := range sides {
			if err := sides[(i+round)%2](); err != nil {
				return err
			}
		}
		if err := d.compare(ctx, c.tables); err != nil {
			return err
		}
		if err := skipOwnLog(ctx, d, sub); err != nil {
			return err
		}
	}
	native, our, nativeCPU, ourCPU := median(natives.rates), median(ours.rates), median(natives.cpus), median(ours.cpus)
	fmt.Printf("| %s | %d | %.0f | %.0f | %.2f | %.1f | %.1f | %.2f |\n", c.name, changes/b.rounds, native, our, our/native, nativeCPU, ourCPU, nativeCPU/ourCPU)
	return sub.end(ctx)
}

// skipOwnLog lets both sides read past what the other one has written into the log, so that it is no part of the next round.
func skipOwnLog(ctx context.Context, d *database, sub *subscription) error {
	end, err := logEnd(ctx, d)
	if err == nil {
		_, err = sub.drain(ctx, end)
	}
	if err == nil {
		_, err = d.drain(ctx, end, "")
	}
	return err
}

func logEnd(ctx context.Context, d *database) (string, error) {
	return value[string](ctx, d.source, `SELECT pg_current_wal_lsn()::text`)
}

// spent is what a drain took: time, and processor time of the server and koldproxy.
type spent struct{ time, cpu time.Duration }

// drainFigures are rows per second and microseconds of processor time per row, of each round.
type drainFigures struct{ rates, cpus []float64 }

func (f *drainFigures) add(rows int, s spent) {
	f.rates = append(f.rates, float64(rows)/s.time.Seconds())
	f.cpus = append(f.cpus, float64(s.cpu.Microseconds())/float64(rows))
}

// prepareDrain makes the tables, filled, on both sides, and stops both.
func (d *database) prepareDrain(ctx context.Context, c drainCase) (*subscription, error) {
	for i := range c.tables {
		create := fmt.Sprintf(`CREATE TABLE t%d (%s)`, i, c.shape.columns)
		fill := fmt.Sprintf(`INSERT INTO t%d SELECT %s FROM generate_series(1, %d) AS i`, i, c.shape.values, c.rows)
		if err := exec1(ctx, d.source, create, fill, fmt.Sprintf(`VACUUM ANALYZE t%d`, i)); err != nil {
			return nil, err
		}
		if err := exec1(ctx, d.copy, create, fill, fmt.Sprintf(`VACUUM ANALYZE t%d`, i)); err != nil {
			return nil, err
		}
	}
	if err := d.serve(ctx); err != nil {
		return nil, err
	}
	if err := await(ctx, d.source, 20*time.Millisecond, `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE active AND database = current_database())`); err != nil {
		return nil, err
	}
	if err := d.manage(ctx, c.tables); err != nil {
		return nil, err
	}
	if err := d.stream(ctx, c.streams); err != nil {
		return nil, err
	}
	if err := d.stop(); err != nil {
		return nil, err
	}
	return d.subscribe(ctx, c.tables)
}

// drain lets koldproxy work off the log up to a position and says how long it took. With a name for it, `perf` records that.
func (d *database) drain(ctx context.Context, end, perfFile string) (s spent, err error) {
	if err := d.serve(ctx); err != nil {
		return s, err
	}
	begun, err := slotInUse(ctx, d.source, `database = current_database() AND slot_name LIKE 'koldproxy%'`)
	if err != nil {
		return s, err
	}
	before, err := d.cpu()
	if err != nil {
		return s, err
	}
	perf, err := d.record(ctx, perfFile)
	if err != nil {
		return s, err
	}
	err = await(ctx, d.source, pollPause, slotPassedSQL, end)
	s.time = time.Since(begun)
	after, cpuErr := d.cpu()
	s.cpu = after - before
	return s, errors.Join(err, cpuErr, perf(), d.stop())
}

// slotPassedSQL asks whether koldproxy's slot is past a position.
const slotPassedSQL = `SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name LIKE 'koldproxy%' AND database = current_database()`

// pollPause is how often the end of a drain is looked for.
const pollPause = 10 * time.Millisecond

// slotInUse waits for a slot to be read and says when that began.
func slotInUse(ctx context.Context, conn *pgx.Conn, slot string) (time.Time, error) {
	err := await(ctx, conn, time.Millisecond, `SELECT EXISTS (SELECT FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid
		WHERE s.active AND r.state IN ('streaming', 'catchup') AND `+slot+`)`)
	return time.Now(), err
}

// compare wants the same rows in the source, in the copy and in the mirrors.
func (d *database) compare(ctx context.Context, tables int) error {
	for i := range tables {
		source, err := value[string](ctx, d.source, fmt.Sprintf(`SELECT concat_ws(' ', count(*), sum(hashtextextended(to_jsonb(t)::text, 0))) FROM t%d t`, i))
		if err != nil {
			return err
		}
		copied, err := value[string](ctx, d.copy, fmt.Sprintf(`SELECT concat_ws(' ', count(*), sum(hashtextextended(to_jsonb(t)::text, 0))) FROM t%d t`, i))
		if err != nil {
			return err
		}
		mirrored, err := value[string](ctx, d.source, fmt.Sprintf(`SELECT concat_ws(' ', count(*), sum(hashtextextended(row_image::text, 0))) FROM koldstore.t%d__cl WHERE op <> 3`, i))
		if err != nil {
			return err
		}
		if source != copied || source != mirrored {
			return fmt.Errorf("t%d: the source has %s, the copy %s, the mirror %s", i, source, copied, mirrored)
		}
	}
	return nil
}

// subscription is PostgreSQL's own subscriber, which stands still between drains.
type subscription struct {
	d    *database
	name string
}

func (d *database) subscribe(ctx context.Context, tables int) (*subscription, error) {
	s := &subscription{d, d.name + "_native"}
	names := make([]string, tables)
	for i := range names {
		names[i] = fmt.Sprintf("t%d", i)
	}
	err := exec1(ctx, d.source, `CREATE PUBLICATION native FOR TABLE `+strings.Join(names, ", "), fmt.Sprintf(`SELECT pg_create_logical_replication_slot('%s', 'pgoutput')`, s.name))
	if err == nil {
		err = exec1(ctx, d.copy, fmt.Sprintf(`CREATE SUBSCRIPTION %s CONNECTION '%s' PUBLICATION native WITH (create_slot = false, slot_name = %[1]s, copy_data = false, enabled = false)`,
			s.name, d.b.cluster.DSN(d.name, "", "")))
	}
	return s, err
}

func (s *subscription) drain(ctx context.Context, end string) (took spent, err error) {
	before, err := s.d.cpu()
	if err != nil {
		return took, err
	}
	if err := exec1(ctx, s.d.copy, fmt.Sprintf(`ALTER SUBSCRIPTION %s ENABLE`, s.name)); err != nil {
		return took, err
	}
	begun, err := slotInUse(ctx, s.d.source, `slot_name = '`+s.name+`'`)
	if err != nil {
		return took, err
	}
	if err := await(ctx, s.d.source, pollPause, `SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = $2`, end, s.name); err != nil {
		return took, err
	}
	took.time = time.Since(begun)
	after, err := s.d.cpu()
	if err != nil {
		return took, err
	}
	took.cpu = after - before
	if err := exec1(ctx, s.d.copy, fmt.Sprintf(`ALTER SUBSCRIPTION %s DISABLE`, s.name)); err != nil {
		return took, err
	}
	return took, await(ctx, s.d.source, pollPause, `SELECT NOT active FROM pg_replication_slots WHERE slot_name = $1`, s.name)
}

func (s *subscription) end(ctx context.Context) error {
	return exec1(ctx, s.d.copy, fmt.Sprintf(`ALTER SUBSCRIPTION %s SET (slot_name = NONE)`, s.name), fmt.Sprintf(`DROP SUBSCRIPTION %s`, s.name))
}

// record lets perf watch koldproxy and its sessions if there is a file for it; the result ends it.
func (d *database) record(ctx context.Context, file string) (func() error, error) {
	if file == "" {
		return func() error { return nil }, nil
	}
	pids, err := value[string](ctx, d.source, `SELECT concat_ws(',', $1::int, string_agg(pid::text, ',')) FROM pg_stat_activity
		WHERE application_name LIKE 'koldproxy %'`, d.serving.Process.Pid)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "perf", "record", "-q", "-g", "-F", "999", "-o", file, "-p", pids, "sleep", "600")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			return err
		}
		_ = cmd.Wait() // ends with the signal
		return nil
	}, nil
}
