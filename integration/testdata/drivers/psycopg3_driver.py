"""What an application does through psycopg 3. Usage and output as of psycopg2_driver.py."""

import json
import sys
import threading

import psycopg
from psycopg.types.json import set_json_loads

set_json_loads(lambda text: text if isinstance(text, str) else bytes(text).decode())  # as the server wrote it

PAGE = 7
FEED = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(%s, since_seq => %s, limit_rows => %s)"


def show(name, *values):
    print(name, "|".join("NULL" if v is None else str(v) for v in values))


def sqlstate(conn, sql):
    try:
        conn.execute(sql)
    except psycopg.Error as error:
        return error.sqlstate
    return "none"


def plain(dsn):
    conn = psycopg.connect(dsn, autocommit=True)
    show("bound", *conn.execute("SELECT %s::int + 1, %s::text, %s::numeric, NULL::text", (41, "größe", "1.50")).fetchone())
    show("prepared", *[conn.execute("SELECT %s::int * 2", (i,), prepare=True).fetchone()[0] for i in (1, 2, 3)])
    show("bytes", conn.execute("SELECT %b::bytea", (b"\x00\xff\x5c\x27",), binary=True).fetchone()[0].hex())
    show("error", sqlstate(conn, "SELECT 1 / 0"))
    show("syntax", sqlstate(conn, "SELEC 1"))
    states = []
    with conn.transaction():
        conn.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO t VALUES (1, 'a')")
        with conn.transaction() as inner:  # a savepoint
            states += [sqlstate(conn, "INSERT INTO t VALUES (1, 'b')"), sqlstate(conn, "SELECT 1")]
            raise psycopg.Rollback(inner)
        conn.execute("INSERT INTO t VALUES (2, %s)", ("b",))
    show("savepoint", *states, conn.execute("SELECT count(*) FROM t").fetchone()[0])
    with conn.transaction(force_rollback=True):
        conn.execute("DELETE FROM t")
    show("rollback", conn.execute("SELECT count(*) FROM t").fetchone()[0])
    cur = conn.cursor()
    with cur.copy("COPY t FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["int4", "text"])
        copy.write_row((3, "c"))
        copy.write_row((4, None))
    with cur.copy("COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)") as copy:
        show("copy", *b"".join(copy).decode().split())
    with conn.transaction(), conn.cursor("large") as large:  # a cursor of the server
        large.itersize = 1000
        large.execute("SELECT i FROM generate_series(1, %s) i", (20000,))
        numbers = [row[0] for row in large]
    show("large", len(numbers), sum(numbers))
    streamed = [row[0] for row in cur.stream("SELECT i FROM generate_series(1, %s) i", (20000,))]
    show("streamed", len(streamed), sum(streamed))
    heard = []
    conn.add_notify_handler(lambda notify: heard.append(notify))
    conn.execute("LISTEN news")
    conn.execute("NOTIFY news, 'payload'")
    show("notify", heard[0].channel, heard[0].payload)
    notices = []
    conn.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    conn.execute("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
    show("notice", *notices)
    stop = threading.Timer(0.3, conn.cancel)
    stop.start()
    show("cancel", sqlstate(conn, "SELECT pg_sleep(60)"))
    stop.join()
    show("after cancel", conn.execute("SELECT 1").fetchone()[0])
    conn.close()


def drain(execute, table):
    rows, cursor = [], 0
    while True:
        page = execute(FEED, (table, cursor, PAGE)).fetchall()
        rows += page
        if len(page) < PAGE:
            return [[str(seq), op, pk, deleted, image, source] for seq, op, pk, deleted, image, source in rows]
        cursor = page[-1][0]


def feed(dsn, table, stream):
    out = {}
    with psycopg.connect(dsn, autocommit=True) as conn:
        out["autocommit"] = drain(lambda q, p: conn.execute(q, p, prepare=False), table)
        out["prepared"] = drain(lambda q, p: conn.execute(q, p, prepare=True), table)
        out["prepared again"] = drain(lambda q, p: conn.execute(q, p, prepare=True), table)
        with conn.transaction():
            out["transaction"] = drain(conn.execute, table)
            with conn.transaction():  # a savepoint
                out["savepoint"] = drain(lambda q, p: conn.execute(q, p, prepare=True), table)
        with conn.cursor(binary=True) as cur:
            out["binary"] = drain(lambda q, p: cur.execute(q, p), table)
        with psycopg.ClientCursor(conn) as cur:
            out["interpolated by the client"] = drain(lambda q, p: cur.execute(q, p), table)
        with conn.pipeline(), conn.transaction():  # outside of a block a pipeline is one transaction without savepoints
            out["pipeline"] = drain(conn.execute, table)

        out["tags"] = []
        name = stream + "_py"
        bare = table.split(".")[-1]
        for statement in (
            f"CREATE STREAM {name} ON {bare} WHEN (id % 2 = 0) WITH (start = 'earliest')",
            f"CREATE STREAM IF NOT EXISTS {name} ON {bare} WHEN (id > 0)",
        ):
            out["tags"].append(conn.execute(statement).statusmessage)
        cur = conn.execute("SHOW STREAMS")
        out["columns"] = [column.name for column in cur.description]
        out["shown"] = [row[2] for row in cur.fetchall() if row[0] == name]
        out["tags"].append(cur.statusmessage)
        first = conn.execute(f"SELECT id FROM _stream_{name} ORDER BY id LIMIT %s", (1,)).fetchone()[0]
        out["events"] = conn.execute(f"SELECT count(*) FROM _stream_{name}").fetchone()[0]
        out["after"] = len(conn.execute(f"SELECT id, k FROM _stream_{name} ORDER BY id LIMIT %s AFTER (%s)", (1000, first), prepare=True).fetchall())
        with conn.transaction() as taken_back:
            conn.execute(f"DROP STREAM {name}")
            raise psycopg.Rollback(taken_back)
        out["tags"].append(conn.execute(f"DROP STREAM {name}").statusmessage)
        try:
            conn.execute(FEED, (table, -1, PAGE))
        except psycopg.errors.InvalidParameterValue as error:
            out["refused"] = error.sqlstate
    json.dump(out, sys.stdout)


{"plain": plain, "feed": feed}[sys.argv[1]](*sys.argv[2:])
