-- A TRUNCATE of a stream's table tells of the keys that are live in the log. None is from before the last one, so only what is behind
-- it has to be read.

ALTER TABLE koldstore.stream_status ADD truncated_id text COLLATE "C";
COMMENT ON COLUMN koldstore.stream_status.truncated_id IS 'The last id of the newest TRUNCATE: no key is live by an event up to it.';

---- create above / drop below ----

ALTER TABLE koldstore.stream_status DROP truncated_id;
