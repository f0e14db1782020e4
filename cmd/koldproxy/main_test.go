package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

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
		"completion":                 exitFine,
		"completion nosuch":          exitUsage,
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

// Every command explains itself with an example, and says for machines what it says for people.
func TestCommandsExplainThemselves(t *testing.T) {
	t.Parallel()
	var look func(cmd *cobra.Command)
	look = func(cmd *cobra.Command) {
		for _, c := range cmd.Commands() {
			look(c)
		}
		path := cmd.CommandPath()
		if cmd.HasSubCommands() || cmd.Name() == "help" {
			return
		}
		if cmd.Short == "" || !strings.Contains(cmd.Example, path) {
			t.Errorf("%s has no example", path)
		}
		if cmd.Flags().Lookup("json") == nil && cmd.Name() != "demo" && cmd.Name() != "serve" {
			t.Errorf("%s has no --json", path)
		}
	}
	look(newRootCommand())
}

// What `koldproxy completion bash` prints is loaded by bash and completes commands, flags and files.
func TestShellCompletion(t *testing.T) {
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	dir := t.TempDir()
	var script bytes.Buffer
	if code := execute(t.Context(), []string{"completion", "bash"}, &script, &script); code != exitFine {
		t.Fatalf("exit code %d: %s", code, script.String())
	}
	if err := os.WriteFile(filepath.Join(dir, "completion"), script.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(dir, "koldproxy")); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"koldproxy mig": "migrate", "koldproxy migrate ": "down status up", "koldproxy check --j": "--json", "koldproxy config pr": "print", "koldproxy flush ": "",
	} {
		words := strings.Split(line, " ")
		run := exec.CommandContext(t.Context(), bash, "--norc", "-c", `
			source "$1/completion"
			shift
			COMP_LINE=$1 COMP_POINT=${#1}
			shift
			COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
			_get_comp_words_by_ref() { # what the package bash-completion brings; its words are already apart here
				cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} words=("${COMP_WORDS[@]}") cword=$COMP_CWORD
			}
			__start_koldproxy
			echo "${COMPREPLY[@]%% *}"`)
		run.Args = append(run.Args, append([]string{"bash", dir, line}, words...)...)
		run.Env = append(os.Environ(), mainEnv+"=1", "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := run.Output() // compopt complains on stderr when no terminal asks
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%q is completed with %q, want %q (%v)", line, got, want, err)
		}
	}
}
