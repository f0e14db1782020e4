-- The tables of koldproxy's catalog. Everything here belongs to the role that runs the migration (koldproxy's service role).
-- Tables are named in the singular, as PostgreSQL's own catalogs are.

CREATE TABLE koldstore.checkpoint (
    one               boolean     PRIMARY KEY DEFAULT true CHECK (one),
    system_identifier text,
    timeline          integer,
    slot_name         text        NOT NULL,
    applied_lsn       pg_lsn      NOT NULL DEFAULT '0/0',
    watermark         bigint      NOT NULL DEFAULT 0,
    epoch             bigint      NOT NULL DEFAULT 0,
    rows_applied      bigint      NOT NULL DEFAULT 0,
    applied_at        timestamptz,
    gap               text,
    gap_at            timestamptz,
    begin_anew        boolean     NOT NULL DEFAULT false,
    told_lsn          pg_lsn
) WITH (fillfactor = 50);
COMMENT ON TABLE koldstore.checkpoint IS
    'How far the applier is. One row, written in every apply transaction. applied_lsn is the end of the last applied commit, watermark the highest seq handed out, epoch grows with every change of leader.';

COMMENT ON COLUMN koldstore.checkpoint.gap IS
    'Why changes may be missing between applied_lsn and the slot. While it is set nothing is applied (docs/operations.md, Gaps).';
COMMENT ON COLUMN koldstore.checkpoint.told_lsn IS
    'The slot was told no more than this or applied_lsn: exactly this by an applier that has stopped in order, a few MiB less by one that runs or was killed. A slot that says more has been replaced.';
COMMENT ON COLUMN koldstore.checkpoint.begin_anew IS
    'The gap is being closed: a new slot is being made, and feeds are compared with their tables from there on.';

INSERT INTO koldstore.checkpoint (slot_name)
SELECT 'koldproxy_' || d.oid::text FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database();

-- Holes in what the write-ahead log has told: what was committed in them is in no stream, and feeds were compared with their
-- tables afterwards. Kept for ever, so that a consumer can tell later.
CREATE TABLE koldstore.gap (
    gap_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    noticed_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    table_oid  oid,
    reason     text        NOT NULL,
    from_lsn   pg_lsn,
    to_lsn     pg_lsn,
    from_time  timestamptz,
    to_time    timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    seq        bigint      NOT NULL
);
COMMENT ON TABLE koldstore.gap IS
    'Times for which changes may be missing: of one table, or of all where table_oid is NULL. seq is the last one before. After a failover or a restore the two positions are of different histories.';

-- Every administrative command that was carried out, with the role that PostgreSQL itself saw as the current user. Commands are asked for
-- through the view koldstore.command.
CREATE TABLE koldstore.command_log (
    command_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT pg_catalog.now(),
    requester  name        NOT NULL DEFAULT '',
    verb       text        NOT NULL,
    args       jsonb       NOT NULL,
    result     jsonb
);

-- Published: the applier meets these rows in the write-ahead log at the exact place where a stream or a managed table begins.
CREATE TABLE koldstore.wal_marker (
    marker_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind      text   NOT NULL CHECK (kind IN ('stream', 'table', 'shape', 'heal', 'page')),
    subject   bigint NOT NULL,
    at        timestamptz NOT NULL DEFAULT pg_catalog.now(),
    details   jsonb
);
COMMENT ON COLUMN koldstore.wal_marker.subject IS 'stream.stream_id for a stream and for a page of its backfill, otherwise the table''s OID.';
COMMENT ON COLUMN koldstore.wal_marker.details IS
    'For a shape: the columns that rows of the table have from here on, as in published_table.shape. Names alone do not tell which column is which. For heal: {"reason": why rows may have come, gone or changed without being in the log}.';
CREATE PUBLICATION koldproxy FOR TABLE koldstore.wal_marker WITH (publish_via_partition_root = true);

