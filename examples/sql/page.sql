-- Applies one page of the stream, and the next one if this was full. Included by consumer.sql.

BEGIN;
-- Whoever else runs this for the same stream waits here.
SELECT id AS after FROM consumer_position WHERE stream = :'stream' FOR UPDATE \gset
CREATE TEMPORARY TABLE page ON COMMIT DROP AS
  SELECT id, op, k, doc FROM :"log" ORDER BY id LIMIT 500 AFTER (:'after');

-- Asked after the page was read: what has expired before that is not in it.
SELECT :'after' <> '' AND coalesce(:'after' < koldstore.stream_floor(:'stream'), false) AS missed \gset
\if :missed
  DO $$ BEGIN RAISE 'events are missing' USING HINT = 'Empty consumer_copy and consumer_position for this stream, and build the copy anew.'; END $$;
\endif

WITH newest AS (
  SELECT DISTINCT ON (k) op, k, doc FROM page ORDER BY k, id DESC
), gone AS (
  DELETE FROM consumer_copy c USING newest n WHERE c.stream = :'stream' AND c.k = n.k AND n.op <> 'put'
)
INSERT INTO consumer_copy SELECT :'stream', k, doc FROM newest WHERE op = 'put'
ON CONFLICT (stream, k) DO UPDATE SET doc = excluded.doc;
UPDATE consumer_position p SET id = l.id FROM (SELECT max(id) AS id FROM page) l WHERE p.stream = :'stream' AND l.id IS NOT NULL;
SELECT count(*) AS events, count(*) = 500 AS more FROM page \gset
COMMIT;
\echo :events events

\if :more
  \ir page.sql
\endif
