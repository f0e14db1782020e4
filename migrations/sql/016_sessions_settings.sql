-- What the settings of a session change in what koldproxy does there: how literals are read, and which operators are found.

-- Bodies are read with the session's standard_conforming_strings. With off, a backslash in a plain literal escapes what is behind it, and
-- every DROP and ALTER TABLE of such a session failed in a pattern. What PostgreSQL deparses is written by the same setting.
ALTER FUNCTION koldstore.refuse_log_ddl SET standard_conforming_strings TO on;
ALTER FUNCTION koldstore.parse_retention SET standard_conforming_strings TO on;
ALTER FUNCTION koldstore.judge_query SET standard_conforming_strings TO on;
ALTER FUNCTION koldstore.inlined SET standard_conforming_strings TO on;
ALTER FUNCTION koldstore.do_create_stream SET standard_conforming_strings TO on;
ALTER FUNCTION koldstore.repair_table SET standard_conforming_strings TO on;

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

---- create above / drop below ----

DROP FUNCTION koldstore.compares_keys, koldstore.key_operators;
ALTER FUNCTION koldstore.refuse_log_ddl RESET standard_conforming_strings;
ALTER FUNCTION koldstore.parse_retention RESET standard_conforming_strings;
ALTER FUNCTION koldstore.judge_query RESET standard_conforming_strings;
ALTER FUNCTION koldstore.inlined RESET standard_conforming_strings;
ALTER FUNCTION koldstore.do_create_stream RESET standard_conforming_strings;
ALTER FUNCTION koldstore.repair_table RESET standard_conforming_strings;
