package changefeed

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// Background copies one page of an existing table into its mirror, if there is one to copy. It goes through the table in the
// order of its primary key and remembers in managed_table.seed_key where it is, in the same transaction, so it goes on there
// after a crash. A key that the mirror has already stays as it is: live changes win. It says whether more is waiting.
//
// The page shows the table as it is now, which may be ahead of the log; the changes that are still to come bring the mirror to
// the same rows with higher seqs.
//
// What fails rests for a while (see workFor), and nobody waits for cold storage here; then more may be waiting although this says
// that nothing is, until [Config.Wake] is called.
func (t *Target) Background(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence) (more bool, err error) {
	if err := t.load(ctx, tx); err != nil {
		return false, err
	}
	if !t.tidied {
		if err := t.endAbandonedSeeds(ctx, tx); err != nil {
			return false, err
		}
		t.tidied = true
	}
	if tab, s := t.backfillDue(); s != nil {
		err = t.workFor(ctx, tx, worker{stream: s.id}, s.label, func() error { return t.readBackfill(ctx, tx, tab, s) })
	} else if tab := t.seedDue(); tab != nil {
		err = t.workFor(ctx, tx, worker{table: tab.oid}, tab.name, func() error { return t.seed(ctx, tx, seqs, tab.oid) })
	}
	if err != nil {
		return false, err
	}
	return t.Due(), nil
}

// Due says whether Background may have something to do.
func (t *Target) Due() bool {
	if t.cat == nil || !t.tidied {
		return true
	}
	_, s := t.backfillDue()
	return s != nil || t.seedDue() != nil
}

// seed copies a page of a table, or compares one.
func (t *Target) seed(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, oid uint32) error {
	return t.repeatIfStale(ctx, tx, func(last bool) error {
		tab := t.cat.tables[oid]
		if !tab.seeding() {
			return nil
		}
		err := t.seedPage(ctx, tx, seqs, tab, last)
		if err != nil && blame(err) == definition {
			if !last {
				return errStale
			}
			return t.giveUpSeed(ctx, tx, tab, publicReason(err))
		}
		if err != nil {
			return fmt.Errorf("seed the mirror of %s: %w", tab.name, err)
		}
		return nil
	})
}

// seeding says that a table is being seeded or healed. The table may be nil.
func (t *table) seeding() bool { return t != nil && t.mirror != nil && t.mirror.seeding }

// seedDue is a table that is being seeded and can go on, always the same one until it is done.
func (t *Target) seedDue() *table {
	t.cold.forget(func(oid uint32) bool { return t.cat.tables[oid].seeding() })
	var due *table
	for _, tab := range t.cat.tables {
		if tab.seeding() && !t.cold.reading(tab.oid) && !t.asleep(worker{table: tab.oid}) && (due == nil || tab.mirror.oid < due.mirror.oid) {
			due = tab
		}
	}
	return due
}

// endAbandonedSeeds ends the jobs of tables that were dropped before their seed was through; somebody may wait for them.
func (t *Target) endAbandonedSeeds(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `UPDATE koldstore.job j SET status = 'error', error = 'the table is not managed any more', ended_at = pg_catalog.clock_timestamp()
		WHERE j.job_type IN ('seed', 'heal') AND j.status IN ('queued', 'running')
		  AND NOT EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = j.table_oid AND m.state IN ('pending', 'seeding', 'healing'))
		  AND NOT EXISTS (SELECT FROM koldstore.managed_table m WHERE m.table_oid = j.table_oid AND j.job_type = 'heal' AND j.status = 'queued')`)
	if err != nil {
		return fmt.Errorf("end abandoned seeds: %w", err)
	}
	return nil
}

func (t *Target) giveUpSeed(ctx context.Context, tx pgx.Tx, tab *table, reason string) error {
	if _, err := tx.Exec(ctx, undoRun); err != nil {
		return err
	}
	err := t.breakMirror(ctx, tx, tab, "seeding it failed: "+reason)
	t.forget()
	return err
}

