-- Keeps a copy of what a stream selects, in SQL alone: each page is applied in one transaction with the position, so whatever is killed
-- in between, nothing is applied twice and nothing is missing. It ends when there is nothing new; run it again, or whenever NOTIFY says so.
--
--   psql -X -v stream=big_orders -f examples/sql/consumer.sql "$DATABASE_URL"

\set ON_ERROR_STOP on
\set QUIET on
\set log _stream_ :stream
SET client_min_messages = warning;

CREATE TABLE IF NOT EXISTS consumer_position (stream text PRIMARY KEY, id text COLLATE "C" NOT NULL);
CREATE TABLE IF NOT EXISTS consumer_copy (stream text, k jsonb, doc jsonb NOT NULL, PRIMARY KEY (stream, k));
INSERT INTO consumer_position VALUES (:'stream', '') ON CONFLICT DO NOTHING;

\ir page.sql
