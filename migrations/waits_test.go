package migrations_test

import (
	"fmt"
	"strings"
	"testing"
)

// Whoever waits for many seeds is told of some; whoever manages a table a second time, how to compare it.
func TestWaitsAreNamed(t *testing.T) {
	t.Parallel()
	su, as := installed(t)
	owner := as("owner")
	exec(t, su, fmt.Sprintf(`ALTER SCHEMA public OWNER TO %q`, value[string](t, owner, `SELECT current_user`)))
	for i := range 7 {
		exec(t, owner, fmt.Sprintf(`CREATE TABLE t%d (id int PRIMARY KEY)`, i))
		exec(t, owner, fmt.Sprintf(`SELECT koldstore.manage_table('t%d')`, i))
	}
	if got := value[string](t, owner, `SELECT koldstore.open_seeds()`); got != "t0, t1, t2, t3, t4 and 2 more" {
		t.Errorf("waiting for %s", got)
	}
	asService(t, su, `UPDATE koldstore.job SET error = 'no' WHERE table_oid = 'public.t0'::regclass`)
	if got := value[string](t, owner, `SELECT koldstore.open_seeds()`); got != "t1, t2, t3, t4, t5 and 1 more" {
		t.Errorf("waiting for %s", got)
	}
	if body := value[string](t, owner, `SELECT prosrc FROM pg_proc WHERE proname = 'wait_for_async_mirror'`); strings.Count(body, "koldstore.open_seeds()") != 1 || strings.Count(body, "is not waited for") != 1 {
		t.Errorf("the fence says something else:\n%s", body)
	}
	if err := refused(t, owner, "55000", "already managed", `SELECT koldstore.manage_table('t1')`); !strings.Contains(err.Hint, "koldstore.heal_table") {
		t.Errorf("the hint is %q", err.Hint)
	}
}
