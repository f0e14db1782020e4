package coldstore

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
)

// Store is the cold store of one database. All methods may be called concurrently. Between calls it has no
// open files, and at most one goroutine, which decodes what a reader is expected to want next; Close ends that and lets go of the storages
// that were registered in the database.
type Store struct {
	pool    *pgxpool.Pool
	bucket  Bucket
	log     zerolog.Logger
	cfg     Config
	metrics *metrics
	cache   *cache // of decodedBatch
	opened  opened
	hashes  *keyHashes
	storages

	mu       sync.Mutex
	running  map[uuid.UUID]*job   // the latest claims that are at work in this process
	writing  map[uuid.UUID]bool   // segments being written in this process
	requeue  bool                 // jobs may be left that say running and belong to nobody
	policyAt time.Time            // when to look at the policies next
	shrinkAt time.Time            // and at how much space mirrors take
	retryAt  map[uint32]time.Time // tables whose flush failed, and when an automatic one is tried again
	settled  map[chore]any        // what a table was like when there was nothing to do for it
	prefetch prefetcher
	presence *presence
	closed   bool
}

// chore is a kind of work for a table.
type chore struct {
	kind  string
	table uint32
}

// isSettled says whether a table is still as it was when there was nothing to do for it.
func (s *Store) isSettled(c chore, state any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled[c] == state
}

// settle notes that there is nothing to do for a table in a state, which must be comparable.
func (s *Store) settle(c chore, state any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settled[c] = state
}

// forgetSettled lets go of tables that are not there any more.
func (s *Store) forgetSettled(there func(table uint32) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hashes.keepTables(there)
	maps.DeleteFunc(s.settled, func(c chore, _ any) bool { return !there(c.table) })
}

// period is the time in steps of the PolicyInterval: how often it is worth looking again at what changes with time alone.
func (s *Store) period() int64 { return s.cfg.Now().UnixNano() / int64(s.cfg.PolicyInterval) }

// New makes the store of the database that pool connects to. The role must own schema koldstore (the one that ran the
// migrations). The pool needs three connections more than there are Flushers; where users may create functions, its sessions need search_path =
// pg_catalog, so that none of theirs is taken for one of PostgreSQL's.
func New(pool *pgxpool.Pool, bucket Bucket, log zerolog.Logger, cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	m := newMetrics(cfg.Registerer)
	return &Store{
		pool: pool, bucket: bucket, log: log, cfg: cfg, metrics: m, cache: newCache(cfg.CacheBytes/2, m.cacheBytes), opened: newOpened(cfg.CacheBytes/2, m.cacheBytes), hashes: newKeyHashes(keyHashesKept),
		running: map[uuid.UUID]*job{}, writing: map[uuid.UUID]bool{}, requeue: true, retryAt: map[uint32]time.Time{},
		settled: map[chore]any{}, storages: storages{open: map[string]openStorage{}}, presence: newPresence(),
	}, nil
}

// segment opens the file of a segment, from the cache if it is there and has not changed.
func (s *Store) segment(ctx context.Context, row *segmentRow) (*segmentFile, error) {
	if f := s.opened.file(row.id); f != nil {
		return f, nil
	}
	bucket, err := s.bucketOf(ctx, row.storage)
	if err != nil {
		return nil, err
	}
	if v, ok := s.opened.known(row.id); ok {
		if f, err := reopenSegment(ctx, bucket, row.expected(), v); err == nil {
			s.opened.put(row.id, f)
			return f, nil
		}
		s.opened.drop(row.id) // what is wrong, the whole object says
	}
	f, err := openSegment(ctx, bucket, row.expected())
	switch {
	case err == nil:
		s.metrics.verifications.WithLabelValues(statusOK).Inc()
		s.opened.put(row.id, f)
	case IsCorrupt(err):
		s.metrics.verifications.WithLabelValues(statusCorrupt).Inc()
	default:
		s.metrics.verifications.WithLabelValues(statusError).Inc()
	}
	return f, err
}

// readRows reads rows of a segment. If it cannot be read, or is not the object that was verified any more, it is opened and verified again, once; errors
// are KS002, except for those of ctx.
func (s *Store) readRows(ctx context.Context, row *segmentRow, ordinals []uint32, keysOnly bool) ([]Row, error) {
	for attempt := 0; ; attempt++ {
		f, err := s.segment(ctx, row)
		if err == nil {
			var rows []Row
			if rows, err = f.rows(ctx, ordinals, keysOnly); err == nil {
				return rows, nil
			}
			s.opened.drop(row.id)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		// Once more, with the storage's credentials of now: a fault of the network, a replaced object, a rotated key. Damage that was
		// read twice would only be read a third time.
		if attempt == 0 && !IsCorrupt(err) {
			continue
		}
		return nil, unreadable(row.id, row.object, err)
	}
}
