package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/koldproxy/koldproxy"
)

// standIn is schema koldstore as far as this package has to do with it: functions that demand, and the procedures that
// statements are rewritten to.
var standIn = `
CREATE SCHEMA koldstore;
CREATE TABLE koldstore.stream (name text PRIMARY KEY, source text, predicate text);
CREATE TABLE koldstore.stage_secret AS SELECT 'key'::bytea AS secret, 'seal'::bytea AS seal;
CREATE FUNCTION koldstore.demand_allowed(demand jsonb) RETURNS text LANGUAGE sql STABLE AS
	$$ SELECT CASE demand ->> 'table' WHEN '667' THEN ('no' || (demand ->> 'kind'))::int::text WHEN '666' THEN NULL
		ELSE jsonb_build_object('pid', pg_backend_pid(), 'secret', 'here', 'at', floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint)::text END $$;
` + "-- sealing\n" + `
CREATE FUNCTION koldstore.staged(demand jsonb) RETURNS jsonb LANGUAGE sql STABLE AS $$
	SELECT koldstore.unseal(decode(lines[h.n * 3], 'base64'), sha512(s.secret || int4send(pg_backend_pid()) || int8send((demand ->> 'table')::bigint)
		|| convert_to(demand ->> 'kind', 'UTF8') || decode(h.head::jsonb ->> 'nonce', 'hex')))
	FROM string_to_array(current_setting('koldstore.staged', true), E'\n') lines, koldstore.staged_heads() h, koldstore.stage_secret s
	WHERE h.head::jsonb -> 'demand' @> demand AND koldstore.genuine(h.head, h.mac)
		AND encode(sha512(decode(lines[h.n * 3], 'base64')), 'hex') = h.head::jsonb ->> 'box' LIMIT 1 $$;
-- changes_since needs pages answers and returns their rows.
CREATE FUNCTION koldstore.changes_since(pages int, tab int DEFAULT 1) RETURNS TABLE (n bigint, note text) LANGUAGE plpgsql STABLE AS $$
DECLARE
	demand jsonb := jsonb_build_object('kind', 'cold_page', 'table', tab, 'generation', 0, 'segments', '[]'::jsonb, 'mode', 'forward', 'limit', 1);
	answer jsonb;
BEGIN
	FOR i IN 1 .. pages LOOP
		answer := koldstore.staged(demand || jsonb_build_object('after', i));
		IF answer IS NULL THEN
			RAISE EXCEPTION 'cold rows are needed' USING ERRCODE = 'KS003', HINT = 'connect through koldproxy', DETAIL = demand || jsonb_build_object('after', i);
		END IF;
		RETURN QUERY SELECT r::bigint, answer ->> 'note' FROM jsonb_array_elements_text(answer -> 'rows') r;
	END LOOP;
END $$;
CREATE PROCEDURE koldstore.create_stream(stream_schema text, stream_name text, table_schema text, table_name text,
	predicate text, if_not_exists boolean DEFAULT false, options jsonb DEFAULT '{}') LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('SELECT count(*) FILTER (WHERE /*koldstore:when*/(%s)) FROM %I', predicate, table_name);
	IF EXISTS (SELECT FROM koldstore.stream WHERE name = stream_name) THEN
		IF if_not_exists THEN
			RAISE NOTICE 'stream "%" already exists, skipping', stream_name;
			RETURN;
		END IF;
		RAISE EXCEPTION 'stream "%" already exists', stream_name USING ERRCODE = '42710';
	END IF;
	INSERT INTO koldstore.stream VALUES (stream_name, table_name, predicate);
END $$;
CREATE PROCEDURE koldstore.drop_stream(stream_schema text, stream_name text, if_exists boolean DEFAULT false) LANGUAGE plpgsql AS $$
BEGIN
	DELETE FROM koldstore.stream WHERE name = stream_name;
	IF NOT FOUND AND NOT if_exists THEN
		RAISE EXCEPTION 'stream "%" does not exist', stream_name USING ERRCODE = '42704';
	END IF;
END $$;
CREATE FUNCTION koldstore.key_may_be_null(tab text, col text) RETURNS boolean LANGUAGE sql STABLE AS 'SELECT false';
CREATE FUNCTION koldstore.compares_keys(key anyelement, value anycompatible) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
CREATE FUNCTION koldstore.show_streams(live jsonb DEFAULT '{}')
RETURNS TABLE (name text, "table" text, predicate text, consumers integer, lag bigint) LANGUAGE sql STABLE AS $$
	SELECT s.name, s.source, s.predicate, coalesce((live -> s.name ->> 'consumers')::int, 0), (live -> s.name ->> 'lag')::bigint
	FROM koldstore.stream s ORDER BY 1 $$;
`

