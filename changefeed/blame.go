package changefeed

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// culprit is who an error of a write is to be blamed on.
type culprit int

const (
	// nobody: the connection, a conflict with another session, a shutdown, a full disk. Trying again may help.
	nobody culprit = iota
	// row: the values of a row.
	row
	// definition: something that the statement needs is missing or has changed.
	definition
)

// blame judges by SQLSTATE. Classes that it does not know are the row's fault: one row must not stop everything.
func blame(err error) culprit {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return nobody
	}
	switch pg.Code[:2] {
	case "08", // connection exception
		"25", // invalid transaction state
		"40", // transaction rollback: serialization failure, deadlock
		"53", // insufficient resources
		"55", // object not in prerequisite state: locks not available
		"57", // operator intervention
		"58", // system error
		"F0", // configuration file error
		"2D", "3B":
		return nobody
	case "0A", // feature not supported: cached plan must not change result type
		"2B", "3F", "42":
		return definition
	case "XX":
		if pg.Code != "XX000" { // corrupted data or index
			return nobody
		}
	}
	return row
}

// publicReason describes an error without values that it may quote.
func publicReason(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return fmt.Sprintf("%s (SQLSTATE %s)", pg.Message, pg.Code)
	}
	return err.Error()
}
