package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// driver is a client library. It does what every driver does, and reads a feed and uses a stream in all the ways that it has.
type driver struct {
	name  string
	plain func(t *testing.T, dsn string) []string
	feed  func(t *testing.T, w *tenant) report
	lacks []string // lines of ordinary that the driver has no way to get
	long  bool     // needs a runtime that only `make test-long` installs
}

// report is what a driver saw. The feed of table m was read once for each way.
type report struct {
	feeds   map[string][]feedRow
	columns []string // of SHOW STREAMS
	tags    []string // none if the driver does not show them
	shown   []string // predicates of its own stream
	events  int      // in the log of its own stream
	after   int      // behind the first of them
	refused string   // the SQLSTATE for a negative cursor
}

var drivers = []driver{
	{name: "pgx", plain: plainPgx, feed: runPgx},
	{name: "database/sql", plain: plainSQL, feed: feedSQL, lacks: []string{"copy", "notify", "notice", "streamed"}},
	scripted("psycopg 3", python, "psycopg3_driver.py"),
	scripted("psycopg 2", python, "psycopg2_driver.py").without("streamed"),
	scripted("asyncpg", python, "asyncpg_driver.py").without("streamed"),
	scripted("node-postgres", node, "node-postgres.js").without("copy"),
	scripted("postgres for Node", node, "porsager.js").without("streamed"),
	scripted("Perl DBD::Pg", interpreter("perl"), "dbi.pl", "Pg").without("streamed"),
	scripted("ODBC", interpreter("perl"), "dbi.pl", "ODBC").without("copy", "streamed", "notify", "notice", "cancel", "after cancel"),
	scripted("Ruby pg", interpreter("ruby"), "ruby-pg.rb").without("streamed"),
	scripted("PHP", interpreter("php"), "php.php").without("streamed", "cancel"),
	scripted("JDBC", java, "PgJdbc").without("streamed").onlyLong(),
}

func (d driver) without(lines ...string) driver { d.lacks = lines; return d }

func (d driver) onlyLong() driver { d.long = true; return d }

// start begins the subtest of a driver.
func (d driver) start(t *testing.T) {
	t.Helper()
	t.Parallel()
	if d.long && !longTests {
		t.Skip("part of `make test-long`, which installs its runtime")
	}
}

// scripted is a driver used by a program of testdata/drivers.
func scripted(name string, runtime func(t *testing.T) program, args ...string) driver {
	return driver{
		name: name,
		plain: func(t *testing.T, dsn string) []string {
			t.Helper()
			return strings.Split(strings.TrimSuffix(driverProgram(t, runtime, args, dsn, "", "plain").mustRun(t).stdout, "\n"), "\n")
		},
		feed: func(t *testing.T, w *tenant) report {
			t.Helper()
			return runScript(t, w, driverProgram(t, runtime, args, w.inst.dsn("demo", nil), w.schema, "feed"))
		},
	}
}

// driverProgram tells a script where the server is in both ways: as a DSN and in libpq's environment variables.
func driverProgram(t *testing.T, runtime func(t *testing.T) program, args []string, dsn, schema, mode string) program {
	t.Helper()
	p := runtime(t)
	if p.name != "java" {
		args = append([]string{script(t, args[0])}, args[1:]...)
	}
	at, err := pgx.ParseConfig(dsn)
	must(t, err)
	p.env = append(p.env, "PGHOST="+at.Host, fmt.Sprint("PGPORT=", at.Port), "PGUSER="+at.User, "PGPASSWORD="+at.Password, "PGDATABASE="+at.Database)
	if schema != "" {
		p.env = append(p.env, "PGOPTIONS=-csearch_path="+schema)
		dsn += "?options=-csearch_path%3D" + schema
	}
	p.args = append(append(p.args, args...), mode, dsn)
	return p
}

func interpreter(name string) func(t *testing.T) program {
	return func(*testing.T) program { return program{name: name} }
}

func node(t *testing.T) program {
	t.Helper()
	return program{name: "node", env: []string{nodePath(t)}}
}

