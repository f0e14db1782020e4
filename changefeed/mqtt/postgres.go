package mqtt

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/koldproxy/koldproxy"
)

// PostgresAuth is [Auth] as the PostgreSQL server itself sees it.
type PostgresAuth struct {
	login *pgx.ConnConfig
	pools map[string]*pgxpool.Pool
}

// NewPostgresAuth returns an Auth for the server and database of login, whose user and password do not matter; a role
// needs CONNECT on that database to log in. pools are connections of koldproxy's own role to each database that has
// streams, by the database's name as it stands in topics; the caller goes on owning them, and closes them after the broker
// has ended.
func NewPostgresAuth(login *pgx.ConnConfig, pools map[string]*pgxpool.Pool) *PostgresAuth {
	login = login.Copy()
	login.RuntimeParams["application_name"] = "koldproxy mqtt"
	// A server may trust koldproxy's address, or its operating-system user, and would then let in any name without looking
	// at the password. That trust is not the MQTT client's.
	login.RequireAuth = "password,md5,scram-sha-256"
	return &PostgresAuth{login: login, pools: pools}
}

// Login opens a connection to the server as user and closes it again.
func (a *PostgresAuth) Login(ctx context.Context, user, password string) error {
	cfg := a.login.Copy()
	cfg.User, cfg.Password = user, password
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && loginRefused(pgErr.Code) {
			return refusal(pgErr.Message)
		}
		if strings.Contains(err.Error(), "require_auth check failed") { // pgconn has no type for it
			return ErrNoPassword
		}
		return fmt.Errorf("log in: %w", err)
	}
	conn.Close(ctx)
	return nil
}

// loginRefused tells whether an error code means that the role may not log in, rather than that the server is in trouble.
func loginRefused(code string) bool {
	return strings.HasPrefix(code, "28") || // invalid authorization specification, also for NOLOGIN and pg_hba.conf
		code == koldproxy.CodeInsufficientPriv // no CONNECT on the database
}

// MaySubscribe asks koldstore.may_subscribe in the database that the topic names.
func (a *PostgresAuth) MaySubscribe(ctx context.Context, user, topic string) (bool, error) {
	database, schema, stream, ok := koldproxy.ParseStreamTopic(topic)
	if !ok {
		return false, nil
	}
	pool := a.pools[database]
	if pool == nil {
		return false, nil
	}
	var allowed bool
	err := pool.QueryRow(ctx, "SELECT koldstore.may_subscribe($1, $2, $3)", user, schema, stream).Scan(&allowed)
	if err != nil {
		return false, fmt.Errorf("ask for the right to subscribe: %w", err)
	}
	return allowed, nil
}
