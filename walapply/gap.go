package walapply

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/koldproxy/koldproxy"
)

// A gap is a position that the server cannot continue from, or cannot be trusted to: changes may be missing that nobody can
// bring back. What shows it may vanish again (a slot of the same name is made by hand), the missing changes stay missing. So
// a gap is written down, and nothing is applied until applying has begun anew (see beginAnew): by itself or, with OnGapStop,
// when an operator wants it.

// gap is the error of a gap.
func gap(format string, args ...any) *SetupError {
	return &SetupError{
		Problem: fmt.Sprintf(format, args...),
		Hint:    hintStop,
		Gap:     true,
	}
}

// What is to be done about a gap depends on [Config.OnGap].
const (
	hintStop   = `changes may be missing, so nothing is applied until somebody runs koldproxy heal, or the service role calls koldstore.heal_gap(); see docs/operations.md, "Gaps"`
	hintCloses = `changes may be missing, so applying begins anew by itself, with a new replication slot: feeds are compared with their tables, streams show a hole; see docs/operations.md, "Gaps"`
)

// closesItself makes a gap one that needs nobody's help.
func (e *SetupError) closesItself() {
	e.closes, e.Hint = true, strings.Replace(e.Hint, hintStop, hintCloses, 1)
}

func isGap(err error) bool {
	var setup *SetupError
	return errors.As(err, &setup) && setup.Gap
}

// noteGap writes the gap in err down, if there is one. The session is at its end and its connection free.
func (s *session) noteGap(ctx context.Context, err error) error {
	var setup *SetupError
	if !errors.As(err, &setup) || !setup.Gap {
		return err
	}
	if s.a.cfg.OnGap == OnGapHeal && !setup.final {
		setup.closesItself()
	}
	s.a.metrics.gap.Set(1)
	if s.cp.gap != "" || ctx.Err() != nil || s.conn.IsClosed() { // the next session finds it again
		return err
	}
	if noted := s.cp.recordGap(ctx, s.conn, setup.Problem, setup.closes); noted != nil || !setup.abandon {
		return errors.Join(err, noted)
	}
	slot, free := freeSlot(ctx, s.conn, s.cp.slot)
	if free == nil && slot.exists && slot.ours {
		free = s.dropSlot(ctx)
	}
	return errors.Join(err, free)
}

// remembered is what this process told a slot last.
type remembered struct {
	epoch    int64 // in which reign; 0 if it has not led yet
	position koldproxy.LSN
}

func (a *Applier) remember(position koldproxy.LSN) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told = remembered{epoch: a.status.Epoch, position: position}
}

// checkConfirmed notices a slot that has been replaced or advanced by somebody else: it confirms more than it was told. What that
// was is known exactly to this process, while no other instance has led in between, and to the checkpoint if the last one has stopped in
// order. After a kill the checkpoint knows what it was at most.
func (a *Applier) checkConfirmed(cp *checkpoint, slot slotState) error {
	a.mu.Lock()
	told := a.told
	a.mu.Unlock()
	most := cp.told
	if told.epoch > 0 && (told.epoch == cp.epoch || told.epoch+1 == cp.epoch) {
		most = told.position
	}
	if most == 0 || !slot.exists || !cp.begun() || slot.confirmed <= max(most, cp.applied) {
		return nil
	}
	return gap("replication slot %s was replaced or advanced: it stands at %v, but was told %v only", cp.slot, slot.confirmed, max(most, cp.applied))
}

var ownSlotName = regexp.MustCompile(`^koldproxy_([0-9]{1,10})$`)

// checkCopy notices a catalog that came with a copy of another database (CREATE DATABASE … TEMPLATE, a restored dump): its
// checkpoint names that one's slot.
func checkCopy(ctx context.Context, db Querier, cp *checkpoint) error {
	match := ownSlotName.FindStringSubmatch(cp.slot)
	if match == nil {
		return nil
	}
	oid, err := strconv.ParseUint(match[1], 10, 32)
	if err != nil {
		return nil //nolint:nilerr // no OID, so not a name that koldproxy gave
	}
	var mine bool
	var name, original string
	err = db.QueryRow(ctx, `SELECT d.oid = $1, d.datname, coalesce((SELECT o.datname FROM pg_database o WHERE o.oid = $1), '')
		FROM pg_database d WHERE d.datname = current_database()`, uint32(oid)).Scan(&mine, &name, &original)
	if err != nil {
		return fmt.Errorf("look up the database of the catalog: %w", err)
	}
	if mine {
		return nil
	}
	of := fmt.Sprintf("database %s", original)
	if original == "" {
		of = fmt.Sprintf("a database with OID %d that is not on this server", oid)
	}
	return &SetupError{
		Problem: fmt.Sprintf("the catalog in database %s is a copy of that of %s: it names replication slot %s", name, of, cp.slot),
		Hint:    `nothing is applied here; docs/operations.md, "Copies", says how to adopt a copy; leave the slot alone, it belongs to the other database`,
		Gap:     cp.begun(),
		final:   true,
	}
}

// checkSlot compares slot and checkpoint.
func checkSlot(cp *checkpoint, slot slotState, systemID string, timeline int32) error {
	switch {
	case cp.systemID != "" && cp.systemID != systemID:
		return gap("the checkpoint belongs to the server with system identifier %s, this one is %s", cp.systemID, systemID)
	case cp.systemID != "" && cp.timeline != timeline:
		return gap("the checkpoint belongs to timeline %d, the server is on %d", cp.timeline, timeline)
	case !slot.exists && cp.begun():
		return gap("replication slot %s does not exist any more, changes were applied up to %v", cp.slot, cp.applied)
	case !slot.exists:
		return nil
	case !slot.ours:
		hint := "drop it, if it is not in use, so that koldproxy can make its own"
		if !slot.here {
			hint = "it is not this database's, so leave it alone; have its owner give it another name, or set another one in koldstore.checkpoint.slot_name"
		}
		problem := fmt.Sprintf("replication slot %s is one of plugin %q for database %q", cp.slot, slot.plugin, slot.database)
		if cp.begun() {
			err := gap("%s, changes were applied up to %v", problem, cp.applied)
			err.Hint += "; " + hint
			return err
		}
		return &SetupError{Problem: problem, Hint: hint}
	case slot.lost != "":
		return gap("replication slot %s is lost (%s), changes were applied up to %v", cp.slot, slot.lost, cp.applied)
	}
	return nil
}

// streamError is what an error or a warning of the walsender means. The publication is looked up as it was when a change
// was written, so one that was made or made again after the slot does not help: decoding fails there for ever (42704), and
// from PostgreSQL 18 on the change is skipped with a warning (55000).
func streamError(msg *pgproto3.ErrorResponse, publication string) error {
	err := pgconn.ErrorResponseToPgError(msg)
	if (err.Code == "42704" || err.Code == "55000") && strings.Contains(err.Message, publication) {
		return fmt.Errorf("%w: %w", gap("the replication slot is older than publication %s, or the publication was away for a while", publication), err)
	}
	return fmt.Errorf("read the stream: %w", err)
}

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}
