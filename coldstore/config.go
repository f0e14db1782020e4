package coldstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
)

// Config says how a [Store] works. Start from [DefaultConfig].
type Config struct {
	// TempDir is where files are written before they are uploaded; empty means the system's folder for temporary files.
	TempDir string
	// RowGroupRows and RowGroupBytes close a row group of a file, whichever comes first; bytes are those of the rows' JSON. A
	// flush holds one row group in memory, as it will be in the file.
	RowGroupRows  int
	RowGroupBytes int64
	// MaxFileBytes closes a file, in bytes of the rows' JSON, also when it has fewer rows than the table's max_rows_per_file.
	MaxFileBytes int64
	// MaxPageBytes bounds the JSON of one page with more than one row; a request for more is refused with 54000.
	MaxPageBytes int64
	// CacheBytes bounds the memory for opened segments (footers and seqs), which get half of it, and for rows that were decoded lately.
	CacheBytes int64
	// DeleteGrace is how long an object outlives its segment, so that readers with an older snapshot can finish.
	DeleteGrace time.Duration
	// InProgressTimeout is how old a segment that never became active must be before the sweep removes it.
	InProgressTimeout time.Duration
	// DeadHistory is how long pages can be read as of a generation that has been superseded.
	DeadHistory time.Duration
	// PollInterval is the longest time between two looks at the queue; a notification comes sooner.
	PollInterval time.Duration
	// PolicyInterval is the time between two looks at which tables are due for an automatic flush.
	PolicyInterval time.Duration
	// NoCompaction leaves segments as flushes have made them.
	NoCompaction bool
	// Flushers is how many tables are flushed at the same time; each holds a row group in memory and a connection.
	Flushers int
	// RetryAfter is how long a table is left alone after an automatic flush or a compaction of it failed.
	RetryAfter time.Duration
	// OpenStorage opens a storage that was registered in the database. Its errors are shown to people and must not hold secrets. Nil
	// means that only the bucket of New is used.
	OpenStorage func(ctx context.Context, spec StorageSpec) (Bucket, error)
	// Registerer takes the metrics; nil keeps them unseen.
	Registerer prometheus.Registerer
	// Now is the clock that ages are measured by; nil means time.Now.
	Now func() time.Time
	// Fence is called first in every transaction that changes the manifest. It returns an error unless this process is still
	// the leader, and locks what makes that stay true until the transaction ends. Nil means that nobody else is around.
	Fence func(ctx context.Context, tx pgx.Tx) error
	// Failpoint, for tests, is called with the name of every step; its error makes the step fail. Nil means none.
	Failpoint func(step string) error
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		RowGroupRows:      128 << 10,
		RowGroupBytes:     64 << 20,
		MaxFileBytes:      512 << 20,
		MaxPageBytes:      64 << 20,
		CacheBytes:        64 << 20,
		DeleteGrace:       10 * time.Minute,
		InProgressTimeout: time.Hour,
		DeadHistory:       time.Hour,
		PollInterval:      time.Second,
		PolicyInterval:    30 * time.Second,
		Flushers:          2,
		RetryAfter:        time.Minute,
	}
}

// Validate reports all problems at once.
func (c *Config) Validate() error {
	var errs []error
	for name, v := range map[string]int64{
		"row_group_rows": int64(c.RowGroupRows), "row_group_bytes": c.RowGroupBytes, "max_file_bytes": c.MaxFileBytes, "max_page_bytes": c.MaxPageBytes,
		"cache_bytes": c.CacheBytes, "poll_interval": int64(c.PollInterval), "policy_interval": int64(c.PolicyInterval),
		"in_progress_timeout": int64(c.InProgressTimeout), "flushers": int64(c.Flushers),
	} {
		if v <= 0 {
			errs = append(errs, fmt.Errorf("cold.%s must be positive", name))
		}
	}
	for name, v := range map[string]time.Duration{"delete_grace": c.DeleteGrace, "dead_history": c.DeadHistory, "retry_after": c.RetryAfter} {
		if v < 0 {
			errs = append(errs, fmt.Errorf("cold.%s must not be negative", name))
		}
	}
	return errors.Join(errs...)
}

// fence calls Fence if there is one.
func (c *Config) fence(ctx context.Context, tx pgx.Tx) error {
	if c.Fence == nil {
		return nil
	}
	if err := c.Fence(ctx, tx); err != nil {
		return fmt.Errorf("leadership: %w", err)
	}
	return nil
}

// step names a step for tests that make it fail.
func (c *Config) step(name string) error {
	if c.Failpoint == nil {
		return nil
	}
	if err := c.Failpoint(name); err != nil {
		return fmt.Errorf("failpoint %s: %w", name, err)
	}
	return nil
}
