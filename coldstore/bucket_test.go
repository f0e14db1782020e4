package coldstore_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/storetest"
)

func TestLocalBucketKeepsTheContract(t *testing.T) {
	t.Parallel()
	storetest.TestBucket(t, func(t *testing.T) coldstore.Bucket {
		t.Helper()
		b, err := coldstore.OpenBucket("file://" + t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		return b
	})
}

func TestLocalBucketStaysInItsFolder(t *testing.T) {
	t.Parallel()
	outside, base := t.TempDir(), t.TempDir()
	write(t, filepath.Join(outside, "secret"), "secret")
	for name, target := range map[string]string{"out": outside, "file": filepath.Join(outside, "secret")} {
		if err := os.Symlink(target, filepath.Join(base, name)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := coldstore.OpenLocalBucket(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"out/secret", "file"} {
		if _, err := b.Head(t.Context(), key); err == nil {
			t.Errorf("head followed a link out of the folder: %s", key)
		}
		if _, _, err := b.Get(t.Context(), key); err == nil {
			t.Errorf("get followed a link out of the folder: %s", key)
		}
	}
	if err := b.PutIfAbsent(t.Context(), "out/new", strings.NewReader("x"), 1); err == nil {
		t.Error("put followed a link out of the folder")
	}
	_ = b.Delete(t.Context(), "out/secret")
	if got, err := os.ReadFile(filepath.Join(outside, "secret")); err != nil || string(got) != "secret" {
		t.Errorf("the outside file is %q, %v", got, err)
	}
	if entries, _ := os.ReadDir(outside); len(entries) != 1 {
		t.Errorf("outside: %v", entries)
	}
}

func TestLocalBucketFilesArePrivateAndLeftoversGoWithTheKey(t *testing.T) {
	t.Parallel()
	base := filepath.Join(t.TempDir(), "new", "folder")
	b, err := coldstore.OpenLocalBucket(base)
	if err != nil {
		t.Fatal(err)
	}
	b.MakeFolderIf(func(context.Context) error { return nil })
	if err := b.PutIfAbsent(t.Context(), "16384/k", strings.NewReader("x"), 1); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{".": 0o700, "16384": 0o700, "16384/k": 0o600} {
		if info, err := os.Stat(filepath.Join(base, name)); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	// What a writer that was killed leaves is never listed, and goes when its key is deleted.
	leftover := filepath.Join(base, "16384", ".tmp-k-KILLED")
	write(t, leftover, "half")
	objects, err := b.List(t.Context(), "")
	if err != nil || len(objects) != 1 {
		t.Errorf("list: %v, %v", objects, err)
	}
	if err := b.Delete(t.Context(), "16384/k"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(leftover); !os.IsNotExist(err) {
		t.Errorf("the leftover is still there: %v", err)
	}
}

func TestLocalBucketWithoutItsFolderFails(t *testing.T) {
	t.Parallel()
	base := filepath.Join(t.TempDir(), "cold")
	b, err := coldstore.OpenLocalBucket(base)
	if err != nil {
		t.Fatal(err)
	}
	put := func() error { return b.PutIfAbsent(t.Context(), "k", strings.NewReader("x"), 1) }
	missing := func(when string) {
		t.Helper()
		err := put()
		if !errors.Is(err, coldstore.ErrNotStored) || errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), filepath.Dir(base)) {
			t.Errorf("put %s: %v", when, err)
		}
		// "The folder is gone" must not be taken for "this object was deleted".
		if _, err := b.Head(t.Context(), "k"); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("head %s: %v", when, err)
		}
		if _, err := os.Lstat(base); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s the folder was made: %v", when, err)
		}
	}
	missing("without leave to make the folder")
	why := coldstore.ErrInUse
	b.MakeFolderIf(func(context.Context) error { return why })
	missing("while segments should be there")
	if err := b.MakeFolder(t.Context()); !errors.Is(err, coldstore.ErrInUse) {
		t.Errorf("make: %v", err)
	}
	why = nil
	if err := put(); err != nil {
		t.Errorf("put into a folder that may be made: %v", err)
	}
	why = coldstore.ErrInUse
	if err := os.RemoveAll(base); err != nil {
		t.Fatal(err)
	}
	missing("after the folder was lost")
	write(t, base, "a file where the folder was")
	if err := put(); !errors.Is(err, coldstore.ErrNotStored) {
		t.Errorf("put into a file: %v", err)
	}
}

// TestLocalBucketInAnotherFolder is not led out of it by a symbolic link, whenever that was made, and makes its folder on the way.
func TestLocalBucketInAnotherFolder(t *testing.T) {
	t.Parallel()
	outside, parent := t.TempDir(), t.TempDir()
	if _, err := coldstore.OpenLocalBucketIn(parent, "../x"); err == nil {
		t.Error("a folder beside the parent was opened")
	}
	for name, target := range map[string]string{"out": outside, "up": "../" + filepath.Base(outside), "good": "a"} {
		if err := os.Symlink(target, filepath.Join(parent, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		folder string
		good   bool
	}{{"a/b", true}, {"a/../a/b", true}, {".", true}, {"good/b", true}, {"good/new", true}, {"out", false}, {"out/new", false}, {"up", false}, {"up/new", false}} {
		b, err := coldstore.OpenLocalBucketIn(parent, c.folder)
		if err != nil {
			t.Fatal(err)
		}
		b.MakeFolderIf(func(context.Context) error { return nil })
		if err := coldstore.RoundTrip(t.Context(), b); (err == nil) != c.good || err != nil && strings.Contains(err.Error(), parent) {
			t.Errorf("%s: %v", c.folder, err)
		}
	}
	if entries, _ := os.ReadDir(outside); len(entries) != 0 {
		t.Errorf("outside: %v", entries)
	}
}

// TestErrorsOfAFolderDoNotSayWhereItIs goes to where package os names whole paths.
func TestErrorsOfAFolderDoNotSayWhereItIs(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	b, err := coldstore.OpenLocalBucket(base)
	ok(t, err)
	ok(t, b.PutIfAbsent(t.Context(), "16384/k", strings.NewReader("x"), 1))
	hidden := func(what string, err error) {
		t.Helper()
		if err == nil || strings.Contains(err.Error(), base) {
			t.Errorf("%s: %v", what, err)
		}
	}
	o, err := b.Open(t.Context(), "16384/k", "")
	ok(t, err)
	_, err = o.ReadAt(make([]byte, 1), -1)
	hidden("read before the beginning", err)
	ok(t, o.Close())
	_, err = o.ReadAt(make([]byte, 1), 0)
	hidden("read what is closed", err)
	if !errors.Is(err, fs.ErrClosed) || !strings.Contains(err.Error(), "16384/k") {
		t.Errorf("read what is closed: %v", err)
	}
	hidden("close what is closed", o.Close())
	r, _, err := b.Get(t.Context(), "16384/k")
	ok(t, err)
	ok(t, r.Close())
	_, err = io.ReadAll(r)
	hidden("get what is closed", err)
	// A folder whose place is taken cannot be made.
	write(t, filepath.Join(base, "file"), "")
	b, err = coldstore.OpenLocalBucket(filepath.Join(base, "file", "folder"))
	ok(t, err)
	b.MakeFolderIf(func(context.Context) error { return nil })
	hidden("make", b.MakeFolder(t.Context()))
}

func TestOpenBucketRefusesWhatItCannotDo(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"s3://bucket/prefix": "names no folder", "gs://bucket": "names no folder", "azblob://c": "names no folder",
		"ftp://x": "unknown scheme", "/tmp/x": "unknown scheme", "file://tmp/x": "three slashes", "file:tmp": "absolute", "": "unknown scheme",
		"file:///tmp/x?sync=off": "no parameters",
	} {
		if _, err := coldstore.OpenBucket(url); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
