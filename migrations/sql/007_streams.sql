-- Change streams.

-- create_stream is what CREATE STREAM becomes. It runs as the caller, under the caller's search_path, and lets PostgreSQL
-- judge the predicate as it judges that of a partial index: boolean, immutable, of this table's columns only, no subqueries
-- or aggregates, with PostgreSQL's own messages. What is stored is PostgreSQL's reading of it and never the caller's text.
CREATE PROCEDURE koldstore.create_stream(stream_schema text, stream_name text, table_schema text, table_name text, predicate text,
    if_not_exists boolean DEFAULT false, options jsonb DEFAULT '{}')
LANGUAGE plpgsql AS $$
DECLARE
    shown  text := CASE WHEN table_schema IS NULL THEN pg_catalog.quote_ident(table_name)
                        ELSE pg_catalog.quote_ident(table_schema) || '.' || pg_catalog.quote_ident(table_name) END;
    rel    regclass := pg_catalog.to_regclass(shown);
    schema name := coalesce(stream_schema, pg_catalog.current_schema());
    place  name := 'pg_temp';
    probe  text;
    cols   text;
    refusal text;
    stream bigint;
    later  boolean := false;
BEGIN
    PERFORM koldstore.assert_writable('CREATE STREAM');
    IF rel IS NULL THEN
        RAISE EXCEPTION 'relation "%" does not exist', CASE WHEN table_schema IS NULL THEN table_name ELSE table_schema || '.' || table_name END
            USING ERRCODE = '42P01';
    ELSIF schema IS NULL THEN
        RAISE EXCEPTION 'no schema has been selected to create in' USING ERRCODE = '3F000';
    ELSIF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = schema) THEN
        RAISE EXCEPTION 'schema "%" does not exist', schema USING ERRCODE = '3F000';
    ELSIF predicate IS NULL OR pg_catalog.btrim(predicate) = '' THEN
        RAISE EXCEPTION 'a stream needs a predicate' USING ERRCODE = '42601', HINT = 'CREATE STREAM name ON table WHEN ( boolean expression )';
    END IF;
    IF koldstore.stream_exists(schema, stream_name) THEN
        IF if_not_exists THEN
            RAISE NOTICE 'stream "%" already exists, skipping', stream_name USING ERRCODE = '42710';
            RETURN;
        END IF;
        RAISE EXCEPTION 'stream "%" already exists', stream_name USING ERRCODE = '42710';
    END IF;
    PERFORM koldstore.check_stream_options(options);
    PERFORM koldstore.check_table(current_user, rel);
    IF options ->> 'start' = 'earliest' THEN
        -- Outside a transaction block this procedure may commit, and the applier can do the backfill while others write. There
        -- is no other way to ask than to try: within this block COMMIT is refused either way, in different words.
        BEGIN
            COMMIT;
        EXCEPTION WHEN invalid_transaction_termination THEN
            refusal := SQLERRM;
        END;
        later := refusal <> koldstore.refusal_in_block();
    END IF;

    -- The probe has the table's name, so that the predicate may use it as a qualifier. Its columns are spelled out: LIKE would
    -- lock the table weakly, and a strong lock is asked for later on, which is how deadlocks with TRUNCATE and DDL are made.
    SELECT c.relname INTO probe FROM pg_catalog.pg_class c WHERE c.oid = rel;
    SELECT pg_catalog.string_agg(pg_catalog.format('%I %s%s', a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
               CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || a.attcollation::pg_catalog.regcollation::text ELSE '' END), ', ' ORDER BY a.attnum)
    INTO cols
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = rel AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY') THEN
        SET CONSTRAINTS koldstore.koldproxy_probe DEFERRED;
        INSERT INTO koldstore.command (verb, args) VALUES ('open_probe', pg_catalog.jsonb_build_object('schema', schema, 'table', rel::oid))
        RETURNING result ->> 'schema' INTO place;
    END IF;
    EXECUTE pg_catalog.format('CREATE TABLE %I.%I (%s)', place, probe, cols);
    EXECUTE pg_catalog.format(E'CREATE INDEX koldproxy_probe ON %I.%I ((1)) WHERE /*koldstore:when*/(%s\n)', place, probe, predicate);
    INSERT INTO koldstore.command (verb, args)
    VALUES ('create_stream', pg_catalog.jsonb_build_object('schema', schema, 'name', stream_name, 'table', rel::oid,
        'probe', pg_catalog.to_regclass(pg_catalog.quote_ident(place) || '.koldproxy_probe')::oid, 'options', options, 'later', later))
    RETURNING (result ->> 'stream_id')::bigint INTO stream;
    EXECUTE pg_catalog.format('DROP TABLE %I.%I', place, probe);
    IF later THEN
        COMMIT;
        CALL koldstore.await_backfill(stream);
    END IF;
END $$;

-- The probe of who may create no temporary tables is in a schema that is there for the length of a transaction: open_probe makes it, and a
-- trigger takes it away before the commit, whatever has become of the statement.
CREATE FUNCTION koldstore.do_open_probe(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    place name := 'koldproxy_probe_' || pg_backend_pid();
BEGIN
    PERFORM koldstore.check_table(requester, (args ->> 'table')::oid);
    IF NOT has_schema_privilege(requester, args ->> 'schema', 'CREATE') THEN
        RAISE EXCEPTION 'permission denied for schema %', args ->> 'schema' USING ERRCODE = '42501';
    ELSIF NOT has_database_privilege(current_database(), 'CREATE') THEN
        RAISE EXCEPTION 'role "%" may not create temporary tables in database "%"', requester, current_database()
            USING ERRCODE = '42501', DETAIL = 'A predicate is tried on a table that is dropped at once.',
                HINT = format('GRANT TEMPORARY ON DATABASE %I TO %I, or let koldproxy do without: GRANT CREATE ON DATABASE %1$I TO %3$I.', current_database(), requester, current_user);
    END IF;
    IF to_regnamespace(place) IS NULL THEN
        EXECUTE format('CREATE SCHEMA %I', place);
    END IF;
    EXECUTE format('GRANT USAGE, CREATE ON SCHEMA %I TO %I', place, requester);
    RETURN jsonb_build_object('schema', place);
END $$;

CREATE FUNCTION koldstore.close_probe() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
BEGIN
    EXECUTE format('DROP SCHEMA IF EXISTS %I CASCADE', 'koldproxy_probe_' || pg_backend_pid());
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER koldproxy_probe AFTER INSERT ON koldstore.command_log DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.verb = 'open_probe') EXECUTE FUNCTION koldstore.close_probe();
ALTER TABLE koldstore.command_log ENABLE ALWAYS TRIGGER koldproxy_probe;

