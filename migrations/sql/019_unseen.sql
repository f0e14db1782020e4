-- What the write-ahead log of a table does not show: which value of an enum a name meant then, rows that come into it with a child table, and
-- what happened before a stream began.

-- The log shows a value of an enum type by the name that it had then. Shapes know the names, so the applier can tell which value it is after
-- ALTER TYPE … RENAME VALUE, and the feed, whose images show old names, is compared with its table.

INSERT INTO koldstore.replaced
SELECT pg_catalog.pg_get_functiondef(p.oid), 19 FROM pg_catalog.pg_proc p
WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN ('shape_of', 'note_shape', 'expired', 'follow_rights', 'publish', 'unpublish', 'show_streams');

-- enums_in are the enum types that values of a type consist of or contain.
CREATE FUNCTION koldstore.enums_in(declared oid) RETURNS SETOF oid
LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE part(type) AS (
        SELECT declared
        UNION
        SELECT n.type
        FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.type
        CROSS JOIN LATERAL (
            SELECT t.typbasetype AS type WHERE t.typtype = 'd'
            UNION ALL SELECT t.typelem WHERE t.typelem <> 0
            UNION ALL SELECT g.rngsubtype FROM pg_catalog.pg_range g WHERE t.oid IN (g.rngtypid, g.rngmultitypid)
            UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped) AS n
        WHERE n.type >= 16384) -- PostgreSQL's own types contain no enums
    SELECT p.type FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.type WHERE t.typtype = 'e';
END;

-- shape_of lists a table's columns. labels are the names of a column's enum values by their OIDs; inside is the same of enums that its
-- values only contain, as arrays do.
CREATE OR REPLACE FUNCTION koldstore.shape_of(rel oid) RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('attnum', a.attnum, 'name', a.attname, 'type', a.atttypid::bigint, 'typmod', a.atttypmod)
        || coalesce(l.labels, '{}') ORDER BY a.attnum), '[]')
    FROM pg_catalog.pg_attribute a
    LEFT JOIN LATERAL (
        SELECT pg_catalog.jsonb_build_object(CASE WHEN bool_and(e.enumtypid = b.type) THEN 'labels' ELSE 'inside' END, pg_catalog.jsonb_object_agg(e.oid, e.enumlabel)) AS labels
        FROM koldstore.base_type(a.atttypid, a.atttypmod) AS b, koldstore.enums_in(a.atttypid) AS i(type) JOIN pg_catalog.pg_enum e ON e.enumtypid = i.type
        HAVING count(*) > 0) AS l ON a.atttypid >= 16384
    WHERE a.attrelid = rel AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '';
END;

