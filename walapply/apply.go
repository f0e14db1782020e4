package walapply

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// backgroundPause is how often background work may come between batches while there is a backlog.
const backgroundPause = 100 * time.Millisecond

// applyLoop turns messages into apply transactions. It belongs to one goroutine; the transaction state of the stream is
//
//	pending:  [ changes of whole source transactions | changes of the one being received ]
//	                                             whole ┘
//
// A source transaction that outgrows a batch moves into tx, an apply transaction that stays open until its end has come.
type applyLoop struct {
	*session
	queue *queue
	ack   *acknowledger
	seqs  *koldproxy.Sequence

	pending      []koldproxy.Change
	pendingBytes int
	whole        int
	wholeBytes   int
	transactions int           // source transactions in pending[:whole], or the one in tx
	end          koldproxy.LSN // end of the last whole source transaction that was received and is not acknowledged
	committedAt  time.Time     // when it committed
	behind       time.Duration // how long ago that was when the server sent it
	oldest       time.Time     // when the first of pending[:whole] was complete
	rested       time.Time     // from when on a batch that is not full may begin, see rest
	caughtUp     koldproxy.LSN // end of log in a keepalive after end, to be acknowledged with it

	inSource bool // between begin and commit
	source   commitRecord
	skip     bool // the source transaction has been applied before

	tx      pgx.Tx // open for a source transaction larger than a batch
	txStart time.Time
	txRows  int64

	bloated        bool // a row was so large that memory is given back when all is done
	background     bool // Background may have work
	lastBackground time.Time
}

// run applies until ctx ends or something fails. What was received before the stream broke is applied first.
func (l *applyLoop) run(ctx context.Context) error {
	defer func() {
		if l.tx != nil {
			rollback(ctx, l.tx)
		}
	}()
	watch := time.NewTicker(l.a.cfg.WatchInterval)
	defer watch.Stop()
	linger := time.NewTimer(0)
	defer linger.Stop()
	var messages []message
	for {
		var err error
		if messages, err = l.queue.take(messages); err != nil {
			return errors.Join(l.flush(ctx), err)
		}
		for i := range messages {
			if err := l.handle(ctx, &messages[i]); err != nil {
				return err
			}
		}
		clear(messages)
		select {
		case <-watch.C:
			if err := l.watch(ctx); err != nil {
				return err
			}
		default:
		}
		if !l.queue.empty() {
			if l.background && time.Since(l.lastBackground) > backgroundPause {
				if err := l.betweenBatches(ctx); err != nil {
					return err
				}
			}
			continue
		}
		if pause := l.worthWaiting(); pause > 0 {
			linger.Reset(pause)
			select {
			case <-l.queue.filled:
				continue
			case <-linger.C:
			case <-ctx.Done():
				return nil
			}
		}
		if err := l.flush(ctx); err != nil {
			return err
		}
		if l.background && l.tx == nil {
			if err := l.betweenBatches(ctx); err != nil {
				return err
			}
			continue
		}
		if position := l.ack.acknowledged(); position >= l.logEnd {
			l.retry.passed(position)
		}
		if l.bloated && l.tx == nil {
			debug.FreeOSMemory()
			l.bloated = false
		}
		if l.tx == nil && len(l.pending) < eagerRows {
			l.queue.want()
		}
		select {
		case <-l.queue.filled:
		case <-watch.C:
			if err := l.watch(ctx); err != nil {
				return err
			}
		case <-l.a.poked:
			l.background = true
		case <-ctx.Done():
			return nil
		}
	}
}

// handle takes one message in.
func (l *applyLoop) handle(ctx context.Context, m *message) error {
	switch m.kind {
	case messageBegin:
		l.done(m.bytes)
		l.inSource = true
		// Commit records do not overlap, so one that begins before the end of another ends before it as well.
		l.skip = m.lsn < l.cp.applied
		if l.source = (commitRecord{m.lsn, m.time}); !l.skip {
			l.a.metrics.lag.take(l.source)
		}
	case messageChange:
		if l.skip {
			l.done(m.bytes)
			return nil
		}
		l.bloated = l.bloated || m.bytes > largeRow
		l.pending = append(l.pending, m.change)
		l.pendingBytes += m.bytes
		if l.full() {
			return l.spill(ctx)
		}
	case messageCommit:
		l.done(m.bytes)
		return l.commit(ctx, m)
	case messageKeepalive:
		l.done(m.bytes)
		switch {
		case l.inSource:
		case l.end > 0:
			l.caughtUp = m.lsn
		default:
			return l.tell(ctx, m.lsn)
		}
	}
	return nil
}

// largeRow is the size of a row from which on what it took is given back to the system at once. Garbage of several times its size would
// stay for minutes, since nothing else here needs as much.
const largeRow = 16 << 20

