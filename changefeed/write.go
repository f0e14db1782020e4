package changefeed

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// write is a set of events for one place: the mirror of their table, or the log of one of its streams.
type write struct {
	table  *table
	stream *stream // nil for the mirror
	items  []item
	// effective leaves out what is invisible in the end: of the mirror, all but the last event of each key. What the mirror is likely
	// to have the keys of is in standing instead, if there is a statement for it; updated is how many of them it had.
	effective, standing []item
	updated             int64
}

// flaw is an event, or a part of one, that goes to quarantine.
type flaw struct {
	table   *table
	stream  *stream // nil for the mirror
	event   *event
	code    string
	message string
	// noted means that the event is written all the same, without what is wrong with its old row.
	noted bool
}

// broken is a stream, or the mirror of a table, that cannot go on.
type broken struct {
	table  *table
	stream *stream
	reason string
}

// outcome is what is to become of a plan.
type outcome struct {
	writes []write
	flaws  []flaw
	broken []broken
	// written is how many of the writes, from the first one on, have been done while others were judged.
	written int
}

// judgePlan asks the eval session about a plan and distributes its events. What goes to mirrors whose images are made here does not depend
// on the answers: it is written meanwhile.
func (t *Target) judgePlan(ctx context.Context, tx pgx.Tx, p *plan, last bool) (*outcome, error) {
	var out outcome
	first, asks := make([][]question, len(p.tables)), false
	for i, te := range p.tables {
		first[i] = te.paint()
		asks = asks || len(first[i]) > 0
		if te.table.mirror != nil && te.table.painter != nil {
			out.mirror(te)
		}
	}
	apply := idle(tx)
	if asks && len(out.writes) > 0 {
		e := t.writeEarly(ctx, tx, slices.Clone(out.writes))
		defer func() { out.written = e.wait() }()
		apply = func() pgx.Tx { return t.giveWay(ctx, tx, e) }
	}
	for i, te := range p.tables {
		j, err := t.judge(ctx, apply, te, first[i], last)
		if err != nil {
			return nil, err
		}
		switch {
		case te.table.mirror == nil || te.table.painter != nil:
		case j.ruined == "":
			out.mirror(te)
		default:
			out.broken = append(out.broken, broken{te.table, nil, j.ruined})
		}
		var sound []int
		for i, s := range te.table.streams {
			reason := j.broken[s]
			if reason == "" {
				reason = j.ruined
			}
			if reason == "" {
				sound = append(sound, i)
			} else {
				out.broken = append(out.broken, broken{te.table, s, reason})
			}
		}
		if len(sound) > 0 {
			out.streams(te, sound)
		}
	}
	return &out, nil
}

// early are writes that go on while the eval session is asked.
type early struct {
	done    chan struct{}
	written int
	before  tally
}

// wait waits until the apply session is idle, and says how many of the writes are done: all of them or none.
func (e *early) wait() int {
	<-e.done
	return e.written
}

// writeEarly begins to write. If that fails nothing is left of it, and whoever writes it again meets the reason.
func (t *Target) writeEarly(ctx context.Context, tx pgx.Tx, writes []write) *early {
	e := &early{done: make(chan struct{}), before: t.done.clone()}
	go func() {
		defer close(e.done)
		e.written = len(writes)
		if err := t.writeAtOnce(ctx, tx, nil, writes); err != nil {
			t.undoEarly(ctx, tx, e)
		}
	}()
	return e
}

// undoEarly takes the writes back. If that fails, so does everything else in the transaction.
func (t *Target) undoEarly(ctx context.Context, tx pgx.Tx, e *early) {
	_, _ = tx.Exec(ctx, undoRun)
	e.written, t.done = 0, e.before.clone()
}

// giveWay takes the writes back when the eval session is held up: whoever holds it up may be waiting for what they have locked.
func (t *Target) giveWay(ctx context.Context, tx pgx.Tx, e *early) pgx.Tx {
	if e.wait() > 0 {
		t.undoEarly(ctx, tx, e)
	}
	return tx
}

