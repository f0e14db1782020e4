package cloud

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/koldproxy/koldproxy/coldstore"
)

// Bucket is a [coldstore.Bucket] in a cloud. It has to be closed when it is not used any more; closing it cuts nothing off that
// has already begun to be read.
type Bucket struct {
	blobs   *blob.Bucket
	dialect dialect
	options Options
}

// dialect is in what the clouds differ: how a read names the version it wants, and where an answer says its version.
type dialect struct {
	onlyVersion func(version string) func(as func(any) bool) error
	versionRead func(r *blob.Reader) string
	versionList func(o *blob.ListObject) string
	// wantsReader says that an upload must be given a reader: what is written to Azure in pieces goes through a pipe, and where the upload
	// fails the library of this version lets go of the pipe while it closes it, and panics.
	wantsReader bool
}

// Options say how patient a bucket is.
type Options struct {
	// Timeout bounds every request, and how long a transfer may stand still; zero means 30 seconds.
	Timeout time.Duration
}

const (
	defaultTimeout = 30 * time.Second
	// closeTimeouts is how many timeouts the end of an upload may take: up to two parts for each connection are still on their way.
	closeTimeouts = 10
	partBytes     = 8 << 20
	partsAtOnce   = 2
	contentType   = "application/vnd.apache.parquet"
)

var _ coldstore.Bucket = (*Bucket)(nil)

func newBucket(blobs *blob.Bucket, prefix string, d dialect, o Options) *Bucket {
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	if prefix != "" {
		blobs = blob.PrefixedBucket(blobs, prefix+"/")
	}
	return &Bucket{blobs: blobs, dialect: d, options: o}
}

// Close lets go of the connections. It may be called once.
func (b *Bucket) Close() error { return b.blobs.Close() }

// PutIfAbsent implements [coldstore.Bucket].
func (b *Bucket) PutIfAbsent(ctx context.Context, key string, r io.Reader, size int64) error {
	if err := coldstore.CheckKey(key); err != nil {
		return err
	}
	s := startStall(ctx, b.options.Timeout)
	defer s.end()
	options := &blob.WriterOptions{IfNotExist: true, ContentType: contentType, BufferSize: partBytes, MaxConcurrency: partsAtOnce}
	if b.dialect.wantsReader {
		err := b.blobs.Upload(s.ctx, key, &sizedReader{r: r, size: size, stall: s, rest: closeTimeouts * b.options.Timeout}, options) //nolint:contextcheck // the context of s comes from ctx
		return b.notPut(s, key, err)
	}
	w, err := b.blobs.NewWriter(s.ctx, key, options) //nolint:contextcheck // the context of s comes from ctx
	if err != nil {
		return b.failed(s, "put", key, err)
	}
	// One byte more than expected is enough to see that there is too much.
	n, err := io.Copy(progressWriter{w, s}, io.LimitReader(r, size+1))
	if err == nil && n != size {
		err = wrongSize(size)
	}
	if err != nil {
		s.cancel() // before closing: that is what keeps the object from appearing
		return b.failed(s, "put", key, errors.Join(err, ignoreCancelled(w.Close())))
	}
	s.allow(closeTimeouts * b.options.Timeout)
	return b.notPut(s, key, w.Close())
}

// notPut says what the error of an upload means.
func (b *Bucket) notPut(s *stall, key string, err error) error {
	if err == nil {
		return nil
	}
	if code := gcerrors.Code(err); code == gcerrors.FailedPrecondition || code == gcerrors.AlreadyExists {
		return fmt.Errorf("put %s: %w", key, fs.ErrExist)
	}
	return b.failed(s, "put", key, err)
}

func wrongSize(size int64) error {
	return fmt.Errorf("the source does not have the announced %d bytes", size)
}

// sizedReader reads what must have exactly so many bytes; what has not is an error, and nothing is stored.
type sizedReader struct {
	r     io.Reader
	size  int64
	read  int64
	stall *stall
	rest  time.Duration // what remains to be done after the last byte may take so long
}

// Read implements io.Reader.
func (r *sizedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.read += int64(n)
	r.stall.progress()
	if r.read > r.size || errors.Is(err, io.EOF) && r.read < r.size {
		return n, wrongSize(r.size)
	}
	if errors.Is(err, io.EOF) {
		r.stall.allow(r.rest)
	}
	return n, err
}

func ignoreCancelled(err error) error {
	if errors.Is(err, context.Canceled) || gcerrors.Code(err) == gcerrors.Canceled {
		return nil
	}
	return err
}

// Get implements [coldstore.Bucket].
func (b *Bucket) Get(ctx context.Context, key string) (io.ReadCloser, coldstore.ObjectInfo, error) {
	if err := coldstore.CheckKey(key); err != nil {
		return nil, coldstore.ObjectInfo{}, err
	}
	s := startStall(ctx, b.options.Timeout)
	r, err := b.blobs.NewReader(s.ctx, key, nil) //nolint:contextcheck // the context of s comes from ctx
	if err != nil {
		defer s.end()
		return nil, coldstore.ObjectInfo{}, b.failed(s, "get", key, err)
	}
	return &progressReader{r, s}, coldstore.ObjectInfo{Key: key, SizeBytes: r.Size(), Version: b.dialect.versionRead(r)}, nil
}

