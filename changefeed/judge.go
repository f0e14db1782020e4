package changefeed

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// judged is what the eval session said about one row of an event.
type judged struct {
	image   *string // the row as JSON, from the table's painter if it has one; nil if it failed, or if only a mirror wants it and can paint it
	failed  *pgconn.PgError
	matches []bool                  // for each stream of the table that was asked for
	failure map[int]*pgconn.PgError // for a stream, why its predicate said nothing
}

// question asks about one row.
type question struct {
	literal string
	answer  *judged
	// asks says which streams of the table want to know; nil for all of them.
	asks []bool
}

// shown says whether the row's image is there already.
func (q *question) shown() bool { return q.answer.image != nil }

func (q *question) asked(i int) bool { return q.asks == nil || q.asks[i] }

// judge asks questions about rows of one table. Errors that look like a changed catalog are errStale, in the last attempt
// they are taken for what they are.
type judge struct {
	target *Target
	apply  applySession
	table  *table
	last   bool
	// broken are streams of the table that cannot go on, with the reason, and ruined why the table's rows cannot be shown.
	broken map[*stream]string
	ruined string
	// sound says of a suspect whether it does what it should with a row of NULLs, once that was asked.
	sound map[suspect]bool
}

func (t *Target) newJudge(apply applySession, tab *table, last bool) *judge {
	return &judge{target: t, apply: apply, table: tab, last: last, broken: make(map[*stream]string), sound: make(map[suspect]bool)}
}

const (
	// evalRows and evalBytes bound what one statement of the eval session is asked.
	evalRows  = 8 << 10
	evalBytes = 4 << 20
	// maxQueries bounds the queries about different sets of streams that are kept for a table.
	maxQueries = 256
	// evalTimeouts is how often code of one stream or table may take too long, each time for a single row, before it is
	// given up: everybody else waits meanwhile. What is further back than evalMemory times the limit is forgotten: that is a small
	// part of the time.
	evalTimeouts = 3
	evalMemory   = 60
	// evalRepeats is how often an error that may pass is met before it is believed.
	evalRepeats = 3
	// evalPause is the time between two attempts.
	evalPause = 20 * time.Millisecond
)

// paint makes the images of the rows of a plan that can be made here, and returns what is to be asked first: about every new row, and about
// deleted ones that a stream may have had.
func (te *tableEvents) paint() (first []question) {
	tab := te.table
	asked := len(tab.streams) > 0
	for i := range te.events {
		e := &te.events[i]
		switch {
		case e.problem != "":
		case e.op != koldproxy.OpDelete:
			if !asked && tab.painter != nil { // what takes the image paints it
				e.newJudged = &judged{}
				tab.cannotFit(e.new, e.newJudged)
				continue
			}
			if e.newJudged = tab.paint(e.new); !tab.cannotFit(e.new, e.newJudged) {
				first = append(first, tab.question(e.new, e.newLiteral, e.newJudged))
			}
		case asked:
			if e.oldJudged = tab.paint(e.old); !tab.cannotFit(e.old, e.oldJudged) {
				first = append(first, tab.question(e.old, e.oldLiteral, e.oldJudged))
			}
		}
	}
	return first
}

// question asks about a row. If its image is there already, and predicates look at some of its columns only, these alone are read.
func (t *table) question(row []koldproxy.Datum, literal func() *string, answer *judged) question {
	if t.judged == nil {
		return question{literal: *literal(), answer: answer}
	}
	some := make([]koldproxy.Datum, len(row)) // NULL but for these
	for _, i := range t.judged {
		some[i] = row[i]
	}
	return question{literal: rowLiteral(some), answer: answer}
}

// judgedColumns are the positions of the columns that predicates look at; nil if that is not known for all of them, or if reading the
// others can run code of users.
func (t *table) judgedColumns() []int {
	used := []int{}
	for _, s := range t.streams {
		if t.painter == nil || s.foreign || len(s.uses) == 0 || slices.Contains(s.uses, -1) {
			return nil
		}
		used = append(used, s.uses...)
	}
	slices.Sort(used)
	return slices.Compact(used)
}