CREATE FUNCTION koldstore.stream_exists(schema name, stream name) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM koldstore.stream s WHERE s.schema_name = schema AND s.name = stream)
$$;

-- schema_of_stream is where a stream is, by the search path if no schema is given; NULL if there is none of that name.
CREATE FUNCTION koldstore.schema_of_stream(schema name, stream name) RETURNS name
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.nspname
    FROM pg_catalog.unnest(CASE WHEN schema IS NULL THEN pg_catalog.current_schemas(true) ELSE ARRAY[schema] END) WITH ORDINALITY AS p(nspname, ord)
    WHERE koldstore.stream_exists(p.nspname, stream) ORDER BY p.ord LIMIT 1;
END;

-- parse_retention reads 90m, 24h, 30d and their like: a whole number and one of s, m, h, d, w. Like every function with a pattern it is read
-- with standard_conforming_strings on: with off, a backslash in a plain literal escapes what is behind it.
CREATE FUNCTION koldstore.parse_retention(value text) RETURNS interval
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    part    text[] := pg_catalog.regexp_match(value, '^\s*([0-9]{1,9})\s*([smhdw])\s*$');
    seconds bigint;
BEGIN
    IF part IS NULL OR part[1]::bigint = 0 THEN
        RAISE EXCEPTION 'invalid retention "%"', value USING ERRCODE = '22023',
            HINT = 'Give a positive whole number and a unit, as ''90m'', ''24h'' or 30d (s, m, h, d, w); leave retention out to keep events for ever.';
    END IF;
    seconds := part[1]::bigint * CASE part[2] WHEN 's' THEN 1 WHEN 'm' THEN 60 WHEN 'h' THEN 3600 WHEN 'd' THEN 86400 ELSE 604800 END;
    -- Every read subtracts it from the present, which must stay within what PostgreSQL can represent.
    IF seconds > 1000::bigint * 365 * 86400 THEN
        RAISE EXCEPTION 'retention "%" is too long', value USING ERRCODE = '22023', HINT = 'Leave retention out to keep events for ever.';
    END IF;
    RETURN CASE WHEN part[2] IN ('d', 'w') THEN pg_catalog.make_interval(days => (seconds / 86400)::int)
                ELSE pg_catalog.make_interval(secs => seconds) END;
END $$;

-- retained is the condition on a log's rows that retention makes; NULL if events are kept for ever.
CREATE FUNCTION koldstore.retained(keep interval) RETURNS text
LANGUAGE sql STABLE STRICT
BEGIN ATOMIC
    SELECT pg_catalog.format('ts > pg_catalog.statement_timestamp() - interval %L', keep);
END;