// python is the interpreter of the system, for which distributions package the drivers.
func python(t *testing.T) program {
	t.Helper()
	return program{name: pythonWithPsycopg(t)}
}

const jdbcJar = "/usr/share/java/postgresql.jar"

var compileJava = sync.OnceValues(func() (string, error) {
	classes := filepath.Join(workDir, "jdbc")
	out, err := exec.Command("javac", "-encoding", "UTF-8", "-cp", jdbcJar, "-d", classes, "testdata/drivers/PgJdbc.java").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("javac: %w\n%s", err, out)
	}
	return classes, nil
})

func java(t *testing.T) program {
	t.Helper()
	classes, err := compileJava()
	must(t, err)
	return program{name: "java", args: []string{"-XX:TieredStopAtLevel=1", "-cp", classes + ":" + jdbcJar}}
}

// ordinary is what a driver prints that does what every driver does.
var ordinary = []string{
	"bound 42|größe|1.50|NULL", "prepared 2|4|6", "bytes 00ff5c27", "error 22012", "syntax 42601", "savepoint 23505|25P02|2", "rollback 2",
	"copy 1,a|2,b|3,c|4,", "large 20000|200010000", "streamed 20000|200010000", "notify news|payload", "notice hello", "cancel 57014", "after cancel 1",
}

// TestDriversDoNotNoticeTheProxy runs the same program directly and through the proxy: bound parameters, prepared
// statements, binary values, errors, transactions and savepoints, COPY, LISTEN, notices, cancel, and large results in parts.
func TestDriversDoNotNoticeTheProxy(t *testing.T) {
	t.Parallel()
	for _, d := range drivers {
		t.Run(d.name, func(t *testing.T) {
			d.start(t)
			inst := shared(t)
			want := slices.DeleteFunc(slices.Clone(ordinary), func(line string) bool {
				return slices.ContainsFunc(d.lacks, func(name string) bool { return strings.HasPrefix(line, name+" ") })
			})
			for way, dsn := range map[string]string{"directly": inst.directDSN("demo", nil), "through the proxy": inst.dsn("demo", nil)} {
				if got := d.plain(t, dsn); !slices.Equal(got, want) {
					t.Errorf("%s:\n%s\nwant\n%s", way, strings.Join(got, "\n"), strings.Join(want, "\n"))
				}
			}
		})
	}
}

// TestDrivers reads one feed with bound parameters through each driver: all hot, all cold, and mixed.
func TestDrivers(t *testing.T) {
	t.Parallel()
	for _, d := range drivers {
		t.Run(d.name, func(t *testing.T) {
			d.start(t)
			w := newTenant(t)
			c := w.connect(t)
			c.exec("CREATE TABLE m (id int PRIMARY KEY, body text, at timestamptz, n numeric)")
			c.exec("SELECT koldstore.manage_table('m', max_rows_per_file => 10)")
			c.exec("INSERT INTO m SELECT i, 'größe ' || i, '2024-01-01 UTC'::timestamptz + i * interval '1 hour', i / 3.0 FROM generate_series(1, 30) i")
			c.exec("DELETE FROM m WHERE id IN (3, 30)")
			c.fence()
			check := func(stage string) {
				t.Helper()
				want := c.drain(w.table("m"), 0, 1000)
				r := d.feed(t, w)
				for way, feed := range r.feeds {
					if !slices.Equal(feed, want) {
						t.Errorf("%s, %s: %s", stage, way, firstDifference(feed, want))
					}
				}
				live := 28
				if r.events != live/2 || r.after != r.events-1 {
					t.Errorf("%s: %d events, %d after the first", stage, r.events, r.after)
				}
				if want := []string{"CREATE STREAM", "CREATE STREAM", "SHOW", "DROP STREAM"}; r.tags != nil && !slices.Equal(r.tags, want) {
					t.Errorf("%s: tags %q, want %q", stage, r.tags, want)
				}
				if want := []string{"name", "table", "predicate", "consumers", "lag"}; !slices.Equal(r.columns, want) {
					t.Errorf("%s: SHOW STREAMS has columns %q, want %q", stage, r.columns, want)
				}
				if want := []string{"((id % 2) = 0)"}; !slices.Equal(r.shown, want) {
					t.Errorf("%s: SHOW STREAMS shows %q, want %q", stage, r.shown, want)
				}
				if r.refused != "22023" {
					t.Errorf("%s: a negative cursor gives %q", stage, r.refused)
				}
			}
			check("hot")
			c.flush(w.table("m"))
			check("cold")
			c.exec("UPDATE m SET body = 'new' WHERE id % 4 = 0")
			c.fence()
			check("mixed")
		})
	}
}

