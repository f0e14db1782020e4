package changefeed_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/changefeed/feedtest"
)

// oracle is a random world: two tables, one referring to the other, streams with random predicates, and random transactions.
// PostgreSQL itself is the oracle: what a stream should know is SELECT … WHERE predicate.
type oracle struct {
	*host
	rand    *rand.Rand
	streams map[string]string // name to predicate, over the table child
	made    int
	heard   *recorder
	done    []string // the statements of the round

	names map[string]string // what stands for {child}, {id}, … in statements
	key   string            // of a row t, as logs show it
	// schema is public or one that nobody else may use.
	schema string
}

// oddNames are names that need quotes, and such that queries of koldproxy use themselves.
var oddNames = []string{"a", "b", "k", "t", "s", "l", "x", "r", "e", "d", "u", "id", "op", "doc", "old", "ord", "lit", "literal", "_ks", "c1", "select", "Größe", "a b", `q"`, `it's \`, ",(", "x.r", "%s", "$1", "A\nB"}

// rename chooses names.
func (o *oracle) rename() {
	names := slices.Clone(oddNames)
	o.rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for i, plain := range []string{"id", "sub", "a", "b", "c", "d", "e", "f", "parent_id", "child", "parent"} {
		o.names[plain] = names[i]
	}
}

// sql puts the names in.
func (o *oracle) sql(text string) string {
	for plain, name := range o.names {
		text = strings.ReplaceAll(text, "{"+plain+"}", pgx.Identifier{name}.Sanitize())
	}
	return text
}

// recorder is the live push of the oracle's streams.
type recorder struct {
	mu  sync.Mutex
	ids map[string][]string
}

func (r *recorder) Publish(topic string, payload []byte) {
	var e struct{ ID string }
	if err := json.Unmarshal(payload, &e); err != nil {
		panic(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ids[topic] = append(r.ids[topic], e.ID)
}

func (*recorder) Consumers(string) int { return 0 }
func (*recorder) Wants(string) bool    { return true }

func (r *recorder) of(topic string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.ids[topic]...)
}

func (o *oracle) pick(list ...string) string { return list[o.rand.IntN(len(list))] }

// predicate is a random one, NULL for many rows.
func (o *oracle) predicate(depth int) string {
	if depth > 0 && o.rand.IntN(3) > 0 {
		a, b := o.predicate(depth-1), o.predicate(depth-1)
		return o.pick("("+a+" AND "+b+")", "("+a+" OR "+b+")", "NOT ("+a+")", "(CASE WHEN "+a+" THEN "+b+" END)",
			"("+a+") IS NOT TRUE", "("+a+") IS DISTINCT FROM ("+b+")", "coalesce("+a+", "+b+")")
	}
	n := o.rand.IntN(100)
	return o.pick(
		fmt.Sprintf("{a} > %d", n), fmt.Sprintf("{a} BETWEEN %d AND %d", n/2, n), fmt.Sprintf("{a} IN (1, %d, NULL)", n), "{a} = ANY ({f})",
		fmt.Sprintf("{c} * 2 < %d.5", n), "{d}", "{d} IS NULL", "NOT {d}", "{b} LIKE 'x%'", "{b} = ''", "{b} < 'm'", "lower({b}) = 'x'", "length({b}) > 1000",
		fmt.Sprintf("({e} ->> 'n')::int > %d", n), "{e} @> '{\"t\": true}'", "{f} && ARRAY[1, 2]", "cardinality({f}) = 2", "{parent_id} IS NULL", "{parent_id} % 2 = 0", "{id} % 3 = 1", "{sub} = 0")
}

func (o *oracle) value(column string) string {
	if o.rand.IntN(5) == 0 {
		return "NULL"
	}
	n := o.rand.IntN(100)
	switch column {
	case "a":
		return fmt.Sprint(n)
	case "b":
		return o.pick("''", "'x'", "'X'", "'größe'", fmt.Sprintf("repeat('%d', 3000)", n), "'NULL'", `E'q"\\,('`)
	case "c":
		return o.pick("'NaN'", fmt.Sprintf("%d.%d", n, n), "0.10", "1e30")
	case "d":
		return o.pick("true", "false")
	case "e":
		return o.pick(fmt.Sprintf(`'{"n": %d}'`, n), `'{"t": true}'`, "'null'")
	case "f":
		return o.pick("'{}'", "'{1,2}'", fmt.Sprintf("'{%d,NULL}'", n))
	default:
		return fmt.Sprintf("(SELECT id FROM {parent} WHERE id >= %d ORDER BY id LIMIT 1)", n%20)
	}
}

func (o *oracle) id() int { return 1 + o.rand.IntN(30) }

func (o *oracle) set() string {
	var parts []string
	for _, column := range []string{"a", "b", "c", "d", "e", "f", "parent_id"} {
		if o.rand.IntN(3) == 0 {
			parts = append(parts, "{"+column+"} = "+o.value(column))
		}
	}
	if len(parts) == 0 {
		return "{a} = {child}.{a}"
	}
	return strings.Join(parts, ", ")
}

func (o *oracle) row() string {
	parts := []string{fmt.Sprint(o.id())}
	for _, column := range []string{"a", "b", "c", "d", "e", "f", "parent_id"} {
		parts = append(parts, o.value(column))
	}
	return strings.Join(parts, ", ")
}

func (o *oracle) statement() string {
	const columns = "({id}, {a}, {b}, {c}, {d}, {e}, {f}, {parent_id})"
	switch n := o.rand.IntN(100); {
	case n < 20:
		return fmt.Sprintf("INSERT INTO {child} %s VALUES (%s) ON CONFLICT DO NOTHING", columns, o.row())
	case n < 30:
		return fmt.Sprintf("INSERT INTO {child} %s VALUES (%s) ON CONFLICT ({id}) DO UPDATE SET %s", columns, o.row(), o.set())
	case n < 50:
		return fmt.Sprintf("UPDATE {child} SET %s WHERE {id} = %d", o.set(), o.id())
	case n < 55:
		return fmt.Sprintf("UPDATE {child} SET %s WHERE {id} %% 4 = %d", o.set(), o.rand.IntN(4))
	case n < 62: // the key, alone or with others
		return fmt.Sprintf("UPDATE {child} SET %s%s WHERE {id} = %d",
			o.pick(fmt.Sprintf("{id} = %d", o.id()), "{sub} = 1 - {sub}", "{sub} = 0"), o.pick("", ", "+o.set()), o.id())
	case n < 63: // of many rows
		return o.pick("UPDATE {child} SET {sub} = 1 - {sub}", "UPDATE {child} SET {id} = -{id} WHERE {id} % 5 = 1", "UPDATE {child} SET {id} = abs({id}), {sub} = 1")
	case n < 68:
		return fmt.Sprintf("DELETE FROM {child} WHERE {id} = %d", o.id())
	case n < 72:
		return fmt.Sprintf("MERGE INTO {child} USING (VALUES (%s)) AS v %s ON {child}.{id} = v.{id} WHEN MATCHED AND v.{id} %% 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET {a} = 7 WHEN NOT MATCHED THEN INSERT ({id}, {a}) VALUES (v.{id}, %s)",
			o.row(), columns, o.value("a"))
	case n < 78:
		return fmt.Sprintf("INSERT INTO {parent} VALUES (%d) ON CONFLICT DO NOTHING", o.rand.IntN(20))
	case n < 84:
		return fmt.Sprintf("DELETE FROM {parent} WHERE id = %d", o.rand.IntN(20)) // and its children
	case n < 88:
		return fmt.Sprintf("UPDATE {parent} SET id = %d WHERE id = %d AND NOT EXISTS (SELECT FROM {parent} WHERE id = %[1]d)", o.rand.IntN(20), o.rand.IntN(20))
	case n < 92:
		return fmt.Sprintf("WITH gone AS (DELETE FROM {child} WHERE {id} = %d RETURNING {a}) INSERT INTO {child} ({id}, {a}) SELECT %d, {a} FROM gone ON CONFLICT DO NOTHING", o.id(), o.id())
	case n < 98:
		return "COPY"
	default:
		return o.pick("TRUNCATE {child}", "TRUNCATE {parent} CASCADE")
	}
}

// act runs a statement, sometimes behind a savepoint that is kept or rolled back. What PostgreSQL refuses rolls back to it.
func (o *oracle) act(ctx context.Context, tx pgx.Tx) error {
	undo := o.rand.IntN(8) == 0
	err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error {
		sql := o.sql(o.statement())
		if sql == "COPY" {
			rows := [][]any{{o.id(), o.rand.IntN(100), "copied"}, {31 + o.rand.IntN(5), nil, ""}}
			_, err := part.CopyFrom(ctx, pgx.Identifier{o.names["child"]}, []string{o.names["id"], o.names["a"], o.names["b"]}, pgx.CopyFromRows(rows))
			return err
		}
		o.done = append(o.done, fmt.Sprint(sql, " (undone: ", undo, ")"))
		if _, err := part.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
		if undo {
			return errUndo
		}
		return nil
	})
	var pg *pgconn.PgError
	if errors.Is(err, errUndo) || errors.As(err, &pg) && strings.HasPrefix(pg.Code, "23") {
		return nil
	}
	return err
}

var errUndo = errors.New("undone on purpose")

func (o *oracle) transaction(ctx context.Context) error {
	err := pgx.BeginFunc(ctx, o.app, func(tx pgx.Tx) error {
		for range 1 + o.rand.IntN(6) {
			if err := o.act(ctx, tx); err != nil {
				return err
			}
		}
		if o.rand.IntN(10) == 0 {
			return errUndo
		}
		return nil
	})
	if errors.Is(err, errUndo) {
		return nil
	}
	return err
}

// create makes a stream with a predicate that no row can make fail. The table has rows, so it is one from the earliest.
func (o *oracle) create() {
	o.made++
	name, predicate := fmt.Sprintf("s%d", o.made), o.sql(o.predicate(3))
	o.stream(name, o.names["child"], predicate, "start", "earliest", "pre_image", "true")
	o.streams[name] = predicate
}

// cut ends the sessions of the applier wherever it is, as its death would. It begins anew by itself.
func (o *oracle) cut() {
	o.admin(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'koldproxy %'`)
}

