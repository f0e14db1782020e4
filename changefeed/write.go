package changefeed

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// write is a set of events for one place: the mirror of their table, or the log of one of its streams.
type write struct {
	table  *table
	stream *stream // nil for the mirror
	events []*event
	// effective leaves out what is invisible in the end: of the mirror, all but the last event of each key.
	effective []*event
}

// writes distributes the events of a plan. Events with a problem are left out; they come back as bad.
func (p *plan) writes() (good, bad []write) {
	for _, te := range p.tables {
		var fine, faulty []*event
		for i := range te.events {
			if e := &te.events[i]; e.problem == "" {
				fine = append(fine, e)
			} else {
				faulty = append(faulty, e)
			}
		}
		if te.table.mirror != nil {
			good = append(good, write{table: te.table, events: fine, effective: lastOfEachKey(fine)})
			bad = append(bad, write{table: te.table, events: faulty})
		}
		for _, s := range te.table.streams {
			good = append(good, write{table: te.table, stream: s, events: fine, effective: fine})
			bad = append(bad, write{table: te.table, stream: s, events: faulty})
		}
	}
	return good, bad
}

func (w *write) statement(events []*event) (string, []any) {
	if w.stream == nil {
		return w.table.mirror.sql, mirrorArgs(w.table, events)
	}
	return w.stream.sql, streamArgs(events)
}

// finish reads the result of the statement and counts it.
func (t *Target) finish(w *write, q interface {
	Exec() (pgconn.CommandTag, error)
	QueryRow() pgx.Row
},
) error {
	if w.stream == nil {
		tag, err := q.Exec()
		t.done.mirrorRows += tag.RowsAffected()
		return err
	}
	var n int64
	err := q.QueryRow().Scan(&n)
	t.done.events += n
	return err
}

// write writes a plan: all of it in one round trip if nothing is wrong with it, otherwise piece by piece. In the last attempt
// errors that look like a changed catalog are taken for what they are.
func (t *Target) write(ctx context.Context, tx pgx.Tx, p *plan, last bool) error {
	good, bad := p.writes()
	before := t.done.clone()
	err := t.writeAtOnce(ctx, tx, p, good)
	if err != nil {
		switch blame(err) {
		case nobody:
			return err
		case definition:
			if !last {
				return errStale
			}
		}
		if _, err := tx.Exec(ctx, "ROLLBACK TO SAVEPOINT koldproxy_run"); err != nil {
			return err
		}
		t.done = before
		if err := t.writeCarefully(ctx, tx, p, good); err != nil {
			return err
		}
	}
	for i := range bad {
		for _, e := range bad[i].events {
			if err := t.quarantine(ctx, tx, &bad[i], e, "55000", e.problem); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *Target) writeAtOnce(ctx context.Context, tx pgx.Tx, p *plan, writes []write) error {
	var batch pgx.Batch
	var ok bool
	for i := range writes {
		w := &writes[i]
		if len(w.effective) == 0 {
			continue
		}
		sql, args := w.statement(w.effective)
		q := batch.Queue(sql, args...)
		q.Fn = func(br pgx.BatchResults) error { return t.finish(w, br) }
	}
	batch.Queue(stillTrueSQL, stillTrueArgs(p.sources())...).QueryRow(func(row pgx.Row) error { return row.Scan(&ok) })
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
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

// writeCarefully finds what is wrong. Rows that cannot be written go to quarantine; a mirror or stream whose definition does
// not work any more is broken. Every event counts: when the last one of a key turns out bad, the mirror shows the one before.
func (t *Target) writeCarefully(ctx context.Context, tx pgx.Tx, p *plan, writes []write) error {
	broken := make(map[*write]string)
	for i := range writes {
		w := &writes[i]
		err := t.writePart(ctx, tx, w, w.events)
		if err != nil && blame(err) == definition {
			broken[w] = publicReason(err)
			continue
		}
		if err != nil {
			return err
		}
	}
	// Whatever went wrong above may have been the doing of somebody who changed the tables meanwhile.
	if err := t.checkStillTrue(ctx, tx, p.sources()...); err != nil {
		return err
	}
	for w, reason := range broken {
		var err error
		if w.stream != nil {
			err = t.breakStream(ctx, tx, w.stream, reason)
		} else {
			err = t.breakMirror(ctx, tx, w.table, reason)
		}
		if err != nil {
			return err
		}
	}
	if len(broken) > 0 {
		t.forget()
	}
	return nil
}

// writePart writes some events; if one of them is to blame for an error it looks for it by halving.
func (t *Target) writePart(ctx context.Context, tx pgx.Tx, w *write, events []*event) error {
	if len(events) == 0 {
		return nil
	}
	before := t.done.clone()
	err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error { // a savepoint
		sql, args := w.statement(events)
		return t.finish(w, &single{ctx: ctx, tx: part, sql: sql, args: args})
	})
	if err == nil {
		return nil
	}
	t.done = before
	if blame(err) != row {
		return err
	}
	if len(events) == 1 {
		var pg *pgconn.PgError
		errors.As(err, &pg)
		return t.quarantine(ctx, tx, w, events[0], pg.Code, pg.Message)
	}
	half := len(events) / 2
	if err := t.writePart(ctx, tx, w, events[:half]); err != nil {
		return err
	}
	return t.writePart(ctx, tx, w, events[half:])
}

// single makes one statement look like one of a batch.
type single struct {
	ctx  context.Context //nolint:containedctx // lives for one call
	tx   pgx.Tx
	sql  string
	args []any
}

func (s *single) Exec() (pgconn.CommandTag, error) { return s.tx.Exec(s.ctx, s.sql, s.args...) }
func (s *single) QueryRow() pgx.Row                { return s.tx.QueryRow(s.ctx, s.sql, s.args...) }

// quarantine puts an event aside that cannot be written. The row itself never appears in the log of the process.
func (t *Target) quarantine(ctx context.Context, tx pgx.Tx, w *write, e *event, code, message string) error {
	var streamID *int64
	text := e.newLiteral()
	if e.op == koldproxy.OpDelete {
		text = e.oldLiteral()
	}
	event := t.log.Warn().Str("table", w.table.name).Str("lsn", e.lsn.String()).Int64("seq", int64(e.seq)).Str("sqlstate", code)
	if w.stream != nil {
		streamID = &w.stream.id
		if _, err := tx.Exec(ctx, `UPDATE koldstore.stream_status SET events_lost = events_lost + 1 WHERE stream_id = $1`, w.stream.id); err != nil {
			return fmt.Errorf("count a lost event: %w", err)
		}
		t.done.lose(w.stream.label)
		event.Str("stream", w.stream.label)
	}
	_, err := tx.Exec(ctx, `INSERT INTO koldstore.quarantine (table_oid, stream_id, seq, op, commit_lsn, sqlstate, message, row_text)
		VALUES ($1, $2, $3, $4, $5::text::pg_lsn, $6, $7, $8)`,
		w.table.oid, streamID, int64(e.seq), int16(e.op), e.lsn.String(), code, message, text)
	if err != nil {
		return fmt.Errorf("put a row into quarantine: %w", err)
	}
	t.done.quarantined++
	event.Msg("a row change could not be written and is in quarantine")
	return nil
}
