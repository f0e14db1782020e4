package koldproxy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy"
)

const demandedPage = `{"kind":"cold_page","table":4294967295,"generation":7,"segments":["00000000-0000-0000-0000-00000000000a"],"mode":"forward","after":4,"limit":10}`

func TestParseDemand(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		demandedPage: demandedPage,
		// As jsonb writes it.
		`{"kind": "flush", "force": true, "table": 1}`:                                                   `{"kind":"flush","table":1,"force":true}`,
		`{"mode": "last", "kind": "cold_page", "limit": 1, "table": 1, "segments": [], "generation": 0}`: `{"kind":"cold_page","table":1,"generation":0,"segments":[],"mode":"last","limit":1}`,
	} {
		d, err := koldproxy.ParseDemand([]byte(text))
		if err != nil || d.String() != want {
			t.Errorf("%s becomes %s, %v", text, d, err)
		}
	}
}

// Two readers of one text must not take it for two demands: keys in another case, twice, or unknown ones are refused.
func TestInvalidDemands(t *testing.T) {
	t.Parallel()
	changed := func(from, to string) string { return strings.Replace(demandedPage, from, to, 1) }
	for _, text := range []string{
		``, `null`, `[]`, `1`, `{}`, `{`, `{"kind":"flush","table":1,"force":true`, `{"kind":"x","table":1}`, `{"kind":"flush","table":1,"force":true} {}`,
		`{"kind":"flush","table":1}`, `{"kind":"flush","table":0,"force":true}`, `{"kind":"flush","table":4294967296,"force":true}`, `{"kind":"flush","table":"t","force":true}`,
		`{"kind":"flush","table":1,"force":true,"limit":1}`, `{"kind":"flush","table":1,"force":true,"sql":"x"}`, `{"kind":"flush","table":1,"force":null}`, `{"kind":"flush","table":1e0,"force":true}`,
		// What encoding/json would take for the field, and jsonb would not.
		`{"kind":"cold_page","Kind":"flush","table":1,"Table":2,"force":true}`, `{"kind":"flush","table":1,"Table":2,"force":true}`, `{"kind":"flush","TABLE":1,"force":true}`,
		`{"kind":"flush","table":1,"table":2,"force":true}`, `{"kind":"flush","table":1,"\u0074able":2,"force":true}`, `{"\u212aind":"flush","table":1,"force":true}`,
		changed(`"table":`, `"Table":1,"table":`), changed(`"limit":`, `"limit":1,"limit":`), changed(`"segments":`, `"SEGMENTS":[],"segments":`), changed(`"mode":`, `"ſegments":[],"mode":`),
		changed(`,"limit":10`, ``), changed(`10`, `0`), changed(`10`, `16777217`), changed(`"after":4`, `"after":-1`), changed(`"after":4,`, ``), changed(`forward`, `last`), changed(`forward`, `back`),
		changed(`:7`, `:-1`), changed(`"generation":7,`, ``), changed(`"limit"`, `"force":true,"limit"`),
		changed(`00000000-0000-0000-0000-00000000000a`, `../../etc`), changed(`00a"`, `00A"`), changed(`["`, `["00000000-0000-0000-0000-00000000000a","`), changed(`["0`, `["{0`),
		`{"kind":"cold_page","table":1,"generation":1,"mode":"last","limit":1}`, strings.Repeat(" ", 9<<20) + demandedPage,
	} {
		d, err := koldproxy.ParseDemand([]byte(text))
		if e, ok := errors.AsType[*koldproxy.Error](err); !ok || e.Code != koldproxy.CodeProtocolViolation || d.Kind != "" {
			t.Errorf("%.200s: %v, %v", text, d, err)
		}
	}
}

// FuzzDemand: what is taken is written in one way, which is read as the same.
func FuzzDemand(f *testing.F) {
	f.Add(demandedPage)
	f.Add(`{"kind":"flush","force":false,"table":9}`)
	f.Fuzz(func(t *testing.T, text string) {
		d, err := koldproxy.ParseDemand([]byte(text))
		if err != nil {
			return
		}
		again, err := koldproxy.ParseDemand([]byte(d.String()))
		if err != nil || again.String() != d.String() {
			t.Fatalf("%q becomes %s, which becomes %s, %v", text, d, again, err)
		}
		if d.Table < 1 || d.Kind == koldproxy.DemandColdPage && (d.Limit < 1 || d.After < 0 || d.Generation < 0) {
			t.Fatalf("%q was let through: %+v", text, d)
		}
	})
}
