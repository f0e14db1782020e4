package main

import (
	"fmt"
	"strings"
	"testing"
)

// Several hosts in a URL stay as they are when the database changes, whatever they are, and a blank in its name stays a blank.
func TestURLsWithSeveralHosts(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]string{
		"postgres://kold:p%40ss@[::1]:5432,[::2]:5433/app":                                "::1:5432 ::2:5433",
		"postgres://kold:p%40ss@[::1],[fe80::2]/app?sslmode=disable&application_name=a+b": "::1:5432 fe80::2:5432",
		"postgresql://kold:p%40ss@one:1,[::1]:5433?sslmode=disable":                       "one:1 ::1:5433",
		"postgres://kold:p%40ss@[::1],two,[::3]:7/app?connect_timeout=3":                  "::1:5432 two:5432 ::3:7",
		"postgres://kold:p%40ss@one,two:5/app":                                            "one:5432 two:5",
		"postgres://kold:p%40ss@[::1]:6/app":                                              "::1:6",
		"host=::1,::2 port=5432,5433 user=kold password=p@ss":                             "::1:5432 ::2:5433",
	} {
		c := defaultConfig()
		c.Postgres.DSN = dsn
		cc, err := c.pgxConfig("other one")
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		hosts := []string{fmt.Sprintf("%s:%d", cc.Host, cc.Port)}
		for _, f := range cc.Fallbacks {
			if h := fmt.Sprintf("%s:%d", f.Host, f.Port); h != hosts[len(hosts)-1] {
				hosts = append(hosts, h)
			}
		}
		if strings.Contains(dsn, "a+b") && !strings.Contains(mustDSN(t, c), "application_name=a%2Bb") {
			t.Errorf("%s becomes %s", dsn, mustDSN(t, c))
		}
		if got := strings.Join(hosts, " "); got != want || cc.Database != "other one" || cc.User != "kold" || cc.Password != "p@ss" {
			t.Errorf("%s leads to %s, database %q, user %q", dsn, got, cc.Database, cc.User)
		}
	}
}

func mustDSN(t *testing.T, c *config) string {
	t.Helper()
	dsn, err := c.dsn("x")
	if err != nil {
		t.Fatal(err)
	}
	return dsn
}