// runScript runs a script of testdata/drivers, which prints a report as JSON.
func runScript(t *testing.T, w *tenant, p program) report {
	t.Helper()
	p.args = append(p.args, w.table("m"), "own")
	o := p.mustRun(t)
	var raw map[string]json.RawMessage
	must(t, json.Unmarshal([]byte(o.stdout), &raw))
	r := report{feeds: map[string][]feedRow{}}
	for name, value := range raw {
		var err error
		switch name {
		case "tags":
			err = json.Unmarshal(value, &r.tags)
		case "columns":
			err = json.Unmarshal(value, &r.columns)
		case "shown":
			err = json.Unmarshal(value, &r.shown)
		case "events":
			err = json.Unmarshal(value, &r.events)
		case "after":
			err = json.Unmarshal(value, &r.after)
		case "refused":
			err = json.Unmarshal(value, &r.refused)
		default:
			r.feeds[name], err = decodeFeed(value)
		}
		must(t, err)
	}
	return r
}

// decodeFeed reads rows as scripts print them: [seq as text, op, pk as text, deleted, image as text, source].
func decodeFeed(raw json.RawMessage) ([]feedRow, error) {
	var rows [][]json.RawMessage
	if err := json.Unmarshal(raw, &rows); err != nil {
		return nil, err
	}
	feed := make([]feedRow, 0, len(rows))
	for _, r := range rows {
		if len(r) != 6 {
			return nil, fmt.Errorf("a row of %d columns", len(r))
		}
		f := feedRow{op: string(r[1])}
		var seq string
		var image *string
		if err := errors.Join(json.Unmarshal(r[0], &seq), json.Unmarshal(r[2], &f.pk), json.Unmarshal(r[3], &f.deleted),
			json.Unmarshal(r[4], &image), json.Unmarshal(r[5], &f.source)); err != nil {
			return nil, err
		}
		if f.image = "NULL"; image != nil {
			f.image = *image
		}
		var err error
		if f.seq, err = strconv.ParseInt(seq, 10, 64); err != nil {
			return nil, err
		}
		feed = append(feed, f)
	}
	return feed, nil
}

func script(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", "drivers", name))
	must(t, err)
	return path
}

// pythonWithPsycopg prefers the system's interpreter, for which distributions package the driver.
func pythonWithPsycopg(t *testing.T) string {
	t.Helper()
	for _, python := range []string{"/usr/bin/python3", "python3"} {
		if isProgram(python) || python == "python3" {
			if o := (program{name: python, args: []string{"-c", "import psycopg"}}).run(t); o.code == 0 {
				return python
			}
		}
	}
	t.Fatal("no Python with psycopg; `make setup-test` installs what the tests need")
	return ""
}

// nodePath is where `make setup-test` puts the Node driver.
func nodePath(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../.tools/node/node_modules")
	must(t, err)
	if _, err := os.Stat(filepath.Join(path, "pg")); err != nil {
		t.Fatalf("%v; `make setup-test` installs what the tests need", err)
	}
	return "NODE_PATH=" + path
}

