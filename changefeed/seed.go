package changefeed

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

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
	if t.seedDue() == nil {
		return false, nil
	}
	err = t.repeatIfStale(ctx, tx, func(last bool) error {
		tab := t.seedDue()
		if tab == nil {
			return nil
		}
		err := t.seedPage(ctx, tx, seqs, tab)
		if err != nil && blame(err) == definition {
			if !last {
				return errStale
			}
			return t.giveUpSeed(ctx, tx, tab, err)
		}
		if err != nil {
			return fmt.Errorf("seed the mirror of %s: %w", tab.name, err)
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	return t.cat == nil || t.seedDue() != nil, nil
}

// seedDue is a table that is being seeded, always the same one until it is done.
func (t *Target) seedDue() *table {
	var due *table
	for _, tab := range t.cat.tables {
		if tab.mirror != nil && tab.mirror.seeding && (due == nil || tab.mirror.oid < due.mirror.oid) {
			due = tab
		}
	}
	return due
}

// endAbandonedSeeds ends the jobs of tables that were dropped before their seed was through; somebody may wait for them.
func (t *Target) endAbandonedSeeds(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `UPDATE koldstore.job j SET status = 'error', error = 'the table is not managed any more', ended_at = pg_catalog.clock_timestamp()
		WHERE j.job_type = 'seed' AND j.status IN ('queued', 'running')
		  AND NOT EXISTS (SELECT FROM koldstore.managed_table m WHERE m.seed_job = j.job_id AND m.state IN ('pending', 'seeding'))`)
	if err != nil {
		return fmt.Errorf("end abandoned seeds: %w", err)
	}
	return nil
}

func (t *Target) giveUpSeed(ctx context.Context, tx pgx.Tx, tab *table, cause error) error {
	if _, err := tx.Exec(ctx, "ROLLBACK TO SAVEPOINT koldproxy_run"); err != nil {
		return err
	}
	err := t.breakMirror(ctx, tx, tab, "seeding it failed: "+publicReason(cause))
	t.forget()
	return err
}

// lockedPause is how long a seed waits for a catalog row that somebody else has locked, with changes waiting behind it.
const lockedPause = 20 * time.Millisecond

func (t *Target) seedPage(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table) error {
	var key *string
	err := tx.QueryRow(ctx, `SELECT seed_key FROM koldstore.managed_table
		WHERE mirror_oid = $1 AND state = 'seeding' FOR NO KEY UPDATE SKIP LOCKED`, tab.mirror.oid).Scan(&key)
	if errors.Is(err, pgx.ErrNoRows) {
		return t.seedLocked(ctx, tx, tab)
	}
	if err != nil {
		return err
	}
	// SET LOCAL ends with the savepoint's rollback or the transaction. Better an error than rows that are left out silently.
	if _, err := tx.Exec(ctx, `SET LOCAL row_security = off`); err != nil {
		return err
	}
	for limit := t.cfg.SeedRows; limit > 0; limit /= 2 {
		var page seededPage
		err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error { // a savepoint
			first := seqs.Reserve(int64(limit), t.cfg.Now())
			args := []any{int64(first)}
			if key != nil {
				args = append(args, *key)
			}
			err := part.QueryRow(ctx, seedSQL(tab, key == nil, limit), args...).Scan(&page.read, &page.written, &page.lastKey)
			if err != nil {
				return err
			}
			return t.checkStillTrue(ctx, part, tab)
		})
		if err == nil {
			return t.notePage(ctx, tx, tab, page, limit)
		}
		if blame(err) != row {
			return err
		}
	}
	return t.skipBadSeed(ctx, tx, seqs, tab, key)
}

type seededPage struct {
	read, written int64
	lastKey       *string
}

// seedSQL copies the first rows whose key is above $2, a literal of the mirror's row type, with seqs from $1 on; without $2
// it begins with the first row.
func seedSQL(tab *table, begin bool, limit int) string {
	m := tab.mirror
	return fmt.Sprintf(`WITH page AS MATERIALIZED (%[1]s),
written AS (INSERT INTO %[2]s (%[3]s, seq, op, row_image)
	SELECT %[4]s, $1::bigint + row_number() OVER (ORDER BY %[4]s) - 1, 1, pg_catalog.to_jsonb(page.r) FROM page ON CONFLICT DO NOTHING RETURNING 1)
SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM written), (%[5]s)`,
		pageSQL(tab, begin, "$2", limit), m.name, strings.Join(m.keys, ", "), tab.pageKeys(""), lastKeySQL(tab))
}

