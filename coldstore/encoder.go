package coldstore

import (
	"fmt"
	"io"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/file"
)

// batch is some rows of a file as typed columns, on their way from the writer to the encoder.
type batch struct {
	seq, hash typed[int64]
	op        typed[int32]
	exact     typed[parquet.ByteArray]
	missing   typed[parquet.ByteArray]
	key       typed[parquet.ByteArray]
	columns   []codec
	endsGroup bool
}

func newBatch(l *layout) (*batch, error) {
	b := &batch{seq: typed[int64]{required: true}, op: typed[int32]{required: true}, hash: typed[int64]{required: true}}
	for i := range l.columns {
		c, err := l.columns[i].codec()
		if err != nil {
			return nil, err
		}
		b.columns = append(b.columns, c)
	}
	return b, nil
}

func (b *batch) rows() int { return len(b.seq.values) }

func (b *batch) all() []codec {
	return append([]codec{colSeq: &b.seq, colOp: &b.op, colHash: &b.hash, colExact: &b.exact, colMissing: &b.missing, colKey: &b.key}, b.columns...)
}

func (b *batch) reset() {
	for _, c := range b.all() {
		c.reset()
	}
	b.endsGroup = false
}

// encoder writes batches of rows into a file, in a goroutine of its own: while it compresses one batch the next is filled. All
// columns of a row group are open at once and hold what they have compressed so far, which is a small part of the rows' size.
type encoder struct {
	layout *layout
	to     io.Writer
	full   chan *batch
	free   chan *batch
	done   chan struct{}
	failed atomic.Bool // err is set

	finished bool  // full is closed
	giveUp   bool  // set before full is closed
	err      error // read after done

	out   *file.Writer // begun with the first batch
	group file.BufferedRowGroupWriter
	pages []page // of the columns of group
}

// spareBatches are in circulation: one is filled, one waits and one is encoded.
const spareBatches = 3

// startEncoder begins the goroutine, which ends with finish.
func startEncoder(w io.Writer, l *layout) (*encoder, error) {
	e := &encoder{layout: l, to: w, full: make(chan *batch, 1), free: make(chan *batch, spareBatches), done: make(chan struct{})}
	for range spareBatches {
		b, err := newBatch(l)
		if err != nil {
			return nil, err
		}
		e.free <- b
	}
	go e.run()
	return e, nil
}

func (e *encoder) run() {
	defer close(e.done)
	first := true
	for b := range e.full {
		if e.err == nil {
			if e.err = e.encode(b); e.err != nil {
				e.failed.Store(true)
			}
		}
		if !first { // which is larger than those to come
			b.reset()
			e.free <- b
		}
		first = false
	}
	if e.err == nil && e.out != nil && !e.giveUp {
		if err := e.out.Close(); err != nil {
			e.err = fmt.Errorf("close segment file: %w", err)
		}
	}
}

// swap hands a full batch over and gives an empty one back.
func (e *encoder) swap(b *batch) (*batch, error) {
	if e.failed.Load() {
		return b, e.finish(false)
	}
	e.full <- b
	return <-e.free, nil
}

// finish waits until the file is complete, or given up.
func (e *encoder) finish(complete bool) error {
	if !e.finished {
		e.finished, e.giveUp = true, !complete
		close(e.full)
	}
	<-e.done
	return e.err
}

func (e *encoder) encode(b *batch) (err error) {
	if e.out == nil {
		if err := e.begin(b); err != nil {
			return err
		}
	}
	if e.group == nil {
		if e.group, err = e.out.AppendBufferedRowGroupChecked(); err != nil {
			return fmt.Errorf("begin row group: %w", err)
		}
		e.pages = make([]page, e.group.NumColumns())
	}
	for i, c := range b.all() {
		chunk, err := e.group.Column(i)
		if err == nil {
			err = c.write(chunk, &e.pages[i])
		}
		if err != nil {
			return fmt.Errorf("write column %d: %w", i, err)
		}
	}
	if b.endsGroup {
		if err := e.group.Close(); err != nil {
			return fmt.Errorf("close row group: %w", err)
		}
		e.group = nil
	}
	return nil
}

// begin opens the file. The first batch, which is larger than the others, shows which encodings suit the columns.
func (e *encoder) begin(sample *batch) error {
	root, err := e.layout.schema()
	if err != nil {
		return err
	}
	meta, err := e.layout.metadata()
	if err != nil {
		return err
	}
	// Only Write is passed on: closing the file, and syncing it, stays with its owner.
	e.out, err = file.NewParquetWriterWithError(struct{ io.Writer }{e.to}, root, file.WithWriterProps(properties(e.layout, sample)), file.WithWriteMetadata(meta))
	if err != nil {
		return fmt.Errorf("begin segment file: %w", err)
	}
	return nil
}
