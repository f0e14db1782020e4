package integration_test

import (
	"bufio"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestExamplesThatFollow runs the consumers of examples/ that wait for events: woken by NOTIFY, by MQTT, and over HTTP. Each is killed
// and started again, and no event is missing.
func TestExamplesThatFollow(t *testing.T) {
	t.Parallel()
	repository, err := filepath.Abs("..")
	must(t, err)
	for name, consumer := range map[string]func(t *testing.T, w *tenant, stream, position string) program{
		"NOTIFY": func(t *testing.T, w *tenant, stream, position string) program {
			return program{
				name: pythonWithPsycopg(t), args: []string{filepath.Join(repository, "examples/python/follow.py"), stream, w.table("_stream_" + stream), position},
				env: []string{"DATABASE_URL=" + w.inst.dsn("demo", nil)},
			}
		},
		"MQTT": func(t *testing.T, w *tenant, stream, position string) program {
			path := filepath.Join(t.TempDir(), "gomqtt")
			if out, err := exec.Command("go", "build", "-o", path, "../examples/gomqtt").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			return program{
				name: path, args: []string{w.topic(stream), w.table("_stream_" + stream), position},
				env: []string{"DATABASE_URL=" + w.inst.dsn("demo", nil), fmt.Sprintf("MQTT_URL=tcp://demo:demo@127.0.0.1:%d", w.inst.ports.mqtt)},
			}
		},
		"server-sent events": func(_ *testing.T, w *tenant, stream, position string) program {
			return program{
				name: "node", args: []string{filepath.Join(repository, "examples/node/events.js"), position},
				env: []string{fmt.Sprintf("EVENTS_URL=http://demo:demo@127.0.0.1:%d/streams/%s/%s.%s", w.inst.ports.http, database, w.schema, stream)},
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTenant(t)
			c := w.connect(t)
			stream := w.schema + "_followed" // channels are not qualified
			c.exec(fmt.Sprintf("CREATE TABLE orders (id int PRIMARY KEY, v int); CREATE STREAM %s ON orders WHEN (true)", stream))
			p := consumer(t, w, stream, filepath.Join(t.TempDir(), "position"))
			var want []string
			write := func(n int) {
				for range n {
					want = append(want, fmt.Sprint(len(want)+1))
					c.exec("INSERT INTO orders VALUES ($1, 0)", len(want))
				}
			}
			var got []string
			last := ""
			run := func() {
				t.Helper()
				cmd := exec.Command(findProgram(t, p.name), p.args...)
				cmd.Env = append(cleanEnv(), p.env...)
				var stderr strings.Builder
				cmd.Stderr = &stderr
				out, err := cmd.StdoutPipe()
				must(t, err)
				must(t, cmd.Start())
				watchdog := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
				defer watchdog.Stop()
				scanner := bufio.NewScanner(out)
				for live := len(want) + 3; len(got) < live && scanner.Scan(); {
					event := strings.Fields(scanner.Text())
					if event[0] <= last { // it was killed between an event and its position
						continue
					}
					last, got = event[0], append(got, event[2])
					if len(want) < live && len(got) == len(want) {
						write(1) // while it waits
					}
				}
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
				if len(got) != len(want) {
					t.Fatalf("%d of %d events came: %s", len(got), len(want), stderr.String())
				}
			}
			write(3)
			run()
			write(2) // while it is away
			run()
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

// TestExampleInSQL keeps a copy with psql alone, through pages, and says so when events are missing.
func TestExampleInSQL(t *testing.T) {
	t.Parallel()
	repository, err := filepath.Abs("..")
	must(t, err)
	w := newTenant(t)
	c := w.connect(t)
	c.exec("CREATE TABLE orders (id int PRIMARY KEY, v int); CREATE STREAM big ON orders WHEN (v > 0)")
	p := program{
		name: "psql", args: []string{"-X", "-v", "stream=big", "-f", filepath.Join(repository, "examples/sql/consumer.sql"), "-d", w.inst.dsn("demo", nil)},
		env: []string{"PGOPTIONS=-c search_path=" + w.schema},
	}
	consume := func(want string) {
		t.Helper()
		c.fence()
		if o := p.mustRun(t); o.stdout != want {
			t.Errorf("it says %q, want %q", o.stdout, want)
		}
		const difference = "(SELECT k, doc FROM consumer_copy EXCEPT %[1]s) UNION ALL (%[1]s EXCEPT SELECT k, doc FROM consumer_copy)"
		if wrong := c.rows(fmt.Sprintf(difference, "SELECT to_jsonb(id), to_jsonb(orders) FROM orders WHERE v > 0")); len(wrong) > 0 {
			t.Errorf("the copy is wrong about %v", wrong)
		}
	}
	c.exec("INSERT INTO orders SELECT i, i FROM generate_series(1, 1100) i")
	consume("500 events\n500 events\n100 events\n")
	c.exec("UPDATE orders SET v = -1 WHERE id < 10; DELETE FROM orders WHERE id = 20; UPDATE orders SET id = -id WHERE id = 30; UPDATE orders SET v = v + 1 WHERE id = 40; UPDATE orders SET v = v + 1 WHERE id = 40")
	consume("14 events\n")
	consume("0 events\n")
	c.exec("INSERT INTO orders VALUES (5000, 1)")
	c.fence()
	c.exec("ALTER STREAM big SET (retention = '1s')")
	await(t, "the event to expire", func() bool { return c.text("SELECT count(*) FROM _stream_big") == "0" })
	if o := p.run(t); o.code == 0 || !strings.Contains(o.stderr, "events are missing") {
		t.Errorf("of what is missing: %s", o)
	}
}
