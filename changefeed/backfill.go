package changefeed

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// A backfill (start = 'earliest') goes on beside writers. The stream captures changes from its marker on, as any other; for
// each page of the table, in the order of its primary key,
//
//  1. the page is read, in the eval session, and kept in memory. A marker of kind page is written after that.
//  2. When the marker comes back through the write-ahead log, everything that the page can have seen has been applied. The
//     rows of keys of which the stream has told something since it began are left out; the others are written.
//
// Nothing comes twice, nothing is missing: a row that no event was about has not changed its part in the stream between the
// stream's beginning and the marker, so the page shows it as it was all that time, and every change behind the marker becomes
// an event. Whatever did change has told its newest state already (koldstore.seed_touched knows; a trigger on the log writes it).
// The place of the last row that was written is stored in the same transaction, so that a new applier goes on there; a page
// in memory is read again.
//
// A TRUNCATE ends a backfill: no row is left that was there when the stream began. A change of the table's columns makes the page
// in memory void.

// backfillPage is a part of a table that was read for a stream and waits for its marker.
type backfillPage struct {
	table  uint32
	stream int64
	marker int64
	shape  string // of the table when it was read
	images []string
	flaws  []backfillFlaw
	key    []string // of the last row; nil if there was none
	rows   int
	done   bool
}

// backfillFlaw is a row that cannot become an event.
type backfillFlaw struct {
	literal string
	cause   *pgconn.PgError
}

// backfillDue is a stream that waits for a page to be read.
func (t *Target) backfillDue() (*table, *stream) {
	if t.page != nil {
		return nil, nil
	}
	var due *stream
	var of *table
	for _, tab := range t.cat.tables {
		for _, s := range tab.streams {
			if s.seeding && !t.asleep(worker{stream: s.id}) && (due == nil || s.id < due.id) {
				due, of = s, tab
			}
		}
	}
	return of, due
}

// readBackfill reads a page of a stream's table and writes its marker.
func (t *Target) readBackfill(ctx context.Context, tx pgx.Tx, tab *table, s *stream) error {
	var after []string
	err := tx.QueryRow(ctx, `SELECT seed_key FROM koldstore.stream WHERE stream_id = $1 AND state = 'seeding'`, s.id).Scan(&after)
	if errors.Is(err, pgx.ErrNoRows) {
		t.forget()
		return nil
	}
	if err != nil {
		return err
	}
	limit := t.pageRows
	if limit == 0 {
		limit = min(firstPage, t.cfg.SeedRows)
	}
	page := &backfillPage{table: tab.oid, stream: s.id, shape: tab.shape}
	literals, size, err := t.readRows(ctx, tx, s, after, limit, page)
	if pg := raised(err); pg != nil {
		switch pg.Code[:2] {
		case "40", "53", "55", "58": // locked, or short of something
			t.log.Debug().Str("stream", s.label).Str("sqlstate", pg.Code).Msg("a page of a backfill has to wait")
			return pause(ctx)
		}
		if err := t.checkStillTrue(ctx, tx, tab); errors.Is(err, errStale) {
			t.forget()
			return pause(ctx)
		} else if err != nil {
			return err
		}
		err := t.breakStream(ctx, tx, s, "its table cannot be read: "+publicReason(pg))
		t.forget()
		return err
	}
	if err != nil {
		return err
	}
	err = t.judgeBackfill(ctx, tx, tab, s, literals, page, false)
	if errors.Is(err, errStale) { // or the predicate does not work under any catalog
		if err = t.checkStillTrue(ctx, tx, tab); err == nil {
			err = t.judgeBackfill(ctx, tx, tab, s, literals, page, true)
		}
	}
	if err == nil {
		err = t.checkStillTrue(ctx, tx, tab)
	}
	if errors.Is(err, errStale) {
		t.forget()
		return pause(ctx)
	}
	if err != nil || page.stream == 0 {
		return err
	}
	page.done = len(literals) < limit
	t.pageRows = min(max(pageBytes/(size/max(len(literals), 1)+1), 1), t.cfg.SeedRows)
	err = tx.QueryRow(ctx, `INSERT INTO koldstore.wal_marker (kind, subject) VALUES ('page', $1) RETURNING marker_id`, s.id).Scan(&page.marker)
	if err != nil {
		return fmt.Errorf("mark a page of a backfill: %w", err)
	}
	t.page = page
	return nil
}

