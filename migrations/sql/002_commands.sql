-- How commands reach the catalog in the name of the right role, and helpers that the other functions share.

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

-- event_id is koldproxy.EventID in SQL.
CREATE FUNCTION koldstore.event_id(seq bigint, commit_lsn pg_lsn) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT pg_catalog.lpad(((seq >> 22) + 1704067200000)::text, 17, '0') || '-' ||
           pg_catalog.lpad((seq & 4194303)::text, 10, '0') || '-' ||
           pg_catalog.lpad(pg_catalog.to_hex((commit_lsn - '0/0'::pg_lsn)::bigint), 16, '0');
END;

-- seq_at is the first seq of a moment.
CREATE FUNCTION koldstore.seq_at(at timestamptz) RETURNS bigint
LANGUAGE sql STABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT greatest(pg_catalog.floor(EXTRACT(epoch FROM at) * 1000)::bigint - 1704067200000, 0) << 22;
END;

CREATE SEQUENCE koldstore.snowflake_counter MINVALUE 0 MAXVALUE 4194303 CYCLE CACHE 32;
CREATE FUNCTION koldstore.snowflake_id() RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT koldstore.seq_at(pg_catalog.clock_timestamp()) | pg_catalog.nextval('koldstore.snowflake_counter')
$$;
COMMENT ON FUNCTION koldstore.snowflake_id() IS
    'A unique, roughly time-ordered id. It has the shape of a seq and is none: only the applier hands out seqs.';

CREATE FUNCTION koldstore.koldstore_version() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
 SELECT '0.1.0'::text;
END;

CREATE FUNCTION koldstore.is_owner(requester name, table_oid oid) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT pg_catalog.pg_has_role(requester, c.relowner, 'USAGE') FROM pg_catalog.pg_class c WHERE c.oid = table_oid;
END;