func (o *outcome) mirror(te *tableEvents) {
	w := write{table: te.table}
	for i := range te.events {
		e := &te.events[i]
		switch {
		case e.problem != "":
			o.flaws = append(o.flaws, flaw{te.table, nil, e, codeProblem, e.problem, false})
		case e.op == koldproxy.OpDelete: // a tombstone needs the key only
			w.items = append(w.items, item{event: e})
		case e.newJudged.failed != nil:
			o.flaws = append(o.flaws, flaw{te.table, nil, e, e.newJudged.failed.Code, e.newJudged.failed.Message, false})
		default:
			w.items = append(w.items, item{event: e, doc: e.newJudged.image})
		}
	}
	if te.table.mirror.standing != "" {
		w.effective, w.standing = likelyStanding(w.items)
	} else {
		w.effective = lastOfEachKey(w.items)
	}
	o.writes = append(o.writes, w)
}

// streams distributes events, which were judged for them, to the logs of streams, given by their positions.
func (o *outcome) streams(te *tableEvents, which []int) {
	items := make([][]item, len(te.table.streams))
	for j := range te.events {
		e := &te.events[j]
		nothing := e.plainlyNothing()
		for _, i := range which {
			s := te.table.streams[i]
			switch {
			case nothing(i):
				continue
			case e.problem != "":
				o.flaws = append(o.flaws, flaw{te.table, s, e, codeProblem, e.problem, false})
				continue
			}
			it, ok, lost, noted := e.judgedBy(i, te.table, s)
			if ok {
				items[i] = append(items[i], it)
			}
			if lost != nil {
				o.flaws = append(o.flaws, flaw{te.table, s, e, lost.Code, lost.Message, false})
			}
			if noted != nil {
				o.flaws = append(o.flaws, flaw{te.table, s, e, noted.Code, "the old row: " + noted.Message, true})
			}
		}
	}
	for _, i := range which {
		o.writes = append(o.writes, write{table: te.table, stream: te.table.streams[i], items: items[i], effective: items[i]})
	}
}

// codeProblem is PostgreSQL's object_not_in_prerequisite_state, for events that the log did not carry whole.
const codeProblem = "55000"

// makeRoomFor sees to it that the log has partitions for all events.
func (t *Target) makeRoomFor(ctx context.Context, tx pgx.Tx, w *write) error {
	if w.stream == nil || len(w.items) == 0 {
		return nil
	}
	last := w.items[len(w.items)-1]
	return t.makeRoom(ctx, tx, w.stream, koldproxy.EventID(last.seq, last.lsn))
}

func (w *write) statement(items []item) (string, []any) {
	if w.stream == nil {
		if w.table.mirror.standing != "" {
			items = lastOfEachKey(items) // which the statement cannot do
		}
		return w.table.mirror.any, mirrorArgs(w.table.mirror, items)
	}
	return w.stream.sql, streamArgs(w.stream, items)
}

// queue puts a statement for some events into a batch, and counts what it writes.
func (t *Target) queue(batch *pgx.Batch, w *write, items []item) {
	sql, args := w.statement(items)
	written := &t.done.mirrorRows
	if w.stream != nil {
		written = &t.done.events
	}
	batch.Queue(sql, args...).Exec(adding(written))
}

// adding adds the rows that a statement has written.
func adding(written *int64) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		*written += tag.RowsAffected()
		return nil
	}
}

// queueCounts puts the statement that counts events, so many of each stream, into a batch.
func queueCounts(batch *pgx.Batch, streams, events []int64) {
	if len(streams) > 0 {
		batch.Queue(countSQL, streams, events)
	}
}

