package changefeed

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"
)

// Object stores can be slow, or silent. So nobody waits for them while changes could be applied: a healing asks for a page of cold
// rows and has it when it comes by again (see [Config].Wake).

// errReading says that a page of cold rows is on its way.
var errReading = errors.New("a page of cold rows is being read")

const (
	// coldReads is how many pages are read at a time.
	coldReads = 4
	// coldReadTimeout bounds one of them.
	coldReadTimeout = time.Minute
)

// coldReader reads pages for healings, one at a time for each table. Its methods belong to the goroutine of the [Target].
type coldReader struct {
	cold  ColdPages
	wake  func()
	slots chan struct{}
	reads map[uint32]*coldRead // by table

	ctx    context.Context //nolint:containedctx // of all reads; close ends it
	cancel context.CancelFunc
	ended  *sync.WaitGroup
}

// coldRead is a page that has been asked for. page and err are there when done is closed.
type coldRead struct {
	request PageRequest
	done    chan struct{}
	page    Page
	err     error
}

func newColdReader(cold ColdPages, wake func()) *coldReader {
	r := &coldReader{cold: cold, wake: wake, slots: make(chan struct{}, coldReads)}
	r.reset()
	return r
}

func (r *coldReader) reset() {
	r.reads, r.ended = make(map[uint32]*coldRead), &sync.WaitGroup{}
	r.ctx, r.cancel = context.WithCancel(context.Background())
}

// page returns the page that a request is for if it has been read, and otherwise sees to it that it is being read and returns
// errReading. What was read for another request of the table is of no use.
func (r *coldReader) page(request PageRequest) (Page, error) {
	read := r.reads[request.Table]
	switch {
	case read == nil:
	case !read.ended():
		return Page{}, errReading
	case reflect.DeepEqual(read.request, request):
		delete(r.reads, request.Table)
		return read.page, read.err
	}
	read = &coldRead{request: request, done: make(chan struct{})}
	r.reads[request.Table] = read
	ctx := r.ctx
	r.ended.Go(func() { r.read(ctx, read) })
	return Page{}, errReading
}

func (r *coldReader) read(ctx context.Context, read *coldRead) {
	defer r.wake()
	defer close(read.done)
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		read.err = ctx.Err()
		return
	}
	ctx, cancel := context.WithTimeout(ctx, coldReadTimeout)
	defer cancel()
	read.page, read.err = r.cold.Page(ctx, read.request)
}

// reading says that a page of a table is still on its way.
func (r *coldReader) reading(table uint32) bool {
	read := r.reads[table]
	return read != nil && !read.ended()
}

// forget drops pages of tables that do not need them any more.
func (r *coldReader) forget(needs func(table uint32) bool) {
	for table, read := range r.reads {
		if read.ended() && !needs(table) {
			delete(r.reads, table)
		}
	}
}

func (r *coldRead) ended() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// close ends all reads. It does not wait for storage that does not react, but no longer than that for any other.
func (r *coldReader) close() {
	r.cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.ended.Wait()
	}()
	timer := time.NewTimer(farewellTimeout)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
	r.reset()
}
