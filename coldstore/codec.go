package coldstore

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/parquet"
)

// typed is the [codec] of one Go type. It keeps the values that are not null, and for every row whether it has one.
type typed[T any] struct {
	// quick, where there is one, reads the plain cases of raw values: those of which it is plain that format gives them back. The
	// others go through parse.
	quick  func(raw []byte) (T, bool)
	parse  func(raw []byte) (T, bool)
	format func(dst []byte, v T) []byte

	required bool // a column without nulls has no levels

	values  []T
	levels  []int16 // 1 for a value, 0 for null: Parquet's definition levels
	at      []int   // set by read where there are nulls: where in values the value of a row is
	scratch []byte
}

func (c *typed[T]) add(raw []byte) bool {
	if c.quick != nil {
		if v, ok := c.quick(raw); ok {
			c.addValue(v)
			return true
		}
	}
	v, ok := c.parse(raw)
	if !ok {
		return false
	}
	// The image is the truth: what would not come back byte for byte is not stored in this form.
	c.scratch = c.format(c.scratch[:0], v)
	if !bytes.Equal(c.scratch, raw) {
		return false
	}
	c.addValue(v)
	return true
}

func (c *typed[T]) addNull() { c.levels = append(c.levels, 0) }

func (c *typed[T]) addValue(v T) { c.values, c.levels = append(c.values, v), append(c.levels, 1) }

type batchWriter[T any] interface {
	WriteBatch(values []T, defLevels, repLevels []int16) (int64, error)
}

type batchReader[T any] interface {
	ReadBatch(batchSize int64, values []T, defLevels, repLevels []int16) (int64, int, error)
}

// pageCutter is what all writers of columns have beside their interface.
type pageCutter interface {
	EstimatedBufferedValueBytes() int64
	FlushCurrentPage() error
}

// page is how full the page of a column is that is being written.
type page struct {
	rows   int
	values int
}

// pageStep is after how many rows a page may be cut.
const pageStep = 1 << 10

func (c *typed[T]) write(w any, p *page) error {
	bw, ok := w.(batchWriter[T])
	cutter, cuts := w.(pageCutter)
	if !ok || !cuts {
		return fmt.Errorf("a writer of type %T for values of type %T", w, *new(T))
	}
	rows, at := len(c.levels), 0
	if c.required {
		rows = len(c.values)
	}
	for row := 0; row < rows; row += pageStep {
		n := min(pageStep, rows-row)
		values := n
		var levels []int16
		if !c.required {
			levels = c.levels[row : row+n]
			values = 0
			for _, level := range levels {
				values += int(level)
			}
		}
		// A page is cut only where a value follows: the library's writer of differences cannot finish a page of nulls alone
		// after one with values.
		if values > 0 && p.values > 0 && (p.rows >= pageRows || cutter.EstimatedBufferedValueBytes() >= pageBytes) {
			if err := cutter.FlushCurrentPage(); err != nil {
				return err
			}
			*p = page{}
		}
		written, err := bw.WriteBatch(c.values[at:at+values], levels, nil)
		if err != nil {
			return err
		}
		if written != int64(values) {
			return fmt.Errorf("%d of %d values written", written, values)
		}
		at += values
		p.rows, p.values = p.rows+n, p.values+values
	}
	return nil
}

func (c *typed[T]) reset() {
	clear(c.values) // let go of what the values point to
	c.values, c.levels = c.values[:0], c.levels[:0]
}

// distinct says how many different values there are, and how many at all.
func (c *typed[T]) distinct() (different, all int) {
	switch values := any(c.values).(type) {
	case []int32:
		different = countDistinct(values)
	case []int64:
		different = countDistinct(values)
	case []float32:
		different = countDistinct(values)
	case []float64:
		different = countDistinct(values)
	case []parquet.ByteArray:
		different = countStrings(values)
	case []parquet.FixedLenByteArray:
		different = countStrings(values)
	}
	return different, len(c.values)
}

func countDistinct[T comparable](values []T) int {
	seen := make(map[T]struct{}, len(values))
	for _, v := range values {
		seen[v] = struct{}{}
	}
	return len(seen)
}

func countStrings[T ~[]byte](values []T) int {
	seen := make(map[string]struct{}, len(values))
	for _, v := range values {
		seen[string(v)] = struct{}{}
	}
	return len(seen)
}

func (c *typed[T]) read(r any, n int) error {
	br, ok := r.(batchReader[T])
	if !ok {
		return fmt.Errorf("a reader of type %T for values of type %T", r, *new(T))
	}
	c.values, c.levels, c.at = sized(c.values, n), c.levels[:0], c.at[:0]
	if !c.required {
		c.levels = sized(c.levels, n)
	}
	rows, present, err := br.ReadBatch(int64(n), c.values, c.levels, nil)
	if err != nil {
		return err
	}
	if rows != int64(n) {
		return fmt.Errorf("%d of %d rows: %w", rows, n, errShort)
	}
	c.values = c.values[:present]
	if c.required {
		return nil
	}
	next := 0
	for _, level := range c.levels {
		next += int(level)
	}
	if next != present {
		return fmt.Errorf("%d values for %d rows that have one: %w", present, next, errShort)
	}
	if present == n {
		return nil
	}
	c.at = sized(c.at, n)
	next = 0
	for i, level := range c.levels {
		c.at[i] = next
		next += int(level)
	}
	return nil
}

// sized is s with n elements, whatever they are.
func sized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

var errShort = errors.New("column ends early")

// present says whether value i is there, after read.
func (c *typed[T]) present(i int) bool { return c.required || c.levels[i] != 0 }

func (c *typed[T]) render(dst []byte, i int) []byte {
	if !c.present(i) {
		return dst
	}
	return c.format(dst, c.value(i))
}

// value is value i of those that were read; i must be present.
func (c *typed[T]) value(i int) T {
	if len(c.at) == 0 {
		return c.values[i]
	}
	return c.values[c.at[i]]
}
