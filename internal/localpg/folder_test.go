package localpg

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestSweepTakesFoldersOfDeadOwnersOnly(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	dead := filepath.Join(base, folderPrefix+"dead")
	if err := os.MkdirAll(filepath.Join(dead, dataName), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead, lockName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	alive, err := makeRunFolder(base)
	if err != nil {
		t.Fatal(err)
	}
	beingMade := filepath.Join(base, folderPrefix+"new")
	foreign := filepath.Join(base, "something-else")
	halfMade := filepath.Join(base, folderPrefix+"half-made")
	for _, dir := range []string{beingMade, foreign, halfMade} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-2 * unlockedGrace)
	if err := os.Chtimes(halfMade, old, old); err != nil {
		t.Fatal(err)
	}

	sweep(base)

	for dir, stays := range map[string]bool{dead: false, halfMade: false, alive.path: true, beingMade: true, foreign: true} {
		_, err := os.Stat(dir)
		if gone := errors.Is(err, fs.ErrNotExist); gone == stays {
			t.Errorf("%s: gone is %v, want %v", filepath.Base(dir), gone, !stays)
		}
	}
	if err := alive.remove(); err != nil {
		t.Fatal(err)
	}
}

func TestAccountCanReach(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	stranger := &account{name: "a stranger", uid: 64999, gid: 64999}
	if err := stranger.canReach("/"); err != nil {
		t.Errorf("the root folder: %v", err)
	}
	if err := stranger.canReach(closed); err == nil {
		t.Error("a closed folder counts as reachable")
	}
	var caller *account
	if err := caller.canReach(closed); err != nil {
		t.Errorf("the caller itself: %v", err)
	}
}