CREATE FUNCTION koldstore.check_stream_options(options jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
BEGIN
    FOR o IN SELECT * FROM pg_catalog.jsonb_each_text(options) LOOP
        CASE o.key
            WHEN 'start' THEN
                IF o.value IS NULL OR o.value NOT IN ('now', 'earliest') THEN
                    RAISE EXCEPTION 'invalid start "%"', coalesce(o.value, 'null') USING ERRCODE = '22023', HINT = 'start is ''now'' (the default) or ''earliest''.';
                END IF;
            WHEN 'pre_image' THEN
                IF o.value IS NULL OR pg_catalog.lower(o.value) NOT IN ('true', 'false', 'on', 'off', '1', '0') THEN
                    RAISE EXCEPTION 'invalid pre_image "%"', coalesce(o.value, 'null') USING ERRCODE = '22023', HINT = 'pre_image is true or false (the default).';
                END IF;
            WHEN 'retention' THEN
                IF o.value IS NULL THEN
                    RAISE EXCEPTION 'invalid retention "null"' USING ERRCODE = '22023', HINT = 'Leave retention out to keep events for ever.';
                END IF;
                PERFORM koldstore.parse_retention(o.value);
            ELSE
                RAISE EXCEPTION 'unrecognized stream option "%"', o.key USING ERRCODE = '22023', HINT = 'The options are start, pre_image and retention.';
        END CASE;
    END LOOP;
END $$;

-- What PostgreSQL deparses is written by standard_conforming_strings, and is parsed again here.
CREATE FUNCTION koldstore.do_create_stream(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
DECLARE
    rel        oid := (args ->> 'table')::oid;
    probe      oid := (args ->> 'probe')::oid;
    schema     name := args ->> 'schema';
    stream     text := args ->> 'name';
    opts       jsonb := args -> 'options';
    log_name   text := '_stream_' || stream;
    pre_image  boolean := coalesce((opts ->> 'pre_image')::boolean, false);
    earliest   boolean := coalesce(opts ->> 'start', 'now') = 'earliest';
    later      boolean := earliest AND coalesce((args ->> 'later')::boolean, false);
    keep       interval := koldstore.parse_retention(opts ->> 'retention');
    source     text;
    owner      name;
    judged     text;
    used       text;
    log        text;
    log_oid    oid;
    id         bigint;
    fn         text;
    key_json   text;
    key_order  text;
    reader     text;
    odd        text;
    literals   text[];
    images     jsonb[];
    judged_all boolean;
    base       bigint;
    lsn        pg_lsn;
    rows       bigint := 0;
BEGIN
    PERFORM koldstore.check_table(requester, rel);
    PERFORM koldstore.check_stream_options(opts);
    PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('koldstore.stream'), pg_catalog.hashtext(schema || '.' || stream));
    IF pg_catalog.octet_length(log_name) > 63 THEN
        RAISE EXCEPTION 'stream name "%" is too long', stream USING ERRCODE = '42622', DETAIL = 'The log''s name, _stream_ and the stream''s, has to fit in 63 bytes.';
    ELSIF NOT pg_catalog.has_schema_privilege(requester, schema, 'CREATE') THEN
        RAISE EXCEPTION 'permission denied for schema %', schema USING ERRCODE = '42501';
    ELSIF EXISTS (SELECT FROM koldstore.stream s WHERE s.schema_name = schema AND s.name = stream) THEN
        RAISE EXCEPTION 'stream "%" already exists', stream USING ERRCODE = '42710';
    END IF;
    log := pg_catalog.format('%I.%I', schema, log_name);
    IF pg_catalog.to_regclass(log) IS NOT NULL OR pg_catalog.to_regtype(log) IS NOT NULL THEN
        RAISE EXCEPTION 'relation "%" already exists', log_name USING ERRCODE = '42P07',
            DETAIL = 'A stream keeps its events in a table of this name, and does not adopt one that is there already.',
            HINT = 'Rename that table, or give the stream another name.';
    END IF;

    -- PostgreSQL's own text of the predicate, from a probe that the caller made in this session.
    -- An index whose predicate is always true has none.
    SELECT coalesce(pg_catalog.pg_get_expr(i.indpred, i.indrelid), 'true'),
           (SELECT pg_catalog.string_agg(DISTINCT pg_catalog.format('(x.r).%1$I', a.attname), ', ')
            FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
            WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = i.indexrelid
              AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = i.indrelid AND d.refobjsubid > 0)
    INTO judged, used
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    WHERE i.indexrelid = probe AND c.relnamespace IN (pg_catalog.pg_my_temp_schema(), pg_catalog.to_regnamespace('koldproxy_probe_' || pg_catalog.pg_backend_pid())::oid) AND pg_catalog.pg_get_userbyid(c.relowner) = requester;
    IF judged IS NULL THEN
        RAISE EXCEPTION 'create a stream with CREATE STREAM' USING ERRCODE = '55000';
    ELSIF used IS NULL THEN
        used := '1 AS "?"';
    END IF;

    -- The text is parsed once more below, by koldproxy, and to parse a constant is to run its type's input function: for an
    -- array, range or row of domains that runs their checks, which are code of users.
    WITH RECURSIVE part(type, inside) AS (
        SELECT d.refobjid, false FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = probe AND d.refclassid = 'pg_catalog.pg_type'::regclass
        UNION
        SELECT n.type, p.inside OR t.typtype <> 'd'
        FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.type
        CROSS JOIN LATERAL (
            SELECT t.typbasetype WHERE t.typtype = 'd'
            UNION ALL SELECT t.typelem WHERE t.typelem <> 0
            UNION ALL SELECT g.rngsubtype FROM pg_catalog.pg_range g WHERE t.oid IN (g.rngtypid, g.rngmultitypid)
            UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped
        ) AS n(type))
    SELECT pg_catalog.format_type(p.type, NULL) INTO odd FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.type WHERE p.inside AND t.typtype = 'd' LIMIT 1;
    IF odd IS NOT NULL THEN
        RAISE EXCEPTION 'the predicate uses an array, range or row that holds values of the domain %', odd USING ERRCODE = '0A000',
            HINT = 'Compare with values of the domain''s base type.';
    END IF;

    IF EXISTS (SELECT FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_index i ON i.indexrelid = probe JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
               WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = probe AND d.refclassid = 'pg_catalog.pg_type'::regclass AND d.refobjid IN (c.reltype, (SELECT t.reltype FROM pg_catalog.pg_class t WHERE t.oid = rel))) THEN
        RAISE EXCEPTION 'the predicate names the row type of its own table' USING ERRCODE = '0A000', HINT = 'Compare columns, or the row with ROW(…).';
    END IF;

    PERFORM koldstore.publish(rel);
    source := rel::regclass::text;
    SELECT pg_catalog.pg_get_userbyid(c.relowner) INTO owner FROM pg_catalog.pg_class c WHERE c.oid = rel;

    -- COLLATE "C": ids sort as bytes, whatever the database's collation.
    EXECUTE pg_catalog.format('CREATE TABLE %s (id text COLLATE "C" PRIMARY KEY, op text NOT NULL, k jsonb NOT NULL, ts timestamptz NOT NULL, doc jsonb%s) PARTITION BY RANGE (id)',
        log, CASE WHEN pre_image THEN ', old jsonb' ELSE '' END);
    log_oid := log::regclass;
    PERFORM koldstore.guard(log_oid, rel, koldstore.retained(keep),
        pg_catalog.format('Events come from writes to %s. DROP STREAM %I removes the stream and its log.', source, stream));

    id := pg_catalog.nextval(pg_catalog.pg_get_serial_sequence('koldstore.stream', 'stream_id'));
    SELECT greatest(c.watermark, koldstore.seq_at(pg_catalog.clock_timestamp())) INTO base FROM koldstore.checkpoint c;
    PERFORM koldstore.extend_log(log_oid, id, keep, (base >> 22) + 1704067200000);
    -- The name is what PostgreSQL shows to whoever drops the table.
    fn := pg_catalog.format('koldstore.%I(text)', ('predicate_' || id || '_of_stream_' || stream)::name);
    -- The predicate may call the owner's functions: they run with the owner's rights, and where koldproxy calls it they can
    -- reach no others (eval_rows). The body holds parsed column references, so renames follow and dropping or retyping a
    -- used column is refused.
    EXECUTE pg_catalog.format('CREATE FUNCTION %s RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER RETURN (SELECT %s FROM (SELECT %s FROM (SELECT $1::%s AS r OFFSET 0) AS x) AS %I)',
        fn, judged, used, source, (SELECT c.relname FROM pg_catalog.pg_class c WHERE c.oid = rel));
    EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', fn);
    EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO CURRENT_USER, koldproxy_eval', fn);
    PERFORM koldstore.hand_over(fn, owner);
    EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO CURRENT_USER, koldproxy_eval', fn);
    -- How judge_query reads rows: koldproxy_eval may lack USAGE on the table's schema, and so could not name the type itself. It
    -- is planned into the query.
    EXECUTE pg_catalog.format('CREATE FUNCTION koldstore.%1$I(text) RETURNS %2$s LANGUAGE sql STABLE RETURN $1::%2$s', 'row_' || id, source);
    EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION koldstore.%I(text) FROM PUBLIC', 'row_' || id);
    EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION koldstore.%I(text) TO koldproxy_eval', 'row_' || id);

    -- For SHOW STREAMS alone: it is written out with today's names. The alias is what PostgreSQL may put in front of columns; a
    -- predicate about the row as a whole needs the table's name in its place.
    BEGIN
        EXECUTE pg_catalog.format('CREATE VIEW koldstore.%I AS SELECT (%s) AS predicate FROM %s AS _ks_when', 'when_' || id, judged, source);
    EXCEPTION WHEN undefined_table THEN
        EXECUTE pg_catalog.format('CREATE VIEW koldstore.%I AS SELECT (%s) AS predicate FROM %s AS %I', 'when_' || id, judged, source,
            (SELECT c.relname FROM pg_catalog.pg_class c WHERE c.oid = rel));
    END;

    IF earliest AND NOT later THEN
        IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'start = ''earliest'' needs READ COMMITTED' USING ERRCODE = '0A000',
                DETAIL = 'The backfill has to see every row that was committed before the table was locked.';
        END IF;
        -- No writer is between the backfill and the first live event: rows that are there now are backfilled, and what is
        -- written after this transaction comes by in the write-ahead log behind the marker.
        PERFORM koldstore.lock_writers_out(rel, false);
        SELECT CASE count(*) WHEN 1 THEN min(pg_catalog.format('e.image -> %L', a.attname))
                    ELSE 'pg_catalog.jsonb_build_object(' || pg_catalog.string_agg(pg_catalog.format('%1$L, e.image -> %1$L', a.attname), ', ' ORDER BY k.ord) || ')' END,
               pg_catalog.string_agg(pg_catalog.format('_ks_row.%I', a.attname), ', ' ORDER BY k.ord)
        INTO key_json, key_order
        FROM pg_catalog.pg_index i
        CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, ord)
        JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        WHERE i.indrelid = rel AND i.indisprimary AND k.ord <= i.indnkeyatts;
        -- The table's owner reads it: to plan a query is to compute constant parts of its indexes' expressions, which may be
        -- code of users. Where row-level security would hide rows from the owner, it fails.
        reader := 'reader_' || id;
        EXECUTE pg_catalog.format('CREATE FUNCTION koldstore.%I() RETURNS TABLE (literal text, n bigint) LANGUAGE plpgsql STABLE SECURITY DEFINER
            SET search_path = pg_catalog, pg_temp SET row_security = off AS %L', reader, pg_catalog.format(
                'BEGIN RETURN QUERY SELECT pg_catalog.format(''%%s'', _ks_row), pg_catalog.row_number() OVER (ORDER BY %s) FROM %s%s AS _ks_row; END', key_order,
                CASE WHEN (SELECT c.relkind FROM pg_catalog.pg_class c WHERE c.oid = rel) = 'p' THEN '' ELSE 'ONLY ' END, source));
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION koldstore.%1$I() FROM PUBLIC; GRANT EXECUTE ON FUNCTION koldstore.%1$I() TO CURRENT_USER', reader);
        PERFORM koldstore.hand_over(pg_catalog.format('koldstore.%I()', reader), owner);
        SELECT greatest(c.watermark, koldstore.seq_at(pg_catalog.clock_timestamp())) INTO base FROM koldstore.checkpoint c;
        PERFORM koldstore.extend_log(log_oid, id, keep, (base >> 22) + 1704067200000);
        lsn := pg_catalog.pg_current_wal_insert_lsn();
        FOR literals IN EXECUTE pg_catalog.format(
            'SELECT pg_catalog.array_agg(s.literal ORDER BY s.n) FROM koldstore.%I() AS s GROUP BY (s.n - 1) / 1000 ORDER BY (s.n - 1) / 1000', reader)
        LOOP
            -- Code of users runs here. It finds a transaction that can only read, and what it leaves in the session is undone.
            judged_all := false;
            BEGIN
                PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), pg_catalog.set_config('transaction_read_only', 'on', true);
                SELECT pg_catalog.array_agg(e.image ORDER BY e.ord) FILTER (WHERE e.matches[1]) INTO images
                FROM koldstore.eval_rows((SELECT c.reltype FROM pg_catalog.pg_class c WHERE c.oid = rel), literals, ARRAY[fn::regprocedure::oid]) AS e;
                judged_all := true;
                RAISE EXCEPTION USING ERRCODE = 'KS000', MESSAGE = 'undo';
            EXCEPTION WHEN SQLSTATE 'KS000' THEN
                IF NOT judged_all THEN
                    RAISE;
                END IF;
            END;
            PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
            EXECUTE pg_catalog.format(
                'INSERT INTO %s (id, op, k, ts, doc)
                 SELECT koldstore.event_id($1 + e.ord, $2), ''put'', %s, pg_catalog.now(), e.image FROM pg_catalog.unnest($3) WITH ORDINALITY AS e(image, ord)',
                log, key_json) USING base + rows, lsn, images;
            rows := rows + coalesce(pg_catalog.cardinality(images), 0);
        END LOOP;
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        EXECUTE pg_catalog.format('DROP FUNCTION koldstore.%I()', reader);
    END IF;

    INSERT INTO koldstore.stream (stream_id, schema_name, name, table_oid, log_oid, predicate, predicate_fn, pre_image, retention, start_at, seed_max_seq, created_by)
    OVERRIDING SYSTEM VALUE
    VALUES (id, schema, stream, rel, log_oid, judged, fn::regprocedure, pre_image, keep,
        CASE WHEN earliest THEN 'earliest' ELSE 'now' END, coalesce(base + rows, 0), requester);
    EXECUTE pg_catalog.format('INSERT INTO koldstore.stream_status (stream_id, events, tail_id) SELECT $1, $2, max(id) FROM %s', log) USING id, rows;
    IF later THEN
        PERFORM koldstore.begin_backfill(id, owner, requester);
    END IF;
    INSERT INTO koldstore.wal_marker (kind, subject) VALUES ('stream', id);
    RETURN pg_catalog.jsonb_build_object('stream_id', id, 'log', log, 'backfilled', rows);
