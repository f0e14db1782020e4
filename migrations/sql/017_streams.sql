-- What streams say about themselves.

-- A column that is dropped with CASCADE takes predicates along, and goes by the table's OID in the list of what was dropped.
CREATE OR REPLACE FUNCTION koldstore.note_dropped(dropped oid[]) RETURNS void
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

-- A hole in front of a stream's first event has a place, too, for readers who were there before it.
CREATE OR REPLACE FUNCTION koldstore.note_hole(rel oid, why text, from_lsn pg_lsn, to_lsn pg_lsn) RETURNS void
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

---- create above / drop below ----

CREATE OR REPLACE FUNCTION koldstore.note_dropped(dropped oid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE koldstore.stream s
    SET state = 'broken', reason = CASE WHEN s.table_oid = ANY (dropped) THEN 'its table was dropped' ELSE 'its predicate was dropped with what it depended on' END
    WHERE (s.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.table_oid))
       OR (s.predicate_fn = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = s.predicate_fn));
    UPDATE koldstore.managed_table m SET state = 'broken', reason = 'the table was dropped'
    WHERE m.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = m.table_oid);
    DELETE FROM koldstore.published_table t
    WHERE t.table_oid = ANY (dropped) AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.table_oid);
$$;

CREATE OR REPLACE FUNCTION koldstore.note_hole(rel oid, why text, from_lsn pg_lsn, to_lsn pg_lsn) RETURNS void
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
