package walapply_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// Who keeps the applier waiting for long is named where one looks for it, by those who may not look at sessions of others, too.
func TestStallsAreNamed(t *testing.T) {
	t.Parallel()
	d, admin := newPoorDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.startStreaming(&recorder{}, func(c *walapply.Config) { c.LockWait = 0 })
	strong := connectTo(t, admin, "nightly report")
	if _, err := strong.Exec(t.Context(), `BEGIN; LOCK TABLE recorded IN SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	status := func() string {
		return query[string](d, `SELECT (s ->> 'healthy') || ' ' || coalesce(s ->> 'waiting_for', 'for nobody') FROM koldstore.async_mirror_status() s`)
	}
	stalls := func() (text string) {
		list, err := walapply.Inspect(t.Context(), d.sql, "koldproxy", walapply.OnGapHeal)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list {
			if p.Stalled {
				text += p.Error()
			}
		}
		return text
	}
	if got := status(); got != "true for nobody" || stalls() != "" {
		t.Errorf("before, the status is %q and %q is named", got, stalls())
	}
	d.exec(`INSERT INTO t VALUES (1)`)
	want := fmt.Sprintf("process %d (user %s, application 'nightly report'), which has a lock on recorded", strong.PgConn().PID(), strong.Config().User)
	d.await("the stall to show", func() bool { return strings.HasPrefix(status(), "false ") })
	if got := status(); got != "false "+want {
		t.Errorf("the status is %q, want %q", got, want)
	}
	if got := stalls(); !strings.Contains(got, want) {
		t.Errorf("%q is named", got)
	}
	if _, err := strong.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	d.awaitApplied()
	if got := status(); got != "true for nobody" || stalls() != "" {
		t.Errorf("afterwards, the status is %q and %q is named", got, stalls())
	}
}