END $$;

-- A predicate is evaluated over the columns that it names (see do_create_stream), of which a reference to the row as a whole
-- names none: t IS NOT NULL would be asked of another row.
CREATE FUNCTION koldstore.refuse_whole_row() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- PostgreSQL's own reading of the predicate is in the view that SHOW STREAMS has it from.
    IF EXISTS (SELECT FROM pg_class c JOIN pg_rewrite r ON r.ev_class = c.oid
               WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relname = 'when_' || NEW.stream_id AND r.ev_action::text ~ ':varattno 0 ') THEN
        RAISE EXCEPTION 'the predicate is about the row as a whole' USING ERRCODE = '0A000',
            HINT = 'Compare columns, or ROW(…) with the columns that count.';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER koldproxy_whole_row BEFORE INSERT ON koldstore.stream FOR EACH ROW EXECUTE FUNCTION koldstore.refuse_whole_row();

-- find_stream is schema_of_stream for statements: no such stream is an error, or with if_exists a notice and NULL.
CREATE FUNCTION koldstore.find_stream(stream_schema text, stream_name text, if_exists boolean) RETURNS name
LANGUAGE plpgsql AS $$
DECLARE
    schema name := koldstore.schema_of_stream(stream_schema, stream_name);
BEGIN
    IF schema IS NULL AND if_exists THEN
        RAISE NOTICE 'stream "%" does not exist, skipping', stream_name;
    ELSIF schema IS NULL THEN
        RAISE EXCEPTION 'stream "%" does not exist', stream_name USING ERRCODE = '42704';
    END IF;
    RETURN schema;
END $$;

CREATE PROCEDURE koldstore.drop_stream(stream_schema text, stream_name text, if_exists boolean DEFAULT false)
LANGUAGE plpgsql AS $$
DECLARE
    schema name := CASE WHEN koldstore.assert_writable('DROP STREAM') THEN koldstore.find_stream(stream_schema, stream_name, if_exists) END;
BEGIN
    IF schema IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO koldstore.command (verb, args) VALUES ('drop_stream', pg_catalog.jsonb_build_object('schema', schema, 'name', stream_name));
END $$;

