// What an application does with streams and feeds, through node-postgres.
//
// Usage: node feed.js DSN TABLE STREAM. Prints one JSON object: for each way of asking the whole feed of TABLE, read in
// pages, and what the stream's log and SHOW STREAMS say.
'use strict';

const { Client, types } = require('pg');

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

async function main(dsn, table, stream) {
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

main(...process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
