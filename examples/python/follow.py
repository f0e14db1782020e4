"""Follows a stream for ever: reads the log through koldproxy and lets NOTIFY wake it. Needs psycopg 3.

    DATABASE_URL=postgres://... follow.py STREAM LOG POSITION_FILE

The order matters: it listens first and reads the log then, so that nothing falls between the two. A notification says only that
there is something to read; one that is lost is made good by looking every few seconds.
"""

import os
import select
import sys

import psycopg
from psycopg import sql


def main(stream, log, file):
    position = ""
    if os.path.exists(file):
        with open(file) as f:
            position = f.read()
    page = sql.SQL("SELECT id, op, k::text, doc::text FROM {} ORDER BY id LIMIT 500 AFTER (%s)").format(sql.Identifier(*log.split(".")))
    woken = []
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        conn.add_notify_handler(woken.append)
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier("koldstore_stream_" + stream)))
        while True:
            woken.clear()
            events = conn.execute(page, [position]).fetchall()
            if events:
                for event in events:
                    print(*event)
                sys.stdout.flush()
                position = events[-1][0]
                with open(file + ".new", "w") as f:
                    f.write(position)
                os.replace(file + ".new", file)  # a crash leaves the old position or the new one
            elif not woken:  # one may have come along with the empty page
                select.select([conn.fileno()], [], [], 5)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except psycopg.Error as e:
        sys.exit(f"{e} (SQLSTATE {e.sqlstate})")
