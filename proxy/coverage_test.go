package proxy

import (
	"bufio"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// reported are faults that users of other PostgreSQL proxies have reported, each with what repeats it here: a conversation of
// testdata/wire by the beginning of its name, or a test. The conversations run directly and through the proxy, in pieces of
// 1, 3 and 4096 bytes and whole, with the server's answers in odd pieces as well.
var reported = []struct{ id, fault, where string }{
	{"B1", "CloseComplete between an error and ReadyForQuery", "B1 "},
	{"B2", "a Query behind a failed message is carried out", "B2 "},
	{"B2", "the same with a statement of koldproxy's", "B2 a statement of ours"},
	{"B3", "an error is withheld until Sync", "B3 "},
	{"B4", "Flush is dropped", "B4 "},
	{"B5", "Describe at the end of a split batch hangs", "B5 "},
	{"B6", "a Sync of the proxy's own", "B6 "},
	{"B7", "several Syncs in flight", "B7 "},
	{"B8", "Query and batch in one write", "B8 "},
	{"B10", "a failed Parse leaves its name taken", "B10 "},
	{"B11", "unknown names end the session", "B11 "},
	{"B12", "the unnamed statement is lost", "B12 "},
	{"B13", "row limits", "B13 "},
	{"B15", "no columns are no data", "B15 "},
	{"B16", "empty texts", "B16 "},
	{"B17", "Sync during COPY FROM", "B17 COPY"},
	{"B17", "a COPY that fails before it begins", "B17 a COPY"},
	{"B18", "65535 parameters", "TestLargeMessages"},
	{"B20", "formats of single columns", "B20 "},
	{"B21", "parameters that a rewrite drops", "B21 "},
	{"B22", "types of moved parameters", "TestParametersTakeTheTypeOfTheirKey"},
	{"B23", "a wrong number of values", "B23 "},
	{"B24", "negative and huge lengths", "B24 "},
	{"B24", "the same from a hostile client", "TestHostileClients"},
	{"B25", "PREPARE in SQL", "B25 "},
	{"B26", "DEALLOCATE ALL leaves a stale map", "B26 "},
	{"B28", "statements of one Query are split", "B28 "},
	{"B29", "transaction control in a Query", "B29 "},
	{"B30", "several commands in Parse", "B30 "},
	{"B31", "SHOW in the extended protocol", "B31 "},
	{"B32", "a rewritten statement leaks rows or its tag", "the extended protocol: NoData"},
	{"B33", "error positions and fields", "B33 "},
	{"B35", "text is not what it was", "B35 "},
	{"B36", "pg_dump is not the same", "TestDumpAndRestore"},
	{"B37", "cached plan must not change result type", "B37 "},
	{"B38", "EXPLAIN of rewritten statements", "TestAfterWorksInsideOtherStatements"},
	{"B38b", "drivers that inline, cancel, copy", "TestDriversDoNotNoticeTheProxy"},
	{"B39", "cursors, COPY (query), views", "TestAfterWorksInsideOtherStatements"},
	{"B40", "words that mean nothing to PostgreSQL alone", "B40 "},
	{"B41", "legal uses of the word after", "TestLegalTextsStayAndRun"},
	{"B42", "comments in front of statements", "TestReplacedStatements"},
	{"B43", "nested comments", "TestLegalTextsStayAndRun"},
	{"B44", "standard_conforming_strings", "TestConformingStrings"},
	{"B45", "dollar quotes", "TestLegalTextsStayAndRun"},
	{"B47", "names and literals in Unicode escapes", "TestLegalTextsStayAndRun"},
	{"B49", "encodings whose second byte looks like a quote", "TestForwarded"},
	{"B50", "SQL that a parser does not know", "TestForwarded"},
	{"B50a", "verbs without blanks, statements behind statements", "TestReplacedStatements"},
	{"B52", "the server's own farewell", "B52 "},
	{"B52", "a server that vanishes", "TestServerThatVanishes"},
	{"B53", "notices keep their place", "B53 "},
	{"B54", "a cancel request hits the next query", "TestCancelHitsOnlyWhatItWasSentFor"},
	{"B55", "storms of cancel requests", "TestCancelStormWithWrongKeys"},
	{"B56", "cancel requests inside TLS", "TestCancelOverTLS"},
	{"B57", "both sides write and neither reads", "TestPipelineWithoutReading"},
	{"B59", "TLS records of more than 8 KB", "TestTLSWritesAreSmall"},
	{"B60", "clients that vanish in a transaction", "TestClientsThatVanish"},
	{"B61", "empty and odd startup parameters, byte by byte", "TestStartup"},
	{"B62", "notifications while idle", "B62 "},
	{"B64", "function calls", "B64 "},
	{"B65", "replication sessions", "TestReplicationSessionsPass"},
	{"B65", "pg_basebackup, pg_receivewal, pg_recvlogical", "TestReplicationTools"},
	{"B67", "messages that cross reads", "TestWire"},
	{"B68", "answers out of order after reconnecting", "TestPgbench"},
	{"B69", "an unknown message", "B69 an unknown message"},
	{"B69", "impossible lengths", "B69 an impossible length"},
	// B70, extended protocol on an admin port: there is none.
}

var testName = regexp.MustCompile(`^func (Test\w+)\(`)

func TestReportedFaultsAreRepeated(t *testing.T) {
	t.Parallel()
	var known []string
	for _, pattern := range []string{"testdata/wire/*.txt", "*_test.go", "../rewrite/*_test.go", "../integration/*_test.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		for _, path := range paths {
			known = append(known, namesIn(t, path)...)
		}
	}
	for _, r := range reported {
		found := false
		for _, name := range known {
			found = found || name == r.where || !strings.HasPrefix(r.where, "Test") && strings.HasPrefix(name, r.where)
		}
		if !found {
			t.Errorf("%s (%s): there is no %q", r.id, r.fault, r.where)
		}
	}
}

// namesIn lists the conversations or tests of a file.
func namesIn(t *testing.T, path string) []string {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var names []string
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "case "); ok {
			names = append(names, name)
		} else if m := testName.FindStringSubmatch(lines.Text()); m != nil {
			names = append(names, m[1])
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return names
}
