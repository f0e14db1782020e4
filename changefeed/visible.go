package changefeed

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// snapshot is a snapshot of the server as pg_current_snapshot shows it: transactions from xmax on, and those in running, are not
// visible.
type snapshot struct {
	xmin, xmax uint64
	running    []uint64
}

const snapshotSQL = `SELECT pg_catalog.pg_current_snapshot()::text`

// currentSnapshot asks for the snapshot that a statement of tx has now.
func currentSnapshot(ctx context.Context, tx pgx.Tx) (s snapshot, err error) {
	var text string
	if err := tx.QueryRow(ctx, snapshotSQL).Scan(&text); err != nil {
		return s, err
	}
	return parseSnapshot(text)
}

// parseSnapshot reads xmin:xmax:running,… with commas between those that run.
func parseSnapshot(text string) (s snapshot, err error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return s, fmt.Errorf("a snapshot %q", text)
	}
	var numbers []uint64
	for field := range strings.FieldsFuncSeq(strings.Join(parts, ","), func(c rune) bool { return c == ',' }) {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return s, fmt.Errorf("a snapshot %q", text)
		}
		numbers = append(numbers, n)
	}
	if len(numbers) < 2 {
		return s, fmt.Errorf("a snapshot %q", text)
	}
	return snapshot{numbers[0], numbers[1], numbers[2:]}, nil
}

// shows says whether a transaction, given by the 32 bits of its id that the log carries, is visible. The missing upper half is that
// of xmax, or the one before or after if that is nearer.
func (s snapshot) shows(xid uint32) bool {
	id := s.xmax&^math.MaxUint32 | uint64(xid)
	switch {
	case id > s.xmax+1<<31 && id >= 1<<32:
		id -= 1 << 32
	case id+1<<31 < s.xmax:
		id += 1 << 32
	}
	return id < s.xmin || id < s.xmax && !slices.Contains(s.running, id)
}

func (s snapshot) showsAll(changes []koldproxy.Change) bool {
	for i := range changes {
		if (i == 0 || changes[i].XID != changes[i-1].XID) && !s.shows(changes[i].XID) {
			return false
		}
	}
	return true
}

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
	pause, begun := firstLook, time.Now()
	for first := true; ; first = false {
		var now snapshot
		var err error
		if first {
			now, err = t.markAndLook(ctx, tx)
		} else {
			now, err = currentSnapshot(ctx, tx)
		}
		if err != nil {
			return fmt.Errorf("wait until a transaction is visible: %w", err)
		}
		visible := now.showsAll(changes)
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

// markAndLook makes the savepoint for the first run of a batch and asks for a snapshot, in one round trip.
func (t *Target) markAndLook(ctx context.Context, tx pgx.Tx) (s snapshot, err error) {
	var batch pgx.Batch
	if t.marked {
		batch.Queue(releaseRun)
	}
	batch.Queue(markRun)
	batch.Queue(snapshotSQL).QueryRow(func(row pgx.Row) error {
		var text string
		if err := row.Scan(&text); err != nil {
			return err
		}
		s, err = parseSnapshot(text)
		return err
	})
	err = tx.SendBatch(ctx, &batch).Close()
	t.marked, t.fresh = err == nil, err == nil
	return s, err
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
