package walapply

import (
	"context"
	"errors"
	"fmt"
)

// Inspect looks at a database as an applier does before it begins, and returns what keeps changes from being applied or from
// being complete: a gap that was noted or would be, a catalog that belongs to another database, a publication that differs
// from what koldproxy put into it. It changes nothing. db must be the service role's. A database in which an applier has not
// run yet is in order. onGap is what the applier is configured to do about gaps.
func Inspect(ctx context.Context, db Querier, publicationName, onGap string) ([]*SetupError, error) {
	list, err := inspect(ctx, db, publicationName)
	for _, p := range list {
		if !p.Gap || p.final || onGap != OnGapHeal && !p.closes {
			continue
		}
		p.closesItself()
		var lookup error
		if p.Waits, lookup = slotWaitsFor(ctx, db); lookup != nil {
			return list, errors.Join(err, lookup)
		}
	}
	return list, err
}

func inspect(ctx context.Context, db Querier, publicationName string) ([]*SetupError, error) {
	cp, err := scanCheckpoint(db.QueryRow(ctx, `SELECT `+checkpointColumns+` FROM koldstore.checkpoint`))
	if err != nil {
		return problems(err)
	}
	if err := checkCopy(ctx, db, &cp); err != nil {
		return problems(err)
	}
	if cp.gap != "" {
		noted := gap("%s", cp.gap)
		noted.closes = cp.anew
		return problems(noted)
	}
	var systemID string
	var timeline int32
	err = db.QueryRow(ctx, `SELECT (SELECT s.system_identifier::text FROM pg_control_system() s),
		('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int`).Scan(&systemID, &timeline)
	if err != nil {
		return nil, fmt.Errorf("identify the server: %w", err)
	}
	slot, err := readSlot(ctx, db, cp.slot)
	if err != nil {
		return nil, err
	}
	p, err := readPublication(ctx, db, publicationName)
	if err != nil {
		return nil, err
	}
	list, err := problems(checkSlot(&cp, slot, systemID, timeline), p.check(&cp), stalled(ctx, db))
	if err != nil || !p.exists || p.affectsAll() != "" {
		return list, err
	}
	faults, err := p.faults(ctx, db, listedTables)
	for _, f := range faults {
		list = append(list, &SetupError{
			Problem: fmt.Sprintf("table %s: %s", f.name, f.reason),
			Hint:    "its streams and its change feed are broken; make them anew: DROP STREAM and CREATE STREAM, koldstore.unmanage_table and manage_table",
		})
	}
	return list, err
}

// stalled says who keeps the applier waiting.
func stalled(ctx context.Context, db Querier) error {
	var who string
	err := db.QueryRow(ctx, `SELECT coalesce(koldstore.apply_waits_for(), '')`).Scan(&who)
	switch {
	case err != nil && sqlState(err) != "42883": // a catalog that is older
		return fmt.Errorf("look for who keeps the applier waiting: %w", err)
	case who == "":
		return nil
	}
	return &SetupError{
		Problem: "nothing is applied: the applier waits for a lock, behind " + who,
		Hint:    "end that transaction, or let koldproxy do so: GRANT pg_signal_backend to its role; sessions of superusers only a superuser can end",
		Stalled: true,
	}
}

// problems sorts errors into those that an operator has to put right and one that hinders the inspection.
func problems(errs ...error) ([]*SetupError, error) {
	var list []*SetupError
	var other error
	for _, err := range errs {
		var setup *SetupError
		if errors.As(err, &setup) {
			list = append(list, setup)
		} else if err != nil {
			other = err
		}
	}
	return list, other
}