-- name_of is a table's name as PostgreSQL's own messages show it; NULL if there is no such table.
CREATE FUNCTION koldstore.name_of(rel oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.relname::text FROM pg_catalog.pg_class c WHERE c.oid = rel;
END;

-- key_may_be_null says whether a column of a relation can hold NULL. It reads the catalog and is IMMUTABLE all the same: the
-- planner has to know the answer, and a change of it invalidates every plan that reads the relation. A relation that is
-- no table, and a table with children by inheritance, which may be laxer than it, can.
CREATE FUNCTION koldstore.key_may_be_null(relation regclass, key name) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN NOT EXISTS (
        SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE a.attrelid = relation AND a.attname = key AND a.attnotnull AND NOT a.attisdropped
          AND (c.relkind = 'p' OR c.relkind = 'r' AND NOT c.relhassubclass));
END $$;

-- check_table refuses every kind of table that cannot be captured, saying which and why.
CREATE FUNCTION koldstore.check_table(requester name, rel regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c      pg_catalog.pg_class;
    schema name;
    why    text;
    hint   text;
    cols   text;
BEGIN
    SELECT * INTO c FROM pg_catalog.pg_class WHERE oid = rel;
    SELECT nspname INTO schema FROM pg_catalog.pg_namespace WHERE oid = c.relnamespace;
    IF NOT koldstore.is_owner(requester, rel) THEN
        RAISE EXCEPTION 'must be owner of table %', c.relname USING ERRCODE = '42501';
    END IF;
    IF schema = 'koldstore' OR EXISTS (SELECT FROM koldstore.stream s WHERE s.log_oid = rel) THEN
        why := 'it belongs to koldproxy itself';
    ELSIF schema IN ('pg_catalog', 'information_schema', 'pg_toast') THEN
        why := 'it is a system catalog';
    ELSIF c.relkind = 'v' THEN why := 'it is a view';
    ELSIF c.relkind = 'm' THEN why := 'it is a materialized view';
    ELSIF c.relkind = 'f' THEN why := 'it is a foreign table';
    ELSIF c.relkind NOT IN ('r', 'p') THEN why := 'it is no table';
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE rel IN (i.inhparent, i.inhrelid)) AND NOT c.relispartition AND c.relkind = 'r' THEN
        why := 'it inherits or is inherited from, which this version does not support';
    ELSIF c.relispartition THEN
        why := 'it is a partition'; hint := pg_catalog.format('Capture the whole table, %s.', pg_catalog.pg_partition_root(rel));
    ELSIF c.relpersistence = 'u' THEN why := 'it is unlogged'; hint := 'Use ALTER TABLE … SET LOGGED first.';
    ELSIF c.relpersistence = 't' THEN why := 'it is temporary';
    ELSIF NOT EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = rel AND i.indisprimary) THEN
        why := 'it has no primary key'; hint := 'Add one: ALTER TABLE … ADD PRIMARY KEY (…).';
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = rel AND i.indisprimary AND NOT i.indimmediate) THEN
        why := 'its primary key is deferrable';
    ELSIF koldstore.partition_fault(rel) IS NOT NULL THEN why := koldstore.partition_fault(rel);
    ELSE
        SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY a.attnum) INTO cols
        FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = rel AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> '';
        IF cols IS NOT NULL THEN
            why := 'it has generated columns (' || cols || '), which this version does not support';
        END IF;
    END IF;
    IF hint IS NOT NULL THEN
        RAISE EXCEPTION 'changes of "%" cannot be captured: %', c.relname, why USING ERRCODE = '55000', HINT = hint;
    ELSIF why IS NOT NULL THEN
        RAISE EXCEPTION 'changes of "%" cannot be captured: %', c.relname, why USING ERRCODE = '55000';
    END IF;
    -- A slot that is still being made does not decode yet what is written now.
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s, koldstore.checkpoint p
                   WHERE s.slot_name = p.slot_name AND s.database = pg_catalog.current_database() AND s.confirmed_flush_lsn IS NOT NULL) THEN
        RAISE EXCEPTION 'koldproxy has not started on database "%" yet', pg_catalog.current_database()
            USING ERRCODE = '55000', HINT = 'Start koldproxy with this database in [postgres] databases; it creates its replication slot then.';
    END IF;
END $$;

-- lock_writers_out waits until no transaction that wrote to the table is open, and keeps new ones out until the end of
-- this transaction. It waits a second at a time, so that writers queue behind it for no longer than that.
CREATE FUNCTION koldstore.lock_writers_out(rel regclass, full_identity boolean, attempts integer DEFAULT 15) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    timeout_before text := pg_catalog.current_setting('lock_timeout');
    blockers       text;
BEGIN
    FOR attempt IN 1 .. attempts LOOP
        BEGIN
            PERFORM pg_catalog.set_config('lock_timeout', '1s', true);
            IF full_identity THEN
                EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY FULL', rel);
            END IF;
            -- Writers hold locks on the partitions that they write to, and on the root.
            EXECUTE pg_catalog.format('LOCK TABLE %s%s IN SHARE ROW EXCLUSIVE MODE',
                CASE WHEN (SELECT c.relkind FROM pg_catalog.pg_class c WHERE c.oid = rel) = 'p' THEN '' ELSE 'ONLY ' END, rel);
            PERFORM pg_catalog.set_config('lock_timeout', timeout_before, true);
            RETURN;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            PERFORM pg_catalog.pg_sleep(0.2);
        END;
    END LOOP;
    -- Who is in the way, oldest transaction first. A prepared transaction has no session.
    SELECT pg_catalog.string_agg(b.who, '; ' ORDER BY b.since) INTO blockers
    FROM (SELECT DISTINCT coalesce(
                     pg_catalog.format('process %s (user %s, application "%s", %s, transaction began %s ago)', a.pid, a.usename, a.application_name, a.state,
                         pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() - a.xact_start)),
                     (SELECT pg_catalog.format('prepared transaction "%s" (user %s, prepared %s ago)', p.gid, p.owner,
                         pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() - p.prepared))
                      FROM pg_catalog.pg_prepared_xacts p WHERE l.virtualtransaction = '-1/' || p.transaction::text),
                     'process ' || l.pid) AS who, a.xact_start AS since
          FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
          WHERE l.relation = rel AND l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
            AND l.mode IN ('RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())) b;
    RAISE EXCEPTION 'could not get a moment without writers on table %', rel
        USING ERRCODE = '55P03', DETAIL = 'Locked by ' || coalesce(blockers, 'somebody who has let go of it meanwhile') || '.',
              HINT = 'Wait for their transactions to end, then try again.';
END $$;

-- shape_of lists the columns of a table that its rows in the write-ahead log have.
CREATE FUNCTION koldstore.shape_of(rel oid) RETURNS jsonb
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('attnum', a.attnum, 'name', a.attname, 'type', a.atttypid::bigint, 'typmod', a.atttypmod) ORDER BY a.attnum), '[]')
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = rel AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '';
END;

