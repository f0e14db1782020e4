-- Who sees what. A role with BYPASSRLS is not held up by policies, so nothing that PUBLIC may select from leans on policies alone:
-- the catalog is shown through views, a log or mirror is granted to those who may read its table, and what is staged is sealed with
-- secrets that nobody else has (proxy/seal.go). Policies stay where they are: they judge at once what a grant follows later, and hold for
-- roles to which an administrator grants a table of the catalog.

-- What this step replaces or edits, for the way back.
CREATE TABLE koldstore.replaced (definition text NOT NULL);
INSERT INTO koldstore.replaced
SELECT pg_catalog.pg_get_functiondef(p.oid) FROM pg_catalog.pg_proc p
WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname IN (
    'guard', 'check_table', 'list_jobs', 'gaps', 'table_status', 'verify_table_integrity', 'wait_for_async_mirror', 'flush_table', 'changes_since', 'segments_for',
    'show_streams', 'stream_floor', 'staged', 'unseal', 'demand_allowed', 'demanding_names', 'do_create_stream', 'extend_logs',
    'create_stream', 'alter_stream', 'drop_stream', 'alter_table_set', 'grant_subscribe', 'revoke_subscribe');

-- The catalog.

CREATE FUNCTION koldstore.acts_as_koldproxy() RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.pg_has_role(n.nspowner, 'USAGE') FROM pg_catalog.pg_namespace n WHERE n.nspname = 'koldstore';
END;
COMMENT ON FUNCTION koldstore.acts_as_koldproxy() IS
    'Whether the current role has the rights of koldproxy''s own, as superusers have: it sees the whole catalog, with what was dropped.';

-- The views visible_… show of the tables behind them what concerns tables that the reader may read.
CREATE VIEW koldstore.visible_managed_table WITH (security_barrier) AS
    SELECT m.* FROM koldstore.managed_table m
    WHERE koldstore.may_read(m.table_oid) OR koldstore.is_member(m.created_by) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_stream WITH (security_barrier) AS
    SELECT s.* FROM koldstore.stream s
    WHERE koldstore.may_read(s.table_oid) OR koldstore.is_member(s.created_by) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_stream_status WITH (security_barrier) AS
    SELECT t.* FROM koldstore.stream_status t JOIN koldstore.stream s USING (stream_id)
    WHERE koldstore.may_read(s.table_oid) OR koldstore.is_member(s.created_by) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_segment WITH (security_barrier) AS
    SELECT g.* FROM koldstore.segment g WHERE koldstore.may_read(g.table_oid) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_job WITH (security_barrier) AS
    SELECT j.* FROM koldstore.job j WHERE koldstore.may_read(j.table_oid) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_quarantine WITH (security_barrier) AS
    SELECT q.* FROM koldstore.quarantine q WHERE koldstore.may_read(q.table_oid) OR (SELECT koldstore.acts_as_koldproxy());
CREATE VIEW koldstore.visible_gap WITH (security_barrier) AS
    SELECT g.* FROM koldstore.gap g WHERE g.table_oid IS NULL OR koldstore.may_read(g.table_oid) OR (SELECT koldstore.acts_as_koldproxy());
GRANT SELECT ON koldstore.visible_managed_table, koldstore.visible_stream, koldstore.visible_stream_status, koldstore.visible_segment, koldstore.visible_job,
    koldstore.visible_quarantine, koldstore.visible_gap TO PUBLIC;

-- Commands are asked for through a view of the table's former name, which shows whoever asks the answers to his own.
ALTER TABLE koldstore.command RENAME TO command_log;
REVOKE ALL (verb, args) ON koldstore.command_log FROM PUBLIC;
CREATE VIEW koldstore.command WITH (security_barrier) AS
    SELECT c.command_id, c.at, c.requester, c.verb, c.args, c.result FROM koldstore.command_log c WHERE koldstore.is_member(c.requester);
GRANT INSERT (verb, args), SELECT ON koldstore.command TO PUBLIC;

