-- What is waited for. A seed or healing that has failed and is tried again (its job has an error) is not what a fence waits for: it may
-- take until somebody has brought an object back. And who keeps a replication slot from being made is named.

ALTER TABLE koldstore.replaced ADD step integer NOT NULL DEFAULT 13;
INSERT INTO koldstore.replaced
SELECT pg_catalog.pg_get_functiondef(p.oid), 14 FROM pg_catalog.pg_proc p
WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('wait_for_async_mirror', 'do_manage_table', 'async_mirror_status');

-- open_seeds names some of the tables whose seeds or healings are waited for.
CREATE FUNCTION koldstore.open_seeds() RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.string_agg(x.name, ', ' ORDER BY x.n) FILTER (WHERE x.n <= 5) || CASE WHEN count(*) > 5 THEN pg_catalog.format(' and %s more', count(*) - 5) ELSE '' END
    FROM (SELECT j.table_oid::pg_catalog.regclass::text AS name, row_number() OVER (ORDER BY j.created_at, j.job_id) AS n
          FROM koldstore.visible_job j WHERE j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running') AND j.error IS NULL) x;
END;

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

CREATE OR REPLACE FUNCTION koldstore.async_mirror_status() RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object(
        -- A slot that is being made is active, and nothing comes through it.
        'slot_name', c.slot_name, 'running', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND c.gap IS NULL, false),
        'healthy', coalesce(s.active AND s.confirmed_flush_lsn IS NOT NULL AND s.wal_status <> 'lost' AND c.gap IS NULL, false), 'gap', c.gap, 'gaps', koldstore.gaps(),
        'waiting_for', CASE WHEN c.gap IS NULL OR c.begin_anew THEN koldstore.slot_waits_for() END,
        'applied_lsn', c.applied_lsn, 'confirmed_lsn', s.confirmed_flush_lsn, 'current_lsn', pg_catalog.pg_current_wal_insert_lsn(),
        'lag_bytes', pg_catalog.pg_current_wal_flush_lsn() - s.confirmed_flush_lsn, 'retained_bytes', pg_catalog.pg_current_wal_insert_lsn() - s.restart_lsn,
        'wal_status', s.wal_status, 'watermark', c.watermark, 'epoch', c.epoch, 'rows_applied', c.rows_applied, 'applied_at', c.applied_at)
    FROM koldstore.checkpoint c LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name AND s.database = pg_catalog.current_database();
END;

DO $$
DECLARE
    e    record;
    was  text;
    edit text;
BEGIN
    FOR e IN
        VALUES
            ('wait_for_async_mirror', 'WHERE j\.status IN \(''queued'', ''running''\)\n', E'WHERE j.status IN (''queued'', ''running'') AND j.error IS NULL\n'),
            ('wait_for_async_mirror', '\(\s*SELECT pg_catalog\.string_agg\(j\.table_oid::pg_catalog\.regclass::text, '', ''\)[^)]*\)[^)]*\)\)', 'koldstore.open_seeds()'),
            ('wait_for_async_mirror', '(\n *)(SELECT c\.rows_applied INTO after)',
                '\1FOR s IN SELECT j.table_oid::pg_catalog.regclass AS tab, j.error FROM koldstore.visible_job j' ||
                '\1         WHERE j.job_type IN (''seed'', ''heal'') AND j.status IN (''queued'', ''running'') AND j.error IS NOT NULL ORDER BY j.created_at LIMIT 5 LOOP' ||
                '\1    RAISE WARNING ''the feed of "%" is not waited for: %'', s.tab, s.error;' ||
                '\1END LOOP;\1\2'),
            ('do_manage_table', 'Use koldstore\.unmanage_table first to begin anew\.',
                'koldstore.heal_table compares the feed with its table, which also brings a broken one back; koldstore.unmanage_table ends it, to begin anew.')
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
    FOR d IN SELECT r.definition FROM koldstore.replaced r WHERE r.step = 14 LOOP
        EXECUTE d;
    END LOOP;
END $$;
DELETE FROM koldstore.replaced WHERE step = 14;
ALTER TABLE koldstore.replaced DROP COLUMN step;
DROP FUNCTION koldstore.slot_waits_for, koldstore.open_seeds;
