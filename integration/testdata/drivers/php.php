<?php
// What an application does through PHP's PDO and pg_ functions. Usage and output as of psycopg2_driver.py.
declare(strict_types=1);

const PAGE = 7;
const FEED = 'SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(CAST(CAST(? AS text) AS regclass), since_seq => ?, limit_rows => ?)';
const PG_FEED = 'SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since($1, since_seq => $2, limit_rows => $3)';

function show(string $name, mixed ...$values): void
{
    echo $name, ' ', implode('|', array_map(fn ($v) => $v ?? 'NULL', $values)), "\n";
}

function sqlstate(callable $call): string
{
    try {
        $call();
    } catch (PDOException $e) {
        return (string) $e->errorInfo[0];
    }
    return 'none';
}

function connect(): PDO
{
    return new PDO('pgsql:', null, null, [PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION]); // the rest is in the environment
}

function row(PDO $db, string $sql, array $values = []): array
{
    $statement = $db->prepare($sql);
    $statement->execute($values);
    return $statement->fetch(PDO::FETCH_NUM);
}

function plain(string $dsn): void
{
    $db = connect();
    show('bound', ...row($db, 'SELECT CAST(? AS int) + 1, CAST(? AS text), CAST(? AS numeric), CAST(NULL AS text)', [41, 'größe', '1.50']));
    $twice = $db->prepare('SELECT CAST(? AS int) * 2');
    $doubled = [];
    foreach ([1, 2, 3] as $i) {
        $twice->execute([$i]);
        $doubled[] = $twice->fetchColumn();
    }
    show('prepared', ...$doubled);
    $bytes = $db->prepare('SELECT CAST(? AS bytea)');
    $bytes->bindValue(1, "\x00\xff\x5c\x27", PDO::PARAM_LOB);
    $bytes->execute();
    show('bytes', bin2hex(stream_get_contents($bytes->fetchColumn())));
    show('error', sqlstate(fn () => row($db, 'SELECT 1 / CAST(? AS int)', [0])));
    show('syntax', sqlstate(fn () => $db->exec('SELEC 1')));
    $db->beginTransaction();
    $db->exec("CREATE TEMP TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); SAVEPOINT a");
    $states = [sqlstate(fn () => $db->exec("INSERT INTO t VALUES (1, 'b')")), sqlstate(fn () => $db->query('SELECT 1'))];
    $db->exec('ROLLBACK TO a');
    $db->prepare('INSERT INTO t VALUES (2, ?)')->execute(['b']);
    $db->commit();
    show('savepoint', ...[...$states, row($db, 'SELECT count(*) FROM t')[0]]);
    $db->beginTransaction();
    $db->exec('DELETE FROM t');
    $db->rollBack();
    show('rollback', row($db, 'SELECT count(*) FROM t')[0]);
    $db->pgsqlCopyFromArray('t', ["3\tc\n", "4\t\\N\n"]);
    show('copy', ...array_map(fn ($line) => strtr(trim($line), ["\t" => ',', '\\N' => '']), $db->pgsqlCopyToArray('t')));
    $db->beginTransaction();
    $large = $db->prepare('SELECT i FROM generate_series(1, 20000) i', [PDO::ATTR_CURSOR => PDO::CURSOR_SCROLL]); // a cursor of the server
    $large->execute();
    $n = $sum = 0;
    while (($i = $large->fetchColumn()) !== false) {
        $n++;
        $sum += $i;
    }
    $db->commit();
    show('large', $n, $sum);
    $db->exec('LISTEN news');
    $db->exec("NOTIFY news, 'payload'");
    $notify = $db->pgsqlGetNotify(PDO::FETCH_NUM, 60000);
    show('notify', $notify[0], $notify[2]);

    $pg = pg_connect($dsn);
    pg_query($pg, "DO $$ BEGIN RAISE NOTICE 'hello'; END $$");
    show('notice', explode(' ', preg_replace('/\s+/', ' ', pg_last_notice($pg)))[1]);
    pg_send_query($pg, 'SELECT pg_sleep(60)');
    usleep(300000);
    pg_cancel_query($pg);
    pg_send_query($pg, 'SELECT 1');
    show('after cancel', pg_fetch_result(pg_get_result($pg), 0, 0));
}

