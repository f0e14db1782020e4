-- The service role of koldproxy, with the least privileges that it needs. An administrator runs this once, in any database of the
-- server; running it again changes nothing. koldproxy itself never needs an administrator.

-- What the server needs. wal_level takes a restart; on managed services it has another name (docs/deployment.md). One slot and one
-- sender for each database with streams or feeds, {{.Slots}} here, have to be free beside what is in use.
--   ALTER SYSTEM SET wal_level = logical;
--   ALTER SYSTEM SET max_replication_slots = 10;
--   ALTER SYSTEM SET max_wal_senders = 10;
-- And pg_hba.conf has to let the role in from where koldproxy runs. Logical replication is an ordinary connection there:
{{- range .Databases}}
--   host  {{ident .}}  {{ident $.Role}}  ADDRESS/MASK  scram-sha-256
{{- end}}

BEGIN;

-- It logs in, and may read the write-ahead log (REPLICATION; Amazon RDS gives that right by a role). It is no superuser, may not create
-- roles or databases, and does not get round row-level security. What is lost compared with a superuser:
--   * No event triggers: DROP and ALTER of a stream's log, and changes of captured tables, are noticed within seconds instead of being
--     refused or handled at their exact place.
--   * Sessions of roles it is no member of can hold up the applier with a lock: it may not end them. This gives it the right:
--       GRANT pg_signal_backend TO {{ident .Role}};
-- The password is in {{.Password}}; this is what the server keeps of it. A service that takes no such verifiers wants
-- ALTER ROLE … PASSWORD '…' with the password itself. A role that exists keeps its password, since another koldproxy may use it. To replace it:
--   ALTER ROLE {{ident .Role}} PASSWORD {{literal .Verifier}};
DO {{.Tag}}
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = {{literal .Role}} AND rolsuper) THEN
        RAISE EXCEPTION 'role % is a superuser: choose another one (koldproxy init --role)', {{literal .Role}};
    ELSIF EXISTS (SELECT FROM pg_roles WHERE rolname = {{literal .Role}}) THEN
        RAISE NOTICE 'role % exists and keeps its password; it has to be the one in {{.Password}}', {{literal .Role}};
    ELSE
        CREATE ROLE {{ident .Role}} PASSWORD {{literal .Verifier}};
    END IF;
    ALTER ROLE {{ident .Role}} LOGIN INHERIT;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication') THEN
        GRANT rds_replication TO {{ident .Role}};
    ELSE
        ALTER ROLE {{ident .Role}} REPLICATION;
    END IF;
END {{.Tag}};

-- Code of users (predicates, checks of domains, casts) runs as this role, which has no rights. It has one name for the whole server. Only an
-- administrator can create it: koldproxy would, if it could. What rights it has are taken away.
DO {{.Tag}}
DECLARE
    option text;
    membership record;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'koldproxy_eval') THEN
        CREATE ROLE koldproxy_eval NOLOGIN;
    END IF;
    FOR option IN SELECT o.name FROM pg_roles r CROSS JOIN LATERAL (VALUES (r.rolsuper, 'NOSUPERUSER'), (r.rolbypassrls, 'NOBYPASSRLS'),
        (r.rolcreaterole, 'NOCREATEROLE'), (r.rolcreatedb, 'NOCREATEDB'), (r.rolreplication, 'NOREPLICATION'), (r.rolcanlogin, 'NOLOGIN')) AS o (has, name)
        WHERE r.rolname = 'koldproxy_eval' AND o.has
    LOOP
        RAISE WARNING 'role koldproxy_eval had rights: it is made %', option;
        EXECUTE 'ALTER ROLE koldproxy_eval ' || option;
    END LOOP;
    FOR membership IN SELECT pg_get_userbyid(m.roleid) AS of_role, pg_get_userbyid(m.grantor) AS by_role FROM pg_auth_members m
        WHERE m.member = 'koldproxy_eval'::regrole
    LOOP
        RAISE WARNING 'role koldproxy_eval was a member of %, and is not any more', membership.of_role;
        EXECUTE format('REVOKE %I FROM koldproxy_eval', membership.of_role)
            || CASE WHEN current_setting('server_version_num')::int >= 160000 THEN format(' GRANTED BY %I', membership.by_role) ELSE '' END;
    END LOOP;
END {{.Tag}};
GRANT koldproxy_eval TO {{ident .Role}};

-- It creates schema koldstore and the publication koldproxy.
{{- range .Databases}}
GRANT CONNECT, CREATE ON DATABASE {{ident .}} TO {{ident $.Role}};
{{- end}}

-- Only the owner of a table may publish it, so the role has to be a member of the owners. It can then do what they can; therefore of no superuser.
{{- if not .Owners}}
-- Those of the databases are taken here; koldproxy init --owner names others.
{{- end}}
DO {{.Tag}}
DECLARE
    owner record;
BEGIN
{{- if .Owners}}
    FOR owner IN SELECT o.name AS rolname, coalesce(r.rolsuper, false) AS rolsuper
        FROM unnest(ARRAY[{{range $i, $name := .Owners}}{{if $i}}, {{end}}{{literal $name}}{{end}}]) AS o (name) LEFT JOIN pg_roles r ON r.rolname = o.name
{{- else}}
    FOR owner IN SELECT DISTINCT r.rolname::text AS rolname, r.rolsuper FROM pg_database d JOIN pg_roles r ON r.oid = d.datdba
        WHERE d.datname IN ({{range $i, $db := .Databases}}{{if $i}}, {{end}}{{literal $db}}{{end}})
{{- end}}
    LOOP
        IF owner.rolsuper THEN
            RAISE WARNING '% is a superuser, so its tables cannot be captured: give them another owner, and GRANT that one to %', owner.rolname, {{literal .Role}};
        ELSIF owner.rolname <> {{literal .Role}} THEN
            EXECUTE format('GRANT %I TO %I', owner.rolname, {{literal .Role}})
                || CASE WHEN current_setting('server_version_num')::int >= 160000 THEN ' WITH INHERIT TRUE' ELSE '' END;
        END IF;
    END LOOP;
END {{.Tag}};

COMMIT;

-- With [proxy] auth = "scram" only, as a superuser in database {{ident (index .Databases 0)}} (docs/security.md says what it means):
--   GRANT SELECT (rolname, rolpassword) ON pg_catalog.pg_authid TO {{ident .Role}};
