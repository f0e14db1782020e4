package coldstore

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/parquet"
)

// objectReader gives the Parquet library random access to one version of an object, for the length of one call.
type objectReader struct {
	ctx  context.Context //nolint:containedctx // lives for one call
	f    *segmentFile
	open ObjectReader // nil where the bucket cannot keep an object open
	buf  []byte       // for blocks of open
	pos  int64
}

var _ parquet.ReaderAtSeeker = (*objectReader)(nil)

func newObjectReader(ctx context.Context, f *segmentFile) (*objectReader, error) {
	r := &objectReader{ctx: ctx, f: f}
	opener, ok := f.bucket.(Opener)
	if !ok {
		return r, nil
	}
	var err error
	r.open, err = opener.Open(ctx, f.object, f.verified.version)
	return r, err
}

// A column is read in pieces of this size, from the page on that is wanted: small where reading costs next to nothing, and about two
// pages where each piece is a request.
const (
	nearBytes = 16 << 10
	farBytes  = 256 << 10
)

func (r *objectReader) bufferBytes() int64 {
	if r.open != nil {
		return nearBytes
	}
	return farBytes
}

// close may be called whatever has happened.
func (r *objectReader) close() error {
	if r == nil || r.open == nil {
		return nil
	}
	return r.open.Close()
}

// ReadAt implements io.ReaderAt.
func (r *objectReader) ReadAt(p []byte, off int64) (int, error) {
	n := min(int64(len(p)), r.f.size-off)
	if n < 0 || off < 0 {
		return 0, io.EOF
	}
	if n > 0 {
		if err := r.f.readBlocks(p[:n], off, r.read); err != nil {
			return 0, err
		}
	}
	if int(n) < len(p) {
		return int(n), io.EOF
	}
	return int(n), nil
}

// read reads n bytes, which may be changed by the next call.
func (r *objectReader) read(off, n int64) ([]byte, error) {
	if r.open == nil {
		return r.f.bucket.GetRange(r.ctx, r.f.object, r.f.verified.version, off, n)
	}
	if err := r.ctx.Err(); err != nil {
		return nil, err
	}
	r.buf = sized(r.buf, int(n))
	_, err := r.open.ReadAt(r.buf, off)
	if errors.Is(err, io.EOF) { // it has become shorter
		err = &CorruptError{Object: r.f.object, Offset: off, Reason: fmt.Sprintf("it ends within %d bytes", n)}
	}
	return r.buf, err
}

// Read implements io.Reader.
func (r *objectReader) Read(p []byte) (int, error) {
	n, err := r.ReadAt(p, r.pos)
	r.pos += int64(n)
	return n, err
}

// Seek implements io.Seeker.
func (r *objectReader) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += r.pos
	case io.SeekEnd:
		offset += r.f.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	r.pos = offset
	return offset, nil
}
