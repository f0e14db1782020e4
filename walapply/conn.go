package walapply

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// formats are the settings that values in the log and in apply transactions are written and read with, whatever ALTER ROLE
// or ALTER DATABASE say. They travel in the startup packet, which wins over both.
var formats = map[string]string{
	"client_encoding":    "UTF8",
	"datestyle":          "ISO",
	"intervalstyle":      "postgres",
	"extra_float_digits": "3",
	"bytea_output":       "hex",
	"timezone":           "UTC",
	"lc_monetary":        "C",
	"search_path":        "pg_catalog, pg_temp",
}

// sessionSettings keep ordinary sessions of the applier from being cut off or from waiting for the wrong thing.
var sessionSettings = map[string]string{
	"statement_timeout":                   "0",
	"lock_timeout":                        "0",
	"idle_in_transaction_session_timeout": "0",
	"idle_session_timeout":                "0",
	"default_transaction_isolation":       "read committed",
	"default_transaction_read_only":       "off",
	"default_transaction_deferrable":      "off",
	"synchronous_commit":                  "local", // see the package documentation
	"standard_conforming_strings":         "on",
	"row_security":                        "off",
	"jit":                                 "off",
	// Statements get arrays of thousands of rows. Plans for the arrays at hand read whole tables when the arrays are large, and
	// are made anew each time.
	"plan_cache_mode": "force_generic_plan",
	"work_mem":        "64MB",
}

// applicationName is how sessions of the applier show in pg_stat_activity; role is leader, apply, watch, stop or walsender.
func applicationName(role string) string { return "koldproxy " + role }

// closeTimeout bounds the farewell of a connection.
const closeTimeout = 5 * time.Second

// connect opens an ordinary session.
func (a *Applier) connect(ctx context.Context, role string, settings map[string]string) (*pgx.Conn, error) {
	cfg := a.conn.Copy()
	maps.Copy(cfg.RuntimeParams, formats)
	maps.Copy(cfg.RuntimeParams, sessionSettings)
	maps.Copy(cfg.RuntimeParams, settings)
	cfg.RuntimeParams["application_name"] = applicationName(role)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("open the %s session: %w", role, err)
	}
	return conn, nil
}

// connectReplication opens a walsender.
func (a *Applier) connectReplication(ctx context.Context) (*pgconn.PgConn, error) {
	cfg := a.conn.Config.Copy()
	maps.Copy(cfg.RuntimeParams, formats)
	cfg.RuntimeParams["application_name"] = applicationName("walsender")
	cfg.RuntimeParams["replication"] = "database"
	readInBursts(cfg)
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		if sqlState(err) == "42501" {
			return nil, errors.Join(&SetupError{
				Problem: fmt.Sprintf("role %s may not read the write-ahead log", cfg.User),
				Hint:    "give it the attribute REPLICATION",
			}, err)
		}
		return nil, fmt.Errorf("open the walsender session: %w", err)
	}
	return conn, nil
}

// closeConn ends a session and waits until its socket is closed, also after an operation was cancelled in the middle: the
// server has been told to stop it by then.
func closeConn(ctx context.Context, conn *pgx.Conn) { closePgConn(ctx, conn.PgConn()) }

// closePgConn does the same with a walsender that no goroutine uses any more.
func closePgConn(ctx context.Context, conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	conn.Close(ctx)
	select {
	case <-conn.CleanupDone():
	case <-ctx.Done():
	}
}
