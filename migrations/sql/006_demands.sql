-- Demands: what a function needs from koldproxy before it can answer (docs/architecture.md). koldproxy puts the answers into the setting
-- koldstore.staged and runs the statement again.

-- What is staged is in a setting, which every function that runs in the session can read and write, those of other roles included. So it is
-- sealed, for those alone who may have the answer, judged as the current user where it is asked for: in a function with SECURITY DEFINER that
-- is its owner. There are three lines for each answer: a head, its MAC in hexadecimal, and a box in base64. proxy/seal.go says how they are
-- made. Both secrets are for nobody but the owner, whose views and functions read them.
CREATE TABLE koldstore.stage_secret (
    secret bytea NOT NULL,
    seal   bytea NOT NULL
);
REVOKE ALL ON koldstore.stage_secret FROM PUBLIC;
ALTER TABLE koldstore.stage_secret ENABLE ROW LEVEL SECURITY;
COMMENT ON COLUMN koldstore.stage_secret.secret IS 'Keys of boxes come from it: koldstore.stage_key shows each to those who may have the answer.';
COMMENT ON COLUMN koldstore.stage_secret.seal IS 'MACs come from it, and are shown to nobody: what it has sealed is koldproxy''s.';
INSERT INTO koldstore.stage_secret
SELECT pg_catalog.string_agg(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), ''::bytea),
       pg_catalog.string_agg(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), ''::bytea)
FROM pg_catalog.generate_series(1, 4);

-- stage_right are the answers that the current role may have. secret tells koldproxy which secrets these are.
CREATE VIEW koldstore.stage_right WITH (security_barrier) AS
SELECT m.table_oid, k.kind, pg_catalog.encode(pg_catalog.sha256(s.seal), 'hex') AS secret
FROM koldstore.stage_secret s, koldstore.managed_table m, (VALUES ('cold_page'), ('flush')) AS k(kind)
WHERE CASE k.kind WHEN 'flush' THEN koldstore.is_owner(current_user, m.table_oid) ELSE koldstore.may_read(m.table_oid) END;
GRANT SELECT ON koldstore.stage_right TO PUBLIC;

