package feedtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// History writes random transactions into one table: inserts, updates into, within and out of a predicate, updates of the key
// and of nothing, deletes, inserts of deleted keys, toasted values, several rows at once, savepoints, rollbacks, truncates.
// It belongs to one goroutine; several histories may write into one table at the same time.
type History struct {
	// Table is where it writes; it must have been made by [CreateTable].
	Table string
	// Keys is how many different keys it uses, from 1.
	Keys int
	// Truncate says whether it may truncate the table.
	Truncate bool

	rand *rand.Rand
}

// Predicate is one that the rows of a [History] move into and out of; with NULLs it is often NULL.
const Predicate = `v > 50 OR note = 'x' AND v IS NOT NULL`

// CreateTable makes a table for histories. Its primary key is (id), or (kind, id) if composite.
func CreateTable(ctx context.Context, q Execer, table string, composite bool) error {
	key := "id"
	if composite {
		key = "kind, id"
	}
	for _, sql := range []string{
		fmt.Sprintf(`CREATE TABLE %s (v int, id int NOT NULL, note text, kind text NOT NULL DEFAULT 'a', big text, PRIMARY KEY (%s))`, table, key),
		fmt.Sprintf(`ALTER TABLE %s ALTER big SET STORAGE EXTERNAL`, table),
	} {
		if _, err := q.Exec(ctx, sql); err != nil {
			return fmt.Errorf("make table %s: %w", table, err)
		}
	}
	return nil
}

// NewHistory makes a history; print the seed, so that a failure can be repeated.
func NewHistory(table string, keys int, seed uint64) *History {
	return &History{Table: table, Keys: keys, Truncate: true, rand: rand.New(rand.NewPCG(seed, seed))} //nolint:gosec // repeatable, not secret
}

// conflicts are what other writers may cause: rows moved to another partition, unique keys, deadlocks, lock timeouts.
var conflicts = []string{"40001", "23505", "40P01", "55P03"}

// Step runs one random transaction. Conflicts with other writers roll it back and are no error.
func (h *History) Step(ctx context.Context, conn *pgx.Conn) error {
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		for range 1 + h.rand.IntN(5) {
			if err := h.act(ctx, tx); err != nil {
				return err
			}
		}
		if h.rand.IntN(10) == 0 {
			return errRollback
		}
		return nil
	})
	var pg *pgconn.PgError
	if errors.Is(err, errRollback) || errors.As(err, &pg) && slices.Contains(conflicts, pg.Code) {
		return nil
	}
	return err
}

var errRollback = errors.New("rolled back on purpose")

// act runs one statement, sometimes behind a savepoint that is rolled back.
func (h *History) act(ctx context.Context, tx pgx.Tx) error {
	if h.rand.IntN(8) != 0 {
		_, err := tx.Exec(ctx, h.statement(), pgx.QueryExecModeSimpleProtocol)
		return err
	}
	err := pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error {
		if _, err := part.Exec(ctx, h.statement(), pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		if h.rand.IntN(2) == 0 {
			return errRollback
		}
		return nil
	})
	if errors.Is(err, errRollback) {
		return nil
	}
	return err
}

func (h *History) key() int { return 1 + h.rand.IntN(h.Keys) }

// value is a number around the predicate's threshold, or NULL.
func (h *History) value() string {
	if h.rand.IntN(6) == 0 {
		return "NULL"
	}
	return fmt.Sprint(h.rand.IntN(100))
}

func (h *History) note() string {
	return []string{"NULL", "''", "'x'", "'y'", `E'a "b\\ c'`, "'NULL'"}[h.rand.IntN(6)]
}

func (h *History) statement() string {
	k := h.key()
	switch n := h.rand.IntN(100); {
	case n < 30:
		return fmt.Sprintf(`INSERT INTO %s (id, v, note, big) VALUES (%d, %s, %s, repeat(%s, %d)) ON CONFLICT DO NOTHING`,
			h.Table, k, h.value(), h.note(), []string{"NULL", "'b'", "'ü'"}[h.rand.IntN(3)], []int{1, 3000}[h.rand.IntN(2)])
	case n < 50:
		return fmt.Sprintf(`UPDATE %s SET v = %s WHERE id = %d`, h.Table, h.value(), k)
	case n < 60:
		return fmt.Sprintf(`UPDATE %s SET note = %s, v = %s WHERE id = %d`, h.Table, h.note(), h.value(), k)
	case n < 65:
		return fmt.Sprintf(`UPDATE %[1]s SET id = %[2]d WHERE id = %[3]d AND NOT EXISTS (SELECT FROM %[1]s WHERE id = %[2]d)`, h.Table, h.key(), k)
	case n < 68:
		return fmt.Sprintf(`UPDATE %s SET v = v WHERE id = %d`, h.Table, k)
	case n < 75:
		return fmt.Sprintf(`UPDATE %s SET v = 100 - v WHERE id BETWEEN %d AND %d`, h.Table, k, k+h.rand.IntN(5))
	case n < 78:
		return fmt.Sprintf(`UPDATE %s SET big = repeat('z', 4000) WHERE id = %d`, h.Table, k)
	case n < 90:
		return fmt.Sprintf(`DELETE FROM %s WHERE id = %d`, h.Table, k)
	case n < 94:
		return fmt.Sprintf(`DELETE FROM %s WHERE id BETWEEN %d AND %d`, h.Table, k, k+h.rand.IntN(5))
	case n < 99 || !h.Truncate:
		return fmt.Sprintf(`WITH gone AS (DELETE FROM %[1]s WHERE id = %[2]d RETURNING *) INSERT INTO %[1]s (id, v, note) SELECT %[3]d, %[4]s, 'x' FROM gone WHERE NOT EXISTS (SELECT FROM %[1]s WHERE id = %[3]d) `,
			h.Table, k, h.key(), h.value())
	default:
		return `TRUNCATE ` + h.Table
	}
}
