-- The service role of koldproxy, with the least privileges that it needs. An administrator runs this once, in any database of the
-- server; running it again changes nothing but the password. koldproxy itself never needs an administrator.

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
-- ALTER ROLE … PASSWORD '…' with the password itself.
DO $init$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {{literal .Role}}) THEN
        CREATE ROLE {{ident .Role}};
    END IF;
    ALTER ROLE {{ident .Role}} LOGIN PASSWORD {{literal .Verifier}};
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication') THEN
        GRANT rds_replication TO {{ident .Role}};
    ELSE
        ALTER ROLE {{ident .Role}} REPLICATION;
    END IF;
END $init$;

-- Code of users (predicates, checks of domains, casts) runs as this role, which has no rights. It has one name for the whole server. Only an
-- administrator can create it: koldproxy would, if it could.
DO $init$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'koldproxy_eval') THEN
        CREATE ROLE koldproxy_eval NOLOGIN;
    END IF;
END $init$;
GRANT koldproxy_eval TO {{ident .Role}};

-- It creates schema koldstore and the publication koldproxy.
{{- range .Databases}}
GRANT CONNECT, CREATE ON DATABASE {{ident .}} TO {{ident $.Role}};
{{- end}}

-- Only the owner of a table may publish it, so the role has to be a member of the owners. It can then do what they can.
{{- if .Owners}}
{{- range .Owners}}
GRANT {{ident .}} TO {{ident $.Role}};
{{- end}}
{{- else}}
-- Those of the databases are taken here; koldproxy init --owner names others.
DO $init$
DECLARE
    owner record;
BEGIN
    FOR owner IN
        SELECT r.rolname, r.rolsuper, d.datname FROM pg_database d JOIN pg_roles r ON r.oid = d.datdba
        WHERE d.datname IN ({{range $i, $db := .Databases}}{{if $i}}, {{end}}{{literal $db}}{{end}})
    LOOP
        IF owner.rolsuper THEN
            RAISE WARNING 'database % belongs to a superuser: GRANT the owners of its tables to % by hand', owner.datname, {{literal .Role}};
        ELSE
            EXECUTE format('GRANT %I TO %I', owner.rolname, {{literal .Role}});
        END IF;
    END LOOP;
END $init$;
{{- end}}

COMMIT;

-- With [proxy] auth = "scram" only, as a superuser in database {{ident (index .Databases 0)}} (docs/security.md says what it means):
--   GRANT SELECT (rolname, rolpassword) ON pg_catalog.pg_authid TO {{ident .Role}};
