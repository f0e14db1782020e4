package changefeed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// evalSession is the session in which code of users runs: checks of domains, casts, whatever predicates call. Nothing else
// happens in it. The code runs under rights of its own (koldstore.eval_rows); what it could leave behind in the session for
// whoever comes next is kept out like this:
//
//   - Each statement has a transaction of its own, which is read-only and is always rolled back. That undoes settings and
//     keeps deferred triggers from firing.
//   - Statements have no names, so that nobody can have prepared another one under theirs.
//   - DISCARD ALL follows every error, and one statement in a thousand.
//   - Code that does not stop when it is told to is stopped by ending the session.
//
// What comes out of it is text. It belongs to the goroutine of its [Target].
type evalSession struct {
	cfg     *pgconn.Config
	timeout time.Duration
	types   *pgtype.Map

	conn       *pgconn.PgConn // nil if there is none
	started    string         // the backend's start, which tells it from another one of the same pid
	statements int
}

// evalSettings are those of the apply session (see walapply), as far as they change how values are read and written, and
// what keeps the session harmless.
var evalSettings = map[string]string{
	"application_name":                    "koldproxy eval",
	"client_encoding":                     "UTF8",
	"datestyle":                           "ISO",
	"intervalstyle":                       "postgres",
	"extra_float_digits":                  "3",
	"bytea_output":                        "hex",
	"timezone":                            "UTC",
	"lc_monetary":                         "C",
	"search_path":                         "pg_catalog",
	"standard_conforming_strings":         "on",
	"default_transaction_isolation":       "read committed",
	"default_transaction_read_only":       "on",
	"default_transaction_deferrable":      "off",
	"idle_in_transaction_session_timeout": "0",
	"idle_session_timeout":                "0",
	"jit":                                 "off",
}

const (
	// discardAfter is how many statements share a session before it is wiped.
	discardAfter = 1000
	// evalGrace is how long the server may take to cancel a statement that is over its time. PL/pgSQL can catch the
	// cancellation and go on; then the session ends.
	evalGrace = time.Second
)

func newEvalSession(dsn string, timeout time.Duration) (*evalSession, error) {
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("changefeed: the DSN is no connection string")
	}
	maps.Copy(cfg.RuntimeParams, evalSettings)
	// A table that somebody has locked (ALTER TABLE) is no fault of a row, so waiting for it has to end with another error
	// than taking too long (see mayPass).
	cfg.RuntimeParams["lock_timeout"] = fmt.Sprintf("%dms", max(min(time.Second, timeout/2).Milliseconds(), 1))
	cfg.RuntimeParams["statement_timeout"] = fmt.Sprintf("%dms", timeout.Milliseconds())
	return &evalSession{cfg: cfg, timeout: timeout, types: pgtype.NewMap()}, nil
}

// applySession returns the transaction of the apply session, in which nothing of the work at hand has been written, when nothing else uses it
// any more. Those who evaluate rows need it when something is wrong or takes long.
type applySession func() pgx.Tx

// idle is an apply session that nothing else uses.
func idle(tx pgx.Tx) applySession { return func() pgx.Tx { return tx } }

// evaluated is what became of one row: the row as JSON unless only predicates were asked, and for each predicate that was asked for whether it is true.
type evaluated struct {
	image   string
	matches []bool
}

const (
	evalSQL  = `SELECT e.ord, e.image::pg_catalog.text, e.matches FROM koldstore.eval_rows($1, $2, $3) AS e`
	querySQL = `SELECT koldstore.judge_query($1, $2)`
	judgeSQL = `SELECT e.ord, pg_catalog.array_to_string(e.matches, ' ') FROM koldstore.judge_rows($1, $2) AS e`
	matchSQL = `SELECT (e.matches)[1] FROM koldstore.eval_predicates(ARRAY[$1], ARRAY[$2]) AS e`
	startSQL = `SELECT a.backend_start::pg_catalog.text FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()`
)

// rows evaluates literals of a row type. A *pgconn.PgError that [raised] recognizes was raised by the rows, or in their name;
// any other error is one of the connection, which is closed then.
func (s *evalSession) rows(ctx context.Context, apply applySession, rowType uint32, literals []string, predicates []uint32) ([]evaluated, error) {
	args, err := s.encode(rowType, literals, predicates)
	if err != nil {
		return nil, err
	}
	out := make([]evaluated, len(literals))
	seen := 0
	err = s.run(ctx, apply, evalSQL, args, []uint32{pgtype.OIDOID, pgtype.TextArrayOID, pgtype.OIDArrayOID}, func(row [][]byte) error {
		var ord int64
		var matches []*bool
		if err := s.types.Scan(pgtype.Int8OID, pgtype.TextFormatCode, row[0], &ord); err != nil {
			return err
		}
		if err := s.types.Scan(pgtype.BoolArrayOID, pgtype.TextFormatCode, row[2], &matches); err != nil {
			return err
		}
		if ord < 1 || int(ord) > len(out) || len(matches) != len(predicates) {
			return fmt.Errorf("an answer about row %d of %d with %d of %d predicates", ord, len(out), len(matches), len(predicates))
		}
		e := evaluated{image: string(row[1]), matches: make([]bool, len(matches))}
		for i, m := range matches {
			e.matches[i] = m != nil && *m
		}
		out[ord-1] = e
		seen++
		return nil
	})
	if err == nil && seen != len(literals) {
		s.close(ctx)
		err = fmt.Errorf("%d answers about %d rows", seen, len(literals))
	}
	if err != nil {
		return nil, fmt.Errorf("evaluate rows: %w", err)
	}
	return out, nil
}

