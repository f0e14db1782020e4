-- Who may subscribe to the topics of streams: GRANT SUBSCRIBE ON TOPIC … and what the MQTT broker asks.
-- docs/decisions/0006-topic-grants.md says why it is done this way.

CREATE TABLE koldstore.topic_grant (
    filter     text COLLATE "C" NOT NULL,
    role_oid   oid              NOT NULL,
    granted_by oid              NOT NULL,
    stream_id  bigint           REFERENCES koldstore.stream ON DELETE CASCADE,
    granted_at timestamptz      NOT NULL DEFAULT pg_catalog.now(),
    PRIMARY KEY (role_oid, filter, granted_by)
);
COMMENT ON COLUMN koldstore.topic_grant.role_oid IS 'Zero is PUBLIC. A role of this OID may have been dropped; the grant is void then.';
COMMENT ON COLUMN koldstore.topic_grant.stream_id IS
    'The stream that a filter without wildcards names. The grant ends with it, so that a later stream of the same name has none.';
CREATE INDEX topic_grant_by_stream ON koldstore.topic_grant (stream_id) WHERE stream_id IS NOT NULL;
-- Read through the view topic_grants.
REVOKE ALL ON koldstore.topic_grant FROM PUBLIC;
ALTER TABLE koldstore.topic_grant ENABLE ROW LEVEL SECURITY;
CREATE POLICY readers ON koldstore.topic_grant FOR SELECT USING (false);

-- escape_topic and stream_topic are koldproxy.StreamTopic in SQL; topic_matches is the rule of MQTT.
CREATE FUNCTION koldstore.escape_topic(name text, dot boolean) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT pg_catalog.string_agg(CASE
               WHEN c.ch IN ('/', '+', '#', '%') OR (dot AND c.ch = '.') OR c.hex < '20' OR c.hex = '7f' OR c.hex BETWEEN 'c280' AND 'c29f'
               THEN pg_catalog.regexp_replace(pg_catalog.upper(c.hex), '(..)', '%\1', 'g')
               ELSE c.ch END, '' ORDER BY c.ord)
    FROM (SELECT t.ch, t.ord, pg_catalog.encode(pg_catalog.convert_to(t.ch, 'UTF8'), 'hex') COLLATE "C" AS hex
          FROM pg_catalog.regexp_split_to_table(name, '') WITH ORDINALITY AS t(ch, ord)) c;
END;

CREATE FUNCTION koldstore.stream_topic(schema name, stream name) RETURNS text
LANGUAGE sql STABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT '$stream/' || koldstore.escape_topic(pg_catalog.current_database()::text, false) || '/'
        || CASE WHEN schema = 'public' THEN '' ELSE koldstore.escape_topic(schema::text, true) || '.' END
        || koldstore.escape_topic(stream::text, true);
END;

