package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/koldproxy/koldproxy/coldstore"
)

// TestBucket checks that the buckets that open makes keep the contract of [coldstore.Bucket]. Each call of open must give
// an empty one.
func TestBucket(t *testing.T, open func(t *testing.T) coldstore.Bucket) {
	t.Run("what was put is got back", func(t *testing.T) {
		b, data := open(t), bytes.Repeat([]byte("segment "), 10_000)
		put(t, b, "16384/a.parquet", data)
		info, err := b.Head(t.Context(), "16384/a.parquet")
		check(t, err)
		if info.Key != "16384/a.parquet" || info.SizeBytes != int64(len(data)) || info.Version == "" {
			t.Errorf("head: %+v", info)
		}
		if got := get(t, b, "16384/a.parquet"); !bytes.Equal(got, data) {
			t.Errorf("got %d bytes that differ from the %d put", len(got), len(data))
		}
		part, err := b.GetRange(t.Context(), "16384/a.parquet", info.Version, 8, 16)
		check(t, err)
		if string(part) != "segment segment " {
			t.Errorf("range: %q", part)
		}
	})
	t.Run("an empty object is an object", func(t *testing.T) {
		b := open(t)
		put(t, b, "empty", nil)
		if got := get(t, b, "empty"); len(got) != 0 {
			t.Errorf("got %d bytes", len(got))
		}
	})
	t.Run("a range that is not there is an error, never short", func(t *testing.T) {
		b := open(t)
		put(t, b, "k", []byte("0123456789"))
		for _, r := range [][2]int64{{0, 11}, {10, 1}, {-1, 2}, {2, -1}, {11, 0}, {1 << 62, 1 << 62}} {
			if got, err := b.GetRange(t.Context(), "k", "", r[0], r[1]); err == nil {
				t.Errorf("range %v: got %q without an error", r, got)
			}
		}
		if got, err := b.GetRange(t.Context(), "k", "", 10, 0); err != nil || len(got) != 0 {
			t.Errorf("empty range at the end: %q, %v", got, err)
		}
	})
	t.Run("another version is refused", func(t *testing.T) {
		b := open(t)
		put(t, b, "k", []byte("one"))
		if _, err := b.GetRange(t.Context(), "k", "no such version", 0, 3); !errors.Is(err, coldstore.ErrChanged) {
			t.Errorf("want ErrChanged, got %v", err)
		}
	})
	t.Run("a taken key stays as it is", func(t *testing.T) {
		b := open(t)
		put(t, b, "k", []byte("first"))
		err := b.PutIfAbsent(t.Context(), "k", strings.NewReader("second"), 6)
		if !errors.Is(err, fs.ErrExist) {
			t.Errorf("want fs.ErrExist, got %v", err)
		}
		if got := get(t, b, "k"); string(got) != "first" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("of many writers of a key exactly one wins", func(t *testing.T) {
		b := open(t)
		var wins atomic.Int64
		var won atomic.Value
		var group sync.WaitGroup
		for i := range 16 {
			group.Go(func() {
				data := fmt.Sprintf("writer %02d", i)
				switch err := b.PutIfAbsent(t.Context(), "folder/k", strings.NewReader(data), int64(len(data))); {
				case err == nil:
					wins.Add(1)
					won.Store(data)
				case !errors.Is(err, fs.ErrExist):
					t.Errorf("want fs.ErrExist, got %v", err)
				}
			})
		}
		group.Wait()
		if wins.Load() != 1 {
			t.Fatalf("%d writers won", wins.Load())
		}
		if got := get(t, b, "folder/k"); string(got) != won.Load() {
			t.Errorf("got %q, won by %q", got, won.Load())
		}
	})
	t.Run("a put that fails leaves nothing", func(t *testing.T) { testFailedPut(t, open) })
	t.Run("a missing object is fs.ErrNotExist", func(t *testing.T) {
		b := open(t)
		for _, key := range []string{"k", "folder/k"} {
			_, headErr := b.Head(t.Context(), key)
			_, _, getErr := b.Get(t.Context(), key)
			_, rangeErr := b.GetRange(t.Context(), key, "", 0, 1)
			for _, err := range []error{headErr, getErr, rangeErr} {
				if !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: want fs.ErrNotExist, got %v", key, err)
				}
			}
		}
	})
	t.Run("delete removes and may be repeated", func(t *testing.T) {
		b := open(t)
		put(t, b, "folder/k", []byte("x"))
		put(t, b, "folder/k2", []byte("x"))
		for range 2 {
			check(t, b.Delete(t.Context(), "folder/k"))
		}
		check(t, b.Delete(t.Context(), "nothing/here"))
		if keys := list(t, b, ""); keys != "folder/k2" {
			t.Errorf("left: %s", keys)
		}
		put(t, b, "folder/k", []byte("again"))
	})
	t.Run("list takes a prefix and sorts by bytes", func(t *testing.T) {
		b := open(t)
		for _, key := range []string{"b/2", "a/x/1", "a-b", "a/1", "ab", "b/1"} {
			put(t, b, key, []byte(key))
		}
		for prefix, want := range map[string]string{
			"": "a-b a/1 a/x/1 ab b/1 b/2", "a": "a-b a/1 a/x/1 ab", "a/": "a/1 a/x/1", "a/x": "a/x/1", "b/2": "b/2", "c": "",
		} {
			if got := list(t, b, prefix); got != want {
				t.Errorf("list %q: %s, want %s", prefix, got, want)
			}
		}
	})
	t.Run("keys that could escape are refused", func(t *testing.T) {
		b := open(t)
		for _, key := range []string{
			"", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "/", `a\b`, "a\x00b", "a/.hidden", "é", "a b", "a:b",
			strings.Repeat("a", 4096),
		} {
			_, headErr := b.Head(t.Context(), key)
			_, _, getErr := b.Get(t.Context(), key)
			_, rangeErr := b.GetRange(t.Context(), key, "", 0, 0)
			putErr := b.PutIfAbsent(t.Context(), key, strings.NewReader("x"), 1)
			for i, err := range []error{headErr, getErr, rangeErr, putErr, b.Delete(t.Context(), key)} {
				if err == nil {
					t.Errorf("key %q was accepted by operation %d", key, i)
				}
			}
		}
		if keys := list(t, b, ""); keys != "" {
			t.Errorf("left: %s", keys)
		}
	})
	t.Run("an ended context is an error", func(t *testing.T) {
		b := open(t)
		put(t, b, "k", []byte("x"))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, headErr := b.Head(ctx, "k")
		_, listErr := b.List(ctx, "")
		putErr := b.PutIfAbsent(ctx, "k2", strings.NewReader("x"), 1)
		for _, err := range []error{headErr, listErr, putErr, b.Delete(ctx, "k")} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("want context.Canceled, got %v", err)
			}
		}
		if keys := list(t, b, ""); keys != "k" {
			t.Errorf("left: %s", keys)
		}
	})
}

