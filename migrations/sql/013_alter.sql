-- Statements that change what exists: ALTER STREAM and ALTER TABLE … SET (koldstore_…).

-- alter_stream is what ALTER STREAM becomes. An option that is null is reset to its default.
CREATE PROCEDURE koldstore.alter_stream(stream_schema text, stream_name text, options jsonb, if_exists boolean DEFAULT false)
LANGUAGE plpgsql AS $$
DECLARE
    schema name := CASE WHEN koldstore.assert_writable('ALTER STREAM') THEN koldstore.find_stream(stream_schema, stream_name, if_exists) END;
BEGIN
    IF schema IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO koldstore.command (verb, args)
    VALUES ('alter_stream', pg_catalog.jsonb_build_object('schema', schema, 'name', stream_name, 'options', options));
END $$;

CREATE FUNCTION koldstore.do_alter_stream(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s              koldstore.stream;
    option         record;
    keep           interval;
    timeout_before text := pg_catalog.current_setting('lock_timeout');
BEGIN
    SELECT * INTO s FROM koldstore.stream t WHERE t.schema_name = args ->> 'schema' AND t.name = args ->> 'name' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stream "%" does not exist', args ->> 'name' USING ERRCODE = '42704';
    ELSIF coalesce(koldstore.is_owner(requester, s.table_oid),
            (SELECT pg_catalog.pg_has_role(requester, r.oid, 'USAGE') FROM pg_catalog.pg_roles r WHERE r.rolname = s.created_by)) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of stream %', s.name USING ERRCODE = '42501', HINT = 'A stream belongs to the owner of its table.';
    END IF;
    keep := s.retention;
    FOR option IN SELECT o.key, o.value FROM pg_catalog.jsonb_each_text(args -> 'options') AS o LOOP
        IF option.key = 'retention' THEN
            keep := koldstore.parse_retention(option.value);
        ELSIF option.key IN ('start', 'pre_image') THEN
            RAISE EXCEPTION 'option "%" of a stream cannot be changed', option.key USING ERRCODE = '22023',
                HINT = 'Only retention can. DROP STREAM and CREATE STREAM begin a new log.';
        ELSE
            RAISE EXCEPTION 'unrecognized stream option "%"', option.key USING ERRCODE = '22023', HINT = 'The option that can be changed is retention.';
        END IF;
    END LOOP;
    UPDATE koldstore.stream t SET retention = keep WHERE t.stream_id = s.stream_id;
    IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = s.log_oid) THEN
        -- The policy takes a lock that waits for readers of the log, behind which the applier has to wait: a second at a time.
        FOR attempt IN 1 .. 15 LOOP
            BEGIN
                PERFORM pg_catalog.set_config('lock_timeout', '1s', true);
                EXECUTE pg_catalog.format('ALTER POLICY koldproxy_readers ON %s USING (%s)',
                    s.log_oid::pg_catalog.regclass, koldstore.readers_of(s.table_oid, koldstore.retained(keep)));
                PERFORM pg_catalog.set_config('lock_timeout', timeout_before, true);
                EXIT;
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                IF attempt = 15 THEN
                    RAISE EXCEPTION 'could not get a moment without readers of the log of stream %', s.name
                        USING ERRCODE = '55P03', HINT = 'Wait for long queries on the log to end, then try again.';
                END IF;
                PERFORM pg_catalog.pg_sleep(0.2);
            END;
        END LOOP;
    END IF;
    RETURN pg_catalog.jsonb_build_object('stream_id', s.stream_id, 'retention', keep::text);
END $$;

-- alter_table_set is what ALTER TABLE … SET (koldstore_… = …) becomes: the other spelling of manage_table, which on a managed
-- table changes the options that are given.
CREATE PROCEDURE koldstore.alter_table_set(table_schema text, table_name text, options jsonb, if_exists boolean DEFAULT false)
LANGUAGE plpgsql AS $$
DECLARE
    shown text := CASE WHEN table_schema IS NULL THEN table_name ELSE table_schema || '.' || table_name END;
    rel   regclass := pg_catalog.to_regclass(CASE WHEN table_schema IS NULL THEN '' ELSE pg_catalog.quote_ident(table_schema) || '.' END || pg_catalog.quote_ident(table_name));
BEGIN
    PERFORM koldstore.assert_writable('ALTER TABLE');
    IF rel IS NULL THEN
        IF if_exists THEN
            RAISE NOTICE 'relation "%" does not exist, skipping', shown;
            RETURN;
        END IF;
        RAISE EXCEPTION 'relation "%" does not exist', shown USING ERRCODE = '42P01';
    END IF;
    INSERT INTO koldstore.command (verb, args) VALUES ('alter_table', pg_catalog.jsonb_build_object('table', rel::oid, 'options', options));
