package koldproxy_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/koldproxy/koldproxy"

// rule says what the product files of a package may import beyond the standard library, and which parts of the standard
// library they may not. An entry stands for the package and everything below it.
type rule struct {
	allowed   []string
	forbidden []string // within the standard library
	why       string
}

// noIO are the packages that a pure package has no business with.
var noIO = []string{"net", "os", "syscall", "net/http"}

// architecture is docs/architecture.md as a table. A package that is missing here fails the test: add it together with the
// reason why it exists.
var architecture = map[string]rule{
	".": {
		forbidden: noIO,
		why:       "vocabulary: plain values that every package can share without sharing anything else",
	},
	"rewrite": {
		allowed:   []string{module, "github.com/pganalyze/pg_query_go/v6"},
		forbidden: noIO,
		why:       "text in, text out; being pure is what makes it fuzzable",
	},
	"proxy": {
		allowed: []string{
			module, module + "/rewrite", "github.com/jackc/pgx/v5/pgproto3", "github.com/rs/zerolog",
			"github.com/prometheus/client_golang", "golang.org/x/sync", "golang.org/x/sys", "github.com/pires/go-proxyproto",
		},
		why: "the wire; cold pages and fences reach it through interfaces that it declares",
	},
	"walapply": {
		allowed: []string{
			module, "github.com/jackc/pgx/v5", "github.com/jackc/pglogrepl", "github.com/rs/zerolog",
			"github.com/prometheus/client_golang", "golang.org/x/sync",
		},
		why: "hands batches to targets through an interface that it declares; knows neither feeds nor segments",
	},
	"changefeed": {
		allowed: []string{
			module, "github.com/jackc/pgx/v5", "github.com/rs/zerolog", "github.com/prometheus/client_golang",
			"golang.org/x/sync", "github.com/google/uuid",
		},
		why: "what a batch means; reads cold pages and publishes events through interfaces that it declares",
	},
	"changefeed/mqtt": {
		allowed: []string{
			module, "github.com/mochi-mqtt/server/v2", "github.com/rs/zerolog", "github.com/prometheus/client_golang",
			"github.com/jackc/pgx/v5", "github.com/eclipse/paho.mqtt.golang", "github.com/gorilla/websocket",
		},
		why: "the only importer of MQTT libraries, for the broker of its own and for another one",
	},
	"changefeed/sse": {
		allowed: []string{module, module + "/changefeed", "github.com/jackc/pgx/v5", "github.com/rs/zerolog"},
		why:     "streams for browsers, from the log; who may read them it is told by an interface that it declares",
	},
	"changefeed/feedtest": {
		allowed: []string{"github.com/jackc/pgx/v5"},
		why:     "validators and random histories for tests, here and in applications",
	},
	"coldstore": {
		allowed: []string{
			module, "github.com/jackc/pgx/v5", "github.com/apache/arrow-go/v18", "github.com/RoaringBitmap/roaring/v2",
			"github.com/google/uuid", "github.com/rs/zerolog", "github.com/prometheus/client_golang", "golang.org/x/sync",
		},
		why: "segments, manifest and object stores; knows no SQL proxy and no feed",
	},
	"coldstore/cloud": {
		allowed: []string{
			module + "/coldstore", "gocloud.dev", "cloud.google.com/go/storage", "google.golang.org/api", "github.com/aws/aws-sdk-go-v2",
			"github.com/Azure/azure-sdk-for-go",
		},
		why: "the only importer of the clouds' libraries; a store that uses none does without",
	},
	"coldstore/storetest": {
		allowed: []string{module + "/coldstore"},
		why:     "conformance and fault injection for object stores, in a package of its own as testing/fstest is",
	},
	"examples/go": {
		allowed: []string{"github.com/jackc/pgx/v5"},
		why:     "a consumer as a user would write it: koldproxy is plain SQL to it",
	},
	"examples/gomqtt": {
		allowed: []string{"github.com/jackc/pgx/v5", "github.com/eclipse/paho.mqtt.golang"},
		why:     "one that MQTT wakes",
	},
	"migrations": {
		allowed: []string{"github.com/jackc/pgx/v5", "github.com/jackc/tern/v2"},
		why:     "numbered SQL and the runner for it",
	},
	"internal/benchapply": {
		allowed: []string{module + "/internal/localpg", "github.com/jackc/pgx/v5", "github.com/eclipse/paho.mqtt.golang"},
		why:     "measures the built binary from outside; a program of its own, since a benchmark of package testing cannot take turns",
	},
	"internal/localpg": {
		allowed: []string{"github.com/jackc/pgx/v5", "go.uber.org/goleak"},
		why:     "private clusters for the demo and for tests; must be usable by every package's tests",
	},
	"statuspage": {
		allowed: []string{"github.com/jackc/pgx/v5", "github.com/rs/zerolog", "golang.org/x/sync"},
		why:     "what a person sees at the HTTP port; reads the catalog and is told of live subscribers by a function",
	},
	"cmd/koldproxy": {
		allowed: []string{
			module, "github.com/jackc/pgx/v5", "github.com/rs/zerolog", "github.com/prometheus/client_golang",
			"github.com/spf13/cobra", "github.com/pelletier/go-toml/v2", "github.com/mattn/go-isatty",
			"github.com/mochi-mqtt/server/v2", "golang.org/x/sync", "github.com/google/uuid", "github.com/coreos/go-systemd/v22",
		},
		why: "wiring: the only place that knows everyone",
	},
}

