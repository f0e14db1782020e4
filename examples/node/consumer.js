// Reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every event and
// remembers the position in a file. Needs the package pg.
//
//	DATABASE_URL=postgres://… node consumer.js stream|feed TABLE POSITION_FILE

'use strict';

const fs = require('node:fs');
const pg = require('pg');

// streamPage returns the events behind an id; the id comes first in each.
async function streamPage(client, log, after) {
  const from = log.split('.').map((name) => client.escapeIdentifier(name)).join('.');
  const text = `SELECT id, op, k::text, doc::text FROM ${from} ORDER BY id LIMIT 500`;
  const query = after ? { text: `${text} AFTER ($1)`, values: [after] } : { text };
  return (await client.query({ ...query, rowMode: 'array' })).rows;
}

// feedPage returns the changes behind a seq; the seq comes first in each, as text, because it is more than a JavaScript
// number can hold. The row of a deletion is null.
async function feedPage(client, table, since) {
  const text = `SELECT seq, op, pk::text, coalesce(row_image::text, 'null'), source
    FROM koldstore.changes_since($1, since_seq => $2)`;
  return (await client.query({ text, values: [table, since || '0'], rowMode: 'array' })).rows;
}

async function main(kind, table, file) {
  let position = fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '';
  const read = kind === 'stream' ? streamPage : feedPage;
  const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
  await client.connect();
  try {
    for (let events; (events = await read(client, table, position)).length > 0;) {
      const lines = events.map((event) => event.join(' ') + '\n').join('');
      await new Promise((resolve) => process.stdout.write(lines, resolve));
      position = events[events.length - 1][0];
      fs.writeFileSync(file + '.new', position);
      fs.renameSync(file + '.new', file); // a crash leaves the old position or the new one
    }
  } finally {
    await client.end();
  }
}

const [kind, table, file] = process.argv.slice(2);
if (!['stream', 'feed'].includes(kind) || !file) {
  console.error('usage: DATABASE_URL=postgres://… node consumer.js stream|feed TABLE POSITION_FILE');
  process.exit(2);
}
main(kind, table, file).catch((err) => {
  console.error(err.code ? `${err.message} (SQLSTATE ${err.code})` : err.message);
  process.exitCode = 1;
});
