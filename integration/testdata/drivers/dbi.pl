# What an application does through Perl's DBI: DBD::Pg, or the ODBC driver with DBD::ODBC.
# Usage: dbi.pl Pg|ODBC plain DSN | dbi.pl Pg|ODBC feed DSN TABLE STREAM. Output as of psycopg2_driver.py.
use strict;
use warnings;
use utf8;
use DBI;
use JSON::PP;
use POSIX ();

use constant PAGE => 7;
use constant FEED => 'SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(CAST(CAST(? AS text) AS regclass), since_seq => ?, limit_rows => ?)';

binmode STDOUT, ':utf8';
my ($driver, $mode, $dsn, @rest) = @ARGV;

# text is a value as characters: DBD::ODBC gives the bytes of UTF-8.
sub text {
	my ($value) = @_;
	utf8::decode($value) if $driver eq 'ODBC' && defined $value && !utf8::is_utf8($value);
	return $value;
}

sub show {
	my ($name, @values) = @_;
	print "$name ", join('|', map { text($_) // 'NULL' } @values), "\n";
}

sub connect_db {
	my $source = 'dbi:Pg:';    # everything is in the environment
	if ($driver eq 'ODBC') {
		$source = "dbi:ODBC:DRIVER={PostgreSQL Unicode};SERVER=$ENV{PGHOST};PORT=$ENV{PGPORT};DATABASE=$ENV{PGDATABASE};UID=$ENV{PGUSER};PWD=$ENV{PGPASSWORD};BoolsAsChar=0;UseServerSidePrepare=1;UseDeclareFetch=0;Protocol=7.4-0";
	}
	my $db = DBI->connect($source, $driver eq 'ODBC' ? undef : '', undef, { RaiseError => 1, PrintError => 0, PrintWarn => 0, AutoCommit => 1 });
	if ($driver eq 'ODBC') {
		my ($path) = ($ENV{PGOPTIONS} // '') =~ /search_path=(\S+)/;
		$db->do("SET search_path = $path") if $path;
	}
	return $db;
}

sub state_of {
	my ($db, $call) = @_;
	return 'none' if eval { $call->(); 1 };
	return $db->state;
}

sub plain {
	my $db = connect_db();
	show('bound', $db->selectrow_array('SELECT CAST(? AS int) + 1, CAST(? AS text), CAST(? AS numeric), CAST(NULL AS text)', {}, 41, 'größe', '1.50'));
	my $twice = $db->prepare('SELECT CAST(? AS int) * 2');
	show('prepared', map { $twice->execute($_); $twice->fetchrow_array } 1 .. 3);
	$twice->finish;
	my $bytes = $db->prepare('SELECT encode(CAST(? AS bytea), \'hex\')');
	$bytes->bind_param(1, "\x00\xff\x5c\x27", $driver eq 'Pg' ? { pg_type => 17 } : DBI::SQL_VARBINARY);
	$bytes->execute;
	show('bytes', $bytes->fetchrow_array);
	$bytes->finish;
	show('error', state_of($db, sub { $db->selectrow_array('SELECT 1 / CAST(? AS int)', {}, 0) }));
	show('syntax', state_of($db, sub { $db->do('SELEC 1') }));
	$db->begin_work;
	$db->do('CREATE TEMP TABLE t (id int PRIMARY KEY, v text)');
	$db->do("INSERT INTO t VALUES (1, 'a')");
	$db->do('SAVEPOINT a');
	my @states = map { my $sql = $_; state_of($db, sub { $db->do($sql) }) } "INSERT INTO t VALUES (1, 'b')", 'SELECT 1';
	$db->do('ROLLBACK TO SAVEPOINT a');
	$db->do('INSERT INTO t VALUES (2, ?)', {}, 'b');
	$db->commit;
	show('savepoint', @states, $db->selectrow_array('SELECT count(*) FROM t'));
	$db->begin_work;
	$db->do('DELETE FROM t');
	$db->rollback;
	show('rollback', $db->selectrow_array('SELECT count(*) FROM t'));
	my ($n, $sum) = (0, 0);
	$db->begin_work;
	$db->do('DECLARE large CURSOR FOR SELECT i FROM generate_series(1, 20000) i');
	while (my @page = @{ $db->selectcol_arrayref('FETCH 1000 FROM large') }) {
		$n += @page;
		$sum += $_ for @page;
	}
	$db->commit;
	if ($driver eq 'Pg') {
		$db->do('COPY t FROM STDIN');
		$db->pg_putcopydata($_) for "3\tc\n", "4\t\\N\n";
		$db->pg_putcopyend;
		$db->do('COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)');
		my ($line, @lines) = ('');
		while ($db->pg_getcopydata($line) >= 0) { chomp $line; push @lines, $line }
		show('copy', @lines);
		show('large', $n, $sum);
		$db->do('LISTEN news');
		$db->do("NOTIFY news, 'payload'");
		my $notify = $db->pg_notifies;
		show('notify', @$notify[0, 2]);
		my $notice = '';
		local $SIG{__WARN__} = sub { $notice = $_[0] };
		local $db->{PrintWarn} = 1;
		$db->do("DO \$\$ BEGIN RAISE NOTICE 'hello'; END \$\$");
		show('notice', $notice =~ /NOTICE:\s+(\S+)/);
		my $sleep = $db->prepare('SELECT pg_sleep(60)', { pg_async => 1 });
		$sleep->execute;
		select undef, undef, undef, 0.3;
		$db->pg_cancel;
		show('cancel', $db->state);
		show('after cancel', $db->selectrow_array('SELECT 1'));
	} else {
		show('large', $n, $sum);
	}
	$db->disconnect;
}

sub drain {
	my ($db, $statement, $table) = @_;
	my ($cursor, @rows) = (0);
	while (1) {
		$statement = $db->prepare(FEED) if $statement eq 'anew';
		$statement->execute($table, $cursor, PAGE);
		my $page = $statement->fetchall_arrayref;
		push @rows, map { ["$_->[0]", $_->[1] + 0, text("$_->[2]"), $_->[3] ? JSON::PP::true : JSON::PP::false, text($_->[4]), $_->[5]] } @$page;
		return \@rows if @$page < PAGE;
		$cursor = $page->[-1][0];
	}
}

sub feed {
	my ($table, $stream) = @_;
	my $db = connect_db();
	my %out = (autocommit => drain($db, 'anew', $table));
	my $prepared = $db->prepare(FEED);
	$out{prepared} = drain($db, $prepared, $table);
	$out{'prepared again'} = drain($db, $prepared, $table);
	$db->begin_work;
	$out{transaction} = drain($db, $prepared, $table);
	$db->do('SAVEPOINT a');
	$out{savepoint} = drain($db, $prepared, $table);
	$db->commit;
	my $name = "${stream}_" . lc $driver;
	my ($bare) = $table =~ /([^.]+)$/;
	$db->do("CREATE STREAM $name ON $bare WHEN (id % 2 = 0) WITH (start = 'earliest')");
	$db->do("CREATE STREAM IF NOT EXISTS $name ON $bare WHEN (id > 0)");
	my $shown = $db->prepare('SHOW STREAMS');
	$shown->execute;
	$out{columns} = [map { "$_" } @{ $shown->{NAME} }];
	$out{shown} = [map { $_->[2] } grep { $_->[0] eq $name } @{ $shown->fetchall_arrayref }];
	my ($first) = $db->selectrow_array("SELECT id FROM _stream_$name ORDER BY id LIMIT 1");
	$out{events} = 0 + $db->selectrow_array("SELECT count(*) FROM _stream_$name");
	$out{after} = 0 + @{ $db->selectall_arrayref("SELECT id, k FROM _stream_$name ORDER BY id LIMIT 1000 AFTER (CAST(? AS text))", {}, $first) };
	$db->begin_work;
	$db->do("DROP STREAM $name");
	$db->rollback;
	$db->do("DROP STREAM $name");
	$out{refused} = state_of($db, sub { $prepared->execute($table, -1, PAGE); $prepared->fetchall_arrayref });
	print JSON::PP->new->utf8(0)->encode(\%out);
	$db->disconnect;
}

$mode eq 'plain' ? plain() : feed(@rest);
