package coldstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"sync"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"golang.org/x/sync/errgroup"

	"github.com/koldproxy/koldproxy"
)

// segmentFile is an object whose content was verified. It holds the footer and every seq, but no open file and no rows, and
// is not changed after it was opened, so it may be used concurrently.
type segmentFile struct {
	bucket   Bucket
	object   string
	verified verified
	size     int64
	layout   *layout
	footer   *metadata.FileMetaData
	groups   []int // first row of each row group, and behind the last one the number of rows
	seqs     []koldproxy.Seq
	names    [][]byte // of the columns, as the beginning of a member of an object that is not the first: `, "name": `
	byName   map[string]int
	key      []int     // the key columns in jsonb's order; -1 for one that has another name now
	order    []int     // the columns in jsonb's order
	chunks   sync.Pool // of *chunk, for the memory of the next ones
}

// expected is what the catalog says about an object.
type expected struct {
	object string
	size   int64
	sha256 []byte
	rows   int64
	minSeq koldproxy.Seq
	maxSeq koldproxy.Seq
}

// openSegment reads an object once from end to end, compares it with what is expected, and only then decodes its footer.
// Damage is a *CorruptError.
func openSegment(ctx context.Context, bucket Bucket, want expected) (*segmentFile, error) {
	v, err := verifyObject(ctx, bucket, want)
	if err != nil {
		return nil, err
	}
	return reopenSegment(ctx, bucket, want, v)
}

// reopenSegment is openSegment for an object that was verified before.
func reopenSegment(ctx context.Context, bucket Bucket, want expected, v verified) (*segmentFile, error) {
	f := &segmentFile{bucket: bucket, object: want.object, verified: v, size: want.size}
	if err := f.with(ctx, f.readFooter); err != nil {
		return nil, err
	}
	switch n := int64(len(f.seqs)); {
	case n != want.rows:
		return nil, f.corrupt("%d rows instead of %d", n, want.rows)
	case n == 0:
		return nil, f.corrupt("no rows")
	case f.seqs[0] != want.minSeq || f.seqs[n-1] != want.maxSeq:
		return nil, f.corrupt("seqs %d to %d instead of %d to %d", f.seqs[0], f.seqs[n-1], want.minSeq, want.maxSeq)
	}
	for i := 1; i < len(f.seqs); i++ {
		if f.seqs[i] <= f.seqs[i-1] {
			return nil, f.corrupt("row %d is out of order", i)
		}
	}
	return f, nil
}

func verifyObject(ctx context.Context, bucket Bucket, want expected) (verified, error) {
	r, info, err := bucket.Get(ctx, want.object)
	if err != nil {
		return verified{}, err
	}
	hash, blocks := sha256.New(), newBlockHasher()
	n, err := io.Copy(io.MultiWriter(hash, blocks), r)
	if err = errors.Join(err, r.Close()); err != nil {
		return verified{}, fmt.Errorf("read object %s: %w", want.object, err)
	}
	if n != want.size {
		return verified{}, &CorruptError{Object: want.object, Offset: min(n, want.size), Reason: fmt.Sprintf("%d bytes instead of %d", n, want.size)}
	}
	if sum := hash.Sum(nil); !bytes.Equal(sum, want.sha256) {
		return verified{}, &CorruptError{Object: want.object, Offset: -1, Reason: fmt.Sprintf("sha256 is %x instead of %x", sum, want.sha256)}
	}
	return verified{version: info.Version, blocks: blocks.sums()}, nil
}

func (f *segmentFile) corrupt(format string, args ...any) error {
	return &CorruptError{Object: f.object, Offset: -1, Reason: fmt.Sprintf(format, args...)}
}

// guard runs a piece of decoding. The Parquet library panics on some kinds of damage; here that is an error like any other.
func (f *segmentFile) guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = f.corrupt("decoder stopped: %v", r)
		}
	}()
	return fn()
}

