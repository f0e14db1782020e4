"""Reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every event and
remembers the position in a file. Needs psycopg 3.

    DATABASE_URL=postgres://... consumer.py stream|feed TABLE POSITION_FILE
"""

import os
import sys

import psycopg
from psycopg import sql


def stream_page(conn, log, after):
    """The events behind an id; the id comes first in each."""
    query = sql.SQL("SELECT id, op, k::text, doc::text FROM {} ORDER BY id LIMIT 500").format(sql.Identifier(*log.split(".")))
    if not after:
        return conn.execute(query).fetchall()
    return conn.execute(query + sql.SQL(" AFTER (%s)"), [after]).fetchall()


def feed_page(conn, table, since):
    """The changes behind a seq; the seq comes first in each. The row of a deletion is null."""
    query = """SELECT seq, op, pk::text, coalesce(row_image::text, 'null'), source
               FROM koldstore.changes_since(%s, since_seq => %s)"""
    return conn.execute(query, [table, int(since or 0)]).fetchall()


def main(kind, table, file):
    position = ""
    if os.path.exists(file):
        with open(file) as f:
            position = f.read()
    read = stream_page if kind == "stream" else feed_page
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        while events := read(conn, table, position):
            for event in events:
                print(*event)
            sys.stdout.flush()
            position = str(events[-1][0])
            with open(file + ".new", "w") as f:
                f.write(position)
            os.replace(file + ".new", file)  # a crash leaves the old position or the new one


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("stream", "feed"):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except psycopg.Error as e:
        sys.exit(f"{e} (SQLSTATE {e.sqlstate})")
