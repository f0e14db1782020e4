-- Managed tables and their change feed.

CREATE FUNCTION koldstore.manage_table(
    table_name        regclass,
    storage           text     DEFAULT 'default',
    hot_row_limit     integer  DEFAULT NULL,
    min_flush_rows    integer  DEFAULT 1000,
    max_rows_per_file integer  DEFAULT 100000,
    move_after        interval DEFAULT NULL,
    retention         interval DEFAULT NULL,
    auto_flush        boolean  DEFAULT true
) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args)
    VALUES ('manage_table', pg_catalog.jsonb_build_object(
        'table', table_name::oid, 'storage', storage, 'hot_row_limit', hot_row_limit, 'min_flush_rows', min_flush_rows,
        'max_rows_per_file', max_rows_per_file, 'move_after', move_after::text, 'retention', retention::text, 'auto_flush', auto_flush))
    RETURNING result INTO answer;
    RETURN (answer ->> 'job_id')::uuid;
END $$;
COMMENT ON FUNCTION koldstore.manage_table IS
    'Gives a table a change feed. The mirror is seeded with the rows that are there; the result is the id of the job that does it.';

-- check_feed_options refuses settings of a managed table that make no sense.
CREATE FUNCTION koldstore.check_feed_options(args jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (args ->> 'hot_row_limit')::int < 0 THEN
        RAISE EXCEPTION 'hot_row_limit must be >= 0' USING ERRCODE = '22023';
    ELSIF coalesce((args ->> 'min_flush_rows')::int, 0) < 1 THEN
        RAISE EXCEPTION 'min_flush_rows must be positive' USING ERRCODE = '22023';
    ELSIF coalesce((args ->> 'max_rows_per_file')::int, 0) < 1 THEN
        RAISE EXCEPTION 'max_rows_per_file must be positive' USING ERRCODE = '22023';
    ELSIF (args ->> 'move_after')::interval < interval '0' THEN
        RAISE EXCEPTION 'move_after must not be negative' USING ERRCODE = '22023';
    ELSIF args ->> 'move_after' IS NOT NULL AND args ->> 'hot_row_limit' IS NOT NULL THEN
        RAISE EXCEPTION 'hot_row_limit and move_after exclude each other' USING ERRCODE = '22023', HINT = 'Give one of them.';
    ELSIF (args ->> 'retention')::interval <= interval '0' THEN
        RAISE EXCEPTION 'retention must be positive' USING ERRCODE = '22023', HINT = 'Leave it out (NULL) to keep everything.';
    ELSIF args ->> 'auto_flush' IS NULL THEN
        RAISE EXCEPTION 'auto_flush must be true or false' USING ERRCODE = '22023';
    ELSIF NOT EXISTS (SELECT FROM koldstore.storage s WHERE s.name = args ->> 'storage') THEN
        RAISE EXCEPTION 'storage "%" does not exist', coalesce(args ->> 'storage', 'NULL') USING ERRCODE = '22023',
            HINT = 'The storage of koldproxy''s configuration is named default.';
    END IF;
END $$;

-- base_type follows domains down to what they are made of.
CREATE FUNCTION koldstore.base_type(declared oid, declared_mod integer, OUT type oid, OUT typmod integer)
LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE chain(type, typmod, depth) AS (
        SELECT declared, declared_mod, 0
        UNION ALL
        SELECT t.typbasetype, CASE WHEN t.typtypmod <> -1 THEN t.typtypmod ELSE c.typmod END, c.depth + 1
        FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.type WHERE t.typtype = 'd')
    SELECT c.type, c.typmod FROM chain c ORDER BY c.depth DESC LIMIT 1;
END;

CREATE FUNCTION koldstore.do_manage_table(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rel      oid := (args ->> 'table')::oid;
    schema   name;
    tab      name;
    mirror   text;
    columns  text;
    keys     text;
    reserved text;
    odd      text;
    job      uuid := pg_catalog.gen_random_uuid();
BEGIN
    IF rel IS NULL OR NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = rel) THEN
        RAISE EXCEPTION 'table_name must name a table' USING ERRCODE = '22023';
    END IF;
    PERFORM koldstore.check_table(requester, rel);
    SELECT n.nspname, c.relname INTO schema, tab FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = rel;
    IF EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = rel) THEN
        RAISE EXCEPTION 'table "%" is already managed', tab USING ERRCODE = '55000', HINT = 'Use koldstore.unmanage_table first to begin anew.';
    END IF;
    PERFORM koldstore.check_feed_options(args);

    -- Domains become their base types: the mirror holds what the table has checked, and checks are code of users.
    SELECT pg_catalog.string_agg(pg_catalog.format('%I %s%s NOT NULL', a.attname, pg_catalog.format_type(b.type, b.typmod),
               CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || a.attcollation::pg_catalog.regcollation::text ELSE '' END), ', ' ORDER BY k.ord),
           pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY k.ord),
           pg_catalog.string_agg(a.attname, ', ') FILTER (WHERE a.attname IN ('seq', 'op', 'row_image')),
           pg_catalog.string_agg(pg_catalog.format('%I (%s)', a.attname, pg_catalog.format_type(b.type, b.typmod)), ', ')
               FILTER (WHERE t.typtype NOT IN ('b', 'e', 'r', 'm') OR e.typtype IN ('c', 'd')
                   OR EXISTS (SELECT FROM pg_catalog.pg_range g JOIN pg_catalog.pg_type p ON p.oid = g.rngsubtype
                              WHERE b.type IN (g.rngtypid, g.rngmultitypid) AND p.typtype IN ('c', 'd')))
    INTO columns, keys, reserved, odd
    FROM pg_catalog.pg_index i
    CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, ord)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    CROSS JOIN LATERAL koldstore.base_type(a.atttypid, a.atttypmod) AS b
    JOIN pg_catalog.pg_type t ON t.oid = b.type
    LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
    WHERE i.indrelid = rel AND i.indisprimary AND k.ord <= i.indnkeyatts;
    IF reserved IS NOT NULL THEN
        RAISE EXCEPTION 'table "%" cannot be managed: its primary key has a column named %', tab, reserved
            USING ERRCODE = '55000', DETAIL = 'The mirror uses the names seq, op and row_image itself.';
    END IF;
    IF odd IS NOT NULL THEN
        RAISE EXCEPTION 'table "%" cannot be managed: its primary key has columns of composite types, or made of domains, %', tab, odd USING ERRCODE = '55000';
    END IF;
    SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ') INTO reserved
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = rel AND a.attnum > 0 AND NOT a.attisdropped AND pg_catalog.starts_with(a.attname, '_ks_');
    IF reserved IS NOT NULL THEN
        RAISE EXCEPTION 'table "%" cannot be managed: its columns % begin with _ks_, which segments use themselves', tab, reserved USING ERRCODE = '55000';
    END IF;

    PERFORM koldstore.publish(rel);
    -- Tables of one name in several schemas may be on their way at the same time.
    PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('koldstore.mirror'), pg_catalog.hashtext(tab));
    mirror := koldstore.free_name(tab || '__cl', '__cl');
    IF mirror IS NULL THEN
        mirror := koldstore.free_name(schema || '_' || tab || '__cl', '__cl');
    END IF;
    IF mirror IS NULL THEN
        mirror := koldstore.free_name(tab || '_' || rel || '__cl', '_' || rel || '__cl');
    END IF;
    EXECUTE pg_catalog.format('CREATE TABLE koldstore.%I (%s, seq bigint NOT NULL, op smallint NOT NULL, row_image jsonb, PRIMARY KEY (%s)) WITH (fillfactor = 80)',
        mirror, columns, keys);
    EXECUTE pg_catalog.format('CREATE UNIQUE INDEX ON koldstore.%I (seq)', mirror);
    PERFORM koldstore.guard(pg_catalog.format('koldstore.%I', mirror)::regclass, rel, NULL,
        'Write to the table itself; koldproxy brings its mirror up to date.');
    INSERT INTO koldstore.managed_table (table_oid, schema_name, table_name, mirror_oid, storage, hot_row_limit, min_flush_rows, max_rows_per_file,
        move_after, retention, auto_flush, seed_job, created_by, floor)
    VALUES (rel, schema, tab, pg_catalog.format('koldstore.%I', mirror)::regclass, args ->> 'storage', (args ->> 'hot_row_limit')::int,
        (args ->> 'min_flush_rows')::int, (args ->> 'max_rows_per_file')::int, (args ->> 'move_after')::interval,
        (args ->> 'retention')::interval, (args ->> 'auto_flush')::boolean, job, requester,
        -- A cursor of a feed that this table had before knows nothing of what happened in between.
        (SELECT c.watermark + 1 FROM koldstore.checkpoint c));
    INSERT INTO koldstore.job (job_id, job_type, table_oid, created_by) VALUES (job, 'seed', rel, requester);
    INSERT INTO koldstore.wal_marker (kind, subject) VALUES ('table', rel::bigint);
    RETURN pg_catalog.jsonb_build_object('job_id', job, 'mirror', mirror);
