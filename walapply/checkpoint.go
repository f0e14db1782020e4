package walapply

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// checkpoint is what a session knows of koldstore.checkpoint.
type checkpoint struct {
	slot      string
	systemID  string // empty until the slot has been made
	timeline  int32
	applied   koldproxy.LSN
	watermark koldproxy.Seq
	epoch     int64
	gap       string        // why changes may be missing; empty if none are
	told      koldproxy.LSN // the slot was told no more than this, unless applied is more; 0 if that is not known
	anew      bool          // somebody wants the gap closed, whatever the configuration says
}

// begun says whether a slot has been made for this checkpoint, so that the two belong together.
func (cp *checkpoint) begun() bool { return cp.systemID != "" || cp.applied > 0 }

const checkpointColumns = `slot_name, coalesce(system_identifier, ''), coalesce(timeline, 0), applied_lsn::text, watermark, epoch, coalesce(gap, ''), begin_anew, coalesce(told_lsn, '0/0')::text`

func scanCheckpoint(row pgx.Row) (checkpoint, error) {
	var cp checkpoint
	var lsn, told string
	err := row.Scan(&cp.slot, &cp.systemID, &cp.timeline, &lsn, &cp.watermark, &cp.epoch, &cp.gap, &cp.anew, &told)
	if errors.Is(err, pgx.ErrNoRows) {
		return cp, &SetupError{Problem: "koldstore.checkpoint is empty", Hint: "restore its row from a backup, or remove the schema and run koldproxy migrate up"}
	}
	if err != nil {
		switch sqlState(err) {
		case "42P01", "3F000":
			return cp, &SetupError{Problem: "the database has no schema koldstore", Hint: "run koldproxy migrate up"}
		}
		return cp, fmt.Errorf("read the checkpoint: %w", err)
	}
	cp.applied, err = koldproxy.ParseLSN(lsn)
	if err == nil {
		cp.told, err = koldproxy.ParseLSN(told)
	}
	if err != nil {
		return cp, fmt.Errorf("read the checkpoint: %w", err)
	}
	return cp, nil
}

// readCheckpoint reads the row for a session of the leader with this epoch. It waits for an apply transaction whose outcome
// is unknown, but not for holders of the fence.
func readCheckpoint(ctx context.Context, conn *pgx.Conn, epoch int64) (checkpoint, error) {
	cp, err := scanCheckpoint(conn.QueryRow(ctx, `SELECT `+checkpointColumns+` FROM koldstore.checkpoint FOR NO KEY UPDATE`))
	if err == nil && cp.epoch != epoch {
		err = ErrNotLeader
	}
	return cp, err
}

// takeEpoch makes the caller, who holds the leader's lock, the only one who can write. It waits for transactions of former
// leaders that have passed the fence or moved the checkpoint: FOR UPDATE conflicts with both.
func takeEpoch(ctx context.Context, conn *pgx.Conn) (int64, error) {
	var epoch int64
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		cp, err := scanCheckpoint(tx.QueryRow(ctx, `SELECT `+checkpointColumns+` FROM koldstore.checkpoint FOR UPDATE NOWAIT`))
		if err != nil {
			return err
		}
		epoch = cp.epoch + 1
		_, err = tx.Exec(ctx, `UPDATE koldstore.checkpoint SET epoch = $1`, epoch)
		return err
	})
	return epoch, err
}