CREATE OR REPLACE FUNCTION koldstore.note_shape(rel oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    was       jsonb;
    now_shape jsonb;
    renamed   record;
BEGIN
    SELECT t.shape INTO was FROM koldstore.published_table t WHERE t.table_oid = rel FOR NO KEY UPDATE;
    now_shape := koldstore.shape_of(rel);
    IF was IS NULL OR was = now_shape THEN
        RETURN;
    END IF;
    UPDATE koldstore.published_table t SET shape = now_shape WHERE t.table_oid = rel;
    INSERT INTO koldstore.wal_marker (kind, subject, details) VALUES ('shape', rel::bigint, now_shape);
    -- What the log shows of a value that is part of another one cannot be told apart.
    SELECT pg_catalog.bool_or(now.inside IS NOT NULL) AS hidden, min(now.name) FILTER (WHERE now.inside IS NOT NULL) AS name INTO renamed
    FROM pg_catalog.jsonb_to_recordset(now_shape) AS now(attnum int2, name text, labels jsonb, inside jsonb)
    JOIN pg_catalog.jsonb_to_recordset(was) AS old(attnum int2, labels jsonb, inside jsonb) USING (attnum)
    WHERE EXISTS (SELECT FROM pg_catalog.jsonb_each_text(coalesce(now.labels, now.inside)) AS n JOIN pg_catalog.jsonb_each_text(coalesce(old.labels, old.inside)) AS o USING (key)
                  WHERE n.value <> o.value);
    IF renamed.hidden IS NOT NULL THEN
        PERFORM koldstore.mark_heal(rel, CASE WHEN renamed.hidden THEN 'a value of an enum type in column ' || renamed.name || ' was renamed' END);
    END IF;
END $$;

-- note_labels looks at the tables with a column of a type that somebody has altered.
CREATE FUNCTION koldstore.note_labels() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM koldstore.note_altered(t.table_oid) FROM koldstore.published_table t
    WHERE EXISTS (SELECT FROM pg_attribute a CROSS JOIN LATERAL koldstore.enums_in(a.atttypid) WHERE a.attrelid = t.table_oid AND a.attnum > 0 AND a.atttypid >= 16384)
      AND koldstore.shape_of(t.table_oid) <> t.shape;
END $$;
REVOKE ALL ON FUNCTION koldstore.note_labels FROM PUBLIC;

-- follow_rights is called every few seconds: it asks about all logs and mirrors in one query, which is planned once.
CREATE OR REPLACE FUNCTION koldstore.follow_rights() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    f record;
BEGIN
    PERFORM set_config('koldstore.following', 'on', true); -- as a clause of the function it would take a superuser
    FOR f IN SELECT x.target, x.source
             FROM (SELECT s.log_oid AS target, s.table_oid AS source FROM koldstore.stream s JOIN pg_class c ON c.oid = s.log_oid JOIN pg_class t ON t.oid = s.table_oid
                   UNION ALL
                   SELECT m.mirror_oid, m.table_oid FROM koldstore.managed_table m JOIN pg_class c ON c.oid = m.mirror_oid JOIN pg_class t ON t.oid = m.table_oid) AS x
             WHERE EXISTS (SELECT FROM koldstore.rights_to_follow(x.target, x.source))
    LOOP
        PERFORM koldstore.follow_rights_of(f.target, f.source);
    END LOOP;
    PERFORM set_config('koldstore.following', 'off', true);
END $$;

-- publish and unpublish may be called for one table by transactions that overlap. Each takes the table's row first, and looks at what the other
-- one has left afterwards; where a transaction has one snapshot for all statements the row has changed, which is an error (40001).

CREATE OR REPLACE FUNCTION koldstore.publish(rel regclass, attempts integer DEFAULT 15) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known    boolean;
    identity "char";
    owner    oid := (SELECT c.relowner FROM pg_catalog.pg_class c WHERE c.oid = rel);
BEGIN
    IF NOT pg_catalog.pg_has_role(owner, 'USAGE') THEN
        RAISE EXCEPTION 'koldproxy may not capture changes of table "%"', koldstore.name_of(rel) USING ERRCODE = '42501',
            DETAIL = pg_catalog.format('Its role "%s" needs the rights of the table''s owner, "%s".', current_user, pg_catalog.pg_get_userbyid(owner)),
            HINT = pg_catalog.format('GRANT %I TO %I', pg_catalog.pg_get_userbyid(owner), current_user);
    END IF;
    UPDATE koldstore.published_table t SET shape = t.shape WHERE t.table_oid = rel;
    known := FOUND;
    SELECT c.relreplident INTO identity FROM pg_catalog.pg_class c WHERE c.oid = rel;
    IF known AND identity = 'f' AND koldstore.is_published(rel) THEN
        RETURN;
    END IF;
    PERFORM koldstore.lock_writers_out(rel, identity <> 'f', attempts);
    IF NOT koldstore.is_published(rel) THEN
        EXECUTE pg_catalog.format('ALTER PUBLICATION koldproxy ADD TABLE ONLY %s', rel);
    END IF;
    INSERT INTO koldstore.published_table (table_oid, identity_before, shape) VALUES (rel, identity, '[]') ON CONFLICT DO NOTHING;
    PERFORM koldstore.note_partitions(rel);
    PERFORM koldstore.note_shape(rel);
END $$;

CREATE OR REPLACE FUNCTION koldstore.unpublish(rel oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    identity "char";
    leaf     record;
BEGIN
    PERFORM FROM koldstore.published_table t WHERE t.table_oid = rel FOR UPDATE;
    IF EXISTS (SELECT FROM koldstore.stream s WHERE s.table_oid = rel)
       OR EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = rel) THEN
        RETURN;
    END IF;
    DELETE FROM koldstore.published_table t WHERE t.table_oid = rel RETURNING t.identity_before INTO identity;
    IF identity IS NULL OR NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = rel) THEN
        RETURN;
    END IF;
    IF koldstore.is_published(rel) THEN
        EXECUTE pg_catalog.format('ALTER PUBLICATION koldproxy DROP TABLE ONLY %s', rel::pg_catalog.regclass);
    END IF;
    FOR leaf IN DELETE FROM koldstore.partition p WHERE p.table_oid = rel RETURNING * LOOP
        IF leaf.identity_before IN ('d', 'n') AND EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = leaf.leaf_oid) THEN
            EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY %s', leaf.leaf_oid::pg_catalog.regclass,
                CASE leaf.identity_before WHEN 'd' THEN 'DEFAULT' ELSE 'NOTHING' END);
        END IF;
    END LOOP;
    IF identity IN ('d', 'n') THEN
        EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY %s', rel::pg_catalog.regclass,
            CASE identity WHEN 'd' THEN 'DEFAULT' ELSE 'NOTHING' END);
    END IF;
END $$;

-- Tables that are captured already: what has been renamed so far is not known.
UPDATE koldstore.published_table t SET shape = koldstore.shape_of(t.table_oid)
WHERE EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.table_oid AND a.attnum > 0 AND a.atttypid >= 16384);
INSERT INTO koldstore.wal_marker (kind, subject, details)
SELECT 'shape', t.table_oid::bigint, t.shape FROM koldstore.published_table t WHERE t.shape @? '$[*].labels';

