-- Gaps: what happens when changes may be missing. Of feeds nothing is lost for good, since the table is there to be compared
-- with; of streams the events are, so their logs say where.

-- gap_basis is what must not change while a new slot is being made: what takes part, and the columns of its tables.
CREATE FUNCTION koldstore.gap_basis() RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.md5(pg_catalog.concat(
        (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(':', t.table_oid, t.shape), '|' ORDER BY t.table_oid) FROM koldstore.published_table t), '/',
        (SELECT pg_catalog.string_agg(s.stream_id::text, '|' ORDER BY s.stream_id) FROM koldstore.stream s), '/',
        (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(':', m.table_oid, m.created_at), '|' ORDER BY m.table_oid) FROM koldstore.managed_table m)));
END;

-- strangers counts what the catalog names and the database does not have under that number: the catalog came with a dump, which
-- numbers everything anew, and a feed or stream must not be resumed on whatever has its number now.
CREATE FUNCTION koldstore.strangers() RETURNS bigint
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT (SELECT count(*) FROM koldstore.managed_table m WHERE m.state <> 'broken' AND NOT EXISTS (
                SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.mirror_oid AND c.relnamespace = 'koldstore'::pg_catalog.regnamespace))
         + (SELECT count(*) FROM koldstore.stream s WHERE s.state <> 'broken' AND NOT EXISTS (
                SELECT FROM pg_catalog.pg_class c WHERE c.oid = s.log_oid AND c.relname = '_stream_' || s.name));
END;

-- restore_publication makes the publication what it has to be. Rows that were written before are not brought back by it.
CREATE FUNCTION koldstore.restore_publication() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    p   pg_publication;
    rel regclass;
BEGIN
    SELECT * INTO p FROM pg_publication WHERE pubname = 'koldproxy';
    IF p.puballtables THEN
        DROP PUBLICATION koldproxy;
        p := NULL;
    END IF;
    IF p.oid IS NULL THEN
        CREATE PUBLICATION koldproxy WITH (publish_via_partition_root = true);
    ELSIF NOT (p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AND p.pubviaroot) THEN
        ALTER PUBLICATION koldproxy SET (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
    END IF;
    FOR rel IN SELECT c.oid FROM pg_class c
               WHERE c.oid = 'koldstore.wal_marker'::regclass OR c.oid IN (SELECT t.table_oid FROM koldstore.published_table t) LOOP
        IF EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication q ON q.oid = r.prpubid, to_jsonb(r) j
                   WHERE q.pubname = 'koldproxy' AND r.prrelid = rel AND (j ->> 'prqual' IS NOT NULL OR j ->> 'prattrs' IS NOT NULL)) THEN
            EXECUTE format('ALTER PUBLICATION koldproxy DROP TABLE ONLY %s', rel);
        END IF;
        IF NOT koldstore.is_published(rel) THEN
            EXECUTE format('ALTER PUBLICATION koldproxy ADD TABLE ONLY %s', rel);
        END IF;
    END LOOP;
END $$;