// arrayHeader is how many bytes the binary format of an array begins with.
const arrayHeader = 20

// encode writes parameters in binary: numbers, texts, and arrays of them.
func (s *evalSession) encode(values ...any) ([][]byte, error) {
	args := make([][]byte, len(values))
	for i, value := range values {
		var oid uint32
		var buffer []byte
		switch value := value.(type) {
		case uint32:
			oid = pgtype.OIDOID
		case string:
			oid = pgtype.TextOID
		case []uint32:
			oid = pgtype.OIDArrayOID
		case []string: // large rows are not copied more often than need be
			oid = pgtype.TextArrayOID
			size := arrayHeader
			for _, text := range value {
				size += 4 + len(text)
			}
			buffer = make([]byte, 0, size)
		}
		var err error
		if args[i], err = s.types.Encode(oid, pgtype.BinaryFormatCode, value, buffer); err != nil {
			return nil, fmt.Errorf("encode rows: %w", err)
		}
	}
	return args, nil
}

// query writes the query for judge.
func (s *evalSession) query(ctx context.Context, apply applySession, rowType uint32, predicates []uint32) (query string, err error) {
	args, err := s.encode(rowType, predicates)
	if err == nil {
		err = s.run(ctx, apply, querySQL, args, []uint32{pgtype.OIDOID, pgtype.OIDArrayOID}, func(row [][]byte) error {
			query = string(row[0])
			return nil
		})
	}
	if err != nil {
		return "", fmt.Errorf("write a query for predicates: %w", err)
	}
	return query, nil
}

// predicatesPerWord is how many predicates share a number in the answers of koldstore.judge_rows.
const predicatesPerWord = 60

// judge asks the predicates of a query, so many of them, about literals. Errors are those of rows.
func (s *evalSession) judge(ctx context.Context, apply applySession, query string, literals []string, predicates int) ([]evaluated, error) {
	args, err := s.encode(query, literals)
	if err != nil {
		return nil, err
	}
	out, all := make([]evaluated, len(literals)), make([]bool, len(literals)*predicates)
	seen := 0
	err = s.run(ctx, apply, judgeSQL, args, []uint32{pgtype.TextOID, pgtype.TextArrayOID}, func(row [][]byte) error {
		ord, err := strconv.Atoi(string(row[0]))
		if err != nil || ord < 1 || ord > len(out) {
			return fmt.Errorf("an answer about row %q of %d", row[0], len(out))
		}
		out[ord-1].matches = all[(ord-1)*predicates : ord*predicates]
		seen++
		return unpack(out[ord-1].matches, string(row[1]))
	})
	if err == nil && seen != len(literals) {
		s.close(ctx)
		err = fmt.Errorf("%d answers about %d rows", seen, len(literals))
	}
	if err != nil {
		return nil, fmt.Errorf("evaluate predicates: %w", err)
	}
	return out, nil
}

// unpack reads the bits of words.
func unpack(bits []bool, words string) error {
	fields := strings.Fields(words)
	if len(fields) != (len(bits)+predicatesPerWord-1)/predicatesPerWord {
		return fmt.Errorf("an answer of %d words about %d predicates", len(fields), len(bits))
	}
	for n, field := range fields {
		word, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return err
		}
		for i := n * predicatesPerWord; i < min((n+1)*predicatesPerWord, len(bits)); i++ {
			bits[i] = word>>(i%predicatesPerWord)&1 != 0
		}
	}
	return nil
}

// matches asks a predicate about a row that cannot be shown as JSON.
func (s *evalSession) matches(ctx context.Context, apply applySession, predicate uint32, literal string) (yes bool, err error) {
	oid := binary.BigEndian.AppendUint32(nil, predicate)
	err = s.run(ctx, apply, matchSQL, [][]byte{[]byte(literal), oid}, []uint32{pgtype.TextOID, pgtype.OIDOID}, func(row [][]byte) error {
		yes = string(row[0]) == "t"
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("evaluate a predicate: %w", err)
	}
	return yes, nil
}

// raised is the error that rows, or code that ran for them, raised; nil if err is of another kind.
func raised(err error) *pgconn.PgError {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" {
		return pg
	}
	return nil
}