-- As in do_unmanage_table, notices are kept back.
CREATE FUNCTION koldstore.do_drop_stream(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
DECLARE
    s koldstore.stream;
BEGIN
    SELECT * INTO s FROM koldstore.stream t WHERE t.schema_name = args ->> 'schema' AND t.name = args ->> 'name' FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stream "%" does not exist', args ->> 'name' USING ERRCODE = '42704';
    ELSIF coalesce(koldstore.is_owner(requester, s.table_oid),
            (SELECT pg_catalog.pg_has_role(requester, r.oid, 'USAGE') FROM pg_catalog.pg_roles r WHERE r.rolname = s.created_by)) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of stream %', s.name USING ERRCODE = '42501', HINT = 'A stream belongs to the owner of its table.';
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = s.log_oid) THEN
        EXECUTE pg_catalog.format('DROP TABLE %s', s.log_oid::regclass);
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.oid = s.predicate_fn) THEN
        EXECUTE pg_catalog.format('DROP FUNCTION %s', s.predicate_fn::regprocedure);
    END IF;
    EXECUTE pg_catalog.format('DROP VIEW IF EXISTS koldstore.%I', 'when_' || s.stream_id);
    EXECUTE pg_catalog.format('DROP FUNCTION IF EXISTS koldstore.%I(text)', 'row_' || s.stream_id);
    EXECUTE pg_catalog.format('DROP FUNCTION IF EXISTS koldstore.%I(text[], bigint)', 'reader_' || s.stream_id);
    UPDATE koldstore.job j SET status = 'cancelled', ended_at = pg_catalog.clock_timestamp()
    WHERE j.job_id = s.seed_job AND j.status IN ('queued', 'running');
    DELETE FROM koldstore.seed_touched t WHERE t.stream_id = s.stream_id;
    DELETE FROM koldstore.stream t WHERE t.stream_id = s.stream_id;
    PERFORM koldstore.unpublish(s.table_oid);
    RETURN pg_catalog.jsonb_build_object('stream_id', s.stream_id);
END $$;

-- shown_predicate is a stream's predicate with today's names of columns: PostgreSQL writes out a view's definition anew each time. A view
-- that is dropped between the look at the catalog and the writing out, by DROP STREAM, is an error of the latter.
CREATE FUNCTION koldstore.shown_predicate(stream bigint, stored text) RETURNS text
LANGUAGE plpgsql STABLE SET standard_conforming_strings TO on AS $$
BEGIN
    RETURN coalesce((SELECT pg_catalog.replace(pg_catalog.substring(pg_catalog.pg_get_viewdef(c.oid), '^\s*SELECT (.*) AS predicate\s+FROM '), '_ks_when.', '')
                     FROM pg_catalog.pg_class c
                     WHERE c.relnamespace OPERATOR(pg_catalog.=) 'koldstore'::pg_catalog.regnamespace::pg_catalog.oid
                       AND c.relname OPERATOR(pg_catalog.=) ('when_' OPERATOR(pg_catalog.||) stream)::pg_catalog.name AND c.relkind OPERATOR(pg_catalog.=) 'v'), stored);
EXCEPTION WHEN internal_error OR undefined_table THEN -- could not open relation
    RETURN stored;
END $$;

-- show_streams is what SHOW STREAMS becomes; live is what the koldproxy instance at hand knows about consumers and lag:
-- {"schema.stream": {"consumers": n, "lag": n}}. Nobody can say how far live push is with a stream that captures nothing any more.
CREATE FUNCTION koldstore.show_streams(live jsonb DEFAULT '{}')
RETURNS TABLE (name text, "table" text, predicate text, consumers integer, lag bigint, state text, events_lost bigint, retention interval)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT CASE WHEN s.schema_name = ANY (pg_catalog.current_schemas(false)) THEN pg_catalog.quote_ident(s.name)
                ELSE pg_catalog.quote_ident(s.schema_name) || '.' || pg_catalog.quote_ident(s.name) END,
           s.table_oid::regclass::text, koldstore.shown_predicate(s.stream_id, s.predicate),
           coalesce((l.entry ->> 'consumers')::integer, 0), CASE WHEN s.state <> 'broken' THEN (l.entry ->> 'lag')::bigint END,
           -- A hole shows until retention has passed it.
           CASE WHEN s.state = 'active' AND s.gap IS NOT NULL AND (s.floor IS NULL OR s.gap ->> 'after' IS NULL OR s.floor < s.gap ->> 'after') THEN 'gap' ELSE s.state END,
           t.events_lost, s.retention
    FROM koldstore.visible_stream s
    JOIN koldstore.visible_stream_status t USING (stream_id)
    CROSS JOIN LATERAL (SELECT live -> (s.schema_name || '.' || s.name)) AS l(entry)
    ORDER BY s.schema_name, s.name;
END;

-- expired is the last position that a log shows nothing of any more, or never did, whether or not the sweep has removed it.
CREATE FUNCTION koldstore.expired(stream bigint) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s  koldstore.stream;
    id text;
BEGIN
    SELECT * INTO s FROM koldstore.stream t WHERE t.stream_id = stream;
    IF s.retention IS NOT NULL THEN
        EXECUTE format('SELECT max(id) FROM %1$s WHERE ts <= $1 AND id < coalesce((SELECT id FROM %1$s WHERE ts > $1 ORDER BY id LIMIT 1), ''~'')', s.log_oid::regclass)
            INTO id USING statement_timestamp() - s.retention;
    END IF;
    RETURN greatest(id COLLATE "C", s.began);
END $$;