END $$;

-- free_name shortens a name to PostgreSQL's 63 bytes, keeping its ending, and returns it if no relation of schema
-- koldstore has it; otherwise NULL.
CREATE FUNCTION koldstore.free_name(wanted text, ending text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stem text := pg_catalog.left(wanted, -pg_catalog.length(ending));
BEGIN
    WHILE pg_catalog.octet_length(stem || ending) > 63 LOOP
        stem := pg_catalog.left(stem, -1);
    END LOOP;
    RETURN CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relname = stem || ending AND c.relnamespace = 'koldstore'::pg_catalog.regnamespace)
                THEN NULL ELSE stem || ending END;
END $$;

CREATE FUNCTION koldstore.unmanage_table(table_name regclass, drop_cold boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args)
    VALUES ('unmanage_table', pg_catalog.jsonb_build_object('table', table_name::oid, 'drop_cold', drop_cold))
    RETURNING result INTO answer;
    RETURN (answer ->> 'rows')::bigint;
END $$;
COMMENT ON FUNCTION koldstore.unmanage_table IS
    'Ends the change feed of a table and returns how many rows it had. The table itself is not touched. Cold objects stay unless drop_cold.';

-- managed returns the catalog row of a managed table, or raises; the row stays locked until the end of the transaction.
CREATE FUNCTION koldstore.managed(requester name, args jsonb) RETURNS koldstore.managed_table
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rel oid := (args ->> 'table')::oid;
    m   koldstore.managed_table;
BEGIN
    IF koldstore.is_owner(requester, rel) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of table %', coalesce(koldstore.name_of(rel), 'NULL') USING ERRCODE = '42501';
    END IF;
    SELECT * INTO m FROM koldstore.managed_table t WHERE t.table_oid = rel FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(rel) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.manage_table(…) gives a table a change feed.';
    END IF;
    RETURN m;
END $$;