// write writes a plan: all of it in one round trip if nothing is wrong with it, otherwise piece by piece. In the last attempt
// errors that look like a changed catalog are taken for what they are.
func (t *Target) write(ctx context.Context, tx pgx.Tx, p *plan, last bool) error {
	before := t.done.clone()
	out, err := t.judgePlan(ctx, tx, p, last)
	if err != nil {
		return err
	}
	err = t.writeAtOnce(ctx, tx, p, out.writes[out.written:])
	if errors.Is(err, errStanding) {
		if _, err := tx.Exec(ctx, undoRun); err != nil {
			return err
		}
		t.done = before.clone()
		err = t.writeAtOnce(ctx, tx, p, out.writes)
	}
	if err != nil {
		switch blame(err) {
		case nobody:
			return err
		case definition:
			if !last {
				return errStale
			}
		}
		if _, err := tx.Exec(ctx, undoRun); err != nil {
			return err
		}
		t.done = before
		if err := t.writeCarefully(ctx, tx, p, out); err != nil {
			return err
		}
	}
	for i := range out.flaws {
		if err := t.quarantine(ctx, tx, &out.flaws[i]); err != nil {
			return err
		}
	}
	for _, b := range out.broken {
		if b.stream != nil {
			err = t.breakStream(ctx, tx, b.stream, b.reason)
		} else {
			err = t.breakMirror(ctx, tx, b.table, b.reason)
		}
		if err != nil {
			return err
		}
	}
	if len(out.broken) > 0 {
		t.forget()
	}
	return nil
}

// writeAtOnce writes everything, in the form that is best for the server. With a plan it makes sure in the end that the catalog was true
// meanwhile.
func (t *Target) writeAtOnce(ctx context.Context, tx pgx.Tx, p *plan, writes []write) error {
	var batch pgx.Batch
	var streams, events []int64
	for i := range writes {
		w := &writes[i]
		if len(w.standing) > 0 {
			m := w.table.mirror
			batch.Queue(m.standing, mirrorArgs(m, w.standing)...).Exec(func(tag pgconn.CommandTag) error {
				w.updated = tag.RowsAffected()
				t.done.mirrorRows += w.updated
				return nil
			})
		}
		if len(w.effective) == 0 {
			continue
		}
		if w.copies() {
			if err := t.copyIn(ctx, tx, w); err != nil {
				return err
			}
			continue
		}
		if err := t.makeRoomFor(ctx, tx, w); err != nil {
			return err
		}
		t.queue(&batch, w, w.effective)
		if w.stream != nil {
			streams, events = append(streams, w.stream.id), append(events, int64(len(w.effective)))
		}
	}
	queueCounts(&batch, streams, events)
	if err := sendAndCheck(ctx, tx, &batch, p); err != nil {
		return err
	}
	return t.writeMissing(ctx, tx, p, writes)
}

// writeMissing writes what was taken for standing and is not in the mirror: it may be in cold storage.
func (t *Target) writeMissing(ctx context.Context, tx pgx.Tx, p *plan, writes []write) error {
	var batch pgx.Batch
	for i := range writes {
		w := &writes[i]
		if w.updated < int64(len(w.standing)) {
			m := w.table.mirror
			batch.Queue(m.missing, mirrorArgs(m, w.standing)...).Exec(adding(&t.done.mirrorRows))
		}
	}
	if batch.Len() == 0 {
		return nil
	}
	return sendAndCheck(ctx, tx, &batch, p)
}

// sendAndCheck executes statements and makes sure, with a plan, that the catalog was true meanwhile.
func sendAndCheck(ctx context.Context, tx pgx.Tx, batch *pgx.Batch, p *plan) error {
	ok := true
	if p != nil {
		batch.Queue(stillTrueSQL, stillTrueArgs(p.sources())...).QueryRow(func(row pgx.Row) error { return row.Scan(&ok) })
	}
	if batch.Len() == 0 {
		return nil
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("write a batch: %w", err)
	}
	if !ok {
		return errStale
	}
	return nil
}

func (p *plan) sources() []*table {
	out := make([]*table, len(p.tables))
	for i, te := range p.tables {
		out[i] = te.table
	}
	return out
}

