package walapply

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// ErrNotLeader is returned by [Applier.Fence] when this instance does not lead, or does not lead any more.
var ErrNotLeader = errors.New("this instance does not apply changes for the database")

// errCheckpointMoved means that the checkpoint row is not what this session left behind: an earlier transaction with an
// unknown outcome has committed after all. The next session reads it again.
var errCheckpointMoved = errors.New("the checkpoint has moved under the apply transaction")

// SetupError is something that an operator has to put right before changes can be applied. The applier goes on looking.
type SetupError struct {
	// Problem is what is wrong, Hint what to do about it; both are complete sentences without a full stop.
	Problem, Hint string
	// Gap says that changes may be missing. Such a problem is written to koldstore.checkpoint and stays there, whatever
	// becomes of its cause, until applying has begun anew.
	Gap bool
	// Waits names the transactions that have to end before the gap can be closed; empty if there are none, or nobody closes it.
	Waits string
	// Stalled says that nothing is applied while this lasts. Nothing is missing.
	Stalled bool
	// final is a gap that is not closed automatically.
	final bool
	// closes says that the gap is closed without anybody's help.
	closes bool
	// abandon means that the slot is to be dropped at once.
	abandon bool
}

// WillClose says that the gap is closed without anybody's help, by the koldproxy that leads.
func (e *SetupError) WillClose() bool { return e.closes }

// Error returns problem, hint and what is waited for.
func (e *SetupError) Error() string {
	if e.Waits != "" {
		return e.Problem + "; " + e.Hint + "; it waits for the end of " + e.Waits
	}
	return e.Problem + "; " + e.Hint
}

// publicText is err's text as far as it may be logged above debug: messages of PostgreSQL about data can quote the data.
func publicText(err error) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return err.Error()
	}
	switch pg.Code[:2] {
	case "22", "23", "38", "39", "44", "P0":
		return "PostgreSQL refused a statement"
	default:
		return err.Error()
	}
}

// sqlState is the SQLSTATE in err, empty if there is none.
func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}
