package changefeed

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
)

// readTable reads from the table itself. The savepoint around it gives the table's lock back: the eval session needs one of
// its own, and would wait behind an ALTER TABLE that waits for ours.
func readTable(ctx context.Context, tx pgx.Tx, read func() error) error {
	// Better an error than rows that are left out silently.
	_, err := tx.Exec(ctx, `SAVEPOINT koldproxy_read; SET LOCAL row_security = off`)
	if err != nil {
		return err
	}
	err = read()
	_, undo := tx.Exec(ctx, `ROLLBACK TO SAVEPOINT koldproxy_read; RELEASE SAVEPOINT koldproxy_read`)
	return cmp.Or(err, undo)
}