-- note_shape puts the columns of a table into the write-ahead log, in front of the rows that have them.
CREATE FUNCTION koldstore.note_shape(rel oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_shape jsonb := koldstore.shape_of(rel);
BEGIN
    UPDATE koldstore.published_table t SET shape = now_shape WHERE t.table_oid = rel AND t.shape <> now_shape;
    IF FOUND THEN
        INSERT INTO koldstore.wal_marker (kind, subject, details) VALUES ('shape', rel::bigint, now_shape);
    END IF;
END $$;

-- publish puts a table into the publication, without a gap: every writer that is still open could have written rows that
-- will never be decoded, so it is waited for (PostgreSQL decodes a row only if the table was published when it was written).
-- The old row, whole, is needed for exit and delete events and for values behind unchanged TOAST pointers.
CREATE FUNCTION koldstore.is_published(rel oid) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
                   WHERE p.pubname = 'koldproxy' AND r.prrelid = rel);
END;

CREATE FUNCTION koldstore.publish(rel regclass, attempts integer DEFAULT 15) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    identity "char" := (SELECT relreplident FROM pg_catalog.pg_class WHERE oid = rel);
BEGIN
    IF EXISTS (SELECT FROM koldstore.published_table t WHERE t.table_oid = rel) AND identity = 'f' AND koldstore.is_published(rel) THEN
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