// judge answers the first questions about the rows of a plan; then it asks about the old rows of updates, where what became of the new row
// leaves it open.
func (t *Target) judge(ctx context.Context, apply applySession, te *tableEvents, first []question, last bool) (*judge, error) {
	j := t.newJudge(apply, te.table, last)
	var second []question
	if err := j.ask(ctx, first); err != nil {
		return nil, err
	}
	for i := range te.events {
		e := &te.events[i]
		if asks := e.openStreams(te.table); asks != nil {
			if e.oldJudged = te.table.paint(e.old); te.table.cannotFit(e.old, e.oldJudged) {
				continue
			}
			e.oldJudged.matches = make([]bool, len(asks))
			if e.oldJudged.image == nil || slices.Contains(asks, true) {
				q := te.table.question(e.old, e.oldLiteral, e.oldJudged)
				q.asks = asks
				second = append(second, q)
			}
		}
	}
	err := j.ask(ctx, second)
	for i := range te.events {
		te.events[i].dropLarge()
	}
	return j, err
}

// maxJSONString is the longest string that jsonb can hold, in bytes.
const maxJSONString = 1<<28 - 1

// cannotFit judges a row with a value that no image can hold. Nobody is asked about it.
func (t *table) cannotFit(row []koldproxy.Datum, j *judged) bool {
	for i := range row {
		if a := t.column(i); len(row[i].Text) > maxJSONString && slices.Contains(textTypes, a.base) {
			j.image, j.matches, j.failure = nil, make([]bool, len(t.streams)), make(map[int]*pgconn.PgError)
			j.failed = &pgconn.PgError{
				SeverityUnlocalized: "ERROR", Code: codeLimitExceeded,
				Message: fmt.Sprintf("the value of column %s has %d bytes, and a string in jsonb can have %d", ident(a.name), len(row[i].Text), maxJSONString),
			}
			for i := range t.streams { // whether it matches is of no use to anybody
				j.failure[i] = j.failed
			}
			return true
		}
	}
	return false
}

// textTypes are those whose values are strings in JSON, and can be long.
var textTypes = []uint32{pgtype.TextOID, pgtype.VarcharOID, pgtype.BPCharOID, pgtype.ByteaOID, pgtype.BitOID, pgtype.VarbitOID}

// codeLimitExceeded is PostgreSQL's program_limit_exceeded.
const codeLimitExceeded = "54000"

// paint begins to judge a row: it has its image already if the table has a painter.
func (t *table) paint(row []koldproxy.Datum) *judged {
	j := &judged{}
	if t.painter != nil {
		image := t.painter.image(row)
		j.image = &image
	}
	return j
}

// openStreams says which streams need the predicate's word on the old row of an update; nil if nobody needs the old row.
func (e *event) openStreams(tab *table) []bool {
	if e.problem != "" || e.op != koldproxy.OpUpdate || e.old == nil {
		return nil
	}
	var asks []bool
	var last *stream // the one that unmoved was asked about; many look at the same columns
	var unmoved bool
	for i, s := range tab.streams {
		matches := e.newJudged.matches[i]
		if last == nil || !slices.Equal(s.uses, last.uses) {
			last, unmoved = s, s.unmoved(e)
		}
		open := !matches && !unmoved && e.newJudged.failure[i] == nil
		if asks == nil && (open || s.preImage && matches && e.newJudged.failed == nil) {
			asks = make([]bool, len(tab.streams))
		}
		if open {
			asks[i] = true
		}
	}
	return asks
}

// unmoved says that an update left alone what the predicate looks at. As the new row does not match, the old one did not.
func (s *stream) unmoved(e *event) bool {
	for _, i := range s.uses {
		if !known(e.old, i) || e.old[i] != e.new[i] {
			return false
		}
	}
	return len(s.uses) > 0
}