// notImportable are packages that nothing else may import.
var notImportable = []string{module + "/cmd", module + "/integration"}

func TestImportsFollowTheArchitecture(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, file := range productFiles(t) {
		dir := path.Dir(file)
		seen[dir] = true
		r, ok := architecture[dir]
		if !ok {
			t.Errorf("%s: package %s is not in the table of imports_test.go", file, dir)
			continue
		}
		for _, imported := range importsOf(t, file) {
			if problem := r.check(imported); problem != "" {
				t.Errorf("%s imports %s: %s (%s)", file, imported, problem, r.why)
			}
		}
	}
	for dir := range architecture {
		if !seen[dir] {
			t.Errorf("the table of imports_test.go names package %s, which does not exist", dir)
		}
	}
}

func (r rule) check(imported string) string {
	if within(imported, notImportable) {
		return "nothing may import it"
	}
	first, _, _ := strings.Cut(imported, "/")
	if !strings.Contains(first, ".") { // the standard library
		if slices.Contains(r.forbidden, imported) {
			return "this package does no I/O"
		}
		return ""
	}
	for _, allowed := range r.allowed {
		switch {
		case imported == allowed:
			return ""
		case allowed == module && imported != module: // the root alone, unless the package is cmd
			if slices.Contains(r.allowed, "github.com/spf13/cobra") && within(imported, []string{module}) {
				return ""
			}
		case within(imported, []string{allowed}):
			return ""
		}
	}
	return "not allowed here"
}

func within(imported string, parents []string) bool {
	return slices.ContainsFunc(parents, func(parent string) bool {
		return imported == parent || strings.HasPrefix(imported, parent+"/")
	})
}

// TestModuleGraphHasNoArchivedParts keeps modules out whose successors are used: two versions of a protocol or a file format
// in one binary meet sooner or later.
func TestModuleGraphHasNoArchivedParts(t *testing.T) {
	t.Parallel()
	sums, err := os.ReadFile("go.sum")
	if err != nil {
		t.Fatal(err)
	}
	for _, archived := range []string{
		"github.com/jackc/pgproto3/v2", // its successor is pgx/v5/pgproto3
		"github.com/apache/arrow/go",   // arrow-go
		"github.com/pganalyze/pg_query_go/v5",
	} {
		for line := range strings.Lines(string(sums)) {
			if strings.HasPrefix(line, archived) {
				t.Errorf("the module graph contains %s", strings.Fields(line)[0])
				break
			}
		}
	}
}

// productFiles are the module's Go files without tests, as slash paths.
func productFiles(t *testing.T) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin"):
			return fs.SkipDir
		case d.IsDir() && name != "." && isModule(name): // heavy test helpers live in modules of their own
			return fs.SkipDir
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go"):
			files = append(files, filepath.ToSlash(name))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

func importsOf(t *testing.T, file string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, spec := range parsed.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, p)
	}
	return paths
}
