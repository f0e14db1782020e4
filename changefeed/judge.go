package changefeed

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy"
)

// judged is what the eval session said about one row of an event.
type judged struct {
	image   *string // the row as JSON; nil if it failed
	failed  *pgconn.PgError
	matches []bool            // for each stream of the table that was asked for
	failure []*pgconn.PgError // for each stream, why its predicate said nothing
}

// question asks about one row.
type question struct {
	literal string
	answer  *judged
	// asks says which streams of the table want to know; nil for all of them.
	asks []bool
}

func (q *question) asked(i int) bool { return q.asks == nil || q.asks[i] }

// judge asks questions about rows of one table. Errors that look like a changed catalog are errStale, in the last attempt
// they are taken for what they are.
type judge struct {
	target *Target
	tx     pgx.Tx
	table  *table
	last   bool
	// broken are streams of the table that cannot go on, with the reason, and ruined why the table's rows cannot be shown.
	broken map[*stream]string
	ruined string
}

const (
	// evalRows and evalBytes bound what one statement of the eval session is asked.
	evalRows  = 1000
	evalBytes = 4 << 20
	// evalTimeouts is how often code of one stream or table may take too long, each time for a single row, before it is
	// given up: everybody else waits meanwhile.
	evalTimeouts = 3
	// evalRepeats is how often an error that may pass is met before it is believed.
	evalRepeats = 3
	// evalPause is the time between two attempts.
	evalPause = 20 * time.Millisecond
)

// judge answers the questions about the rows of a plan: first about every new row, and about deleted ones that a stream may
// have had; then about the old rows of updates, where what became of the new row leaves it open.
func (t *Target) judge(ctx context.Context, tx pgx.Tx, te *tableEvents, last bool) (*judge, error) {
	j := &judge{target: t, tx: tx, table: te.table, last: last, broken: make(map[*stream]string)}
	var first, second []question
	for i := range te.events {
		e := &te.events[i]
		switch {
		case e.problem != "":
		case e.op != koldproxy.OpDelete:
			e.newJudged = &judged{}
			first = append(first, question{literal: *e.newLiteral(), answer: e.newJudged})
		case len(te.table.streams) > 0:
			e.oldJudged = &judged{}
			first = append(first, question{literal: *e.oldLiteral(), answer: e.oldJudged})
		}
	}
	if err := j.ask(ctx, first); err != nil {
		return nil, err
	}
	for i := range te.events {
		e := &te.events[i]
		if asks := e.openStreams(te.table); asks != nil {
			e.oldJudged = &judged{}
			second = append(second, question{literal: *e.oldLiteral(), answer: e.oldJudged, asks: asks})
		}
	}
	return j, j.ask(ctx, second)
}

// openStreams says which streams need the predicate's word on the old row of an update; nil if nobody needs the old row.
func (e *event) openStreams(tab *table) []bool {
	if e.problem != "" || e.op != koldproxy.OpUpdate || e.old == nil {
		return nil
	}
	asks, needed := make([]bool, len(tab.streams)), false
	for i, s := range tab.streams {
		asks[i] = e.newJudged.failure[i] == nil && !e.newJudged.matches[i]
		needed = needed || asks[i] || s.preImage && e.newJudged.matches[i] && e.newJudged.failed == nil
	}
	if !needed {
		return nil
	}
	return asks
}

// ask answers questions, a bounded number at a time.
func (j *judge) ask(ctx context.Context, questions []question) error {
	for i := range questions {
		questions[i].answer.matches = make([]bool, len(j.table.streams))
		questions[i].answer.failure = make([]*pgconn.PgError, len(j.table.streams))
	}
	for len(questions) > 0 {
		n, size := 0, 0
		for n < len(questions) && n < evalRows && (n == 0 || size+len(questions[n].literal) <= evalBytes) {
			size += len(questions[n].literal)
			n++
		}
		if err := j.askTogether(ctx, questions[:n]); err != nil {
			return err
		}
		questions = questions[n:]
	}
	return nil
}

// askTogether answers questions in one statement; if it fails, in smaller ones, until the rows that are to blame are alone.
func (j *judge) askTogether(ctx context.Context, questions []question) error {
	if j.ruined != "" {
		return nil
	}
	var streams []int
	for i, s := range j.table.streams {
		wanted := slices.ContainsFunc(questions, func(q question) bool { return q.asked(i) })
		if _, broken := j.broken[s]; wanted && !broken {
			streams = append(streams, i)
		}
	}
	literals := make([]string, len(questions))
	for i := range questions {
		literals[i] = questions[i].literal
	}
	answers, err := j.rows(ctx, literals, streams)
	if err == nil {
		for i := range answers {
			questions[i].answer.take(answers[i], streams)
		}
		return nil
	}
	pg := raised(err)
	switch {
	case pg == nil:
		return err
	case !j.last && blame(pg) == definition:
		return errStale
	}
	if len(questions) == 1 {
		return j.askAlone(ctx, &questions[0], streams)
	}
	parts := 2
	if pg.Code == codeCanceled {
		parts = 32 // each step down costs the whole timeout
	}
	for part := range slices.Chunk(questions, (len(questions)+parts-1)/parts) {
		if err := j.askTogether(ctx, part); err != nil {
			return err
		}
	}
	return nil
}

