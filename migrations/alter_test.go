package migrations_test

import (
	"fmt"
	"testing"
)

func TestAlterStream(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q; CREATE SCHEMA app AUTHORIZATION %[1]q`, value[string](t, owner, `SELECT current_user`)))
	exec(t, owner, `CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 5), (2, 5)`)
	exec(t, owner, `SELECT; CALL koldstore.create_stream(NULL, 's', NULL, 't', 'v > 1', options => '{"start": "earliest"}')`)
	exec(t, owner, `CALL koldstore.create_stream('app', 's', NULL, 't', 'v > 1', options => '{"retention": "1d"}')`)
	asService(t, su, `UPDATE public._stream_s SET ts = now() - interval '2 hours' WHERE k = '1'`)
	alter := func(stream, options string) string {
		return fmt.Sprintf(`CALL koldstore.alter_stream(%s, options => '%s')`, stream, options)
	}
	// visible is what the owner sees of the log, and what the sweep would go by.
	visible := func(want int, retention string) {
		t.Helper()
		if got := value[int](t, owner, `SELECT count(*) FROM _stream_s`); got != want {
			t.Errorf("%d events are visible, want %d", got, want)
		}
		if got := value[string](t, owner, `SELECT coalesce(retention::text, 'none') FROM koldstore.visible_stream WHERE schema_name = 'public'`); got != retention {
			t.Errorf("retention is %s, want %s", got, retention)
		}
	}
	visible(2, "none")
	exec(t, owner, alter("NULL, 's'", `{"retention": "1h"}`))
	visible(1, "01:00:00")
	exec(t, owner, alter("'public', 's'", `{"retention": "30d"}`))
	visible(2, "30 days")
	exec(t, owner, `BEGIN; `+alter("NULL, 's'", `{"retention": "1h"}`))
	visible(1, "01:00:00")
	exec(t, owner, `ROLLBACK`)
	visible(2, "30 days")
	exec(t, owner, alter("NULL, 's'", `{}`))
	visible(2, "30 days")
	exec(t, owner, alter("NULL, 's'", `{"retention": "1m"}`))
	exec(t, owner, alter("NULL, 's'", `{"retention": null}`))
	visible(2, "none")
	if got := value[string](t, owner, `SELECT retention::text FROM koldstore.visible_stream WHERE schema_name = 'app'`); got != "1 day" {
		t.Errorf("the retention of the other stream is %s", got)
	}
	// The readers are those they were.
	other := as("other")
	refused(t, other, "42501", "permission denied for table", `SELECT * FROM _stream_s`)
	refused(t, owner, "42809", "", `DELETE FROM _stream_s`)

	for _, c := range []struct{ code, text, sql string }{
		{"22023", `invalid retention "soon"`, alter("NULL, 's'", `{"retention": "soon"}`)},
		{"22023", `invalid retention "0h"`, alter("NULL, 's'", `{"retention": "0h"}`)},
		{"22023", `option "start" of a stream cannot be changed`, alter("NULL, 's'", `{"start": "now"}`)},
		{"22023", `option "pre_image" of a stream cannot be changed`, alter("NULL, 's'", `{"pre_image": null}`)},
		{"22023", `unrecognized stream option "colour"`, alter("NULL, 's'", `{"colour": "red"}`)},
		{"42704", `stream "nothere" does not exist`, alter("NULL, 'nothere'", `{"retention": "1h"}`)},
		{"42704", `stream "s" does not exist`, alter("'nowhere', 's'", `{"retention": "1h"}`)},
	} {
		refused(t, owner, c.code, c.text, c.sql)
	}
	exec(t, owner, `CALL koldstore.alter_stream(NULL, 'nothere', '{"retention": "1h"}', if_exists => true)`)
	refused(t, other, "42501", "must be owner of stream s", alter("NULL, 's'", `{"retention": "1h"}`))
	exec(t, su, `DROP TABLE t CASCADE`)
	exec(t, owner, alter("NULL, 's'", `{"retention": "1h"}`)) // a broken stream is still its owner's
}

// TestAlterStreamWaitsForReaders: a long query on the log does not make the applier wait behind ALTER STREAM for as long.
func TestAlterStreamWaitsForReaders(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY); CALL koldstore.create_stream(NULL, 's', NULL, 't', 'id > 1')`)
	exec(t, su, `GRANT SELECT ON t TO PUBLIC`)
	reader, service := as("reader"), as("service")
	exec(t, reader, `BEGIN; SELECT * FROM _stream_s`)
	altered := make(chan error, 1)
	go func() {
		_, err := su.Exec(t.Context(), `CALL koldstore.alter_stream(NULL, 's', '{"retention": "1h"}')`)
		altered <- err
	}()
	for !value[bool](t, service, `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = '_stream_s'::regclass AND NOT granted)`) {
	}
	// Its request goes away within a second, and who has queued behind it comes through.
	exec(t, service, `INSERT INTO _stream_s (id, op, k, ts) VALUES ('0', 'put', '1', now())`)
	select {
	case err := <-altered:
		t.Fatalf("ALTER STREAM did not wait: %v", err)
	default:
	}
	exec(t, reader, `COMMIT`)
	if err := <-altered; err != nil {
		t.Fatal(err)
	}
	if got := value[string](t, su, `SHOW lock_timeout`); got != "0" {
		t.Errorf("lock_timeout is %s afterwards", got)
	}
}