-- How far the applier is, and which version this is, are nobody's secrets.
DO $$
DECLARE
    rel regclass;
BEGIN
    FOR rel IN SELECT c.oid FROM pg_catalog.pg_class c
               WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relkind IN ('r', 'p') AND c.relname NOT IN ('checkpoint', 'schema_version') LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON %s FROM PUBLIC', rel);
    END LOOP;
END $$;

-- Logs and mirrors.

-- rights_to_follow are the statements that give a log or mirror the privileges that its table's suggest: SELECT to those who have it there
-- on the whole table, and to its owner what he needs for a write to be answered by the guard.
CREATE FUNCTION koldstore.rights_to_follow(target oid, source oid) RETURNS SETOF text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.format(CASE WHEN d.wanted THEN 'GRANT %s ON %s TO %s' ELSE 'REVOKE %s ON %s FROM %s' END,
               pg_catalog.string_agg(d.privilege, ', '), target::pg_catalog.regclass, CASE d.grantee WHEN 0 THEN 'PUBLIC' ELSE d.grantee::pg_catalog.regrole::text END)
    FROM (SELECT coalesce(w.grantee, g.grantee) AS grantee, coalesce(w.privilege, g.privilege) AS privilege, w.grantee IS NOT NULL AS wanted
          FROM (SELECT a.grantee, a.privilege_type AS privilege
                FROM pg_catalog.pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) AS a
                WHERE c.oid = source AND a.privilege_type = 'SELECT'
                UNION
                SELECT c.relowner, p.privilege FROM pg_catalog.pg_class c CROSS JOIN (VALUES ('INSERT'), ('UPDATE'), ('DELETE'), ('TRUNCATE')) AS p(privilege) WHERE c.oid = source) AS w
          FULL JOIN (SELECT a.grantee, a.privilege_type AS privilege FROM pg_catalog.pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a WHERE c.oid = target) AS g
            ON g.grantee = w.grantee AND g.privilege = w.privilege
          WHERE w.grantee IS NULL OR g.grantee IS NULL) AS d
    JOIN pg_catalog.pg_class c ON c.oid = target AND c.relowner <> d.grantee
    GROUP BY d.grantee, d.wanted;
END;

-- follow_rights brings the privileges on all logs and mirrors up to date. Anybody's GRANT calls it where event triggers can be
-- installed, and koldproxy does every few seconds.
CREATE FUNCTION koldstore.follow_rights() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    f record;
BEGIN
    PERFORM set_config('koldstore.following', 'on', true); -- as a clause of the function it would take a superuser
    FOR f IN SELECT s.log_oid AS target, s.table_oid AS source FROM koldstore.stream s JOIN pg_class c ON c.oid = s.log_oid JOIN pg_class t ON t.oid = s.table_oid
             UNION ALL
             SELECT m.mirror_oid, m.table_oid FROM koldstore.managed_table m JOIN pg_class c ON c.oid = m.mirror_oid JOIN pg_class t ON t.oid = m.table_oid
    LOOP
        PERFORM koldstore.follow_rights_of(f.target, f.source);
    END LOOP;
    PERFORM set_config('koldstore.following', 'off', true);
END $$;

