-- How commands reach the catalog in the name of the right role, and helpers that the other functions share.

-- A command is asked for by a row of a view, which shows whoever asks the answers to his own. Writing the row by hand is the same as
-- calling the function.
CREATE VIEW koldstore.command WITH (security_barrier) AS
    SELECT c.command_id, c.at, c.requester, c.verb, c.args, c.result FROM koldstore.command_log c WHERE koldstore.is_member(c.requester);
GRANT INSERT (verb, args), SELECT ON koldstore.command TO PUBLIC;
ALTER TABLE koldstore.command_log ENABLE ROW LEVEL SECURITY;
CREATE POLICY anyone_may_ask ON koldstore.command_log FOR INSERT WITH CHECK (true);
CREATE POLICY own_answers ON koldstore.command_log FOR SELECT USING (requester = current_user);

-- The rows do the work. Triggers run in the order of their names: the first runs as the caller and notes who that is, the second runs as
-- koldproxy, the third forgets what is nobody's business.
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

-- forget_credentials keeps secrets out of the record of commands.
CREATE FUNCTION koldstore.forget_credentials() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.args := pg_catalog.jsonb_set(NEW.args, '{credentials}', '"***"');
    RETURN NEW;
END $$;

CREATE TRIGGER a_requester BEFORE INSERT ON koldstore.command_log FOR EACH ROW EXECUTE FUNCTION koldstore.command_requester();
CREATE TRIGGER b_execute BEFORE INSERT ON koldstore.command_log FOR EACH ROW EXECUTE FUNCTION koldstore.command_execute();
CREATE TRIGGER c_forget BEFORE INSERT ON koldstore.command_log FOR EACH ROW WHEN (NEW.args ? 'credentials') EXECUTE FUNCTION koldstore.forget_credentials();
ALTER TABLE koldstore.command_log ENABLE ALWAYS TRIGGER a_requester;
ALTER TABLE koldstore.command_log ENABLE ALWAYS TRIGGER b_execute;
ALTER TABLE koldstore.command_log ENABLE ALWAYS TRIGGER c_forget;

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

-- Numbers and ids.

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

-- What SELECT … AFTER asks of keys.

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

-- base_type follows domains down to what they are made of.
CREATE FUNCTION koldstore.base_type(declared oid, declared_mod integer, OUT type oid, OUT typmod integer)
LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH RECURSIVE chain(type, typmod, depth) AS (
        SELECT declared, declared_mod, 0
        UNION ALL
        SELECT t.typbasetype, CASE WHEN t.typtypmod <> -1 THEN t.typtypmod ELSE c.typmod END, c.depth + 1
        FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.type WHERE t.typtype = 'd')
    SELECT c.type, c.typmod FROM chain c ORDER BY c.depth DESC LIMIT 1;
END;

-- AFTER compares each key with its value by the operators that the search path has, and ORDER BY sorts by those of the key's type. For
-- types of PostgreSQL's own the two agree. For a type of an extension (citext) they do not where its schema is not in the search path, or
-- where the value is of another type: PostgreSQL then converts both to one whose operators it finds.

-- key_operators are those that sort values of a type, if the type has its own: <, = and >, each with values of the types that it compares
-- them with.
CREATE FUNCTION koldstore.key_operators(key_type oid) RETURNS TABLE (operator oid, compared oid)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT a.amopopr, a.amoprighttype
    FROM pg_catalog.pg_opclass c
    JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree'
    JOIN pg_catalog.pg_amop a ON a.amopfamily = c.opcfamily AND a.amoplefttype = key_type AND a.amopstrategy IN (1, 3, 5)
    WHERE c.opcintype = key_type AND c.opcdefault;
END;

-- compares_keys says that a comparison of a key with a value finds the operators of the key's type; otherwise it is an error. It gets NULLs
-- of the two types, and is IMMUTABLE so that the planner calls it: once for a plan, which a change of the search path ends. It has no search
-- path of its own, for that of the caller is what is judged; so all names are qualified, operators too.
CREATE FUNCTION koldstore.compares_keys(key anyelement, value anycompatible) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    key_type   oid := (koldstore.base_type(pg_catalog.pg_typeof(key), -1)).type;
    value_type oid := (koldstore.base_type(pg_catalog.pg_typeof(value), -1)).type;
    hidden     record;
BEGIN
    IF key_type OPERATOR(pg_catalog.<) 16384::oid THEN -- a type of PostgreSQL's own
        RETURN true;
    END IF;
    SELECT n.nspname, o.oprname INTO hidden
    FROM koldstore.key_operators(key_type) k
    JOIN pg_catalog.pg_operator o ON o.oid OPERATOR(pg_catalog.=) k.operator
    JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) o.oprnamespace
    WHERE k.compared OPERATOR(pg_catalog.=) key_type AND NOT pg_catalog.pg_operator_is_visible(o.oid)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the search path does not lead to operator % of type %', hidden.oprname, pg_catalog.format_type(key_type, NULL)
            USING ERRCODE = '42883', DETAIL = 'AFTER would compare keys in another way than ORDER BY sorts them.',
                HINT = pg_catalog.format('Add schema %I to search_path.', hidden.nspname);
    END IF;
    IF EXISTS (SELECT FROM koldstore.key_operators(key_type)) AND key_type OPERATOR(pg_catalog.<>) value_type
        AND NOT EXISTS (SELECT FROM koldstore.key_operators(key_type) k
            WHERE k.compared OPERATOR(pg_catalog.=) value_type AND pg_catalog.pg_operator_is_visible(k.operator)) THEN
        RAISE EXCEPTION 'AFTER has a value of type % for a key of type %', pg_catalog.format_type(value_type, NULL), pg_catalog.format_type(key_type, NULL)
            USING ERRCODE = '42804', DETAIL = 'AFTER would compare keys in another way than ORDER BY sorts them.',
                HINT = pg_catalog.format('Cast the value to %s.', pg_catalog.format_type(key_type, NULL));
    END IF;
    RETURN true;