-- stream_floor is the highest event id that retention has removed: a consumer whose last id is below it has missed events.
CREATE FUNCTION koldstore.stream_floor(name text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_floor text;
    log         regclass;
    part        text[] := pg_catalog.parse_ident(stream_floor.name);
BEGIN
    part[pg_catalog.array_length(part, 1)] := '_stream_' || part[pg_catalog.array_length(part, 1)];
    log := pg_catalog.to_regclass((SELECT pg_catalog.string_agg(pg_catalog.quote_ident(p), '.') FROM pg_catalog.unnest(part) AS p));
    SELECT greatest(s.floor, koldstore.expired(s.stream_id)) INTO found_floor FROM koldstore.visible_stream s WHERE s.log_oid = log;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stream "%" does not exist', stream_floor.name USING ERRCODE = '42704';
    END IF;
    RETURN found_floor;
END $$;

-- Dropping or altering a log by hand is refused, and a stream whose table or predicate is dropped underneath it is marked
-- broken. Event triggers need a superuser: without one, ownership alone protects logs (docs/guarantees.md).
CREATE FUNCTION koldstore.refuse_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    hit  text;
    self boolean := koldstore.is_service_role();
BEGIN
    IF self THEN
        NULL; -- koldproxy itself may
    ELSIF TG_EVENT = 'sql_drop' THEN
        SELECT coalesce(d.object_name, d.address_names[2]) INTO hit FROM pg_catalog.pg_event_trigger_dropped_objects() d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND (koldstore.is_log(d.objid) OR koldstore.is_log_partition(d.schema_name, d.object_name))
           -- What is dropped of a table is named by schema, table and its own name.
           OR d.object_type IN ('trigger', 'policy', 'rule', 'table constraint') AND EXISTS (
                SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = d.address_names[1] AND c.relname = d.address_names[2] AND koldstore.is_log(c.oid))
        LIMIT 1;
    ELSE
        SELECT c.relname INTO hit
        FROM pg_catalog.pg_event_trigger_ddl_commands() d
        LEFT JOIN pg_catalog.pg_trigger t ON d.classid = 'pg_catalog.pg_trigger'::regclass AND t.oid = d.objid
        LEFT JOIN pg_catalog.pg_policy p ON d.classid = 'pg_catalog.pg_policy'::regclass AND p.oid = d.objid
        LEFT JOIN pg_catalog.pg_rewrite w ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND w.oid = d.objid
        LEFT JOIN pg_catalog.pg_index i ON d.classid = 'pg_catalog.pg_class'::regclass AND i.indexrelid = d.objid
        JOIN pg_catalog.pg_class c ON c.oid = coalesce(t.tgrelid, p.polrelid, w.ev_class, i.indrelid, d.objid)
        WHERE koldstore.is_log(c.oid) LIMIT 1;
    END IF;
    IF hit IS NOT NULL THEN
        RAISE EXCEPTION 'cannot % "%": it is the log of a stream', pg_catalog.lower(TG_TAG), hit
            USING ERRCODE = '42809', HINT = 'DROP STREAM removes a stream and its log together.';
    END IF;
    -- Columns are also renamed by ALTER VIEW, altered through the type of a typed table, and dropped along with their type.
    IF TG_EVENT <> 'sql_drop' THEN
        PERFORM koldstore.note_altered(d.objid) FROM pg_catalog.pg_event_trigger_ddl_commands() d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND pg_catalog.starts_with(TG_TAG, 'ALTER ');
        PERFORM koldstore.note_altered(c.oid) FROM pg_catalog.pg_class c WHERE c.reloftype <> 0 AND TG_TAG = 'ALTER TYPE';
    ELSE
        PERFORM koldstore.note_altered(d.objid) FROM pg_catalog.pg_event_trigger_dropped_objects() d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objsubid > 0;
        IF self THEN
            RETURN;
        END IF;
        PERFORM koldstore.note_dropped(pg_catalog.array_agg(d.objid)) FROM pg_catalog.pg_event_trigger_dropped_objects() d
        WHERE d.classid IN ('pg_catalog.pg_class'::regclass, 'pg_catalog.pg_proc'::regclass);
    END IF;
END $$;

-- refuse_log_ddl answers the owner of a stream's table, who does not own the log, before PostgreSQL does: with the reason and not
-- with his lack of rights. There is no other way to know the table at this point than to read the statement; where its name is not
-- found PostgreSQL's refusal stands.
CREATE FUNCTION koldstore.refuse_log_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET standard_conforming_strings = on AS $$
DECLARE
    gap  text := '(?:\s|--[^\n]*\n|/\*.*?\*/)';
    part text := '(?:"(?:[^"]|"")+"|[[:alnum:]_$]+)';
    log  oid;
BEGIN
    IF koldstore.is_service_role() THEN
        RETURN;
    END IF;
    log := pg_catalog.to_regclass((pg_catalog.regexp_match(pg_catalog.left(pg_catalog.current_query(), 2000), pg_catalog.format(
        '^%1$s*%2$s%1$s+(?:IF%1$s+EXISTS%1$s+)?(?:ONLY%1$s+)?(%3$s(?:\s*\.\s*%3$s)?)', gap, pg_catalog.replace(TG_TAG, ' ', gap || '+'), part), 'i'))[1]);
    IF koldstore.is_log(log) AND pg_catalog.has_table_privilege(log, 'TRUNCATE') THEN
        RAISE EXCEPTION 'cannot % "%": it is the log of a stream', pg_catalog.lower(TG_TAG), koldstore.name_of(log)
            USING ERRCODE = '42809', HINT = 'DROP STREAM removes a stream and its log together.';
    END IF;
END $$;

-- refuse_publication_ddl keeps koldproxy's publication as it is: what leaves it is lost without a trace in the log.
CREATE FUNCTION koldstore.refuse_publication_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    hit boolean;
BEGIN
    IF koldstore.is_service_role() THEN
        RETURN;
    END IF;
    IF TG_EVENT = 'sql_drop' THEN
        SELECT EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d
            WHERE d.object_type = 'publication' AND d.object_name = 'koldproxy'
               OR d.object_type = 'publication relation' AND d.original AND d.address_args[1] = 'koldproxy') INTO hit;
    ELSE
        SELECT EXISTS (SELECT FROM pg_event_trigger_ddl_commands() d
            LEFT JOIN pg_publication_rel r ON d.classid = 'pg_publication_rel'::regclass AND r.oid = d.objid
            JOIN pg_publication p ON p.oid = CASE WHEN d.classid = 'pg_publication'::regclass THEN d.objid ELSE r.prpubid END
            WHERE p.pubname = 'koldproxy') OR NOT EXISTS (SELECT FROM pg_publication p WHERE p.pubname = 'koldproxy') INTO hit; -- renamed
    END IF;
    IF hit THEN
        RAISE EXCEPTION 'cannot change publication "koldproxy": streams and change feeds are read through it'
            USING ERRCODE = '42809', HINT = 'DROP STREAM and koldstore.unmanage_table take tables out of it.';
    END IF;
END $$;

