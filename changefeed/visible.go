package changefeed

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// visibleSQL asks whether transactions, given by the 32 bits of their ids that the log carries, are visible to this statement.
// The missing upper half is that of the newest transaction, or the one before or after if that is nearer.
const visibleSQL = `SELECT bool_and(pg_catalog.pg_visible_in_snapshot(
		(x.id + CASE WHEN x.id > n.newest + 2147483648 THEN -4294967296 WHEN x.id < n.newest - 2147483648 THEN 4294967296 ELSE 0 END)::text::xid8, n.snapshot))
	FROM (SELECT s.snapshot, pg_catalog.pg_snapshot_xmax(s.snapshot)::text::bigint AS newest FROM (SELECT pg_catalog.pg_current_snapshot() AS snapshot) s) n,
	     LATERAL (SELECT ((n.newest >> 32) << 32) + u.id AS id FROM unnest($1::bigint[]) AS u(id)) x`

// The pauses between two looks at whether a transaction has become visible, and when to ask why it takes so long.
const (
	firstLook   = 50 * time.Microsecond
	slowestLook = 5 * time.Millisecond
	suspicious  = 100 * time.Millisecond
)

// waitUntilVisible waits until this session sees what the transactions of changes have done. A commit is in the log, and comes
// here, a moment before other sessions see it; the moment is long while it waits for a synchronous standby. Going on would look
// for streams and columns that are not there yet, and show readers of a log events of rows that they cannot find.
//
// If the server takes the applier itself for a synchronous standby (synchronous_standby_names = '*' does), the commit waits
// for this very change to be applied, so waiting for it would be a deadlock. Then it is not waited for.
func (t *Target) waitUntilVisible(ctx context.Context, tx pgx.Tx, changes []koldproxy.Change) error {
	var ids []int64
	for i := range changes {
		if id := int64(changes[i].XID); len(ids) == 0 || ids[len(ids)-1] != id {
			ids = append(ids, id)
		}
	}
	pause, begun := firstLook, time.Now()
	for {
		var visible bool
		if err := tx.QueryRow(ctx, visibleSQL, ids).Scan(&visible); err != nil {
			return fmt.Errorf("wait until a transaction is visible: %w", err)
		}
		if visible || t.isStandby {
			return nil
		}
		if time.Since(begun) > suspicious {
			if err := t.askWhetherStandby(ctx, tx); err != nil {
				return err
			}
			begun = time.Now()
			continue
		}
		timer := time.NewTimer(pause)
		pause = min(2*pause, slowestLook)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

func (t *Target) askWhetherStandby(ctx context.Context, tx pgx.Tx) error {
	err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM koldstore.checkpoint c
		JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name
		JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid WHERE r.sync_state IN ('sync', 'quorum'))`).Scan(&t.isStandby)
	if err != nil {
		return fmt.Errorf("ask whether the applier counts as a standby: %w", err)
	}
	if t.isStandby {
		t.log.Error().Msg("synchronous_standby_names takes koldproxy for a standby: commits of applications wait until they are applied; name your standbys there")
	}
	return nil
}
