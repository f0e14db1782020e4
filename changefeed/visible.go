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

// The pauses between two looks at whether a transaction has become visible.
const (
	firstLook   = 50 * time.Microsecond
	slowestLook = 5 * time.Millisecond
)

// waitUntilVisible waits until this session sees what the transactions of changes have done. A commit is in the log, and comes
// here, a moment before other sessions see it (longer with a synchronous standby). Going on would look for streams and columns
// that are not there yet, and show readers of a log events of rows that they cannot find.
func waitUntilVisible(ctx context.Context, tx pgx.Tx, changes []koldproxy.Change) error {
	var ids []int64
	for i := range changes {
		if id := int64(changes[i].XID); len(ids) == 0 || ids[len(ids)-1] != id {
			ids = append(ids, id)
		}
	}
	pause := firstLook
	for {
		var visible bool
		if err := tx.QueryRow(ctx, visibleSQL, ids).Scan(&visible); err != nil {
			return fmt.Errorf("wait until a transaction is visible: %w", err)
		}
		if visible {
			return nil
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
