package rewrite

import (
	"strings"
	"testing"
)

func TestDefines(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"CREATE VIEW v AS SELECT 1":           true,
		"\n\t-- c\r/* a /* b */ c */alter t":  true,
		"SELECT 1;; Create table t()":         true,
		"SELECT ';create'":                    true, // errs towards yes
		"SELECT created_at FROM t":            false,
		"SELECT 1 -- ; create":                true,
		"-- create":                           false,
		"/* create":                           false,
		"/*; create":                          false,
		"":                                    false,
		"/":                                   false,
		"-":                                   false,
		"/**/":                                false,
		"BEGIN; INSERT INTO t SELECT 1; END;": false,
	} {
		if got := Defines([]byte(sql)); got != want {
			t.Errorf("%q: %t", sql, got)
		}
	}
	for _, sql := range []string{strings.Repeat("/*;", 1e6), strings.Repeat("--;", 1e6), strings.Repeat(";/**/", 1e6), strings.Repeat("-", 1e6)} {
		_ = Defines([]byte(sql)) // in linear time
	}
}

func BenchmarkDefines(b *testing.B) {
	body := []byte("SELECT abalance FROM pgbench_accounts WHERE aid = $1")
	for b.Loop() {
		_ = Defines(body)
	}
}
