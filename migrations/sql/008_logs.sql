-- Logs are partitioned by age, so that the sweep frees space by dropping partitions: no dead rows, no vacuum, and readers and
-- the applier go on meanwhile. Ids begin with the time, so a range of ids is an age. See docs/decisions/0009-logs-are-partitioned-tables.md.

-- log_width is the time that one partition of a log covers: the space of an event comes back at most so much after the sweep
-- that follows its end.
CREATE FUNCTION koldstore.log_width(keep interval) RETURNS interval
LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT CASE WHEN keep IS NULL THEN interval '30 days' ELSE least(greatest(keep / 24, interval '1 minute'), interval '30 days') END;
END;

-- log_partitions lists the partitions of a log, oldest first, without those that are being detached. Bounds are beginnings of
-- event ids, NULL for MINVALUE.
CREATE FUNCTION koldstore.log_partitions(log oid) RETURNS TABLE (part oid, lower text, upper text)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT b.part, pg_catalog.substring(b.bound, 'FROM \(''([0-9]+)''\)'), pg_catalog.substring(b.bound, 'TO \(''([0-9]+)''\)') AS upper
    FROM (SELECT c.oid AS part, pg_catalog.pg_get_expr(c.relpartbound, c.oid) AS bound
          FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
          WHERE i.inhparent = log AND NOT i.inhdetachpending) AS b
    ORDER BY upper;
END;

-- log_end is the first beginning of ids that a log has no partition for.
CREATE FUNCTION koldstore.log_end(log oid) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT max(p.upper) FROM koldstore.log_partitions(log) AS p;
END;

-- millis_prefix is the beginning of the ids of a moment, given in milliseconds since 1970.
CREATE FUNCTION koldstore.millis_prefix(millis bigint) RETURNS text
LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT pg_catalog.lpad(millis::text, 17, '0');
END;

-- extend_log makes sure that a log has partitions for ids up to a moment (milliseconds since 1970) and returns its new end.
-- A partition is made apart and attached, which lets readers and writers of the log go on; CREATE TABLE … PARTITION OF would
-- lock them out.
CREATE FUNCTION koldstore.extend_log(log regclass, stream bigint, keep interval, millis bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    width bigint := floor(EXTRACT(epoch FROM koldstore.log_width(keep)) * 1000)::bigint;
    reach bigint := (millis / width + 1) * width;
    part  text := format('koldstore.%I', '_stream_' || stream || '_' || reach);
    last  text;
BEGIN
    -- The applier and the sweep may both find that it is time.
    PERFORM pg_advisory_xact_lock(hashtext('koldstore.log'), stream::int4);
    last := koldstore.log_end(log);
    IF last > koldstore.millis_prefix(millis) THEN
        RETURN last;
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING INDEXES INCLUDING STORAGE)', part, log);
    PERFORM koldstore.guard_partition(part);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%L)',
        log, part, coalesce(quote_literal(last), 'MINVALUE'), koldstore.millis_prefix(reach));
    RETURN koldstore.millis_prefix(reach);
END $$;

-- guard_partition keeps everybody else from writing to a partition itself. Nobody is granted anything on it: a log is read
-- by its own name, where retention holds.
CREATE FUNCTION koldstore.guard_partition(part text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('CREATE TRIGGER koldproxy_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION koldstore.refuse_write(%L)',
        part, 'This is a part of the log of a stream.');
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER koldproxy_guard', part);
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', part);
END $$;

-- extend_logs makes the next partition of every log whose newest one is in use and will soon be over. A log that nothing is
-- written to gets none. A log is locked before its partition, as TRUNCATE does.
CREATE FUNCTION koldstore.extend_logs() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s      record;
    used   boolean;
    soon   bigint;
BEGIN
    FOR s IN SELECT t.stream_id, t.log_oid, t.retention, p.part, p.upper
             FROM koldstore.stream t JOIN pg_class c ON c.oid = t.log_oid
             CROSS JOIN LATERAL (SELECT l.part, l.upper FROM koldstore.log_partitions(t.log_oid) AS l ORDER BY l.upper DESC LIMIT 1) AS p
             WHERE t.state <> 'broken'
    LOOP
        soon := floor(EXTRACT(epoch FROM clock_timestamp() + koldstore.log_width(s.retention) / 4) * 1000)::bigint;
        CONTINUE WHEN s.upper > koldstore.millis_prefix(soon);
        -- A stream that is being dropped, or was since this began, needs no partition.
        PERFORM FROM koldstore.stream t WHERE t.stream_id = s.stream_id FOR KEY SHARE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS SHARE MODE', s.log_oid::regclass);
        EXECUTE format('SELECT EXISTS (SELECT FROM %s)', s.part::regclass) INTO used;
        IF used THEN
            PERFORM koldstore.extend_log(s.log_oid, s.stream_id, s.retention, soon);
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION koldstore.extend_log, koldstore.extend_logs, koldstore.guard_partition FROM PUBLIC;

---- create above / drop below ----

DROP FUNCTION koldstore.extend_logs, koldstore.guard_partition, koldstore.extend_log, koldstore.millis_prefix, koldstore.log_end, koldstore.log_partitions, koldstore.log_width;