-- demand_allowed says to koldproxy what it needs for sealing the answer to a demand; NULL when the current role may not have it.
CREATE FUNCTION koldstore.demand_allowed(demand jsonb) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.jsonb_build_object('pid', pg_catalog.pg_backend_pid(), 'secret', r.secret,
               'at', pg_catalog.floor(EXTRACT(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint)::text
    FROM koldstore.stage_right r WHERE r.table_oid = (demand ->> 'table')::oid AND r.kind = demand ->> 'kind';
END;

CREATE FUNCTION koldstore.staged_heads() RETURNS TABLE (n bigint, head text, mac text)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT i, s.lines[i * 3 - 2], s.lines[i * 3 - 1]
    FROM (SELECT pg_catalog.string_to_array(pg_catalog.current_setting('koldstore.staged', true), E'\n') AS lines) AS s,
         pg_catalog.generate_series(1, pg_catalog.cardinality(s.lines) / 3) AS i;
END;

-- stage_key shows the keys to those staged answers that the current role may have, wherever it asks: in a function with SECURITY
-- DEFINER that is the function's owner. A key opens one box of one session.
CREATE VIEW koldstore.stage_key WITH (security_barrier) AS
SELECT h.n, h.head, h.mac, j.head -> 'demand' AS demand,
       pg_catalog.sha512(s.secret || pg_catalog.int4send(pg_catalog.pg_backend_pid()) || pg_catalog.int8send(m.table_oid::bigint)
           || pg_catalog.convert_to(j.head -> 'demand' ->> 'kind', 'UTF8') || pg_catalog.decode(j.head ->> 'nonce', 'hex')) AS key
FROM koldstore.stage_secret s
CROSS JOIN koldstore.staged_heads() AS h
CROSS JOIN LATERAL (SELECT h.head::jsonb) AS j(head)
JOIN koldstore.managed_table m ON m.table_oid = (j.head -> 'demand' ->> 'table')::oid
WHERE CASE j.head -> 'demand' ->> 'kind' WHEN 'flush' THEN koldstore.is_owner(current_user, m.table_oid) WHEN 'cold_page' THEN koldstore.may_read(m.table_oid) ELSE false END;
GRANT SELECT ON koldstore.stage_key TO PUBLIC;

-- genuine says whether koldproxy has made a head, for this session, and no longer than a minute before the transaction began. Anybody
-- may ask; it tells nobody a MAC that he does not have.
CREATE FUNCTION koldstore.genuine(head text, mac text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(sha512(s.seal || decode(mac, 'hex')) = sha512(s.seal || sha512(s.seal || sha512(s.seal || int4send(pg_backend_pid()) || convert_to(head, 'UTF8'))))
        AND EXTRACT(epoch FROM transaction_timestamp()) * 1000000 < (head::jsonb ->> 'at')::bigint + 60000000, false)
    FROM koldstore.stage_secret s
$$;

-- unseal opens a box. The stream that it is combined with is made of SHA-512 over key and a counter.
CREATE FUNCTION koldstore.unseal(box bytea, key bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    size   integer := pg_catalog.length(box);
    stream bytea;
BEGIN
    SELECT pg_catalog.substr(pg_catalog.string_agg(pg_catalog.sha512(key || pg_catalog.int4send(i)), ''::bytea ORDER BY i), 1, size)
    INTO stream FROM pg_catalog.generate_series(0, size / 64) AS i;
    RETURN pg_catalog.convert_from(pg_catalog.substr(pg_catalog.varbit_send(
        ('x' || pg_catalog.encode(box, 'hex'))::varbit # ('x' || pg_catalog.encode(stream, 'hex'))::varbit), 5), 'UTF8')::jsonb;
END $$;

-- spans says whether a page was read from all segments that it had to be read from: the first ones behind its cursor, or the
-- last ones, without a hole. Anybody can have koldproxy read others, by raising a demand for them.
CREATE FUNCTION koldstore.spans(page jsonb) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT count(*) FILTER (WHERE s.listed) = pg_catalog.jsonb_array_length(page -> 'segments')
       AND coalesce(max(s.n) FILTER (WHERE s.listed), 0) = pg_catalog.jsonb_array_length(page -> 'segments')
    FROM (SELECT g.segment_id::text IN (SELECT pg_catalog.jsonb_array_elements_text(page -> 'segments')) AS listed,
                 pg_catalog.row_number() OVER (ORDER BY CASE page ->> 'mode' WHEN 'last' THEN -g.min_seq ELSE g.min_seq END) AS n
          FROM koldstore.visible_segment g
          WHERE g.table_oid = (page ->> 'table')::oid AND g.state = 'active' AND g.max_seq > coalesce((page ->> 'after')::bigint, -1)) AS s;
END;

-- staged finds the answer to a demand: the one with the largest limit among those that agree in the demand's other fields.
CREATE FUNCTION koldstore.staged(demand jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lines text[];
    k     record;
    box   bytea;
BEGIN
    IF coalesce(current_setting('koldstore.staged', true), '') = '' THEN
        RETURN NULL;
    END IF;
    lines := string_to_array(current_setting('koldstore.staged'), E'\n');
    FOR k IN SELECT s.* FROM koldstore.stage_key s WHERE s.demand @> staged.demand ORDER BY (s.demand ->> 'limit')::bigint DESC NULLS LAST LOOP
        CONTINUE WHEN NOT koldstore.genuine(k.head, k.mac) OR k.demand ->> 'kind' = 'cold_page' AND NOT koldstore.spans(k.demand);
        box := decode(lines[k.n * 3], 'base64');
        IF encode(sha512(box), 'hex') = k.head::jsonb ->> 'box' THEN
            RETURN koldstore.unseal(box, k.key);
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- demanding_names are the views, functions and tables with which a statement may raise a demand although its text does not
-- call the functions that do: what depends on those, or mentions one of its names in a body that is text. koldproxy holds the
-- answers of statements with one of these names. Each body is taken into words once.
CREATE FUNCTION koldstore.demanding_names() RETURNS SETOF name
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE bodies AS MATERIALIZED (
        SELECT p.oid, lower(p.prosrc) AS body FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace <> ALL (ARRAY['pg_catalog', 'information_schema', 'koldstore']::regnamespace[]) AND l.lanname NOT IN ('c', 'internal') AND p.prosqlbody IS NULL
    ), named AS MATERIALIZED (
        SELECT 'pg_proc'::regclass::oid AS kind, p.oid AS id, lower(p.proname) AS name FROM pg_proc p
        WHERE p.pronamespace <> ALL (ARRAY['pg_catalog', 'information_schema']::regnamespace[])
        UNION ALL
        SELECT 'pg_class'::regclass, c.oid, lower(c.relname) FROM pg_class c
        WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> ALL (ARRAY['pg_catalog', 'information_schema', 'koldstore', 'pg_toast']::regnamespace[])
    ), words AS MATERIALIZED (
        SELECT DISTINCT b.oid, w.word FROM bodies b CROSS JOIN LATERAL regexp_split_to_table(b.body, '[^[:alnum:]_$]+') AS w(word)
    ), uses(refkind, refid, kind, id) AS MATERIALIZED (
        SELECT d.refclassid, d.refobjid, 'pg_class'::regclass::oid, coalesce(r.ev_class, t.tgrelid, f.adrelid, y.polrelid)
        FROM pg_depend d
        LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
        LEFT JOIN pg_trigger t ON d.classid = 'pg_trigger'::regclass AND t.oid = d.objid
        LEFT JOIN pg_attrdef f ON d.classid = 'pg_attrdef'::regclass AND f.oid = d.objid
        LEFT JOIN pg_policy y ON d.classid = 'pg_policy'::regclass AND y.oid = d.objid
        WHERE d.refclassid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND d.objid >= 16384
            AND (d.refclassid = 'pg_proc'::regclass OR d.classid = 'pg_rewrite'::regclass)
        UNION ALL
        SELECT d.refclassid, d.refobjid, d.classid, d.objid FROM pg_depend d
        WHERE d.classid = 'pg_proc'::regclass AND d.refclassid IN ('pg_proc'::regclass, 'pg_class'::regclass) AND d.objid >= 16384
        UNION ALL
        SELECT n.kind, n.id, 'pg_proc'::regclass, w.oid FROM named n JOIN words w ON w.word = n.name
        UNION ALL -- a name that is no word
        SELECT n.kind, n.id, 'pg_proc'::regclass, b.oid FROM named n JOIN bodies b ON n.name ~ '[^[:alnum:]_$]' AND strpos(b.body, n.name) > 0
    ), reach(kind, id) AS (
        SELECT 'pg_proc'::regclass::oid, p.oid FROM pg_proc p
        WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('changes_since', 'flush_table')
        UNION
        SELECT u.kind, u.id FROM reach r JOIN uses u ON u.refkind = r.kind AND u.refid = r.id WHERE u.id IS NOT NULL
    )
    SELECT DISTINCT coalesce(p.proname, c.relname)
    FROM reach r
    LEFT JOIN pg_proc p ON r.kind = 'pg_proc'::regclass AND p.oid = r.id
    LEFT JOIN pg_class c ON r.kind = 'pg_class'::regclass AND c.oid = r.id
    JOIN pg_namespace s ON s.oid = coalesce(p.pronamespace, c.relnamespace) AND s.nspname !~ '^pg_temp_' -- those are for the session that has made them
    WHERE p.pronamespace IS DISTINCT FROM 'koldstore'::regnamespace::oid AND coalesce(p.proname, c.relname) IS NOT NULL;
END $$;

CREATE FUNCTION koldstore.raise_demand(demand jsonb, message text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION '%', message USING ERRCODE = 'KS003', DETAIL = demand::text,
        HINT = 'Connect through koldproxy, which answers by itself. If this connection does: docs/guarantees.md names the few statements that it cannot repeat.';
END $$;

-- A page of a feed.

-- segments_for picks the active segments that a page needs: from the cursor on (forward) or from the end (last), until
-- they hold enough live rows. How many are left in one that the cursor is within is not known, so it counts for nothing.
CREATE FUNCTION koldstore.segments_for(rel oid, mode text, after bigint, wanted bigint) RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.jsonb_agg(s.segment_id ORDER BY s.min_seq), '[]')
    FROM (SELECT t.segment_id, t.min_seq,
                 sum(CASE WHEN mode = 'last' OR t.min_seq > after THEN t.row_count - t.dead_count ELSE 0 END) OVER (ORDER BY CASE mode WHEN 'last' THEN -t.min_seq ELSE t.min_seq END
                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM koldstore.visible_segment t
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
    m        koldstore.visible_managed_table;
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
    m := koldstore.readable_feed(rel);
    IF m.state = 'broken' THEN
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
    SELECT coalesce(max(s.max_seq), 0) INTO cold_max FROM koldstore.visible_segment s WHERE s.table_oid = rel AND s.state = 'active';

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
                AND pg_catalog.jsonb_array_length(page -> 'segments') = (SELECT count(*) FROM koldstore.visible_segment s WHERE s.table_oid = rel AND s.state = 'active')
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

REVOKE ALL ON FUNCTION koldstore.demanding_names FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.cold_needed, koldstore.changes_since, koldstore.key_json, koldstore.key_equality, koldstore.segments_for, koldstore.raise_demand,
    koldstore.demanding_names, koldstore.staged, koldstore.spans, koldstore.unseal, koldstore.genuine;
DROP VIEW koldstore.stage_key;
DROP FUNCTION koldstore.staged_heads, koldstore.demand_allowed;
DROP VIEW koldstore.stage_right;
DROP TABLE koldstore.stage_secret;
