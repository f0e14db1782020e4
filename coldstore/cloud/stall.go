package cloud

import (
	"context"
	"io"
	"sync/atomic"
	"time"
)

// stall ends a context when nothing has happened for a while. A slow transfer is no reason to give up, one that stands still is:
// a deadline for the whole would not tell them apart.
type stall struct {
	parent   context.Context //nolint:containedctx // lives for one operation
	ctx      context.Context //nolint:containedctx // the same
	cancel   context.CancelFunc
	timer    *time.Timer
	patience time.Duration
	fired    atomic.Bool
}

func startStall(ctx context.Context, patience time.Duration) *stall {
	s := &stall{parent: ctx, patience: patience}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.timer = time.AfterFunc(patience, func() {
		s.fired.Store(true)
		s.cancel()
	})
	return s
}

// progress begins the wait anew.
func (s *stall) progress() { s.timer.Reset(s.patience) }

// allow lets the rest take so long.
func (s *stall) allow(patience time.Duration) {
	s.patience = patience
	s.progress()
}

func (s *stall) stalled() bool { return s.fired.Load() }

func (s *stall) end() {
	s.timer.Stop()
	s.cancel()
}

// progressReader reads and says that something happened.
type progressReader struct {
	io.ReadCloser
	stall *stall
}

// Read implements io.Reader.
func (r progressReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if n > 0 {
		r.stall.progress()
	}
	return n, err
}

// Close implements io.Closer.
func (r progressReader) Close() error {
	defer r.stall.end()
	return r.ReadCloser.Close()
}

// progressWriter writes and says that something happened.
type progressWriter struct {
	w     io.Writer
	stall *stall
}

// Write implements io.Writer.
func (w progressWriter) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	w.stall.progress()
	return n, err
}