func (t *Target) seedPage(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table, last bool) error {
	var key *string
	var h healing
	err := tx.QueryRow(ctx, `SELECT seed_key, coalesce(heal_step, ''), heal_seq, heal_through, floor, generation FROM koldstore.managed_table
		WHERE mirror_oid = $1 AND state IN ('seeding', 'healing') FOR NO KEY UPDATE SKIP LOCKED`, tab.mirror.oid).
		Scan(&key, &h.step, &h.seq, &h.through, &h.floor, &h.generation)
	if errors.Is(err, pgx.ErrNoRows) {
		return t.seedLocked(ctx, tx, tab)
	}
	if err != nil {
		return err
	}
	limit := tab.mirror.page
	if limit == 0 {
		limit = min(firstPage, t.cfg.SeedRows)
	}
	var page *seedPage
	if h.seqs() {
		err = t.healPage(ctx, tx, seqs, tab, &h, last)
	} else {
		page, err = readPage(ctx, tx, tab, key, limit)
	}
	var foreign *foreignCodeError
	switch {
	case errors.Is(err, errBusy):
		return t.seedLocked(ctx, tx, tab)
	case errors.As(err, &foreign):
		if err := t.checkStillTrue(ctx, tx, tab); err != nil {
			return err
		}
		return t.giveUpSeed(ctx, tx, tab, foreign.reason)
	case err != nil || h.seqs():
		return err
	}
	n := len(page.rows)
	if h.step != "" {
		if err := t.leaveMissing(ctx, tx, tab, page); err != nil {
			return err
		}
	}
	ruined, err := t.writePage(ctx, tx, seqs.Reserve(int64(limit), t.cfg.Now()), tab, page, last)
	if err != nil {
		return err
	}
	if err := t.checkStillTrue(ctx, tx, tab); err != nil {
		return err
	}
	if ruined != "" {
		return t.giveUpSeed(ctx, tx, tab, ruined)
	}
	tab.mirror.page = min(max(pageBytes/(page.bytes/max(n, 1)+1), 1), t.cfg.SeedRows)
	return t.notePage(ctx, tx, tab, page, n, n < limit)
}

// A page is as large as fits into pageBytes, judged by the page before; the first one has at most firstPage rows.
const (
	firstPage = 64
	pageBytes = 8 << 20
)

// seedPage is a part of a table in the order of its key.
type seedPage struct {
	rows, keys []string // literals of the table's row type, and of the mirror's
	last       *string  // the last key; nil if there is none
	bytes      int
	written    int64
}

// readPage reads the rows whose key is above a literal of the mirror's row type; nil begins with the first row. Only output
// functions see the rows.
func readPage(ctx context.Context, tx pgx.Tx, tab *table, after *string, limit int) (*seedPage, error) {
	m, page := tab.mirror, &seedPage{}
	column := func(i int) string { return "_ks_row." + ident(tab.column(tab.key[i]).name) }
	order := list(len(tab.key), column)
	where, args := "", []any{}
	if after != nil {
		where = "WHERE " + tab.keyAbove(column, func(i int) string { return fmt.Sprintf("($1::text::%s).%s", m.name, m.keys[i]) })
		args = append(args, *after)
	}
	// The limit is a constant and the first page has no condition, so that a plan made for unknown parameters walks the
	// primary key too.
	sql := fmt.Sprintf(`SELECT pg_catalog.format('%%s', _ks_row), pg_catalog.format('%%s', %s)
		FROM %s _ks_row %s ORDER BY %s LIMIT %d`, m.record(column), tab.from(), where, order, limit)
	err := readTable(ctx, tx, tab, func() error {
		rows, err := tx.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		var row, key string
		_, err = pgx.ForEachRow(rows, []any{&row, &key}, func() error {
			page.rows, page.keys, page.bytes = append(page.rows, row), append(page.keys, key), page.bytes+len(row)
			return nil
		})
		return err
	})
	if n := len(page.keys); n > 0 {
		last := page.keys[n-1] // the page may be thinned out
		page.last = &last
	}
	return page, err
}