// readRows reads rows as literals, with the rights of the table's owner.
func (t *Target) readRows(ctx context.Context, tx pgx.Tx, s *stream, after []string, limit int, page *backfillPage) (literals []string, size int, err error) {
	var key []byte
	if after != nil {
		if key, err = t.eval.types.Encode(pgtype.TextArrayOID, pgtype.BinaryFormatCode, after, nil); err != nil {
			return nil, 0, fmt.Errorf("encode a key: %w", err)
		}
	}
	count, err := t.eval.types.Encode(pgtype.Int8OID, pgtype.BinaryFormatCode, int64(limit), nil)
	if err != nil {
		return nil, 0, fmt.Errorf("encode a limit: %w", err)
	}
	sql := `SELECT r.literal, r.key FROM koldstore.` + ident("reader_"+strconv.FormatInt(s.id, 10)) + `($1, $2) AS r`
	err = t.eval.run(ctx, idle(tx), sql, [][]byte{key, count}, []uint32{pgtype.TextArrayOID, pgtype.Int8OID}, func(row [][]byte) error {
		literals, size = append(literals, string(row[0])), size+len(row[0])
		page.key = nil
		return t.eval.types.Scan(pgtype.TextArrayOID, pgtype.TextFormatCode, row[1], &page.key)
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read a page of a backfill: %w", err)
	}
	page.rows = len(literals)
	return literals, size, nil
}

// judgeBackfill keeps the rows that match. A stream that turns out to be broken is broken here, and page.stream is 0.
func (t *Target) judgeBackfill(ctx context.Context, tx pgx.Tx, tab *table, s *stream, literals []string, page *backfillPage, last bool) error {
	asks := make([]bool, len(tab.streams))
	nth := 0
	for i := range tab.streams {
		if tab.streams[i] == s {
			asks[i], nth = true, i
		}
	}
	answers, questions := make([]judged, len(literals)), make([]question, len(literals))
	for i := range literals {
		questions[i] = question{literal: literals[i], answer: &answers[i], asks: asks}
	}
	j := t.newJudge(idle(tx), tab, last)
	if err := j.ask(ctx, questions); err != nil {
		return err
	}
	reason := j.ruined
	if reason == "" {
		reason = j.broken[s]
	}
	if reason != "" {
		page.stream = 0
		err := t.breakStream(ctx, tx, s, reason)
		t.forget()
		return err
	}
	for i := range answers {
		a := &answers[i]
		switch {
		case a.failure[nth] != nil:
			page.flaws = append(page.flaws, backfillFlaw{literals[i], a.failure[nth]})
		case !a.matches[nth]:
		case a.failed != nil:
			page.flaws = append(page.flaws, backfillFlaw{literals[i], a.failed})
		default:
			page.images = append(page.images, *a.image)
		}
	}
	return nil
}

// voidBackfill forgets a page of a table; it is read again.
func (t *Target) voidBackfill(table uint32) {
	if t.page != nil && t.page.table == table {
		t.page = nil
	}
}

// writeBackfill writes the page that a marker was for.
func (t *Target) writeBackfill(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change) error {
	marker, err := strconv.ParseInt(markerField(c, "marker_id"), 10, 64)
	if err != nil {
		return fmt.Errorf("read a marker: %w", err)
	}
	page := t.page
	if page == nil || page.marker != marker {
		return nil // of an applier before this one, or void
	}
	t.page = nil
	name := fmt.Sprintf("stream %d", page.stream)
	return t.workFor(ctx, tx, worker{stream: page.stream}, name, func() error {
		return t.repeatIfStale(ctx, tx, func(bool) error {
			tab := t.cat.tables[page.table]
			if tab == nil || tab.shape != page.shape {
				return nil
			}
			for _, s := range tab.streams {
				if s.id == page.stream && s.seeding {
					if err := t.writeBackfillPage(ctx, tx, seqs, c, tab, s, page); err != nil {
						return fmt.Errorf("backfill stream %s: %w", s.label, err)
					}
					return t.checkStillTrue(ctx, tx, tab)
				}
			}
			return nil
		})
	})
}

func (t *Target) writeBackfillPage(
	ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change, tab *table, s *stream, page *backfillPage,
) error {
	if err := lockSeeding(ctx, tx, s); err != nil {
		return err
	}
	n := len(page.images)
	first := seqs.Reserve(int64(n+len(page.flaws)), t.cfg.Now())
	ids := make([]string, n)
	for i := range ids {
		ids[i] = koldproxy.EventID(first+koldproxy.Seq(i), c.CommitLSN)
	}
	var written int64
	if n > 0 {
		if err := t.makeRoom(ctx, tx, s, ids[n-1]); err != nil {
			return err
		}
		var batch pgx.Batch
		batch.Queue(`SET LOCAL koldstore.backfill = 'on'`)
		batch.Queue(backfillSQL(tab, s), ids, page.images).QueryRow(func(row pgx.Row) error { return row.Scan(&written) })
		batch.Queue(`SET LOCAL koldstore.backfill = 'off'`)
		if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
			return err
		}
	}
	for i, f := range page.flaws {
		if err := t.quarantineBackfill(ctx, tx, tab, s, first+koldproxy.Seq(n+i), c.CommitLSN, f); err != nil {
			return err
		}
	}
	t.done.events += written
	_, err := tx.Exec(ctx, `WITH noted AS (
			UPDATE koldstore.stream SET seed_key = coalesce($2, seed_key), reason = NULL WHERE stream_id = $1 RETURNING seed_job)
		UPDATE koldstore.job j
		SET status = 'running', started_at = coalesce(j.started_at, pg_catalog.clock_timestamp()), error = NULL,
		    progress = pg_catalog.jsonb_build_object('rows', coalesce((j.progress ->> 'rows')::bigint, 0) + $3::bigint,
		                                             'events', coalesce((j.progress ->> 'events')::bigint, 0) + $4::bigint)
		FROM noted WHERE j.job_id = noted.seed_job`, s.id, page.key, page.rows, written)
	if err != nil || !page.done {
		return err
	}
	return t.finishBackfill(ctx, tx, s)
}

