package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// mainEnv makes the test binary behave as koldproxy itself.
const mainEnv = "KOLDPROXY_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
	}
	testscript.Main(runner{m}, map[string]func(){"koldproxy": main})
}

// runner runs the tests on behalf of testscript, with everything that localpg adds.
type runner struct{ *testing.M }

func (r runner) Run() int { return localpg.Run(r.M) }

// TestScripts runs the command lines in testdata/script and compares what they say.
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{Dir: "testdata/script"})
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]int{
		"":                           exitFine,
		"--help":                     exitFine,
		"version":                    exitFine,
		"demo --help":                exitFine,
		"config print":               exitFine,
		"nonsense":                   exitUsage,
		"demo nonsense":              exitUsage,
		"demo --nonsense":            exitUsage,
		"--nonsense":                 exitUsage,
		"serve":                      exitUsage, // no DSN
		"serve --config /no/co":      exitUsage,
		"flush":                      exitUsage,
		"retention a":                exitUsage,
		"migrate down":               exitUsage,
		"demo --tour --mqtt-listen=": exitUsage,
		"demo --pg-listen nowhere":   exitUsage,
		"demo --pg-bin /no/where":    exitFailed,
		"migrate up --set postgres.dsn=postgres://127.0.0.1:1/x":                                        exitUsage, // no databases
		"status --set postgres.dsn=postgres://h/x --set http.listen=wrong":                              exitUsage,
		"status --set postgres.dsn=postgres://127.0.0.1:1/x?sslmode=disable --set postgres.databases=x": exitFailed,
		"check --set postgres.dsn=postgres://127.0.0.1:1/x?sslmode=disable --set postgres.databases=x":  exitFailed,
	} {
		var out, errOut bytes.Buffer
		if got := execute(t.Context(), strings.Fields(line), &out, &errOut); got != want {
			t.Errorf("koldproxy %s: exit code %d, want %d\n%s%s", line, got, want, out.String(), errOut.String())
		}
		if want != exitFine && errOut.Len() == 0 {
			t.Errorf("koldproxy %s: fails without a word", line)
		}
		if want == exitUsage && out.Len() > 0 {
			t.Errorf("koldproxy %s: an error on stdout:\n%s", line, out.String())
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	var out, errOut bytes.Buffer
	if code := execute(t.Context(), []string{"version"}, &out, &errOut); code != exitFine || !strings.HasPrefix(out.String(), "koldproxy "+release) {
		t.Errorf("exit code %d, %q", code, out.String())
	}
}
