-- Who sees what. A role with BYPASSRLS is not held up by policies, so nothing that PUBLIC may select from leans on policies alone:
-- the catalog is shown through views, a log or mirror is granted to those who may read its table, and what is staged is sealed with
-- secrets that nobody else has (proxy/seal.go). Policies stay where they are: they judge at once what a grant follows later, and hold for
-- roles to which an administrator grants a table of the catalog.

GRANT USAGE ON SCHEMA koldstore TO PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA koldstore FROM PUBLIC; -- whatever default privileges say
-- How far the applier is, and which version this is, are nobody's secrets.
GRANT SELECT ON koldstore.checkpoint, koldstore.schema_version TO PUBLIC;

-- Questions about roles.

-- name_of is a table's name as PostgreSQL's own messages show it; NULL if there is no such table.
CREATE FUNCTION koldstore.name_of(rel oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.relname::text FROM pg_catalog.pg_class c WHERE c.oid = rel;
END;

-- assert_readable raises 42501 unless the current user may read every row and column of a table. Policies of mirrors and
-- logs call it, so that it judges whoever runs the query: SET ROLE and SECURITY DEFINER functions included.
CREATE FUNCTION koldstore.assert_readable(table_oid oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = table_oid) THEN
        RAISE EXCEPTION 'the table with OID % was dropped', table_oid
            USING ERRCODE = '55000', HINT = 'DROP STREAM removes what is left of a stream.';
    ELSIF pg_catalog.has_table_privilege(table_oid, 'SELECT') IS NOT TRUE THEN
        RAISE EXCEPTION 'permission denied for table %', koldstore.name_of(table_oid)
            USING ERRCODE = '42501', HINT = 'Changes of a table are shown to roles that may SELECT the whole table.';
    END IF;
    IF pg_catalog.row_security_active(table_oid) THEN
        RAISE EXCEPTION 'row-level security applies to % on table %', current_user, koldstore.name_of(table_oid)
            USING ERRCODE = '42501', HINT = 'Changes of a table are shown to roles that may see all of its rows.';
    END IF;
    RETURN true;
END $$;

-- may_read is the same as a question. NULL (the table is gone) counts as no.
CREATE FUNCTION koldstore.may_read(table_oid oid) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.has_table_privilege(table_oid, 'SELECT') AND NOT pg_catalog.row_security_active(table_oid), false);
END;

CREATE FUNCTION koldstore.is_owner(requester name, table_oid oid) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.pg_has_role(requester, c.relowner, 'USAGE') FROM pg_catalog.pg_class c WHERE c.oid = table_oid;
END;

-- is_member says whether the current role has the rights of another. One that was dropped gives none.
CREATE FUNCTION koldstore.is_member(role name) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT pg_catalog.pg_has_role(r.oid, 'USAGE') FROM pg_catalog.pg_roles r WHERE r.rolname = role), false);
END;

-- is_service_role says whether the current role is koldproxy's own, which owns this schema.
CREATE FUNCTION koldstore.is_service_role() RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT current_user = pg_catalog.pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_namespace n WHERE n.nspname = 'koldstore';
END;

CREATE FUNCTION koldstore.acts_as_koldproxy() RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.pg_has_role(n.nspowner, 'USAGE') FROM pg_catalog.pg_namespace n WHERE n.nspname = 'koldstore';
END;
COMMENT ON FUNCTION koldstore.acts_as_koldproxy() IS
    'Whether the current role has the rights of koldproxy''s own, as superusers have: it sees the whole catalog, with what was dropped.';

-- The catalog: what concerns tables that one may read.

