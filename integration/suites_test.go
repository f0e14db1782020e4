package integration_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// suiteLimit bounds one run of one of PostgreSQL's own suites, which take a few minutes on a machine that has nothing else to do.
const suiteLimit = 40 * time.Minute

// suiteRun is one run of a suite: where it connects and where it leaves its results.
type suiteRun struct {
	port   int
	folder string
}

func (r suiteRun) results() string { return filepath.Join(r.folder, "results") }

// TestPostgresSuites runs PostgreSQL's regression and isolation suites and its test program for pipelines twice, each on a
// fresh cluster: directly and through the proxy. What counts is that both runs give the same results to the byte, not that
// they are what the suite expects of a server that it has set up itself.
func TestPostgresSuites(t *testing.T) {
	if !longTests {
		t.Skip("part of `make test-long`, which fetches the sources of the suites")
	}
	t.Parallel()
	suites, err := filepath.Abs("../.tools/postgres-suites")
	must(t, err)
	raw, err := os.ReadFile(filepath.Join(suites, "major"))
	must(t, err)
	major := strings.TrimSpace(string(raw))
	if server := fmt.Sprint(version(t, "postgres")); server != major {
		t.Skipf("the sources that the distribution has are of PostgreSQL %s, the server is of %s", major, server)
	}
	tests := filepath.Join(suites, "src/src/test")
	programs := filepath.Join("/usr/lib/postgresql", major, "lib/pgxs/src/test")
	bins := filepath.Join("/usr/lib/postgresql", major, "bin")

	regress := func(tester, suite, schedule string, more ...string) func(t *testing.T, r suiteRun) {
		input := filepath.Join(tests, suite)
		return func(t *testing.T, r suiteRun) {
			t.Helper()
			for _, folder := range []string{r.folder, r.results(), filepath.Join(r.folder, "testtablespace")} {
				must(t, os.MkdirAll(folder, 0o755))
				must(t, os.Chmod(folder, 0o777)) // the server writes there under its own account
			}
			o := program{name: filepath.Join(programs, suite, tester), limit: suiteLimit, env: []string{"PGPASSWORD=postgres"}, args: append([]string{
				"--inputdir=" + input, "--outputdir=" + r.folder, "--bindir=" + bins, "--host=127.0.0.1", fmt.Sprint("--port=", r.port),
				"--user=postgres", "--schedule=" + filepath.Join(input, schedule),
			}, more...)}.run(t)
			if !strings.Contains(o.stdout, "tests passed") && !strings.Contains(o.stdout, "tests failed") {
				t.Errorf("%s on port %d: %v", tester, r.port, o)
			}
		}
	}
	t.Run("regression", func(t *testing.T) {
		compareSuite(t, 200, regress("pg_regress", "regress", "parallel_schedule", "--dlpath="+filepath.Join(suites, "lib"), "--max-concurrent-tests=20"))
	})
	t.Run("isolation", func(t *testing.T) {
		compareSuite(t, 100, regress("pg_isolation_regress", "isolation", "isolation_schedule"))
	})
	t.Run("libpq_pipeline", func(t *testing.T) {
		pipeline := filepath.Join(suites, "bin/libpq_pipeline")
		compareSuite(t, 9, func(t *testing.T, r suiteRun) {
			t.Helper()
			must(t, os.MkdirAll(r.results(), 0o755))
			at := fmt.Sprintf("host=127.0.0.1 port=%d user=postgres password=postgres dbname=postgres", r.port)
			for _, name := range strings.Fields(program{name: pipeline, args: []string{"tests"}}.mustRun(t).stdout) {
				args := []string{"-r", "700", name, at}
				if !slices.Contains([]string{"pipelined_insert", "uniqviol"}, name) { // in which it depends on buffers what is sent when
					args = append([]string{"-t", filepath.Join(r.results(), name)}, args...)
				}
				program{name: pipeline, args: args}.mustRun(t)
			}
		})
	})
}

// compareSuite does both runs at a time and compares their results, of which there must be so many files at least.
func compareSuite(t *testing.T, files int, run func(t *testing.T, r suiteRun)) {
	t.Helper()
	direct, proxied := newInstance(t, demo), newInstance(t, demo)
	runs := [2]suiteRun{{port: direct.ports.pg}, {port: proxied.ports.proxy}}
	for i := range runs {
		var err error
		runs[i].folder, err = newFolder()
		must(t, err)
		t.Cleanup(func() { must(t, os.RemoveAll(runs[i].folder)) })
	}
	t.Run("runs", func(t *testing.T) {
		for i, way := range []string{"directly", "through the proxy"} {
			t.Run(way, func(t *testing.T) {
				t.Parallel()
				run(t, runs[i])
			})
		}
	})
	for _, inst := range []*instance{direct, proxied} { // what it has left to be written takes longer than an end may
		inst.connect(t, "postgres", nil).exec("CHECKPOINT")
	}
	names := resultNames(t, runs[0])
	if others := resultNames(t, runs[1]); !slices.Equal(names, others) || len(names) < files {
		t.Fatalf("%d files of results directly, %d through the proxy, want %d at least", len(names), len(others), files)
	}
	for _, name := range names {
		want, got := readResult(t, runs[0], name), readResult(t, runs[1], name)
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %s", name, firstDifference(strings.Split(string(got), "\n"), strings.Split(string(want), "\n")))
		}
	}
	t.Logf("%d files of results are the same", len(names))
}

func resultNames(t *testing.T, r suiteRun) []string {
	t.Helper()
	entries, err := os.ReadDir(r.results())
	must(t, err)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// readResult reads a file of results without the name of its folder, which differs between runs.
func readResult(t *testing.T, r suiteRun, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(r.results(), name))
	must(t, err)
	return bytes.ReplaceAll(raw, []byte(r.folder), []byte("RESULTS"))
}
