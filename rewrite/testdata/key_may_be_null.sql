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