/** @param callable(array): array $page gives the rows behind a cursor */
function drain(callable $page, string $table): array
{
    for ($rows = [], $cursor = 0;; $cursor = $got[PAGE - 1][0]) {
        $got = $page([$table, $cursor, PAGE]);
        foreach ($got as [$seq, $op, $pk, $deleted, $image, $source]) {
            $rows[] = [(string) $seq, (int) $op, $pk, $deleted === true || $deleted === 't', $image, $source];
        }
        if (count($got) < PAGE) {
            return $rows;
        }
    }
}

function feed(string $dsn, string $table, string $stream): void
{
    $db = connect();
    $fetch = function (PDOStatement $statement, array $values): array {
        $statement->execute($values);
        return $statement->fetchAll(PDO::FETCH_NUM);
    };
    $emulated = [PDO::ATTR_EMULATE_PREPARES => true];
    $unnamed = [PDO::PGSQL_ATTR_DISABLE_PREPARES => true];
    $prepared = $db->prepare(FEED);
    $pg = pg_connect($dsn);
    pg_prepare($pg, 'feed', PG_FEED);
    $out = [
        'prepared' => drain(fn ($v) => $fetch($prepared, $v), $table),
        'emulated' => drain(fn ($v) => $fetch($db->prepare(FEED, $emulated), $v), $table),
        'without a name' => drain(fn ($v) => $fetch($db->prepare(FEED, $unnamed), $v), $table),
        'pg_query_params' => drain(fn ($v) => pg_fetch_all(pg_query_params($pg, PG_FEED, $v), PGSQL_NUM), $table),
        'pg_execute' => drain(fn ($v) => pg_fetch_all(pg_execute($pg, 'feed', $v), PGSQL_NUM), $table),
    ];
    $db->beginTransaction();
    $out['transaction'] = drain(fn ($v) => $fetch($prepared, $v), $table);
    $db->exec('SAVEPOINT a');
    $out['savepoint'] = drain(fn ($v) => $fetch($prepared, $v), $table);
    $db->commit();

    $name = $stream . '_php';
    $bare = substr(strrchr('.' . $table, '.'), 1);
    $db->exec("CREATE STREAM $name ON $bare WHEN (id % 2 = 0) WITH (start = 'earliest')");
    $db->exec("CREATE STREAM IF NOT EXISTS $name ON $bare WHEN (id > 0)");
    $shown = $db->query('SHOW STREAMS');
    $out['columns'] = array_map(fn ($i) => $shown->getColumnMeta($i)['name'], range(0, $shown->columnCount() - 1));
    $out['shown'] = array_column(array_filter($shown->fetchAll(PDO::FETCH_NUM), fn ($row) => $row[0] === $name), 2);
    [$first] = row($db, "SELECT id FROM _stream_$name ORDER BY id LIMIT 1");
    $out['events'] = (int) row($db, "SELECT count(*) FROM _stream_$name")[0];
    $out['after'] = count($fetch($db->prepare("SELECT id, k FROM _stream_$name ORDER BY id LIMIT 1000 AFTER (?)"), [$first]));
    $db->beginTransaction();
    $db->exec("DROP STREAM $name");
    $db->rollBack();
    $db->exec("DROP STREAM $name");
    $out['refused'] = sqlstate(fn () => $prepared->execute([$table, -1, PAGE]));
    echo json_encode($out, JSON_UNESCAPED_UNICODE | JSON_THROW_ON_ERROR);
}

$argv[1] === 'plain' ? plain($argv[2]) : feed(...array_slice($argv, 2));
