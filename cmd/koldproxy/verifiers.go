package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// verifiers reads what the server stores of passwords, for auth = "scram". It has connections of its own, so that a login
// never waits for other work of koldproxy's.
type verifiers struct {
	pool     *pgxpool.Pool
	database string
}

// maxVerifierConns bounds those connections: a look-up takes well below a millisecond.
const maxVerifierConns = 4

// openVerifiers makes the connections' pool; it connects when somebody logs in.
func openVerifiers(ctx context.Context, cfg *config) (*verifiers, error) {
	database := cfg.Postgres.Databases[0] // roles are the same in all of them
	dsn, err := cfg.dsn(database)
	if err != nil {
		return nil, err
	}
	pc, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("postgres.dsn is no connection string")
	}
	pc.ConnConfig.RuntimeParams["application_name"] = "koldproxy"
	pc.MaxConns = maxVerifierConns
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, err
	}
	return &verifiers{pool, database}, nil
}

// await tells the log why nobody can log in, until somebody can.
func (v *verifiers) await(ctx context.Context, log zerolog.Logger) {
	untilItWorks(ctx, v.check, func(err error) {
		log.Error().Err(err).Msg("nobody can log in, trying again")
	})
}

// check makes sure that the service role may read verifiers.
func (v *verifiers) check(ctx context.Context) error {
	if _, err := v.Verifier(ctx, ""); err != nil {
		return fmt.Errorf(`proxy.auth = "scram": %w`, err)
	}
	return nil
}

// verifierRemedy is what gives the service role the right to read verifiers. Rights on the catalog are those of one
// database, although what is in it is the same in all.
func verifierRemedy(database string) string {
	return "in database " + database + ", as a superuser: GRANT SELECT (rolname, rolpassword) ON pg_catalog.pg_authid TO the service role"
}

// Verifier implements proxy.Verifiers.
func (v *verifiers) Verifier(ctx context.Context, user string) (string, error) {
	var password *string
	err := v.pool.QueryRow(ctx, "SELECT rolpassword FROM pg_catalog.pg_authid WHERE rolname = $1", user).Scan(&password)
	pe, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case errors.Is(err, pgx.ErrNoRows), err == nil && password == nil:
		return "", nil
	case ok && pe.Code == koldproxy.CodeInsufficientPriv:
		return "", fmt.Errorf("the service role may not read password verifiers (%w); %s", err, verifierRemedy(v.database))
	case err != nil:
		return "", fmt.Errorf("read a password verifier: %w", err)
	}
	return *password, nil
}

func (v *verifiers) close() {
	if v != nil {
		v.pool.Close()
	}
}