// askAlone finds out what is wrong with one row: the row itself, or one of the predicates about it.
func (j *judge) askAlone(ctx context.Context, q *question, streams []int) error {
	answers, err := j.rows(ctx, []string{q.literal}, nil)
	pg := raised(err)
	if err != nil && pg == nil {
		return err
	}
	if pg != nil {
		if j.ruined = j.giveUp(pg, timeouts{table: j.table.oid}); j.ruined != "" {
			return nil
		}
		q.answer.failed = pg // whether it matters, its predicates may still say
	} else {
		q.answer.take(answers[0], nil)
	}
	for _, i := range streams {
		if !q.asked(i) {
			continue
		}
		s := j.table.streams[i]
		if pg != nil {
			q.answer.matches[i], err = j.target.eval.matches(ctx, j.tx, s.predicateOID, q.literal)
		} else if answers, err = j.rows(ctx, []string{q.literal}, []int{i}); err == nil {
			q.answer.take(answers[0], []int{i})
		}
		failure := raised(err)
		if err != nil && failure == nil {
			return err
		}
		if failure == nil {
			continue
		}
		q.answer.failure[i] = failure
		if reason := j.giveUp(failure, timeouts{stream: s.id}); reason != "" && pg == nil {
			j.broken[s] = reason
		}
	}
	return nil
}

// giveUp says why an error is not only one of a row, or nothing.
func (j *judge) giveUp(pg *pgconn.PgError, of timeouts) string {
	if blame(pg) == definition {
		return publicReason(pg)
	}
	if pg.Code != codeCanceled {
		return ""
	}
	if j.target.timeouts[of]++; j.target.timeouts[of] < evalTimeouts {
		return ""
	}
	delete(j.target.timeouts, of)
	return fmt.Sprintf("evaluating a single row has taken longer than %v, %d times", j.target.cfg.EvalTimeout, evalTimeouts)
}

// timeouts names who is to blame for time: a stream, or a table by its OID.
type timeouts struct {
	stream int64
	table  uint32
}

// rows asks the eval session. Locks and shortages are waited for; what is left is believed.
func (j *judge) rows(ctx context.Context, literals []string, streams []int) ([]evaluated, error) {
	predicates := make([]uint32, len(streams))
	for i, s := range streams {
		predicates[i] = j.table.streams[s].predicateOID
	}
	for attempt := 1; ; attempt++ {
		answers, err := j.target.eval.rows(ctx, j.tx, j.table.rowType, literals, predicates)
		for i := range answers {
			if err == nil && !strings.HasPrefix(answers[i].image, "{") {
				err = &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "22023", Message: "the row does not become a JSON object"}
			}
		}
		pg := raised(err)
		if pg == nil {
			return answers, err
		}
		wait, waitErr := j.mayPass(ctx, pg, attempt)
		if waitErr != nil {
			return nil, waitErr
		}
		if !wait {
			return nil, err
		}
	}
}

// mayPass waits for a moment, or until nobody has locked the table any more, if that may help. Code of users can raise these
// errors as well, so they are believed in the end.
func (j *judge) mayPass(ctx context.Context, pg *pgconn.PgError, attempt int) (bool, error) {
	switch pg.Code[:min(2, len(pg.Code))] {
	case "40", "53", "55", "58":
	default:
		return false, nil
	}
	for waited := false; ; waited = true {
		var locked bool
		err := j.tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = current_database()
			WHERE l.locktype = 'relation' AND l.relation = $1 AND l.mode = 'AccessExclusiveLock' AND l.pid <> pg_catalog.pg_backend_pid())`, j.table.oid).Scan(&locked)
		if err != nil {
			return false, fmt.Errorf("look for locks on %s: %w", j.table.name, err)
		}
		if !locked {
			if !waited && attempt >= evalRepeats {
				return false, nil
			}
			return true, pause(ctx)
		}
		if err := pause(ctx); err != nil {
			return false, err
		}
	}
}

func pause(ctx context.Context) error {
	timer := time.NewTimer(evalPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// take notes an answer about some streams.
func (q *judged) take(e evaluated, streams []int) {
	q.image = &e.image
	for i, s := range streams {
		q.matches[s] = e.matches[i]
	}
}
