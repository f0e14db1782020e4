package changefeed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// applyTruncate says of every row that it is gone: a tombstone for each live key of the mirror, later for those in cold storage, and in
// each stream a delete for each key whose last event is a put, with that event's doc.
func (t *Target) applyTruncate(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change) error {
	if err := t.load(ctx, tx); err != nil {
		return err
	}
	if t.cat.tables[c.Relation.OID] == nil {
		return nil
	}
	t.voidBackfill(c.Relation.OID)
	return t.repeatIfStale(ctx, tx, func(last bool) error {
		tab := t.cat.tables[c.Relation.OID]
		if tab == nil {
			return nil
		}
		err := t.truncateTable(ctx, tx, seqs, c, tab)
		if err != nil && blame(err) == definition && !last {
			return errStale
		}
		if err != nil {
			return fmt.Errorf("apply a truncate of %s: %w", tab.name, err)
		}
		return t.checkStillTrue(ctx, tx, tab)
	})
}

func (t *Target) truncateTable(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change, tab *table) error {
	if tab.mirror != nil {
		if err := t.truncateMirror(ctx, tx, seqs, tab); err != nil {
			return err
		}
	}
	for _, s := range tab.streams {
		if err := t.truncateStream(ctx, tx, seqs, c, s); err != nil {
			return err
		}
	}
	return nil
}

func (t *Target) truncateMirror(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table) error {
	// A flush moves rows from the mirror to a segment; the lock lets it do so before or after, not meanwhile.
	var one int
	err := tx.QueryRow(ctx, `SELECT 1 FROM koldstore.managed_table WHERE mirror_oid = $1 FOR UPDATE`, tab.mirror.oid).Scan(&one)
	if errors.Is(err, pgx.ErrNoRows) {
		return errStale
	}
	if err != nil {
		return err
	}
	m, keys := tab.mirror, strings.Join(tab.mirror.keys, ", ")
	var live int64
	if err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) FROM %s WHERE op <> 3`, m.name)).Scan(&live); err != nil {
		return err
	}
	if live > 0 {
		tag, err := tx.Exec(ctx, fmt.Sprintf(`WITH live AS (SELECT seq, row_number() OVER (ORDER BY %[2]s) - 1 AS n FROM %[1]s WHERE op <> 3)
			UPDATE %[1]s m SET seq = $1 + live.n, op = 3, row_image = NULL FROM live WHERE m.seq = live.seq`, m.name, keys),
			int64(seqs.Reserve(live, t.cfg.Now())))
		if err != nil {
			return err
		}
		t.done.mirrorRows += tag.RowsAffected()
	}
	return t.truncateCold(ctx, tx, seqs, tab)
}

// truncateCold has the cold rows of a table compared with it, if there are any, as a healing does: no storage is asked while
// changes wait. Those that are live, and not in the mirror, get their tombstones then.
func (t *Target) truncateCold(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table) error {
	segments, err := coldSegments(ctx, tx, tab, -1)
	if err != nil || len(segments) == 0 {
		return err
	}
	// The mirror is right already, unless its comparison was under way.
	if _, err := tx.Exec(ctx, `SELECT koldstore.begin_heal($1, NULL, $2)`, tab.oid, int64(seqs.Watermark())); err != nil {
		return err
	}
	if !tab.mirror.seeding {
		if _, err := tx.Exec(ctx, `UPDATE koldstore.managed_table SET heal_step = 'cold' WHERE table_oid = $1 AND state = 'healing'`, tab.oid); err != nil {
			return err
		}
	}
	t.forgetLater = true
	return nil
}

func textArray(values []json.RawMessage) []string {
	out := make([]string, len(values))
	for i := range values {
		out[i] = string(values[i])
	}
	return out
}

// truncateStream tells of the keys that are live in a stream's log: those whose last event is a put. Before the last TRUNCATE there
// are none. A backfill ends here, since a row that is in the table now came after the truncate, and so as an event.
func (t *Target) truncateStream(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change, s *stream) error {
	if s.seeding {
		if err := lockSeeding(ctx, tx, s); err != nil {
			return err
		}
	}
	live := fmt.Sprintf(`SELECT l.k, l.doc, row_number() OVER (ORDER BY l.k) - 1 AS n
		FROM (SELECT DISTINCT ON (k) k, op, doc FROM %s
			WHERE id > coalesce((SELECT truncated_id FROM koldstore.stream_status WHERE stream_id = %d), '') ORDER BY k, id DESC) l WHERE l.op = 'put'`, s.log, s.id)
	var n int64
	if err := tx.QueryRow(ctx, `SELECT count(*) FROM (`+live+`) x`).Scan(&n); err != nil {
		return err
	}
	first := seqs.Reserve(max(n, 1), t.cfg.Now())
	last := koldproxy.EventID(first+koldproxy.Seq(max(n, 1)-1), c.CommitLSN)
	if n > 0 {
		if err := t.writeTruncate(ctx, tx, c, s, live, first, last); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, `UPDATE koldstore.stream_status SET events = events + $1, truncated_id = $2 WHERE stream_id = $3`, n, last, s.id)
	t.done.events += n
	if err != nil || !s.seeding {
		return err
	}
	return t.finishBackfill(ctx, tx, s)
}

// writeTruncate writes a delete for each live key, with ids up to last.
func (t *Target) writeTruncate(
	ctx context.Context, tx pgx.Tx, c *koldproxy.Change, s *stream, live string, first koldproxy.Seq, last string,
) error {
	if err := t.makeRoom(ctx, tx, s, last); err != nil {
		return err
	}
	old, oldValue := "", ""
	if s.preImage {
		old, oldValue = ", old", ", live.doc"
	}
	_, err := tx.Exec(ctx, fmt.Sprintf(`WITH live AS (%s)
		INSERT INTO %s (id, op, k, ts, doc%s) SELECT koldstore.event_id($1 + live.n, $2::text::pg_lsn), 'delete', live.k, $3, live.doc%s FROM live`,
		live, s.log, old, oldValue), int64(first), c.CommitLSN.String(), c.CommitTime)
	return err
}