func TestAlterTableSet(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	exec(t, su, `CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE nopk (id int); CREATE SCHEMA "S.é"; CREATE TABLE "S.é"."T ""q" (id int PRIMARY KEY)`)
	set := func(table, options string) string {
		return fmt.Sprintf(`CALL koldstore.alter_table_set(%s, '%s')`, table, options)
	}
	settings := func(want string) {
		t.Helper()
		if got := value[string](t, su, `SELECT concat_ws(' ', storage, coalesce(hot_row_limit::text, '-'), min_flush_rows, max_rows_per_file, coalesce(move_after::text, '-'), coalesce(retention::text, '-'), auto_flush)
			FROM koldstore.managed_table WHERE table_oid = 't'::regclass`); got != want {
			t.Errorf("the settings are %q, want %q", got, want)
		}
	}
	for _, c := range []struct{ code, text, sql string }{
		{"55000", `table "t" is not managed`, set("NULL, 't'", `{"koldstore_hot_row_limit": 5}`)},
		{"55000", `table "t" is not managed`, set("NULL, 't'", `{}`)},
		{"0A000", "cannot be set to false", set("NULL, 't'", `{"koldstore_enabled": false}`)},
		{"22023", `unrecognized option "koldstore_colour"`, set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_colour": "red"}`)},
		{"22023", `unrecognized option "enabled"`, set("NULL, 't'", `{"enabled": true}`)},
		{"22023", `invalid value for option "koldstore_enabled": perhaps`, set("NULL, 't'", `{"koldstore_enabled": "perhaps"}`)},
		{"22023", `invalid value for option "koldstore_hot_row_limit": many`, set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_hot_row_limit": "many"}`)},
		{"22023", `invalid value for option "koldstore_min_flush_rows": 99999999999`, set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_min_flush_rows": 99999999999}`)},
		{"22023", `invalid value for option "koldstore_move_after": soon`, set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_move_after": "soon"}`)},
		{"22023", "min_flush_rows must be positive", set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_min_flush_rows": 0}`)},
		{"22023", "exclude each other", set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_hot_row_limit": 5, "koldstore_move_after": "1 day"}`)},
		{"22023", `storage "nowhere" does not exist`, set("NULL, 't'", `{"koldstore_enabled": true, "koldstore_storage": "nowhere"}`)},
		{"55000", "no primary key", set("NULL, 'nopk'", `{"koldstore_enabled": true}`)},
		{"42P01", `relation "nothere" does not exist`, set("NULL, 'nothere'", `{"koldstore_enabled": true}`)},
		{"42P01", `relation "no.where" does not exist`, set("'no', 'where'", `{"koldstore_enabled": true}`)},
	} {
		refused(t, su, c.code, c.text, c.sql)
	}
	exec(t, su, `CALL koldstore.alter_table_set(NULL, 'nothere', '{"koldstore_enabled": true}', if_exists => true)`)
	other := as("other")
	refused(t, other, "42501", "must be owner of table t", set("NULL, 't'", `{"koldstore_enabled": true}`))
	if got := value[int](t, su, `SELECT count(*) FROM koldstore.managed_table`); got != 0 {
		t.Fatalf("%d tables are managed", got)
	}

	exec(t, su, set("NULL, 't'", `{"koldstore_enabled": "on", "koldstore_move_after": "7 days", "koldstore_min_flush_rows": "5"}`))
	settings("default - 5 100000 7 days - t")
	exec(t, su, `SELECT koldstore.set_retention('t', '1 year'), koldstore.set_table_auto_flush('t', false)`)
	exec(t, su, set("NULL, 't'", `{"koldstore_max_rows_per_file": 10, "koldstore_enabled": true, "koldstore_storage": "default"}`))
	settings("default - 5 10 7 days 1 year f")
	exec(t, su, set("NULL, 't'", `{"koldstore_hot_row_limit": 100}`)) // takes the place of the other rule
	settings("default 100 5 10 - 1 year f")
	exec(t, su, set("'public', 't'", `{"koldstore_move_after": "1 day"}`))
	settings("default - 5 10 1 day 1 year f")
	for _, c := range []struct{ code, text, sql string }{
		{"22023", "hot_row_limit must be >= 0", set("NULL, 't'", `{"koldstore_hot_row_limit": -1}`)},
		{"22023", "max_rows_per_file must be positive", set("NULL, 't'", `{"koldstore_max_rows_per_file": 0}`)},
		{"22023", "exclude each other", set("NULL, 't'", `{"koldstore_hot_row_limit": 5, "koldstore_move_after": "1 day"}`)},
		{"55000", "storage of managed table", set("NULL, 't'", `{"koldstore_storage": "elsewhere"}`)},
		{"0A000", "cannot be set to false", set("NULL, 't'", `{"koldstore_enabled": false}`)},
	} {
		if e := refused(t, su, c.code, c.text, c.sql); c.code[0] != '2' && e.Hint == "" {
			t.Errorf("%s: no hint", c.sql)
		}
	}
	settings("default - 5 10 1 day 1 year f")
	refused(t, other, "42501", "must be owner of table t", set("NULL, 't'", `{"koldstore_hot_row_limit": 5}`))

	exec(t, su, set(`'S.é', 'T "q'`, `{"koldstore_enabled": true}`))
	if got := value[string](t, su, `SELECT schema_name || '|' || table_name || '|' || min_flush_rows FROM koldstore.managed_table WHERE table_oid <> 't'::regclass`); got != `S.é|T "q|1000` {
		t.Errorf("managed: %s", got)
	}
}
