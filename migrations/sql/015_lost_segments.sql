-- What is lost, and what cannot work. A segment whose object cannot be brought back is given up, and storages whose check has failed get no
-- tables.

INSERT INTO koldstore.replaced
SELECT pg_catalog.pg_get_functiondef(p.oid), 15 FROM pg_catalog.pg_proc p
WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('do_manage_table', 'verify_table_integrity');

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

REVOKE ALL ON FUNCTION koldstore.check_storage, koldstore.do_forget_segment FROM PUBLIC;

-- Since deletes can be forgotten, rows may be below the floor: it says which cursors are too old, not which rows are gone.
DO $$
DECLARE
    e    record;
    was  text;
    edit text;
BEGIN
    FOR e IN
        VALUES
            ('do_manage_table', '(PERFORM koldstore\.check_feed_options\(args\);)', '\1 PERFORM koldstore.check_storage(args ->> ''storage'');'),
            ('verify_table_integrity', 'UNION ALL SELECT ''segments are above the floor''[^\n]*\n *', ''),
            ('verify_table_integrity', '\(''segments are above the floor''\), ', '')
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
    FOR d IN SELECT r.definition FROM koldstore.replaced r WHERE r.step = 15 LOOP
        EXECUTE d;
    END LOOP;
END $$;
DELETE FROM koldstore.replaced WHERE step = 15;
DROP FUNCTION koldstore.do_forget_segment, koldstore.forget_segment, koldstore.check_storage;
