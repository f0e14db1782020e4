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

-- check_storage refuses a storage that koldproxy could not use when it tried. One that has not been tried yet passes.
CREATE FUNCTION koldstore.check_storage(wanted text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s koldstore.storage;
BEGIN
    SELECT * INTO s FROM koldstore.storage t WHERE t.name = wanted;
    IF s.check_error IS NOT NULL AND NOT s.wants_check THEN
        RAISE EXCEPTION 'storage "%" cannot be used', wanted USING ERRCODE = '55000', DETAIL = s.check_error,
            HINT = pg_catalog.format('koldproxy tries it again every half minute, for the last time at %s: see koldstore.storages.', s.checked_at::timestamptz(0));
    END IF;
END $$;

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
        RAISE EXCEPTION 'table "%" is already managed', tab USING ERRCODE = '55000', HINT = 'koldstore.heal_table compares the feed with its table, which also brings a broken one back; koldstore.unmanage_table ends it, to begin anew.';
    END IF;
    PERFORM koldstore.check_feed_options(args); PERFORM koldstore.check_storage(args ->> 'storage');

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
    rows bigint := 0;
    cold bigint;
    kept boolean := EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.mirror_oid); -- nobody has dropped it
BEGIN
    IF kept THEN
        EXECUTE pg_catalog.format('SELECT count(*) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO rows;
    END IF;
    SELECT coalesce(sum(s.row_count - s.dead_count), 0) INTO cold FROM koldstore.segment s WHERE s.table_oid = m.table_oid AND s.state = 'active';
    UPDATE koldstore.segment s
    SET state = CASE WHEN (args ->> 'drop_cold')::boolean THEN 'deleted' ELSE 'detached' END, ended_at = pg_catalog.clock_timestamp(), key_hashes = NULL
    WHERE s.table_oid = m.table_oid AND s.state = 'active';
    UPDATE koldstore.job j SET status = 'cancelled', ended_at = pg_catalog.clock_timestamp()
    WHERE j.table_oid = m.table_oid AND j.status IN ('queued', 'running');
    EXECUTE pg_catalog.format('DROP TABLE IF EXISTS koldstore.%I', 'heal_' || m.mirror_oid);
    IF kept THEN
        EXECUTE pg_catalog.format('DROP TABLE %s', m.mirror_oid::pg_catalog.regclass);
    END IF;
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

-- What cold segments are kept, beside retention by age.

CREATE FUNCTION koldstore.set_retention_bytes(table_name regclass, bytes bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('set_cold_limit', pg_catalog.jsonb_build_object('table', table_name::oid, 'retention_bytes', bytes));
    RETURN true;
END $$;
COMMENT ON FUNCTION koldstore.set_retention_bytes IS 'How large the cold segments of a table may be together; NULL for no bound. The oldest are dropped, soon after.';

CREATE FUNCTION koldstore.set_tombstone_retention(table_name regclass, age interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('set_cold_limit', pg_catalog.jsonb_build_object('table', table_name::oid, 'tombstone_retention', age::text));
    RETURN true;
END $$;
COMMENT ON FUNCTION koldstore.set_tombstone_retention IS
    'After which age deletes may be forgotten; NULL keeps them for ever. A cursor older than a forgotten delete is refused with KS001.';

CREATE FUNCTION koldstore.do_set_cold_limit(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m koldstore.managed_table := koldstore.managed(requester, args);
BEGIN
    IF (args ->> 'retention_bytes')::bigint <= 0 THEN
        RAISE EXCEPTION 'bytes must be positive' USING ERRCODE = '22023', HINT = 'NULL keeps everything.';
    ELSIF (args ->> 'tombstone_retention')::interval <= interval '0' THEN
        RAISE EXCEPTION 'age must be positive' USING ERRCODE = '22023', HINT = 'NULL keeps all deletes.';
    END IF;
    UPDATE koldstore.managed_table t
    SET retention_bytes = CASE WHEN args ? 'retention_bytes' THEN (args ->> 'retention_bytes')::bigint ELSE t.retention_bytes END,
        tombstone_retention = CASE WHEN args ? 'tombstone_retention' THEN (args ->> 'tombstone_retention')::interval ELSE t.tombstone_retention END
    WHERE t.table_oid = m.table_oid;
    NOTIFY koldstore_job;
    RETURN '{"ok": true}';
END $$;

-- Flushes and other jobs.

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
    ELSIF NOT EXISTS (SELECT FROM koldstore.visible_managed_table t WHERE t.table_oid = table_name) THEN
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
    FROM koldstore.visible_job j
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

-- How far the applier is, and what it waits for.

-- open_seeds names some of the tables whose seeds or healings are waited for.
CREATE FUNCTION koldstore.open_seeds() RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.string_agg(x.name, ', ' ORDER BY x.n) FILTER (WHERE x.n <= 5) || CASE WHEN count(*) > 5 THEN pg_catalog.format(' and %s more', count(*) - 5) ELSE '' END
    FROM (SELECT j.table_oid::pg_catalog.regclass::text AS name, row_number() OVER (ORDER BY j.created_at, j.job_id) AS n
          FROM koldstore.visible_job j WHERE j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running') AND j.error IS NULL) x;
END;

-- wait_for_async_mirror returns when everything that was committed before the call is visible in mirrors and logs.
-- The applier acknowledges a position to its slot only after it has committed what lies before it, and acknowledges idle
-- stretches of the log as soon as it is told of them; so the slot's confirmed position is the answer, and it can be read
-- without a snapshot. A commit may be in the log without being flushed (synchronous_commit = off): such ones are flushed
-- within three times wal_writer_delay, which is waited for only if there is something unflushed at the call. A seed or healing
-- that has failed and is tried again (its job has an error) is not waited for: it may take until somebody has brought an object
-- back.
CREATE FUNCTION koldstore.wait_for_async_mirror(timeout interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    started    timestamptz := pg_catalog.clock_timestamp();
    slot       text;
    before     bigint;
    after      bigint;
    target     pg_lsn;
    writer     interval := 3 * pg_catalog.current_setting('wal_writer_delay')::interval;
    s          record;
    gap        text;
    closing    boolean;
    idle_since timestamptz;
    pause      float8 := 0.0005;
BEGIN
    IF timeout <= interval '0' THEN
        RAISE EXCEPTION 'timeout must be positive' USING ERRCODE = '22023';
    ELSIF pg_catalog.pg_is_in_recovery() THEN
        RAISE EXCEPTION 'a standby server cannot tell what has been committed' USING ERRCODE = '55000',
            HINT = 'Call wait_for_async_mirror() on the primary server; what it has waited for comes to the standby with what it replays.';
    END IF;
    -- That a partition was truncated stands in no row's change. koldproxy looks every few seconds, and what it writes into the log then is waited for.
    -- A transaction with one snapshot does not see that it has looked, and what the caller's own transaction has done to a partition nobody else sees.
    WHILE pg_catalog.current_setting('transaction_isolation') = 'read committed' AND pg_catalog.clock_timestamp() < started + least(timeout, interval '10 s')
          AND koldstore.partitions_unseen() LOOP
        PERFORM pg_catalog.pg_sleep(0.05);
    END LOOP;
    target := pg_catalog.pg_current_wal_insert_lsn();
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
            SELECT FROM koldstore.visible_job j WHERE j.status IN ('queued', 'running') AND j.error IS NULL
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
                DETAIL = CASE WHEN s.confirmed_flush_lsn >= target THEN 'Waiting for the seeding of ' || coalesce(koldstore.open_seeds(), 'tables') || '.'
                    ELSE pg_catalog.format('Applied up to %s, waiting for %s.', s.confirmed_flush_lsn, target) END;
        END IF;
        PERFORM pg_catalog.pg_sleep(pause);
        pause := least(pause * 1.5, 0.02);
    END LOOP;
    FOR s IN SELECT j.table_oid::pg_catalog.regclass AS tab, j.error FROM koldstore.visible_job j
             WHERE j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running') AND j.error IS NOT NULL ORDER BY j.created_at LIMIT 5 LOOP
        RAISE WARNING 'the feed of "%" is not waited for: %', s.tab, s.error;
    END LOOP;
    SELECT c.rows_applied INTO after FROM koldstore.checkpoint c;
    RETURN after - before;
END $$;

-- slot_waits_for names the oldest transactions of the server that the replication slot waits for; NULL if it is there. Roles that may not
-- look at others' sessions see their processes only.
CREATE FUNCTION koldstore.slot_waits_for() RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.string_agg(x.who, ', ' ORDER BY x.age DESC)
    FROM (SELECT coalesce('prepared transaction ' || pg_catalog.quote_literal(p.gid),
                     'process ' || l.pid || coalesce(' in database ' || a.datname, '') || coalesce(', since ' || a.xact_start::timestamptz(0), '')) AS who,
                 max(pg_catalog.age(l.transactionid)) AS age
          FROM pg_catalog.pg_locks l
          LEFT JOIN pg_catalog.pg_prepared_xacts p ON l.pid IS NULL AND p.transaction = l.transactionid
          LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
          WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
            AND coalesce(p.prepared, a.xact_start, '-infinity') < pg_catalog.clock_timestamp() - interval '1 s'
          GROUP BY 1 ORDER BY 2 DESC LIMIT 5) x
    WHERE NOT EXISTS (SELECT FROM koldstore.checkpoint c JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name
                      WHERE s.database = pg_catalog.current_database() AND s.confirmed_flush_lsn IS NOT NULL AND c.gap IS NULL);
END;

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

-- gaps says how many holes there were, which one was the last, and how many feeds are still being compared with their tables.
CREATE FUNCTION koldstore.gaps() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object('count', count(*),
        'last', (pg_catalog.array_agg(pg_catalog.to_jsonb(g) - 'gap_id' ORDER BY g.gap_id DESC))[1],
        'healing', (SELECT count(*) FROM koldstore.visible_job j WHERE j.job_type = 'heal' AND j.status IN ('queued', 'running')))
    FROM koldstore.visible_gap g;
END;

CREATE FUNCTION koldstore.async_mirror_status() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object(
        -- A slot that is being made is active, and nothing comes through it.
        'slot_name', c.slot_name, 'running', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND c.gap IS NULL, false),
        'healthy', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND s.wal_status <> 'lost' AND c.gap IS NULL AND w.who IS NULL, false), 'gap', c.gap, 'gaps', koldstore.gaps(),
        'waiting_for', coalesce(CASE WHEN c.gap IS NULL OR c.begin_anew THEN koldstore.slot_waits_for() END, w.who),
        'applied_lsn', c.applied_lsn, 'confirmed_lsn', s.confirmed_flush_lsn, 'current_lsn', now.inserted,
        'lag_bytes', now.flushed - s.confirmed_flush_lsn, 'retained_bytes', now.inserted - s.restart_lsn,
        'wal_status', s.wal_status, 'watermark', c.watermark, 'epoch', c.epoch, 'rows_applied', c.rows_applied, 'applied_at', c.applied_at)
    FROM koldstore.checkpoint c LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name AND s.database = pg_catalog.current_database()
    CROSS JOIN (SELECT koldstore.apply_waits_for() AS who) AS w
    -- On a standby server, which has the state of the catalog and no slot: what it has replayed.
    CROSS JOIN LATERAL (SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END AS inserted,
                               CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END AS flushed) AS now;
END;

-- readable_feed returns the catalog row of a managed table that the current role may read, or raises.
CREATE FUNCTION koldstore.readable_feed(rel regclass) RETURNS koldstore.visible_managed_table
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m koldstore.visible_managed_table;
BEGIN
    PERFORM koldstore.assert_readable(rel);
    SELECT * INTO m FROM koldstore.visible_managed_table t WHERE t.table_oid = rel;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table "%" is not managed by koldstore', koldstore.name_of(rel) USING ERRCODE = '55000',
            HINT = 'SELECT koldstore.manage_table(…) gives a table a change feed.';
    END IF;
    RETURN m;
END $$;

CREATE FUNCTION koldstore.table_status(table_name regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    m      koldstore.visible_managed_table := koldstore.readable_feed(table_name);
    live   bigint;
    dead   bigint;
    cold   record;
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.mirror_oid) THEN -- nobody has dropped it
        EXECUTE pg_catalog.format('SELECT count(*) FILTER (WHERE op <> 3), count(*) FILTER (WHERE op = 3) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO live, dead;
    END IF;
    SELECT count(*) AS segments, coalesce(sum(s.row_count), 0) AS rows, coalesce(sum(s.dead_count), 0) AS superseded,
           coalesce(sum(s.size_bytes), 0) AS bytes, coalesce(max(s.max_seq), 0) AS max_seq
    INTO cold FROM koldstore.visible_segment s WHERE s.table_oid = table_name AND s.state = 'active';
    RETURN pg_catalog.jsonb_build_object(
        'table', table_name::text, 'mirror', m.mirror_oid::pg_catalog.regclass::text, 'state', m.state, 'reason', m.reason, 'storage', m.storage,
        'hot_rows', live + dead, 'hot_tombstones', dead, 'mirror_bytes', pg_catalog.pg_total_relation_size(m.mirror_oid),
        'cold_rows', cold.rows - cold.superseded, 'cold_rows_superseded', cold.superseded, 'cold_bytes', cold.bytes, 'segments', cold.segments,
        'cold_max_seq', cold.max_seq, 'floor', m.floor, 'generation', m.generation, 'retention', m.retention, 'hot_row_limit', m.hot_row_limit,
        'move_after', m.move_after, 'min_flush_rows', m.min_flush_rows, 'max_rows_per_file', m.max_rows_per_file, 'auto_flush', m.auto_flush,
        'quarantined', (SELECT count(*) FROM koldstore.visible_quarantine q WHERE q.table_oid = table_name AND q.stream_id IS NULL),
        'jobs', koldstore.list_jobs('["queued", "running"]', NULL, table_name), 'mirror_status', koldstore.async_mirror_status());
END $$;

REVOKE ALL ON FUNCTION koldstore.check_storage, koldstore.do_manage_table, koldstore.free_name, koldstore.managed, koldstore.do_unmanage_table,
    koldstore.do_set_retention, koldstore.do_set_table_auto_flush, koldstore.do_set_cold_limit, koldstore.flush_due, koldstore.enqueue_flush,
    koldstore.do_flush_table, koldstore.do_cancel_job FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.table_status, koldstore.readable_feed, koldstore.async_mirror_status, koldstore.gaps, koldstore.apply_waits_for, koldstore.slot_waits_for,
    koldstore.wait_for_async_mirror, koldstore.open_seeds, koldstore.do_cancel_job, koldstore.cancel_job, koldstore.list_jobs, koldstore.do_flush_table,
    koldstore.enqueue_flush, koldstore.flush_due, koldstore.flush_table, koldstore.do_set_cold_limit, koldstore.set_tombstone_retention,
    koldstore.set_retention_bytes, koldstore.do_set_table_auto_flush, koldstore.set_table_auto_flush, koldstore.do_set_retention, koldstore.set_retention,
    koldstore.do_unmanage_table, koldstore.managed, koldstore.unmanage_table, koldstore.free_name, koldstore.do_manage_table, koldstore.check_storage,
    koldstore.check_feed_options, koldstore.manage_table;
