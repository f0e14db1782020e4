package mqtt

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseFilter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		filter, group, pattern string
		kind                   filterKind
	}{
		{"a/b", "", "a/b", filterOrdinary},
		{"#", "", "#", filterOrdinary},
		{"+/+", "", "+/+", filterOrdinary},
		{"/", "", "/", filterOrdinary},
		{"$stream/d/s", "", "$stream/d/s", filterExact},
		{"$stream", "", "$stream", filterExact},
		{"$stream/d/#", "", "$stream/d/#", filterPattern},
		{"$stream/+/s", "", "$stream/+/s", filterPattern},
		{"$share/g/$stream/d/s", "g", "$stream/d/s", filterExact},
		{"$share/g/#", "g", "#", filterOrdinary},
		{"$share/g//", "g", "/", filterOrdinary},
		{"", "", "", filterRefused},
		{"a#", "", "", filterRefused},
		{"#/a", "", "", filterRefused},
		{"a/+b", "", "", filterRefused},
		{"$stream/d/+x", "", "", filterRefused},
		{"$streams/d/s", "", "", filterRefused},
		{"$SYS/#", "", "", filterRefused},
		{"$/x", "", "", filterRefused},
		{"$share", "", "", filterRefused},
		{"$share/g", "", "", filterRefused},
		{"$share/g/", "", "", filterRefused},
		{"$share//a", "", "", filterRefused},
		{"$share/+/a", "", "", filterRefused},
		{"$share/g/$share/h/a", "", "", filterRefused},
		{"$SHARE/g/a", "", "", filterRefused},
		{strings.Repeat("a", maxFilterBytes+1), "", "", filterRefused},
	} {
		if group, pattern, kind := parseFilter(c.filter); group != c.group || pattern != c.pattern || kind != c.kind {
			t.Errorf("parseFilter(%.40q) = %q, %q, %v", c.filter, group, pattern, kind)
		}
	}
}

func TestMatches(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, topic string
		want           bool
	}{
		{"#", "a/b", true},
		{"#", "$stream/d/s", false},
		{"+/d/s", "$stream/d/s", false},
		{"$stream/#", "$stream", true},
		{"$stream/#", "$stream/d/s", true},
		{"$stream/d/+", "$stream/d/s", true},
		{"$stream/d/+", "$stream/d/s/t", false},
		{"$stream/d/+", "$stream/d", false},
		{"$stream/d/s/#", "$stream/d/s", true},
		{"$stream/d/s", "$stream/d/s", true},
		{"$stream/d/s", "$stream/d/st", false},
		{"a/+", "a/", true},
		{"a/+", "a", false},
		{"+/+", "/a", true},
		{"+", "/a", false},
		{"a/+/#", "a", false},
		{"a/+/#", "a/b", true},
	} {
		if got := matches(c.pattern, c.topic); got != c.want {
			t.Errorf("matches(%q, %q) = %v", c.pattern, c.topic, got)
		}
	}
}

// reference says the same as matches by way of a regular expression.
func reference(pattern, topic string) bool {
	if topic[0] == '$' && pattern[0] != '$' {
		return false
	}
	re := regexp.QuoteMeta(pattern)
	re = strings.ReplaceAll(re, `\+`, `[^/]*`)
	if re == "#" {
		re = ".*"
	} else if rest, found := strings.CutSuffix(re, "/#"); found {
		re = rest + "(/.*)?"
	}
	return regexp.MustCompile("^(?s:" + re + ")$").MatchString(topic)
}

func TestMatchesLikeTheReference(t *testing.T) {
	t.Parallel()
	level := rapid.SampledFrom([]string{"", "a", "b", "$stream", "d.s"})
	wild := rapid.SampledFrom([]string{"", "a", "b", "$stream", "d.s", "+", "+", "#"})
	rapid.Check(t, func(t *rapid.T) {
		topic := strings.Join(rapid.SliceOfN(level, 1, 5).Draw(t, "topic"), "/")
		pattern := strings.Join(rapid.SliceOfN(wild, 1, 5).Draw(t, "pattern"), "/")
		if topic == "" || pattern == "" || !wildcardsInPlace(pattern) {
			t.Skip("not valid")
		}
		if got, want := matches(pattern, topic), reference(pattern, topic); got != want {
			t.Fatalf("matches(%q, %q) = %v", pattern, topic, got)
		}
	})
}

func FuzzParseFilter(f *testing.F) {
	f.Add("$share/g/$stream/d/#", "$stream/d/s")
	f.Add("+/#", "$stream/d/s")
	f.Fuzz(func(t *testing.T, filter, topic string) {
		_, pattern, kind := parseFilter(filter)
		if kind == filterRefused {
			return
		}
		if strings.HasPrefix(topic, "$") && kind == filterOrdinary && matches(pattern, topic) {
			t.Errorf("%q matches %q", filter, topic)
		}
		if kind == filterExact && matches(pattern, topic) != (pattern == topic) {
			t.Errorf("the exact filter %q and %q", filter, topic)
		}
	})
}
