<?php
// Reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every event and
// remembers the position in a file. Needs the extension pgsql.
//
//     DATABASE_URL=postgres://… php consumer.php stream|feed TABLE POSITION_FILE

// The events behind an id; the id comes first in each.
function stream_page($db, $log, $after)
{
    $name = implode('.', array_map(fn ($part) => pg_escape_identifier($db, $part), explode('.', $log)));
    $query = "SELECT id, op, k::text, doc::text FROM $name ORDER BY id LIMIT 500";
    return $after === '' ? query($db, $query, []) : query($db, $query . ' AFTER ($1)', [$after]);
}

// The changes behind a seq; the seq comes first in each. The row of a deletion is null.
function feed_page($db, $table, $since)
{
    return query($db, "SELECT seq, op, pk::text, coalesce(row_image::text, 'null'), source
        FROM koldstore.changes_since(\$1, since_seq => \$2)", [$table, $since === '' ? '0' : $since]);
}

function query($db, $sql, $parameters)
{
    pg_send_query_params($db, $sql, $parameters);
    $result = pg_get_result($db);
    if ($code = pg_result_error_field($result, PGSQL_DIAG_SQLSTATE)) {
        fwrite(STDERR, pg_result_error($result) . " (SQLSTATE $code)\n");
        exit(1);
    }
    while (pg_get_result($db)) {
    }
    return pg_fetch_all($result, PGSQL_NUM);
}

if ($argc !== 4 || !in_array($argv[1], ['stream', 'feed'], true)) {
    fwrite(STDERR, "usage: DATABASE_URL=postgres://… php consumer.php stream|feed TABLE POSITION_FILE\n");
    exit(2);
}
[, $kind, $table, $file] = $argv;
$position = is_file($file) ? file_get_contents($file) : '';
$db = pg_connect(getenv('DATABASE_URL')) ?: exit(1);
while ($events = ($kind === 'stream' ? stream_page($db, $table, $position) : feed_page($db, $table, $position))) {
    foreach ($events as $event) {
        echo implode(' ', $event), "\n";
    }
    $position = end($events)[0];
    file_put_contents("$file.new", $position);
    rename("$file.new", $file); // a crash leaves the old position or the new one
}
