-- Places for cold segments beside the one of koldproxy's configuration, and the files in them.

-- storages is what everybody may know of the places for segments. Credentials are never shown.
CREATE VIEW koldstore.storages AS
    SELECT s.name, s.storage_id, s.storage_type, s.base_path, s.config, s.credentials <> '{}' AS has_credentials, s.created_by, s.created_at,
           s.wants_check AS check_pending, s.checked_at, s.check_error
    FROM koldstore.storage s;
GRANT SELECT ON koldstore.storages TO PUBLIC;

-- segments shows the files that hold the cold rows of tables that the reader may see: the current ones, in the order of
-- their changes (docs/format.md).
CREATE VIEW koldstore.segments WITH (security_barrier) AS
    SELECT g.table_oid::pg_catalog.regclass AS table_name, g.segment_id, g.storage, coalesce(s.base_path, '') AS base_path, g.object_key, g.min_seq, g.max_seq, g.row_count,
           g.dead_count, g.tombstones, g.size_bytes, pg_catalog.encode(g.sha256, 'hex') AS sha256, g.created_at
    FROM koldstore.segment g JOIN koldstore.storage s ON s.name = g.storage
    WHERE g.state = 'active' AND koldstore.may_read(g.table_oid)
    ORDER BY g.table_oid, g.min_seq;
GRANT SELECT ON koldstore.segments TO PUBLIC;

-- may_register says whether a role may say where koldproxy reads and writes files: a superuser, and whoever may act as koldproxy.
CREATE FUNCTION koldstore.may_register(requester name) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT r.rolsuper OR pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE')
                     FROM pg_catalog.pg_roles r, pg_catalog.pg_class c
                     WHERE r.rolname = requester AND c.oid = 'koldstore.storage'::pg_catalog.regclass), false);
END;

CREATE FUNCTION koldstore.register_storage(
    name         text,
    storage_type text,
    base_path    text,
    credentials  jsonb   DEFAULT '{}',
    config       jsonb   DEFAULT '{}',
    "check"      boolean DEFAULT true
) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args)
    VALUES ('register_storage', pg_catalog.jsonb_build_object('name', name, 'storage_type', storage_type, 'base_path', base_path,
        'credentials', coalesce(credentials, '{}'), 'config', coalesce(config, '{}'), 'check', coalesce("check", false)))
    RETURNING result INTO answer;
    RETURN (answer ->> 'storage_id')::uuid;
END $$;
COMMENT ON FUNCTION koldstore.register_storage IS
    'Adds a place for cold segments. With "check" koldproxy stores, reads and removes an object there after the commit and notes the outcome in koldstore.storages.';