-- note_children looks at the tables that have got a child: its rows are theirs, and not in the log as such.
CREATE FUNCTION koldstore.note_children() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM koldstore.note_altered(i.inhparent)
    FROM (SELECT DISTINCT d.objid FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_class'::regclass) AS d
    JOIN pg_inherits i ON i.inhrelid = d.objid JOIN pg_class c ON c.oid = i.inhparent AND c.relkind = 'r';
END $$;

-- Nobody can say how far live push is with a stream that captures nothing any more.
CREATE OR REPLACE FUNCTION koldstore.show_streams(live jsonb DEFAULT '{}')
RETURNS TABLE (name text, "table" text, predicate text, consumers integer, lag bigint, state text, events_lost bigint, retention interval)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT CASE WHEN s.schema_name = ANY (pg_catalog.current_schemas(false)) THEN pg_catalog.quote_ident(s.name)
                ELSE pg_catalog.quote_ident(s.schema_name) || '.' || pg_catalog.quote_ident(s.name) END,
           s.table_oid::regclass::text, koldstore.shown_predicate(s.stream_id, s.predicate),
           coalesce((l.entry ->> 'consumers')::integer, 0), CASE WHEN s.state <> 'broken' THEN (l.entry ->> 'lag')::bigint END,
           -- A hole shows until retention has passed it.
           CASE WHEN s.state = 'active' AND s.gap IS NOT NULL AND (s.floor IS NULL OR s.gap ->> 'after' IS NULL OR s.floor < s.gap ->> 'after') THEN 'gap' ELSE s.state END,
           t.events_lost, s.retention
    FROM koldstore.visible_stream s
    JOIN koldstore.visible_stream_status t USING (stream_id)
    CROSS JOIN LATERAL (SELECT live -> (s.schema_name || '.' || s.name)) AS l(entry)
    ORDER BY s.schema_name, s.name;
END;

-- refuse_reference keeps foreign keys from referring to logs: events go when they have expired, and the log with its stream.
CREATE FUNCTION koldstore.refuse_reference() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    log oid;
BEGIN
    SELECT k.confrelid INTO log FROM pg_event_trigger_ddl_commands() d JOIN pg_constraint k ON k.conrelid = d.objid AND k.contype = 'f'
    WHERE d.classid = 'pg_class'::regclass AND koldstore.is_log(k.confrelid) LIMIT 1;
    IF log IS NOT NULL THEN
        RAISE EXCEPTION 'a foreign key cannot refer to "%": it is the log of a stream', koldstore.name_of(log)
            USING ERRCODE = '42809', HINT = 'Events go when they have expired, and with DROP STREAM. Keep their ids without a foreign key.';
    END IF;
END $$;

-- A stream begins somewhere: whoever comes with a position from before has missed what happened until then, as if it had expired.
ALTER TABLE koldstore.stream ADD began text COLLATE "C";
COMMENT ON COLUMN koldstore.stream.began IS 'A position in front of the first event. Whatever happened before it is not in the log, whether or not it would have matched.';

-- expired is the last position that a log shows nothing of any more, or never did, whether or not the sweep has removed it.
CREATE OR REPLACE FUNCTION koldstore.expired(stream bigint) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s  koldstore.stream;
    id text;
BEGIN
    SELECT * INTO s FROM koldstore.stream t WHERE t.stream_id = stream;
    IF s.retention IS NOT NULL THEN
        EXECUTE format('SELECT max(id) FROM %1$s WHERE ts <= $1 AND id < coalesce((SELECT id FROM %1$s WHERE ts > $1 ORDER BY id LIMIT 1), ''~'')', s.log_oid::regclass)
            INTO id USING statement_timestamp() - s.retention;
    END IF;
    RETURN greatest(id COLLATE "C", s.began);
END $$;

DO $$
BEGIN
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
        CREATE EVENT TRIGGER koldproxy_labels ON ddl_command_end WHEN TAG IN ('ALTER TYPE') EXECUTE FUNCTION koldstore.note_labels();
        CREATE EVENT TRIGGER koldproxy_children ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'CREATE FOREIGN TABLE', 'CREATE SCHEMA', 'ALTER TABLE', 'ALTER FOREIGN TABLE')
            EXECUTE FUNCTION koldstore.note_children();
        CREATE EVENT TRIGGER koldproxy_reference ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'CREATE SCHEMA', 'ALTER TABLE') EXECUTE FUNCTION koldstore.refuse_reference();
        ALTER EVENT TRIGGER koldproxy_reference ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_labels ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_children ENABLE ALWAYS;
    END IF;
END $$;

---- create above / drop below ----

DROP EVENT TRIGGER IF EXISTS koldproxy_labels;
DROP EVENT TRIGGER IF EXISTS koldproxy_children;
DROP EVENT TRIGGER IF EXISTS koldproxy_reference;
DROP FUNCTION koldstore.note_labels, koldstore.note_children, koldstore.refuse_reference;
DO $$
DECLARE
    d text;
BEGIN
    FOR d IN SELECT r.definition FROM koldstore.replaced r WHERE r.step = 19 LOOP
        EXECUTE d;
    END LOOP;
END $$;
DELETE FROM koldstore.replaced WHERE step = 19;
DROP FUNCTION koldstore.enums_in;
ALTER TABLE koldstore.stream DROP began;
UPDATE koldstore.published_table t SET shape = koldstore.shape_of(t.table_oid) WHERE koldstore.shape_of(t.table_oid) <> t.shape;
