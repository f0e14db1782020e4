package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/coldstore"
)

// The configurations that are given out can be used as they are, once the files that they name are there.
func TestConfigurationsThatAreGivenOut(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```toml\n(.*?)```").FindSubmatch(readme)
	if block == nil {
		t.Fatal("the README has no configuration")
	}
	files := map[string]string{"README": writeConfig(t, string(block[1]))}
	found, err := filepath.Glob("../../deploy/*/*.toml")
	if err != nil || len(found) == 0 {
		t.Fatalf("deploy/ has no configuration: %v", err)
	}
	for _, file := range found {
		files[file] = file
	}
	for name, file := range files {
		c, err := loadConfig(&options{configFile: file, set: []string{"postgres.password_file=", "http.token_file=../../deploy/compose/token"}}, nil)
		if err == nil {
			err = c.validate()
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What deploy/ says about files and ports agrees: the compose file mounts what is there, where the configurations look for it.
func TestComposeMountsWhatIsThere(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	mounts := regexp.MustCompile(`- (\./[^:]+):`).FindAllStringSubmatch(string(text), -1)
	if len(mounts) < 5 {
		t.Fatalf("only %d mounts", len(mounts))
	}
	for _, m := range mounts {
		if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
			t.Error(err)
		}
	}
	for _, text := range []string{"/etc/koldproxy/koldproxy.toml", "/etc/koldproxy/token"} {
		dockerfile, err := os.ReadFile("../../Dockerfile")
		if err != nil {
			t.Fatal(err)
		}
		config, err := os.ReadFile("../../deploy/compose/koldproxy.toml")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(dockerfile)+string(config), text) {
			t.Errorf("nobody looks for %s", text)
		}
	}
}

// Prometheus itself accepts its configuration and the alerts.
func TestPrometheusAcceptsTheAlerts(t *testing.T) {
	t.Parallel()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed (Debian: prometheus)")
	}
	out, err := exec.CommandContext(t.Context(), promtool, "check", "config", "../../deploy/prometheus/prometheus.yml").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "rules found") {
		t.Errorf("%v\n%s", err, out)
	}
}

// Each alert is raised when it should be, also by what is there with its first event, and by nothing that goes on as it should.
func TestAlertsAreRaised(t *testing.T) {
	t.Parallel()
	alerts, tests := read(t, "../../deploy/prometheus/alerts.yml"), read(t, "../../deploy/prometheus/alerts_test.yml")
	names := regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(alerts, -1)
	if len(names) < 10 {
		t.Fatalf("only %d alerts", len(names))
	}
	for _, name := range names {
		if !regexp.MustCompile(`alertname: ` + name[1] + `\s+exp_alerts:`).MatchString(tests) {
			t.Errorf("no test has %s raised", name[1])
		}
		if !regexp.MustCompile(`alertname: ` + name[1] + ` }`).MatchString(tests) {
			t.Errorf("no test has %s not raised", name[1])
		}
	}
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed (Debian: prometheus)")
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", "../../deploy/prometheus/alerts_test.yml").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// koldproxy starts again after whatever may pass: systemd never gives it up, but for a configuration that cannot be used; and compose waits
// for the server that clients will reach rather than for the one that the image prepares, which has no TCP.
func TestServiceManagersDoNotGiveUp(t *testing.T) {
	t.Parallel()
	unit := read(t, "../../deploy/systemd/koldproxy.service")
	for _, line := range []string{"Type=notify", "StartLimitIntervalSec=0", "Restart=on-failure", fmt.Sprintf("RestartPreventExitStatus=%d", exitUsage)} {
		if !strings.Contains(unit, "\n"+line+"\n") {
			t.Errorf("koldproxy.service has no line %s", line)
		}
	}
	if section := strings.Index(unit, "[Service]"); section < strings.Index(unit, "StartLimitIntervalSec") {
		t.Error("StartLimitIntervalSec belongs to [Unit]")
	}
	if analyze, err := exec.LookPath("systemd-analyze"); err == nil {
		if out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", "../../deploy/systemd/koldproxy.service").CombinedOutput(); err != nil {
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, "koldproxy.service") && !strings.Contains(line, "is not executable") {
					t.Errorf("systemd-analyze: %s", line)
				}
			}
		}
	}
	compose := read(t, "../../docker-compose.yml")
	if _, service, ok := strings.Cut(compose, "\n  koldproxy:\n"); !ok || !strings.Contains(strings.Split(service, "\n\n")[0], "restart: unless-stopped") {
		t.Error("compose lets koldproxy be after it has ended")
	}
	if !strings.Contains(compose, "pg_isready -h 127.0.0.1 ") {
		t.Error("compose takes the image's first server, which has only a socket, for PostgreSQL")
	}
	for _, image := range regexp.MustCompile(`image: (\S+)`).FindAllStringSubmatch(compose, -1) {
		if !regexp.MustCompile(`:v?[0-9]`).MatchString(image[1]) {
			t.Errorf("compose takes whatever version of %s there is", image[1])
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Grafana ignores what it does not understand, in silence; so the dashboard's panels are looked at here.
func TestDashboard(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../deploy/grafana/dashboards/koldproxy.json")
	if err != nil {
		t.Fatal(err)
	}
	type position struct{ X, Y, W, H int }
	var board struct {
		Title, UID    string
		SchemaVersion int
		Panels        []struct {
			ID          int
			Type, Title string
			GridPos     position
			Datasource  struct{ Type, UID string }
			Targets     []struct{ Expr, RefID string }
			FieldConfig struct{ Defaults struct{ Unit string } }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	if board.Title == "" || board.UID == "" || board.SchemaVersion < 30 || len(board.Panels) < 10 {
		t.Errorf("the dashboard is %q, uid %q, schema %d, %d panels", board.Title, board.UID, board.SchemaVersion, len(board.Panels))
	}
	ids := map[int]bool{}
	for i, p := range board.Panels {
		if p.Title == "" || len(p.Targets) == 0 || ids[p.ID] || p.GridPos.W <= 0 || p.GridPos.H <= 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d, %q: no title, no query, an id twice, or outside of the grid", i, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			if strings.Count(target.Expr, "(") != strings.Count(target.Expr, ")") || target.Expr == "" {
				t.Errorf("%s: %q", p.Title, target.Expr)
			}
			unit := p.FieldConfig.Defaults.Unit
			if strings.Contains(target.Expr, "_bytes") != (unit == "bytes" || unit == "Bps") || strings.Contains(target.Expr, "_seconds") != (unit == "s") {
				t.Errorf("%s shows %q in unit %q", p.Title, target.Expr, unit)
			}
		}
		for _, q := range board.Panels[:i] {
			if a, b := p.GridPos, q.GridPos; a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q overlap", p.Title, q.Title)
			}
		}
	}
}

// A storage that somebody registers lies in the folder that the configuration allows, or nowhere.
func TestFoldersOfRegisteredStorages(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for path, allowed := range map[string]bool{
		root: true, root + "/a": true, root + "/a/../b": true, root + "/..": false, root + "/../x": false, root + "x": false, "/": false, "/etc": false,
	} {
		c := defaultConfig()
		spec := coldstore.StorageSpec{Type: "filesystem", BasePath: path}
		if _, err := openStorage(t.Context(), c, spec); err == nil {
			t.Errorf("%s is allowed without cold.filesystem_root", path)
		}
		c.Cold.FilesystemRoot = root
		if _, err := openStorage(t.Context(), c, spec); (err == nil) != allowed {
			t.Errorf("%s: %v", path, err)
		}
	}
}