CREATE TABLE koldstore.storage (
    name         text PRIMARY KEY,
    storage_id   uuid NOT NULL UNIQUE DEFAULT pg_catalog.gen_random_uuid(),
    storage_type text NOT NULL,
    base_path    text,
    credentials  jsonb NOT NULL DEFAULT '{}',
    config       jsonb NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL DEFAULT pg_catalog.now(),
    version      bigint NOT NULL DEFAULT 1,
    created_by   name NOT NULL DEFAULT CURRENT_USER,
    wants_check  boolean NOT NULL DEFAULT false,
    checked_at   timestamptz,
    check_error  text
);
COMMENT ON TABLE koldstore.storage IS 'Places for cold segments. The storage named default is the one of koldproxy''s configuration ([cold] url).';
COMMENT ON COLUMN koldstore.storage.version IS 'Raised when the credentials change: whoever has the storage open opens it anew.';
INSERT INTO koldstore.storage (name, storage_type) VALUES ('default', 'configured');

CREATE TABLE koldstore.managed_table (
    table_oid           oid         PRIMARY KEY,
    schema_name         name        NOT NULL,
    table_name          name        NOT NULL,
    mirror_oid          oid         NOT NULL UNIQUE,
    state               text        NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'seeding', 'healing', 'active', 'broken')),
    reason              text,
    storage             text        NOT NULL REFERENCES koldstore.storage (name),
    hot_row_limit       integer,
    min_flush_rows      integer     NOT NULL,
    max_rows_per_file   integer     NOT NULL,
    move_after          interval,
    retention           interval,
    auto_flush          boolean     NOT NULL,
    seed_job            uuid        NOT NULL,
    seed_key            text,
    heal_step           text        CHECK (heal_step IN ('mirror', 'cold', 'table')),
    heal_seq            bigint      NOT NULL DEFAULT 0,
    heal_through        bigint      NOT NULL DEFAULT 0,
    floor               bigint      NOT NULL DEFAULT 0,
    generation          bigint      NOT NULL DEFAULT 0,
    created_by          name        NOT NULL,
    created_at          timestamptz NOT NULL DEFAULT pg_catalog.now(),
    retention_bytes     bigint      CHECK (retention_bytes > 0),
    tombstone_retention interval
) WITH (fillfactor = 70);
COMMENT ON COLUMN koldstore.managed_table.seed_key IS
    'Where the seed goes on: the last seeded primary key as a row literal of the mirror''s key columns; NULL before the first page.';
COMMENT ON COLUMN koldstore.managed_table.heal_step IS
    'What is being compared with the table: the rows of the mirror, then cold rows, each with seqs from heal_seq up to heal_through; then the table itself, as a seed does.';
COMMENT ON COLUMN koldstore.managed_table.floor IS
    'Monotonic. Changes at or below it are no longer retained: a positive cursor below it is refused with KS001.';
COMMENT ON COLUMN koldstore.managed_table.generation IS
    'Raised by every transaction that changes the set of active segments.';
COMMENT ON COLUMN koldstore.managed_table.retention_bytes IS 'The oldest segments are dropped while all of them together are larger.';
COMMENT ON COLUMN koldstore.managed_table.tombstone_retention IS
    'Deletes older than this may be forgotten; the floor rises over those that are. NULL keeps all.';

