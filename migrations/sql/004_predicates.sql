-- Where code of users runs: checks of domains, casts, and functions in predicates.

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
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
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
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $$
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

REVOKE ALL ON FUNCTION koldstore.hand_over FROM PUBLIC;
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

DROP FUNCTION koldstore.judge_rows, koldstore.judge_query, koldstore.inlined, koldstore.eval_predicates, koldstore.eval_rows, koldstore.hand_over;