// run executes one statement in a transaction of its own. Values come as text; args are binary.
func (s *evalSession) run(ctx context.Context, apply applySession, sql string, args [][]byte, types []uint32, each func(row [][]byte) error) error {
	if err := s.ready(ctx); err != nil {
		return err
	}
	s.statements++
	timeout := s.timeoutFor(args)
	bounded, cancel := context.WithTimeout(ctx, timeout+evalGrace)
	defer cancel()
	formats := []int16{pgtype.BinaryFormatCode} // of a text, the same as its text
	var batch pgconn.Batch
	batch.ExecParams("BEGIN READ ONLY", nil, nil, nil, nil)
	if timeout > s.timeout {
		batch.ExecParams(fmt.Sprintf("SET LOCAL statement_timeout = %d", timeout.Milliseconds()), nil, nil, nil, nil)
	}
	batch.ExecParams(sql, args, types, formats, nil)
	batch.ExecParams("ROLLBACK", nil, nil, nil, nil)
	results := s.conn.ExecBatch(bounded, &batch)
	var failed error
	for results.NextResult() {
		for r := results.ResultReader(); r.NextRow(); {
			if failed == nil {
				failed = each(r.Values())
			}
		}
	}
	err := results.Close()
	switch {
	case err == nil && failed == nil:
		return nil
	case ctx.Err() != nil:
		s.close(ctx)
		return ctx.Err()
	case bounded.Err() != nil:
		return s.terminate(ctx, apply())
	case raised(err) == nil:
		s.close(ctx)
		return errors.Join(err, failed)
	}
	if clean := s.discard(ctx); clean != nil {
		s.close(ctx)
	}
	return err
}

// timeoutFor is how long a statement may take: longer than a row usually may if that row is large.
func (s *evalSession) timeoutFor(args [][]byte) time.Duration {
	size := 0
	for _, arg := range args {
		size += len(arg)
	}
	if size <= 2*evalBytes { // several rows, with what encoding them adds
		return s.timeout
	}
	return s.timeout + time.Duration(size/evalRate)*time.Second
}

// evalRate is how many bytes of a large row are read and judged in a second, on a machine that has other things to do.
const evalRate = 1 << 20

// ready connects if need be, and wipes a session that has been in use for long.
func (s *evalSession) ready(ctx context.Context) error {
	if s.conn != nil && s.statements >= discardAfter && s.discard(ctx) != nil || s.conn != nil && s.conn.IsClosed() {
		s.close(ctx)
	}
	if s.conn != nil {
		return nil
	}
	conn, err := pgconn.ConnectConfig(ctx, s.cfg)
	if err != nil {
		return fmt.Errorf("open the eval session: %w", err)
	}
	result := conn.ExecParams(ctx, startSQL, nil, nil, nil, nil).Read()
	if result.Err != nil || len(result.Rows) != 1 {
		closePgConn(ctx, conn)
		return fmt.Errorf("open the eval session: %w", errors.Join(result.Err, errors.New("it does not know itself")))
	}
	s.conn, s.started, s.statements = conn, string(result.Rows[0][0]), 0
	return nil
}

// discard forgets whatever code of users has left in the session.
func (s *evalSession) discard(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout+evalGrace)
	defer cancel()
	for _, sql := range []string{"ROLLBACK", "DISCARD ALL"} {
		if err := s.conn.Exec(ctx, sql).Close(); err != nil {
			return err
		}
	}
	s.statements = 0
	return nil
}

// terminate ends a session whose code does not stop, and says what would have been said if it had.
func (s *evalSession) terminate(ctx context.Context, tx pgx.Tx) error {
	// A transaction that has seen pg_stat_activity once goes on seeing the same.
	_, err := tx.Exec(ctx, `SELECT pg_catalog.pg_stat_clear_snapshot()`)
	if err != nil {
		return fmt.Errorf("terminate the eval session: %w", err)
	}
	_, err = tx.Exec(ctx, `SELECT pg_catalog.pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity a
		WHERE a.pid = $1 AND a.usename = current_user AND a.backend_start::pg_catalog.text = $2`, int32(s.conn.PID()), s.started)
	s.close(ctx)
	if err != nil {
		return fmt.Errorf("terminate the eval session: %w", err)
	}
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: codeCanceled, Message: "canceling statement due to statement timeout"}
}

// codeCanceled is PostgreSQL's query_canceled.
const codeCanceled = "57014"

func (s *evalSession) close(ctx context.Context) {
	if s.conn != nil {
		closePgConn(ctx, s.conn)
		s.conn = nil
	}
}

// farewellTimeout bounds the farewell of a connection.
const farewellTimeout = 5 * time.Second

func closePgConn(ctx context.Context, conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewellTimeout)
	defer cancel()
	conn.Close(ctx)
	select {
	case <-conn.CleanupDone():
	case <-ctx.Done():
	}
}
