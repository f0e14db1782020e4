package changefeed

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
)

// Config says how a [Target] works. Start from [DefaultConfig].
type Config struct {
	// Database is the name of the database, as [ColdPages] knows it.
	Database string
	// DSN is a connection string for it, of the role that koldproxy runs as; for the session that evaluates rows.
	DSN string
	// EvalTimeout is how long code of users (predicates, checks of domains) may take over one row before the row counts as
	// one that cannot be evaluated; default 10 s, at least 10 ms. It bounds a statement about several rows as well.
	EvalTimeout time.Duration
	// SeedRows is how many rows of an existing table one Background call copies into its mirror; default 2000.
	SeedRows int
	// Cold reads cold rows, beside the applying of changes, for the healing of tables with cold segments. Nil if there is no cold storage.
	Cold ColdPages
	// Wake has Background called soon. It is called from any goroutine, when cold rows have been read and when work that failed is to
	// be tried again, and must not block. Nil if Background is called all the time anyway.
	Wake func()
	// Committed, if set, is called after each commit. It must not block. [Tail.Wake] is meant to be called here.
	Committed func()
	// Now is the clock that seqs follow; default time.Now.
	Now func() time.Time
}

// DefaultConfig returns a Config for a database with every default filled in. DSN has none.
func DefaultConfig(database string) Config {
	return Config{Database: database, EvalTimeout: 10 * time.Second, SeedRows: 2000, Now: time.Now}
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	if c.Database == "" {
		errs = append(errs, errors.New("changefeed: no database"))
	}
	if c.DSN == "" {
		errs = append(errs, errors.New("changefeed: no DSN"))
	}
	if c.EvalTimeout < 10*time.Millisecond {
		errs = append(errs, errors.New("changefeed: eval timeout: want at least 10ms"))
	}
	if c.SeedRows < 1 || c.SeedRows > maxSeedRows {
		errs = append(errs, errors.New("changefeed: seed rows: want 1 to 1000000"))
	}
	if c.Now == nil {
		errs = append(errs, errors.New("changefeed: no clock"))
	}
	return errors.Join(errs...)
}

// maxSeedRows bounds [Config.SeedRows].
const maxSeedRows = 1_000_000

// The two directions of a page.
const (
	PageForward = koldproxy.PageForward // the first rows above After
	PageLast    = koldproxy.PageLast    // the newest rows
)

// PageRequest asks for rows from segments of a table.
type PageRequest struct {
	Database string
	Table    uint32
	// Generation is the state of the manifest that the asking statement saw. A page of another one is useless to it.
	Generation int64
	// Segments are those to look into; all of them were active in that generation.
	Segments []uuid.UUID
	// Mode is [PageForward] or [PageLast]; After counts for the former only, and is exclusive.
	Mode  string
	After koldproxy.Seq
	Limit int
}

// PageRow is one cold row. PK is a JSON object; Image is the row as a JSON object, or nil for a tombstone.
type PageRow struct {
	Seq   koldproxy.Seq   `json:"seq"`
	Op    koldproxy.Op    `json:"op"`
	PK    json.RawMessage `json:"pk"`
	Image json.RawMessage `json:"image"`
}

// Page is a number of cold rows in ascending order, without those that newer segments supersede.
type Page struct {
	Rows []PageRow
	// Through says, for a forward page, up to where it is complete.
	Through koldproxy.Seq
	// Complete says that nothing more is in the segments in this direction.
	Complete bool
}

// ColdPages reads cold storage.
type ColdPages interface {
	// Page returns at most req.Limit rows. It may be called concurrently. A *[koldproxy.Error] it returns is meant for the
	// client: KS002 if storage cannot be read.
	Page(ctx context.Context, req PageRequest) (Page, error)
}

// Publisher carries events to live subscribers.
type Publisher interface {
	// Publish hands one event to the subscribers of a topic ([koldproxy.StreamTopic]). It must not block: what cannot be
	// queued is dropped and counted. It may keep payload.
	Publish(topic string, payload []byte)
	// Consumers is the number of live subscribers of a topic.
	Consumers(topic string) int
	// Wants says whether somebody may be waiting for a topic's events. Who subscribes is counted before being told so.
	Wants(topic string) bool
}