// topic is where live push brings a stream's events.
func (o *oracle) topic(stream string) string {
	if o.schema == "public" {
		return "$stream/" + o.name + "/" + stream
	}
	return "$stream/" + o.name + "/" + o.schema + "." + stream
}

func quote(s string) string {
	return " E'" + strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), "'", `\'`) + "'"
}

func (o *oracle) check() error {
	var errs []error
	for name, predicate := range o.streams {
		log := o.schema + "._stream_" + name
		err := feedtest.CheckFold(o.t.Context(), o.pool, log, o.schema+"."+o.sql("{child}"), predicate, o.key, true)
		if bad := o.rows(`SELECT id, op, k, old, before FROM (SELECT id, op, k, old, lag(CASE WHEN op = 'put' THEN doc END) OVER (PARTITION BY k ORDER BY id) AS before FROM ` + log + `) x
			WHERE before IS NOT NULL AND old IS DISTINCT FROM before`); len(bad) > 0 {
			err = errors.Join(err, fmt.Errorf("old is not the value before: %v", bad))
		}
		if bad := o.rows(`SELECT id FROM ` + log + ` l JOIN koldstore.stream s ON s.name = '` + name + `' WHERE l.ts < s.created_at`); len(bad) > 0 {
			err = errors.Join(err, fmt.Errorf("older than the stream: %v", bad))
		}
		ids := make(map[string]bool)
		for _, id := range o.rows(`SELECT id FROM ` + log) {
			ids[id] = true
		}
		last := ""
		for _, id := range o.heard.of(o.topic(name)) {
			if id <= last || !ids[id] {
				err = errors.Join(err, fmt.Errorf("live push brought %s after %s", id, last))
			}
			last = id
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("stream %s WHEN (%s): %w\nits newest events: %v", name, predicate, err,
				o.rows(`SELECT id, op, k, ts FROM `+log+` ORDER BY id DESC LIMIT 30`)))
		}
	}
	if broken := o.rows(`SELECT name, state, reason FROM koldstore.stream WHERE state <> 'active'`); len(broken) > 0 {
		errs = append(errs, fmt.Errorf("broken: %v", broken))
	}
	if lost := o.rows(`SELECT stream_id, events_lost FROM koldstore.stream_status WHERE events_lost > 0`); len(lost) > 0 {
		errs = append(errs, fmt.Errorf("lost: %v", lost))
	}
	return errors.Join(errs...)
}