CREATE TABLE koldstore.job (
    job_id     uuid        PRIMARY KEY DEFAULT pg_catalog.gen_random_uuid(),
    job_type   text        NOT NULL CHECK (job_type IN ('seed', 'backfill', 'heal', 'flush', 'retention')),
    table_oid  oid         NOT NULL,
    status     text        NOT NULL DEFAULT 'queued' CHECK (status IN ('queued', 'running', 'completed', 'not_due', 'cancelled', 'error')),
    args       jsonb       NOT NULL DEFAULT '{}',
    progress   jsonb       NOT NULL DEFAULT '{}',
    error      text,
    created_by name        NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    started_at timestamptz,
    ended_at   timestamptz
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX job_one_active_flush ON koldstore.job (table_oid) WHERE job_type = 'flush' AND status IN ('queued', 'running');
CREATE INDEX job_open ON koldstore.job (created_at) WHERE status IN ('queued', 'running');

-- Tables in the publication, with what they were before.
CREATE TABLE koldstore.published_table (
    table_oid       oid    PRIMARY KEY,
    identity_before text   NOT NULL,
    shape           jsonb  NOT NULL
);
COMMENT ON COLUMN koldstore.published_table.identity_before IS 'As in ALTER TABLE … REPLICA IDENTITY …';
COMMENT ON COLUMN koldstore.published_table.shape IS
    'The columns as the newest marker of kind shape shows them: [{"attnum", "name", "type", "typmod"}, …] in order.';

CREATE TABLE koldstore.partition (
    leaf_oid        oid    PRIMARY KEY,
    table_oid       oid    NOT NULL,
    filenode        oid    NOT NULL,
    identity_before text   NOT NULL
);
CREATE INDEX partition_by_table ON koldstore.partition (table_oid);
COMMENT ON TABLE koldstore.partition IS 'The leaves of captured partitioned tables, with the file that each had when it was looked at last: TRUNCATE makes a new one.';

-- Written in apply transactions only, so as of the checkpoint. It is no column of published_table: an ALTER TABLE whose
-- transaction stays open has a lock on that row.
CREATE TABLE koldstore.applied_shape (
    table_oid oid   PRIMARY KEY,
    shape     jsonb NOT NULL
);
COMMENT ON TABLE koldstore.applied_shape IS
    'The columns of each captured table at the place in the write-ahead log that has been applied, as in published_table.shape.';

-- The manifest. Only rows that are active may be read; in_progress rows name objects that may or may not exist; detached ones are of tables no longer managed.
CREATE TABLE koldstore.segment (
    segment_id   uuid        PRIMARY KEY,
    table_oid    oid         NOT NULL,
    storage      text        NOT NULL REFERENCES koldstore.storage (name),
    object_key   text        NOT NULL UNIQUE,
    state        text        NOT NULL DEFAULT 'in_progress' CHECK (state IN ('in_progress', 'active', 'deleted', 'detached')),
    job_id       uuid,
    min_seq      bigint,
    max_seq      bigint,
    row_count    bigint      NOT NULL DEFAULT 0,
    dead_count   bigint      NOT NULL DEFAULT 0,
    tombstones   bigint      NOT NULL DEFAULT 0,
    size_bytes   bigint      NOT NULL DEFAULT 0,
    sha256       bytea,
    key_hashes   bytea,
    dead         bytea,
    dead_version bigint      NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    ended_at     timestamptz,
    layout       text,
    CHECK (state = 'in_progress' OR (min_seq <= max_seq AND sha256 IS NOT NULL))
);
COMMENT ON COLUMN koldstore.segment.key_hashes IS 'One 64-bit hash of the primary key for each row, in row order, big endian.';
COMMENT ON COLUMN koldstore.segment.dead IS 'Ordinals of rows that newer segments supersede, with the generations that did it (docs/format.md); NULL while there are none.';
COMMENT ON COLUMN koldstore.segment.layout IS 'Names the columns and key of the file. Only files of one layout are merged.';
-- No two active segments of a table overlap in seq.
CREATE INDEX segment_by_seq ON koldstore.segment (table_oid, max_seq) WHERE state = 'active';
CREATE INDEX segment_by_state ON koldstore.segment (state) WHERE state <> 'active';

CREATE TABLE koldstore.stream (
    stream_id    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schema_name  name        NOT NULL,
    name         name        NOT NULL,
    table_oid    oid         NOT NULL,
    log_oid      oid         NOT NULL UNIQUE,
    predicate    text        NOT NULL,
    predicate_fn oid         NOT NULL,
    pre_image    boolean     NOT NULL,
    retention    interval,
    start_at     text        NOT NULL CHECK (start_at IN ('now', 'earliest')),
    seed_max_seq bigint      NOT NULL DEFAULT 0,
    seed_job     uuid,
    seed_key     text[],
    state        text        NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'seeding', 'active', 'broken')),
    reason       text,
    floor        text,
    gaps         integer     NOT NULL DEFAULT 0,
    gap          jsonb,
    created_by   name        NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT pg_catalog.now(),
    began        text COLLATE "C",
    UNIQUE (schema_name, name)
);
COMMENT ON COLUMN koldstore.stream.seed_max_seq IS 'The last seq that the backfill of start = earliest used; live events get higher ones.';
COMMENT ON COLUMN koldstore.stream.seed_job IS 'The job of a backfill that goes on beside writers; NULL if there was none, or it was done while writers waited.';
COMMENT ON COLUMN koldstore.stream.seed_key IS 'Where that backfill goes on: the values of the last primary key as text; NULL before the first page.';
COMMENT ON COLUMN koldstore.stream.gap IS
    'The newest hole in the log: {"after": the last event before it, "reason", "noticed_at", "from_lsn", "to_lsn"}; NULL if there is none.';