// full says whether pending is as large as a batch may be.
func (l *applyLoop) full() bool {
	return len(l.pending) >= l.a.cfg.BatchRows || l.pendingBytes >= l.a.cfg.BatchBytes
}

// commit ends a source transaction.
func (l *applyLoop) commit(ctx context.Context, m *message) error {
	l.inSource = false
	if l.skip {
		return nil
	}
	if l.tx == nil && len(l.pending) > l.whole {
		l.transactions++
		if l.whole == 0 {
			l.oldest = time.Now()
		}
	}
	l.whole, l.wholeBytes = len(l.pending), l.pendingBytes
	l.end, l.committedAt, l.behind, l.caughtUp = m.lsn, m.time, m.behind, 0
	if l.tx != nil {
		if err := l.applyPending(ctx, l.tx, l.whole); err != nil {
			return err
		}
		return l.finish(ctx)
	}
	if l.whole > 0 && (l.full() || time.Since(l.oldest) >= l.linger() && time.Now().After(l.rested)) {
		return l.flush(ctx)
	}
	return nil
}

// eagerRows is up to how many rows of a source transaction every one is taken in as it comes. The end of a larger one is not near.
const eagerRows = 256

// Small batches are dear, and whoever is late may be so because of them. So a batch waits as long again as it is late, up to lateLinger, and
// batches grow until they are cheap enough for the load: if an eighth of the lateness had to be as long, it would be eight times that. Those
// who are later still wait for an eighth of it, up to maxLinger.
const (
	lateLinger  = 25 * time.Millisecond
	lingerShare = 8
	maxLinger   = 250 * time.Millisecond
)

// linger is how long a source transaction may wait for others.
func (l *applyLoop) linger() time.Duration {
	if l.a.cfg.Linger == 0 {
		return 0
	}
	return max(l.a.cfg.Linger, min(l.behind, lateLinger), min(l.behind/lingerShare, maxLinger))
}

// worthWaiting is for how long a batch should wait for more, though nothing has arrived: not at all unless there is a backlog, of
// which the server is still sending, or a rest to be taken.
func (l *applyLoop) worthWaiting() time.Duration {
	if l.whole == 0 || l.tx != nil {
		return 0
	}
	rest := time.Until(l.rested)
	if l.caughtUp > 0 || l.behind <= l.a.cfg.Linger {
		return rest
	}
	return max(rest, l.linger()-time.Since(l.oldest))
}

// A batch costs the server some milliseconds of processor time however small it is, which the application would rather have. So while
// several source transactions come in the time of one batch, there is a rest behind it, restShare times as long as it took and restMost
// at most. Who commits now and then, or waits for each of his commits, never meets one.
const (
	restShare = 4
	restMost  = 30 * time.Millisecond
	restFrom  = 4 // source transactions in one batch
)

// rest decides when the next batch may begin unless it is full.
func (l *applyLoop) rest() {
	l.rested = time.Time{}
	if l.transactions >= restFrom && l.a.cfg.Linger > 0 {
		now := time.Now()
		l.rested = now.Add(min(restShare*now.Sub(l.txStart), restMost))
	}
}

// flush applies what is whole in a transaction of its own and acknowledges it.
func (l *applyLoop) flush(ctx context.Context) error {
	if l.tx != nil || l.end == 0 {
		return nil
	}
	if l.whole == 0 { // source transactions without changes; nothing to write for them
		return l.acknowledge(ctx)
	}
	if err := l.open(ctx); err != nil {
		return err
	}
	if err := l.applyPending(ctx, l.tx, l.whole); err != nil {
		return err
	}
	return l.finish(ctx)
}

// spill makes room while a source transaction is being received: first by applying those before it, and if it fills a
// batch on its own, by handing its first part over in an apply transaction that waits for the rest.
func (l *applyLoop) spill(ctx context.Context) error {
	if err := l.flush(ctx); err != nil || !l.full() {
		return err
	}
	if l.tx == nil {
		if err := l.open(ctx); err != nil {
			return err
		}
		l.transactions = 1
	}
	return l.applyPending(ctx, l.tx, len(l.pending))
}

// open begins an apply transaction.
func (l *applyLoop) open(ctx context.Context) error {
	tx, err := l.conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin an apply transaction: %w", err)
	}
	l.tx, l.txStart, l.txRows = tx, time.Now(), 0
	l.busySince.Store(l.txStart.UnixNano())
	return nil
}

