-- What keeps the applier waiting is named, changes from outside are noticed where there are no event triggers, CREATE STREAM does without
-- the right to create temporary tables, and SHOW STREAMS without an error beside DROP STREAM.

INSERT INTO koldstore.replaced
SELECT pg_catalog.pg_get_functiondef(p.oid), 18 FROM pg_catalog.pg_proc p
WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('async_mirror_status', 'shown_predicate', 'create_stream', 'do_create_stream');

-- apply_waits_for names who has been keeping the applier from a lock for more than 5 seconds; NULL if nobody does.
CREATE FUNCTION koldstore.apply_waits_for() RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.string_agg(DISTINCT
        coalesce('process ' || nullif(b.pid, 0) || coalesce(' (user ' || s.usename || coalesce(', application ' || pg_catalog.quote_literal(nullif(s.application_name, '')), '') || ')', ''),
            'a prepared transaction') || coalesce(', which has a lock on ' || c.oid::pg_catalog.regclass::text, ''), '; ')
    FROM pg_catalog.pg_stat_activity a
    JOIN pg_catalog.pg_locks w ON w.pid = a.pid AND NOT w.granted AND w.waitstart < pg_catalog.clock_timestamp() - interval '5 s'
    LEFT JOIN pg_catalog.pg_locks t ON w.locktype = 'transactionid' AND t.pid = w.pid AND t.locktype = 'tuple'
    LEFT JOIN pg_catalog.pg_class c ON c.oid = coalesce(w.relation, t.relation)
    CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) AS b(pid)
    LEFT JOIN pg_catalog.pg_stat_activity s ON s.pid = b.pid
    WHERE a.application_name = 'koldproxy apply' AND a.datname = pg_catalog.current_database()
      AND a.usesysid = (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'koldstore');
END;

CREATE OR REPLACE FUNCTION koldstore.async_mirror_status() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object(
        -- A slot that is being made is active, and nothing comes through it.
        'slot_name', c.slot_name, 'running', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND c.gap IS NULL, false),
        'healthy', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND s.wal_status <> 'lost' AND c.gap IS NULL AND w.who IS NULL, false), 'gap', c.gap, 'gaps', koldstore.gaps(),
        'waiting_for', coalesce(CASE WHEN c.gap IS NULL OR c.begin_anew THEN koldstore.slot_waits_for() END, w.who),
        'applied_lsn', c.applied_lsn, 'confirmed_lsn', s.confirmed_flush_lsn, 'current_lsn', pg_catalog.pg_current_wal_insert_lsn(),
        'lag_bytes', pg_catalog.pg_current_wal_flush_lsn() - s.confirmed_flush_lsn, 'retained_bytes', pg_catalog.pg_current_wal_insert_lsn() - s.restart_lsn,
        'wal_status', s.wal_status, 'watermark', c.watermark, 'epoch', c.epoch, 'rows_applied', c.rows_applied, 'applied_at', c.applied_at)
    FROM koldstore.checkpoint c LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name AND s.database = pg_catalog.current_database()
    CROSS JOIN (SELECT koldstore.apply_waits_for() AS who) AS w;
END;

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

-- A view that is dropped between the look at the catalog and the writing out of its definition is an error of the latter.
CREATE OR REPLACE FUNCTION koldstore.shown_predicate(stream bigint, stored text) RETURNS text
LANGUAGE plpgsql STABLE SET standard_conforming_strings TO on AS $$
BEGIN
    RETURN coalesce((SELECT pg_catalog.replace(pg_catalog.substring(pg_catalog.pg_get_viewdef(c.oid), '^\s*SELECT (.*) AS predicate\s+FROM '), '_ks_when.', '')
                     FROM pg_catalog.pg_class c
                     WHERE c.relnamespace OPERATOR(pg_catalog.=) 'koldstore'::pg_catalog.regnamespace::pg_catalog.oid
                       AND c.relname OPERATOR(pg_catalog.=) ('when_' OPERATOR(pg_catalog.||) stream)::pg_catalog.name AND c.relkind OPERATOR(pg_catalog.=) 'v'), stored);
EXCEPTION WHEN internal_error OR undefined_table THEN -- could not open relation
    RETURN stored;
END $$;

-- The probe of who may create no temporary tables is in a schema that is there for the length of a transaction.

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
REVOKE ALL ON FUNCTION koldstore.do_open_probe, koldstore.close_probe FROM PUBLIC;

DO $$
DECLARE
    e    record;
    was  text;
    edit text;
BEGIN
    FOR e IN
        VALUES
            ('create_stream', '(\n *)(probe  text;)', '\1place  name := ''pg_temp'';\1\2'),
            ('create_stream', '(\n *)(EXECUTE pg_catalog\.format\(''CREATE) TEMPORARY TABLE %I \(%s\)'', probe, cols\);',
                '\1IF NOT pg_catalog.has_database_privilege(pg_catalog.current_database(), ''TEMPORARY'') THEN' ||
                '\1    SET CONSTRAINTS koldstore.koldproxy_probe DEFERRED;' ||
                '\1    INSERT INTO koldstore.command (verb, args) VALUES (''open_probe'', pg_catalog.jsonb_build_object(''schema'', schema, ''table'', rel::oid))' ||
                '\1    RETURNING result ->> ''schema'' INTO place;' ||
                '\1END IF;\1\2 TABLE %I.%I (%s)'', place, probe, cols);'),
            ('create_stream', 'ON pg_temp\.%I \(\(1\)\)', 'ON %I.%I ((1))'),
            ('create_stream', ', probe, predicate\)', ', place, probe, predicate)'),
            ('create_stream', '''pg_temp\.koldproxy_probe''', 'pg_catalog.quote_ident(place) || ''.koldproxy_probe'''),
            ('create_stream', '''DROP TABLE pg_temp\.%I'', probe', '''DROP TABLE %I.%I'', place, probe'),
            ('do_create_stream', 'c\.relnamespace = pg_catalog\.pg_my_temp_schema\(\)',
                'c.relnamespace IN (pg_catalog.pg_my_temp_schema(), pg_catalog.to_regnamespace(''koldproxy_probe_'' || pg_catalog.pg_backend_pid())::oid)'),
            ('do_create_stream', 'd\.refobjid = c\.reltype\) THEN', 'd.refobjid IN (c.reltype, (SELECT t.reltype FROM pg_catalog.pg_class t WHERE t.oid = rel))) THEN')
    LOOP
        SELECT pg_catalog.pg_get_functiondef(p.oid) INTO STRICT was FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname = e.column1;
        edit := pg_catalog.regexp_replace(was, e.column2, e.column3);
        IF edit = was THEN
            RAISE EXCEPTION 'function % is not what this step expects', e.column1;
        END IF;
        EXECUTE edit;
    END LOOP;
END $$;

---- create above / drop below ----

DO $$
DECLARE
    d text;
BEGIN
    FOR d IN SELECT r.definition FROM koldstore.replaced r WHERE r.step = 18 LOOP
        EXECUTE d;
    END LOOP;
END $$;
DELETE FROM koldstore.replaced WHERE step = 18;
DROP TRIGGER koldproxy_probe ON koldstore.command_log;
DROP FUNCTION koldstore.close_probe, koldstore.do_open_probe, koldstore.altered_tables, koldstore.apply_waits_for;
