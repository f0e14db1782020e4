package changefeed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// Target writes what changes mean. It implements the interface of the same name in walapply and belongs to the goroutine of
// one database's applier; it must not be used concurrently.
type Target struct {
	cfg     Config
	log     zerolog.Logger
	metrics *Metrics

	cat     *catalog // nil: to be loaded
	origins map[*koldproxy.Relation][]int
	placed  map[*koldproxy.Relation][]int // see place
	tidied  bool                          // abandoned seed jobs have been looked for
	done    tally                         // in the transaction that is open
	marked  bool                          // that transaction has the savepoint of a run
	fresh   bool                          // and has written nothing since

	page        *backfillPage // waits for its marker; nil if there is none
	pageRows    int           // how many rows the next page of a backfill has
	cold        *coldReader
	naps        map[worker]nap
	forgetLater bool // the catalog is outdated once the transaction has committed

	eval     *evalSession
	timeouts map[suspect][]time.Time // when code of a stream or table took too long

	isStandby bool // the server counts the applier as a synchronous standby
}

// NewTarget makes a Target. Nil metrics count into the void.
func NewTarget(cfg Config, log zerolog.Logger, metrics *Metrics) (*Target, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	if cfg.Wake == nil {
		cfg.Wake = func() {}
	}
	eval, err := newEvalSession(cfg.DSN, cfg.EvalTimeout)
	if err != nil {
		return nil, err
	}
	t := &Target{
		cfg: cfg, log: log.With().Str("db", cfg.Database).Logger(), metrics: metrics, eval: eval, timeouts: make(map[suspect][]time.Time),
		cold: newColdReader(cfg.Cold, cfg.Wake), naps: make(map[worker]nap),
	}
	t.Reset()
	return t, nil
}

// Reset forgets everything cached about the database.
func (t *Target) Reset() {
	t.forget()
	t.placed = make(map[*koldproxy.Relation][]int)
	t.done, t.marked, t.fresh, t.isStandby = tally{}, false, false, false
	t.page, t.pageRows, t.forgetLater = nil, 0, false
}

// Close ends the session that evaluates rows, if it is open, and what is being read from cold storage. The Target can be used again
// afterwards.
func (t *Target) Close() {
	t.cold.close()
	t.eval.close(context.Background())
}

// forget makes the next use of the catalog load it.
func (t *Target) forget() {
	t.cat, t.origins, t.tidied = nil, make(map[*koldproxy.Relation][]int), false
}

// Committed counts what the committed transaction did.
func (t *Target) Committed() {
	t.metrics.add(t.done)
	t.done, t.marked, t.fresh = tally{}, false, false
	if t.forgetLater {
		t.forget()
		t.forgetLater = false
	}
	if t.cfg.Committed != nil {
		t.cfg.Committed()
	}
}

// Apply writes what changes mean into tx, in their order. It takes one position from seqs for each key that a change touches.
// The session must render dates in ISO style and UTC. After an error tx is of no use any more and Reset is due.
func (t *Target) Apply(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) error {
	if err := t.waitUntilVisible(ctx, tx, changes); err != nil {
		return err
	}
	for len(changes) > 0 {
		n, err := t.applyRun(ctx, tx, seqs, changes)
		if err != nil {
			return err
		}
		changes = changes[n:]
	}
	return nil
}

// applyRun applies a first part of changes and says how long it was: a single marker or truncate, or row changes up to the
// next of these.
func (t *Target) applyRun(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) (int, error) {
	if first := &changes[0]; isMarker(first) {
		t.fresh = false
		return 1, t.begin(ctx, tx, seqs, first)
	} else if first.Op == koldproxy.OpTruncate {
		return 1, t.applyTruncate(ctx, tx, seqs, first)
	}
	n := 1
	for n < len(changes) && !isMarker(&changes[n]) && changes[n].Op != koldproxy.OpTruncate {
		n++
	}
	return n, t.applyRows(ctx, tx, seqs, changes[:n])
}