CREATE FUNCTION koldstore.alter_storage_credentials(name text, credentials jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO koldstore.command (verb, args)
    VALUES ('alter_storage_credentials', pg_catalog.jsonb_build_object('name', name, 'credentials', coalesce(credentials, '{}')));
END $$;

-- check_credentials refuses credentials that no storage of a type has. A value is the secret itself or, better, says where koldproxy
-- finds it: {"file": "name"} or {"env": "NAME"}. Messages name no value.
CREATE FUNCTION koldstore.check_credentials(storage_type text, credentials jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    allowed text[] := CASE storage_type
        WHEN 's3' THEN ARRAY['access_key_id', 'secret_access_key', 'session_token']
        WHEN 'gcs' THEN ARRAY['service_account']
        WHEN 'azure' THEN ARRAY['account_name', 'account_key', 'sas_token']
        ELSE ARRAY[]::text[] END;
    c       record;
BEGIN
    IF pg_catalog.jsonb_typeof(credentials) <> 'object' THEN
        RAISE EXCEPTION 'credentials must be a JSON object' USING ERRCODE = '22023';
    END IF;
    FOR c IN SELECT e.key, e.value FROM pg_catalog.jsonb_each(credentials) AS e LOOP
        IF c.key <> ALL (allowed) THEN
            RAISE EXCEPTION 'storage type % has no credential "%"', storage_type, c.key USING ERRCODE = '22023',
                HINT = CASE WHEN pg_catalog.cardinality(allowed) = 0 THEN 'It takes no credentials.' ELSE 'There are ' || pg_catalog.array_to_string(allowed, ', ') || '.' END;
        ELSIF NOT (pg_catalog.jsonb_typeof(c.value) = 'string'
                OR pg_catalog.jsonb_typeof(c.value) = 'object' AND (SELECT count(*) = 1 AND pg_catalog.bool_and(r.key IN ('file', 'env') AND pg_catalog.jsonb_typeof(r.value) = 'string')
                                                                    FROM pg_catalog.jsonb_each(c.value) AS r)) THEN
            RAISE EXCEPTION 'credential "%" must be a string, {"file": "name"} or {"env": "NAME"}', c.key USING ERRCODE = '22023';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION koldstore.do_register_storage(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted  text := args ->> 'name';
    kind    text := args ->> 'storage_type';
    path    text := args ->> 'base_path';
    allowed text[];
    option  record;
    id      uuid;
BEGIN
    IF NOT koldstore.may_register(requester) THEN
        RAISE EXCEPTION 'permission denied to register a storage' USING ERRCODE = '42501',
            HINT = 'Superusers and members of koldproxy''s role may: a storage says where koldproxy reads and writes.';
    ELSIF wanted IS NULL OR wanted = '' THEN
        RAISE EXCEPTION 'name must not be empty' USING ERRCODE = '22023';
    ELSIF kind IS NULL OR kind NOT IN ('filesystem', 's3', 'gcs', 'azure') THEN
        RAISE EXCEPTION 'unknown storage type "%"', coalesce(kind, 'NULL') USING ERRCODE = '22023', HINT = 'There are filesystem, s3, gcs and azure.';
    ELSIF path IS NULL OR path = '' THEN
        RAISE EXCEPTION 'base_path must not be empty' USING ERRCODE = '22023';
    ELSIF kind = 'filesystem' AND NOT pg_catalog.starts_with(path, '/') THEN
        RAISE EXCEPTION 'base_path of a filesystem storage must be absolute' USING ERRCODE = '22023';
    ELSIF kind <> 'filesystem' AND path !~ '^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$' THEN
        RAISE EXCEPTION 'base_path must be bucket/prefix' USING ERRCODE = '22023', HINT = 'Letters, digits, dots, dashes and underscores; no scheme and no parameters.';
    ELSIF pg_catalog.jsonb_typeof(args -> 'config') <> 'object' THEN
        RAISE EXCEPTION 'config must be a JSON object' USING ERRCODE = '22023';
    END IF;
    PERFORM koldstore.check_credentials(kind, args -> 'credentials');
    allowed := CASE kind WHEN 's3' THEN ARRAY['region', 'endpoint', 'use_path_style'] WHEN 'gcs' THEN ARRAY['endpoint']
        WHEN 'azure' THEN ARRAY['account', 'endpoint'] ELSE ARRAY[]::text[] END;
    FOR option IN SELECT e.key, e.value FROM pg_catalog.jsonb_each(args -> 'config') AS e LOOP
        IF option.key <> ALL (allowed) OR pg_catalog.jsonb_typeof(option.value) NOT IN ('string', 'boolean') THEN
            RAISE EXCEPTION 'storage type % has no option "%" of that kind', kind, option.key USING ERRCODE = '22023';
        END IF;
    END LOOP;
    INSERT INTO koldstore.storage (name, storage_type, base_path, credentials, config, created_by, wants_check)
    VALUES (wanted, kind, path, args -> 'credentials', args -> 'config', requester, (args ->> 'check')::boolean)
    ON CONFLICT DO NOTHING RETURNING storage_id INTO id;
    IF id IS NULL THEN
        RAISE EXCEPTION 'storage "%" already exists', wanted USING ERRCODE = '42710';
    END IF;
    NOTIFY koldstore_job;
    RETURN pg_catalog.jsonb_build_object('storage_id', id);
END $$;

CREATE FUNCTION koldstore.do_alter_storage_credentials(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kind text;
BEGIN
    IF NOT koldstore.may_register(requester) THEN
        RAISE EXCEPTION 'permission denied to change a storage' USING ERRCODE = '42501', HINT = 'Superusers and members of koldproxy''s role may.';
    END IF;
    SELECT s.storage_type INTO kind FROM koldstore.storage s WHERE s.name = args ->> 'name' FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'storage "%" does not exist', coalesce(args ->> 'name', 'NULL') USING ERRCODE = '42704';
    ELSIF kind = 'configured' THEN
        RAISE EXCEPTION 'the storage of koldproxy''s configuration has its credentials there' USING ERRCODE = '55000';
    END IF;
    PERFORM koldstore.check_credentials(kind, args -> 'credentials');
    UPDATE koldstore.storage s SET credentials = args -> 'credentials', version = s.version + 1, wants_check = true WHERE s.name = args ->> 'name';
    NOTIFY koldstore_job;
    RETURN '{"ok": true}';
END $$;

-- Files of segments: what a dead process left, what the catalog says of them, and one whose object cannot be brought back.

-- recover_segments gives up files of a table that a dead process left unfinished, so that the sweep removes their objects.
-- What may still be at work (a running job, or younger than an hour) stays.
CREATE FUNCTION koldstore.recover_segments(table_name regclass, dry_run boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('recover_segments', pg_catalog.jsonb_build_object('table', table_name::oid, 'dry_run', coalesce(dry_run, false)))
    RETURNING result INTO answer;
    RETURN (answer ->> 'actions')::bigint;
END $$;
COMMENT ON FUNCTION koldstore.recover_segments IS 'Gives up unfinished files of a table that nobody works on any more, and says how many. With dry_run it only counts.';

CREATE FUNCTION koldstore.do_recover_segments(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m       koldstore.managed_table := koldstore.managed(requester, args);
    orphans uuid[];
BEGIN
    SELECT coalesce(pg_catalog.array_agg(s.segment_id), '{}') INTO orphans FROM koldstore.segment s
    WHERE s.table_oid = m.table_oid AND s.state = 'in_progress' AND s.created_at < pg_catalog.clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM koldstore.job j WHERE j.job_id = s.job_id AND j.status = 'running');
    IF NOT (args ->> 'dry_run')::boolean THEN
        UPDATE koldstore.segment s SET state = 'deleted', min_seq = 0, max_seq = 0, sha256 = '', ended_at = pg_catalog.clock_timestamp()
        WHERE s.segment_id = ANY (orphans) AND s.state = 'in_progress';
        NOTIFY koldstore_job;
    END IF;
    RETURN pg_catalog.jsonb_build_object('actions', pg_catalog.cardinality(orphans));
END $$;

-- verify_table_integrity compares the catalog with itself and with the mirror. koldproxy verify reads the files as well. Rows may be below
-- the floor, since deletes can be forgotten: it says which cursors are too old, not which rows are gone.
CREATE FUNCTION koldstore.verify_table_integrity(table_name regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    m      koldstore.visible_managed_table := koldstore.readable_feed(table_name);
    lowest bigint;
    checks jsonb;
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.mirror_oid) THEN -- nobody has dropped it
        EXECUTE pg_catalog.format('SELECT min(seq) FROM %s', m.mirror_oid::pg_catalog.regclass) INTO lowest;
    END IF;
    WITH s AS (
        SELECT g.*, pg_catalog.lag(g.max_seq) OVER (ORDER BY g.min_seq) AS before_max FROM koldstore.visible_segment g WHERE g.table_oid = table_name AND g.state = 'active'
    ), found(check_name, segment_id) AS (
        SELECT 'segments do not overlap', s.segment_id FROM s WHERE s.min_seq <= s.before_max
        UNION ALL SELECT 'the mirror is above the segments', s.segment_id FROM s WHERE s.max_seq >= lowest
        UNION ALL SELECT 'checksums, paths and sizes are there', s.segment_id FROM s WHERE pg_catalog.octet_length(s.sha256) IS DISTINCT FROM 32 OR s.object_key = '' OR s.size_bytes <= 0
        UNION ALL SELECT 'there is a key hash for each row', s.segment_id FROM s WHERE pg_catalog.octet_length(s.key_hashes) IS DISTINCT FROM 8 * s.row_count
        UNION ALL SELECT 'counts agree', s.segment_id FROM s WHERE s.row_count <= 0 OR s.dead_count NOT BETWEEN 0 AND s.row_count OR s.tombstones NOT BETWEEN 0 AND s.row_count
        UNION ALL SELECT 'no file is left unfinished', g.segment_id FROM koldstore.visible_segment g
            WHERE g.table_oid = table_name AND g.state = 'in_progress' AND g.created_at < pg_catalog.clock_timestamp() - interval '1 hour'
    ), named(check_name) AS (
        VALUES ('segments do not overlap'), ('the mirror is above the segments'), ('checksums, paths and sizes are there'),
               ('there is a key hash for each row'), ('counts agree'), ('no file is left unfinished')
    )
    SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('check', n.check_name, 'ok', NOT EXISTS (SELECT FROM found f WHERE f.check_name = n.check_name),
        'segments', (SELECT coalesce(pg_catalog.jsonb_agg(f.segment_id), '[]') FROM (SELECT segment_id FROM found x WHERE x.check_name = n.check_name LIMIT 32) f)))
    INTO checks FROM named n;
    RETURN pg_catalog.jsonb_build_object('ok', NOT checks @> '[{"ok": false}]', 'checks', checks);
END $$;
COMMENT ON FUNCTION koldstore.verify_table_integrity IS 'What the catalog says about the cold segments of a table, compared with itself and with the mirror.';

CREATE FUNCTION koldstore.forget_segment(segment_id uuid) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('forget_segment', pg_catalog.jsonb_build_object('segment_id', segment_id)) RETURNING result INTO answer;
    RETURN (answer ->> 'job_id')::uuid;
END $$;
COMMENT ON FUNCTION koldstore.forget_segment IS
    'Gives up a cold segment whose object is lost. The feed is compared with its table, which has the rows that were in it; the result is the id of the job that does it. Deletes that were in it are gone, and the floor rises over them.';

-- Rows of the segment that are still in the table come back as new changes, for which the feed is healed. A delete cannot come back: a
-- consumer that has not seen it would keep the row for ever, so its cursor has to be refused. Rows of older segments that the lost ones
-- supersede stay dead.
CREATE FUNCTION koldstore.do_forget_segment(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    id   uuid := (args ->> 'segment_id')::uuid;
    rel  oid;
    m    koldstore.managed_table;
    lost koldstore.segment;
BEGIN
    IF NOT koldstore.may_register(requester) THEN
        RAISE EXCEPTION 'permission denied to forget a segment' USING ERRCODE = '42501', HINT = 'Superusers and members of koldproxy''s role may.';
    END IF;
    SELECT s.table_oid INTO rel FROM koldstore.segment s WHERE s.segment_id = id;
    -- The lock of every change of the manifest comes first.
    IF FOUND THEN
        m := koldstore.managed(requester, pg_catalog.jsonb_build_object('table', rel));
        SELECT * INTO lost FROM koldstore.segment s WHERE s.segment_id = id AND s.state = 'active';
    END IF;
    IF lost.segment_id IS NULL THEN
        RAISE EXCEPTION 'there is no segment %', coalesce(id::text, 'NULL') USING ERRCODE = '42704',
            HINT = 'koldstore.segments lists the current ones; errors of reads and flushes, and koldproxy verify, name the one that is lost.';
    END IF;
    UPDATE koldstore.segment s SET state = 'deleted', ended_at = pg_catalog.clock_timestamp(), key_hashes = NULL WHERE s.segment_id = id;
    UPDATE koldstore.managed_table t
    SET generation = t.generation + 1, floor = CASE WHEN lost.tombstones > 0 THEN greatest(t.floor, lost.max_seq) ELSE t.floor END
    WHERE t.table_oid = rel;
    RETURN koldstore.do_heal_table(requester, pg_catalog.jsonb_build_object('table', rel));
END $$;

REVOKE ALL ON FUNCTION koldstore.do_register_storage, koldstore.do_alter_storage_credentials, koldstore.do_recover_segments, koldstore.do_forget_segment
    FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.do_forget_segment, koldstore.forget_segment, koldstore.verify_table_integrity, koldstore.do_recover_segments,
    koldstore.recover_segments, koldstore.do_alter_storage_credentials, koldstore.do_register_storage, koldstore.check_credentials,
    koldstore.alter_storage_credentials, koldstore.register_storage, koldstore.may_register;
DROP VIEW koldstore.segments, koldstore.storages;