-- unpublish takes a table out again when no stream and no mirror needs it, and gives it back the identity it had.
CREATE FUNCTION koldstore.unpublish(rel oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    identity "char";
    leaf     record;
BEGIN
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

-- The rows of koldstore.command do the work. Two triggers, in the order of their names: the first runs as the caller and
-- notes who that is, the second runs as koldproxy. Writing the row by hand is the same as calling the function.
CREATE FUNCTION koldstore.command_requester() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.requester := current_user;
    NEW.at := pg_catalog.now();
    NEW.result := NULL;
    RETURN NEW;
END $$;

CREATE FUNCTION koldstore.command_execute() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET datestyle = 'ISO' SET intervalstyle = 'postgres' SET timezone = 'UTC' SET extra_float_digits = 3 SET bytea_output = 'hex' SET lc_monetary = 'C'
AS $$
DECLARE
    -- A command is carried out by the function do_<verb>, which judges the requester. No other function has such a name.
    worker regprocedure := to_regprocedure(format('koldstore.%I(name, jsonb)', 'do_' || NEW.verb));
BEGIN
    IF worker IS NULL THEN
        RAISE EXCEPTION 'unknown command "%"', NEW.verb USING ERRCODE = '22023';
    END IF;
    EXECUTE format('SELECT %s($1, $2)', worker::regproc) INTO STRICT NEW.result USING NEW.requester, NEW.args;
    RETURN NEW;
END $$;

CREATE TRIGGER a_requester BEFORE INSERT ON koldstore.command FOR EACH ROW EXECUTE FUNCTION koldstore.command_requester();
CREATE TRIGGER b_execute BEFORE INSERT ON koldstore.command FOR EACH ROW EXECUTE FUNCTION koldstore.command_execute();
ALTER TABLE koldstore.command ENABLE ALWAYS TRIGGER a_requester;
ALTER TABLE koldstore.command ENABLE ALWAYS TRIGGER b_execute;
ALTER TABLE koldstore.command ENABLE ROW LEVEL SECURITY;
CREATE POLICY anyone_may_ask ON koldstore.command FOR INSERT WITH CHECK (true);
CREATE POLICY own_answers ON koldstore.command FOR SELECT USING (requester = current_user);
GRANT INSERT (verb, args), SELECT ON koldstore.command TO PUBLIC;

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

-- guard makes a log or mirror read-only and shows it to those who may read the whole source table. The owner of the source
-- table holds the privileges to write, so that a write is answered by the guard (42809, with a hint) and not by a puzzling
-- 42501; behind the guard, row-level security without a policy for writes refuses them once more. Nobody else gets them:
-- they would convey the right to lock the log, and with it the applier.
CREATE FUNCTION koldstore.guard(target oid, source oid, extra_condition text, hint text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rel text := target::pg_catalog.regclass::text;
BEGIN
    EXECUTE pg_catalog.format(
        'CREATE TRIGGER koldproxy_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION koldstore.refuse_write(%L)', rel, hint);
    EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER koldproxy_guard', rel);
    EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', rel);
    EXECUTE pg_catalog.format('CREATE POLICY koldproxy_readers ON %s FOR SELECT USING (%s)', rel, koldstore.readers_of(source, extra_condition));
    EXECUTE pg_catalog.format('GRANT SELECT ON %s TO PUBLIC', rel);
    EXECUTE pg_catalog.format('GRANT INSERT, UPDATE, DELETE, TRUNCATE ON %s TO %I', rel,
        (SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c WHERE c.oid = source));
END $$;

CREATE PUBLICATION koldproxy FOR TABLE koldstore.wal_marker WITH (publish_via_partition_root = true);

-- What everybody may see of the catalog: what concerns tables they may read. All of it can be selected from, so that
-- pg_dump --enable-row-security works for everybody who owns a database; policies decide what comes.
CREATE FUNCTION koldstore.is_member(role name) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT pg_catalog.pg_has_role(r.oid, 'USAGE') FROM pg_catalog.pg_roles r WHERE r.rolname = role), false);
END;

GRANT USAGE ON SCHEMA koldstore TO PUBLIC;
DO $$
DECLARE
    rel record;
BEGIN
    FOR rel IN SELECT c.oid::regclass AS name, c.relname,
               CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'table_oid' AND NOT a.attisdropped)
                    THEN 'koldstore.may_read(table_oid)' END AS condition
               FROM pg_catalog.pg_class c WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relkind = 'r' AND c.relname <> 'command'
    LOOP
        EXECUTE pg_catalog.format('GRANT SELECT ON %s TO PUBLIC', rel.name);
        CONTINUE WHEN rel.relname IN ('checkpoint', 'schema_version');
        EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', rel.name);
        EXECUTE pg_catalog.format('CREATE POLICY readers ON %s FOR SELECT USING (%s)', rel.name, CASE rel.relname
            WHEN 'stream' THEN 'koldstore.may_read(table_oid) OR koldstore.is_member(created_by)'
            WHEN 'managed_table' THEN 'koldstore.may_read(table_oid) OR koldstore.is_member(created_by)'
            WHEN 'gap' THEN 'table_oid IS NULL OR koldstore.may_read(table_oid)'
            WHEN 'stream_status' THEN 'EXISTS (SELECT FROM koldstore.stream s WHERE s.stream_id = stream_status.stream_id)'
            ELSE coalesce(rel.condition, 'false') END);
    END LOOP;
END $$;

