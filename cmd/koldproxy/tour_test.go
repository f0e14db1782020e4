package main

import (
	"os"
	"strings"
	"testing"
)

func TestTourStandsInTheReadme(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "\n"+tourText) {
		t.Error("the chapter Tour of README.md and cmd/koldproxy/tour.md differ")
	}
}

func TestParseTour(t *testing.T) {
	t.Parallel()
	steps, err := parseTour("text\n\n### One\n\n```sql\nSELECT 1;\n```\n```text\n 1\n```\n\n```sh\nrun\n```\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []tourStep{{heading: "One", kind: "sql", text: "SELECT 1;\n", want: " 1\n"}, {kind: "sh", text: "run\n"}}
	if len(steps) != 2 || steps[0] != want[0] || steps[1] != want[1] {
		t.Errorf("steps are %+v", steps)
	}
	for _, wrong := range []string{"", "```sql\n", "```text\nx\n```\n", "```sh\nx\n```\n```text\nx\n```\n", "```perl\n```\n"} {
		if _, err := parseTour(wrong); err == nil {
			t.Errorf("%q was accepted", wrong)
		}
	}
}

func TestMatchLines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want, got string
		match     bool
	}{
		{"a\nb\n", "a \nb\n\n", true},
		{"a\nb", "a", false},
		{"a", "a\nb", false},
		{"x…y", "xy", true},
		{"x…y", "x123y", true},
		{"x…y", "x123", false},
		{"…a…b…", "--a--b--", true},
		{"…a…b…", "--b--a--", false},
		{"ab…ab", "ab", false},
		{"count 4", "count 5", false},
		{"…", "anything", true},
	} {
		if got := matchLines(c.want, c.got); got != c.match {
			t.Errorf("matchLines(%q, %q) = %v", c.want, c.got, got)
		}
	}
}

func TestInterpolateAsPsqlDoes(t *testing.T) {
	t.Parallel()
	tr := &tour{vars: map[string]string{"last_id": "it's", "cursor": "42"}}
	for sql, want := range map[string]string{
		"AFTER (:'last_id')":     "AFTER ('it''s')",
		"since_seq => :cursor,":  "since_seq => 42,",
		"x::text, :unknown, a:b": "x::text, :unknown, a:b",
	} {
		if got := tr.interpolate(sql); got != want {
			t.Errorf("%s becomes %s, want %s", sql, got, want)
		}
	}
}

func TestSplitStatements(t *testing.T) {
	t.Parallel()
	got := splitStatements("SELECT 1;\nSELECT 2,\n  ';' AS x;\nSELECT 3 \\gset\nSELECT 4")
	want := []string{"SELECT 1;", "SELECT 2,\n  ';' AS x;", `SELECT 3 \gset`, "SELECT 4"}
	if strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("statements are %q", got)
	}
}
