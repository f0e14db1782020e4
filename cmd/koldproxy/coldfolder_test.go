package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestOnlyServeMakesTheColdFolder and only while no segment should be in it: in the place of a volume that is not mounted it would take
// what belongs on the volume.
func TestOnlyServeMakesTheColdFolder(t *testing.T) {
	t.Parallel()
	i := install(t)
	folder := filepath.Join(filepath.Dir(i.socket), "cold")
	missing := func(when string) {
		t.Helper()
		if _, err := os.Lstat(folder); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the folder was made: %v", when, err)
		}
	}
	i.must("migrate", "up")
	if out := i.must("check"); !strings.Contains(out, "koldproxy serve makes it") {
		t.Errorf("check before the folder is there:\n%s", out)
	}
	missing("check of a new installation")

	p, dsn := i.serve()
	conn := connectTo(t, dsn)
	do(t, conn, "CREATE TABLE notes (id int PRIMARY KEY); SELECT koldstore.manage_table('notes')")
	do(t, conn, "INSERT INTO notes VALUES (1)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	i.must("flush", "notes", "--force", "--wait")
	p.stop(syscall.SIGTERM)

	if err := os.Rename(folder, folder+".away"); err != nil {
		t.Fatal(err)
	}
	if code, out := i.koldproxy("verify", "notes"); code != exitFailed || !strings.Contains(out, "cannot be opened") {
		t.Errorf("verify without the folder: exit code %d\n%s", code, out)
	}
	missing("verify")
	if code, out := i.koldproxy("check"); code != exitFailed || !strings.Contains(out, "segments should be in it") {
		t.Errorf("check without the folder: exit code %d\n%s", code, out)
	}
	missing("check")
	p, dsn = i.serve()
	conn = connectTo(t, dsn)
	do(t, conn, "INSERT INTO notes VALUES (2)")
	do(t, conn, "SELECT koldstore.wait_for_async_mirror()")
	answer := ask1[string](t, conn, "SELECT koldstore.flush_table('notes', wait => true, force => true)::text")
	if !strings.Contains(answer, "segments are in it") || strings.Contains(answer, folder) {
		t.Errorf("flush without the folder: %s", answer)
	}
	missing("serve and flush")
	if err := os.Rename(folder+".away", folder); err != nil {
		t.Fatal(err)
	}
	i.must("flush", "notes", "--force", "--wait")
	i.must("check")
	if _, err := os.Lstat(filepath.Join(folder, "check")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("check leaves something behind: %v", err)
	}
	if out := i.must("verify", "notes"); !strings.Contains(out, "2 segments") {
		t.Errorf("verify with the folder: %s", out)
	}
	p.stop(syscall.SIGTERM)
}
