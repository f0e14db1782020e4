package changefeed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// errBusy says that a table cannot be read just now, since somebody is changing its definition.
var errBusy = errors.New("the table's definition is being changed")

// foreignCodeError says why a table is not read: reading it would run code of users in the apply session.
type foreignCodeError struct{ reason string }

func (e *foreignCodeError) Error() string { return e.reason }

// readableSQL says why reading a table might run code of users, or nothing. The planner evaluates what is constant in the
// expressions of a table's indexes and statistics, with the rights of whoever reads the table; a view would be all code. Code
// of superusers is not held against anybody. $1 is the table's OID and $2 its name, which has to be its name still.
const readableSQL = `SELECT coalesce(
	(SELECT 'it is not the table that it was' WHERE NOT EXISTS (
		SELECT FROM pg_catalog.pg_class c WHERE c.oid = $1 AND c.relkind IN ('r', 'p') AND c.oid = pg_catalog.to_regclass($2))),
	(SELECT pg_catalog.format('%s uses %s, which is no code of PostgreSQL or a superuser',
			pg_catalog.pg_describe_object(d.classid, d.objid, 0), pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0))
	 FROM (SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::oid AS class, i.indexrelid AS id FROM pg_catalog.pg_index i WHERE i.indrelid IN (SELECT $1 UNION SELECT l.oid FROM koldstore.leaves($1) l)
	       UNION ALL SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::oid, p.relid FROM pg_catalog.pg_partition_tree($1) p
	       UNION ALL SELECT 'pg_catalog.pg_statistic_ext'::pg_catalog.regclass::oid, s.oid FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid IN (SELECT $1 UNION SELECT l.oid FROM koldstore.leaves($1) l)) o
	 JOIN pg_catalog.pg_depend d ON d.classid = o.class AND d.objid = o.id
	 LEFT JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND p.oid = d.refobjid
	 LEFT JOIN pg_catalog.pg_operator r ON d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass AND r.oid = d.refobjid
	 LEFT JOIN pg_catalog.pg_type t ON d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass AND t.oid = d.refobjid AND t.typtype = 'd'
	 JOIN pg_catalog.pg_roles u ON u.oid = coalesce(p.proowner, r.oprowner, t.typowner) AND NOT u.rolsuper
	 LIMIT 1), '')`

// readLockWait is how long reading waits for a table's lock; longer than the second after which an autovacuum gives way.
const readLockWait = 1500 * time.Millisecond

// readTable reads from the table itself. It is errBusy or a *foreignCodeError if that cannot be done, now or at all.
//
// From the check of the table to the end of reading nobody can change its definition, its indexes or its schema's name. The
// savepoint gives the locks back: the eval session needs one of its own, and would wait behind an ALTER TABLE that waits for ours.
func readTable(ctx context.Context, tx pgx.Tx, tab *table, read func() error) error {
	// Better an error than rows that are left out silently. Constraints of partitions are not evaluated to leave some of them out.
	_, err := tx.Exec(ctx, fmt.Sprintf(`SAVEPOINT koldproxy_read; SET LOCAL row_security = off; SET LOCAL constraint_exclusion = off; SET LOCAL lock_timeout = '%dms'`, readLockWait.Milliseconds()))
	if err != nil {
		return err
	}
	if err = lockTable(ctx, tx, tab); err == nil {
		err = read()
	}
	_, undo := tx.Exec(ctx, `ROLLBACK TO SAVEPOINT koldproxy_read; RELEASE SAVEPOINT koldproxy_read`)
	return cmp.Or(err, undo)
}

func lockTable(ctx context.Context, tx pgx.Tx, tab *table) error {
	if _, err := tx.Exec(ctx, `LOCK TABLE `+tab.from()+` IN SHARE UPDATE EXCLUSIVE MODE`); err != nil {
		return busy(err)
	}
	var super bool
	if err := tx.QueryRow(ctx, `SELECT pg_catalog.current_setting('is_superuser') = 'on'`).Scan(&super); err != nil {
		return err
	}
	if super { // others may not lock rows of the catalog
		_, err := tx.Exec(ctx, `SELECT FROM pg_catalog.pg_namespace n WHERE n.oid = (SELECT c.relnamespace FROM pg_catalog.pg_class c WHERE c.oid = $1) FOR SHARE`, tab.oid)
		if err != nil {
			return busy(err)
		}
	}
	var reason string
	if err := tx.QueryRow(ctx, readableSQL, tab.oid, tab.name).Scan(&reason); err != nil {
		return err
	}
	if reason != "" {
		return &foreignCodeError{reason}
	}
	return nil
}

// busy tells a lock that somebody else holds from other errors.
func busy(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "55P03" { // lock_not_available
		return errBusy
	}
	return err
}