// with opens the object and the file in it for the length of fn.
func (f *segmentFile) with(ctx context.Context, fn func(r *file.Reader) error) error {
	err := f.guard(func() (err error) {
		source, err := newObjectReader(ctx, f)
		defer func() { err = errors.Join(err, source.close()) }()
		if err != nil {
			return err
		}
		properties := parquet.NewReaderProperties(nil)
		properties.BufferedStreamEnabled, properties.BufferSize = true, source.bufferBytes()
		options := []file.ReadOption{file.WithReadProps(properties)}
		if f.footer != nil {
			options = append(options, file.WithMetadata(f.footer))
		}
		r, err := file.NewParquetReader(source, options...)
		if err != nil {
			return err
		}
		return fn(r)
	})
	if err != nil {
		return fmt.Errorf("read object %s: %w", f.object, err)
	}
	return nil
}

func (f *segmentFile) readFooter(r *file.Reader) (err error) {
	f.footer = r.MetaData()
	if f.layout, err = readLayout(f.footer); err != nil {
		return err
	}
	f.byName = make(map[string]int, len(f.layout.columns))
	for i := range f.layout.columns {
		name := f.layout.columns[i].Name
		f.byName[name] = i
		f.names = append(f.names, append(appendString([]byte(", "), name), ": "...))
	}
	for i := range f.layout.columns {
		f.order = append(f.order, i)
	}
	slices.SortFunc(f.order, func(a, b int) int { return compareNames(f.layout.columns[a].Name, f.layout.columns[b].Name) })
	slices.SortFunc(f.layout.key, compareNames)
	for _, name := range f.layout.key {
		i, ok := f.byName[name]
		if !ok {
			i = -1
		}
		f.key = append(f.key, i)
	}
	rows := 0
	for g := range r.NumRowGroups() {
		f.groups = append(f.groups, rows)
		n := int(r.RowGroup(g).NumRows())
		seq := typed[int64]{required: true}
		if err := readColumn(r.RowGroup(g), colSeq, 0, n, &seq); err != nil {
			return err
		}
		for _, v := range seq.values {
			f.seqs = append(f.seqs, koldproxy.Seq(v))
		}
		rows += n
	}
	f.groups = append(f.groups, rows)
	return nil
}

// memory is roughly how many bytes the opened segment occupies.
func (f *segmentFile) memory() int64 {
	return int64(len(f.seqs)+len(f.verified.blocks))*8 + int64(len(f.groups))*int64(len(f.layout.columns)+systemColumns)*512 + 4096
}

// after returns the ordinal of the first row above a position.
func (f *segmentFile) after(seq koldproxy.Seq) int {
	return sort.Search(len(f.seqs), func(i int) bool { return f.seqs[i] > seq })
}

// readGap is how many rows in between are cheaper to decode than to seek over.
const readGap = 256

// rows reads the rows with the given ordinals, which must be ascending. Images are left out when only keys are wanted.
func (f *segmentFile) rows(ctx context.Context, ordinals []uint32, keysOnly bool) ([]Row, error) {
	out := make([]Row, 0, len(ordinals))
	err := f.with(ctx, func(r *file.Reader) (err error) {
		for len(ordinals) > 0 {
			if int(ordinals[0]) >= len(f.seqs) {
				return fmt.Errorf("row %d of %d does not exist", ordinals[0], len(f.seqs))
			}
			group := sort.SearchInts(f.groups, int(ordinals[0])+1) - 1
			n := 1
			for n < len(ordinals) && int(ordinals[n]) < f.groups[group+1] && ordinals[n]-ordinals[n-1] <= readGap {
				n++
			}
			if out, err = f.run(r, group, ordinals[:n], keysOnly, out); err != nil {
				return err
			}
			ordinals = ordinals[n:]
		}
		return nil
	})
	return out, err
}

