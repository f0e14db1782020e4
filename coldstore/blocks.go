package coldstore

import (
	"fmt"
	"hash/maphash"
)

// verified is what is kept of an object that was read from end to end and compared with the catalog: its version, and a hash of each of its
// blocks. What is read of it later is compared with those, since a store, or what is in between, can be right once and wrong the next time.
type verified struct {
	version string
	blocks  []uint64
}

// blockBytes is the length of a block. What is read is rounded to whole blocks.
const blockBytes = 16 << 10

// blockSeed keys the hashes, which never leave the process: nobody can make a block that has a given one.
var blockSeed = maphash.MakeSeed()

// blockHasher hashes the blocks of what is written to it.
type blockHasher struct {
	hash   maphash.Hash
	filled int // bytes of the block at hand
	blocks []uint64
}

func newBlockHasher() *blockHasher {
	h := &blockHasher{}
	h.hash.SetSeed(blockSeed)
	return h
}

// Write implements io.Writer.
func (h *blockHasher) Write(p []byte) (int, error) {
	written := len(p)
	for len(p) > 0 {
		n := min(len(p), blockBytes-h.filled)
		_, _ = h.hash.Write(p[:n]) // which never fails
		h.filled += n
		p = p[n:]
		if h.filled == blockBytes {
			h.end()
		}
	}
	return written, nil
}

func (h *blockHasher) end() {
	if h.filled > 0 {
		h.blocks = append(h.blocks, h.hash.Sum64())
		h.hash.Reset()
		h.filled = 0
	}
}

// sums gives the hashes of all blocks, the last of which may be shorter.
func (h *blockHasher) sums() []uint64 {
	h.end()
	return h.blocks
}

// readBlocks fills p from off on, by way of read, which reads whole blocks, and compares these. What differs is read once more: bytes that
// went wrong on their way are right then.
func (f *segmentFile) readBlocks(p []byte, off int64, read func(off, n int64) ([]byte, error)) error {
	from := off - off%blockBytes
	n := min((off+int64(len(p))-from+blockBytes-1)/blockBytes*blockBytes, f.size-from)
	for attempt := 0; ; attempt++ {
		data, err := read(from, n)
		if err != nil {
			return err
		}
		bad := f.verified.wrong(data, from)
		if bad < 0 {
			copy(p, data[off-from:])
			return nil
		}
		if attempt > 0 {
			return &CorruptError{Object: f.object, Offset: bad, Reason: fmt.Sprintf("the %d bytes from there on are not those that were verified", min(blockBytes, f.size-bad))}
		}
	}
}

// wrong gives the offset of the first block of data that is not what it was, -1 if all are. data begins with a block, at off.
func (v *verified) wrong(data []byte, off int64) int64 {
	for ; len(data) > 0; off += blockBytes {
		block := data[:min(blockBytes, len(data))]
		if i := off / blockBytes; i >= int64(len(v.blocks)) || maphash.Bytes(blockSeed, block) != v.blocks[i] {
			return off
		}
		data = data[len(block):]
	}
	return -1
}
