// Follows a stream for ever as server-sent events, which koldproxy takes from the log: nothing is lost, and nothing but HTTP is
// needed. Needs no package.
//
//	EVENTS_URL=http://user:password@127.0.0.1:9632/streams/<db>/<name> node events.js POSITION_FILE

'use strict';

const fs = require('node:fs');

// receive prints events until the connection ends, and returns the reason if koldproxy says one.
async function receive(url, file) {
  const position = fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '';
  const address = new URL(url);
  const credentials = `${decodeURIComponent(address.username)}:${decodeURIComponent(address.password)}`;
  address.username = address.password = '';
  if (!position) address.searchParams.set('from', 'earliest');
  const response = await fetch(address, {
    headers: {
      Authorization: `Basic ${Buffer.from(credentials).toString('base64')}`,
      ...(position && { 'Last-Event-ID': position }),
    },
  });
  if (!response.ok) return `${response.status} ${(await response.text()).trim()}`;
  let buffer = '';
  for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) {
    const blocks = (buffer + chunk).split('\n\n');
    buffer = blocks.pop();
    for (const block of blocks) {
      const field = (name) => block.match(new RegExp(`^${name}: (.*)$`, 'm'))?.[1];
      if (field('event') === 'end') return JSON.parse(field('data')).reason;
      if (field('event') === 'gap') return `events are missing (${JSON.parse(field('data')).reason}): build the copy anew`;
      if (!field('data')) continue; // a comment, or an id alone
      const event = JSON.parse(field('data'));
      await new Promise((resolve) => process.stdout.write(`${event.id} ${event.op} ${JSON.stringify(event.k)}\n`, resolve));
      fs.writeFileSync(file + '.new', event.id);
      fs.renameSync(file + '.new', file); // a crash leaves the old position or the new one
    }
  }
  return '';
}

async function main(url, file) {
  for (;;) {
    try {
      const reason = await receive(url, file);
      if (reason) throw new Error(reason);
    } catch (err) {
      if (err.name !== 'TypeError') throw err; // what fetch says of a connection that fails or ends
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

if (!process.env.EVENTS_URL || process.argv.length !== 3) {
  console.error('usage: EVENTS_URL=http://user:password@host:port/streams/<db>/<name> node events.js POSITION_FILE');
  process.exit(2);
}
main(process.env.EVENTS_URL, process.argv[2]).catch((err) => {
  console.error(err.message);
  process.exitCode = 1;
});
