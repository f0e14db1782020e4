package walapply

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

const (
	// slotCreateTimeout bounds how long the making of a slot may wait for transactions that are open anywhere on the server.
	slotCreateTimeout = 5 * time.Second
	// slotReleaseTimeout bounds the wait for a terminated walsender to let go of the slot.
	slotReleaseTimeout = 5 * time.Second
)

// errCreatingSlot is what a session says while the slot cannot be made yet.
var errCreatingSlot = errors.New("waiting for transactions that are older than the replication slot")

// blamed adds to [errCreatingSlot] whom the slot waits for.
func blamed(ctx context.Context, db Querier, err error) error {
	if !errors.Is(err, errCreatingSlot) {
		return err
	}
	who, lookup := slotWaitsFor(ctx, db)
	if lookup != nil || who == "" {
		return errors.Join(err, lookup)
	}
	return fmt.Errorf("%w: %s", err, who)
}

// slotWaitsFor names the oldest transactions that a slot in the making waits for.
func slotWaitsFor(ctx context.Context, db Querier) (who string, err error) {
	err = db.QueryRow(ctx, `SELECT coalesce(koldstore.slot_waits_for(), '')`).Scan(&who)
	if err != nil && sqlState(err) != "42883" { // a catalog that is older
		return "", fmt.Errorf("look for old transactions: %w", err)
	}
	return who, nil
}

// slotState is the part of pg_replication_slots that counts.
type slotState struct {
	exists    bool
	plugin    string
	database  string
	here      bool   // of the current database
	ours      bool   // one that koldproxy can read: here, and of pgoutput
	lost      string // why it cannot be used any more; empty if it can
	activePID int32
	confirmed koldproxy.LSN
}

// checkServer finds out whether the server can serve a slot.
func checkServer(ctx context.Context, conn *pgx.Conn) error {
	var walLevel string
	if err := conn.QueryRow(ctx, `SELECT current_setting('wal_level')`).Scan(&walLevel); err != nil {
		return fmt.Errorf("check the server: %w", err)
	}
	if walLevel != "logical" {
		return &SetupError{
			Problem: "the server's wal_level is " + walLevel,
			Hint:    "set wal_level = logical and restart the server",
		}
	}
	return nil
}

// readSlot looks a slot up. Columns that some versions lack are asked for through JSON.
func readSlot(ctx context.Context, db Querier, name string) (slotState, error) {
	s := slotState{exists: true}
	var confirmed string
	err := db.QueryRow(ctx, `SELECT coalesce(plugin, ''), coalesce(database, ''), coalesce(database = current_database(), false), coalesce(active_pid, 0), coalesce(confirmed_flush_lsn, '0/0')::text,
			CASE WHEN j->>'invalidation_reason' <> '' THEN j->>'invalidation_reason'
				WHEN wal_status = 'lost' THEN 'the server has removed log that it needs'
				WHEN j->>'conflicting' = 'true' THEN 'conflict with recovery'
				ELSE '' END
		FROM pg_replication_slots s, to_jsonb(s) j WHERE slot_name = $1`, name).
		Scan(&s.plugin, &s.database, &s.here, &s.activePID, &confirmed, &s.lost)
	if errors.Is(err, pgx.ErrNoRows) {
		return slotState{}, nil
	}
	if err == nil {
		s.ours = s.here && s.plugin == "pgoutput"
		s.confirmed, err = koldproxy.ParseLSN(confirmed)
	}
	if err != nil {
		return s, fmt.Errorf("look up replication slot %s: %w", name, err)
	}
	return s, nil
}

var slotName = regexp.MustCompile(`^[a-z0-9_]{1,63}$`)

// createSlot makes the slot on a walsender and returns the position from which it has everything.
func createSlot(ctx context.Context, conn *pgconn.PgConn, name string, version int) (koldproxy.LSN, error) {
	if !slotName.MatchString(name) {
		return 0, &SetupError{Problem: "koldstore.checkpoint names an impossible replication slot", Hint: "use lower-case letters, digits and underscores"}
	}
	options := "SNAPSHOT 'nothing'"
	if version >= 170000 {
		options += ", FAILOVER true"
	}
	// It waits for every transaction that is open now. No other timeout applies to that wait.
	results, err := conn.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d", slotCreateTimeout.Milliseconds())).ReadAll()
	if err == nil {
		results, err = conn.Exec(ctx, fmt.Sprintf("CREATE_REPLICATION_SLOT %s LOGICAL pgoutput (%s)", name, options)).ReadAll()
	}
	if sqlState(err) == "55P03" {
		return 0, errCreatingSlot
	}
	if err != nil {
		return 0, fmt.Errorf("create replication slot %s: %w", name, err)
	}
	if _, err := conn.Exec(ctx, "SET lock_timeout = 0").ReadAll(); err != nil {
		return 0, fmt.Errorf("create replication slot %s: %w", name, err)
	}
	row, err := onlyRow(results, 2)
	if err != nil {
		return 0, fmt.Errorf("create replication slot %s: %w", name, err)
	}
	return koldproxy.ParseLSN(string(row[1]))
}

// onlyRow is the row of a command that answers with one row of at least so many columns.
func onlyRow(results []*pgconn.Result, columns int) ([][]byte, error) {
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) < columns {
		return nil, errors.New("unexpected shape of the answer")
	}
	return results[0].Rows[0], nil
}

// freeSlot ends a walsender that still uses the slot: the caller holds the leader's lock, so it is one of a former leader
// or of a connection of ours that the server has not missed yet. Whoever uses a slot of another database or plugin under that
// name is none of our business.
func freeSlot(ctx context.Context, conn *pgx.Conn, name string) (slotState, error) {
	ctx, cancel := context.WithTimeout(ctx, slotReleaseTimeout)
	defer cancel()
	for first := true; ; first = false {
		slot, err := readSlot(ctx, conn, name)
		if err != nil || slot.activePID == 0 || !slot.ours {
			return slot, err
		}
		if first {
			if _, err := conn.Exec(ctx, `SELECT pg_terminate_backend($1)`, slot.activePID); err != nil && sqlState(err) != "42501" {
				return slot, fmt.Errorf("end the former user of replication slot %s: %w", name, err)
			}
		}
		if !sleep(ctx, 10*time.Millisecond) {
			return slot, fmt.Errorf("replication slot %s is still in use by process %d", name, slot.activePID)
		}
	}
}