-- A notice that something internal was not there is nothing to whoever calls this.
CREATE FUNCTION koldstore.do_unmanage_table(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
DECLARE
    m    koldstore.managed_table := koldstore.managed(requester, args);
    rows bigint;
    cold bigint;
BEGIN
    EXECUTE pg_catalog.format('SELECT count(*) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO rows;
    SELECT coalesce(sum(s.row_count - s.dead_count), 0) INTO cold FROM koldstore.segment s WHERE s.table_oid = m.table_oid AND s.state = 'active';
    UPDATE koldstore.segment s
    SET state = CASE WHEN (args ->> 'drop_cold')::boolean THEN 'deleted' ELSE 'detached' END, ended_at = pg_catalog.clock_timestamp(), key_hashes = NULL
    WHERE s.table_oid = m.table_oid AND s.state = 'active';
    UPDATE koldstore.job j SET status = 'cancelled', ended_at = pg_catalog.clock_timestamp()
    WHERE j.table_oid = m.table_oid AND j.status IN ('queued', 'running');
    EXECUTE pg_catalog.format('DROP TABLE IF EXISTS koldstore.%I', 'heal_' || m.mirror_oid);
    EXECUTE pg_catalog.format('DROP TABLE %s', m.mirror_oid::pg_catalog.regclass);
    DELETE FROM koldstore.managed_table t WHERE t.table_oid = m.table_oid;
    PERFORM koldstore.unpublish(m.table_oid);
    NOTIFY koldstore_job;
    RETURN pg_catalog.jsonb_build_object('rows', rows + cold);
END $$;

CREATE FUNCTION koldstore.set_retention(table_name regclass, retention interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args)
    VALUES ('set_retention', pg_catalog.jsonb_build_object('table', table_name::oid, 'retention', retention::text))
    RETURNING result INTO answer;
    RETURN (answer ->> 'ok')::boolean;
END $$;
COMMENT ON FUNCTION koldstore.set_retention IS
    'How long cold segments are kept, by the time of their newest change; NULL keeps them for ever. Whole segments are dropped, soon after.';

CREATE FUNCTION koldstore.do_set_retention(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m koldstore.managed_table := koldstore.managed(requester, args);
BEGIN
    IF (args ->> 'retention')::interval <= interval '0' THEN
        RAISE EXCEPTION 'retention must be positive' USING ERRCODE = '22023', HINT = 'NULL keeps everything.';
    END IF;
    UPDATE koldstore.managed_table t SET retention = (args ->> 'retention')::interval WHERE t.table_oid = m.table_oid;
    NOTIFY koldstore_job;
    RETURN '{"ok": true}';
END $$;

CREATE FUNCTION koldstore.set_table_auto_flush(table_name regclass, enabled boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    IF enabled IS NULL THEN
        RAISE EXCEPTION 'enabled must be true or false' USING ERRCODE = '22023';
    END IF;
    INSERT INTO koldstore.command (verb, args)
    VALUES ('set_table_auto_flush', pg_catalog.jsonb_build_object('table', table_name::oid, 'enabled', enabled))
    RETURNING result INTO answer;
    RETURN (answer ->> 'ok')::boolean;
END $$;

CREATE FUNCTION koldstore.do_set_table_auto_flush(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m koldstore.managed_table := koldstore.managed(requester, args);
BEGIN
    UPDATE koldstore.managed_table t SET auto_flush = (args ->> 'enabled')::boolean WHERE t.table_oid = m.table_oid;
    NOTIFY koldstore_job;
    RETURN '{"ok": true}';
END $$;

-- Demands: what a function needs from koldproxy before it can answer (docs/architecture.md). koldproxy puts the answers,
-- a JSON array, into the setting koldstore.staged and runs the statement again.

-- What is staged is in a setting, which every function that runs in the session can read, those of other roles included. So
-- it is sealed with a key that the server shows to those alone who may have the answer, judged as the current user where the
-- key is asked for: in a function with SECURITY DEFINER that is its owner. The key is good for one session.
CREATE TABLE koldstore.stage_secret (secret bytea NOT NULL);
INSERT INTO koldstore.stage_secret
SELECT pg_catalog.string_agg(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), ''::bytea) FROM pg_catalog.generate_series(1, 4);
ALTER TABLE koldstore.stage_secret ENABLE ROW LEVEL SECURITY; -- without a policy: for nobody but the owner, whose view reads it
GRANT SELECT ON koldstore.stage_secret TO PUBLIC;

CREATE VIEW koldstore.stage_key WITH (security_barrier) AS
SELECT m.table_oid, k.kind,
       pg_catalog.sha512(s.secret || pg_catalog.int4send(pg_catalog.pg_backend_pid()) || pg_catalog.int8send(m.table_oid::bigint) || pg_catalog.textsend(k.kind)) AS key
FROM koldstore.stage_secret s, koldstore.managed_table m, (VALUES ('cold_page'), ('flush')) AS k(kind)
WHERE CASE k.kind WHEN 'flush' THEN koldstore.is_owner(current_user, m.table_oid) ELSE koldstore.may_read(m.table_oid) END;
GRANT SELECT ON koldstore.stage_key TO PUBLIC;

-- demand_allowed returns the key, in hexadecimal, for the answer to a demand; NULL when the current user may not have it.
CREATE FUNCTION koldstore.demand_allowed(demand jsonb) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.encode(k.key, 'hex') FROM koldstore.stage_key k WHERE k.table_oid = (demand ->> 'table')::oid AND k.kind = demand ->> 'kind';
END;

-- unseal opens what koldproxy has sealed (proxy/seal.go); NULL when key and seal do not belong together. The stream that box
-- is combined with is made of SHA-512 over key, nonce and a counter.
CREATE FUNCTION koldstore.unseal(box bytea, nonce bytea, mac bytea, key bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    size   integer := pg_catalog.length(box);
    stream bytea;
BEGIN
    IF pg_catalog.sha512(key || pg_catalog.sha512(key || nonce || box)) <> mac THEN
        RETURN NULL;
    END IF;
    SELECT pg_catalog.substr(pg_catalog.string_agg(pg_catalog.sha512(key || nonce || pg_catalog.int4send(i)), ''::bytea ORDER BY i), 1, size)
    INTO stream FROM pg_catalog.generate_series(0, size / 64) AS i;
    RETURN pg_catalog.convert_from(pg_catalog.substr(pg_catalog.varbit_send(
        ('x' || pg_catalog.encode(box, 'hex'))::varbit # ('x' || pg_catalog.encode(stream, 'hex'))::varbit), 5), 'UTF8')::jsonb;
END $$;

-- staged finds the answer to a demand: the one with the largest limit among those that agree in the demand's other fields.
-- The setting holds two lines for each answer: what was demanded, with nonce and mac, and the box in base64.
CREATE FUNCTION koldstore.staged(demand jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    setting text := pg_catalog.current_setting('koldstore.staged', true);
    lines   text[];
    answer  record;
BEGIN
    IF setting IS NULL OR setting = '' THEN
        RETURN NULL;
    END IF;
    lines := pg_catalog.string_to_array(setting, E'\n');
    SELECT h.head, lines[n * 2] AS box INTO answer
    FROM pg_catalog.generate_series(1, pg_catalog.cardinality(lines) / 2) AS n CROSS JOIN LATERAL (SELECT lines[n * 2 - 1]::jsonb) AS h(head)
    WHERE h.head -> 'demand' @> demand
    ORDER BY (h.head -> 'demand' ->> 'limit')::bigint DESC NULLS LAST
    LIMIT 1;
    RETURN (SELECT koldstore.unseal(pg_catalog.decode(answer.box, 'base64'), pg_catalog.decode(answer.head ->> 'nonce', 'hex'),
                                    pg_catalog.decode(answer.head ->> 'mac', 'hex'), k.key)
            FROM koldstore.stage_key k WHERE k.table_oid = (demand ->> 'table')::oid AND k.kind = demand ->> 'kind');
END $$;

-- demanding_names are the views, functions and tables with which a statement may raise a demand although its text does not
-- call the functions that do: what depends on those, or mentions one of its names in a body that is text. koldproxy holds the
-- answers of statements with one of these names.
CREATE FUNCTION koldstore.demanding_names() RETURNS SETOF name
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE bodies AS MATERIALIZED (
        SELECT p.oid, p.proname, p.prosrc FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace <> ALL (ARRAY['pg_catalog', 'information_schema', 'koldstore']::regnamespace[]) AND l.lanname NOT IN ('c', 'internal')
    ), users AS MATERIALIZED (
        SELECT d.refclassid, d.refobjid, 'pg_class'::regclass::oid AS kind, coalesce(r.ev_class, t.tgrelid, f.adrelid, y.polrelid) AS id
        FROM pg_catalog.pg_depend d
        LEFT JOIN pg_catalog.pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
        LEFT JOIN pg_catalog.pg_trigger t ON d.classid = 'pg_trigger'::regclass AND t.oid = d.objid
        LEFT JOIN pg_catalog.pg_attrdef f ON d.classid = 'pg_attrdef'::regclass AND f.oid = d.objid
        LEFT JOIN pg_catalog.pg_policy y ON d.classid = 'pg_policy'::regclass AND y.oid = d.objid
        WHERE d.refclassid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND d.objid >= 16384
            AND (d.refclassid = 'pg_proc'::regclass OR d.classid = 'pg_rewrite'::regclass)
        UNION ALL
        SELECT d.refclassid, d.refobjid, d.classid, d.objid FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_proc'::regclass AND d.refclassid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND d.objid >= 16384
    ), reach(kind, id) AS (
        SELECT 'pg_proc'::regclass::oid, p.oid FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('changes_since', 'flush_table')
        UNION
        SELECT x.kind, x.id
        FROM reach r
        LEFT JOIN pg_catalog.pg_proc p ON r.kind = 'pg_proc'::regclass AND p.oid = r.id
        LEFT JOIN pg_catalog.pg_class c ON r.kind = 'pg_class'::regclass AND c.oid = r.id
        CROSS JOIN LATERAL (
            SELECT u.kind, u.id FROM users u WHERE u.refclassid = r.kind AND u.refobjid = r.id AND u.id IS NOT NULL
            UNION ALL
            SELECT 'pg_proc'::regclass::oid, b.oid FROM bodies b
            WHERE b.prosrc ~* ('(^|[^[:alnum:]_$])' || pg_catalog.regexp_replace(coalesce(p.proname, c.relname)::text, '([^[:alnum:]_])', '\\\1', 'g') || '($|[^[:alnum:]_$])')
        ) AS x)
    SELECT DISTINCT coalesce(p.proname, c.relname)
    FROM reach r
    LEFT JOIN pg_catalog.pg_proc p ON r.kind = 'pg_proc'::regclass AND p.oid = r.id
    LEFT JOIN pg_catalog.pg_class c ON r.kind = 'pg_class'::regclass AND c.oid = r.id
    WHERE p.pronamespace IS DISTINCT FROM 'koldstore'::regnamespace::oid AND coalesce(p.proname, c.relname) IS NOT NULL;
END $$;
REVOKE ALL ON FUNCTION koldstore.demanding_names() FROM PUBLIC;

CREATE FUNCTION koldstore.raise_demand(demand jsonb, message text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION '%', message USING ERRCODE = 'KS003', DETAIL = demand::text,
        HINT = 'Connect through koldproxy, which answers by itself. If this connection does: docs/guarantees.md names the few statements that it cannot repeat.';
END $$;

-- segments_for picks the active segments that a page needs: from the cursor on (forward) or from the end (last), until
-- they hold enough live rows. How many are left in one that the cursor is within is not known, so it counts for nothing.
CREATE FUNCTION koldstore.segments_for(rel oid, mode text, after bigint, wanted bigint) RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.jsonb_agg(s.segment_id ORDER BY s.min_seq), '[]')
    FROM (SELECT t.segment_id, t.min_seq,
                 sum(CASE WHEN mode = 'last' OR t.min_seq > after THEN t.row_count - t.dead_count ELSE 0 END) OVER (ORDER BY CASE mode WHEN 'last' THEN -t.min_seq ELSE t.min_seq END
                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM koldstore.segment t
          WHERE t.table_oid = rel AND t.state = 'active' AND t.max_seq > after) s
    WHERE coalesce(s.before, 0) < wanted;
END;

-- key_equality lists the key columns of a mirror with the equality operator of each column's own operator class: what the
-- search path finds could be anybody's.
CREATE FUNCTION koldstore.key_equality(mirror oid) RETURNS TABLE (ord bigint, attnum int2, equals text)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT k.ord, k.attnum, pg_catalog.format('%I.%s', n.nspname, o.oprname)
    FROM pg_catalog.pg_index i
    CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(i.indkey::int2[]), pg_catalog.unnest(i.indclass::oid[])) WITH ORDINALITY AS k(attnum, class, ord)
    JOIN pg_catalog.pg_opclass c ON c.oid = k.class
    JOIN pg_catalog.pg_amop a ON a.amopfamily = c.opcfamily AND a.amoplefttype = c.opcintype AND a.amoprighttype = c.opcintype AND a.amopstrategy = 3
    JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
    JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
    WHERE i.indrelid = mirror AND i.indisprimary;
END;

-- key_json is the SQL that makes JSON of a key column of the mirror m. Types that users made go through their output
-- functions, since a cast to json would be code of users.
CREATE FUNCTION koldstore.key_json(a pg_catalog.pg_attribute) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.format(CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace THEN 'pg_catalog.to_jsonb(m.%I)' ELSE 'pg_catalog.to_jsonb(pg_catalog.format(''%%s'', m.%I))' END, a.attname)
    FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid;
END;

CREATE FUNCTION koldstore.changes_since(
    table_name regclass,
    since_seq  bigint  DEFAULT 0,
    limit_rows integer DEFAULT 1000,
    last_rows  integer DEFAULT NULL
) RETURNS TABLE (seq bigint, op smallint, pk jsonb, deleted boolean, row_image jsonb, source text)
LANGUAGE plpgsql STABLE ROWS 1000 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    rel      oid := table_name;
    m        koldstore.managed_table;
    newest   boolean;
    mirror   text;
    key_list text;
    key_json text;
    cold_max bigint;
    wanted   bigint;
    hot_rows bigint := 0;
    demand   jsonb;
    page     jsonb;
    got      bigint;
    complete boolean;
BEGIN
    IF rel IS NULL THEN
        RAISE EXCEPTION 'table_name must not be NULL' USING ERRCODE = '22023';
    ELSIF since_seq IS NULL OR since_seq < 0 THEN
        RAISE EXCEPTION 'since_seq must be >= 0' USING ERRCODE = '22023';
    ELSIF limit_rows IS NULL OR limit_rows <= 0 THEN
        RAISE EXCEPTION 'limit_rows must be positive' USING ERRCODE = '22023';
    ELSIF limit_rows > 1000000 THEN
        RAISE EXCEPTION 'limit_rows must be <= 1000000' USING ERRCODE = '22023', HINT = 'Page on from the last seq.';
    END IF;
    newest := since_seq = 0 AND last_rows IS NOT NULL;
    IF newest AND last_rows <= 0 THEN
        RAISE EXCEPTION 'last_rows must be positive' USING ERRCODE = '22023';
    ELSIF newest AND last_rows > limit_rows THEN
        RAISE EXCEPTION 'last_rows must be <= limit_rows' USING ERRCODE = '22023';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = rel) THEN
        RAISE EXCEPTION 'relation with OID % does not exist', rel USING ERRCODE = '42P01';
    END IF;
    PERFORM koldstore.assert_readable(rel);
    SELECT * INTO m FROM koldstore.managed_table t WHERE t.table_oid = rel;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(table_name) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.manage_table(…) gives a table a change feed.';
    ELSIF m.state = 'broken' THEN
        RAISE EXCEPTION 'the change feed of table "%" is broken: %', koldstore.name_of(rel), m.reason USING ERRCODE = '55000';
    ELSIF m.state NOT IN ('active', 'healing') THEN
        RAISE EXCEPTION 'the change feed of table "%" is still being seeded', koldstore.name_of(rel) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.wait_for_async_mirror() waits for that; koldstore.list_jobs() shows how far it is.';
    ELSIF since_seq > 0 AND since_seq < m.floor THEN
        RAISE EXCEPTION 'change records before sequence % are no longer retained', m.floor USING ERRCODE = 'KS001',
            DETAIL = pg_catalog.format('The cursor %s is below the retained beginning of the feed of "%s".', since_seq, koldstore.name_of(rel)),
            HINT = 'Rebuild the copy from the retained beginning (since_seq => 0), then go on from its last seq.';
    END IF;

    mirror := m.mirror_oid::pg_catalog.regclass::text;
    SELECT pg_catalog.string_agg(pg_catalog.format('m.%1$I OPERATOR(%2$s) k.%1$I', a.attname, k.equals), ' AND '),
           'pg_catalog.jsonb_build_object(' || pg_catalog.string_agg(pg_catalog.format('%1$L, %2$s', a.attname, koldstore.key_json(a)), ', ' ORDER BY k.ord) || ')'
    INTO key_list, key_json
    FROM koldstore.key_equality(m.mirror_oid) AS k JOIN pg_catalog.pg_attribute a ON a.attrelid = m.mirror_oid AND a.attnum = k.attnum;
    SELECT coalesce(max(s.max_seq), 0) INTO cold_max FROM koldstore.segment s WHERE s.table_oid = rel AND s.state = 'active';

    wanted := CASE WHEN newest THEN last_rows ELSE limit_rows END;
    IF newest THEN
        -- Every hot seq is above every cold one, so the newest rows are hot first; cold only fills up.
        EXECUTE pg_catalog.format('SELECT count(*) FROM (SELECT FROM %s ORDER BY seq DESC LIMIT $1) x', mirror) INTO hot_rows USING wanted;
    END IF;

    IF hot_rows < wanted AND cold_max > since_seq THEN
        demand := pg_catalog.jsonb_build_object('kind', 'cold_page', 'table', rel::bigint, 'generation', m.generation,
            'mode', CASE WHEN newest THEN 'last' ELSE 'forward' END);
        IF NOT newest THEN
            demand := demand || pg_catalog.jsonb_build_object('after', since_seq);
        END IF;
        page := koldstore.staged(demand);
        IF page IS NULL THEN
            PERFORM koldstore.raise_demand(demand || pg_catalog.jsonb_build_object('limit', wanted - hot_rows, 'segments',
                koldstore.segments_for(rel, demand ->> 'mode', since_seq, wanted - hot_rows)), koldstore.cold_needed(table_name));
        END IF;
        -- A row that the mirror has, too, has changed since it was flushed.
        RETURN QUERY EXECUTE pg_catalog.format(
            'SELECT * FROM (SELECT c.seq, c.op, c.pk, c.op = 3, c.image, ''cold''::text
             FROM pg_catalog.jsonb_to_recordset($1) AS c(seq bigint, op smallint, pk jsonb, image jsonb)
             WHERE c.seq > $2 AND NOT EXISTS (SELECT FROM %1$s m, pg_catalog.jsonb_populate_record(NULL::%1$s, c.pk) k WHERE %2$s)
             ORDER BY c.seq %3$s LIMIT $3) x ORDER BY 1',
            mirror, key_list, CASE WHEN newest THEN 'DESC' ELSE 'ASC' END)
            USING page -> 'rows', since_seq, wanted - hot_rows;
        GET DIAGNOSTICS got = ROW_COUNT;
        complete := CASE WHEN newest THEN (page ->> 'complete')::boolean
                AND pg_catalog.jsonb_array_length(page -> 'segments') = (SELECT count(*) FROM koldstore.segment s WHERE s.table_oid = rel AND s.state = 'active')
            ELSE (page ->> 'through')::bigint >= cold_max END;
        IF got < wanted - hot_rows AND NOT complete THEN
            PERFORM koldstore.raise_demand(demand || pg_catalog.jsonb_build_object('limit', (page ->> 'limit')::bigint * 2 + 1000, 'segments',
                koldstore.segments_for(rel, demand ->> 'mode', since_seq, (page ->> 'limit')::bigint * 2 + 1000)), koldstore.cold_needed(table_name));
        END IF;
        IF NOT newest THEN
            wanted := wanted - got;
        END IF;
    END IF;

    IF newest THEN
        RETURN QUERY EXECUTE pg_catalog.format(
            'SELECT * FROM (SELECT m.seq, m.op, %s, m.op = 3, m.row_image, ''hot''::text FROM %s m ORDER BY m.seq DESC LIMIT $1) x ORDER BY 1', key_json, mirror)
            USING hot_rows;
    ELSIF wanted > 0 THEN
        RETURN QUERY EXECUTE pg_catalog.format(
            'SELECT m.seq, m.op, %s, m.op = 3, m.row_image, ''hot''::text FROM %s m WHERE m.seq > $1 ORDER BY m.seq LIMIT $2', key_json, mirror)
            USING since_seq, wanted;
    END IF;
END $$;
COMMENT ON FUNCTION koldstore.changes_since IS
    'The latest state of every row of a managed table in the order of its last change. Exclusive cursor; a page shorter than limit_rows is the end.';

CREATE FUNCTION koldstore.cold_needed(rel regclass) RETURNS text LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT 'cold history of "' || koldstore.name_of(rel) || '"' || ' is needed, and koldproxy has not been asked for it';
END;

CREATE FUNCTION koldstore.flush_table(table_name regclass, wait boolean DEFAULT false, force boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    demand jsonb := pg_catalog.jsonb_build_object('kind', 'flush', 'table', table_name::oid::bigint, 'force', coalesce(force, false));
    answer jsonb;
BEGIN
    IF coalesce(wait, false) THEN
        answer := koldstore.staged(demand);
        IF answer IS NOT NULL THEN
            RETURN answer -> 'result';
        END IF;
    END IF;
    IF table_name IS NULL THEN
        RAISE EXCEPTION 'table_name must not be NULL' USING ERRCODE = '22023';
    ELSIF koldstore.is_owner(current_user, table_name) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of table %', koldstore.name_of(table_name) USING ERRCODE = '42501';
    ELSIF NOT EXISTS (SELECT FROM koldstore.managed_table t WHERE t.table_oid = table_name) THEN
        RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(table_name) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.manage_table(…) gives a table a change feed.';
    END IF;
    IF coalesce(wait, false) THEN
        PERFORM koldstore.raise_demand(demand, 'flush_table(…, wait => true) needs koldproxy, which has not been asked');
    END IF;
    INSERT INTO koldstore.command (verb, args)
    VALUES ('flush_table', pg_catalog.jsonb_build_object('table', table_name::oid, 'force', coalesce(force, false)))
    RETURNING result INTO answer;
    RETURN answer;
END $$;
COMMENT ON FUNCTION koldstore.flush_table IS
    'Moves the oldest part of the mirror to cold storage: what its policy says, or everything with force. With wait the answer is the outcome.';

-- flush_due counts the rows that the policy of a managed table lets go.
CREATE FUNCTION koldstore.flush_due(m koldstore.managed_table) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rows bigint := 0;
BEGIN
    IF m.hot_row_limit IS NOT NULL THEN
        EXECUTE pg_catalog.format('SELECT count(*) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO rows;
        rows := greatest(rows - m.hot_row_limit, 0);
    ELSIF m.move_after IS NOT NULL THEN
        EXECUTE pg_catalog.format('SELECT count(*) FROM %s WHERE seq < $1', m.mirror_oid::pg_catalog.regclass)
            INTO rows USING koldstore.seq_at(pg_catalog.now() - m.move_after);
    END IF;
    RETURN CASE WHEN rows < m.min_flush_rows AND rows < m.max_rows_per_file THEN 0 ELSE rows END;
END $$;

-- enqueue_flush queues a flush unless one is queued or running, whose id it returns then.
CREATE FUNCTION koldstore.enqueue_flush(rel oid, force boolean, requester name DEFAULT CURRENT_USER, OUT job_id uuid, OUT status text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO koldstore.job AS j (job_type, table_oid, args, created_by)
    VALUES ('flush', rel, pg_catalog.jsonb_build_object('force', force), requester)
    ON CONFLICT (table_oid) WHERE job_type = 'flush' AND status IN ('queued', 'running') DO NOTHING
    RETURNING j.job_id, 'queued' INTO job_id, status;
    IF job_id IS NULL THEN
        SELECT j.job_id, 'already_running' INTO job_id, status
        FROM koldstore.job j WHERE j.table_oid = rel AND j.job_type = 'flush' AND j.status IN ('queued', 'running');
    END IF;
    NOTIFY koldstore_job;
END $$;

CREATE FUNCTION koldstore.do_flush_table(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m     koldstore.managed_table := koldstore.managed(requester, args);
    force boolean := (args ->> 'force')::boolean;
    q     record;
BEGIN
    IF NOT force AND koldstore.flush_due(m) = 0 THEN
        RETURN pg_catalog.jsonb_build_object('ok', true, 'job_id', NULL, 'status', 'not_due', 'rows_flushed', 0, 'segments', 0, 'error', NULL);
    END IF;
    SELECT * INTO q FROM koldstore.enqueue_flush(m.table_oid, force, requester);
    RETURN pg_catalog.jsonb_build_object('ok', true, 'job_id', q.job_id, 'status', q.status, 'rows_flushed', NULL, 'segments', NULL, 'error', NULL);
END $$;

CREATE FUNCTION koldstore.list_jobs(statuses jsonb DEFAULT NULL, job_types jsonb DEFAULT NULL, table_name regclass DEFAULT NULL) RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('job_id', j.job_id, 'job_type', j.job_type, 'table', j.table_oid::pg_catalog.regclass::text,
        'status', j.status, 'progress', j.progress, 'error', j.error, 'created_by', j.created_by, 'created_at', j.created_at,
        'started_at', j.started_at, 'ended_at', j.ended_at) ORDER BY j.created_at), '[]')
    FROM koldstore.job j
    WHERE (statuses IS NULL OR statuses ? j.status) AND (job_types IS NULL OR job_types ? j.job_type) AND (table_name IS NULL OR j.table_oid = table_name);
END;

CREATE FUNCTION koldstore.cancel_job(job_id uuid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('cancel_job', pg_catalog.jsonb_build_object('job_id', job_id)) RETURNING result INTO answer;
    RETURN (answer ->> 'ok')::boolean;
END $$;
COMMENT ON FUNCTION koldstore.cancel_job IS
    'Cancels a flush that is still queued, or the seed or healing of a feed, which is broken then: part of it would be missing. Returns false when there is no such job any more.';

CREATE FUNCTION koldstore.do_cancel_job(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    id   uuid := (args ->> 'job_id')::uuid;
    done bigint;
BEGIN
    -- A stream is not there before its backfill is done.
    PERFORM koldstore.do_drop_stream(requester, pg_catalog.jsonb_build_object('schema', s.schema_name, 'name', s.name))
    FROM koldstore.stream s WHERE s.seed_job = id AND s.state IN ('pending', 'seeding') AND koldstore.is_owner(requester, s.table_oid);
    IF FOUND THEN
        RETURN '{"ok": true}';
    END IF;
    -- The feed first: whoever copies a page has locked it, and then writes to the job.
    UPDATE koldstore.managed_table t SET state = 'broken', reason = 'copying its rows was cancelled'
    WHERE t.seed_job = id AND t.state IN ('pending', 'seeding', 'healing') AND koldstore.is_owner(requester, t.table_oid);
    UPDATE koldstore.job j SET status = 'cancelled', ended_at = pg_catalog.clock_timestamp()
    WHERE j.job_id = id AND koldstore.is_owner(requester, j.table_oid)
      AND (j.job_type = 'flush' AND j.status = 'queued' OR j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running'));
    GET DIAGNOSTICS done = ROW_COUNT;
    RETURN pg_catalog.jsonb_build_object('ok', done > 0);
END $$;

-- wait_for_async_mirror returns when everything that was committed before the call is visible in mirrors and logs.
-- The applier acknowledges a position to its slot only after it has committed what lies before it, and acknowledges idle
-- stretches of the log as soon as it is told of them; so the slot's confirmed position is the answer, and it can be read
-- without a snapshot. A commit may be in the log without being flushed (synchronous_commit = off): such ones are flushed
-- within three times wal_writer_delay, which is waited for only if there is something unflushed at the call.
CREATE FUNCTION koldstore.wait_for_async_mirror(timeout interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    started    timestamptz := pg_catalog.clock_timestamp();
    slot       text;
    before     bigint;
    after      bigint;
    target     pg_lsn := pg_catalog.pg_current_wal_insert_lsn();
    writer     interval := 3 * pg_catalog.current_setting('wal_writer_delay')::interval;
    s          record;
    gap        text;
    closing    boolean;
    idle_since timestamptz;
    pause      float8 := 0.0005;
BEGIN
    IF timeout <= interval '0' THEN
        RAISE EXCEPTION 'timeout must be positive' USING ERRCODE = '22023';
    END IF;
    SELECT c.slot_name, c.rows_applied INTO slot, before FROM koldstore.checkpoint c;
    WHILE pg_catalog.pg_current_wal_flush_lsn() < target AND pg_catalog.clock_timestamp() < started + writer LOOP
        PERFORM pg_catalog.pg_sleep(0.002);
    END LOOP;
    target := least(target, pg_catalog.pg_current_wal_flush_lsn());
    LOOP
        SELECT r.confirmed_flush_lsn, r.active INTO s FROM pg_catalog.pg_replication_slots r
        WHERE r.slot_name = slot AND r.database = pg_catalog.current_database();
        -- A gap that koldproxy is about to close, with a new slot, is waited for.
        SELECT c.gap, c.begin_anew INTO gap, closing FROM koldstore.checkpoint c;
        IF gap IS NOT NULL AND NOT closing THEN
            RAISE EXCEPTION 'changes of database "%" are not being applied: %', pg_catalog.current_database(), gap
                USING ERRCODE = '55000', HINT = 'See docs/operations.md about gaps.';
        END IF;
        EXIT WHEN s.confirmed_flush_lsn >= target AND gap IS NULL AND NOT EXISTS (
            SELECT FROM koldstore.job j WHERE j.status IN ('queued', 'running')
            AND (j.job_type = 'seed' AND j.created_at < pg_catalog.transaction_timestamp() OR j.job_type = 'heal'));
        IF s.active THEN
            idle_since := NULL;
        ELSE
            idle_since := coalesce(idle_since, pg_catalog.clock_timestamp());
            IF pg_catalog.clock_timestamp() > idle_since + interval '10 s' THEN
                IF s IS NULL THEN
                    RAISE EXCEPTION 'changes of database "%" are not being applied', pg_catalog.current_database() USING ERRCODE = '55000',
                        DETAIL = pg_catalog.format('This database has no replication slot "%s".', slot),
                        HINT = 'koldproxy makes it when it first starts on a database; if it had one, see docs/operations.md about gaps.';
                END IF;
                RAISE EXCEPTION 'no applier is running on database "%"', pg_catalog.current_database() USING ERRCODE = '55000',
                    DETAIL = pg_catalog.format('Nobody has been reading the replication slot "%s" for 10 seconds.', slot),
                    HINT = 'Start koldproxy, or see its log.';
            END IF;
        END IF;
        IF pg_catalog.clock_timestamp() > started + timeout THEN
            RAISE EXCEPTION 'the mirror did not catch up within %', timeout USING ERRCODE = '57014',
                DETAIL = CASE WHEN s.confirmed_flush_lsn >= target THEN 'Waiting for the seeding of ' || coalesce((
                        SELECT pg_catalog.string_agg(j.table_oid::pg_catalog.regclass::text, ', ') FROM koldstore.job j
                        WHERE j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running')), 'tables') || '.'
                    ELSE pg_catalog.format('Applied up to %s, waiting for %s.', s.confirmed_flush_lsn, target) END;
        END IF;
        PERFORM pg_catalog.pg_sleep(pause);
        pause := least(pause * 1.5, 0.02);
    END LOOP;
    SELECT c.rows_applied INTO after FROM koldstore.checkpoint c;
    RETURN after - before;
END $$;

-- gaps says how many holes there were, which one was the last, and how many feeds are still being compared with their tables.
CREATE FUNCTION koldstore.gaps() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object('count', count(*),
        'last', (pg_catalog.array_agg(pg_catalog.to_jsonb(g) - 'gap_id' ORDER BY g.gap_id DESC))[1],
        'healing', (SELECT count(*) FROM koldstore.job j WHERE j.job_type = 'heal' AND j.status IN ('queued', 'running')))
    FROM koldstore.gap g;
END;

CREATE FUNCTION koldstore.async_mirror_status() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object(
        'slot_name', c.slot_name, 'running', coalesce(s.active, false), 'healthy', coalesce(s.active AND s.wal_status <> 'lost' AND c.gap IS NULL, false), 'gap', c.gap, 'gaps', koldstore.gaps(),
        'applied_lsn', c.applied_lsn, 'confirmed_lsn', s.confirmed_flush_lsn, 'current_lsn', pg_catalog.pg_current_wal_insert_lsn(),
        'lag_bytes', pg_catalog.pg_current_wal_flush_lsn() - s.confirmed_flush_lsn, 'retained_bytes', pg_catalog.pg_current_wal_insert_lsn() - s.restart_lsn,
        'wal_status', s.wal_status, 'watermark', c.watermark, 'epoch', c.epoch, 'rows_applied', c.rows_applied, 'applied_at', c.applied_at)
    FROM koldstore.checkpoint c LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name AND s.database = pg_catalog.current_database();
END;

CREATE FUNCTION koldstore.table_status(table_name regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    m      koldstore.managed_table;
    live   bigint;
    dead   bigint;
    cold   record;
BEGIN
    PERFORM koldstore.assert_readable(table_name);
    SELECT * INTO m FROM koldstore.managed_table t WHERE t.table_oid = table_name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(table_name) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.manage_table(…) gives a table a change feed.';
    END IF;
    EXECUTE pg_catalog.format('SELECT count(*) FILTER (WHERE op <> 3), count(*) FILTER (WHERE op = 3) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO live, dead;
    SELECT count(*) AS segments, coalesce(sum(s.row_count), 0) AS rows, coalesce(sum(s.dead_count), 0) AS superseded,
           coalesce(sum(s.size_bytes), 0) AS bytes, coalesce(max(s.max_seq), 0) AS max_seq
    INTO cold FROM koldstore.segment s WHERE s.table_oid = table_name AND s.state = 'active';
    RETURN pg_catalog.jsonb_build_object(
        'table', table_name::text, 'mirror', m.mirror_oid::pg_catalog.regclass::text, 'state', m.state, 'reason', m.reason, 'storage', m.storage,
        'hot_rows', live + dead, 'hot_tombstones', dead, 'mirror_bytes', pg_catalog.pg_total_relation_size(m.mirror_oid),
        'cold_rows', cold.rows - cold.superseded, 'cold_rows_superseded', cold.superseded, 'cold_bytes', cold.bytes, 'segments', cold.segments,
        'cold_max_seq', cold.max_seq, 'floor', m.floor, 'generation', m.generation, 'retention', m.retention, 'hot_row_limit', m.hot_row_limit,
        'move_after', m.move_after, 'min_flush_rows', m.min_flush_rows, 'max_rows_per_file', m.max_rows_per_file, 'auto_flush', m.auto_flush,
        'quarantined', (SELECT count(*) FROM koldstore.quarantine q WHERE q.table_oid = table_name AND q.stream_id IS NULL),
        'jobs', koldstore.list_jobs('["queued", "running"]', NULL, table_name), 'mirror_status', koldstore.async_mirror_status());
END $$;

---- create above / drop below ----

DROP FUNCTION koldstore.table_status, koldstore.async_mirror_status, koldstore.gaps, koldstore.wait_for_async_mirror, koldstore.do_cancel_job, koldstore.cancel_job,
    koldstore.list_jobs, koldstore.do_flush_table, koldstore.enqueue_flush, koldstore.flush_due, koldstore.flush_table, koldstore.cold_needed,
    koldstore.changes_since, koldstore.key_json, koldstore.key_equality, koldstore.segments_for, koldstore.raise_demand, koldstore.demanding_names, koldstore.staged, koldstore.unseal, koldstore.demand_allowed,
    koldstore.do_set_table_auto_flush, koldstore.set_table_auto_flush, koldstore.do_set_retention, koldstore.set_retention,
    koldstore.do_unmanage_table, koldstore.managed, koldstore.unmanage_table, koldstore.free_name, koldstore.do_manage_table, koldstore.base_type,
    koldstore.check_feed_options, koldstore.manage_table;
DROP VIEW koldstore.stage_key;
DROP TABLE koldstore.stage_secret;
