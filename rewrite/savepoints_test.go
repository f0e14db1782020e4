package rewrite

import "testing"

func TestSavepointsOfAText(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]Savepoints{
		"SELECT 'savepoint a'; SELECT $$; COMMIT $$":                               0,
		"SAVEPOINT a; SELECT 1":                                                    SavepointsOwn,
		"SELECT 1; SAVEPOINT a; RELEASE a":                                         SavepointsReleased,
		`savepoint a; savepoint "b"; release savepoint A; select 1`:                SavepointsReleased,
		"SAVEPOINT a; SAVEPOINT b; RELEASE b":                                      SavepointsOwn,
		"SAVEPOINT a; SAVEPOINT b; ROLLBACK WORK TO SAVEPOINT a; RELEASE b":        SavepointsOfOthers,
		"SAVEPOINT a; SAVEPOINT b; ROLLBACK TO a; RELEASE a":                       SavepointsReleased,
		"SAVEPOINT a; RELEASE a; RELEASE a":                                        SavepointsOfOthers,
		`SAVEPOINT a; RELEASE "A"`:                                                 SavepointsOfOthers,
		"SAVEPOINT savepoint; RELEASE savepoint":                                   SavepointsReleased,
		"RELEASE SAVEPOINT savepoint":                                              SavepointsOfOthers,
		"SAVEPOINT a; ROLLBACK":                                                    SavepointsOfOthers,
		"SAVEPOINT to; ROLLBACK TO":                                                SavepointsOfOthers, // a syntax error
		"ROLLBACK TRANSACTION TO a":                                                SavepointsOfOthers,
		"SELECT 1; COMMIT AND CHAIN; SELECT 2":                                     SavepointsOfOthers,
		"END":                                                                      SavepointsOfOthers,
		"PREPARE TRANSACTION 'x'":                                                  SavepointsOfOthers,
		"PREPARE transaction AS SELECT 1":                                          SavepointsOfOthers, // taken for the other
		"PREPARE p AS SELECT 1":                                                    0,
		"CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END":     0,
		`SAVEPOINT U&"\0061"; RELEASE a`:                                           SavepointsReleased,
		`SAVEPOINT U&"!0061" UESCAPE '!'; /* x */ RELEASE SAVEPOINT a; SELECT 1;;`: SavepointsReleased,
	} {
		if got, ok := OutlineOf(sql, Options{ConformingStrings: true}); !ok || got.Savepoints != want {
			t.Errorf("%s: %d, %t, not %d", sql, got.Savepoints, ok, want)
		}
	}
}