// After any history, the fold of every log is what the table holds; events of a key follow each other; old is the value before;
// nothing is older than its stream; and live push brings events of the log in their order. KOLDPROXY_TEST_SEED repeats a run.
func TestOracle(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("KOLDPROXY_TEST_SEED"); text != "" {
		_, err := fmt.Sscan(text, &seed)
		must(t, err)
	}
	rounds, budget := 200, 20*time.Second
	if os.Getenv("KOLDPROXY_TEST_LONG") != "" {
		rounds, budget = 5000, 8*time.Minute
	}
	t.Logf("KOLDPROXY_TEST_SEED=%d", seed)
	o := &oracle{
		host: newHost(t), rand: rand.New(rand.NewPCG(seed, 1)),
		streams: make(map[string]string), names: make(map[string]string), heard: &recorder{ids: make(map[string][]string)},
	}
	o.stopApplier()
	o.config.SeedRows = 5
	o.startApplier()
	o.rename()
	key := "{id}"
	o.key = o.sql("to_jsonb(t.{id})")
	if o.rand.IntN(2) == 0 {
		key = "{sub}, {id}"
		o.key = "jsonb_build_object(" + quote(o.names["sub"]) + o.sql(", t.{sub}, ") + quote(o.names["id"]) + o.sql(", t.{id})")
	}
	if o.schema = "public"; o.rand.IntN(2) == 0 {
		o.schema = "private"
		o.exec(`CREATE SCHEMA private`, `SET search_path = private`)
	}
	partitions := ""
	if o.rand.IntN(3) == 0 {
		partitions = " PARTITION BY HASH ({id})"
	}
	o.exec(o.sql(`CREATE TABLE {parent} (id int PRIMARY KEY)`),
		o.sql(`CREATE TABLE {child} ({id} int UNIQUE, {sub} int DEFAULT 0, {a} int, {b} text, {c} numeric, {d} bool, {e} jsonb, {f} int[],
			{parent_id} int REFERENCES {parent} ON DELETE CASCADE ON UPDATE CASCADE, PRIMARY KEY (`+key+`))`+partitions),
		o.sql(`ALTER TABLE {child} ALTER {b} SET STORAGE EXTERNAL`))
	for i := 0; partitions != "" && i < 3; i++ {
		o.exec(o.sql(fmt.Sprintf(`CREATE TABLE part%d PARTITION OF {child} FOR VALUES WITH (MODULUS 3, REMAINDER %[1]d)`, i)))
	}
	o.exec(o.sql(`INSERT INTO {parent} SELECT generate_series(0, 19)`), o.sql(`INSERT INTO {child} ({id}, {a}, {parent_id}) SELECT g, g, g % 20 FROM generate_series(1, 20) g`))
	t.Logf("names: %q, key (%s)%s, schema %s", o.names, key, partitions, o.schema)
	ctx, cancel := context.WithCancel(context.Background())
	tail := changefeed.NewTail(changefeed.DefaultTailConfig(o.name), o.pool, o.heard, zerolog.Nop(), nil)
	done := make(chan error, 1)
	go func() { done <- tail.Run(ctx) }()
	defer func() { cancel(); <-done }()
	begun := time.Now()
	round := 0
	for ; round < rounds && time.Since(begun) < budget; round++ {
		if len(o.streams) < 4 || o.rand.IntN(10) == 0 {
			o.create()
		}
		if len(o.streams) > 6 {
			for name := range o.streams {
				o.exec(fmt.Sprintf(`CALL koldstore.drop_stream(NULL, '%s')`, name))
				delete(o.streams, name)
				break
			}
		}
		o.done = nil
		restart, cut := o.rand.IntN(8) == 0, o.rand.IntN(4) == 0
		if restart {
			o.stopApplier()
		}
		for range 1 + o.rand.IntN(6) {
			must(t, o.transaction(t.Context()))
			if cut {
				o.cut()
			}
		}
		if restart {
			o.startApplier()
		}
		o.fence()
		if err := o.check(); err != nil {
			t.Fatalf("round %d, KOLDPROXY_TEST_SEED=%d:\n%v\nin this round:\n%s", round, seed, err, strings.Join(o.done, "\n"))
		}
	}
	t.Logf("%d rounds, %d streams", round, o.made)
}
