package walapply

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// Target gives changes their meaning. All methods are called from one goroutine at a time.
type Target interface {
	// Reset forgets everything cached about the database; called when leadership begins, after a failed batch, and between
	// batches when something that streams or feeds need was dropped.
	Reset()
	// Apply writes what changes mean into tx. It takes positions from seqs in the order of changes. It may be called
	// several times within one transaction (a large source transaction arrives in chunks). The slice is reused after Apply
	// has returned; the rows and relations in it may be kept. tx has the settings of [Applier] (UTC, ISO dates, search_path
	// pg_catalog); Apply must not end it. After an error the transaction is rolled back and
	// the same changes come again, from the first chunk on.
	Apply(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) error
	// Background does one bounded unit of work that must be serialized with applying (a page of a seed) and says
	// whether more is waiting. It is called after Reset, after Apply if it is Due, after [Applier.Poke] and while there is more,
	// but only between batches.
	Background(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence) (more bool, err error)
	// Due says whether Background may have something to do, so that it need not be asked in a transaction. It must not block.
	Due() bool
	// Committed is called after the transaction of the last Apply or Background calls has committed. It must not block.
	Committed()
	// Close gives up connections and the like that the target holds on its own; called whenever applying ends, for
	// whatever reason. Reset comes before the next Apply.
	Close()
}

// Applier applies the changes of one database while it leads. Its methods may be called from any goroutine.
type Applier struct {
	cfg     Config
	conn    *pgx.ConnConfig
	target  Target
	log     zerolog.Logger
	metrics *Metrics

	poked    chan struct{}
	epoch    atomic.Int64 // 0 while not leading
	received atomic.Uint64
	backlog  atomic.Int64

	mu     sync.Mutex
	status Status
	told   remembered
}

// Status is a snapshot of an [Applier].
type Status struct {
	// Leading says whether this instance leads, Epoch which reign it is.
	Leading bool
	Epoch   int64
	// Streaming says whether the slot is being read right now.
	Streaming bool
	// Applied is the end of the last source transaction that was applied, Acknowledged what the slot was told; it runs
	// ahead of Applied where the log holds nothing for us. Received is the highest position seen. Zero while not leading.
	Applied, Acknowledged, Received koldproxy.LSN
	// LastCommit is the commit time of the last applied source transaction, by the server's clock; zero if there was none
	// since the start.
	LastCommit time.Time
	// Lag is the age of the oldest source transaction that is known and not applied yet, or for how long this instance has been
	// leading without streaming; 0 when nothing is behind, and while not leading.
	Lag time.Duration
	// BacklogBytes is the size of decoded changes in memory that have not been applied.
	BacklogBytes int64
	// RetainedBytes is the write-ahead log that the server keeps because of the slot, as of the last look.
	RetainedBytes int64
	// Err is why nothing is applied at the moment, or why applying began again and has not succeeded since. Nil when all
	// is well, and on an instance that waits for leadership.
	Err error
}

// New checks cfg and makes an Applier that does nothing until Run. Nil metrics count into the void.
func New(cfg Config, target Target, log zerolog.Logger, metrics *Metrics) (*Applier, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	conn, err := pgx.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, fmt.Errorf("parse the DSN: %w", err)
	}
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Applier{
		cfg: cfg, conn: conn, target: target, metrics: metrics, poked: make(chan struct{}, 1),
		log: log.With().Str("db", conn.Database).Logger(),
	}, nil
}

// Run competes for leadership and applies while it has it, until ctx ends; then it returns nil, with all connections closed.
// Nothing else makes it return: what goes wrong is logged once, shown in Status and tried again. It must not run twice at a time.
func (a *Applier) Run(ctx context.Context) error {
	retry := a.newRetry()
	for {
		err := a.contend(ctx, retry)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // being told to stop is how Run ends
		}
		if !retry.wait(ctx, err) {
			return nil
		}
	}
}

// Fence fails with [ErrNotLeader] unless this instance leads, judged inside tx and true until tx ends: the next leader begins
// only afterwards. It is for transactions next to the applier that only the leader may commit; keep them short.
func (a *Applier) Fence(ctx context.Context, tx pgx.Tx) error {
	epoch := a.epoch.Load()
	if epoch == 0 {
		return ErrNotLeader
	}
	return fence(ctx, tx, epoch)
}

// Poke makes Background run soon, if this instance leads. It never blocks.
func (a *Applier) Poke() { signal(a.poked) }

// Status returns a snapshot.
func (a *Applier) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.status
	if s.Leading {
		s.Received = koldproxy.LSN(a.received.Load())
		s.BacklogBytes = a.backlog.Load()
		s.Lag = a.metrics.lag.age()
	}
	return s
}

// update changes the stored status.
func (a *Applier) update(change func(s *Status)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.status)
}

// logAgain is how long an error that keeps coming back is not logged again.
const logAgain = time.Minute

// retry paces attempts and reports their errors, each distinct one once.
type retry struct {
	a       *Applier
	pause   time.Duration
	failing bool
	at      koldproxy.LSN // what had been received when it failed
	text    string        // the error that was logged last
	logged  time.Time     // when
}

func (a *Applier) newRetry() *retry { return &retry{a: a, pause: a.cfg.RetryMin} }

// wait reports err and sleeps for the current pause; it says false when ctx ended.
func (r *retry) wait(ctx context.Context, err error) bool {
	if err == nil {
		err = errors.New("leadership was given up")
	}
	r.failing, r.at = true, koldproxy.LSN(r.a.received.Load())
	r.a.metrics.errors.Inc()
	r.a.update(func(s *Status) { s.Err = err })
	if text := err.Error(); text != r.text || time.Since(r.logged) > logAgain {
		r.text, r.logged = text, time.Now()
		if setup, ok := errors.AsType[*SetupError](err); ok && setup.closes {
			r.a.log.Warn().Str("err", publicText(err)).Msg("changes may be missing, beginning anew")
		} else {
			r.a.log.Error().Str("err", publicText(err)).Str("sqlstate", sqlState(err)).Msg("applying changes failed, trying again")
		}
	}
	r.a.log.Debug().Err(err).Dur("pause", r.pause).Msg("applying changes failed")
	pause := r.pause
	r.pause = min(2*r.pause, r.a.cfg.RetryMax)
	return sleep(ctx, pause)
}

// passed says that everything up to position is done. That ends a failure if it had not come further: the first thing to be
// applied after a restart may be a smaller one than the batch that failed.
func (r *retry) passed(position koldproxy.LSN) {
	if !r.failing || position < r.at {
		return
	}
	r.failing, r.pause = false, r.a.cfg.RetryMin
	r.a.update(func(s *Status) { s.Err = nil })
	r.a.log.Info().Msg("applying changes works again")
}