-- refuse_function_ddl keeps the functions of this schema as they are. Some belong to others (predicates to the owners of
-- tables, eval_rows to a role that code of users runs as), and an owner could turn SECURITY DEFINER off.
CREATE FUNCTION koldstore.refuse_function_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    hit boolean;
BEGIN
    IF koldstore.is_service_role() THEN
        RETURN;
    END IF;
    IF TG_EVENT = 'sql_drop' THEN
        -- The predicate goes with what it depends on; on its own it does not.
        SELECT EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d WHERE d.classid = 'pg_proc'::regclass AND d.schema_name = 'koldstore' AND d.original) INTO hit;
    ELSE
        SELECT EXISTS (SELECT FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_proc'::regclass AND d.schema_name = 'koldstore') INTO hit;
    END IF;
    IF hit THEN
        RAISE EXCEPTION 'functions of schema koldstore belong to koldproxy' USING ERRCODE = '42501';
    END IF;
END $$;

-- refuse_reference keeps foreign keys from referring to logs: events go when they have expired, and the log with its stream.
CREATE FUNCTION koldstore.refuse_reference() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    log oid;
BEGIN
    SELECT k.confrelid INTO log FROM pg_event_trigger_ddl_commands() d JOIN pg_constraint k ON k.conrelid = d.objid AND k.contype = 'f'
    WHERE d.classid = 'pg_class'::regclass AND koldstore.is_log(k.confrelid) LIMIT 1;
    IF log IS NOT NULL THEN
        RAISE EXCEPTION 'a foreign key cannot refer to "%": it is the log of a stream', koldstore.name_of(log)
            USING ERRCODE = '42809', HINT = 'Events go when they have expired, and with DROP STREAM. Keep their ids without a foreign key.';
    END IF;
END $$;

CREATE FUNCTION koldstore.is_log_partition(schema text, name text) RETURNS boolean
LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT schema = 'koldstore' AND pg_catalog.starts_with(name, '_stream_');
END;

-- is_log says whether a relation is the log of a stream or a part of one. A part that is being taken away, or renamed, is known
-- by what is left of it.
CREATE FUNCTION koldstore.is_log(rel oid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM koldstore.stream s WHERE s.log_oid = rel)
        OR EXISTS (SELECT FROM koldstore.stream s JOIN pg_inherits i ON i.inhparent = s.log_oid WHERE i.inhrelid = rel)
        OR EXISTS (SELECT FROM pg_class c WHERE c.oid = rel AND koldstore.is_log_partition(c.relnamespace::regnamespace::text, c.relname))
$$;

-- note_dropped marks what lost its table or predicate. Anybody may call it, so it believes only what the catalog confirms: a column that is
-- dropped with CASCADE takes predicates along, and goes by the table's OID in the list of what was dropped.
CREATE FUNCTION koldstore.note_dropped(dropped oid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE koldstore.stream s
    SET state = 'broken', reason = CASE WHEN NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.table_oid) THEN 'its table was dropped' ELSE 'its predicate was dropped with what it depended on' END
    WHERE (s.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.table_oid))
       OR (s.predicate_fn = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = s.predicate_fn));
    UPDATE koldstore.managed_table m SET state = 'broken', reason = 'the table was dropped'
    WHERE m.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = m.table_oid);
    DELETE FROM koldstore.published_table t
    WHERE t.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.table_oid);
$$;

-- retyped are the columns of a captured table whose type is not that of its shape.
CREATE FUNCTION koldstore.retyped(rel oid) RETURNS TABLE (name name, in_key boolean)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT a.attname, EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = rel AND i.indisprimary AND a.attnum = ANY (i.indkey::int2[]))
    FROM koldstore.published_table t, pg_catalog.jsonb_to_recordset(t.shape) AS old(attnum int2, type bigint, typmod integer)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = rel AND a.attnum = old.attnum AND NOT a.attisdropped
    WHERE t.table_oid = rel AND (a.atttypid <> old.type::oid OR a.atttypmod <> old.typmod);
END;

-- note_altered takes a table out of the publication that can no longer be captured, before the application's next UPDATE
-- or DELETE is refused because of it, and marks what depended on it. It believes only what the catalog confirms.
CREATE FUNCTION koldstore.note_altered(rel oid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    why       text;
    rewritten text;
    filled    boolean;
    renamed   text;
BEGIN
    IF NOT EXISTS (SELECT FROM koldstore.published_table t WHERE t.table_oid = rel) THEN
        RETURN;
    END IF;
    SELECT CASE WHEN c.relreplident <> 'f' THEN 'the replica identity of its table was changed'
                WHEN NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = rel AND i.indisprimary) THEN 'the primary key of its table was dropped'
                WHEN EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = rel AND a.attgenerated <> '' AND NOT a.attisdropped)
                    THEN 'its table has a generated column now, which this version does not support'
                WHEN c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE rel IN (i.inhparent, i.inhrelid)) THEN 'its table is part of an inheritance tree now, which this version does not support'
                -- What a mirror is made of; with cold rows, their keys are in files.
                WHEN EXISTS (SELECT FROM koldstore.retyped(rel) r WHERE r.in_key AND EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = rel))
                    THEN 'the type of a column of its primary key was changed'
           END INTO why
    FROM pg_class c WHERE c.oid = rel;
    IF why IS NULL THEN
        -- Every row was rewritten, and the write-ahead log does not show it.
        SELECT 'the type of column ' || r.name || ' was changed' INTO rewritten FROM koldstore.retyped(rel) r LIMIT 1;
        filled := EXISTS (SELECT FROM pg_attribute a, koldstore.published_table t WHERE a.attrelid = rel AND t.table_oid = rel AND a.attnum > 0
                              AND NOT a.attisdropped AND (a.atthasdef OR a.attidentity <> '') AND a.attgenerated = '' AND NOT t.shape @> jsonb_build_array(jsonb_build_object('attnum', a.attnum)));
        -- Streams follow new names, and a mirror those of columns that are not its own.
        SELECT format('column "%s" of its primary key was renamed to "%s"', old.name, a.attname) INTO renamed
        FROM koldstore.published_table t, jsonb_to_recordset(t.shape) AS old(attnum int2, name name)
        JOIN pg_attribute a ON a.attrelid = rel AND a.attnum = old.attnum AND a.attname <> old.name
        WHERE t.table_oid = rel AND EXISTS (SELECT FROM pg_index i WHERE i.indrelid = rel AND i.indisprimary AND a.attnum = ANY (i.indkey::int2[]))
          AND EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = rel AND m.state <> 'broken') LIMIT 1;
        IF renamed IS NOT NULL THEN
            RAISE WARNING 'the change feed of table % ends here: %', rel::regclass, renamed
                USING HINT = 'Rename the column back and call koldstore.heal_table, or begin anew with koldstore.unmanage_table and koldstore.manage_table.';
        END IF;
        PERFORM koldstore.note_shape(rel);
        IF rewritten IS NOT NULL OR filled THEN
            PERFORM koldstore.mark_heal(rel, rewritten);
        END IF;
        RETURN;
    END IF;
    IF koldstore.is_published(rel) THEN
        EXECUTE format('ALTER PUBLICATION koldproxy DROP TABLE ONLY %s', rel::regclass);
    END IF;
    DELETE FROM koldstore.published_table t WHERE t.table_oid = rel;
    UPDATE koldstore.stream s SET state = 'broken', reason = why WHERE s.table_oid = rel;
    UPDATE koldstore.managed_table m SET state = 'broken', reason = why WHERE m.table_oid = rel;
    RAISE WARNING 'changes of table % are no longer captured: %', rel::regclass, why USING HINT = 'Streams and the change feed of this table are broken from here on.';
