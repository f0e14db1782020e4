package main

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What keeps changes from being applied shows everywhere that somebody may look.
func TestGapShows(t *testing.T) {
	t.Parallel()
	i := install(t)
	p := start(t, "serve", "--config", i.config, "--set", "http.listen=127.0.0.1:0")
	var base string
	for end := time.Now().Add(processTimeout); base == ""; time.Sleep(10 * time.Millisecond) {
		if m := regexp.MustCompile(`"http":"([^"]+)"`).FindStringSubmatch(p.output()); m != nil {
			base = "http://" + m[1]
		}
		if time.Now().After(end) || p.ended() {
			t.Fatalf("serve is not ready:\n%s", p.output())
		}
	}
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
