// What an application does through the Node package `postgres`, which pipelines. Usage and output as of psycopg2_driver.py.
'use strict';

const postgres = require('postgres');

const PAGE = 7;
const show = (name, ...values) => console.log(name, values.map((v) => (v === null ? 'NULL' : v)).join('|'));

const json = { to: 3802, from: [3802], parse: (text) => text, serialize: (text) => text }; // as the server wrote it
const connect = (dsn, more) => postgres(dsn, { max: 1, types: { json }, onnotice: () => {}, ...more });

async function sqlstate(promise) {
  try {
    await promise;
  } catch (error) {
    return error.code;
  }
  return 'none';
}

async function plain(dsn) {
  const notices = [];
  const sql = connect(dsn, { onnotice: (notice) => notices.push(notice.message) });
  show('bound', ...(await sql`SELECT ${41}::int + 1, ${'größe'}::text, ${'1.50'}::numeric, NULL::text`.values())[0]);
  const doubled = [];
  for (const i of [1, 2, 3]) doubled.push((await sql`SELECT ${i}::int * 2`.values())[0][0]);
  show('prepared', ...doubled);
  show('bytes', (await sql`SELECT ${Buffer.from('00ff5c27', 'hex')}::bytea AS b`)[0].b.toString('hex'));
  show('error', await sqlstate(sql`SELECT 1 / 0`));
  show('syntax', await sqlstate(sql`SELEC 1`));
  const states = [];
  await sql.begin(async (sql) => {
    await sql`CREATE TEMP TABLE t (id int PRIMARY KEY, v text)`;
    await sql`INSERT INTO t VALUES (1, 'a')`;
    await sqlstate(
      sql.savepoint(async (sql) => {
        states.push(await sqlstate(sql`INSERT INTO t VALUES (1, 'b')`), await sqlstate(sql`SELECT 1`));
        throw new Error('back to the savepoint');
      }),
    );
    await sql`INSERT INTO t VALUES (2, ${'b'})`;
  });
  show('savepoint', ...states, (await sql`SELECT count(*) FROM t`)[0].count);
  await sqlstate(
    sql.begin(async (sql) => {
      await sql`DELETE FROM t`;
      throw new Error('back to the beginning');
    }),
  );
  show('rollback', (await sql`SELECT count(*) FROM t`)[0].count);
  const into = await sql`COPY t FROM STDIN`.writable();
  await new Promise((resolve, reject) => into.on('error', reject).on('finish', resolve).end('3\tc\n4\t\\N\n'));
  let copied = '';
  for await (const chunk of await sql`COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)`.readable()) copied += chunk;
  show('copy', ...copied.trim().split('\n'));
  let n = 0;
  let sum = 0;
  for await (const rows of sql`SELECT i FROM generate_series(1, ${20000}::int) i`.cursor(1000)) {
    n += rows.length;
    for (const { i } of rows) sum += i;
  }
  show('large', n, sum);
  await new Promise((resolve) => {
    // Other programs use the channel at the same time: only the first one counts.
    let heard = false;
    const hear = (payload) => {
      if (heard) return;
      heard = true;
      resolve(show('notify', 'news', payload));
    };
    sql.listen('news', hear, () => sql.notify('news', 'payload'));
  });
  notices.length = 0;
  await sql`DO $$ BEGIN RAISE NOTICE 'hello'; END $$`.simple();
  show('notice', ...notices);
  const sleep = sql`SELECT pg_sleep(60)`.execute();
  setTimeout(() => sleep.cancel(), 300);
  show('cancel', await sqlstate(sleep));
  show('after cancel', (await sql`SELECT 1 AS one`)[0].one);
  await sql.end();
}

async function drain(query, table) {
  const rows = [];
  for (let cursor = '0'; ; cursor = rows[rows.length - 1][0]) {
    const page = await query(table, cursor);
    rows.push(...page.map((r) => [r.seq, r.op, r.pk, r.deleted, r.row_image, r.source]));
    if (page.length < PAGE) return rows;
  }
}

const feedOf = (sql) => (table, cursor) =>
  sql`SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(${table}::text::regclass, since_seq => ${cursor}, limit_rows => ${PAGE})`;

async function feed(dsn, table, stream) {
  const sql = connect(dsn);
  const unprepared = connect(dsn, { prepare: false });
  const out = { prepared: await drain(feedOf(sql), table), 'prepared again': await drain(feedOf(sql), table) };
  out['without a name'] = await drain(feedOf(unprepared), table);
  await sql.begin(async (sql) => {
    out.transaction = await drain(feedOf(sql), table);
    await sql.savepoint(async (sql) => (out.savepoint = await drain(feedOf(sql), table)));
    out.cursor = await drain(async (table, cursor) => {
      const rows = [];
      for await (const some of feedOf(sql)(table, cursor).cursor(2)) rows.push(...some);
      return rows;
    }, table);
  });

  const name = stream + '_porsager';
  const bare = table.split('.').pop();
  for (const statement of [
    `CREATE STREAM ${name} ON ${bare} WHEN (id % 2 = 0) WITH (start = 'earliest')`,
    `CREATE STREAM IF NOT EXISTS ${name} ON ${bare} WHEN (id > 0)`,
  ]) {
    await sql.unsafe(statement);
  }
  const shown = await sql`SHOW STREAMS`;
  out.columns = shown.columns.map((c) => c.name);
  out.shown = shown.filter((r) => r.name === name).map((r) => r.predicate);
  const log = sql('_stream_' + name);
  const [{ id: first }] = await sql`SELECT id FROM ${log} ORDER BY id LIMIT ${1}`;
  out.events = Number((await sql`SELECT count(*) FROM ${log}`)[0].count);
  out.after = (await sql`SELECT id, k FROM ${log} ORDER BY id LIMIT ${1000} AFTER (${first})`).length;
  await sqlstate(
    sql.begin(async (sql) => {
      await sql.unsafe(`DROP STREAM ${name}`);
      throw new Error('take it back');
    }),
  );
  await sql.unsafe(`DROP STREAM ${name}`);
  out.refused = await sqlstate(feedOf(sql)(table, '-1'));
  await sql.end();
  await unprepared.end();
  process.stdout.write(JSON.stringify(out));
}

const [mode, ...rest] = process.argv.slice(2);
({ plain, feed })[mode](...rest).catch((error) => {
  console.error(error);
  process.exit(1);
});
