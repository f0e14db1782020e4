package main

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// What keeps changes from being applied shows everywhere that somebody may look.
func TestGapShows(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, _ := i.serveWith("--set", "http.listen=127.0.0.1:0")
	base := "http://" + regexp.MustCompile(`"http":"([^"]+)"`).FindStringSubmatch(p.output())[1]
	if out := i.must("check"); !strings.Contains(out, "checkpoint, slot and publication fit") {
		t.Errorf("check:\n%s", out)
	}
	direct := connectTo(t, i.dsn)
	do(t, direct, "UPDATE koldstore.checkpoint SET gap = 'the cat ate it', gap_at = now()")
	if status, body := get(t, base+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "the cat ate it") || !strings.Contains(body, "docs/operations.md") {
		t.Errorf("/readyz: %d %s", status, body)
	}
	do(t, direct, "UPDATE koldstore.checkpoint SET gap = NULL, gap_at = NULL")
	p.stop(syscall.SIGTERM)

	do(t, direct, "SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint")
	if code, out := i.koldproxy("check"); code != exitFailed || !strings.Contains(out, "does not exist any more") || !strings.Contains(out, "docs/operations.md") {
		t.Errorf("check without the slot: exit code %d\n%s", code, out)
	}
	if out := i.must("status"); !strings.Contains(out, "PROBLEM: replication slot") {
		t.Errorf("status without the slot:\n%s", out)
	}
	var status []databaseStatus
	if err := json.Unmarshal([]byte(i.must("status", "--json")), &status); err != nil || len(status) != 1 || len(status[0].Problems) != 1 {
		t.Errorf("status without the slot: %v %+v", err, status)
	}
}

// Somebody who has koldproxy stop at gaps sees them, and closes them, without SQL.
func TestGapsAreListedAndHealedByHand(t *testing.T) {
	t.Parallel()
	i := install(t)
	p, _ := i.serveWith("--set", "apply.on_gap=stop")
	direct := connectTo(t, i.dsn)
	do(t, direct, "CREATE TABLE notes (id int PRIMARY KEY)")
	do(t, direct, "SELECT koldstore.manage_table('notes')")
	until(t, direct, "SELECT state = 'active' FROM koldstore.managed_table")
	if out := i.must("gaps", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("gaps of a database without any: %s", out)
	}
	if out := i.must("heal"); !strings.Contains(out, "no open gap") {
		t.Errorf("heal without a gap: %s", out)
	}
	p.stop(syscall.SIGTERM)
	do(t, direct, "SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint")
	do(t, direct, "INSERT INTO notes VALUES (1)")

	start(t, "serve", "--config", i.config, "--set", "apply.on_gap=stop")
	until(t, direct, "SELECT gap IS NOT NULL FROM koldstore.checkpoint")
	if out := i.must("gaps"); !strings.Contains(out, "open") || !strings.Contains(out, "does not exist any more") || !strings.Contains(out, "koldproxy heal") {
		t.Errorf("gaps with an open one:\n%s", out)
	}
	if out := i.must("heal"); !strings.Contains(out, "being closed") {
		t.Errorf("heal: %s", out)
	}
	until(t, direct, "SELECT EXISTS (SELECT FROM koldstore.notes__cl WHERE id = 1)")
	var gaps []gapRow
	if err := json.Unmarshal([]byte(i.must("gaps", "--json")), &gaps); err != nil || len(gaps) != 1 || gaps[0].Open || gaps[0].To == nil {
		t.Errorf("gaps after healing: %v %+v", err, gaps)
	}

	do(t, direct, "DELETE FROM koldstore.notes__cl")
	if out := i.must("heal", "notes"); !strings.Contains(out, "job") {
		t.Errorf("heal notes: %s", out)
	}
	until(t, direct, "SELECT EXISTS (SELECT FROM koldstore.notes__cl WHERE id = 1)")
}

// until waits for a query to say true.
func until(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	for end := time.Now().Add(processTimeout); !ask1[bool](t, conn, sql); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", sql)
		}
	}
}
