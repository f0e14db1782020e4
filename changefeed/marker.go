package changefeed

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// isMarker says whether a change is of koldstore.wal_marker.
func isMarker(c *koldproxy.Change) bool {
	return c.Relation.Name == "wal_marker" && c.Relation.Namespace == "koldstore"
}

// begin lets a stream or a managed table take part from here on. Its marker was written in the transaction that created it,
// while no writer of the table was in the middle of anything. A shape takes effect in the same way.
func (t *Target) begin(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change) error {
	if c.Op != koldproxy.OpInsert {
		return nil // somebody tidies up
	}
	kind, at := markerField(c, "kind"), markerField(c, "at")
	subject, err := strconv.ParseInt(markerField(c, "subject"), 10, 64)
	if err != nil {
		return fmt.Errorf("read a marker: %w", err)
	}
	switch kind {
	case "shape":
		return t.beginShape(ctx, tx, uint32(subject), markerField(c, "details"))
	case "heal":
		return t.beginHeal(ctx, tx, seqs, c, uint32(subject))
	case "page":
		return t.writeBackfill(ctx, tx, seqs, c)
	case "stream":
		var seedMax koldproxy.Seq
		began := seqs.Watermark() + 1 // no event's
		err = tx.QueryRow(ctx, `UPDATE koldstore.stream SET state = CASE WHEN seed_job IS NULL THEN 'active' ELSE 'seeding' END,
				began = CASE start_at WHEN 'now' THEN koldstore.event_id($2, '0/0') END
			WHERE stream_id = $1 AND state = 'pending' RETURNING seed_max_seq`, subject, int64(began)).Scan(&seedMax)
		if err == nil {
			seqs.Raise(max(began, seedMax))
		}
	case "table":
		// A table may have been managed, given up and managed again before this marker came by. Only the marker of today's
		// reign counts; both were stamped by the same now().
		var one int
		err = tx.QueryRow(ctx, `UPDATE koldstore.managed_table SET state = 'seeding'
			WHERE table_oid = $1 AND state = 'pending' AND created_at = $2::text::timestamptz RETURNING 1`, subject, at).Scan(&one)
	default:
		return fmt.Errorf("read a marker: unknown kind %q", kind)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return t.refuseIfInvisible(ctx, tx, c) // it has been dropped again
	}
	if err != nil {
		return fmt.Errorf("begin %s %d: %w", kind, subject, err)
	}
	t.forget()
	return nil
}

// refuseIfInvisible fails while the transaction that wrote the marker is not visible, which happens only if it waits for the
// applier itself (see waitUntilVisible). Passing over it would lose the stream's beginning for good.
func (t *Target) refuseIfInvisible(ctx context.Context, tx pgx.Tx, c *koldproxy.Change) error {
	now, err := currentSnapshot(ctx, tx)
	if err != nil {
		return fmt.Errorf("look at a marker's transaction: %w", err)
	}
	if !now.shows(c.XID) {
		return errors.New("a stream or managed table cannot begin: its transaction waits for koldproxy as a synchronous standby")
	}
	return nil
}

func markerField(c *koldproxy.Change, name string) string {
	for i := range c.Relation.Columns {
		if c.Relation.Columns[i].Name == name && i < len(c.New) {
			return c.New[i].Text
		}
	}
	return ""
}

// breakStream takes a stream out for good, loudly. What it has captured stays.
func (t *Target) breakStream(ctx context.Context, tx pgx.Tx, s *stream, reason string) error {
	if _, err := tx.Exec(ctx, `UPDATE koldstore.stream SET state = 'broken', reason = $2 WHERE stream_id = $1`, s.id, reason); err != nil {
		return fmt.Errorf("mark stream %s broken: %w", s.label, err)
	}
	t.done.broken++
	t.log.Error().Str("stream", s.label).Str("reason", reason).Msg("stream is broken and captures nothing any more")
	return nil
}

// breakMirror does the same to a managed table.
func (t *Target) breakMirror(ctx context.Context, tx pgx.Tx, tab *table, reason string) error {
	_, err := tx.Exec(ctx, `WITH broken AS (
			UPDATE koldstore.managed_table SET state = 'broken', reason = $2 WHERE table_oid = $1 RETURNING seed_job)
		UPDATE koldstore.job j SET status = 'error', error = $2, ended_at = pg_catalog.clock_timestamp()
		FROM broken WHERE j.job_id = broken.seed_job AND j.status IN ('queued', 'running')`, tab.oid, reason)
	if err != nil {
		return fmt.Errorf("mark the mirror of %s broken: %w", tab.name, err)
	}
	tab.mirror = nil
	t.done.broken++
	t.log.Error().Str("table", tab.name).Str("reason", reason).Msg("change feed is broken and follows its table no longer")
	return nil
}
