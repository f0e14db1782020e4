"""What an application does through psycopg 2. Usage: psycopg2_driver.py plain DSN | psycopg2_driver.py feed DSN TABLE STREAM.

plain prints what every driver prints (see drivers_test.go), feed one JSON object with the feed of TABLE for each way of
reading it and what the log of STREAM says.
"""

import io
import json
import sys
import threading

import psycopg2
import psycopg2.extensions
import psycopg2.extras

PAGE = 7
FEED = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(%s, since_seq => %s, limit_rows => %s)"


def show(name, *values):
    print(name, "|".join("NULL" if v is None else str(v) for v in values))


def sqlstate(cur, sql, *params):
    try:
        cur.execute(sql, params or None)
    except psycopg2.Error as error:
        return error.pgcode
    return "none"


def plain(dsn):
    conn = psycopg2.connect(dsn)
    conn.autocommit = True
    cur = conn.cursor()
    cur.execute("SELECT %s::int + 1, %s::text, %s::numeric, NULL::text", (41, "größe", "1.50"))
    show("bound", *cur.fetchone())
    cur.execute("PREPARE twice(int) AS SELECT $1 * 2")
    doubled = []
    for i in (1, 2, 3):
        cur.execute("EXECUTE twice(%s)", (i,))
        doubled.append(cur.fetchone()[0])
    show("prepared", *doubled)
    cur.execute("SELECT %s::bytea", (psycopg2.Binary(b"\x00\xff\x5c\x27"),))
    show("bytes", bytes(cur.fetchone()[0]).hex())
    show("error", sqlstate(cur, "SELECT 1 / 0"))
    show("syntax", sqlstate(cur, "SELEC 1"))
    conn.autocommit = False
    cur.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, v text)")
    cur.execute("INSERT INTO t VALUES (1, 'a')")
    cur.execute("SAVEPOINT a")
    states = [sqlstate(cur, "INSERT INTO t VALUES (1, 'b')"), sqlstate(cur, "SELECT 1")]
    cur.execute("ROLLBACK TO a")
    cur.execute("INSERT INTO t VALUES (2, %s)", ("b",))
    conn.commit()
    cur.execute("SELECT count(*) FROM t")
    show("savepoint", *states, cur.fetchone()[0])
    cur.execute("DELETE FROM t")
    conn.rollback()
    cur.execute("SELECT count(*) FROM t")
    show("rollback", cur.fetchone()[0])
    cur.copy_expert("COPY t FROM STDIN", io.StringIO("3\tc\n4\t\\N\n"))
    conn.commit()
    out = io.StringIO()
    cur.copy_expert("COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)", out)
    show("copy", *out.getvalue().split())
    conn.rollback()
    with conn.cursor("large") as large:  # a cursor of the server
        large.itersize = 1000
        large.execute("SELECT i FROM generate_series(1, %s) i", (20000,))
        numbers = [row[0] for row in large]
    show("large", len(numbers), sum(numbers))
    conn.rollback()
    conn.autocommit = True
    cur.execute("LISTEN news; NOTIFY news, 'payload'")
    conn.poll()
    show("notify", conn.notifies[0].channel, conn.notifies[0].payload)
    conn.notices.clear()
    cur.execute("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
    show("notice", conn.notices[0].split()[1])
    stop = threading.Timer(0.3, conn.cancel)
    stop.start()
    show("cancel", sqlstate(cur, "SELECT pg_sleep(60)"))
    stop.join()
    cur.execute("SELECT 1")
    show("after cancel", cur.fetchone()[0])
    conn.close()


def drain(cur, table):
    rows, cursor = [], 0
    while True:
        cur.execute(FEED, (table, cursor, PAGE))
        page = cur.fetchall()
        rows += page
        if len(page) < PAGE:
            return [[str(seq), op, pk, deleted, image, source] for seq, op, pk, deleted, image, source in rows]
        cursor = page[-1][0]


def feed(dsn, table, stream):
    psycopg2.extras.register_default_jsonb(globally=True, loads=lambda text: text)  # as the server wrote it
    conn = psycopg2.connect(dsn)
    conn.autocommit = True
    cur = conn.cursor()
    out = {"autocommit": drain(cur, table)}
    conn.autocommit = False
    out["transaction"] = drain(cur, table)
    cur.execute("SAVEPOINT a")
    out["savepoint"] = drain(cur, table)
    conn.commit()
    conn.autocommit = True

    name, bare = stream + "_psycopg2", table.split(".")[-1]
    out["tags"] = []
    for statement in (
        f"CREATE STREAM {name} ON {bare} WHEN (id % 2 = 0) WITH (start = 'earliest')",
        f"CREATE STREAM IF NOT EXISTS {name} ON {bare} WHEN (id > 0)",
        "SHOW STREAMS",
    ):
        cur.execute(statement)
        out["tags"].append(cur.statusmessage)
    out["columns"] = [column.name for column in cur.description]
    out["shown"] = [row[2] for row in cur.fetchall() if row[0] == name]
    cur.execute(f"SELECT id FROM _stream_{name} ORDER BY id LIMIT %s", (1,))
    first = cur.fetchone()[0]
    cur.execute(f"SELECT count(*) FROM _stream_{name}")
    out["events"] = cur.fetchone()[0]
    cur.execute(f"SELECT id, k FROM _stream_{name} ORDER BY id LIMIT %s AFTER (%s)", (1000, first))
    out["after"] = len(cur.fetchall())
    conn.autocommit = False
    cur.execute(f"DROP STREAM {name}")
    conn.rollback()
    conn.autocommit = True
    cur.execute(f"DROP STREAM {name}")
    out["tags"].append(cur.statusmessage)
    out["refused"] = sqlstate(cur, FEED, table, -1, PAGE)
    conn.close()
    json.dump(out, sys.stdout)


{"plain": plain, "feed": feed}[sys.argv[1]](*sys.argv[2:])
