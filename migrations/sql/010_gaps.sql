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
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
BEGIN
    PERFORM koldstore.check_table((SELECT pg_get_userbyid(c.relowner) FROM pg_class c WHERE c.oid = rel), rel);
    IF koldstore.is_published(rel) THEN
        EXECUTE format('ALTER PUBLICATION koldproxy DROP TABLE ONLY %s', rel::regclass);
    END IF;
    PERFORM koldstore.publish(rel, 1);
    PERFORM koldstore.mark_heal(rel, why);
END $$;

-- note_hole tells the streams of a table that events are missing behind what their logs have now. A hole in front of a stream's
-- first event has a place, too, for readers who were there before it.
CREATE FUNCTION koldstore.note_hole(rel oid, why text, from_lsn pg_lsn, to_lsn pg_lsn) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s    record;
    last text;
BEGIN
    FOR s IN SELECT t.stream_id, t.log_oid FROM koldstore.stream t JOIN pg_class c ON c.oid = t.log_oid WHERE t.table_oid = rel AND t.state IN ('seeding', 'active') LOOP
        EXECUTE format('SELECT max(id) FROM %s', s.log_oid::regclass) INTO last;
        UPDATE koldstore.stream t SET gaps = t.gaps + 1,
            gap = jsonb_build_object('after', coalesce(last, koldstore.event_id((SELECT c.watermark FROM koldstore.checkpoint c), '0/0')), 'reason', why, 'noticed_at', clock_timestamp(), 'from_lsn', from_lsn, 'to_lsn', to_lsn)
        WHERE t.stream_id = s.stream_id;
    END LOOP;
END $$;

