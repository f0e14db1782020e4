package changefeed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// What goes on in the background concerns one table or one stream: a seed, a healing, a backfill. It can fail for a reason that
// concerns nobody else: cold storage that cannot be read, a mirror whose file is damaged. Then only that rests, with growing pauses,
// its job says why, and everything else is applied.

// The pause after a failure begins with napMin and doubles with each one that follows, up to napMax.
const (
	napMin = 500 * time.Millisecond
	napMax = time.Minute
)

// worker is what background work is done for: a stream, or a table by its OID.
type worker struct {
	stream int64
	table  uint32
}

// nap is the rest of a worker after a failure.
type nap struct {
	until  time.Time
	pause  time.Duration // of this nap
	reason string
}

// asleep says whether a worker is to be left alone for now.
func (t *Target) asleep(w worker) bool { return time.Now().Before(t.naps[w].until) }

// workFor does background work for one worker. An error of its own puts the worker to sleep and is undone; nil is returned then. Other
// errors are those of the session, which ends.
func (t *Target) workFor(ctx context.Context, tx pgx.Tx, w worker, name string, work func() error) error {
	if _, err := tx.Exec(ctx, "SAVEPOINT koldproxy_work"); err != nil {
		return err
	}
	before := t.done.clone()
	t.marked, t.fresh = false, false // releasing the savepoint of a run before it would take this one along
	err := work()
	t.marked = false // that of a run in it goes with this one
	if err == nil {
		delete(t.naps, w)
	}
	if err == nil || errors.Is(err, errReading) {
		_, err = tx.Exec(ctx, "RELEASE SAVEPOINT koldproxy_work")
		return err
	}
	if ctx.Err() != nil || tx.Conn().IsClosed() {
		return err
	}
	if _, undone := tx.Exec(ctx, "ROLLBACK TO SAVEPOINT koldproxy_work"); undone != nil {
		return errors.Join(err, undone)
	}
	t.done = before
	t.forget()
	return t.putToSleep(ctx, tx, w, name, err)
}

// putToSleep makes a worker rest and says so where its owner looks: in the job, and as the reason in table_status or show_streams.
func (t *Target) putToSleep(ctx context.Context, tx pgx.Tx, w worker, name string, cause error) error {
	last := t.naps[w]
	n := nap{pause: min(max(2*last.pause, napMin), napMax), reason: publicReason(cause) + "; it is tried again"}
	n.until = time.Now().Add(n.pause)
	t.naps[w] = n
	time.AfterFunc(n.pause, t.cfg.Wake)
	sql := `WITH w AS (UPDATE koldstore.managed_table SET reason = $1 WHERE table_oid = $2 AND state IN ('seeding', 'healing') RETURNING seed_job)`
	var arg any = w.table
	if w.stream != 0 {
		sql, arg = `WITH w AS (UPDATE koldstore.stream SET reason = $1 WHERE stream_id = $2 AND state = 'seeding' RETURNING seed_job)`, w.stream
	} else if e, ok := errors.AsType[*koldproxy.Error](cause); ok && e.Code == koldproxy.CodeColdUnreadable {
		n.reason += waysOut
	}
	if n.reason != last.reason {
		t.log.Error().Str("name", name).Str("err", n.reason).Msg("background work failed and is tried again; everything else goes on")
	}
	if _, err := tx.Exec(ctx, sql+` UPDATE koldstore.job j SET error = $1 FROM w WHERE j.job_id = w.seed_job`, n.reason, arg); err != nil {
		return fmt.Errorf("note why %s rests: %w", name, err)
	}
	return nil
}

// waysOut is what can be done about a segment that stays unreadable.
const waysOut = `. If it stays so: bring the object back; or koldstore.cancel_job gives this up and leaves the feed broken; or koldstore.unmanage_table ends the feed`