END $$;

-- note_labels looks at the tables with a column of a type that somebody has altered.
CREATE FUNCTION koldstore.note_labels() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM koldstore.note_altered(t.table_oid) FROM koldstore.published_table t
    WHERE EXISTS (SELECT FROM pg_attribute a CROSS JOIN LATERAL koldstore.enums_in(a.atttypid) WHERE a.attrelid = t.table_oid AND a.attnum > 0 AND a.atttypid >= 16384)
      AND koldstore.shape_of(t.table_oid) <> t.shape;
END $$;

-- note_children looks at the tables that have got a child: its rows are theirs, and not in the log as such.
CREATE FUNCTION koldstore.note_children() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM koldstore.note_altered(i.inhparent)
    FROM (SELECT DISTINCT d.objid FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_class'::regclass) AS d
    JOIN pg_inherits i ON i.inhrelid = d.objid JOIN pg_class c ON c.oid = i.inhparent AND c.relkind = 'r';
END $$;

-- altered_tables are captured tables that are not as they were when they were looked at last. Where event triggers look at every ALTER
-- TABLE there are none.
CREATE FUNCTION koldstore.altered_tables() RETURNS SETOF oid
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT t.table_oid FROM koldstore.published_table t JOIN pg_catalog.pg_class c ON c.oid = t.table_oid
    WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_event_trigger e WHERE e.evtname = 'koldproxy_ddl' AND e.evtenabled = 'A')
      AND (c.relreplident <> 'f' OR koldstore.shape_of(c.oid) <> t.shape
           OR NOT EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
           OR EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)
           OR c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid)));
END;

DO $$
BEGIN
    IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
        CREATE EVENT TRIGGER koldproxy_drop ON sql_drop EXECUTE FUNCTION koldstore.refuse_ddl();
        CREATE EVENT TRIGGER koldproxy_ddl ON ddl_command_end
            WHEN TAG IN ('CREATE TABLE', 'ALTER TABLE', 'ALTER VIEW', 'ALTER MATERIALIZED VIEW', 'ALTER FOREIGN TABLE', 'ALTER TYPE',
                         'ALTER TRIGGER', 'CREATE TRIGGER', 'CREATE INDEX', 'CREATE POLICY', 'ALTER POLICY', 'CREATE RULE')
            EXECUTE FUNCTION koldstore.refuse_ddl();
        CREATE EVENT TRIGGER koldproxy_log ON ddl_command_start WHEN TAG IN ('ALTER TABLE', 'DROP TABLE') EXECUTE FUNCTION koldstore.refuse_log_ddl();
        CREATE EVENT TRIGGER koldproxy_reference ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'CREATE SCHEMA', 'ALTER TABLE') EXECUTE FUNCTION koldstore.refuse_reference();
        CREATE EVENT TRIGGER koldproxy_labels ON ddl_command_end WHEN TAG IN ('ALTER TYPE') EXECUTE FUNCTION koldstore.note_labels();
        CREATE EVENT TRIGGER koldproxy_children ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'CREATE FOREIGN TABLE', 'CREATE SCHEMA', 'ALTER TABLE', 'ALTER FOREIGN TABLE')
            EXECUTE FUNCTION koldstore.note_children();
        CREATE EVENT TRIGGER koldproxy_publication ON ddl_command_end WHEN TAG IN ('ALTER PUBLICATION')
            EXECUTE FUNCTION koldstore.refuse_publication_ddl();
        CREATE EVENT TRIGGER koldproxy_publication_drop ON sql_drop WHEN TAG IN ('ALTER PUBLICATION', 'DROP PUBLICATION', 'DROP OWNED')
            EXECUTE FUNCTION koldstore.refuse_publication_ddl();
        CREATE EVENT TRIGGER koldproxy_function ON ddl_command_end
            WHEN TAG IN ('CREATE FUNCTION', 'CREATE PROCEDURE', 'ALTER FUNCTION', 'ALTER PROCEDURE', 'ALTER ROUTINE')
            EXECUTE FUNCTION koldstore.refuse_function_ddl();
        CREATE EVENT TRIGGER koldproxy_function_drop ON sql_drop EXECUTE FUNCTION koldstore.refuse_function_ddl();
        ALTER EVENT TRIGGER koldproxy_function ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_function_drop ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_publication ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_publication_drop ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_drop ENABLE ALWAYS; -- also under session_replication_role = replica
        ALTER EVENT TRIGGER koldproxy_ddl ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_log ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_reference ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_labels ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_children ENABLE ALWAYS;
    END IF;
END $$;

REVOKE ALL ON FUNCTION koldstore.do_open_probe, koldstore.close_probe, koldstore.do_create_stream, koldstore.refuse_whole_row, koldstore.do_drop_stream,
    koldstore.note_labels FROM PUBLIC;

---- create above / drop below ----

DROP EVENT TRIGGER IF EXISTS koldproxy_drop;
DROP EVENT TRIGGER IF EXISTS koldproxy_ddl;
DROP EVENT TRIGGER IF EXISTS koldproxy_log;
DROP EVENT TRIGGER IF EXISTS koldproxy_reference;
DROP EVENT TRIGGER IF EXISTS koldproxy_labels;
DROP EVENT TRIGGER IF EXISTS koldproxy_children;
DROP EVENT TRIGGER IF EXISTS koldproxy_function;
DROP EVENT TRIGGER IF EXISTS koldproxy_function_drop;
DROP EVENT TRIGGER IF EXISTS koldproxy_publication;
DROP EVENT TRIGGER IF EXISTS koldproxy_publication_drop;
DROP FUNCTION koldstore.altered_tables, koldstore.note_children, koldstore.note_labels, koldstore.note_altered, koldstore.retyped, koldstore.note_dropped,
    koldstore.is_log, koldstore.is_log_partition, koldstore.refuse_reference,
    koldstore.refuse_function_ddl, koldstore.refuse_publication_ddl, koldstore.refuse_log_ddl, koldstore.refuse_ddl, koldstore.stream_floor,
    koldstore.expired, koldstore.show_streams, koldstore.shown_predicate, koldstore.do_drop_stream;
DROP PROCEDURE koldstore.drop_stream;
DROP TRIGGER koldproxy_whole_row ON koldstore.stream;
DROP TRIGGER koldproxy_probe ON koldstore.command_log;
DROP FUNCTION koldstore.find_stream, koldstore.refuse_whole_row, koldstore.do_create_stream, koldstore.check_stream_options, koldstore.retained,
    koldstore.parse_retention, koldstore.schema_of_stream, koldstore.stream_exists, koldstore.close_probe, koldstore.do_open_probe;
DROP PROCEDURE koldstore.create_stream;
