# What an application does through Ruby's pg. Usage and output as of psycopg2_driver.py.
require 'json'
require 'pg'

PAGE = 7
FEED = 'SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1, since_seq => $2, limit_rows => $3)'.freeze

def show(name, *values)
  puts "#{name} #{values.map { |v| v.nil? ? 'NULL' : v }.join('|')}"
end

def sqlstate
  yield
  'none'
rescue PG::Error => e
  e.result ? e.result.error_field(PG::Result::PG_DIAG_SQLSTATE) : e.message
end

def plain(dsn)
  db = PG.connect(dsn)
  db.set_notice_processor { |_| }
  show('bound', *db.exec_params('SELECT $1::int + 1, $2::text, $3::numeric, NULL::text', [41, 'größe', '1.50']).values[0])
  db.prepare('twice', 'SELECT $1::int * 2')
  show('prepared', *(1..3).map { |i| db.exec_prepared('twice', [i]).getvalue(0, 0) })
  bytes = db.exec_params('SELECT $1::bytea', [{ value: "\x00\xff\x5c\x27".b, format: 1 }], 1) # both ways in binary
  show('bytes', bytes.getvalue(0, 0).unpack1('H*'))
  show('error', sqlstate { db.exec('SELECT 1 / 0') })
  show('syntax', sqlstate { db.exec('SELEC 1') })
  states = []
  db.transaction do
    db.exec("CREATE TEMP TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); SAVEPOINT a")
    states << sqlstate { db.exec("INSERT INTO t VALUES (1, 'b')") } << sqlstate { db.exec('SELECT 1') }
    db.exec('ROLLBACK TO a')
    db.exec_params('INSERT INTO t VALUES (2, $1)', ['b'])
  end
  show('savepoint', *states, db.exec('SELECT count(*) FROM t').getvalue(0, 0))
  db.exec('BEGIN')
  db.exec('DELETE FROM t')
  db.exec('ROLLBACK')
  show('rollback', db.exec('SELECT count(*) FROM t').getvalue(0, 0))
  db.copy_data('COPY t FROM STDIN') { ["3\tc\n", "4\t\\N\n"].each { |line| db.put_copy_data(line) } }
  lines = []
  db.copy_data('COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)') do
    while (line = db.get_copy_data)
      lines << line.chomp
    end
  end
  show('copy', *lines)
  n = sum = 0
  db.send_query_params('SELECT i FROM generate_series(1, $1::int) i', [20_000])
  db.set_single_row_mode
  db.get_result.stream_each_row { |row| n += 1; sum += row[0].to_i }
  show('large', n, sum)
  db.exec('LISTEN news')
  db.exec("NOTIFY news, 'payload'")
  db.wait_for_notify(60) { |channel, _pid, payload| show('notify', channel, payload) }
  db.set_notice_processor { |message| show('notice', message.split[1]) }
  db.exec("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
  stop = Thread.new { sleep 0.3; db.cancel }
  show('cancel', sqlstate { db.exec('SELECT pg_sleep(60)') })
  stop.join
  show('after cancel', db.exec('SELECT 1').getvalue(0, 0))
  db.close
end

def drain(table)
  cursor, rows = 0, []
  loop do
    page = yield [table, cursor, PAGE]
    rows.concat(page.values.map { |seq, op, pk, deleted, image, source| [seq, op.to_i, pk, deleted == 't', image, source] })
    return rows if page.ntuples < PAGE
    cursor = page.getvalue(PAGE - 1, 0)
  end
end

def feed(dsn, table, stream)
  db = PG.connect(dsn)
  db.set_notice_processor { |_| }
  db.prepare('feed', FEED)
  out = { 'parameters' => drain(table) { |p| db.exec_params(FEED, p) }, 'prepared' => drain(table) { |p| db.exec_prepared('feed', p) } }
  db.transaction do
    out['transaction'] = drain(table) { |p| db.exec_prepared('feed', p) }
    db.exec('SAVEPOINT a')
    out['savepoint'] = drain(table) { |p| db.exec_params(FEED, p) }
  end
  name, bare = "#{stream}_ruby", table.split('.').last
  tags = [
    "CREATE STREAM #{name} ON #{bare} WHEN (id % 2 = 0) WITH (start = 'earliest')",
    "CREATE STREAM IF NOT EXISTS #{name} ON #{bare} WHEN (id > 0)"
  ].map { |sql| db.exec(sql).cmd_status }
  shown = db.exec('SHOW STREAMS')
  tags << shown.cmd_status
  out['columns'] = shown.fields
  out['shown'] = shown.values.select { |row| row[0] == name }.map { |row| row[2] }
  first = db.exec("SELECT id FROM _stream_#{name} ORDER BY id LIMIT 1").getvalue(0, 0)
  out['events'] = db.exec("SELECT count(*) FROM _stream_#{name}").getvalue(0, 0).to_i
  out['after'] = db.exec_params("SELECT id, k FROM _stream_#{name} ORDER BY id LIMIT $1 AFTER ($2)", [1000, first]).ntuples
  db.exec("BEGIN; DROP STREAM #{name}; ROLLBACK")
  tags << db.exec("DROP STREAM #{name}").cmd_status
  out['tags'] = tags
  out['refused'] = sqlstate { db.exec_params(FEED, [table, -1, PAGE]) }
  db.close
  puts JSON.generate(out)
end

ARGV[0] == 'plain' ? plain(ARGV[1]) : feed(*ARGV[1..])
