"""What an application does with streams and feeds, through psycopg 3.

Usage: feed.py DSN TABLE STREAM. Prints one JSON object: for each way of asking the whole feed of TABLE, read in pages, and
what the stream's log and SHOW STREAMS say. Anything unexpected ends it with a traceback.
"""

import json
import sys

import psycopg
from psycopg.types.json import set_json_loads

set_json_loads(lambda text: text if isinstance(text, str) else bytes(text).decode())  # as the server wrote it

PAGE = 7
FEED = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(%s, since_seq => %s, limit_rows => %s)"


def drain(execute, table):
    rows, cursor = [], 0
    while True:
        page = execute(FEED, (table, cursor, PAGE)).fetchall()
        rows += page
        if len(page) < PAGE:
            return [[str(seq), op, pk, deleted, image, source] for seq, op, pk, deleted, image, source in rows]
        cursor = page[-1][0]


def main(dsn, table, stream):
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


main(*sys.argv[1:])
