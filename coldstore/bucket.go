package coldstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"strings"
)

// Bucket stores objects. An object appears under its key whole or not at all, and is not changed afterwards. All methods
// may be called concurrently.
//
// Keys are relative slash-separated paths of letters, digits and "._-" whose elements do not begin with a dot. A key that
// is not like that is an error before anything is touched.
//
// Errors match fs.ErrNotExist for an object that is not there, fs.ErrExist for a key that is taken, and [ErrChanged].
type Bucket interface {
	// PutIfAbsent stores the size bytes of r under key. When it returns nil the object is durable. When r has fewer or more
	// bytes, or the key is taken, nothing is stored. After any other error the object may exist, whole.
	PutIfAbsent(ctx context.Context, key string, r io.Reader, size int64) error
	// Get opens an object for reading from its beginning. The caller closes it.
	Get(ctx context.Context, key string) (io.ReadCloser, ObjectInfo, error)
	// GetRange returns n bytes at off, all of them or an error. A version that is not empty must still be the object's;
	// otherwise the error matches ErrChanged.
	GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error)
	// Head describes an object.
	Head(ctx context.Context, key string) (ObjectInfo, error)
	// List describes the objects whose keys begin with prefix, in the order of their keys.
	List(ctx context.Context, prefix string) ([]ObjectInfo, error)
	// Delete removes an object and what an interrupted PutIfAbsent of its key may have left. A missing object is no error.
	Delete(ctx context.Context, key string) error
}

// ObjectInfo describes an object. Version names its content as the bucket sees it (an entity tag, or a time of change); it
// is opaque, and different after the object was replaced.
type ObjectInfo struct {
	Key       string
	SizeBytes int64
	Version   string
}

// Opener is a [Bucket] that can keep an object open, where opening it for every range would cost more than reading.
type Opener interface {
	// Open opens an object that must be the named version; otherwise the error matches ErrChanged. The result may be read by
	// one goroutine at a time, and is closed by the caller.
	Open(ctx context.Context, key, version string) (ObjectReader, error)
}

// ObjectReader reads ranges of an object.
type ObjectReader interface {
	io.ReaderAt
	io.Closer
}

// ErrChanged says that an object is not any more the version that was asked for.
var ErrChanged = errors.New("object has changed")

// ErrNotStored is matched by errors of PutIfAbsent after which certainly nothing is stored under the key. Other errors may leave it open.
var ErrNotStored = errors.New("nothing was stored")

// OpenBucket opens the bucket that a URL names: file:///absolute/path, a folder (see [OpenLocalBucket]). Package cloud opens those of
// other schemes.
func OpenBucket(rawURL string) (Bucket, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("cold storage URL: %w", err)
	}
	switch u.Scheme {
	case "file":
		if u.Host != "" && u.Host != "localhost" {
			return nil, fmt.Errorf("cold storage URL %s: want file:///absolute/path, with three slashes", u.Redacted())
		}
		if u.RawQuery != "" || u.Fragment != "" {
			return nil, fmt.Errorf("cold storage URL %s: a file URL takes no parameters", u.Redacted())
		}
		if !filepath.IsAbs(u.Path) {
			return nil, fmt.Errorf("cold storage URL %s: the path must be absolute", u.Redacted())
		}
		return OpenLocalBucket(u.Path)
	case "s3", "gs", "azblob":
		return nil, fmt.Errorf("cold storage URL: %s:// names no folder; package cloud opens it", u.Scheme)
	default:
		return nil, fmt.Errorf("cold storage URL: unknown scheme %q; use file:///absolute/path", u.Scheme)
	}
}

// maxKeyLen bounds a key in bytes; the store's own keys are much shorter.
const maxKeyLen = 512

// CheckKey says what is wrong with an object key, for those who implement [Bucket].
func CheckKey(key string) error {
	if key == "" || len(key) > maxKeyLen {
		return fmt.Errorf("object key %q: want 1 to %d bytes", key, maxKeyLen)
	}
	for element := range strings.SplitSeq(key, "/") {
		if element == "" || element[0] == '.' {
			return fmt.Errorf("object key %q: elements must not be empty or begin with a dot", key)
		}
		if strings.IndexFunc(element, notKeyRune) >= 0 {
			return fmt.Errorf("object key %q: only letters, digits and ._- are allowed", key)
		}
	}
	return nil
}

func notKeyRune(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
		return false
	}
	return true
}
