package coldstore

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// defaultStorage is the storage of koldproxy's configuration, the one whose bucket a Store is made with.
const defaultStorage = "default"

// StorageSpec is a storage that was registered in the database (koldstore.register_storage). Credentials may hold secrets.
type StorageSpec struct {
	Name        string
	Type        string // filesystem, s3, gcs or azure
	BasePath    string
	Credentials json.RawMessage
	Config      json.RawMessage
}

// storages keeps the buckets of registered storages open. It may be used concurrently.
type storages struct {
	mu   sync.Mutex
	open map[string]openStorage
}

type openStorage struct {
	version int64 // of koldstore.storage
	bucket  Bucket
}

// bucketOf gives the bucket of a storage, opened with the credentials that it has now.
func (s *Store) bucketOf(ctx context.Context, name string) (Bucket, error) {
	if name == defaultStorage {
		return s.bucket, nil
	}
	spec := StorageSpec{Name: name}
	var version int64
	err := s.pool.QueryRow(ctx, "SELECT storage_type, coalesce(base_path, ''), credentials, config, version FROM koldstore.storage WHERE name = $1", name).
		Scan(&spec.Type, &spec.BasePath, &spec.Credentials, &spec.Config, &version)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("storage %q does not exist", name)
	}
	if err != nil {
		return nil, fmt.Errorf("look up storage %q: %w", name, err)
	}
	s.storages.mu.Lock()
	defer s.storages.mu.Unlock()
	before, ok := s.storages.open[name]
	if ok && before.version == version {
		return before.bucket, nil
	}
	if s.cfg.OpenStorage == nil {
		return nil, koldproxy.Errorf(koldproxy.CodeFeatureNotSupported, "storage %q cannot be used here, only the one named %s", name, defaultStorage)
	}
	bucket, err := s.cfg.OpenStorage(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("open storage %q: %w", name, err)
	}
	if local, ok := bucket.(*LocalBucket); ok {
		local.MakeFolderIf(func(ctx context.Context) error { return CheckUnused(ctx, s.pool, name) })
	}
	s.storages.open[name] = openStorage{version, bucket}
	if closer, isCloser := before.bucket.(io.Closer); isCloser {
		if err := closer.Close(); err != nil {
			s.log.Warn().Err(err).Str("storage", name).Msg("storage with its earlier credentials could not be closed")
		}
	}
	return bucket, nil
}

// CheckUnused returns nil if the catalog of a database, if there is one, names no segment that was written to a storage: if its folder
// is missing then, it has not been made yet. Otherwise it was lost, or is not mounted, and the error says so.
func CheckUnused(ctx context.Context, q interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, storage string,
) error {
	var there, used bool
	if err := q.QueryRow(ctx, "SELECT pg_catalog.to_regclass('koldstore.segment') IS NOT NULL").Scan(&there); err != nil {
		return fmt.Errorf("look for the catalog: %w", err)
	}
	if !there {
		return nil
	}
	// A segment that was given up before it was published has no checksum. Its object is no loss.
	if err := q.QueryRow(ctx, "SELECT EXISTS (SELECT FROM koldstore.segment WHERE storage = $1 AND sha256 <> '')", storage).Scan(&used); err != nil {
		return fmt.Errorf("look for segments in storage %q: %w", storage, err)
	}
	if used {
		return ErrInUse
	}
	return nil
}

// ErrInUse says that a storage must have objects.
var ErrInUse = errors.New("segments are in it: mount the volume, or restore the folder")

// Close lets go of the registered storages. The bucket that the Store was made with stays its owner's.
func (s *Store) Close() error {
	s.endPrefetch()
	s.storages.mu.Lock()
	defer s.storages.mu.Unlock()
	var errs []error
	for name, open := range s.storages.open {
		if closer, ok := open.bucket.(io.Closer); ok {
			errs = append(errs, closer.Close())
		}
		delete(s.storages.open, name)
	}
	return errors.Join(errs...)
}

// checkStorages tries storages whose registration asked for that, and notes the outcome where people look. One that has failed gets
// no tables, so it is tried again in each PolicyInterval.
func (s *Store) checkStorages(ctx context.Context) (bool, error) {
	rows, err := s.pool.Query(ctx, `SELECT name, check_error IS NOT NULL FROM koldstore.storage
		WHERE wants_check OR check_error IS NOT NULL AND checked_at < clock_timestamp() - $1::interval`, s.cfg.PolicyInterval)
	if err != nil {
		return false, fmt.Errorf("look for storages to check: %w", err)
	}
	type candidate struct {
		Name   string
		Failed bool
	}
	candidates, err := pgx.CollectRows(rows, pgx.RowToStructByPos[candidate])
	if err != nil {
		return false, fmt.Errorf("look for storages to check: %w", err)
	}
	for _, c := range candidates {
		name := c.Name
		var problem *string
		bucket, err := s.bucketOf(ctx, name)
		if err == nil {
			err = RoundTrip(ctx, bucket)
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		switch {
		case err != nil && !c.Failed:
			s.log.Warn().Err(err).Str("storage", name).Msg("storage cannot be used, and is tried again")
		case err == nil && c.Failed:
			s.log.Info().Str("storage", name).Msg("storage can be used now")
		}
		if err != nil {
			text := err.Error()
			problem = &text
		}
		if _, err := s.pool.Exec(ctx, "UPDATE koldstore.storage SET wants_check = false, checked_at = clock_timestamp(), check_error = $2 WHERE name = $1", name, problem); err != nil {
			return false, fmt.Errorf("note the check of storage %q: %w", name, err)
		}
	}
	return false, nil
}

// RoundTrip stores, reads and removes an object, to find out whether a bucket can be used.
func RoundTrip(ctx context.Context, bucket Bucket) error {
	const text = "koldproxy check"
	key := "check/" + strings.ToLower(rand.Text())
	if err := bucket.PutIfAbsent(ctx, key, strings.NewReader(text), int64(len(text))); err != nil {
		return err
	}
	raw, err := bucket.GetRange(ctx, key, "", 0, int64(len(text)))
	if err == nil && string(raw) != text {
		err = fmt.Errorf("object %s came back changed", key)
	}
	return errors.Join(err, bucket.Delete(ctx, key))
}
