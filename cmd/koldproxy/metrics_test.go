package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

var updateMetrics = flag.Bool("update-metrics", false, "rewrite the table of docs/metrics.md")

const metricsPage = "../../docs/metrics.md"

// descText is how the Prometheus library prints a metric's description.
var descText = regexp.MustCompile(`^Desc\{fqName: "(koldproxy_[a-z_]+)", help: "(.*?)", .*constLabels: \{(.*?)\}, variableLabels: \{(.*?)\}\}$`)

// The table of docs/metrics.md is what a koldproxy with all its parts registers, no more and no less.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	i := install(t)
	c, err := loadValid(&options{configFile: i.config, set: []string{"mqtt.enabled=true", "mqtt.listen=127.0.0.1:0"}})
	if err != nil {
		t.Fatal(err)
	}
	s := &service{cfg: c, log: zerolog.Nop(), registry: prometheus.NewRegistry()}
	defer s.close()
	if err := s.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		s.registry.Describe(descs)
	}()
	var rows []string
	for d := range descs {
		m := descText.FindStringSubmatch(d.String())
		if m == nil {
			if strings.Contains(d.String(), `"koldproxy_`) {
				t.Fatalf("cannot read %s", d)
			}
			continue // of Go and the process
		}
		var labels []string
		for label := range strings.SplitSeq(m[3], ",") {
			if name, _, ok := strings.Cut(label, "="); ok {
				labels = append(labels, "`"+name+"`")
			}
		}
		for label := range strings.SplitSeq(m[4], ",") {
			if label != "" {
				labels = append(labels, "`"+label+"`")
			}
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |", m[1], cmp.Or(strings.Join(labels, ", "), "–"), strings.ReplaceAll(m[2], `\"`, `"`)))
	}
	slices.Sort(rows)
	rows = slices.Compact(rows)

	page, err := os.ReadFile(metricsPage)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := strings.Index(string(page), "| `koldproxy_"), strings.LastIndex(string(page), "|\n")+2
	if begin < 0 || end < begin {
		t.Fatal("the page has no table of metrics")
	}
	want := string(page[:begin]) + strings.Join(rows, "\n") + "\n" + string(page[end:])
	if want == string(page) {
		return
	}
	if *updateMetrics {
		if err := os.WriteFile(metricsPage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, row := range rows {
		if !strings.Contains(string(page), row+"\n") {
			t.Errorf("missing: %s", row)
		}
	}
	for line := range strings.Lines(string(page[begin:end])) {
		if !slices.Contains(rows, strings.TrimSpace(line)) {
			t.Errorf("not registered: %s", line)
		}
	}
	t.Log("go test ./cmd/koldproxy -run TestMetricsAreDocumented -args -update-metrics rewrites the table")
}

// What deploy/ asks Prometheus for is there to be had.
func TestAlertsAndDashboardUseMetricsThatExist(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(metricsPage)
	if err != nil {
		t.Fatal(err)
	}
	name := regexp.MustCompile(`koldproxy_[a-z_]+`)
	for _, file := range []string{"../../deploy/prometheus/alerts.yml", "../../deploy/grafana/dashboards/koldproxy.json"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := name.FindAllString(string(text), -1)
		if len(found) == 0 {
			t.Errorf("%s asks for nothing", file)
		}
		for _, metric := range found {
			if !strings.Contains(string(page), "`"+strings.TrimSuffix(metric, "_bucket")+"`") {
				t.Errorf("%s asks for %s", file, metric)
			}
		}
	}
}