-- repair_table puts a table back into the publication that somebody has taken out, or published in part only, and has everything
-- that follows it go on from there. The publication and the marker commit together, behind all open writers.
CREATE FUNCTION koldstore.repair_table(rel oid, why text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM koldstore.check_table((SELECT pg_get_userbyid(c.relowner) FROM pg_class c WHERE c.oid = rel), rel);
    IF koldstore.is_published(rel) THEN
        EXECUTE format('ALTER PUBLICATION koldproxy DROP TABLE ONLY %s', rel::regclass);
    END IF;
    PERFORM koldstore.publish(rel, 1);
    PERFORM koldstore.mark_heal(rel, why);
END $$;

-- note_hole tells the streams of a table that events are missing behind what their logs have now.
CREATE FUNCTION koldstore.note_hole(rel oid, why text, from_lsn pg_lsn, to_lsn pg_lsn) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s    record;
    last text;
BEGIN
    FOR s IN SELECT t.stream_id, t.log_oid FROM koldstore.stream t JOIN pg_class c ON c.oid = t.log_oid WHERE t.table_oid = rel AND t.state IN ('seeding', 'active') LOOP
        EXECUTE format('SELECT max(id) FROM %s', s.log_oid::regclass) INTO last;
        UPDATE koldstore.stream t SET gaps = t.gaps + 1,
            gap = jsonb_build_object('after', last, 'reason', why, 'noticed_at', clock_timestamp(), 'from_lsn', from_lsn, 'to_lsn', to_lsn)
        WHERE t.stream_id = s.stream_id;
    END LOOP;
END $$;

-- begin_heal makes a feed be compared with its table from the beginning, by the job or by a new one. through is the last seq
-- that was handed out: what has a higher one was written afterwards and is right. A seed that is running becomes part of it.
CREATE FUNCTION koldstore.begin_heal(rel oid, job uuid, through bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m koldstore.managed_table;
BEGIN
    SELECT * INTO m FROM koldstore.managed_table t WHERE t.table_oid = rel FOR UPDATE;
    IF m.state IS NULL OR m.state = 'pending' OR m.state = 'broken' AND m.seed_job IS DISTINCT FROM job THEN
        RETURN false;
    ELSIF m.state IN ('seeding', 'healing') THEN
        UPDATE koldstore.job j SET status = 'cancelled', error = 'another job does the same', ended_at = clock_timestamp()
        WHERE j.job_id = job AND job <> m.seed_job AND j.status = 'queued';
        job := m.seed_job;
    ELSIF job IS NULL THEN
        INSERT INTO koldstore.job AS j (job_type, table_oid) VALUES ('heal', rel) RETURNING j.job_id INTO job;
    END IF;
    UPDATE koldstore.managed_table t
    SET state = 'healing', reason = NULL, seed_job = job, seed_key = NULL, heal_step = 'mirror', heal_seq = 0, heal_through = through
    WHERE t.table_oid = rel;
    EXECUTE format('DROP TABLE IF EXISTS koldstore.%I', 'heal_' || m.mirror_oid);
    RETURN true;
END $$;

-- begin_anew goes on from a new slot at a position: the leader of this reign has made it, after whatever went wrong. Everything
-- that was committed before is in the tables, everything that is committed later comes through the slot.
CREATE FUNCTION koldstore.begin_anew(reign bigint, at pg_lsn, system text, line integer) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c  koldstore.checkpoint;
    id bigint;
BEGIN
    SELECT * INTO c FROM koldstore.checkpoint FOR NO KEY UPDATE;
    IF c.epoch <> reign THEN
        RETURN NULL;
    END IF;
    INSERT INTO koldstore.gap AS g (noticed_at, reason, from_lsn, to_lsn, from_time, seq)
    VALUES (coalesce(c.gap_at, clock_timestamp()), coalesce(c.gap, 'asked for'), c.applied_lsn, at, c.applied_at, c.watermark) RETURNING g.gap_id INTO id;
    UPDATE koldstore.checkpoint SET applied_lsn = at, system_identifier = system, timeline = line, gap = NULL, gap_at = NULL, begin_anew = false;
    DELETE FROM koldstore.applied_shape;
    INSERT INTO koldstore.applied_shape SELECT t.table_oid, t.shape FROM koldstore.published_table t;
    -- The markers of what was still waiting for them are in the hole.
    UPDATE koldstore.stream SET state = CASE WHEN seed_job IS NULL THEN 'active' ELSE 'seeding' END WHERE state = 'pending';
    UPDATE koldstore.managed_table SET state = 'seeding' WHERE state = 'pending';
    PERFORM koldstore.note_hole(s.table_oid, c.gap, c.applied_lsn, at) FROM (SELECT DISTINCT t.table_oid FROM koldstore.stream t) s;
    PERFORM koldstore.begin_heal(m.table_oid, NULL, c.watermark) FROM koldstore.managed_table m WHERE m.state <> 'broken';
    RETURN id;
END $$;

-- mark_heal puts the beginning of a healing into the write-ahead log, behind whatever made it necessary. A hole in the streams of
-- the table is noted there too, unless why is NULL.
CREATE FUNCTION koldstore.mark_heal(rel oid, why text, job uuid DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO koldstore.wal_marker (kind, subject, details) VALUES ('heal', rel::bigint, pg_catalog.jsonb_build_object('reason', why, 'job', job))
$$;

-- heal_here carries out such a marker.
CREATE FUNCTION koldstore.heal_here(rel oid, why text, job uuid, through bigint, at pg_lsn) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF why IS NOT NULL THEN
        INSERT INTO koldstore.gap (table_oid, reason, to_lsn, seq) VALUES (rel, why, at, through);
        PERFORM koldstore.note_hole(rel, why, NULL, at);
    END IF;
    RETURN koldstore.begin_heal(rel, job, through);
END $$;

CREATE FUNCTION koldstore.heal_table(table_name regclass) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO koldstore.command (verb, args) VALUES ('heal_table', pg_catalog.jsonb_build_object('table', table_name::oid)) RETURNING result INTO answer;
    RETURN (answer ->> 'job_id')::uuid;
END $$;
COMMENT ON FUNCTION koldstore.heal_table IS
    'Compares the change feed of a table with the table and writes the differences as new changes, also to bring back a feed that is broken. The result is the id of the job that does it.';

CREATE FUNCTION koldstore.do_heal_table(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m   koldstore.managed_table := koldstore.managed(requester, args);
    job uuid := m.seed_job;
BEGIN
    PERFORM koldstore.check_table(requester, m.table_oid);
    PERFORM koldstore.publish(m.table_oid);
    IF m.state IN ('active', 'broken') THEN
        INSERT INTO koldstore.job AS j (job_type, table_oid, created_by) VALUES ('heal', m.table_oid, requester) RETURNING j.job_id INTO job;
        IF m.state = 'broken' THEN
            UPDATE koldstore.managed_table t SET seed_job = job WHERE t.table_oid = m.table_oid;
        END IF;
    END IF;
    PERFORM koldstore.mark_heal(m.table_oid, NULL, job);
    RETURN pg_catalog.jsonb_build_object('job_id', job);
END $$;

-- heal_gap closes a gap although koldproxy's configuration says to stop at one.
CREATE FUNCTION koldstore.heal_gap() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT koldstore.is_service_role() THEN
        RAISE EXCEPTION 'only koldproxy''s own role may close a gap' USING ERRCODE = '42501';
    END IF;
    UPDATE koldstore.checkpoint SET begin_anew = true WHERE gap IS NOT NULL;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION koldstore.heal_gap IS
    'With [apply] on_gap = stop: closes the gap that koldproxy has stopped at. Returns false if there is none.';

REVOKE ALL ON FUNCTION koldstore.restore_publication, koldstore.repair_table, koldstore.note_hole, koldstore.begin_heal, koldstore.begin_anew, koldstore.mark_heal,
    koldstore.heal_here, koldstore.do_heal_table, koldstore.heal_gap FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.heal_gap, koldstore.do_heal_table, koldstore.heal_table, koldstore.heal_here, koldstore.mark_heal, koldstore.begin_anew,
    koldstore.begin_heal, koldstore.note_hole, koldstore.repair_table, koldstore.restore_publication, koldstore.strangers, koldstore.gap_basis;