END $$;

-- feed_option reads one koldstore_… option: its type is that of manage_table's argument.
CREATE FUNCTION koldstore.feed_option(name text, value text) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    CASE name
        WHEN 'koldstore_enabled' THEN RETURN pg_catalog.to_jsonb(value::boolean);
        WHEN 'koldstore_storage' THEN RETURN pg_catalog.to_jsonb(value);
        WHEN 'koldstore_move_after' THEN RETURN pg_catalog.to_jsonb(value::interval::text);
        WHEN 'koldstore_hot_row_limit', 'koldstore_min_flush_rows', 'koldstore_max_rows_per_file' THEN RETURN pg_catalog.to_jsonb(value::integer);
        ELSE
            RAISE EXCEPTION 'unrecognized option "%"', name USING ERRCODE = '22023',
                HINT = 'The options are koldstore_enabled, koldstore_storage, koldstore_hot_row_limit, koldstore_move_after, koldstore_min_flush_rows and koldstore_max_rows_per_file.';
    END CASE;
EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range OR datetime_field_overflow OR invalid_datetime_format OR interval_field_overflow THEN
    RAISE EXCEPTION 'invalid value for option "%": %', name, value USING ERRCODE = '22023';
END $$;

CREATE FUNCTION koldstore.do_alter_table(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rel      oid := (args ->> 'table')::oid;
    given    jsonb := '{}';
    option   record;
    m        koldstore.managed_table;
    settings jsonb;
BEGIN
    FOR option IN SELECT o.key, o.value FROM pg_catalog.jsonb_each_text(args -> 'options') AS o LOOP
        given := given || pg_catalog.jsonb_build_object(
            pg_catalog.regexp_replace(option.key, '^koldstore_', ''), koldstore.feed_option(option.key, option.value));
    END LOOP;
    IF koldstore.is_owner(requester, rel) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of table %', coalesce(koldstore.name_of(rel), 'NULL') USING ERRCODE = '42501';
    ELSIF NOT coalesce((given ->> 'enabled')::boolean, true) THEN
        RAISE EXCEPTION 'koldstore_enabled cannot be set to false' USING ERRCODE = '0A000',
            HINT = pg_catalog.format('SELECT koldstore.unmanage_table(%L) ends the change feed of a table.', rel::pg_catalog.regclass);
    END IF;

    IF NOT EXISTS (SELECT FROM koldstore.managed_table t WHERE t.table_oid = rel) THEN
        IF given ->> 'enabled' IS NULL THEN
            RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(rel) USING ERRCODE = '55000',
                HINT = 'Set koldstore_enabled = true as well to give the table a change feed.';
        END IF;
        -- The defaults of manage_table.
        RETURN koldstore.do_manage_table(requester, pg_catalog.jsonb_build_object(
            'table', rel, 'storage', 'default', 'min_flush_rows', 1000, 'max_rows_per_file', 100000, 'auto_flush', true) || (given - 'enabled'));
    END IF;

    m := koldstore.managed(requester, args);
    IF given ->> 'storage' <> m.storage THEN
        RAISE EXCEPTION 'the storage of managed table "%" cannot be changed', koldstore.name_of(rel) USING ERRCODE = '55000',
            DETAIL = pg_catalog.format('Its cold rows are in storage "%s".', m.storage),
            HINT = 'Use koldstore.unmanage_table first to begin anew in another storage.';
    END IF;
    settings := pg_catalog.jsonb_build_object('storage', m.storage, 'min_flush_rows', m.min_flush_rows, 'max_rows_per_file', m.max_rows_per_file, 'auto_flush', m.auto_flush);
    -- hot_row_limit and move_after exclude each other: naming one takes the other's place.
    IF NOT given ?| ARRAY['hot_row_limit', 'move_after'] THEN
        settings := settings || pg_catalog.jsonb_build_object('hot_row_limit', m.hot_row_limit, 'move_after', m.move_after::text);
    END IF;
    settings := settings || given;
    PERFORM koldstore.check_feed_options(settings);
    UPDATE koldstore.managed_table t
    SET hot_row_limit = (settings ->> 'hot_row_limit')::integer, move_after = (settings ->> 'move_after')::interval,
        min_flush_rows = (settings ->> 'min_flush_rows')::integer, max_rows_per_file = (settings ->> 'max_rows_per_file')::integer
    WHERE t.table_oid = rel;
    NOTIFY koldstore_job;
    RETURN '{"ok": true}';
END $$;

REVOKE ALL ON FUNCTION koldstore.do_alter_stream, koldstore.do_alter_table FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.do_alter_table, koldstore.feed_option, koldstore.do_alter_stream;
DROP PROCEDURE koldstore.alter_table_set, koldstore.alter_stream;
