package changefeed

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// TestKeysAreCopied copies keys of every plain type into a table of the server and wants their texts back.
func TestKeysAreCopied(t *testing.T) {
	t.Parallel()
	conn := settledConn(t)
	if _, err := conn.Exec(t.Context(), `SET default_transaction_read_only = off`); err != nil {
		t.Fatal(err)
	}
	seen := make(map[uint32]bool)
	for typeName, keys := range map[string][]string{
		"boolean":  {"t", "f"},
		"smallint": {"-32768", "0", "32767"}, "integer": {"-2147483648", "2147483647"}, "bigint": {"-9223372036854775808", "-1", "9223372036854775807"},
		"oid":  {"0", "4294967295"},
		"uuid": {"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}, "bytea": {`\x`, `\x00ff5c`},
		"text": {"", "NULL", "a\tb\\N\n\"\r", "ü€😀"}, "varchar": {`\.`},
		"date":        {"2026-02-28", "0001-01-01", "0044-03-15 BC", "5874897-12-31", "infinity", "-infinity"},
		"timestamp":   {"2026-02-28 01:02:03.000004", "1900-01-01 00:00:00", "0044-03-15 12:00:00 BC", "294276-12-31 23:59:59.999999", "infinity", "-infinity"},
		"timestamptz": {"2026-02-28 01:02:03.4+00", "0044-03-15 12:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "infinity", "-infinity"},
	} {
		var oid uint32
		if err := conn.QueryRow(t.Context(), `SELECT $1::text::regtype::oid`, typeName).Scan(&oid); err != nil {
			t.Fatal(err)
		}
		seen[oid] = true
		if _, err := conn.Exec(t.Context(), `CREATE TEMP TABLE m (k `+typeName+` PRIMARY KEY, seq bigint, op smallint, row_image jsonb)`); err != nil {
			t.Fatal(err)
		}
		var items []item
		for i, key := range keys {
			e := &event{seq: koldproxy.Seq(i), op: koldproxy.OpInsert, key: []string{key}}
			e.new = []koldproxy.Datum{{Kind: koldproxy.DatumText, Text: key}}
			items = append(items, item{event: e})
		}
		if _, err := conn.PgConn().CopyFrom(t.Context(), newCopyStream(keyMirror(oid), items), `COPY m FROM STDIN (FORMAT binary)`); err != nil {
			t.Fatalf("%s: %v", typeName, err)
		}
		var got []string
		var same bool
		if err := conn.QueryRow(t.Context(), `SELECT array_agg(format('%s', k) ORDER BY seq), bool_and(op = 1 AND row_image = jsonb_build_object('k', k)) FROM m`).Scan(&got, &same); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, keys) || !same {
			t.Errorf("%s: copied %q, got %q, with the images of the server: %v", typeName, keys, got, same)
		}
		if _, err := conn.Exec(t.Context(), `DROP TABLE m`); err != nil {
			t.Fatal(err)
		}
	}
	for _, oid := range slices.Concat(plainKeys, textKeys) {
		if !seen[oid] {
			t.Errorf("no key of type %d was tried", oid)
		}
	}
}

// TestKeysThatCannotBeCopied wants COPY to be given up, and to be known to be, when a key is none of its type.
func TestKeysThatCannotBeCopied(t *testing.T) {
	t.Parallel()
	for _, oid := range []uint32{pgtype.Int8OID, pgtype.OIDOID, pgtype.UUIDOID, pgtype.DateOID} {
		rows := newCopyStream(keyMirror(oid), []item{{event: &event{key: []string{"no such key"}}}})
		if got, err := io.ReadAll(rows); err == nil || !rows.refused.Load() || string(got) != copyBegin {
			t.Errorf("type %d: %x, %v", oid, got, err)
		}
	}
}

// TestCopyStreamIsWhole reads more than is painted at a time, in pieces of several lengths.
func TestCopyStreamIsWhole(t *testing.T) {
	t.Parallel()
	m := keyMirror(pgtype.TextOID)
	var items []item
	want := []byte(copyBegin)
	for i := range 7 {
		key := strings.Repeat("k", copyAhead/3+i)
		items = append(items, item{event: &event{op: koldproxy.OpInsert, key: []string{key}, new: []koldproxy.Datum{{Kind: koldproxy.DatumText, Text: key}}}})
		var err error
		if want, err = m.appendCopied(want, &items[i]); err != nil {
			t.Fatal(err)
		}
	}
	want = append(want, copyEnd...)
	for _, length := range []int{1000, 64 << 10, len(want), 2 * len(want)} {
		rows, got, piece := newCopyStream(m, items), []byte(nil), make([]byte, length)
		for {
			n, err := rows.Read(piece)
			got = append(got, piece[:n]...)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil || n < length {
				t.Fatalf("%d of %d bytes and no end: %v", n, length, err)
			}
		}
		if !bytes.Equal(got, want) {
			t.Errorf("in pieces of %d bytes: %d bytes that are not the %d of the rows", length, len(got), len(want))
		}
	}
}

// keyMirror is that of a table whose only column k is its key.
func keyMirror(oid uint32) *mirror {
	k := attribute{name: "k", typeOID: oid}
	return &mirror{key: []attribute{k}, painter: newPainter(&table{attributes: []attribute{k}, columns: []int{0}})}
}