COMMENT ON COLUMN koldstore.stream.floor IS 'Monotonic: the highest event id that the retention sweep has removed.';
COMMENT ON COLUMN koldstore.stream.began IS 'A position in front of the first event. Whatever happened before it is not in the log, whether or not it would have matched.';
CREATE INDEX stream_by_table ON koldstore.stream (table_oid);

-- Keys of which a stream has told something while its backfill was under way: what the backfill has read of them is outdated.
CREATE TABLE koldstore.seed_touched (
    stream_id bigint NOT NULL,
    hash      bigint NOT NULL,
    k         jsonb  NOT NULL
);
CREATE INDEX seed_touched_by_hash ON koldstore.seed_touched (stream_id, hash);

-- Numbers that change with every batch, apart from the definition so that it stays small and quiet.
CREATE TABLE koldstore.stream_status (
    stream_id    bigint PRIMARY KEY REFERENCES koldstore.stream ON DELETE CASCADE,
    tail_id      text COLLATE "C",
    events       bigint NOT NULL DEFAULT 0,
    events_lost  bigint NOT NULL DEFAULT 0,
    truncated_id text COLLATE "C"
) WITH (fillfactor = 50);
COMMENT ON COLUMN koldstore.stream_status.tail_id IS 'The last event that was handed to live push.';
-- A TRUNCATE of a stream's table tells of the keys that are live in the log, for which only what is behind this has to be read.
COMMENT ON COLUMN koldstore.stream_status.truncated_id IS 'The last id of the newest TRUNCATE: no key is live by an event up to it.';

CREATE TABLE koldstore.quarantine (
    quarantine_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    table_oid     oid         NOT NULL,
    stream_id     bigint,
    seq           bigint      NOT NULL,
    op            smallint    NOT NULL,
    commit_lsn    pg_lsn      NOT NULL,
    sqlstate      text        NOT NULL,
    message       text        NOT NULL,
    row_text      text
);
COMMENT ON TABLE koldstore.quarantine IS
    'Row changes that could not become an event (stream_id set) or a mirror row (stream_id NULL), with the error. row_text is the row as a literal of the table''s row type.';

---- create above / drop below ----

DROP PUBLICATION koldproxy;
DROP TABLE koldstore.quarantine, koldstore.stream_status, koldstore.seed_touched, koldstore.stream, koldstore.segment, koldstore.applied_shape,
    koldstore.partition, koldstore.published_table, koldstore.job, koldstore.managed_table, koldstore.storage, koldstore.wal_marker,
    koldstore.command_log, koldstore.gap, koldstore.checkpoint;