// lockSeeding locks the row of a stream whose backfill is under way; errStale if it is not any more. DROP STREAM locks this row
// first and the log second, and so does who calls this.
func lockSeeding(ctx context.Context, tx pgx.Tx, s *stream) error {
	var one int
	err := tx.QueryRow(ctx, `SELECT 1 FROM koldstore.stream WHERE stream_id = $1 AND state = 'seeding' FOR NO KEY UPDATE`, s.id).Scan(&one)
	if errors.Is(err, pgx.ErrNoRows) {
		return errStale
	}
	return err
}

// backfillSQL writes those rows of a page that no event was about. Its parameters are ids and documents, in parallel.
func backfillSQL(tab *table, s *stream) string {
	return fmt.Sprintf(`WITH page AS (SELECT d.id, %[2]s AS k, d.doc
         FROM (SELECT u.id, u.doc::pg_catalog.jsonb AS doc FROM unnest($1::text[], $2::text[]) AS u(id, doc) OFFSET 0) d),
written AS (
  INSERT INTO %[1]s (id, op, k, ts, doc)
  SELECT p.id, 'put', p.k, pg_catalog.now(), p.doc FROM page p
  WHERE NOT EXISTS (SELECT FROM koldstore.seed_touched t
                    WHERE t.stream_id = %[3]d AND t.hash = pg_catalog.jsonb_hash_extended(p.k, 0) AND t.k OPERATOR(pg_catalog.=) p.k)
  RETURNING 1),
total AS (SELECT count(*) AS n FROM written),
counted AS (UPDATE koldstore.stream_status t SET events = t.events + total.n FROM total WHERE t.stream_id = %[3]d AND total.n > 0)
SELECT n FROM total`, s.log, keyJSON(tab, "d.doc"), s.id)
}

func (t *Target) quarantineBackfill(
	ctx context.Context, tx pgx.Tx, tab *table, s *stream, seq koldproxy.Seq, lsn koldproxy.LSN, f backfillFlaw,
) error {
	if err := t.countLost(ctx, tx, s); err != nil {
		return err
	}
	if err := t.putAside(ctx, tx, tab, &s.id, seq, koldproxy.OpInsert, lsn, f.cause.Code, f.cause.Message, &f.literal); err != nil {
		return err
	}
	t.log.Warn().Str("stream", s.label).Str("table", tab.name).Str("sqlstate", f.cause.Code).Msg("a row could not be backfilled and is in quarantine")
	return nil
}

// finishBackfill makes the stream one like all others. Live push begins behind what was backfilled.
func (t *Target) finishBackfill(ctx context.Context, tx pgx.Tx, s *stream) error {
	for _, sql := range []string{
		fmt.Sprintf(`DELETE FROM koldstore.seed_touched WHERE stream_id = %d`, s.id),
		fmt.Sprintf(`ALTER TABLE %s DISABLE TRIGGER koldproxy_seed`, s.log),
		fmt.Sprintf(`DROP FUNCTION koldstore.%s(text[], bigint)`, ident("reader_"+strconv.FormatInt(s.id, 10))),
		fmt.Sprintf(`UPDATE koldstore.stream_status SET tail_id = (SELECT max(id) FROM %s) WHERE stream_id = %d`, s.log, s.id),
		fmt.Sprintf(`WITH ready AS (UPDATE koldstore.stream SET state = 'active' WHERE stream_id = %d RETURNING seed_job)
			UPDATE koldstore.job j SET status = 'completed', ended_at = pg_catalog.clock_timestamp() FROM ready WHERE j.job_id = ready.seed_job`, s.id),
	} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return fmt.Errorf("finish the backfill: %w", err)
		}
	}
	t.log.Info().Str("stream", s.label).Msg("stream is backfilled")
	t.pageRows = 0
	t.forgetLater = true
	return nil
}

// makeRoom sees to it that a log has a partition for an id. The sweep makes partitions ahead of time; this is for a log that
// nothing was written to for long, or whose time has come all at once.
func (t *Target) makeRoom(ctx context.Context, tx pgx.Tx, s *stream, id string) error {
	if id < s.end {
		return nil
	}
	millis, err := strconv.ParseInt(id[:17], 10, 64)
	if err != nil {
		return fmt.Errorf("read event id %s: %w", id, err)
	}
	// The catalog's copy of the end stays as it is: this may be rolled back to a savepoint.
	_, err = tx.Exec(ctx, `SELECT koldstore.extend_log(s.log_oid, s.stream_id, s.retention, $2) FROM koldstore.stream s WHERE s.stream_id = $1`, s.id, millis)
	if err != nil {
		return fmt.Errorf("extend the log of stream %s: %w", s.label, err)
	}
	t.forgetLater = true
	return nil
}