func testFailedPut(t *testing.T, open func(t *testing.T) coldstore.Bucket) {
	b := open(t)
	broken := errors.New("broken source")
	cases := map[string]struct {
		r    io.Reader
		size int64
	}{
		"too short":      {strings.NewReader("123"), 4},
		"too long":       {strings.NewReader("12345"), 4},
		"error midway":   {io.MultiReader(strings.NewReader("12"), errorReader{broken}), 4},
		"error at end":   {io.MultiReader(strings.NewReader("1234"), errorReader{broken}), 4},
		"empty, want 4":  {strings.NewReader(""), 4},
		"content, want0": {strings.NewReader("x"), 0},
	}
	for name, c := range cases {
		if err := b.PutIfAbsent(t.Context(), "folder/k", c.r, c.size); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, err := b.Head(t.Context(), "folder/k"); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("%s: something is there afterwards (%v)", name, err)
		}
	}
	if keys := list(t, b, ""); keys != "" {
		t.Errorf("left: %s", keys)
	}
	put(t, b, "folder/k", []byte("1234"))
}

type errorReader struct{ err error }

func (r errorReader) Read([]byte) (int, error) { return 0, r.err }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, b coldstore.Bucket, key string, data []byte) {
	t.Helper()
	check(t, b.PutIfAbsent(t.Context(), key, bytes.NewReader(data), int64(len(data))))
}

func get(t *testing.T, b coldstore.Bucket, key string) []byte {
	t.Helper()
	r, info, err := b.Get(t.Context(), key)
	check(t, err)
	data, err := io.ReadAll(r)
	check(t, errors.Join(err, r.Close()))
	if info.SizeBytes != int64(len(data)) {
		t.Errorf("get %s: %d bytes announced, %d read", key, info.SizeBytes, len(data))
	}
	return data
}

func list(t *testing.T, b coldstore.Bucket, prefix string) string {
	t.Helper()
	objects, err := b.List(t.Context(), prefix)
	check(t, err)
	keys := make([]string, len(objects))
	for i, o := range objects {
		keys[i] = o.Key
	}
	return strings.Join(keys, " ")
}