// pageSQL reads rows in key order. The limit is a constant and the first page has no condition, so that a plan made for
// unknown parameters walks the primary key too.
func pageSQL(tab *table, begin bool, after string, limit int) string {
	key := list(len(tab.key), func(i int) string { return "_ks_row." + ident(tab.column(tab.key[i]).name) })
	where := ""
	if !begin {
		where = fmt.Sprintf("WHERE (%s) > (%s) ", key,
			list(len(tab.key), func(i int) string {
				return fmt.Sprintf("(%s::text::%s).%s", after, tab.mirror.name, tab.mirror.keys[i])
			}))
	}
	return fmt.Sprintf(`SELECT _ks_row AS r FROM ONLY %s _ks_row %sORDER BY %s LIMIT %d`, tab.name, where, key, limit)
}

// lastKeySQL is the key of the page's last row as a literal of the mirror's row type.
func lastKeySQL(tab *table) string {
	return fmt.Sprintf(`SELECT ROW(%s, NULL, NULL, NULL)::%s::text FROM page ORDER BY %s LIMIT 1`, tab.pageKeys(""), tab.mirror.name, tab.pageKeys(" DESC"))
}

// pageKeys are the key columns of the rows of page.
func (t *table) pageKeys(direction string) string {
	return list(len(t.key), func(i int) string { return "(page.r)." + ident(t.column(t.key[i]).name) + direction })
}

// notePage remembers where the seed is, and that it is done if the page was short.
func (t *Target) notePage(ctx context.Context, tx pgx.Tx, tab *table, page seededPage, limit int) error {
	done := page.read < int64(limit)
	_, err := tx.Exec(ctx, `WITH noted AS (
			UPDATE koldstore.managed_table SET seed_key = coalesce($2, seed_key), state = CASE WHEN $3 THEN 'active' ELSE state END
			WHERE mirror_oid = $1 RETURNING seed_job)
		UPDATE koldstore.job j
		SET status = CASE WHEN $3 THEN 'completed' ELSE 'running' END, started_at = coalesce(j.started_at, pg_catalog.clock_timestamp()),
		    ended_at = CASE WHEN $3 THEN pg_catalog.clock_timestamp() END,
		    progress = pg_catalog.jsonb_build_object('rows', coalesce((j.progress ->> 'rows')::bigint, 0) + $4::bigint)
		FROM noted WHERE j.job_id = noted.seed_job`, tab.mirror.oid, page.lastKey, done, page.written)
	if err != nil {
		return err
	}
	t.done.seededRows += page.written
	if done {
		tab.mirror.seeding = false
		t.log.Info().Str("table", tab.name).Msg("mirror is seeded")
	}
	return nil
}

// skipBadSeed puts the next row, which cannot be copied, into quarantine and goes on after it.
func (t *Target) skipBadSeed(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table, key *string) error {
	var rowText, lastKey *string
	cause := &pgconn.PgError{Code: "22000", Message: "the row cannot be copied into the mirror"}
	err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error {
		var args []any
		if key != nil {
			args = append(args, *key)
		}
		return part.QueryRow(ctx, fmt.Sprintf(`WITH page AS MATERIALIZED (%s) SELECT (page.r)::text, (%s) FROM page`,
			pageSQL(tab, key == nil, "$1", 1), lastKeySQL(tab)), args...).Scan(&rowText, &lastKey)
	})
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error {
		var ignored *string
		return part.QueryRow(ctx, `SELECT pg_catalog.to_jsonb($1::text::`+tab.name+`)::text`, rowText).Scan(&ignored)
	})
	errors.As(err, &cause)
	_, err = tx.Exec(ctx, `INSERT INTO koldstore.quarantine (table_oid, seq, op, commit_lsn, sqlstate, message, row_text)
		VALUES ($1, $2, 1, '0/0', $3, $4, $5)`, tab.oid, int64(seqs.Reserve(1, t.cfg.Now())), cause.Code, cause.Message, rowText)
	if err != nil {
		return fmt.Errorf("put a row into quarantine: %w", err)
	}
	t.done.quarantined++
	t.log.Warn().Str("table", tab.name).Str("sqlstate", cause.Code).Msg("a row could not be copied into the mirror and is in quarantine")
	return t.notePage(ctx, tx, tab, seededPage{read: 1, lastKey: lastKey}, 1)
}

// seedLocked waits a moment for a row that somebody has locked, or finds that it is gone.
func (t *Target) seedLocked(ctx context.Context, tx pgx.Tx, tab *table) error {
	if err := t.checkStillTrue(ctx, tx, tab); err != nil {
		return err
	}
	select {
	case <-time.After(lockedPause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