CREATE FUNCTION koldstore.topic_matches(filter text, topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT NOT (pg_catalog.starts_with(topic, '$') AND NOT pg_catalog.starts_with(filter, '$'))
       AND CASE WHEN l.wanted[l.n] = '#' THEN pg_catalog.cardinality(l.found) >= l.n - 1 -- a/# matches a as well
                ELSE pg_catalog.cardinality(l.found) = l.n END
       AND NOT EXISTS (
           SELECT FROM pg_catalog.unnest(l.wanted) WITH ORDINALITY AS w(level, i)
           WHERE w.level NOT IN ('+', '#') AND w.level IS DISTINCT FROM l.found[w.i])
    FROM (SELECT s.wanted, s.found, pg_catalog.cardinality(s.wanted) AS n
          FROM (SELECT pg_catalog.string_to_array(filter, '/') AS wanted, pg_catalog.string_to_array(topic, '/') AS found) s) l;
END;

-- check_topic_filter refuses what MQTT does not allow, and what no topic of this database's streams can match: such a grant
-- would do nothing and look as if it did.
CREATE FUNCTION koldstore.check_topic_filter(filter text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    level text[] := pg_catalog.string_to_array(filter, '/');
    here  text := koldstore.escape_topic(pg_catalog.current_database()::text, false);
    n     integer := pg_catalog.cardinality(level);
    why   text;
    hint  text := pg_catalog.format('Topics of this database are $stream/%1$s/<name> and, outside schema public, $stream/%1$s/<schema>.<name>.', here);
BEGIN
    IF coalesce(filter, '') = '' THEN
        why := 'It is empty.';
    ELSIF pg_catalog.octet_length(filter) > 1024 THEN
        why := 'It is longer than 1024 bytes.';
    ELSIF level[1] = '$share' THEN
        why := 'Shared subscriptions are not granted apart.';
        hint := 'Grant what follows $share/<group>/: who may subscribe to a topic may share the subscription.';
    ELSIF EXISTS (SELECT FROM pg_catalog.unnest(level) AS l(t) WHERE pg_catalog.length(l.t) > 1 AND l.t ~ '[+#]') THEN
        why := 'A wildcard (+ or #) stands alone in its level.';
    ELSIF pg_catalog.array_position(level, '#') < n THEN
        why := 'The wildcard # stands in the last level only.';
    ELSIF level[1] IN ('+', '#') THEN
        why := 'A wildcard in the first level does not match topics that begin with $.';
    ELSIF level[1] <> '$stream' OR n < 2 THEN
        why := 'It is not about streams.';
    ELSIF level[2] NOT IN ('+', '#', here) THEN
        why := 'It is about another database.';
        hint := hint || ' Grants are made in the database that has the stream.';
    ELSE
        RETURN;
    END IF;
    RAISE EXCEPTION 'invalid topic filter "%"', coalesce(filter, 'NULL') USING ERRCODE = '22023', DETAIL = why, HINT = hint;
END $$;

-- grant_subscribe and revoke_subscribe are what the statements become. The role named public is PUBLIC.
CREATE PROCEDURE koldstore.grant_subscribe(filters text[], roles name[])
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM koldstore.assert_writable('GRANT');
    INSERT INTO koldstore.command (verb, args)
    VALUES ('grant_subscribe', pg_catalog.jsonb_build_object('filters', pg_catalog.to_jsonb(filters), 'roles', pg_catalog.to_jsonb(roles)));
END $$;

CREATE PROCEDURE koldstore.revoke_subscribe(filters text[], roles name[])
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM koldstore.assert_writable('REVOKE');
    INSERT INTO koldstore.command (verb, args)
    VALUES ('revoke_subscribe', pg_catalog.jsonb_build_object('filters', pg_catalog.to_jsonb(filters), 'roles', pg_catalog.to_jsonb(roles)));
END $$;

-- may_dispose returns the stream that a filter names, NULL if it has wildcards, or raises unless the requester may decide
-- who subscribes to it.
CREATE FUNCTION koldstore.may_dispose(requester name, filter text) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s koldstore.stream;
BEGIN
    PERFORM koldstore.check_topic_filter(filter);
    IF filter ~ '[+#]' THEN
        IF NOT pg_catalog.pg_has_role(requester, (SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()), 'USAGE') THEN
            RAISE EXCEPTION 'must be owner of database % to decide about topic filter "%"', pg_catalog.current_database(), filter
                USING ERRCODE = '42501', HINT = 'The owner of a table decides about the topics of its streams one by one, without wildcards.';
        END IF;
        RETURN NULL;
    END IF;
    SELECT t.* INTO s FROM koldstore.stream t WHERE koldstore.stream_topic(t.schema_name, t.name) = filter;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream with topic "%"', filter USING ERRCODE = '42704',
            DETAIL = 'A filter without wildcards names a stream that exists.';
    ELSIF koldstore.is_owner(requester, s.table_oid) IS NOT TRUE THEN
        RAISE EXCEPTION 'must be owner of stream %', s.name USING ERRCODE = '42501', HINT = 'A stream belongs to the owner of its table.';
    END IF;
    RETURN s.stream_id;
END $$;

-- grantee is the OID of a role, zero for PUBLIC.
CREATE FUNCTION koldstore.grantee(role text) RETURNS oid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    id oid := (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = role);
BEGIN
    IF role = 'public' THEN
        RETURN 0;
    ELSIF id IS NULL THEN
        RAISE EXCEPTION 'role "%" does not exist', coalesce(role, 'NULL') USING ERRCODE = '42704';
    END IF;
    RETURN id;
END $$;

CREATE FUNCTION koldstore.do_grant_subscribe(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    grantor  oid := koldstore.grantee(requester);
    f        text;
    stream   bigint;
    role     text;
    granted  bigint := 0;
    new_rows bigint;
BEGIN
    -- What is left of dropped roles goes away on the way.
    DELETE FROM koldstore.topic_grant g WHERE g.role_oid <> 0 AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = g.role_oid);
    FOR f IN SELECT t.value FROM pg_catalog.jsonb_array_elements_text(args -> 'filters') AS t LOOP
        stream := koldstore.may_dispose(requester, f);
        FOR role IN SELECT t.value FROM pg_catalog.jsonb_array_elements_text(args -> 'roles') AS t LOOP
            INSERT INTO koldstore.topic_grant (filter, role_oid, granted_by, stream_id) VALUES (f, koldstore.grantee(role), grantor, stream)
            ON CONFLICT DO NOTHING;
            GET DIAGNOSTICS new_rows = ROW_COUNT;
            granted := granted + new_rows;
        END LOOP;
    END LOOP;
    RETURN pg_catalog.jsonb_build_object('granted', granted);
END $$;

CREATE FUNCTION koldstore.do_revoke_subscribe(requester name, args jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    f       text;
    role    text;
    holder  oid;
    revoked bigint := 0;
    gone    bigint;
BEGIN
    FOR f IN SELECT t.value FROM pg_catalog.jsonb_array_elements_text(args -> 'filters') AS t LOOP
        PERFORM koldstore.may_dispose(requester, f);
        FOR role IN SELECT t.value FROM pg_catalog.jsonb_array_elements_text(args -> 'roles') AS t LOOP
            holder := koldstore.grantee(role);
            -- It goes whoever has granted it: a REVOKE that leaves the right in place would be worse than one that takes too much.
            DELETE FROM koldstore.topic_grant g WHERE g.filter = f AND g.role_oid = holder;
            GET DIAGNOSTICS gone = ROW_COUNT;
            IF gone = 0 THEN
                RAISE WARNING 'topic filter "%" is not granted to "%"', f, role
                    USING ERRCODE = '01006', HINT = 'Grants are taken back by the filter they were made with; koldstore.topic_grants lists them.';
            END IF;
            revoked := revoked + gone;
        END LOOP;
    END LOOP;
    RETURN pg_catalog.jsonb_build_object('revoked', revoked);
END $$;

-- may_subscribe is what the MQTT broker asks before it delivers: may this role receive the events of that stream? It is the
-- owner's matter. Owners and superusers may; others may by a grant, to them, to a role whose rights they have, or to PUBLIC.
-- A grant with wildcards conveys those streams that the role that made it owns at the moment (a superuser owns all).
CREATE FUNCTION koldstore.may_subscribe(role name, schema name, stream name) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(bool_or(pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE') OR EXISTS (
        SELECT FROM koldstore.topic_grant g
        WHERE (g.role_oid = 0 OR pg_catalog.pg_has_role(r.oid, g.role_oid, 'USAGE'))
          AND CASE WHEN g.stream_id IS NOT NULL THEN g.stream_id = s.stream_id
                   ELSE koldstore.topic_matches(g.filter, koldstore.stream_topic(s.schema_name, s.name))
                        AND pg_catalog.pg_has_role(g.granted_by, c.relowner, 'USAGE') END)), false)
    FROM koldstore.stream s
    JOIN pg_catalog.pg_class c ON c.oid = s.table_oid
    JOIN pg_catalog.pg_roles r ON r.rolname = may_subscribe.role
    WHERE s.schema_name = may_subscribe.schema AND s.name = may_subscribe.stream;
END;

-- Everybody sees the grants that concern them: made by or to them, or about streams of theirs. The owner of the database
-- sees all.
CREATE VIEW koldstore.topic_grants WITH (security_barrier) AS
SELECT g.filter, coalesce(r.rolname, 'PUBLIC') AS role, pg_catalog.pg_get_userbyid(g.granted_by) AS granted_by, g.granted_at
FROM koldstore.topic_grant g
LEFT JOIN pg_catalog.pg_roles r ON r.oid = g.role_oid
LEFT JOIN koldstore.stream s USING (stream_id)
WHERE (r.oid IS NOT NULL OR g.role_oid = 0)
  AND (g.role_oid = 0 OR pg_catalog.pg_has_role(g.role_oid, 'USAGE') OR pg_catalog.pg_has_role(g.granted_by, 'USAGE')
       OR koldstore.is_owner(current_user, s.table_oid)
       OR pg_catalog.pg_has_role((SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()), 'USAGE'));
COMMENT ON VIEW koldstore.topic_grants IS 'Who may subscribe to which topics, apart from the owners of streams, who may anyway.';
GRANT SELECT ON koldstore.topic_grants TO PUBLIC;

REVOKE ALL ON FUNCTION koldstore.do_grant_subscribe, koldstore.do_revoke_subscribe, koldstore.may_dispose, koldstore.may_subscribe FROM PUBLIC;

---- create above / drop below ----

DROP VIEW koldstore.topic_grants;
DROP FUNCTION koldstore.may_subscribe, koldstore.do_revoke_subscribe, koldstore.do_grant_subscribe, koldstore.grantee, koldstore.may_dispose;
DROP PROCEDURE koldstore.revoke_subscribe, koldstore.grant_subscribe;
DROP FUNCTION koldstore.check_topic_filter, koldstore.topic_matches, koldstore.stream_topic, koldstore.escape_topic;
DROP TABLE koldstore.topic_grant;