// run reads neighbouring rows of one row group.
func (f *segmentFile) run(r *file.Reader, group int, ordinals []uint32, keysOnly bool, out []Row) (_ []Row, err error) {
	first, last := int(ordinals[0]), int(ordinals[len(ordinals)-1])
	c, ok := f.chunks.Get().(*chunk)
	if !ok {
		c = &chunk{f: f, op: typed[int32]{required: true}, columns: make([]codec, len(f.layout.columns))}
	}
	defer f.chunks.Put(c)
	pieces := []piece{{colOp, &c.op}, {colExact, &c.exact}, {colMissing, &c.missing}, {colKey, &c.pk}}
	for i := range c.columns {
		if keysOnly && !slices.Contains(f.key, i) {
			continue
		}
		if c.columns[i] == nil {
			if c.columns[i], err = f.layout.columns[i].codec(); err != nil {
				return nil, err
			}
		}
		pieces = append(pieces, piece{systemColumns + i, c.columns[i]})
	}
	if err := f.readColumns(r.RowGroup(group), pieces, first-f.groups[group], last-first+1); err != nil {
		return nil, err
	}
	var texts []byte
	for n, ordinal := range ordinals {
		if n == 1 { // rows are about as long as the first
			texts = slices.Grow(texts, (len(texts)+len(texts)/8)*(len(ordinals)-1))
		}
		var row Row
		if row, texts, err = c.row(int(ordinal)-first, keysOnly, texts); err != nil {
			return nil, fmt.Errorf("row %d: %w", ordinal, err)
		}
		row.Seq = f.seqs[ordinal]
		out = append(out, row)
	}
	return out, nil
}

// piece is a column and what reads its values.
type piece struct {
	column int
	into   codec
}

// farReads is how many columns are read at the same time where each is a request or some.
const farReads = 8

// readColumns reads n values of some columns, beginning at a row of the row group.
func (f *segmentFile) readColumns(group *file.RowGroupReader, pieces []piece, first, n int) error {
	if _, near := f.bucket.(Opener); near {
		for _, p := range pieces {
			if err := readColumn(group, p.column, first, n, p.into); err != nil {
				return err
			}
		}
		return nil
	}
	var reads errgroup.Group
	reads.SetLimit(farReads)
	for _, p := range pieces {
		reads.Go(func() error {
			return f.guard(func() error { return readColumn(group, p.column, first, n, p.into) })
		})
	}
	return reads.Wait()
}

// readColumn reads n values of one column, beginning at a row of the row group.
func readColumn(group *file.RowGroupReader, column, first, n int, into codec) error {
	chunk, err := group.Column(column)
	if err != nil {
		return fmt.Errorf("column %d: %w", column, err)
	}
	if first > 0 {
		if err := chunk.SeekToRow(int64(first)); err != nil {
			return fmt.Errorf("column %d: seek: %w", column, err)
		}
	}
	err = into.read(chunk, n)
	if errors.Is(err, errShort) && chunk.Err() != nil { // why it is short
		err = chunk.Err()
	}
	if err != nil {
		return fmt.Errorf("column %d: %w", column, err)
	}
	return nil
}

// hashes reads the key hash of every row.
func (f *segmentFile) hashes(ctx context.Context) ([]int64, error) {
	return required[int64](ctx, f, colHash)
}

// ops reads the op of every row.
func (f *segmentFile) ops(ctx context.Context) ([]int32, error) {
	return required[int32](ctx, f, colOp)
}

// required reads the whole of a column without nulls.
func required[T int32 | int64](ctx context.Context, f *segmentFile, column int) ([]T, error) {
	var all []T
	err := f.with(ctx, func(r *file.Reader) error {
		for g := range len(f.groups) - 1 {
			values := typed[T]{required: true}
			if err := readColumn(r.RowGroup(g), column, 0, f.groups[g+1]-f.groups[g], &values); err != nil {
				return err
			}
			all = append(all, values.values...)
		}
		return nil
	})
	return all, err
}
