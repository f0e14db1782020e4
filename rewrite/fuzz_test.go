package rewrite

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	pg_query "github.com/pganalyze/pg_query_go/v6"
)

func seeds(f *testing.F) {
	for _, c := range refusals {
		f.Add(strings.Replace(c.in, "^", "", 1), true)
	}
	for _, sql := range legal {
		f.Add(sql, false)
	}
	for _, sql := range []string{
		"CREATE STREAM IF NOT EXISTS a.b ON \"c\".d WHEN (e > 'x' /* ) */) WITH (start = 'now', retention = 30d);DROP STREAM IF EXISTS s;SHOW STREAMS",
		"SELECT é, (SELECT x FROM u ORDER BY x LIMIT 1 AFTER ($2)) FROM t WHERE a OR b ORDER BY a DESC NULLS LAST, t.id LIMIT $1 AFTER ($3, 'ü') OFFSET 1",
		"DECLARE c CURSOR FOR SELECT * FROM t ORDER BY id FETCH FIRST 5 ROWS ONLY AFTER ('x'); SELECT changes_since('t')",
		"ALTER STREAM IF EXISTS a.b SET (retention = 30d); ALTER STREAM s RESET (retention); ALTER TABLE ONLY a.b SET (koldstore_enabled, koldstore_storage = 'x')",
		"GRANT SUBSCRIBE ON TOPIC 'a/+', $$b$$ TO GROUP a, CURRENT_USER; REVOKE SUBSCRIBE ON TOPIC 'a/#' FROM PUBLIC, \"b\"",
		"CREATE STREAM s ON t WHEN ($ks$x$ks$ = '$ks1')", `DROP STREAM U&"\0024ks$"`,
	} {
		f.Add(sql, true)
	}
}

// FuzzRewrite holds the promises of the package for any text.
func FuzzRewrite(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, sql string, conformingStrings bool) {
		r := Rewrite(sql, Options{ConformingStrings: conformingStrings})
		if !r.Changed || r.Refusal != nil {
			if unspoiled(r) != sql || len(r.Statements) > 0 {
				t.Fatalf("not rewritten, but not the same: %q", r.SQL)
			}
			if e := r.Refusal; e != nil && (e.Position < 1 || e.Position > utf8.RuneCountInString(sql)+1 || r.RefusalAt < 1 || r.RefusalAt > utf8.RuneCountInString(sql)) {
				t.Fatalf("a refusal outside of the text: %+v at %d", e, r.RefusalAt)
			}
			return
		}
		if !NeedsLook([]byte(sql)) {
			t.Fatalf("changed a text without trigger: %q", r.SQL)
		}
		if before, after := parameters(t, sql), parameters(t, r.SQL); !slices.Equal(before, after) {
			t.Fatalf("parameters %v became %v in %q", before, after, r.SQL)
		}
		if again := Rewrite(r.SQL, Options{ConformingStrings: conformingStrings}); len(again.Statements) > 0 && !strings.Contains(strings.ToLower(sql), "after") {
			t.Fatalf("what was rewritten is rewritten again: %q", again.SQL)
		}
		checkPositions(t, sql, r)
	})
}

// unspoiled is what a refused text was before a spoiler was put where RefusalAt names.
func unspoiled(r Result) string {
	if !r.Changed {
		return r.SQL
	}
	at := 0
	for range r.RefusalAt - 1 {
		_, size := utf8.DecodeRuneInString(r.SQL[at:])
		at += size
	}
	rest, _ := strings.CutPrefix(r.SQL[at:], spoiler)
	return r.SQL[:at] + rest
}

// parameters are the numbers of the $n of a text, each once. The text has to scan.
func parameters(t *testing.T, sql string) []string {
	s, ok := scan(sql)
	if !ok {
		_, err := pg_query.Scan(sql)
		t.Fatalf("%q does not scan: %v", sql, err)
	}
	var all []string
	for i := range s.tokens {
		if s.is(i, tParam) {
			all = append(all, s.text(i))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// checkPositions checks that the map stays within the input, that what leads to the input character by character is the
// same character there, and that nothing but AFTER moves text.
func checkPositions(t *testing.T, sql string, r Result) {
	in, out := []rune(sql), []rune(r.SQL)
	moves := strings.Contains(strings.ToLower(sql), "after")
	last := 1
	for p := 1; p <= len(out)+1; p++ {
		at := r.Positions.Input(p)
		if at < 1 || at > len(in)+1 {
			t.Fatalf("character %d leads to %d of %d", p, at, len(in))
		}
		if at < last && !moves {
			// The call that a statement becomes belongs to its first word, also behind the copied predicate.
			if p <= len(out) && r.Positions.copied(p) {
				t.Fatalf("character %d leads back to %d", p, at)
			}
			continue
		}
		last = at
	}
	if last != len(in)+1 {
		t.Fatalf("the end leads to %d of %d", last, len(in))
	}
	for i, s := range r.Positions.segments {
		end := len(out) + 1
		if i+1 < len(r.Positions.segments) {
			end = r.Positions.segments[i+1].out
		}
		if end < s.out {
			t.Fatalf("segment %d begins behind the next one", i)
		}
		if !s.copied {
			continue
		}
		if got, want := string(out[s.out-1:end-1]), string(in[s.in-1:s.in-1+end-s.out]); got != want {
			t.Fatalf("segment %d is %q, the input has %q", i, got, want)
		}
	}
}

// copied reports whether the character at position was copied from the input.
func (m PositionMap) copied(position int) bool {
	for i := len(m.segments) - 1; i >= 0; i-- {
		if m.segments[i].out <= position {
			return m.segments[i].copied
		}
	}
	return false
}

// FuzzNeedsLook compares the search with a plain one.
func FuzzNeedsLook(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, sql string, _ bool) {
		want := false
		lower := strings.Map(func(r rune) rune {
			if r >= 'A' && r <= 'Z' {
				return r | 0x20
			}
			return r
		}, strings.ToValidUTF8(sql, "?"))
		for _, w := range triggers {
			want = want || strings.Contains(lower, w)
		}
		if got := NeedsLook([]byte(sql)); got != want {
			t.Fatalf("%q: got %v", sql, got)
		}
		if r := Rewrite(sql, conforming); !want && (r.Changed || r.Refusal != nil || r.MayDemand) {
			t.Fatalf("%q: of interest without a trigger: %+v", sql, r)
		}
	})
}
