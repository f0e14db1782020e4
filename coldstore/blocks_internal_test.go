package coldstore

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/koldproxy/koldproxy"
)

// flipping is a bucket whose ranges come with a bit that has changed on the way: every second one, or all of them.
type flipping struct {
	Bucket
	always bool
	calls  atomic.Int64
}

func (b *flipping) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	data, err := b.Bucket.GetRange(ctx, key, version, off, n)
	if call := b.calls.Add(1); err == nil && len(data) > 0 && (b.always || call%2 == 1) {
		bit := int(call*7919) % (8 * len(data))
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
	if once.calls.Load() < 10 {
		t.Errorf("only %d ranges were read", once.calls.Load())
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