// ask answers questions, a bounded number at a time.
func (j *judge) ask(ctx context.Context, questions []question) error {
	streams := len(j.table.streams)
	all := make([]bool, len(questions)*streams)
	for i := range questions {
		questions[i].answer.matches = all[i*streams : (i+1)*streams : (i+1)*streams]
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
	var streams []int
	for i := range j.table.streams {
		if slices.ContainsFunc(questions, func(q question) bool { return q.asked(i) }) {
			streams = append(streams, i)
		}
	}
	return j.askAbout(ctx, questions, streams, slices.ContainsFunc(questions, func(q question) bool { return !q.shown() }))
}

// askAbout asks for the images of rows, which of some streams they match, or both. If that fails it asks for less at a time: of predicates
// before rows, since one that raises may do so for every row, and all the others are not to be asked about each alone.
func (j *judge) askAbout(ctx context.Context, questions []question, streams []int, images bool) error {
	streams = slices.DeleteFunc(slices.Clone(streams), func(i int) bool { return j.broken[j.table.streams[i]] != "" })
	if j.ruined != "" || len(questions) == 0 || !images && len(streams) == 0 {
		return nil
	}
	literals := make([]string, len(questions))
	for i := range questions {
		literals[i] = questions[i].literal
	}
	answers, err := j.rows(ctx, literals, streams, images)
	if err == nil {
		for i := range answers {
			questions[i].answer.take(answers[i], streams, images)
		}
		return nil
	}
	pg := raised(err)
	switch {
	case pg == nil:
		return err
	case !j.last && blame(pg) == definition:
		return errStale
	case pg.Code == codeCanceled: // each step down costs the whole timeout
		return j.askParts(ctx, questions, streams, images, 32)
	case images && len(streams) > 0:
		if err := j.askAbout(ctx, questions, nil, true); err != nil {
			return err
		}
		return j.askShown(ctx, questions, streams)
	case len(streams) > 1:
		half := len(streams) / 2
		if err := j.askAbout(ctx, questions, streams[:half], false); err != nil {
			return err
		}
		return j.askAbout(ctx, questions, streams[half:], false)
	}
	return j.askParts(ctx, questions, streams, images, 2)
}

// askParts asks about parts of the questions, or about the only one alone.
func (j *judge) askParts(ctx context.Context, questions []question, streams []int, images bool, parts int) error {
	if len(questions) == 1 {
		return j.askAlone(ctx, &questions[0], streams)
	}
	for part := range slices.Chunk(questions, (len(questions)+parts-1)/parts) {
		if err := j.askAbout(ctx, part, streams, images); err != nil {
			return err
		}
	}
	return nil
}

// askShown asks about rows for whose images was asked before. Those that have none may not even be rows, for any of the streams.
func (j *judge) askShown(ctx context.Context, questions []question, streams []int) error {
	var shown []question
	for i := range questions {
		if questions[i].shown() {
			shown = append(shown, questions[i])
		} else if err := j.askAlone(ctx, &questions[i], streams); err != nil {
			return err
		}
	}
	return j.askAbout(ctx, shown, streams, false)
}

// askAlone finds out what is wrong with one row: the row itself, or one of the predicates about it.
func (j *judge) askAlone(ctx context.Context, q *question, streams []int) error {
	pg, err := j.showAlone(ctx, q)
	if err != nil || j.ruined != "" {
		return err
	}
	for _, i := range streams {
		s := j.table.streams[i]
		if !q.asked(i) || j.broken[s] != "" {
			continue
		}
		var failure *pgconn.PgError
		if q.answer.matches[i], failure, err = j.matchAlone(ctx, s, q.literal); err != nil {
			return err
		}
		if failure == nil {
			continue
		}
		if q.answer.failure == nil {
			q.answer.failure = make(map[int]*pgconn.PgError)
		}
		q.answer.failure[i] = failure
		charged := len(q.literal) <= evalBytes || s.foreign || j.table.foreign()
		reason, err := j.giveUp(failure, suspect{stream: s.id}, charged, func(literal string) (*pgconn.PgError, error) {
			_, failure, err := j.matchAlone(ctx, s, literal)
			return failure, err
		})
		if err != nil {
			return err
		}
		if reason != "" && pg == nil {
			j.broken[s] = reason
		}
	}
	return nil
}

// matchAlone asks the predicate's own function, which is the last word about it, and returns what it raised, if so.
func (j *judge) matchAlone(ctx context.Context, s *stream, literal string) (yes bool, failure *pgconn.PgError, err error) {
	err = j.patiently(ctx, func() error {
		yes, err = j.target.eval.matches(ctx, j.apply, s.predicateOID, literal)
		return err
	})
	if failure = raised(err); failure != nil {
		err = nil
	}
	return yes, failure, err
}

// showAlone asks for the image of one row and returns why there is none, if so. Whether that matters, its predicates may
// still say.
func (j *judge) showAlone(ctx context.Context, q *question) (*pgconn.PgError, error) {
	if q.shown() || q.answer.failed != nil {
		return q.answer.failed, nil
	}
	answers, err := j.rows(ctx, []string{q.literal}, nil, true)
	pg := raised(err)
	switch {
	case err == nil:
		q.answer.take(answers[0], nil, true)
	case pg == nil:
		return nil, err
	default:
		q.answer.failed = pg
		j.ruined, err = j.giveUp(pg, suspect{table: j.table.oid}, j.table.foreign(), func(literal string) (*pgconn.PgError, error) {
			_, err := j.rows(ctx, []string{literal}, nil, true)
			if failure := raised(err); failure != nil {
				return failure, nil
			}
			return nil, err
		})
		if err != nil {
			return nil, err
		}
		if pg.Code == codeLimitExceeded {
			sized := *pg
			sized.Message = fmt.Sprintf("%s (the row has %d bytes)", pg.Message, len(q.literal))
			q.answer.failed = &sized
		}
	}
	return pg, nil
}

// foreign says that reading or showing a row can run code that is not PostgreSQL's own.
func (t *table) foreign() bool {
	return slices.ContainsFunc(t.columns, func(i int) bool { return t.attributes[i].typeOID >= firstUserOID })
}

// firstUserOID is PostgreSQL's FirstNormalObjectId: whatever somebody has made has no lower one.
const firstUserOID = 16384

// giveUp says why an error is not only one of a row, or nothing. Time is counted if it is charged: PostgreSQL's own code takes its time
// over a large row, or on a busy machine, and neither is anybody's fault. An error that looks like one of a definition may come from
// values all the same (NaN that is to become an integer, a text that is no tsquery), so again asks about a row of NULLs.
func (j *judge) giveUp(pg *pgconn.PgError, of suspect, charged bool, again func(literal string) (*pgconn.PgError, error)) (string, error) {
	if blame(pg) == definition {
		if _, known := j.sound[of]; !known {
			failure, err := again(rowLiteral(make([]koldproxy.Datum, len(j.table.columns))))
			if err != nil {
				return "", err
			}
			j.sound[of] = failure == nil || blame(failure) != definition
		}
		if j.sound[of] {
			return "", nil
		}
		return publicReason(pg), nil
	}
	if pg.Code != codeCanceled || !charged {
		return "", nil
	}
	now := time.Now()
	recent := slices.DeleteFunc(append(j.target.timeouts[of], now), func(at time.Time) bool { return now.Sub(at) > evalMemory*j.target.cfg.EvalTimeout })
	j.target.timeouts[of] = recent
	if len(recent) < evalTimeouts {
		return "", nil
	}
	delete(j.target.timeouts, of)
	return fmt.Sprintf("evaluating a single row has taken longer than %v, %d times", j.target.cfg.EvalTimeout, evalTimeouts), nil
}

// suspect is what may be to blame for more than one row: a stream, or a table by its OID.
type suspect struct {
	stream int64
	table  uint32
}

// rows asks the eval session. Locks and shortages are waited for; what is left is believed.
func (j *judge) rows(ctx context.Context, literals []string, streams []int, images bool) ([]evaluated, error) {
	predicates := make([]uint32, len(streams))
	for i, s := range streams {
		predicates[i] = j.table.streams[s].predicateOID
	}
	var answers []evaluated
	err := j.patiently(ctx, func() (err error) {
		answers, err = j.evaluate(ctx, literals, predicates, images)
		for i := range answers {
			if err == nil && images && !strings.HasPrefix(answers[i].image, "{") {
				err = &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "22023", Message: "the row does not become a JSON object"}
			}
		}
		return err
	})
	return answers, err
}

