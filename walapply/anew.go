package walapply

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pglogrepl"

	"github.com/koldproxy/koldproxy"
)

// errCatalogMoved ends a session that has made a slot while streams, feeds or columns of their tables came, went or changed:
// nobody can say on which side of the slot's beginning that was.
var errCatalogMoved = errors.New("streams, feeds or columns changed while the replication slot was being made")

// beginAnew closes a gap: it makes a new slot and lets everything go on from where that begins, in one transaction with the
// note of what is missing. What was committed before is in the tables, and feeds are compared with them; what is committed
// later comes through the slot. Until that transaction the gap stays written down, so whatever fails is done again.
func (s *session) beginAnew(ctx context.Context) error {
	if err := s.checkStrangers(ctx); err != nil {
		return err
	}
	wal, err := s.a.connectReplication(ctx)
	if err != nil {
		return err
	}
	defer closePgConn(ctx, wal)
	system, err := pglogrepl.IdentifySystem(ctx, wal)
	if err != nil {
		return fmt.Errorf("identify the server: %w", err)
	}
	if err := checkServer(ctx, s.conn); err != nil {
		return err
	}
	slot, err := freeSlot(ctx, s.conn, s.cp.slot)
	if err != nil {
		return err
	}
	if slot.exists && !slot.ours {
		return checkSlot(&s.cp, slot, s.cp.systemID, s.cp.timeline)
	}
	// The publication first: a slot that is older cannot decode what it names.
	if _, err := s.conn.Exec(ctx, `SELECT koldstore.restore_publication()`); err != nil {
		return fmt.Errorf("restore the publication: %w", err)
	}
	if slot.exists {
		if err := s.dropSlot(ctx); err != nil {
			return err
		}
	}
	before, err := s.gapBasis(ctx)
	if err != nil {
		return err
	}
	version, err := serverVersion(ctx, s.conn)
	if err != nil {
		return err
	}
	at, err := createSlot(ctx, wal, s.cp.slot, version)
	if err != nil {
		return blamed(ctx, s.conn, err)
	}
	after, err := s.gapBasis(ctx)
	if err == nil && after != before {
		err = errCatalogMoved
	}
	if err != nil {
		return err // the next session drops the slot
	}
	return s.resumeAt(ctx, at, system)
}

// resumeAt moves the checkpoint to the beginning of a new slot.
func (s *session) resumeAt(ctx context.Context, at koldproxy.LSN, system pglogrepl.IdentifySystemResult) error {
	var id *int64
	err := s.conn.QueryRow(ctx, `SELECT koldstore.begin_anew($1, $2::text::pg_lsn, $3, $4)`, s.epoch, at.String(), system.SystemID, system.Timeline).Scan(&id)
	if err != nil {
		return fmt.Errorf("begin anew: %w", err)
	}
	if id == nil {
		return ErrNotLeader
	}
	s.a.metrics.gaps.Inc()
	s.a.forget()
	s.a.log.Warn().Str("reason", s.cp.gap).Stringer("from", s.cp.applied).Stringer("lsn", at).
		Msg("began anew after a gap: streams have a hole, feeds are compared with their tables")
	s.cp, err = readCheckpoint(ctx, s.conn, s.epoch)
	return err
}

// checkStrangers notices a catalog that was restored from a dump, where tables have other numbers.
func (s *session) checkStrangers(ctx context.Context) error {
	var n int64
	if err := s.conn.QueryRow(ctx, `SELECT koldstore.strangers()`).Scan(&n); err != nil {
		return fmt.Errorf("compare the catalog with the database: %w", err)
	}
	if n == 0 {
		return nil
	}
	return &SetupError{
		Problem: fmt.Sprintf("the catalog names %d mirrors and logs that this database does not have: it comes from a dump", n),
		Hint:    `nothing is applied here; docs/operations.md, "Copies", says how to adopt a copy`,
		Gap:     true,
		final:   true,
	}
}

func (s *session) gapBasis(ctx context.Context) (basis string, err error) {
	if err := s.conn.QueryRow(ctx, `SELECT koldstore.gap_basis()`).Scan(&basis); err != nil {
		return "", fmt.Errorf("look at streams and feeds: %w", err)
	}
	return basis, nil
}

// dropSlot drops this database's slot; another one of the name stays.
func (s *session) dropSlot(ctx context.Context) error {
	_, err := s.conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1 AND database = current_database()`, s.cp.slot)
	if err != nil {
		return fmt.Errorf("drop replication slot %s: %w", s.cp.slot, err)
	}
	return nil
}

// forget is the opposite of remember: what a former slot was told says nothing about a new one.
func (a *Applier) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told = remembered{}
}