// runPgx is what the scripts do, in this process.
func runPgx(t *testing.T, w *tenant) report {
	t.Helper()
	c := w.connect(t)
	r := report{feeds: map[string][]feedRow{}}
	table := w.table("m")
	for name, mode := range map[string]pgx.QueryExecMode{
		"simple": pgx.QueryExecModeSimpleProtocol, "exec": pgx.QueryExecModeExec, "describe, then exec": pgx.QueryExecModeDescribeExec,
		"cached description": pgx.QueryExecModeCacheDescribe, "prepared": pgx.QueryExecModeCacheStatement,
	} {
		r.feeds[name] = drainPgx(c.ctx, t, c, table, mode)
		tx, err := c.Begin(c.ctx)
		must(t, err)
		r.feeds[name+" in a transaction"] = drainPgx(c.ctx, t, tx, table, mode)
		inner, err := tx.Begin(c.ctx)
		must(t, err)
		r.feeds[name+" behind a savepoint"] = drainPgx(c.ctx, t, inner, table, mode)
		must(t, tx.Commit(c.ctx))
	}
	r.feeds["explicitly prepared"] = drainPrepared(t, c, table)
	c.exec("BEGIN")
	r.feeds["batch"] = drainPages(t, func(since int64) ([]feedRow, error) { return batchPgx(c, table, since) })
	c.exec("COMMIT")
	r.feeds["pipeline"] = pipelinePgx(t, c, table)

	for _, sql := range []string{
		"CREATE STREAM own_go ON m WHEN (id % 2 = 0) WITH (start = 'earliest')",
		"CREATE STREAM IF NOT EXISTS own_go ON m WHEN (id > 0)",
	} {
		r.tags = append(r.tags, c.exec(sql))
	}
	rows, err := c.Query(c.ctx, "SHOW STREAMS")
	must(t, err)
	for rows.Next() {
		values, err := rows.Values()
		must(t, err)
		if values[0] == "own_go" {
			r.shown = append(r.shown, values[2].(string))
		}
	}
	for _, f := range rows.FieldDescriptions() {
		r.columns = append(r.columns, f.Name)
	}
	r.tags = append(r.tags, rows.CommandTag().String())
	must(t, rows.Err())
	var first string
	must(t, c.QueryRow(c.ctx, "SELECT id FROM _stream_own_go ORDER BY id LIMIT $1", 1).Scan(&first))
	must(t, c.QueryRow(c.ctx, "SELECT count(*) FROM _stream_own_go").Scan(&r.events))
	rows, err = c.Query(c.ctx, "SELECT id, k FROM _stream_own_go ORDER BY id LIMIT $1 AFTER ($2)", 1000, first)
	must(t, err)
	for rows.Next() {
		r.after++
	}
	must(t, rows.Err())
	c.exec("BEGIN")
	c.exec("DROP STREAM own_go")
	c.exec("ROLLBACK")
	r.tags = append(r.tags, c.exec("DROP STREAM own_go"))
	_, err = c.Exec(c.ctx, pgxFeed, table, int64(-1), 7)
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		r.refused = pg.Code
	}
	return r
}

const (
	pgxFeed     = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1, since_seq => $2, limit_rows => $3)"
	driversPage = 7
)

type pgxQuerier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// drainPages reads a feed page by page with whatever reads one.
func drainPages(t *testing.T, page func(since int64) ([]feedRow, error)) []feedRow {
	t.Helper()
	var feed []feedRow
	since := int64(0)
	for {
		rows, err := page(since)
		if err != nil {
			t.Fatal(describe(err))
		}
		feed = append(feed, rows...)
		if len(rows) < driversPage {
			return feed
		}
		since = rows[len(rows)-1].seq
	}
}

// collectPgx reads a page into Go's types, and images as the text that the server sent.
func collectPgx(rows pgx.Rows, err error) ([]feedRow, error) {
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (feedRow, error) {
		var f feedRow
		var op int16
		var image *string
		err := row.Scan(&f.seq, &op, &f.pk, &f.deleted, &image, &f.source)
		f.op, f.image = strconv.Itoa(int(op)), "NULL"
		if image != nil {
			f.image = *image
		}
		return f, err
	})
}

func drainPgx(ctx context.Context, t *testing.T, q pgxQuerier, table string, mode pgx.QueryExecMode) []feedRow {
	t.Helper()
	return drainPages(t, func(since int64) ([]feedRow, error) {
		return collectPgx(q.Query(ctx, pgxFeed, mode, table, since, driversPage))
	})
}