// writePage writes those rows of a page that are not in the mirror yet, with seqs from first on. Rows that do not become JSON
// go to quarantine. ruined is why no row of the table can become JSON.
func (t *Target) writePage(ctx context.Context, tx pgx.Tx, first koldproxy.Seq, tab *table, page *seedPage, last bool) (ruined string, err error) {
	answers, questions := make([]judged, len(page.rows)), make([]question, len(page.rows))
	for i := range questions {
		questions[i] = question{literal: page.rows[i], answer: &answers[i], asks: make([]bool, len(tab.streams))}
	}
	j := t.newJudge(idle(tx), tab, last)
	if err := j.ask(ctx, questions); err != nil || j.ruined != "" {
		return j.ruined, err
	}
	var keys, images []string
	var seqs []int64
	for i := range answers {
		seq := first + koldproxy.Seq(i)
		if answers[i].failed == nil {
			keys, images, seqs = append(keys, page.keys[i]), append(images, *answers[i].image), append(seqs, int64(seq))
		} else if err := t.quarantineSeed(ctx, tx, tab, seq, page.rows[i], answers[i].failed); err != nil {
			return "", err
		}
	}
	m := tab.mirror
	tag, err := tx.Exec(ctx, fmt.Sprintf(`INSERT INTO %[1]s (%[2]s, seq, op, row_image)
		SELECT %[3]s, d.seq, 1, d.image
		FROM (SELECT u.key::%[1]s AS row, u.seq, u.image::pg_catalog.jsonb AS image
		      FROM unnest($1::text[], $2::bigint[], $3::text[]) AS u(key, seq, image) OFFSET 0) d
		ON CONFLICT DO NOTHING`, m.name, strings.Join(m.keys, ", "), list(len(m.keys), func(i int) string { return "(d.row)." + m.keys[i] })), keys, seqs, images)
	page.written = tag.RowsAffected()
	return "", err
}

func (t *Target) quarantineSeed(ctx context.Context, tx pgx.Tx, tab *table, seq koldproxy.Seq, literal string, cause *pgconn.PgError) error {
	if err := t.putAside(ctx, tx, tab, nil, seq, koldproxy.OpInsert, 0, cause.Code, cause.Message, &literal); err != nil {
		return err
	}
	t.log.Warn().Str("table", tab.name).Str("sqlstate", cause.Code).Msg("a row could not be copied into the mirror and is in quarantine")
	return nil
}

// notePage remembers where the seed is after a page of so many rows, and that it is done if the page was short.
func (t *Target) notePage(ctx context.Context, tx pgx.Tx, tab *table, page *seedPage, rows int, done bool) error {
	_, err := tx.Exec(ctx, `WITH noted AS (
			UPDATE koldstore.managed_table SET seed_key = coalesce($2, seed_key), state = CASE WHEN $3 THEN 'active' ELSE state END,
			    heal_step = CASE WHEN NOT $3 THEN heal_step END, reason = NULL
			WHERE mirror_oid = $1 RETURNING seed_job)`+jobSQL, tab.mirror.oid, page.last, done, page.written, rows)
	if err != nil {
		return err
	}
	t.done.seededRows += page.written
	if done {
		tab.mirror.seeding = false
		if _, err := tx.Exec(ctx, `DROP TABLE IF EXISTS `+tab.mirror.scratch()); err != nil {
			return err
		}
		t.log.Info().Str("table", tab.name).Msg("mirror is seeded")
	}
	return nil
}

// jobSQL brings the job of a table up to date; it goes on from a statement named noted. $3 says whether the job is done, $4 and $5
// how many rows were written and looked at.
const jobSQL = `
		UPDATE koldstore.job j
		SET status = CASE WHEN $3 THEN 'completed' ELSE 'running' END, started_at = coalesce(j.started_at, pg_catalog.clock_timestamp()),
		    ended_at = CASE WHEN $3 THEN pg_catalog.clock_timestamp() END, error = NULL,
		    progress = j.progress || pg_catalog.jsonb_build_object('rows', coalesce((j.progress ->> 'rows')::bigint, 0) + $4::bigint,
		        'checked', coalesce((j.progress ->> 'checked')::bigint, 0) + $5::bigint)
		FROM noted WHERE j.job_id = noted.seed_job`

// seedLocked waits a moment for a row that somebody has locked, or finds that it is gone.
func (t *Target) seedLocked(ctx context.Context, tx pgx.Tx, tab *table) error {
	if err := t.checkStillTrue(ctx, tx, tab); err != nil {
		return err
	}
	return pause(ctx)
}