// init puts the functions of the migrations in that have to be the real ones.
func init() {
	sql, err := os.ReadFile("../migrations/sql/006_demands.sql")
	if err != nil {
		panic(err)
	}
	var functions strings.Builder
	for _, f := range []struct{ name, end string }{{"staged_heads", "END;"}, {"genuine", "\n$$;"}, {"unseal", "END $$;"}} {
		_, body, _ := strings.Cut(string(sql), "CREATE FUNCTION koldstore."+f.name+"(")
		body, _, found := strings.Cut(body, f.end)
		if !found {
			panic(f.name)
		}
		functions.WriteString("CREATE FUNCTION koldstore." + f.name + "(" + body + f.end + "\n")
	}
	standIn = strings.Replace(standIn, "-- sealing\n", functions.String(), 1)
}

// fakeFulfiller answers the stand-in's demands.
type fakeFulfiller struct {
	mu      sync.Mutex
	demands []string
	err     error
	block   chan struct{} // Fulfil says on it that it has begun, and waits for its ctx
}

func (f *fakeFulfiller) Fulfil(ctx context.Context, database string, demand json.RawMessage) (json.RawMessage, error) {
	f.mu.Lock()
	f.demands = append(f.demands, string(demand))
	err, block := f.err, f.block
	f.mu.Unlock()
	if block != nil {
		block <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	d, err := koldproxy.ParseDemand(demand)
	if err != nil {
		return nil, err
	}
	if d.Table == 13 {
		return nil, koldproxy.Errorf(koldproxy.CodeColdUnreadable, "segment 13 cannot be read").WithDetail("It is damaged.")
	}
	note := "é😀"
	if d.Table == 15 {
		note = strings.Repeat("x", 100_000)
	}
	if d.Table == 14 {
		return nil, errors.New("internal")
	}
	return fmt.Appendf(nil, `{"rows":[%d,%d],"note":%q}`, d.After*10, d.After*10+1, note), nil
}

func (f *fakeFulfiller) StageSecrets(context.Context, string, string) (secret, seal []byte, err error) {
	return []byte("key"), []byte("seal"), nil
}

func (f *fakeFulfiller) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.demands)
}

// chunkedUpstream puts a relay between the proxy and PostgreSQL that passes on the server's bytes in odd pieces.
func (p *proxied) chunkedUpstream(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	upstream := p.server.current().Upstream
	p.upstream(t, ln.Addr().String())
	var wg sync.WaitGroup
	relay := func(client net.Conn, piece int) {
		defer wg.Done()
		defer client.Close()
		server, err := net.Dial("tcp", upstream)
		if err != nil {
			return
		}
		defer server.Close()
		go func() {
			_, _ = io.Copy(server, client)
			_ = server.(*net.TCPConn).CloseWrite()
		}()
		_, _ = io.CopyBuffer(struct{ io.Writer }{client}, struct{ io.Reader }{server}, make([]byte, piece))
	}
	wg.Go(func() {
		for i := 0; ; i++ {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Add(1)
			go relay(client, []int{1 << 16, 1, 7, 4097}[i%4])
		}
	})
	t.Cleanup(func() {
		p.stop()
		_ = ln.Close()
		wg.Wait()
	})
}