// applyPending hands the first n pending changes, whole or all of them, to the target and forgets them.
func (l *applyLoop) applyPending(ctx context.Context, tx pgx.Tx, n int) error {
	if n == 0 {
		return nil
	}
	changes := l.pending[:n:n]
	if err := l.a.target.Apply(ctx, tx, l.seqs, changes); err != nil {
		return fmt.Errorf("apply changes: %w", err)
	}
	for i := range changes {
		if changes[i].Op != koldproxy.OpTruncate && changes[i].Relation.Namespace != "koldstore" {
			l.txRows++
		}
	}
	bytes := l.pendingBytes
	if n == l.whole {
		bytes = l.wholeBytes
	}
	l.pendingBytes -= bytes
	l.done(bytes)
	rest := copy(l.pending, l.pending[n:])
	clear(l.pending[rest:])
	l.pending = l.pending[:rest]
	l.whole, l.wholeBytes = 0, 0
	return nil
}

// finish moves the checkpoint to end, commits and acknowledges.
func (l *applyLoop) finish(ctx context.Context) error {
	n := next{applied: l.end, watermark: l.seqs.Watermark(), rows: l.txRows, told: max(l.end, l.caughtUp) + toldStep}
	if err := l.cp.advance(ctx, l.conn, n); err != nil {
		return err
	}
	l.committed(n)
	m := l.a.metrics
	m.rows.Add(float64(l.txRows))
	m.transactions.Add(float64(l.transactions))
	l.rest()
	m.batchSeconds.Observe(time.Since(l.txStart).Seconds())
	l.a.update(func(s *Status) { s.Applied, s.LastCommit = l.end, l.committedAt })
	l.transactions = 0
	err := l.acknowledge(ctx)
	l.a.target.Committed()
	l.background = l.background || l.a.target.Due()
	l.retry.passed(l.cp.applied)
	return err
}

// committed notes that tx is over, and makes n what this session knows of the checkpoint.
func (l *applyLoop) committed(n next) {
	l.tx = nil
	l.busySince.Store(0)
	l.cp.applied, l.cp.watermark, l.cp.told = n.applied, n.watermark, n.told
}

// acknowledge tells the server about end, or about the end of log that was seen after it.
func (l *applyLoop) acknowledge(ctx context.Context) error {
	position := max(l.end, l.caughtUp)
	l.end, l.caughtUp = 0, 0
	var rest commitRecord
	if l.inSource && !l.skip {
		rest = l.source
	}
	l.a.metrics.lag.finish(rest)
	return l.tell(ctx, position)
}

// toldStep is by how much the checkpoint is ahead of what the slot is told, so that others' log can be acknowledged without
// writing each time. It is also by how much a slot may be replaced, after a kill, without being noticed.
const toldStep = 4 << 20

// tell acknowledges a position that everything has been applied up to. If it is more than anybody would expect who finds the
// checkpoint after a kill, that says so first.
func (l *applyLoop) tell(ctx context.Context, position koldproxy.LSN) error {
	if position > max(l.cp.told, l.cp.applied) {
		if err := l.cp.noteTold(ctx, l.conn, position+toldStep); err != nil {
			return err
		}
	}
	return l.ack.advance(position)
}

// betweenBatches lets the target do one unit of background work, if no source transaction is half applied.
func (l *applyLoop) betweenBatches(ctx context.Context) error {
	if l.tx != nil {
		return nil
	}
	l.background = false
	if err := l.open(ctx); err != nil {
		return err
	}
	more, err := l.a.target.Background(ctx, l.tx, l.seqs)
	if err != nil {
		return fmt.Errorf("background work: %w", err)
	}
	n := next{applied: l.cp.applied, watermark: l.seqs.Watermark(), told: l.cp.told}
	var wrote bool
	if err := l.tx.QueryRow(ctx, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`).Scan(&wrote); err != nil {
		return fmt.Errorf("background work: %w", err)
	}
	if wrote || n.watermark != l.cp.watermark {
		err = l.cp.advance(ctx, l.conn, n)
	} else {
		err = l.tx.Commit(ctx)
	}
	if err != nil {
		return fmt.Errorf("background work: %w", err)
	}
	l.committed(n)
	l.a.target.Committed()
	l.background, l.lastBackground = more, time.Now()
	return nil
}

// watch looks at the publication and at what others may have done to tables, if no source transaction is half applied.
func (l *applyLoop) watch(ctx context.Context) error {
	if l.tx != nil {
		return nil
	}
	marked, err := l.checkPublication(ctx)
	if err == nil && marked {
		err = errPublicationLacks
	}
	if err == nil {
		err = l.checkPartitions(ctx)
	}
	if err == nil {
		err = l.checkTables(ctx)
	}
	if err != nil {
		return err
	}
	lost, err := l.lost(ctx)
	if lost {
		l.a.target.Reset()
		l.background = true // which looks at the catalog
	}
	return err
}

// done takes bytes off the backlog.
func (l *applyLoop) done(bytes int) {
	l.a.metrics.backlog.Set(float64(l.a.backlog.Add(-int64(bytes))))
}

// rollback ends tx on a connection that is about to be closed, also after ctx has ended.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // the server does it anyway when the connection ends
}
