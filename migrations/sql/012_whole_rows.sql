-- A predicate is evaluated over the columns that it names (see do_create_stream), of which a reference to the row as a whole
-- names none: t IS NOT NULL would be asked of another row.

CREATE FUNCTION koldstore.refuse_whole_row() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- PostgreSQL's own reading of the predicate is in the view that SHOW STREAMS has it from.
    IF EXISTS (SELECT FROM pg_class c JOIN pg_rewrite r ON r.ev_class = c.oid
               WHERE c.relnamespace = 'koldstore'::regnamespace AND c.relname = 'when_' || NEW.stream_id AND r.ev_action::text ~ ':varattno 0 ') THEN
        RAISE EXCEPTION 'the predicate is about the row as a whole' USING ERRCODE = '0A000',
            HINT = 'Compare columns, or ROW(…) with the columns that count.';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER koldproxy_whole_row BEFORE INSERT ON koldstore.stream FOR EACH ROW EXECUTE FUNCTION koldstore.refuse_whole_row();
REVOKE ALL ON FUNCTION koldstore.refuse_whole_row FROM PUBLIC;

---- create above / drop below ----

DROP TRIGGER koldproxy_whole_row ON koldstore.stream;
DROP FUNCTION koldstore.refuse_whole_row;
