// What an application does through node-postgres, its cursors and its streams. Usage and output as of psycopg2_driver.py.
'use strict';

const { Client, types } = require('pg');
const Cursor = require('pg-cursor');
const QueryStream = require('pg-query-stream');

types.setTypeParser(types.builtins.JSONB, (text) => text); // as the server wrote it

const PAGE = 7;
const FEED =
  'SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1, since_seq => $2, limit_rows => $3)';

async function drain(query, table) {
  const rows = [];
  for (let cursor = '0'; ; cursor = rows[rows.length - 1][0]) {
    const page = await query(FEED, [table, cursor, PAGE]);
    rows.push(...page.rows.map((r) => [r.seq, r.op, r.pk, r.deleted, r.row_image, r.source]));
    if (page.rows.length < PAGE) return rows;
  }
}

const show = (name, ...values) => console.log(name, values.map((v) => (v === null ? 'NULL' : v)).join('|'));

async function sqlstate(promise) {
  try {
    await promise;
  } catch (error) {
    return error.code;
  }
  return 'none';
}

async function plain(dsn) {
  const client = new Client({ connectionString: dsn });
  await client.connect();
  const values = async (text, ...values) => Object.values((await client.query({ text, values, rowMode: 'array' })).rows[0]);
  show('bound', ...(await values('SELECT $1::int + 1, $2::text, $3::numeric, NULL::text', 41, 'größe', '1.50')));
  const doubled = [];
  for (const i of [1, 2, 3]) {
    doubled.push((await client.query({ name: 'twice', text: 'SELECT $1::int * 2 AS n', values: [i] })).rows[0].n);
  }
  show('prepared', ...doubled);
  show('bytes', (await values('SELECT $1::bytea', Buffer.from('00ff5c27', 'hex')))[0].toString('hex'));
  show('error', await sqlstate(client.query('SELECT 1 / 0')));
  show('syntax', await sqlstate(client.query('SELEC 1')));
  await client.query("BEGIN; CREATE TEMP TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); SAVEPOINT a");
  const states = [await sqlstate(client.query("INSERT INTO t VALUES (1, 'b')")), await sqlstate(client.query('SELECT 1'))];
  await client.query('ROLLBACK TO a');
  await client.query('INSERT INTO t VALUES (2, $1)', ['b']);
  await client.query('COMMIT');
  show('savepoint', ...states, ...(await values('SELECT count(*) FROM t')));
  await client.query('BEGIN; DELETE FROM t; ROLLBACK');
  show('rollback', ...(await values('SELECT count(*) FROM t')));
  let [n, sum] = [0, 0];
  const cursor = client.query(new Cursor('SELECT i FROM generate_series(1, $1::int) i', [20000]));
  for (let rows; (rows = await cursor.read(1000)).length > 0; n += rows.length) for (const { i } of rows) sum += i;
  await cursor.close();
  show('large', n, sum);
  [n, sum] = [0, 0];
  for await (const { i } of client.query(new QueryStream('SELECT i FROM generate_series(1, $1::int) i', [20000], { batchSize: 500 }))) {
    n++;
    sum += i;
  }
  show('streamed', n, sum);
  const heard = new Promise((resolve) => client.once('notification', resolve));
  await client.query("LISTEN news; NOTIFY news, 'payload'");
  const { channel, payload } = await heard;
  show('notify', channel, payload);
  const noticed = new Promise((resolve) => client.once('notice', resolve));
  await client.query("DO $$ BEGIN RAISE NOTICE 'hello'; END $$");
  show('notice', (await noticed).message);
  const killer = new Client({ connectionString: dsn });
  const sleep = client.query('SELECT pg_sleep(60)');
  setTimeout(() => killer.cancel(client, client._activeQuery ?? client.activeQuery), 300);
  show('cancel', await sqlstate(sleep));
  show('after cancel', ...(await values('SELECT 1')));
  await client.end();
}

async function feed(dsn, table, stream) {
  const client = new Client({ connectionString: dsn });
  await client.connect();
  const out = {};
  const unnamed = (text, values) => client.query(text, values);
  const named = (text, values) => client.query({ name: 'feed', text, values });

  out.autocommit = await drain(unnamed, table);
  out.prepared = await drain(named, table);
  out['prepared again'] = await drain(named, table);
  await client.query('BEGIN');
  out.transaction = await drain(unnamed, table);
  await client.query('SAVEPOINT s');
  out.savepoint = await drain(named, table);
  await client.query('COMMIT');
  const literal = (text, values) =>
    client.query(text.replace(/\$(\d)/g, (_, n) => client.escapeLiteral(String(values[n - 1]))));
  out['simple protocol'] = await drain(literal, table);
  const queued = await Promise.all([1, 2, 3].map(() => client.query(FEED, [table, 0, 1000])));
  out.queued = queued[2].rows.map((r) => [r.seq, r.op, r.pk, r.deleted, r.row_image, r.source]);

  const throughCursor = async (text, values) => {
    const cursor = client.query(new Cursor(text, values));
    const rows = [];
    for (let some; (some = await cursor.read(2)).length > 0; ) rows.push(...some);
    await cursor.close();
    return { rows };
  };
  out.cursor = await drain(throughCursor, table);
  out.stream = await drain(async (text, values) => {
    const rows = [];
    for await (const row of client.query(new QueryStream(text, values, { batchSize: 3 }))) rows.push(row);
    return { rows };
  }, table);

  out.tags = [];
  const name = stream + '_js';
  const bare = table.split('.').pop();
  for (const statement of [
    `CREATE STREAM ${name} ON ${bare} WHEN (id % 2 = 0) WITH (start = 'earliest')`,
    `CREATE STREAM IF NOT EXISTS ${name} ON ${bare} WHEN (id > 0)`,
  ]) {
    out.tags.push((await client.query(statement)).command + ' STREAM');
  }
  const shown = await client.query('SHOW STREAMS');
  out.columns = shown.fields.map((f) => f.name);
  out.shown = shown.rows.filter((r) => r.name === name).map((r) => r.predicate);
  out.tags.push(shown.command);
  const first = (await client.query(`SELECT id FROM _stream_${name} ORDER BY id LIMIT $1`, [1])).rows[0].id;
  out.events = Number((await client.query(`SELECT count(*) FROM _stream_${name}`)).rows[0].count);
  out.after = (
    await client.query({ name: 'after', text: `SELECT id, k FROM _stream_${name} ORDER BY id LIMIT $1 AFTER ($2)`, values: [1000, first] })
  ).rows.length;
  await client.query('BEGIN');
  await client.query(`DROP STREAM ${name}`);
  await client.query('ROLLBACK');
  out.tags.push((await client.query(`DROP STREAM ${name}`)).command + ' STREAM');
  try {
    await client.query(FEED, [table, -1, PAGE]);
  } catch (error) {
    out.refused = error.code;
  }
  await client.end();
  process.stdout.write(JSON.stringify(out));
}

const [mode, ...rest] = process.argv.slice(2);
({ plain, feed })[mode](...rest).catch((error) => {
  console.error(error);
  process.exit(1);
});