// GetRange implements [coldstore.Bucket]. A body that ends early is asked for once more.
func (b *Bucket) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	if err := coldstore.CheckKey(key); err != nil {
		return nil, err
	}
	if off < 0 || n < 0 || off+n < off {
		return nil, fmt.Errorf("get range of %s: %d bytes at %d: %w", key, n, off, io.ErrUnexpectedEOF)
	}
	data, err := b.getRange(ctx, key, version, off, n)
	if errors.Is(err, io.ErrUnexpectedEOF) && ctx.Err() == nil {
		data, err = b.getRange(ctx, key, version, off, n)
	}
	return data, err
}

func (b *Bucket) getRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	s := startStall(ctx, b.options.Timeout)
	defer s.end()
	var options blob.ReaderOptions
	if version != "" {
		options.BeforeRead = b.dialect.onlyVersion(version)
	}
	from, length := off, n
	if n == 0 { // no store has a request for nothing; what exists is asked for from its beginning
		from, length = 0, -1
	}
	r, err := b.blobs.NewRangeReader(s.ctx, key, from, length, &options) //nolint:contextcheck // the context of s comes from ctx
	if gcerrors.Code(err) == gcerrors.FailedPrecondition && version != "" {
		return nil, fmt.Errorf("get range of %s: %w", key, coldstore.ErrChanged)
	}
	if err != nil {
		return nil, b.failed(s, "get range of", key, err)
	}
	defer func() { _ = r.Close() }() // only read from
	// Stores that imitate others may not know the condition.
	if version != "" && b.dialect.versionRead(r) != version {
		return nil, fmt.Errorf("get range of %s: %w", key, coldstore.ErrChanged)
	}
	if off > r.Size()-n {
		return nil, fmt.Errorf("get range of %s: %d bytes at %d of %d: %w", key, n, off, r.Size(), errOutOfRange)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(progressReader{r, s}, data); err != nil {
		return nil, b.failed(s, "get range of", key, err)
	}
	return data, nil
}

var errOutOfRange = errors.New("the object is shorter")

// Head implements [coldstore.Bucket].
func (b *Bucket) Head(ctx context.Context, key string) (coldstore.ObjectInfo, error) {
	if err := coldstore.CheckKey(key); err != nil {
		return coldstore.ObjectInfo{}, err
	}
	r, info, err := b.Get(ctx, key) // the one answer that has the version in the same form everywhere
	if err != nil {
		return coldstore.ObjectInfo{}, err
	}
	return info, r.Close()
}

// List implements [coldstore.Bucket].
func (b *Bucket) List(ctx context.Context, prefix string) ([]coldstore.ObjectInfo, error) {
	s := startStall(ctx, b.options.Timeout)
	defer s.end()
	var objects []coldstore.ObjectInfo
	for it := b.blobs.List(&blob.ListOptions{Prefix: prefix}); ; s.progress() {
		o, err := it.Next(s.ctx) //nolint:contextcheck // the context of s comes from ctx
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, b.failed(s, "list", prefix, err)
		}
		objects = append(objects, coldstore.ObjectInfo{Key: o.Key, SizeBytes: o.Size, Version: b.dialect.versionList(o)})
	}
	slices.SortFunc(objects, func(a, b coldstore.ObjectInfo) int { return strings.Compare(a.Key, b.Key) })
	return objects, nil
}

// Delete implements [coldstore.Bucket].
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := coldstore.CheckKey(key); err != nil {
		return err
	}
	s := startStall(ctx, b.options.Timeout)
	defer s.end()
	err := b.blobs.Delete(s.ctx, key) //nolint:contextcheck // the context of s comes from ctx
	if err == nil {
		return nil
	}
	if err = b.failed(s, "delete", key, err); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// failed names what went wrong. A bucket that is not there must not look like one missing object, and HEAD answers both with
// the same 404, so that is asked for.
func (b *Bucket) failed(s *stall, op, key string, err error) error {
	switch {
	case s.parent.Err() != nil:
		return fmt.Errorf("%s %s: %w", op, key, s.parent.Err())
	case s.stalled():
		return fmt.Errorf("%s %s: nothing happened for %s: %w", op, key, s.patience, context.DeadlineExceeded)
	case gcerrors.Code(err) != gcerrors.NotFound:
		return fmt.Errorf("%s %s: %w", op, key, err)
	}
	s.progress()
	switch there, accessErr := b.blobs.IsAccessible(s.ctx); {
	case accessErr != nil:
		return fmt.Errorf("%s %s: %w", op, key, accessErr)
	case !there:
		return fmt.Errorf("%s %s: the bucket does not exist", op, key)
	}
	return fmt.Errorf("%s %s: %w", op, key, fs.ErrNotExist)
}