ALTER TABLE koldstore.gap ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.wal_marker ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.storage ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.managed_table ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.job ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.published_table ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.partition ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.applied_shape ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.segment ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.stream ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.seed_touched ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.stream_status ENABLE ROW LEVEL SECURITY;
ALTER TABLE koldstore.quarantine ENABLE ROW LEVEL SECURITY;
CREATE POLICY readers ON koldstore.gap FOR SELECT USING (table_oid IS NULL OR koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.wal_marker FOR SELECT USING (false);
CREATE POLICY readers ON koldstore.storage FOR SELECT USING (false);
CREATE POLICY readers ON koldstore.managed_table FOR SELECT USING (koldstore.may_read(table_oid) OR koldstore.is_member(created_by));
CREATE POLICY readers ON koldstore.job FOR SELECT USING (koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.published_table FOR SELECT USING (koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.partition FOR SELECT USING (koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.applied_shape FOR SELECT USING (koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.segment FOR SELECT USING (koldstore.may_read(table_oid));
CREATE POLICY readers ON koldstore.stream FOR SELECT USING (koldstore.may_read(table_oid) OR koldstore.is_member(created_by));
CREATE POLICY readers ON koldstore.seed_touched FOR SELECT USING (false);
CREATE POLICY readers ON koldstore.stream_status FOR SELECT USING (EXISTS (SELECT FROM koldstore.stream s WHERE s.stream_id = stream_status.stream_id));
CREATE POLICY readers ON koldstore.quarantine FOR SELECT USING (koldstore.may_read(table_oid));

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

-- Logs and mirrors.

-- Guard of logs and mirrors: only koldproxy's role, which owns them, writes. Superusers are refused as well, because a
-- row written by hand could not be told from a captured one.
CREATE FUNCTION koldstore.refuse_write() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_user <> (SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c WHERE c.oid = TG_RELID) THEN
        RAISE EXCEPTION 'cannot % "%": it is written by koldproxy only',
            CASE TG_OP WHEN 'INSERT' THEN 'insert into' WHEN 'DELETE' THEN 'delete from' ELSE pg_catalog.lower(TG_OP) END, TG_TABLE_NAME
            USING ERRCODE = '42809', HINT = TG_ARGV[0];
    END IF;
    RETURN NULL;
END $$;

-- readers_of is the condition under which a row of a log or mirror is shown.
CREATE FUNCTION koldstore.readers_of(source oid, extra_condition text) RETURNS text
LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT pg_catalog.format('(SELECT koldstore.assert_readable(%s))%s', source, coalesce(' AND ' || extra_condition, ''));
END;

-- guard makes a log or mirror read-only and shows it to those who may read the whole source table. Behind the guard, row-level
-- security without a policy for writes refuses them once more. Only the owner of the table gets the privileges to write: they
-- would convey the right to lock the log, and with it the applier.
CREATE FUNCTION koldstore.guard(target oid, source oid, extra_condition text, hint text) RETURNS void
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
-- installed, and koldproxy does every few seconds: it asks about all of them in one query, which is planned once.
CREATE FUNCTION koldstore.follow_rights() RETURNS void
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

REVOKE ALL ON FUNCTION koldstore.guard, koldstore.follow_rights_of FROM PUBLIC;

DO $$
BEGIN
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
        CREATE EVENT TRIGGER koldproxy_rights ON ddl_command_end WHEN TAG IN ('GRANT', 'REVOKE', 'ALTER TABLE', 'DROP OWNED') EXECUTE FUNCTION koldstore.watch_rights();
        ALTER EVENT TRIGGER koldproxy_rights ENABLE ALWAYS;
    END IF;
END $$;

---- create above / drop below ----

DROP EVENT TRIGGER IF EXISTS koldproxy_rights;
DROP FUNCTION koldstore.watch_rights, koldstore.follow_rights_of, koldstore.follow_rights, koldstore.rights_to_follow, koldstore.guard, koldstore.readers_of,
    koldstore.refuse_write;
DROP VIEW koldstore.visible_gap, koldstore.visible_quarantine, koldstore.visible_job, koldstore.visible_segment, koldstore.visible_stream_status,
    koldstore.visible_stream, koldstore.visible_managed_table;
DO $$
DECLARE
    rel regclass;
BEGIN
    FOR rel IN SELECT p.polrelid FROM pg_catalog.pg_policy p JOIN pg_catalog.pg_class c ON c.oid = p.polrelid
               WHERE c.relnamespace = 'koldstore'::regnamespace AND p.polname = 'readers' LOOP
        EXECUTE pg_catalog.format('DROP POLICY readers ON %s', rel);
        EXECUTE pg_catalog.format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', rel);
    END LOOP;
END $$;
DROP FUNCTION koldstore.acts_as_koldproxy, koldstore.is_service_role, koldstore.is_member, koldstore.is_owner, koldstore.may_read, koldstore.assert_readable,
    koldstore.name_of;
REVOKE SELECT ON koldstore.checkpoint, koldstore.schema_version FROM PUBLIC;
REVOKE USAGE ON SCHEMA koldstore FROM PUBLIC;
