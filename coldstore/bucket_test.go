package coldstore_test

import (
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
	if err := os.Remove(base); err != nil {
		t.Fatal(err)
	}
	if err := b.PutIfAbsent(t.Context(), "k", strings.NewReader("x"), 1); err == nil {
		t.Error("put into a folder that is gone")
	}
	// "The folder is gone" must not be taken for "this object was deleted".
	if _, err := b.Head(t.Context(), "k"); err == nil || strings.Contains(err.Error(), "not exist") && os.IsNotExist(err) {
		t.Errorf("head: %v", err)
	}
	write(t, base, "a file where the folder was")
	if err := b.PutIfAbsent(t.Context(), "k", strings.NewReader("x"), 1); err == nil {
		t.Error("put into a file")
	}
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