-- hand_over gives a function of this schema to another role. To own something in a schema takes CREATE on it. Nobody else
-- sees that the role has it for a moment; a superuser needs no such detour. Two at a time would fail over the schema's row
-- in the catalog.
CREATE FUNCTION koldstore.hand_over(fn text, role name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    detour boolean := NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) AND NOT pg_catalog.has_schema_privilege(role, 'koldstore', 'CREATE');
BEGIN
    IF detour THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('koldstore.owner'), 0);
        EXECUTE pg_catalog.format('GRANT CREATE ON SCHEMA koldstore TO %I', role);
    END IF;
    EXECUTE pg_catalog.format('ALTER FUNCTION %s OWNER TO %I', fn, role);
    IF detour THEN
        EXECUTE pg_catalog.format('REVOKE CREATE ON SCHEMA koldstore FROM %I', role);
    END IF;
END $$;

-- eval_rows is where rows become JSON and predicates are judged: the only place where koldproxy runs code of users (checks of
-- domains, casts, functions in predicates). It belongs to a role without any rights, so that such code has none either; what
-- a predicate calls runs with the rights of the table's owner. Rows come as literals and through input functions alone, since
-- a cast could be anybody's. ord counts the literals from 1, matches runs parallel to predicates.
CREATE FUNCTION koldstore.eval_rows(row_type oid, literals text[], predicates oid[]) RETURNS TABLE (ord bigint, image jsonb, matches boolean[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY EXECUTE pg_catalog.format(
        'SELECT x.ord, pg_catalog.to_jsonb(x.r), ARRAY[%s]::boolean[]
         FROM (SELECT l.ord, l.literal, pg_catalog.record_in(pg_catalog.textout(l.literal), %s, -1) AS r
               FROM pg_catalog.unnest($1) WITH ORDINALITY AS l(literal, ord) OFFSET 0) AS x',
        (SELECT pg_catalog.string_agg(pg_catalog.format('%s(x.literal)', p.fn::regproc), ', ' ORDER BY p.ord)
         FROM pg_catalog.unnest(predicates) WITH ORDINALITY AS p(fn, ord)), row_type)
        USING literals;
END $$;

-- inlined takes a predicate function apart if it uses nothing but PostgreSQL itself: what it says, which fields of the row it calls
-- what, and the name of the row in it. NULL if it calls code of users, which only the function itself may run (with the rights
-- of the table's owner), if it names another type than that of the row, or if its text is not what create_stream writes. reader is
-- the function that reads a literal of its row.
CREATE FUNCTION koldstore.inlined(fn oid, row_type oid, OUT judged text, OUT used text, OUT alias text, OUT reader text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- An expression that PostgreSQL would name a column after (CASE, coalesce, a function) has that name behind it.
    SELECT pg_catalog.regexp_replace(p.parts[1], '\s+AS ("(?:[^"]|"")*"|[^\s",()]+)$', ''), p.parts[2], p.parts[4],
        (SELECT 'row_' || pg_catalog.substring(f.proname, '^predicate_([0-9]+)_of_stream_') FROM pg_catalog.pg_proc f WHERE f.oid = fn)
    FROM (SELECT pg_catalog.regexp_match(pg_catalog.pg_get_function_sqlbody(fn),
        '^\s*RETURN \(SELECT (.*) FROM \(SELECT ((?:, |\(x\.r\)\.("(?:[^"]|"")*"|[^\s",()]+) AS (?:"(?:[^"]|"")*"|[^\s",()]+))+) FROM \(SELECT \(\$1\)::.* AS r OFFSET 0\) x\) (.*)\)\s*$') AS parts) AS p
    WHERE p.parts[4] <> '_ks' AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_catalog.pg_proc'::regclass AND d.objid = fn AND d.deptype = 'n'
          AND d.refclassid NOT IN ('pg_catalog.pg_namespace'::regclass, 'pg_catalog.pg_class'::regclass)
          AND NOT (d.refclassid = 'pg_catalog.pg_type'::regclass AND d.refobjid = row_type))
$$;

-- judge_query writes the query for judge_rows about rows of a type. Predicates that use nothing but PostgreSQL itself become parts of it,
-- so that each row is read once, however many they are.
CREATE FUNCTION koldstore.judge_query(row_type oid, predicates oid[]) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    words  text;
    tables text;
    fields text;
    reader text;
BEGIN
    WITH p AS MATERIALIZED (
        SELECT u.ord, u.fn, i.*
        FROM pg_catalog.unnest(predicates) WITH ORDINALITY AS u(fn, ord)
        -- A cast that somebody has made would be another way from the text to the row.
        LEFT JOIN LATERAL koldstore.inlined(u.fn, row_type) AS i ON NOT EXISTS (SELECT FROM pg_catalog.pg_cast c WHERE c.casttarget = row_type)),
    item AS MATERIALIZED (
        SELECT p.ord, p.alias, a.attnum, m.parts[2] AS name
        FROM p
        CROSS JOIN LATERAL pg_catalog.regexp_matches(p.used, '\(x\.r\)\.("(?:[^"]|"")*"|[^\s",()]+) AS ("(?:[^"]|"")*"|[^\s",()]+)', 'g') AS m(parts)
        JOIN pg_catalog.pg_type t ON t.oid = row_type
        JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped AND pg_catalog.quote_ident(a.attname) = m.parts[1]),
    clash AS ( -- one name for several columns, which were renamed meanwhile
        SELECT i.alias, i.name FROM item i GROUP BY 1, 2 HAVING pg_catalog.count(DISTINCT i.attnum) > 1),
    inline AS MATERIALIZED (
        SELECT p.ord, p.alias, p.judged, p.reader FROM p
        WHERE p.judged IS NOT NULL AND NOT EXISTS (SELECT FROM item i JOIN clash c ON c.alias = i.alias AND c.name = i.name WHERE i.ord = p.ord))
    SELECT
        (SELECT pg_catalog.string_agg(w.word, ', ' ORDER BY w.n)
         FROM (SELECT (p.ord - 1) / 60 AS n, pg_catalog.string_agg(pg_catalog.format('CASE WHEN %s THEN %s::bigint ELSE 0 END',
                   coalesce(l.judged, pg_catalog.format('%s(_ks.literal)', p.fn::regproc)), 1::bigint << ((p.ord - 1) % 60)::int), ' | ' ORDER BY p.ord) AS word
               FROM p LEFT JOIN inline l ON l.ord = p.ord GROUP BY 1) AS w),
        (SELECT pg_catalog.string_agg(pg_catalog.format(', LATERAL (SELECT %s) AS %s', t.columns, t.alias), '')
         FROM (SELECT i.alias, pg_catalog.string_agg(DISTINCT pg_catalog.format('_ks.c%s AS %s', i.attnum, i.name), ', ') AS columns
               FROM item i JOIN inline l ON l.ord = i.ord GROUP BY i.alias) AS t),
        (SELECT pg_catalog.string_agg(DISTINCT pg_catalog.format(', (s.r).%I AS c%s', a.attname, a.attnum), '')
         FROM item i JOIN inline l ON l.ord = i.ord
         JOIN pg_catalog.pg_type t ON t.oid = row_type JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum = i.attnum),
        (SELECT 'koldstore.' || pg_catalog.quote_ident(min(l.reader)) || '(l.literal)' FROM inline l)
    INTO words, tables, fields, reader;
    RETURN pg_catalog.format(
        'SELECT _ks.ord, ARRAY[%s]::bigint[]
         FROM (SELECT s.ord, s.literal%s FROM (SELECT l.ord, l.literal, %s AS r FROM pg_catalog.unnest($1) WITH ORDINALITY AS l(literal, ord) OFFSET 0) AS s OFFSET 0) AS _ks%s',
        words, fields, coalesce(reader, 'NULL'), tables);
END $$;

-- judge_rows runs such a query about literals. matches holds 60 predicates in each of its numbers, the first in the lowest bit.
CREATE FUNCTION koldstore.judge_rows(query text, literals text[]) RETURNS TABLE (ord bigint, matches bigint[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY EXECUTE query USING literals;
END $$;

-- eval_predicates judges rows that cannot be shown as JSON.
CREATE FUNCTION koldstore.eval_predicates(literals text[], predicates oid[]) RETURNS TABLE (ord bigint, matches boolean[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY EXECUTE pg_catalog.format('SELECT l.ord, ARRAY[%s]::boolean[] FROM pg_catalog.unnest($1) WITH ORDINALITY AS l(literal, ord)',
        (SELECT pg_catalog.string_agg(pg_catalog.format('%s(l.literal)', p.fn::regproc), ', ' ORDER BY p.ord)
         FROM pg_catalog.unnest(predicates) WITH ORDINALITY AS p(fn, ord)))
        USING literals;
END $$;

DO $$
DECLARE
    fn text;
BEGIN
    BEGIN
        IF pg_catalog.to_regrole('koldproxy_eval') IS NULL THEN
            BEGIN
                CREATE ROLE koldproxy_eval NOLOGIN;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; -- by the migration of another database, just now
            END;
        END IF;
        IF NOT pg_catalog.pg_has_role('koldproxy_eval', 'MEMBER') THEN
            EXECUTE pg_catalog.format('GRANT koldproxy_eval TO %I', current_user);
        END IF;
    EXCEPTION WHEN insufficient_privilege THEN
        RAISE EXCEPTION '% needs to be a member of the role koldproxy_eval, and may not see to it itself', current_user USING ERRCODE = '42501',
            HINT = pg_catalog.format('Have an administrator run: CREATE ROLE koldproxy_eval NOLOGIN (if it does not exist); GRANT koldproxy_eval TO %I;', current_user);
    END;
    FOREACH fn IN ARRAY ARRAY['eval_rows(oid, text[], oid[])', 'eval_predicates(text[], oid[])', 'judge_query(oid, oid[])', 'judge_rows(text, text[])'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION koldstore.%s FROM PUBLIC', fn);
        PERFORM koldstore.hand_over('koldstore.' || fn, 'koldproxy_eval');
        EXECUTE pg_catalog.format('SET LOCAL ROLE koldproxy_eval; GRANT EXECUTE ON FUNCTION koldstore.%s TO %I; SET LOCAL ROLE NONE', fn, current_user);
    END LOOP;
END $$;

---- create above / drop below ----

DROP PUBLICATION koldproxy;
DO $$
DECLARE
    p record;
BEGIN
    FOR p IN SELECT polname, polrelid::regclass AS rel FROM pg_catalog.pg_policy
             WHERE polrelid IN (SELECT oid FROM pg_catalog.pg_class WHERE relnamespace = 'koldstore'::regnamespace) LOOP
        EXECUTE pg_catalog.format('DROP POLICY %I ON %s', p.polname, p.rel);
    END LOOP;
END $$;
DROP TRIGGER a_requester ON koldstore.command;
DROP TRIGGER b_execute ON koldstore.command;
DROP FUNCTION koldstore.judge_rows, koldstore.judge_query, koldstore.inlined, koldstore.eval_predicates, koldstore.eval_rows, koldstore.hand_over, koldstore.is_member, koldstore.guard, koldstore.readers_of, koldstore.refuse_write, koldstore.command_execute, koldstore.command_requester, koldstore.unpublish,
    koldstore.publish, koldstore.is_published, koldstore.note_shape, koldstore.shape_of, koldstore.lock_writers_out, koldstore.check_table, koldstore.is_owner, koldstore.koldstore_version,
    koldstore.name_of, koldstore.key_may_be_null, koldstore.snowflake_id, koldstore.seq_at, koldstore.event_id, koldstore.may_read, koldstore.assert_readable;
DROP SEQUENCE koldstore.snowflake_counter;
