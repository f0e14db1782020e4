-- start = 'earliest' beside writers: the applier reads the table page by page while the stream already captures changes.
-- changefeed/backfill.go has the argument why nothing is missing and nothing comes twice.

-- refusal_in_block is how this server says that COMMIT is impossible where a transaction block, or a function, is around it.
CREATE FUNCTION koldstore.refusal_in_block() RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    COMMIT;
    RETURN NULL;
EXCEPTION WHEN invalid_transaction_termination THEN
    RETURN SQLERRM;
END $$;

-- begin_backfill prepares the backfill of a stream that is being created: its job, the function that reads a page of the
-- table, and the trigger that notes what live events tell meanwhile.
CREATE FUNCTION koldstore.begin_backfill(stream bigint, owner name, requester name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s       koldstore.stream;
    source  text;
    keys    text;
    below   text;
    sorted  text;
    after   text;
    job     uuid := gen_random_uuid();
    reader  text := format('koldstore.%I(text[], bigint)', 'reader_' || stream);
    k       record;
BEGIN
    SELECT * INTO s FROM koldstore.stream t WHERE t.stream_id = stream;
    SELECT CASE WHEN c.relkind = 'p' THEN '' ELSE 'ONLY ' END || c.oid::regclass::text INTO source FROM pg_class c WHERE c.oid = s.table_oid;
    -- Keys are compared as the primary key's own index compares them.
    FOR k IN SELECT ord.n, quote_ident(a.attname) AS name, format_type(a.atttypid, a.atttypmod) AS type,
                    koldstore.operator_of(i.indclass[ord.n - 1], 1::int2) AS less, koldstore.operator_of(i.indclass[ord.n - 1], 3::int2) AS equal,
                    koldstore.operator_of(i.indclass[ord.n - 1], 4::int2) AS at_least, koldstore.operator_of(i.indclass[ord.n - 1], 5::int2) AS above
             FROM pg_index i CROSS JOIN LATERAL generate_series(1, i.indnkeyatts) AS ord(n)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[ord.n - 1]
             WHERE i.indrelid = s.table_oid AND i.indisprimary
             ORDER BY ord.n DESC
    LOOP
        keys := format('format(''%%s'', _ks_row.%s)', k.name) || coalesce(', ' || keys, '');
        sorted := format('_ks_row.%s USING %s', k.name, k.less) || coalesce(', ' || sorted, '');
        after := format('_ks_row.%s %s $1[%s]::%s', k.name, k.above, k.n, k.type)
            || CASE WHEN after IS NULL THEN '' ELSE format(' OR _ks_row.%s %s $1[%s]::%s AND (%s)', k.name, k.equal, k.n, k.type, after) END;
        below := format('_ks_row.%s %s $1[%s]::%s', k.name, k.at_least, k.n, k.type);
    END LOOP;
    -- The table's owner reads it, as in the backfill that keeps writers out.
    EXECUTE format('CREATE FUNCTION %s RETURNS TABLE (literal text, key text[]) LANGUAGE plpgsql STABLE SECURITY DEFINER
        SET search_path = pg_catalog, pg_temp SET row_security = off SET plan_cache_mode = force_custom_plan AS %L', reader, format(
        'BEGIN
            IF $1 IS NULL THEN
                RETURN QUERY SELECT format(''%%s'', _ks_row), ARRAY[%1$s] FROM %2$s AS _ks_row ORDER BY %3$s LIMIT $2;
            ELSE
                RETURN QUERY SELECT format(''%%s'', _ks_row), ARRAY[%1$s] FROM %2$s AS _ks_row WHERE %4$s AND (%5$s) ORDER BY %3$s LIMIT $2;
            END IF;
        END', keys, source, sorted, below, after));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', reader);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO CURRENT_USER', reader);
    PERFORM koldstore.hand_over(reader, owner);
    EXECUTE format('CREATE TRIGGER koldproxy_seed AFTER INSERT ON %s REFERENCING NEW TABLE AS told FOR EACH STATEMENT
        WHEN (pg_catalog.current_setting(''koldstore.backfill'', true) IS DISTINCT FROM ''on'') EXECUTE FUNCTION koldstore.note_touched(%L)',
        s.log_oid::regclass, stream);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER koldproxy_seed', s.log_oid::regclass);
    INSERT INTO koldstore.job (job_id, job_type, table_oid, args, created_by)
    VALUES (job, 'backfill', s.table_oid, jsonb_build_object('stream', s.schema_name || '.' || s.name), requester);
    UPDATE koldstore.stream t SET seed_job = job WHERE t.stream_id = stream;
END $$;

-- operator_of is the operator of an operator class with a strategy number, fit to stand in a query.
CREATE FUNCTION koldstore.operator_of(class oid, strategy int2) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.format('OPERATOR(%I.%s)', n.nspname, o.oprname)
    FROM pg_catalog.pg_opclass c
    JOIN pg_catalog.pg_amop a ON a.amopfamily = c.opcfamily AND a.amoplefttype = c.opcintype AND a.amoprighttype = c.opcintype AND a.amopstrategy = strategy
    JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
    WHERE c.oid = class;
END;

CREATE FUNCTION koldstore.note_touched() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO koldstore.seed_touched (stream_id, hash, k)
    SELECT DISTINCT TG_ARGV[0]::bigint, jsonb_hash_extended(t.k, 0), t.k FROM told t;
    RETURN NULL;
END $$;

-- backfill_progress says how the backfill of a stream is; gone if the stream is not there any more. It is asked by whoever
-- waits for it, and says no more than SHOW STREAMS.
CREATE FUNCTION koldstore.backfill_progress(stream bigint, OUT schema name, OUT name text, OUT state text, OUT reason text) RETURNS record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.schema_name, s.name::text, coalesce(s.state, 'gone'), s.reason
    FROM (SELECT stream AS id) AS asked LEFT JOIN koldstore.stream s ON s.stream_id = asked.id
$$;

-- await_backfill waits until the backfill of a stream is done. If it fails, or the waiting is cancelled, the stream goes.
CREATE PROCEDURE koldstore.await_backfill(stream bigint)
LANGUAGE plpgsql AS $$
DECLARE
    p         record;
    pause     double precision := 0.005;
    cancelled text;
BEGIN
    LOOP
        BEGIN
            SELECT * INTO p FROM koldstore.backfill_progress(stream);
            IF p.state IN ('pending', 'seeding') THEN
                PERFORM pg_catalog.pg_sleep(pause);
            END IF;
        EXCEPTION WHEN query_canceled THEN
            cancelled := SQLERRM;
        END;
        COMMIT; -- nothing is held while this waits
        IF cancelled IS NOT NULL THEN
            CALL koldstore.drop_stream(p.schema, p.name, true);
            COMMIT;
            RAISE EXCEPTION '%', cancelled USING ERRCODE = '57014', DETAIL = 'The stream was not created: its backfill was not done.';
        ELSIF p.state = 'gone' THEN
            RAISE EXCEPTION 'the stream was dropped before its backfill was done' USING ERRCODE = '57014';
        ELSIF p.state = 'broken' THEN
            CALL koldstore.drop_stream(p.schema, p.name, true);
            COMMIT;
            RAISE EXCEPTION 'the backfill of stream "%" failed: %', p.name, p.reason USING ERRCODE = '55000', DETAIL = 'The stream was not created.';
        END IF;
        EXIT WHEN p.state = 'active';
        pause := least(pause * 2, 0.1);
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION koldstore.begin_backfill, koldstore.note_touched FROM PUBLIC;

---- create above / drop below ----

DROP PROCEDURE koldstore.await_backfill;
DROP FUNCTION koldstore.backfill_progress, koldstore.note_touched, koldstore.operator_of, koldstore.begin_backfill, koldstore.refusal_in_block;
