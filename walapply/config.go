package walapply

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Config says what an [Applier] follows and how. Start from [DefaultConfig].
type Config struct {
	// DSN is a connection string for the database, of a role that has REPLICATION and owns schema koldstore. Required.
	DSN string
	// Publication names the tables to follow; default "koldproxy". It must exist before the slot does.
	Publication string

	// BatchRows is how many row changes one Apply call gets at most; default 8192. Whole source transactions are put
	// together up to it while there is a backlog; a larger one is handed over in pieces of it.
	BatchRows int
	// BatchBytes is the same as BatchRows in bytes of decoded rows; default 8 MiB. A single row may be larger.
	BatchBytes int
	// QueueBytes is how much may be received and decoded while a batch is being applied; default 12 MiB. Beyond it the
	// server waits.
	QueueBytes int
	// Linger is how long a source transaction may wait for others to share its apply transaction while more is arriving;
	// default 5 ms. Nothing waits when nothing more has arrived. Zero applies each source transaction on its own.
	Linger time.Duration

	// StatusInterval is the longest pause between two status updates to the server; default 10 s. It is shortened to a
	// third of the server's wal_sender_timeout.
	StatusInterval time.Duration
	// Lease is for how long leadership outlives a leader that does not answer any more; default 4 s, at least 100 ms.
	// The silence is measured by the server; a slow batch is none.
	Lease time.Duration
	// TakeoverInterval is how often an instance that does not lead tries to; default 500 ms.
	TakeoverInterval time.Duration
	// RetryMin and RetryMax bound the growing pause after an error; defaults 100 ms and 5 s.
	RetryMin, RetryMax time.Duration

	// LockWait is how long other sessions may keep the applier waiting for a lock on a relation that koldproxy owns (a log,
	// a mirror, its catalog) before they are terminated; default 30 s, 0 for ever.
	LockWait time.Duration

	// OnGap says what to do when changes may be missing: [OnGapHeal], the default, or [OnGapStop].
	OnGap string

	// WarnRetainedBytes is how much write-ahead log the slot may hold back before that is logged and shown; default 1 GiB,
	// 0 never. At MaxRetainedBytes the slot is given up and made anew, which is a gap, rather than let the log fill the
	// disk; default 0, never. Only the leader watches.
	WarnRetainedBytes, MaxRetainedBytes int64

	// WatchInterval is how often the publication is compared with the tables that are followed, and the log that the slot
	// holds back is measured; default 3 s.
	WatchInterval time.Duration

	// WhileLeading, if set, runs while this instance leads and the slot is in order. Its context ends with leadership,
	// and leadership is handed on only after it has returned. An error gives leadership up; nil just ends it.
	WhileLeading func(ctx context.Context) error
}

// DefaultConfig returns a Config for the database of dsn with every default filled in.
func DefaultConfig(dsn string) Config {
	return Config{
		DSN:              dsn,
		Publication:      "koldproxy",
		BatchRows:        8 << 10,
		BatchBytes:       8 << 20,
		QueueBytes:       12 << 20,
		Linger:           5 * time.Millisecond,
		StatusInterval:   10 * time.Second,
		Lease:            4 * time.Second,
		TakeoverInterval: 500 * time.Millisecond,
		RetryMin:         100 * time.Millisecond,
		RetryMax:         5 * time.Second,
		LockWait:         30 * time.Second,
		WatchInterval:    3 * time.Second,
		OnGap:            OnGapHeal,

		WarnRetainedBytes: 1 << 30,
	}
}

// What [Config.OnGap] may be.
const (
	// OnGapHeal makes a new slot and has every feed compared with its table; streams go on with a hole that they show.
	OnGapHeal = "heal"
	// OnGapStop applies nothing until somebody calls koldstore.heal_gap().
	OnGapStop = "stop"
)

// Validate reports everything that is wrong with c, in the terms of the configuration file. Nothing of the DSN is repeated.
func (c Config) Validate() error {
	var errs []error
	if _, err := pgx.ParseConfig(c.DSN); err != nil || c.DSN == "" {
		errs = append(errs, errors.New("postgres.dsn: not a connection string"))
	}
	if c.Publication == "" || len(c.Publication) > 63 {
		errs = append(errs, errors.New("apply.publication: want a name of 1 to 63 bytes"))
	}
	if c.OnGap != OnGapHeal && c.OnGap != OnGapStop {
		errs = append(errs, fmt.Errorf("apply.on_gap: want %q or %q, not %q", OnGapHeal, OnGapStop, c.OnGap))
	}
	if c.WarnRetainedBytes < 0 || c.MaxRetainedBytes < 0 {
		errs = append(errs, errors.New("apply.warn_retained_mib, apply.max_retained_mib: want 0 or a positive number"))
	}
	for _, n := range []struct {
		key   string
		value int
	}{
		{"apply.batch_rows", c.BatchRows},
		{"apply.batch_bytes", c.BatchBytes},
		{"apply.queue_bytes", c.QueueBytes},
	} {
		if n.value <= 0 {
			errs = append(errs, fmt.Errorf("%s: want a positive number, not %d", n.key, n.value))
		}
	}
	for _, d := range []struct {
		key        string
		value, low time.Duration
	}{
		{"apply.linger", c.Linger, 0},
		{"apply.status_interval", c.StatusInterval, time.Millisecond},
		{"apply.lease", c.Lease, 100 * time.Millisecond},
		{"apply.takeover_interval", c.TakeoverInterval, time.Millisecond},
		{"apply.retry_min", c.RetryMin, time.Millisecond},
		{"apply.retry_max", c.RetryMax, c.RetryMin},
		{"apply.lock_wait", c.LockWait, 0},
		{"apply.watch_interval", c.WatchInterval, time.Millisecond},
	} {
		if d.value < d.low {
			errs = append(errs, fmt.Errorf("%s: want at least %v, not %v", d.key, d.low, d.value))
		}
	}
	return errors.Join(errs...)
}
