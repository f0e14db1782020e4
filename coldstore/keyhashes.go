package coldstore

import (
	"encoding/binary"
	"sync"

	"github.com/google/uuid"
)

// keyHashes keeps the key hashes of active segments in memory, so that a flush, which compares its keys with those of the whole table, need
// not read all of them from the catalog each time. It is filled by what is published here and by what was read, up to a bound; what there
// is no room for is read again. It may be used concurrently.
type keyHashes struct {
	mu     sync.Mutex
	limit  int64 // how many hashes
	size   int64
	tables map[uint32]map[uuid.UUID][]int64
}

// keyHashesKept are 32 MB: those of 4 million rows.
const keyHashesKept = 4 << 20

func newKeyHashes(limit int64) *keyHashes {
	return &keyHashes{limit: limit, tables: map[uint32]map[uuid.UUID][]int64{}}
}

// get gives the hashes of a segment's rows, nil if they are not here. They must not be changed.
func (k *keyHashes) get(table uint32, segment uuid.UUID) []int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tables[table][segment]
}

// put takes the hashes of a segment's rows over if there is room for them, and says whether it has.
func (k *keyHashes) put(table uint32, segment uuid.UUID, hashes []int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, there := k.tables[table][segment]; there || k.size+int64(len(hashes)) > k.limit {
		return there
	}
	if k.tables[table] == nil {
		k.tables[table] = map[uuid.UUID][]int64{}
	}
	k.tables[table][segment] = hashes
	k.size += int64(len(hashes))
	return true
}

// keep forgets those segments of a table that are not among its active ones any more.
func (k *keyHashes) keep(table uint32, active map[uuid.UUID]*segmentRow) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, hashes := range k.tables[table] {
		if active[id] == nil {
			delete(k.tables[table], id)
			k.size -= int64(len(hashes))
		}
	}
}

// keepTables forgets tables that are not there any more.
func (k *keyHashes) keepTables(there func(table uint32) bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for table, segments := range k.tables {
		if there(table) {
			continue
		}
		for _, hashes := range segments {
			k.size -= int64(len(hashes))
		}
		delete(k.tables, table)
	}
}

// encodeHashes is what koldstore.segment.key_hashes holds; decodeHashes reads it into memory that may be reused.
func encodeHashes(hashes []int64) []byte {
	out := make([]byte, 0, 8*len(hashes))
	for _, h := range hashes {
		out = binary.BigEndian.AppendUint64(out, uint64(h))
	}
	return out
}

func decodeHashes(into []int64, data []byte) []int64 {
	into = into[:0]
	for ; len(data) >= 8; data = data[8:] {
		into = append(into, int64(binary.BigEndian.Uint64(data)))
	}
	return into
}