func drainPrepared(t *testing.T, c *client, table string) []feedRow {
	t.Helper()
	_, err := c.Prepare(c.ctx, "feed", pgxFeed)
	must(t, err)
	feed := drainPages(t, func(since int64) ([]feedRow, error) {
		return collectPgx(c.Query(c.ctx, "feed", table, since, driversPage))
	})
	must(t, c.Deallocate(c.ctx, "feed"))
	return feed
}

// batchPgx sends several statements before it reads an answer, a page between two others.
func batchPgx(c *client, table string, since int64) (page []feedRow, err error) {
	var batch pgx.Batch
	batch.Queue("SELECT 1")
	batch.Queue(pgxFeed, table, since, driversPage)
	batch.Queue("SELECT 2")
	results := c.SendBatch(c.ctx, &batch)
	defer func() { err = errors.Join(err, results.Close()) }()
	if _, err := results.Exec(); err != nil {
		return nil, err
	}
	if page, err = collectPgx(results.Query()); err != nil {
		return nil, err
	}
	_, err = results.Exec()
	return page, err
}

// TestColdPageInABatch: statements sent together without a transaction block are one transaction without savepoints, which is
// repeated as a whole.
func TestColdPageInABatch(t *testing.T) {
	t.Parallel()
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE m (id int PRIMARY KEY); INSERT INTO m VALUES (1), (2), (3)")
	c.exec("SELECT koldstore.manage_table('m')")
	c.flush("m")
	cold, err := batchPgx(c, "m", 0)
	if want := c.drain("m", 0, 10); err != nil || len(want) != 3 || !slices.Equal(cold, want) {
		t.Errorf("a cold page in a batch: %v, %v; want %v", cold, err, want)
	}
	c.exec("INSERT INTO m VALUES (4)")
	c.fence()
	all := c.drain("m", 0, 10)
	page, err := batchPgx(c, "m", all[2].seq) // needs no cold rows
	if err != nil || !slices.Equal(page, all[3:]) {
		t.Errorf("a hot page in a batch: %v, %v", page, err)
	}
}

// pipelinePgx keeps two pages in flight, each behind a Sync of its own, in text format.
func pipelinePgx(t *testing.T, c *client, table string) []feedRow {
	t.Helper()
	return drainPages(t, func(since int64) ([]feedRow, error) {
		params := [][]byte{[]byte(table), []byte(strconv.FormatInt(since, 10)), []byte(strconv.Itoa(driversPage))}
		pipeline := c.PgConn().StartPipeline(c.ctx)
		var pages [2][]feedRow
		for range pages {
			pipeline.SendQueryParams(pgxFeed, params, nil, nil, nil)
			if err := pipeline.Sync(); err != nil {
				return nil, errors.Join(err, pipeline.Close())
			}
		}
		for i := range pages {
			answer, err := pipeline.GetResults()
			if err != nil {
				return nil, errors.Join(err, pipeline.Close())
			}
			reader, ok := answer.(*pgconn.ResultReader)
			if !ok {
				return nil, errors.Join(fmt.Errorf("the pipeline gives %T", answer), pipeline.Close())
			}
			result := reader.Read()
			if result.Err != nil {
				return nil, errors.Join(result.Err, pipeline.Close())
			}
			if pages[i], err = parsePage(textRows(result.Rows), since, driversPage); err != nil {
				return nil, errors.Join(err, pipeline.Close())
			}
			if answer, err = pipeline.GetResults(); err != nil {
				return nil, errors.Join(err, pipeline.Close())
			} else if _, ok := answer.(*pgconn.PipelineSync); !ok {
				return nil, errors.Join(fmt.Errorf("the pipeline gives %T instead of its end", answer), pipeline.Close())
			}
		}
		if !slices.Equal(pages[0], pages[1]) {
			return nil, errors.Join(fmt.Errorf("two pages in one pipeline differ: %s", firstDifference(pages[0], pages[1])), pipeline.Close())
		}
		return pages[0], pipeline.Close()
	})
}
