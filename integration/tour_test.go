package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const tourFile = "../cmd/koldproxy/tour.md"

// tourArgs is `koldproxy demo --tour` on free ports.
func tourArgs(t *testing.T) []string {
	t.Helper()
	p, err := pickPorts()
	must(t, err)
	return []string{
		"demo", "--tour", "--listen", fmt.Sprintf("127.0.0.1:%d", p.proxy), "--pg-listen", "",
		"--mqtt-listen", fmt.Sprintf("127.0.0.1:%d", p.mqtt), "--http-listen", "",
	}
}

func TestTour(t *testing.T) {
	t.Parallel()
	o := program{name: binary, args: tourArgs(t), env: []string{"TMPDIR=" + t.TempDir()}}.run(t)
	if o.code != 0 || !strings.Contains(o.stdout, "steps are right") || strings.Contains(o.stdout, "WRONG") {
		t.Error(o)
	}
}

// TestTourNoticesAWrongAnswer builds koldproxy with another expected value in the tour.
func TestTourNoticesAWrongAnswer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text, err := os.ReadFile(tourFile)
	must(t, err)
	const right, wrong = " exit   | 3 | 900.00\n", " exit   | 3 | 901.00\n"
	if strings.Count(string(text), right) != 1 {
		t.Fatalf("the tour does not have %q once", right)
	}
	changed := filepath.Join(dir, "tour.md")
	must(t, os.WriteFile(changed, []byte(strings.Replace(string(text), right, wrong, 1)), 0o600))
	original, err := filepath.Abs(tourFile)
	must(t, err)
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{original: changed}})
	must(t, err)
	overlayFile := filepath.Join(dir, "overlay.json")
	must(t, os.WriteFile(overlayFile, overlay, 0o600))
	other := filepath.Join(dir, "koldproxy")
	build := exec.Command("go", append(append([]string{"build"}, buildFlags...), "-overlay", overlayFile, "-o", other, "../cmd/koldproxy")...)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	o := program{name: other, args: tourArgs(t), env: []string{"TMPDIR=" + t.TempDir()}}.run(t)
	if o.code != 1 || !strings.Contains(o.stdout, "WRONG") {
		t.Error(o)
	}
}

// TestTourByHand types the tour into psql, as the owner of the database and as the superuser, and compares what it prints.
func TestTourByHand(t *testing.T) {
	t.Parallel()
	inst := newInstance(t, demo)
	text, err := os.ReadFile(tourFile)
	must(t, err)
	script, want := tourScript(t, string(text))
	for _, role := range []string{"demo", "postgres"} {
		// psql writes errors to stderr; a shell puts them where they belong in the output.
		o := program{
			name: "sh", args: []string{"-c", `exec "$0" -X -d "$1" 2>&1`, findProgram(t, "psql"), inst.dsn(role, nil)}, stdin: script,
		}.run(t)
		if problem := compareTour(want, o.stdout); o.code != 0 || problem != "" {
			t.Errorf("as %s: exit code %d, %s", role, o.code, problem)
		}
	}
}

// tourScript takes the SQL blocks and their answers out of the tour.
func tourScript(t *testing.T, markdown string) (script, want string) {
	t.Helper()
	for _, block := range regexp.MustCompile("(?ms)^```(sql|text)\n(.*?)^```$").FindAllStringSubmatch(markdown, -1) {
		if block[1] == "sql" {
			script += block[2]
		} else {
			want += block[2]
		}
	}
	if script == "" || want == "" {
		t.Fatal("no blocks in the tour")
	}
	return script, want
}

// compareTour compares line by line and returns the first difference; … stands for anything within a line. How wide
// columns are depends on what … stands for.
func compareTour(want, got string) string {
	wanted, lines := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(wanted), len(lines)) {
		if i >= len(wanted) || i >= len(lines) || !matchesTourLine(wanted[i], lines[i]) {
			return fmt.Sprintf("line %d differs.\nwant %q\ngot  %q", i+1, wanted[i:min(i+3, len(wanted))], lines[i:min(i+3, len(lines))])
		}
	}
	return ""
}

func matchesTourLine(want, got string) bool {
	if strings.Trim(want, "-+") == "" && want != "" {
		return strings.Trim(got, "-+") == "" && got != ""
	}
	words := strings.Fields(want)
	for i := range words {
		words[i] = strings.ReplaceAll(regexp.QuoteMeta(words[i]), "…", `.*`)
	}
	return regexp.MustCompile(`^ *` + strings.Join(words, ` +`) + ` *$`).MatchString(got)
}