// patiently repeats a question while its error may pass.
func (j *judge) patiently(ctx context.Context, question func() error) error {
	for attempt := 1; ; attempt++ {
		err := question()
		pg := raised(err)
		if pg == nil {
			return err
		}
		if wait, waitErr := j.mayPass(ctx, pg, attempt); waitErr != nil {
			return waitErr
		} else if !wait {
			return err
		}
	}
}

// evaluate asks the eval session once.
func (j *judge) evaluate(ctx context.Context, literals []string, predicates []uint32, images bool) ([]evaluated, error) {
	if images {
		return j.target.eval.rows(ctx, j.apply, j.table.rowType, literals, predicates)
	}
	key := fmt.Sprint(predicates)
	query := j.table.queries[key]
	if query == "" {
		var err error
		if query, err = j.target.eval.query(ctx, j.apply, j.table.rowType, predicates); err != nil {
			return nil, err
		}
		if len(j.table.queries) >= maxQueries {
			clear(j.table.queries)
		}
		j.table.queries[key] = query
	}
	return j.target.eval.judge(ctx, j.apply, query, literals, len(predicates))
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
		err := j.apply().QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = current_database()
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
func (q *judged) take(e evaluated, streams []int, image bool) {
	if image && q.image == nil {
		q.image = &e.image
	}
	for i, s := range streams {
		q.matches[s] = e.matches[i]
	}
}