func (t *Target) applyRows(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, changes []koldproxy.Change) error {
	if concerned, err := t.lookAt(ctx, tx, changes); err != nil || !concerned {
		return err
	}
	return t.repeatIfStale(ctx, tx, func(last bool) error {
		p := makePlan(t.cat, changes, t.origin)
		if p.count == 0 {
			return nil
		}
		p.number(seqs.Reserve(p.count, t.cfg.Now()))
		if err := t.resolveUnchanged(ctx, tx, &p); err != nil {
			return err
		}
		return t.write(ctx, tx, &p, last)
	})
}

// lookAt loads the catalog if need be, places the columns of relations that are new, and tells whether any change concerns a
// table in the catalog.
func (t *Target) lookAt(ctx context.Context, tx pgx.Tx, changes []koldproxy.Change) (concerned bool, err error) {
	if len(t.placed) > maxRelations {
		t.placed = make(map[*koldproxy.Relation][]int)
		t.forget()
	}
	if err := t.load(ctx, tx); err != nil {
		return false, err
	}
	var rel *koldproxy.Relation
	for i := range changes {
		if changes[i].Relation == rel {
			continue
		}
		rel = changes[i].Relation
		if t.cat.tables[rel.OID] == nil {
			continue
		}
		concerned = true
		if err := t.place(ctx, tx, &changes[i]); err != nil {
			return false, err
		}
	}
	return concerned, nil
}

// maxRelations bounds the memory for versions of relations; a server may announce the same one again and again.
const maxRelations = 4096

func (t *Target) load(ctx context.Context, tx pgx.Tx) (err error) {
	if t.cat == nil {
		t.fresh = false
		t.cat, err = t.loadCatalog(ctx, tx)
	}
	return err
}

// origin says where the values of today's columns are in the rows of a change that lookAt has looked at.
func (t *Target) origin(c *koldproxy.Change, tab *table) []int {
	from, ok := t.origins[c.Relation]
	if !ok {
		from = tab.origins(t.placed[c.Relation])
		t.origins[c.Relation] = from
	}
	return from
}

// errStale says that the catalog has changed since it was loaded.
var errStale = errors.New("the catalog has changed meanwhile")

// attempts is how often work is begun before its errors are final.
const attempts = 3

// The savepoint of a run stays until the next run or the end of the transaction, so that letting go of it takes no round trip.
const (
	markRun    = "SAVEPOINT koldproxy_run"
	releaseRun = "RELEASE SAVEPOINT koldproxy_run"
	undoRun    = "ROLLBACK TO SAVEPOINT koldproxy_run"
)

// mark makes the savepoint of a run, unless [Target.markAndLook] has just done that.
func (t *Target) mark(ctx context.Context, tx pgx.Tx) error {
	sql := markRun
	switch {
	case t.fresh:
		t.fresh = false
		return nil
	case t.marked:
		sql = releaseRun + ";" + markRun
	}
	_, err := tx.Exec(ctx, sql)
	t.marked = err == nil
	return err
}

// repeatIfStale runs work behind a savepoint. If it returns errStale its writes are undone and it runs again, with a catalog
// loaded anew. It is told when it runs for the last time.
func (t *Target) repeatIfStale(ctx context.Context, tx pgx.Tx, work func(last bool) error) error {
	for attempt := 1; ; attempt++ {
		if err := t.load(ctx, tx); err != nil {
			return err
		}
		if err := t.mark(ctx, tx); err != nil { // after what loading may have written
			return err
		}
		before := t.done.clone()
		err := work(attempt == attempts)
		if !errors.Is(err, errStale) || attempt == attempts {
			return err
		}
		if _, err := tx.Exec(ctx, undoRun); err != nil {
			return err
		}
		t.done = before
		t.forget()
	}
}

func (t *tally) clone() tally {
	c := *t
	c.lost = maps.Clone(t.lost)
	return c
}

// checkStillTrue returns errStale if the catalog is wrong about one of these tables.
func (t *Target) checkStillTrue(ctx context.Context, tx pgx.Tx, tables ...*table) error {
	var ok bool
	if err := tx.QueryRow(ctx, stillTrueSQL, stillTrueArgs(tables)...).Scan(&ok); err != nil {
		return fmt.Errorf("check the catalog: %w", err)
	}
	if !ok {
		return errStale
	}
	return nil
}
