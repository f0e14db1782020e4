package coldstore_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/coldstore"
)

// Whoever owns the type of a key can make casts and operators for it. None of them runs, neither when keys become JSON nor when
// keys are compared.
func TestKeysWithCodeOfUsers(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.exec(`CREATE TYPE en AS ENUM ('a', 'b')`)
	for _, code := range []string{
		`FUNCTION boom_json(en) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE 'code of a user runs as %', current_user; END $$`,
		`FUNCTION boom_text(en) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'code of a user runs as %', current_user; END $$`,
		`FUNCTION boom_in(text) RETURNS en LANGUAGE plpgsql AS $$ BEGIN RAISE 'code of a user runs as %', current_user; END $$`,
		`FUNCTION boom_eq(en, en) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'code of a user runs as %', current_user; END $$`,
		`CAST (en AS json) WITH FUNCTION boom_json(en) AS IMPLICIT`,
		`CAST (en AS text) WITH FUNCTION boom_text(en) AS IMPLICIT`,
		`CAST (text AS en) WITH FUNCTION boom_in(text) AS IMPLICIT`,
		`OPERATOR = (LEFTARG = en, RIGHTARG = en, FUNCTION = boom_eq)`,
	} {
		f.exec("CREATE " + code)
	}
	tab := f.manage("k", "e en, l en[], n numeric, v text", "e en, l en[], n numeric, PRIMARY KEY (e, l, n)", "")
	write := func(n string) {
		tab.seq++
		f.exec(`INSERT INTO `+tab.mirror+` SELECT r.e, r.l, r.n, $1, 1, '{"e": "a", "l": ["a", "b"], "n": 1}'
			FROM jsonb_populate_record(NULL::`+tab.mirror+`, $2::text::jsonb) r`, tab.seq, fmt.Sprintf(`{"e": "a", "l": ["a", "b"], "n": %s}`, n))
	}
	write("1.0")
	tab.mustFlush(1, 1)
	write("1.00") // the same key with another text: PostgreSQL is asked
	tab.mustFlush(1, 1)
	segments := tab.segments()
	if len(segments) != 2 || segments[0].Dead != 1 {
		t.Fatalf("the first segment's row is not superseded: %+v", segments)
	}
	page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: tab.oid, Segments: tab.ids(), Mode: coldstore.ModeForward, Limit: 10})
	ok(t, err)
	if len(page.Rows) != 1 || string(page.Rows[0].PK) != `{"e": "a", "l": ["a", "b"], "n": 1.00}` {
		t.Errorf("%+v", page.Rows)
	}
	tab.verified()
}

// A page shows segments of the table that it was asked for, and those alone: whoever may read one table may name any segment.
func TestPageOfAnotherTablesSegment(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	mine := f.messages("")
	mine.put(1, "mine")
	mine.mustFlush(1, 1)
	theirs := f.manage("secrets", "id bigint PRIMARY KEY, v text", "id bigint PRIMARY KEY", "")
	theirs.put(1, "secret")
	theirs.mustFlush(1, 1)
	for _, mode := range []string{coldstore.ModeForward, coldstore.ModeLast} {
		for _, segments := range [][]uuid.UUID{theirs.ids(), append(mine.ids(), theirs.ids()...)} {
			page, err := f.store.Page(t.Context(), coldstore.PageRequest{Table: mine.oid, Segments: segments, Mode: mode, Limit: 10})
			var kold *koldproxy.Error
			if !errors.As(err, &kold) || kold.Code != koldproxy.CodeColdUnreadable || len(page.Rows) > 0 {
				t.Errorf("%s: %d rows, %v", mode, len(page.Rows), err)
			}
		}
	}
}
