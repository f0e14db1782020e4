package integration_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestExamples runs the consumers of examples/: each prints a stream and a feed, hot and cold, and goes on where it stopped.
func TestExamples(t *testing.T) {
	t.Parallel()
	repository, err := filepath.Abs("..")
	must(t, err)
	for name, consumer := range map[string]func(t *testing.T) program{
		"go": func(t *testing.T) program {
			path := filepath.Join(t.TempDir(), "consumer")
			if out, err := exec.Command("go", "build", "-o", path, "../examples/go").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			return program{name: path}
		},
		"python": func(t *testing.T) program {
			return program{name: pythonWithPsycopg(t), args: []string{filepath.Join(repository, "examples/python/consumer.py")}}
		},
		"node": func(t *testing.T) program {
			return program{name: "node", args: []string{filepath.Join(repository, "examples/node/consumer.js")}, env: []string{nodePath(t)}}
		},
		"java": func(*testing.T) program {
			return program{name: "java", args: []string{"-XX:TieredStopAtLevel=1", "-cp", jdbcJar, filepath.Join(repository, "examples/java/Consumer.java")}}
		},
		"php": func(*testing.T) program {
			return program{name: "php", args: []string{filepath.Join(repository, "examples/php/consumer.php")}}
		},
		"ruby": func(*testing.T) program {
			return program{name: "ruby", args: []string{filepath.Join(repository, "examples/ruby/consumer.rb")}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTenant(t)
			p := consumer(t)
			p.env = append(p.env, "DATABASE_URL="+w.inst.dsn("demo", nil))
			folder := t.TempDir()
			consume := func(kind, table string) []string {
				t.Helper()
				q := p
				q.args = append(slices.Clone(p.args), kind, w.table(table), filepath.Join(folder, kind))
				o := q.mustRun(t)
				return strings.Split(strings.TrimSuffix(o.stdout, "\n"), "\n")
			}
			c := w.connect(t)
			logged := func() []string {
				var lines []string
				for _, r := range c.rows("SELECT id, op, k, doc FROM _stream_big ORDER BY id") {
					lines = append(lines, strings.Join(r, " "))
				}
				return lines
			}
			fed := func() []string {
				var lines []string
				for _, f := range c.drain("orders", 0, 1000) {
					lines = append(lines, fmt.Sprint(f.seq, " ", f.op, " ", f.pk, " ", strings.Replace(f.image, "NULL", "null", 1), " ", f.source))
				}
				return lines
			}
			c.exec("CREATE TABLE orders (id int PRIMARY KEY, total int, note text); CREATE STREAM big ON orders WHEN (total > 10)")
			c.exec("SELECT koldstore.manage_table('orders')")
			c.exec("INSERT INTO orders SELECT i, i, 'größe ' || i FROM generate_series(1, 1300) i") // more than one page
			c.exec("DELETE FROM orders WHERE id <= 20")
			c.fence()
			stream, feed := consume("stream", "_stream_big"), consume("feed", "orders")
			if want := logged(); !slices.Equal(stream, want) {
				t.Errorf("stream: %s", firstDifference(stream, want))
			}
			if want := fed(); !slices.Equal(feed, want) {
				t.Errorf("feed: %s", firstDifference(feed, want))
			}
			if again := consume("stream", "_stream_big"); !slices.Equal(again, []string{""}) {
				t.Errorf("the stream again: %v", again)
			}

			c.exec("UPDATE orders SET note = NULL WHERE id = 1000")
			c.flush("orders")
			c.exec("DELETE FROM orders WHERE id = 1001")
			c.fence()
			stream, feed = append(stream, consume("stream", "_stream_big")...), consume("feed", "orders")
			if want := logged(); !slices.Equal(stream, want) {
				t.Errorf("stream, resumed: %s", firstDifference(stream, want))
			}
			want := fed()
			if want = want[len(want)-2:]; !slices.Equal(feed, want) {
				t.Errorf("feed, resumed: %s", firstDifference(feed, want))
			}
			must(t, os.Remove(filepath.Join(folder, "feed")))
			if feed, want := consume("feed", "orders"), fed(); !slices.Equal(feed, want) {
				t.Errorf("feed, cold: %s", firstDifference(feed, want))
			}
		})
	}
}
