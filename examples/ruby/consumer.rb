# Reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every event and
# remembers the position in a file. Needs the gem pg.
#
#     DATABASE_URL=postgres://… ruby consumer.rb stream|feed TABLE POSITION_FILE

require "pg"

$stdout.set_encoding("UTF-8")

# The events behind an id; the id comes first in each.
def stream_page(db, log, after)
  query = "SELECT id, op, k::text, doc::text FROM #{PG::Connection.quote_ident(log.split("."))} ORDER BY id LIMIT 500"
  return db.exec(query).values if after.empty?

  db.exec_params("#{query} AFTER ($1)", [after]).values
end

# The changes behind a seq; the seq comes first in each. The row of a deletion is null.
def feed_page(db, table, since)
  db.exec_params(<<~SQL, [table, since.empty? ? 0 : since]).values
    SELECT seq, op, pk::text, coalesce(row_image::text, 'null'), source
    FROM koldstore.changes_since($1, since_seq => $2)
  SQL
end

kind, table, file = ARGV
abort "usage: DATABASE_URL=postgres://… ruby consumer.rb stream|feed TABLE POSITION_FILE" unless ARGV.size == 3 && %w[stream feed].include?(kind)
position = File.exist?(file) ? File.read(file) : ""
db = PG.connect(ENV.fetch("DATABASE_URL"))
begin
  loop do
    events = kind == "stream" ? stream_page(db, table, position) : feed_page(db, table, position)
    break if events.empty?

    events.each { |event| puts event.join(" ") }
    $stdout.flush
    position = events.last.first
    File.write("#{file}.new", position)
    File.rename("#{file}.new", file) # a crash leaves the old position or the new one
  end
rescue PG::Error => e
  abort "#{e.message} (SQLSTATE #{e.result&.error_field(PG::Result::PG_DIAG_SQLSTATE)})"
end