END $$;
COMMENT ON FUNCTION koldstore.compares_keys IS 'Says that AFTER compares as ORDER BY sorts; koldproxy adds calls of it.';

-- Tables whose changes are captured.

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
    IF schema = 'koldstore' OR koldstore.is_log(rel) THEN
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

-- shape_of lists the columns of a table that its rows in the write-ahead log have. labels are the names of a column's enum values by their
-- OIDs; inside is the same of enums that its values only contain, as arrays do.
CREATE FUNCTION koldstore.shape_of(rel oid) RETURNS jsonb
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

-- note_shape puts the columns of a table into the write-ahead log, in front of the rows that have them. The log shows a value of an enum type
-- by the name that it had then. Shapes know the names, so the applier can tell which value it is after ALTER TYPE … RENAME VALUE, and the feed,
-- whose images show old names, is compared with its table.
CREATE FUNCTION koldstore.note_shape(rel oid) RETURNS void
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

CREATE FUNCTION koldstore.is_published(rel oid) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
                   WHERE p.pubname = 'koldproxy' AND r.prrelid = rel);
END;

-- publish puts a table into the publication, without a gap: every writer that is still open could have written rows that
-- will never be decoded, so it is waited for (PostgreSQL decodes a row only if the table was published when it was written).
-- The old row, whole, is needed for exit and delete events and for values behind unchanged TOAST pointers.
--
-- identity is the replica identity of a table, as ALTER TABLE spells it.
CREATE FUNCTION koldstore.identity(rel oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT CASE c.relreplident WHEN 'd' THEN 'DEFAULT' WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE
        coalesce((SELECT pg_catalog.format('USING INDEX %I', x.relname) FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
                  WHERE i.indrelid = rel AND i.indisreplident), 'NOTHING') END -- without its index it is the same as NOTHING
    FROM pg_catalog.pg_class c WHERE c.oid = rel;
END;

-- give_identity gives a table back the replica identity that it had. An index may have gone or changed meanwhile; the table gets the default then.
CREATE FUNCTION koldstore.give_identity(rel regclass, identity text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF identity <> koldstore.identity(rel) THEN
        EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY %s', rel, identity);
    END IF;
EXCEPTION WHEN undefined_object OR wrong_object_type OR invalid_object_definition THEN
    EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY DEFAULT', rel);
END $$;

-- publish and unpublish may be called for one table by transactions that overlap. Each takes the table's row first, and looks at what the other
-- one has left afterwards; where a transaction has one snapshot for all statements the row has changed, which is an error (40001).
CREATE FUNCTION koldstore.publish(rel regclass, attempts integer DEFAULT 15) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known    boolean;
    identity text;
    owner    oid := (SELECT c.relowner FROM pg_catalog.pg_class c WHERE c.oid = rel);
BEGIN
    IF NOT pg_catalog.pg_has_role(owner, 'USAGE') THEN
        RAISE EXCEPTION 'koldproxy may not capture changes of table "%"', koldstore.name_of(rel) USING ERRCODE = '42501',
            DETAIL = pg_catalog.format('Its role "%s" needs the rights of the table''s owner, "%s".', current_user, pg_catalog.pg_get_userbyid(owner)),
            HINT = pg_catalog.format('GRANT %I TO %I', pg_catalog.pg_get_userbyid(owner), current_user);
    END IF;
    UPDATE koldstore.published_table t SET shape = t.shape WHERE t.table_oid = rel;
    known := FOUND;
    identity := koldstore.identity(rel);
    IF known AND identity = 'FULL' AND koldstore.is_published(rel) THEN
        RETURN;
    END IF;
    PERFORM koldstore.lock_writers_out(rel, identity <> 'FULL', attempts);
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
    identity text;
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
        IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = leaf.leaf_oid AND c.relkind = 'r') THEN
            PERFORM koldstore.give_identity(leaf.leaf_oid, leaf.identity_before);
        END IF;
    END LOOP;
    PERFORM koldstore.give_identity(rel, identity);
END $$;

REVOKE ALL ON FUNCTION koldstore.lock_writers_out, koldstore.give_identity, koldstore.note_shape, koldstore.publish, koldstore.unpublish FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.unpublish, koldstore.publish, koldstore.give_identity, koldstore.identity, koldstore.is_published, koldstore.note_shape, koldstore.shape_of, koldstore.enums_in, koldstore.lock_writers_out,
    koldstore.check_table, koldstore.compares_keys, koldstore.key_operators, koldstore.base_type, koldstore.key_may_be_null, koldstore.koldstore_version,
    koldstore.snowflake_id, koldstore.seq_at, koldstore.event_id, koldstore.assert_writable;
DROP SEQUENCE koldstore.snowflake_counter;
DROP VIEW koldstore.command;
DROP TRIGGER c_forget ON koldstore.command_log;
DROP TRIGGER b_execute ON koldstore.command_log;
DROP TRIGGER a_requester ON koldstore.command_log;
DROP POLICY own_answers ON koldstore.command_log;
DROP POLICY anyone_may_ask ON koldstore.command_log;
ALTER TABLE koldstore.command_log DISABLE ROW LEVEL SECURITY;
DROP FUNCTION koldstore.forget_credentials, koldstore.command_execute, koldstore.command_requester;