CREATE FUNCTION koldstore.follow_rights_of(target oid, source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    command text;
BEGIN
    IF NOT EXISTS (SELECT FROM koldstore.rights_to_follow(target, source)) THEN
        RETURN;
    END IF;
    -- Two at a time would fail over the row in the catalog.
    PERFORM pg_advisory_xact_lock(hashtext('koldstore.rights'), target::int8::bit(32)::int4);
    FOR command IN SELECT * FROM koldstore.rights_to_follow(target, source) LOOP
        EXECUTE command;
    END LOOP;
END $$;

CREATE FUNCTION koldstore.watch_rights() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- Not by what follow_rights does itself, nor by what koldproxy does to its own tables.
    IF NOT koldstore.is_service_role() OR TG_TAG <> 'ALTER TABLE' AND current_setting('koldstore.following', true) IS DISTINCT FROM 'on' THEN
        PERFORM koldstore.follow_rights();
    END IF;
EXCEPTION WHEN OTHERS THEN -- the statement is not to fail because of it; koldproxy tries again soon
    RAISE WARNING 'the rights to logs and mirrors could not be brought up to date: %', SQLERRM;
END $$;

-- guard makes a log or mirror read-only and shows it to those who may read the whole source table. Behind the guard, row-level
-- security without a policy for writes refuses them once more. Only the owner of the table gets the privileges to write: they
-- would convey the right to lock the log, and with it the applier.
CREATE OR REPLACE FUNCTION koldstore.guard(target oid, source oid, extra_condition text, hint text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rel text := target::regclass::text;
BEGIN
    PERFORM set_config('koldstore.following', 'on', true);
    EXECUTE format('CREATE TRIGGER koldproxy_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION koldstore.refuse_write(%L)', rel, hint);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER koldproxy_guard', rel);
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', rel);
    EXECUTE format('CREATE POLICY koldproxy_readers ON %s FOR SELECT USING (%s)', rel, koldstore.readers_of(source, extra_condition));
    PERFORM koldstore.follow_rights_of(target, source);
    PERFORM set_config('koldstore.following', 'off', true);
END $$;

REVOKE ALL ON FUNCTION koldstore.guard, koldstore.follow_rights_of FROM PUBLIC;

-- What is staged, which is in a setting that every function of the session can read and write. Three lines for each answer: a head, its
-- MAC in hexadecimal, and a box in base64. proxy/seal.go says how they are made.

ALTER TABLE koldstore.stage_secret ADD COLUMN seal bytea;
UPDATE koldstore.stage_secret SET seal = (
    SELECT pg_catalog.string_agg(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), ''::bytea) FROM pg_catalog.generate_series(1, 4));
ALTER TABLE koldstore.stage_secret ALTER seal SET NOT NULL;
COMMENT ON COLUMN koldstore.stage_secret.secret IS 'Keys of boxes come from it: koldstore.stage_key shows each to those who may have the answer.';
COMMENT ON COLUMN koldstore.stage_secret.seal IS 'MACs come from it, and are shown to nobody: what it has sealed is koldproxy''s.';

DROP FUNCTION koldstore.unseal(bytea, bytea, bytea, bytea);

-- stage_right are the answers that the current role may have. secret tells koldproxy which secrets these are.
CREATE VIEW koldstore.stage_right WITH (security_barrier) AS
SELECT m.table_oid, k.kind, pg_catalog.encode(pg_catalog.sha256(s.seal), 'hex') AS secret
FROM koldstore.stage_secret s, koldstore.managed_table m, (VALUES ('cold_page'), ('flush')) AS k(kind)
WHERE CASE k.kind WHEN 'flush' THEN koldstore.is_owner(current_user, m.table_oid) ELSE koldstore.may_read(m.table_oid) END;
GRANT SELECT ON koldstore.stage_right TO PUBLIC;

-- demand_allowed says to koldproxy what it needs for sealing the answer to a demand; NULL when the current role may not have it.
CREATE OR REPLACE FUNCTION koldstore.demand_allowed(demand jsonb) RETURNS text
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
DROP VIEW koldstore.stage_key;
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
CREATE OR REPLACE FUNCTION koldstore.staged(demand jsonb) RETURNS jsonb
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
CREATE OR REPLACE FUNCTION koldstore.demanding_names() RETURNS SETOF name
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

-- Refusals that name what was typed.

-- assert_writable refuses a statement of koldproxy's where nothing may be written, in PostgreSQL's words.
CREATE FUNCTION koldstore.assert_writable(statement text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'cannot execute % during recovery', statement USING ERRCODE = '25006';
    ELSIF current_setting('transaction_read_only')::boolean THEN
        RAISE EXCEPTION 'cannot execute % in a read-only transaction', statement USING ERRCODE = '25006';
    END IF;
    RETURN true;
END $$;

-- refuse_log_ddl answers the owner of a stream's table, who does not own the log, before PostgreSQL does: with the reason and not
-- with his lack of rights. There is no other way to know the table at this point than to read the statement; where its name is not
-- found PostgreSQL's refusal stands.
CREATE FUNCTION koldstore.refuse_log_ddl() RETURNS event_trigger
LANGUAGE plpgsql AS $$
DECLARE
    gap  text := '(?:\s|--[^\n]*\n|/\*.*?\*/)';
    part text := '(?:"(?:[^"]|"")+"|[[:alnum:]_$]+)';
    log  oid;
BEGIN
    IF koldstore.is_service_role() THEN
        RETURN;
    END IF;
    log := pg_catalog.to_regclass((pg_catalog.regexp_match(pg_catalog.left(pg_catalog.current_query(), 2000), pg_catalog.format(
        '^%1$s*%2$s%1$s+(?:IF%1$s+EXISTS%1$s+)?(?:ONLY%1$s+)?(%3$s(?:\s*\.\s*%3$s)?)', gap, pg_catalog.replace(TG_TAG, ' ', gap || '+'), part), 'i'))[1]);
    IF koldstore.is_log(log) AND pg_catalog.has_table_privilege(log, 'TRUNCATE') THEN
        RAISE EXCEPTION 'cannot % "%": it is the log of a stream', pg_catalog.lower(TG_TAG), koldstore.name_of(log)
            USING ERRCODE = '42809', HINT = 'DROP STREAM removes a stream and its log together.';
    END IF;
END $$;

-- Functions of earlier steps that change in a detail: they read the catalog through the views, refuse to write where nothing may be
-- written, leave nothing open to PUBLIC for a moment, and lock a log before its partition, as TRUNCATE does.
DO $$
DECLARE
    e    record;
    was  text;
    edit text;
BEGIN
    FOR e IN
        SELECT f.name, '\mkoldstore\.(managed_table|stream|stream_status|segment|job|quarantine|gap)\M' AS pattern, 'koldstore.visible_\1' AS instead
        FROM pg_catalog.unnest(ARRAY['list_jobs', 'gaps', 'table_status', 'verify_table_integrity', 'wait_for_async_mirror', 'flush_table', 'changes_since',
            'segments_for', 'show_streams', 'stream_floor']) AS f(name)
        UNION ALL VALUES
            ('extend_logs', '(\n *)(EXECUTE format\(''SELECT EXISTS \(SELECT FROM %s\)'', s\.part::regclass\) INTO used;)',
                '\1EXECUTE format(''LOCK TABLE ONLY %s IN ACCESS SHARE MODE'', s.log_oid::regclass);\1\2'),
            ('check_table', 'EXISTS \(SELECT FROM koldstore\.stream s WHERE s\.log_oid = rel\)', 'koldstore.is_log(rel)'),
            ('do_create_stream', '(\n *)(PERFORM koldstore\.hand_over\(pg_catalog\.format\(''koldstore\.%I\(\)'', reader\), owner\);)',
                '\1EXECUTE pg_catalog.format(''REVOKE ALL ON FUNCTION koldstore.%1$I() FROM PUBLIC; GRANT EXECUTE ON FUNCTION koldstore.%1$I() TO CURRENT_USER'', reader);\1\2')
        UNION ALL
        SELECT p.name, '\nBEGIN\n', pg_catalog.format(E'\nBEGIN\n    PERFORM koldstore.assert_writable(%L);\n', p.statement)
        FROM (VALUES ('create_stream', 'CREATE STREAM'), ('alter_table_set', 'ALTER TABLE'), ('grant_subscribe', 'GRANT'), ('revoke_subscribe', 'REVOKE')) AS p(name, statement)
        UNION ALL
        SELECT p.name, '(koldstore\.find_stream\(stream_schema, stream_name, if_exists\))', pg_catalog.format('CASE WHEN koldstore.assert_writable(%L) THEN \1 END', p.statement)
        FROM (VALUES ('alter_stream', 'ALTER STREAM'), ('drop_stream', 'DROP STREAM')) AS p(name, statement)
    LOOP
        SELECT pg_catalog.pg_get_functiondef(p.oid) INTO STRICT was FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'koldstore'::regnamespace AND p.proname = e.name;
        edit := pg_catalog.regexp_replace(was, e.pattern, e.instead, CASE WHEN e.pattern ~ '^\\m' THEN 'g' ELSE '' END);
        IF edit = was THEN
            RAISE EXCEPTION 'function % is not what this step expects', e.name;
        END IF;
        EXECUTE edit;
    END LOOP;
    PERFORM koldstore.follow_rights();
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
        CREATE EVENT TRIGGER koldproxy_rights ON ddl_command_end WHEN TAG IN ('GRANT', 'REVOKE', 'ALTER TABLE', 'DROP OWNED') EXECUTE FUNCTION koldstore.watch_rights();
        CREATE EVENT TRIGGER koldproxy_log ON ddl_command_start WHEN TAG IN ('ALTER TABLE', 'DROP TABLE') EXECUTE FUNCTION koldstore.refuse_log_ddl();
        ALTER EVENT TRIGGER koldproxy_rights ENABLE ALWAYS;
        ALTER EVENT TRIGGER koldproxy_log ENABLE ALWAYS;
    END IF;
END $$;

---- create above / drop below ----

DROP EVENT TRIGGER IF EXISTS koldproxy_rights;
DROP EVENT TRIGGER IF EXISTS koldproxy_log;
DROP FUNCTION koldstore.unseal(bytea, bytea);
DROP VIEW koldstore.command;
ALTER TABLE koldstore.command_log RENAME TO command;
DROP VIEW koldstore.stage_key;
CREATE VIEW koldstore.stage_key WITH (security_barrier) AS
SELECT m.table_oid, k.kind,
       pg_catalog.sha512(s.secret || pg_catalog.int4send(pg_catalog.pg_backend_pid()) || pg_catalog.int8send(m.table_oid::bigint) || pg_catalog.textsend(k.kind)) AS key
FROM koldstore.stage_secret s, koldstore.managed_table m, (VALUES ('cold_page'), ('flush')) AS k(kind)
WHERE CASE k.kind WHEN 'flush' THEN koldstore.is_owner(current_user, m.table_oid) ELSE koldstore.may_read(m.table_oid) END;
DO $$
DECLARE
    d   text;
    rel regclass;
BEGIN
    FOR d IN SELECT r.definition FROM koldstore.replaced r LOOP
        EXECUTE d;
    END LOOP;
    DROP TABLE koldstore.replaced;
    FOR rel IN SELECT c.oid FROM pg_catalog.pg_class c WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
               UNION SELECT s.log_oid FROM koldstore.stream s JOIN pg_catalog.pg_class c ON c.oid = s.log_oid LOOP
        EXECUTE pg_catalog.format('GRANT SELECT ON %s TO PUBLIC', rel);
    END LOOP;
    REVOKE ALL ON koldstore.command FROM PUBLIC;
END $$;
GRANT INSERT (verb, args), SELECT ON koldstore.command TO PUBLIC;
GRANT SELECT ON koldstore.stage_key TO PUBLIC;
DROP FUNCTION koldstore.refuse_log_ddl, koldstore.assert_writable, koldstore.spans, koldstore.genuine, koldstore.watch_rights, koldstore.follow_rights_of,
    koldstore.follow_rights, koldstore.rights_to_follow;
DROP FUNCTION koldstore.staged_heads;
DROP VIEW koldstore.stage_right, koldstore.visible_gap, koldstore.visible_quarantine, koldstore.visible_job, koldstore.visible_segment, koldstore.visible_stream_status,
    koldstore.visible_stream, koldstore.visible_managed_table;
DROP FUNCTION koldstore.acts_as_koldproxy;
ALTER TABLE koldstore.stage_secret DROP COLUMN seal;
