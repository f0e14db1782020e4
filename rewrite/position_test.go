package rewrite

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// TestErrorPositions runs rewritten texts on PostgreSQL and leads its positions back. A ^ stands in front of the
// character that the error has to point at.
func TestErrorPositions(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	exec(t, conn, "CREATE TABLE t (id int PRIMARY KEY, a text, d date)")
	for _, in := range []string{
		"SELECT 'äöü😀',\r\n ^nosuch FROM t ORDER BY id LIMIT 5 AFTER ('1')",
		"SELECT 'ä' FROM t WHERE id = ^nosuch OR a = '😀' ORDER BY id LIMIT 5 AFTER ('1')",
		"SELECT 'ä' FROM t WHERE a = '😀' ORDER BY ^nosuch LIMIT 5 AFTER ('1')",
		"SELECT 'ä' FROM t ORDER BY id LIMIT 5 AFTER (^'é')",
		"SELECT 'ä' FROM t WHERE true ORDER BY d, id LIMIT 5 AFTER (^'no date', 5) FOR UPDATE",
		"SELECT 'ä' FROM t ORDER BY id LIMIT 5 AFTER (1) OFFSET ^nosuch",
		"SELECT 'ä' FROM t ORDER BY d LIMIT 5 ^AFTER (5)",
		"SELECT '😀'; ^CREATE STREAM s ON t WHEN (a)",
		"/* é */ SHOW STREAMS; SELECT 1 FORM ^t",
		"DROP STREAM \"é\"; SELECT 'é' FROM (^",
	} {
		before, after, _ := strings.Cut(in, "^")
		r := Rewrite(before+after, conforming)
		if !r.Changed {
			t.Errorf("%s: unchanged (refusal %v)", in, r.Refusal)
			continue
		}
		_, err := conn.PgConn().Exec(context.Background(), r.SQL).ReadAll()
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) {
			t.Errorf("%s: no error: %v", in, err)
			continue
		}
		if got, want := r.Positions.Input(int(pgErr.Position)), len([]rune(before))+1; got != want {
			t.Errorf("%s: %s at %d, that is %d of the input, want %d\n%s", in, pgErr.Message, pgErr.Position, got, want, r.SQL)
		}
	}
}

func TestPositionsCountCharactersOfTheEncoding(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ encoding, prefix string }{
		{"UTF8", "SELECT 'é😀'; "},
		{"LATIN1", "SELECT '\xe9\xe8'; "},
		{"EUC_JP", "SELECT '\xa4\xa2\x8f\xb0\xa1'; "},
		{"EUC_KR", "SELECT '\xb0\xa1\xb0\xa2'; "},
		{"EUC_TW", "SELECT '\xc4\xe3\x8e\xa2\xa1\xa1'; "},
		{"MULE_INTERNAL", "SELECT '\x81\xe9\x92\xa4\xa2'; "},
		{"SQL_ASCII", "SELECT '\xe9\xe8'; "},
		{"SQL_ASCII", "SELECT 'é😀'; "},
	} {
		r := Rewrite(c.prefix+"CREATE STREAM s ON t WHEN (a) ; DROP STREAM", Options{ConformingStrings: true, ClientEncoding: c.encoding})
		const ascii = "SELECT 'xx'; "
		if r.Refusal == nil || r.Refusal.Position != len(ascii+"CREATE STREAM s ON t WHEN (a) ; DROP STREAM")+1 || r.RefusalAt != len(ascii+"CREATE ")+1 {
			t.Errorf("%s %q: %v at %+v", c.encoding, c.prefix, r.RefusalAt, r.Refusal)
		}
		r = Rewrite(c.prefix+"CREATE STREAM s ON t WHEN (a) ; SELECT 1", Options{ConformingStrings: true, ClientEncoding: c.encoding})
		out := len(ascii) + len(r.SQL) - len(c.prefix) // in characters
		if got := r.Positions.Input(out); got != len(ascii+"CREATE STREAM s ON t WHEN (a) ; SELECT 1") {
			t.Errorf("%s %q: the last character leads to %d", c.encoding, c.prefix, got)
		}
	}
}

func TestCharIndexOfLongTexts(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("aé😀漢", 1000)
	x := newCharIndex(text, utf8Text)
	n := 1
	for offset := range text {
		if got := x.position(offset); got != n {
			t.Fatalf("byte %d: got %d, want %d", offset, got, n)
		}
		n++
	}
	if got := x.position(len(text)); got != n {
		t.Fatalf("end: got %d, want %d", got, n)
	}
}

func TestZeroPositionMapIsTheIdentity(t *testing.T) {
	t.Parallel()
	if got := (PositionMap{}).Input(42); got != 42 {
		t.Error(got)
	}
}