// writeCarefully finds what is wrong. Rows that cannot be written become flaws; a mirror or stream whose definition does
// not work any more is broken. Every event counts: when the last one of a key turns out bad, the mirror shows the one before.
func (t *Target) writeCarefully(ctx context.Context, tx pgx.Tx, p *plan, out *outcome) error {
	for i := range out.writes {
		w := &out.writes[i]
		if err := t.makeRoomFor(ctx, tx, w); err != nil {
			return err
		}
		err := t.writePart(ctx, tx, w, w.items, out)
		if err != nil && blame(err) == definition {
			out.broken = append(out.broken, broken{w.table, w.stream, publicReason(err)})
			continue
		}
		if err != nil {
			return err
		}
	}
	// Whatever went wrong above may have been the doing of somebody who changed the tables meanwhile.
	return t.checkStillTrue(ctx, tx, p.sources()...)
}

// writePart writes some events; if one of them is to blame for an error it looks for it by halving.
func (t *Target) writePart(ctx context.Context, tx pgx.Tx, w *write, items []item, out *outcome) error {
	if len(items) == 0 {
		return nil
	}
	before := t.done.clone()
	err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error { // a savepoint
		var batch pgx.Batch
		t.queue(&batch, w, items)
		if w.stream != nil {
			queueCounts(&batch, []int64{w.stream.id}, []int64{int64(len(items))})
		}
		return part.SendBatch(ctx, &batch).Close()
	})
	if err == nil {
		return nil
	}
	t.done = before
	if blame(err) != row {
		return err
	}
	if len(items) == 1 {
		var pg *pgconn.PgError
		errors.As(err, &pg)
		out.flaws = append(out.flaws, flaw{w.table, w.stream, items[0].event, pg.Code, pg.Message, false})
		return nil
	}
	half := len(items) / 2
	if err := t.writePart(ctx, tx, w, items[:half], out); err != nil {
		return err
	}
	return t.writePart(ctx, tx, w, items[half:], out)
}

// putAside notes a row, as a literal, that could not become what it should. stream is nil if that is a row of the mirror.
func (t *Target) putAside(
	ctx context.Context, tx pgx.Tx, tab *table, stream *int64, seq koldproxy.Seq, op koldproxy.Op, lsn koldproxy.LSN, code, message string, literal *string,
) error {
	_, err := tx.Exec(ctx, `INSERT INTO koldstore.quarantine (table_oid, stream_id, seq, op, commit_lsn, sqlstate, message, row_text)
		VALUES ($1, $2, $3, $4, $5::text::pg_lsn, $6, $7, $8)`, tab.oid, stream, int64(seq), int16(op), lsn.String(), code, message, literal)
	if err != nil {
		return fmt.Errorf("put a row into quarantine: %w", err)
	}
	t.done.quarantined++
	return nil
}

// countLost counts an event that a stream will not have.
func (t *Target) countLost(ctx context.Context, tx pgx.Tx, s *stream) error {
	if _, err := tx.Exec(ctx, `UPDATE koldstore.stream_status SET events_lost = events_lost + 1 WHERE stream_id = $1`, s.id); err != nil {
		return fmt.Errorf("count a lost event: %w", err)
	}
	t.done.lose(s.label)
	return nil
}

// quarantine puts an event aside that cannot be written. The row itself never appears in the log of the process.
func (t *Target) quarantine(ctx context.Context, tx pgx.Tx, f *flaw) error {
	var streamID *int64
	e := f.event
	text := e.newLiteral()
	if e.op == koldproxy.OpDelete || f.noted {
		text = e.oldLiteral()
	}
	event := t.log.Warn().Str("table", f.table.name).Str("lsn", e.lsn.String()).Int64("seq", int64(e.seq)).Str("sqlstate", f.code)
	if f.stream != nil {
		streamID = &f.stream.id
		event.Str("stream", f.stream.label)
	}
	if f.stream != nil && !f.noted {
		if err := t.countLost(ctx, tx, f.stream); err != nil {
			return err
		}
	}
	err := t.putAside(ctx, tx, f.table, streamID, e.seq, e.op, e.lsn, f.code, f.message, text)
	if err != nil {
		return err
	}
	if f.noted {
		event.Msg("the old row of a change could not be read; the change is written without it")
	} else {
		event.Msg("a row change could not be written and is in quarantine")
	}
	return nil
}
