package storetest

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/koldproxy/koldproxy/coldstore"
)

// ErrFault is the error of an operation that was made to fail.
var ErrFault = errors.New("storetest: injected fault")

// Faults is a bucket that fails on purpose: the n-th operation since [Faults.FailAt] returns [ErrFault].
type Faults struct {
	coldstore.Bucket

	mu   sync.Mutex
	left int
	lost bool
}

// FailAt makes the n-th operation from now on fail, counted from 1; zero makes none fail. With lost the operation is
// carried out and only its answer is lost.
func (f *Faults) FailAt(n int, lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left, f.lost = n, lost
}

// Pending says whether a fault is still to come.
func (f *Faults) Pending() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left > 0
}

// hit counts an operation: fail now, and whether to do the work first.
func (f *Faults) hit() (fail, lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 {
		return false, false
	}
	f.left--
	return f.left == 0, f.lost
}

// PutIfAbsent implements [coldstore.Bucket].
func (f *Faults) PutIfAbsent(ctx context.Context, key string, r io.Reader, size int64) error {
	fail, lost := f.hit()
	if fail && !lost {
		return ErrFault
	}
	err := f.Bucket.PutIfAbsent(ctx, key, r, size)
	if fail {
		return ErrFault
	}
	return err
}

// Get implements [coldstore.Bucket].
func (f *Faults) Get(ctx context.Context, key string) (io.ReadCloser, coldstore.ObjectInfo, error) {
	if fail, _ := f.hit(); fail {
		return nil, coldstore.ObjectInfo{}, ErrFault
	}
	return f.Bucket.Get(ctx, key)
}

// GetRange implements [coldstore.Bucket].
func (f *Faults) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	if fail, _ := f.hit(); fail {
		return nil, ErrFault
	}
	return f.Bucket.GetRange(ctx, key, version, off, n)
}

// Head implements [coldstore.Bucket].
func (f *Faults) Head(ctx context.Context, key string) (coldstore.ObjectInfo, error) {
	if fail, _ := f.hit(); fail {
		return coldstore.ObjectInfo{}, ErrFault
	}
	return f.Bucket.Head(ctx, key)
}

// Delete implements [coldstore.Bucket].
func (f *Faults) Delete(ctx context.Context, key string) error {
	fail, lost := f.hit()
	if fail && !lost {
		return ErrFault
	}
	err := f.Bucket.Delete(ctx, key)
	if fail {
		return ErrFault
	}
	return err
}
