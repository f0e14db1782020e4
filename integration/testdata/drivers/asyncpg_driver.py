"""What an application does through asyncpg, which always speaks the binary format. Usage as for psycopg2_driver.py."""

import asyncio
import io
import json
import os
import sys

import asyncpg

PAGE = 7
FEED = "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1::text::regclass, since_seq => $2, limit_rows => $3)"


def show(name, *values):
    print(name, "|".join("NULL" if v is None else str(v) for v in values))


async def sqlstate(call):
    try:
        await call
    except asyncpg.PostgresError as error:
        return error.sqlstate
    return "none"


async def connect():
    settings = dict(option[2:].split("=", 1) for option in os.environ.get("PGOPTIONS", "").split())
    return await asyncpg.connect(server_settings=settings)  # the rest is in the environment


async def plain(_dsn):
    conn = await connect()
    show("bound", *await conn.fetchrow("SELECT $1::int + 1, $2::text, $3::text::numeric, NULL::text", 41, "größe", "1.50"))
    twice = await conn.prepare("SELECT $1::int * 2")
    show("prepared", *[await twice.fetchval(i) for i in (1, 2, 3)])
    show("bytes", (await conn.fetchval("SELECT $1::bytea", b"\x00\xff\x5c\x27")).hex())
    show("error", await sqlstate(conn.fetch("SELECT 1 / 0")))
    show("syntax", await sqlstate(conn.fetch("SELEC 1")))
    async with conn.transaction():
        await conn.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, v text)")
        await conn.execute("INSERT INTO t VALUES (1, 'a')")
        inner = conn.transaction()  # a savepoint
        await inner.start()
        states = [await sqlstate(conn.execute("INSERT INTO t VALUES (1, 'b')")), await sqlstate(conn.fetch("SELECT 1"))]
        await inner.rollback()
        await conn.execute("INSERT INTO t VALUES (2, $1)", "b")
    show("savepoint", *states, await conn.fetchval("SELECT count(*) FROM t"))
    outer = conn.transaction()
    await outer.start()
    await conn.execute("DELETE FROM t")
    await outer.rollback()
    show("rollback", await conn.fetchval("SELECT count(*) FROM t"))
    await conn.copy_records_to_table("t", records=[(3, "c"), (4, None)])  # in binary
    out = io.BytesIO()
    await conn.copy_from_query("SELECT * FROM t ORDER BY id", output=out, format="csv")
    show("copy", *out.getvalue().decode().split())
    async with conn.transaction():
        numbers = [row[0] async for row in conn.cursor("SELECT i FROM generate_series(1, $1::int) i", 20000, prefetch=1000)]
    show("large", len(numbers), sum(numbers))
    heard = asyncio.get_running_loop().create_future()
    await conn.add_listener("news", lambda _conn, _pid, channel, payload: heard.set_result((channel, payload)))
    await conn.execute("NOTIFY news, 'payload'")
    show("notify", *await asyncio.wait_for(heard, 60))
    notices = []
    conn.add_log_listener(lambda _conn, message: notices.append(message.message))
    await conn.execute("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
    await asyncio.sleep(0)
    show("notice", *notices)
    try:
        await conn.fetch("SELECT pg_sleep(60)", timeout=0.3)  # is a CancelRequest on a connection of its own
    except asyncio.TimeoutError:
        show("cancel", "57014")
    show("after cancel", await conn.fetchval("SELECT 1"))
    await conn.close()


async def drain(fetch, table):
    rows, cursor = [], 0
    while True:
        page = await fetch(FEED, table, cursor, PAGE)
        rows += [[str(r[0]), *list(r)[1:]] for r in page]
        if len(page) < PAGE:
            return rows
        cursor = page[-1][0]


async def feed(_dsn, table, stream):
    conn = await connect()
    out = {"autocommit": await drain(conn.fetch, table), "prepared again": await drain(conn.fetch, table)}
    statement = await conn.prepare(FEED)
    out["explicitly prepared"] = await drain(lambda _sql, *args: statement.fetch(*args), table)
    async with conn.transaction():
        out["transaction"] = await drain(conn.fetch, table)
        async with conn.transaction():  # a savepoint
            out["savepoint"] = await drain(conn.fetch, table)

        async def through_cursor(sql, *args):
            return [row async for row in conn.cursor(sql, *args, prefetch=2)]

        out["cursor"] = await drain(through_cursor, table)

    name, bare = stream + "_asyncpg", table.split(".")[-1]
    out["tags"] = [
        await conn.execute(f"CREATE STREAM {name} ON {bare} WHEN (id % 2 = 0) WITH (start = 'earliest')"),
        await conn.execute(f"CREATE STREAM IF NOT EXISTS {name} ON {bare} WHEN (id > 0)"),
    ]
    show_streams = await conn.prepare("SHOW STREAMS")
    out["columns"] = [attribute.name for attribute in show_streams.get_attributes()]
    out["shown"] = [row[2] for row in await show_streams.fetch() if row[0] == name]
    out["tags"].append(show_streams.get_statusmsg())
    first = await conn.fetchval(f"SELECT id FROM _stream_{name} ORDER BY id LIMIT $1", 1)
    out["events"] = await conn.fetchval(f"SELECT count(*) FROM _stream_{name}")
    out["after"] = len(await conn.fetch(f"SELECT id, k FROM _stream_{name} ORDER BY id LIMIT $1 AFTER ($2)", 1000, first))
    taken_back = conn.transaction()
    await taken_back.start()
    await conn.execute(f"DROP STREAM {name}")
    await taken_back.rollback()
    out["tags"].append(await conn.execute(f"DROP STREAM {name}"))
    out["refused"] = await sqlstate(conn.fetch(FEED, table, -1, PAGE))
    await conn.close()
    json.dump(out, sys.stdout)


asyncio.run({"plain": plain, "feed": feed}[sys.argv[1]](*sys.argv[2:]))