// begin stores where the slot begins and which server it belongs to. It does nothing if that has been stored.
func (cp *checkpoint) begin(ctx context.Context, conn *pgx.Conn, at koldproxy.LSN, systemID string, timeline int32) error {
	tag, err := conn.Exec(ctx, `UPDATE koldstore.checkpoint
		SET applied_lsn = greatest(applied_lsn, $1::text::pg_lsn), system_identifier = $2, timeline = $3
		WHERE epoch = $4 AND applied_lsn = $5::text::pg_lsn AND system_identifier IS NULL`,
		at.String(), systemID, timeline, cp.epoch, cp.applied.String())
	if err != nil {
		return fmt.Errorf("store the beginning of the slot: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return errCheckpointMoved
	}
	cp.applied, cp.systemID, cp.timeline = max(cp.applied, at), systemID, timeline
	return nil
}

// noteTold stores what the slot will have been told at most.
func (cp *checkpoint) noteTold(ctx context.Context, conn *pgx.Conn, told koldproxy.LSN) error {
	tag, err := conn.Exec(ctx, `UPDATE koldstore.checkpoint SET told_lsn = $1::text::pg_lsn WHERE epoch = $2`, told.String(), cp.epoch)
	if err != nil {
		return fmt.Errorf("note what the slot is told: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return ErrNotLeader
	}
	cp.told = told
	return nil
}

// recordGap stores why changes may be missing, unless a gap is known already or the operator has begun anew meanwhile.
// anew says that it will be closed at once.
func (cp *checkpoint) recordGap(ctx context.Context, conn *pgx.Conn, problem string, anew bool) error {
	_, err := conn.Exec(ctx, `UPDATE koldstore.checkpoint SET gap = $1, gap_at = now(), begin_anew = $4
		WHERE epoch = $2 AND gap IS NULL AND coalesce(system_identifier, '') = $3`, problem, cp.epoch, cp.systemID, anew)
	if err != nil {
		return fmt.Errorf("record the gap: %w", err)
	}
	return nil
}

// next is what an apply transaction makes of a checkpoint.
type next struct {
	applied   koldproxy.LSN
	watermark koldproxy.Seq
	rows      int64
	told      koldproxy.LSN
}

// advance moves the row from exactly what cp says to n, and commits the apply transaction that is open on conn. Both travel at once:
// should the row not be as expected, the division fails, and the server passes over the COMMIT. After an error the transaction
// has not committed, unless the connection is gone, which leaves that open. cp itself stays as it is.
func (cp *checkpoint) advance(ctx context.Context, conn *pgx.Conn, n next) error {
	var batch pgx.Batch
	moved := true
	batch.Queue(`WITH moved AS (UPDATE koldstore.checkpoint
		SET applied_lsn = $1::text::pg_lsn, watermark = $2, rows_applied = rows_applied + $3, applied_at = clock_timestamp(), told_lsn = $4::text::pg_lsn
		WHERE epoch = $5 AND applied_lsn = $6::text::pg_lsn AND watermark = $7 RETURNING 1)
		SELECT 1 / count(*) FROM moved`,
		n.applied.String(), n.watermark, n.rows, n.told.String(), cp.epoch, cp.applied.String(), cp.watermark).QueryRow(func(row pgx.Row) error {
		var one int
		err := row.Scan(&one)
		moved = sqlState(err) != codeDivisionByZero
		return err
	})
	batch.Queue(`COMMIT`).Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" {
			return pgx.ErrTxCommitRollback
		}
		return nil
	})
	err := conn.SendBatch(ctx, &batch).Close()
	switch {
	case err == nil:
		return nil
	case moved:
		return fmt.Errorf("move the checkpoint and commit: %w", err)
	}
	var epoch int64
	if _, err = conn.Exec(ctx, `ROLLBACK`); err == nil {
		err = conn.QueryRow(ctx, `SELECT epoch FROM koldstore.checkpoint`).Scan(&epoch)
	}
	switch {
	case err != nil:
		return fmt.Errorf("look for who has moved the checkpoint: %w", err)
	case epoch != cp.epoch:
		return ErrNotLeader
	}
	return errCheckpointMoved
}

// codeDivisionByZero is PostgreSQL's division_by_zero.
const codeDivisionByZero = "22012"

// fence fails with ErrNotLeader unless epoch is the current one, and keeps it current until tx ends. It does not conflict
// with apply transactions.
func fence(ctx context.Context, tx pgx.Tx, epoch int64) error {
	var one int
	err := tx.QueryRow(ctx, `SELECT 1 FROM koldstore.checkpoint WHERE epoch = $1 FOR KEY SHARE`, epoch).Scan(&one)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotLeader
	}
	if err != nil {
		return fmt.Errorf("check the epoch: %w", err)
	}
	return nil
}
