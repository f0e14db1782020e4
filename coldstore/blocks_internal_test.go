package coldstore

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/koldproxy/koldproxy"
)

// flipping is a bucket whose ranges come with a bit that has changed on the way: each at the first time, or always.
type flipping struct {
	Bucket
	always bool

	mu    sync.Mutex
	seen  map[[2]int64]bool
	calls int
}

func (b *flipping) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	data, err := b.Bucket.GetRange(ctx, key, version, off, n)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil {
		b.seen = map[[2]int64]bool{}
	}
	known := b.seen[[2]int64{off, n}]
	b.seen[[2]int64{off, n}] = true
	b.calls++
	if err == nil && (b.always || !known) {
		bit := b.calls * 7919 % (8 * len(data))
		data[bit/8] ^= 1 << (bit % 8)
	}
	return data, err
}

// TestWhatIsReadLaterIsComparedToo: an object is compared with the catalog once, and what is read of it afterwards is decoded only if it is
// what was compared.
func TestWhatIsReadLaterIsComparedToo(t *testing.T) {
	t.Parallel()
	var rows []mirrorRow
	var ordinals []uint32
	for i := range 3000 {
		rows = append(rows, image(i+1, koldproxy.OpInsert, fmt.Sprintf(`{"id": %d}`, i), fmt.Sprintf(`{"id": %d, "body": "%s"}`, i, hash(i))))
		ordinals = append(ordinals, uint32(i))
	}
	f, b, want := store(t, &testLayout, rows, rowGroupLimits{rows: 1000, bytes: 1 << 20})
	if want.size <= 2*blockBytes {
		t.Fatalf("%d bytes are too few to show anything", want.size)
	}
	all, err := f.rows(t.Context(), ordinals, false)
	if err != nil {
		t.Fatal(err)
	}
	once := &flipping{Bucket: b}
	if f, err = openSegment(t.Context(), once, want); err != nil {
		t.Fatal(err)
	}
	if got, err := f.rows(t.Context(), ordinals, false); err != nil || !reflect.DeepEqual(got, all) {
		t.Errorf("with bits that change once: %d rows of %d, %v", len(got), len(all), err)
	}
	if once.calls < 10 {
		t.Errorf("only %d ranges were read", once.calls)
	}
	always := &flipping{Bucket: b, always: true}
	if _, err := openSegment(t.Context(), always, want); !IsCorrupt(err) {
		t.Errorf("opened with bits that change each time: %v", err)
	}
	f.bucket = always
	for range 50 {
		if got, err := f.rows(t.Context(), ordinals, false); !IsCorrupt(err) || len(got) != 0 {
			t.Fatalf("read with bits that change each time: %d rows, %v", len(got), err)
		}
	}
}

// gathering is a bucket whose ranges wait for each other, until some are asked for at the same time.
type gathering struct {
	Bucket
	want int

	mu       sync.Mutex
	now      int
	most     int
	gathered chan struct{}
}

func (b *gathering) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	b.mu.Lock()
	b.now++
	if b.now > b.most {
		if b.most = b.now; b.most == b.want {
			close(b.gathered)
		}
	}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.now--
		b.mu.Unlock()
	}()
	select {
	case <-b.gathered:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return b.Bucket.GetRange(ctx, key, version, off, n)
}

// TestColumnsOfAPageAreAskedForTogether: where each is a request, a page does not wait for them one after the other.
func TestColumnsOfAPageAreAskedForTogether(t *testing.T) {
	t.Parallel()
	l, image := wideTable()
	rows := benchRows(image, 100)
	for i := range rows {
		rows[i].PK = fmt.Appendf(nil, `{"id": %d}`, i+1)
	}
	f, b, _ := store(t, l, rows, rowGroupLimits{rows: 1000, bytes: 1 << 20})
	g := &gathering{Bucket: b, want: farReads, gathered: make(chan struct{})}
	f.bucket = g
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got, err := f.rows(ctx, []uint32{0, 1, 2, 99}, false)
	if err != nil || len(got) != 4 || string(got[3].Image) != string(rows[99].Image) {
		t.Fatalf("%d rows, %v", len(got), err)
	}
	if g.most != farReads {
		t.Errorf("%d requests at the same time instead of %d", g.most, farReads)
	}
}

func TestBlocksOfAnyLength(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, blockBytes - 1, blockBytes, blockBytes + 1, 3 * blockBytes} {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i * 7)
		}
		h := newBlockHasher()
		for rest := data; len(rest) > 0; { // in pieces
			n := min(len(rest), 1000)
			_, _ = h.Write(rest[:n])
			rest = rest[n:]
		}
		v := verified{blocks: h.sums()}
		if at := v.wrong(data, 0); at >= 0 || len(v.blocks) != (size+blockBytes-1)/blockBytes {
			t.Errorf("%d bytes: %d blocks, wrong at %d", size, len(v.blocks), at)
		}
		if size > blockBytes {
			data[size-1] ^= 1
			last := int64(size-1) / blockBytes * blockBytes
			if at := v.wrong(data[last:], last); at != last {
				t.Errorf("%d bytes, the last one another: wrong at %d instead of %d", size, at, last)
			}
		}
		if at := v.wrong([]byte{1}, int64(size+blockBytes)/blockBytes*blockBytes); at < 0 {
			t.Errorf("%d bytes: more are right too", size)
		}
	}
}