-- begin_heal makes a feed be compared with its table from the beginning, by the job or by a new one. through is the last seq
-- that was handed out: what has a higher one was written afterwards and is right. A seed that is running becomes part of it. A job
-- that has nothing to do then is ended, since somebody may wait for it. As in do_unmanage_table, notices are kept back.
CREATE FUNCTION koldstore.begin_heal(rel oid, job uuid, through bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning AS $$
DECLARE
    m    koldstore.managed_table;
    none boolean;
BEGIN
    SELECT * INTO m FROM koldstore.managed_table t WHERE t.table_oid = rel FOR UPDATE;
    none := m.state IS NULL OR m.state = 'pending' OR m.state = 'broken' AND m.seed_job IS DISTINCT FROM job;
    IF none OR m.state IN ('seeding', 'healing') THEN
        UPDATE koldstore.job j SET status = 'cancelled', error = CASE WHEN m.state IS NULL THEN 'the table is not managed any more' ELSE 'another job does the same' END,
            ended_at = clock_timestamp()
        WHERE j.job_id = job AND job IS DISTINCT FROM m.seed_job AND j.status = 'queued';
    END IF;
    IF none THEN
        RETURN false;
    ELSIF m.state IN ('seeding', 'healing') THEN
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
    UPDATE koldstore.checkpoint SET applied_lsn = at, system_identifier = system, timeline = line, gap = NULL, gap_at = NULL, begin_anew = false, told_lsn = NULL;
    -- Partitions may have come and gone as well; everything is compared anyway.
    PERFORM koldstore.note_partitions(t.table_oid) FROM koldstore.published_table t;
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

-- Partitioned tables. They are published as a whole (publish_via_partition_root): changes come as changes of the root, with its
-- columns, whichever partition they are in. What has no changes to be published is noticed here: partitions that come, go or are
-- truncated on their own.

-- leaves are the tables that hold the rows of a table: itself, unless it is partitioned.
CREATE FUNCTION koldstore.leaves(rel oid) RETURNS SETOF pg_catalog.pg_class
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.* FROM pg_catalog.pg_class c WHERE c.oid = rel AND c.relkind <> 'p'
    UNION ALL
    SELECT c.* FROM pg_catalog.pg_partition_tree(rel) t JOIN pg_catalog.pg_class c ON c.oid = t.relid
    WHERE t.isleaf AND c.relkind <> 'p' AND c.oid <> rel;
END;

-- partition_fault says why the partitions of a table cannot be captured; NULL if they can.
CREATE FUNCTION koldstore.partition_fault(rel oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.format('its partition %s %s', c.oid::pg_catalog.regclass,
        CASE WHEN c.relkind = 'f' THEN 'is a foreign table' WHEN c.relpersistence = 'u' THEN 'is unlogged' ELSE 'is no table' END)
    FROM koldstore.leaves(rel) c WHERE c.oid <> rel AND (c.relkind <> 'r' OR c.relpersistence <> 'p') LIMIT 1;
END;

-- partitions_moved says why rows of a captured table may have come or gone without a change of theirs; NULL if they have not.
CREATE FUNCTION koldstore.partitions_moved(rel oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT CASE WHEN l.oid IS NULL THEN pg_catalog.format('partition %s was taken away', coalesce(p.leaf_oid::pg_catalog.regclass::text, '?'))
                WHEN p.leaf_oid IS NULL THEN pg_catalog.format('partition %s was added', l.oid::pg_catalog.regclass)
                ELSE pg_catalog.format('partition %s was truncated or rewritten', l.oid::pg_catalog.regclass) END
    FROM (SELECT * FROM koldstore.partition q WHERE q.table_oid = rel) p
    FULL JOIN (SELECT c.* FROM koldstore.leaves(rel) c WHERE c.oid <> rel) l ON l.oid = p.leaf_oid
    WHERE l.oid IS NULL OR p.leaf_oid IS NULL OR p.filenode <> pg_catalog.pg_relation_filenode(l.oid) LIMIT 1;
END;

-- partitions_unseen says whether partitions have come, gone or been truncated and koldproxy has not looked yet. Anybody may ask.
CREATE FUNCTION koldstore.partitions_unseen() RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM koldstore.published_table t JOIN pg_class c ON c.oid = t.table_oid WHERE c.relkind = 'p' AND koldstore.partitions_moved(c.oid) IS NOT NULL)
$$;

-- note_partitions brings the list of leaves up to date. They all need a whole old row in the write-ahead log: a new one has the
-- identity of its key, with which the application's writes work but exits and deletes could not be told.
CREATE FUNCTION koldstore.note_partitions(rel oid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    leaf pg_class;
BEGIN
    IF NOT EXISTS (SELECT FROM koldstore.published_table t JOIN pg_class c ON c.oid = t.table_oid WHERE t.table_oid = rel AND c.relkind = 'p') THEN
        RETURN;
    END IF;
    DELETE FROM koldstore.partition p WHERE p.table_oid = rel AND NOT EXISTS (SELECT FROM koldstore.leaves(rel) c WHERE c.oid = p.leaf_oid);
    FOR leaf IN SELECT * FROM koldstore.leaves(rel) LOOP
        INSERT INTO koldstore.partition AS p (leaf_oid, table_oid, filenode, identity_before)
        VALUES (leaf.oid, rel, coalesce(pg_relation_filenode(leaf.oid), 0), koldstore.identity(leaf.oid))
        ON CONFLICT (leaf_oid) DO UPDATE SET filenode = EXCLUDED.filenode WHERE p.filenode <> EXCLUDED.filenode;
        IF leaf.relreplident <> 'f' AND leaf.relkind = 'r' THEN
            EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', leaf.oid::regclass);
        END IF;
    END LOOP;
END $$;

-- look_at_partitions has what follows a table compared with it, if rows have come or gone. Anybody's DDL calls it, and koldproxy
-- every few seconds: TRUNCATE of a partition is seen by nobody else, nor is anything on a server without event triggers.
CREATE FUNCTION koldstore.look_at_partitions(rel oid, is_new boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    why text := koldstore.partitions_moved(rel);
BEGIN
    IF why IS NULL AND NOT EXISTS (SELECT FROM koldstore.leaves(rel) c WHERE c.relreplident <> 'f' AND c.relkind = 'r') THEN
        RETURN false;
    END IF;
    PERFORM koldstore.note_partitions(rel);
    IF why IS NOT NULL AND NOT is_new THEN
        PERFORM koldstore.mark_heal(rel, why);
    END IF;
    RETURN true;
END $$;

-- note_partition_ddl is for event triggers: a table was created, altered or dropped.
CREATE FUNCTION koldstore.note_partition_ddl(changed oid, created boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    root oid;
BEGIN
    FOR root IN SELECT t.table_oid FROM koldstore.published_table t JOIN pg_class c ON c.oid = t.table_oid
                WHERE c.relkind = 'p' AND (t.table_oid = changed OR t.table_oid = pg_partition_root(changed)
                    OR t.table_oid = (SELECT p.table_oid FROM koldstore.partition p WHERE p.leaf_oid = changed)) LOOP
        PERFORM koldstore.look_at_partitions(root, created);
    END LOOP;
END $$;

CREATE FUNCTION koldstore.watch_partitions() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_EVENT = 'sql_drop' THEN
        PERFORM koldstore.note_partition_ddl(d.objid, false) FROM pg_event_trigger_dropped_objects() d
        WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND d.object_type = 'table';
    ELSE
        PERFORM koldstore.note_partition_ddl(d.objid, TG_TAG = 'CREATE TABLE') FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_class'::regclass;
    END IF;
END $$;

REVOKE ALL ON FUNCTION koldstore.look_at_partitions FROM PUBLIC;

DO $$
BEGIN
    IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
        CREATE EVENT TRIGGER koldproxy_partition ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'ALTER TABLE') EXECUTE FUNCTION koldstore.watch_partitions();
        CREATE EVENT TRIGGER koldproxy_partition_drop ON sql_drop WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED', 'DROP TYPE') EXECUTE FUNCTION koldstore.watch_partitions();
        ALTER EVENT TRIGGER koldproxy_partition ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_partition_drop ENABLE ALWAYS;
    END IF;
END $$;

---- create above / drop below ----

DROP EVENT TRIGGER IF EXISTS koldproxy_partition;
DROP EVENT TRIGGER IF EXISTS koldproxy_partition_drop;
DROP FUNCTION koldstore.watch_partitions, koldstore.note_partition_ddl, koldstore.look_at_partitions, koldstore.note_partitions, koldstore.partitions_unseen, koldstore.partitions_moved, koldstore.partition_fault, koldstore.leaves;
DROP FUNCTION koldstore.heal_gap, koldstore.do_heal_table, koldstore.heal_table, koldstore.heal_here, koldstore.mark_heal, koldstore.begin_anew,
    koldstore.begin_heal, koldstore.note_hole, koldstore.repair_table, koldstore.restore_publication, koldstore.strangers, koldstore.gap_basis;
