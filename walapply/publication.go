package walapply

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// The publication is an object of the database that others can alter. What it leaves out is not in the stream, and nothing
// in the stream says so; therefore it is compared, time and again, with the tables that streams and feeds follow.

// publication is what pg_publication says about ours.
type publication struct {
	name               string
	exists             bool
	all                bool // FOR ALL TABLES
	complete, announce bool // all kinds of changes; of koldstore.wal_marker, too
}

func readPublication(ctx context.Context, db Querier, name string) (publication, error) {
	p := publication{name: name, exists: true}
	err := db.QueryRow(ctx, `SELECT p.puballtables, p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate,
			p.puballtables OR EXISTS (SELECT FROM pg_publication_rel r, to_jsonb(r) j
				WHERE r.prpubid = p.oid AND r.prrelid = to_regclass('koldstore.wal_marker') AND j->>'prqual' IS NULL AND j->>'prattrs' IS NULL)
		FROM pg_publication p WHERE p.pubname = $1`, name).Scan(&p.all, &p.complete, &p.announce)
	if errors.Is(err, pgx.ErrNoRows) {
		return publication{name: name}, nil
	}
	if err != nil {
		return p, fmt.Errorf("look at the publication: %w", err)
	}
	return p, nil
}

// check says what is wrong with the publication as a whole. Without it changes are not decoded, so once something was
// applied its absence is a gap.
func (p publication) check(cp *checkpoint) error {
	wrong := func(what, remedy string) error {
		return &SetupError{Problem: fmt.Sprintf("publication %s is not what koldproxy made: %s", p.name, what), Hint: remedy}
	}
	name := pgx.Identifier{p.name}.Sanitize()
	switch {
	case !p.exists && cp.begun():
		return gap("publication %s was dropped, and with it goes what was written since", p.name)
	case !p.exists:
		return &SetupError{
			Problem: fmt.Sprintf("publication %s does not exist", p.name),
			Hint:    `make it again, of koldstore.wal_marker and the tables in koldstore.published_table, as docs/operations.md, "Gaps", shows`,
		}
	case p.all:
		return wrong("it is FOR ALL TABLES", `drop it and make it again, of koldstore.wal_marker and the tables in koldstore.published_table, as docs/operations.md, "Gaps", shows`)
	case !p.complete:
		return wrong("it leaves out kinds of changes", fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert, update, delete, truncate')", name))
	case !p.announce:
		return wrong("it leaves out koldstore.wal_marker, or part of it", fmt.Sprintf("ALTER PUBLICATION %s DROP and ADD TABLE koldstore.wal_marker", name))
	}
	return nil
}

// affectsAll is why everything is affected; empty if the publication as a whole is in order.
func (p publication) affectsAll() string {
	switch {
	case p.all:
		return "" // it has everything
	case !p.complete:
		return fmt.Sprintf("publication %s left out kinds of changes", p.name)
	case !p.announce:
		return fmt.Sprintf("publication %s left out koldstore.wal_marker", p.name)
	}
	return ""
}

const (
	// followedTables are those whose changes somebody counts on.
	followedTables = `SELECT s.table_oid FROM koldstore.stream s WHERE s.state <> 'broken'
		UNION SELECT m.table_oid FROM koldstore.managed_table m WHERE m.state <> 'broken'`
	// listedTables are those that have to be published.
	listedTables = followedTables + ` UNION SELECT t.table_oid FROM koldstore.published_table t`
)

// fault is a table that the publication does not cover as it has to.
type fault struct {
	table        uint32
	name, reason string
}

func (p publication) faults(ctx context.Context, db Querier, tables string) ([]fault, error) {
	rows, err := db.Query(ctx, `SELECT oid, name, reason FROM (
			SELECT c.oid, c.oid::regclass::text AS name, CASE
				WHEN $2::text <> '' THEN $2::text
				WHEN $3 THEN NULL
				WHEN r.oid IS NULL THEN 'its table is not in publication ' || $1
				WHEN to_jsonb(r)->>'prqual' IS NOT NULL THEN 'publication ' || $1 || ' filters the rows of its table'
				WHEN to_jsonb(r)->>'prattrs' IS NOT NULL THEN 'publication ' || $1 || ' lists columns of its table' END AS reason
			FROM (`+tables+`) f JOIN pg_class c ON c.oid = f.table_oid
			LEFT JOIN (pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid AND p.pubname = $1) ON r.prrelid = c.oid
		) faults WHERE reason IS NOT NULL ORDER BY name`, p.name, p.affectsAll(), p.all)
	if err == nil {
		return pgx.CollectRows(rows, func(row pgx.CollectableRow) (f fault, err error) {
			err = row.Scan(&f.table, &f.name, &f.reason)
			return f, err
		})
	}
	return nil, fmt.Errorf("compare the publication with its tables: %w", err)
}

// errPublicationLacks ends a session after streams or feeds were marked broken, so that the target forgets them.
var errPublicationLacks = errors.New("the publication lacks tables that were followed; streams and feeds of these are broken now")

// checkPublication looks at the publication and marks what it does not cover any more. It says whether it marked anything.
// No transaction may be open on the session's connection.
func (s *session) checkPublication(ctx context.Context) (marked bool, err error) {
	p, err := readPublication(ctx, s.conn, s.a.cfg.Publication)
	if err != nil {
		return false, err
	}
	heal := s.a.cfg.OnGap == OnGapHeal
	if heal && p.exists && s.cp.begun() {
		if reason := p.affectsAll(); reason != "" {
			return false, gap("%s", reason)
		}
	}
	if p.exists {
		faults, err := p.faults(ctx, s.conn, followedTables)
		if err == nil && heal {
			faults, err = s.repair(ctx, faults)
		}
		if err == nil && len(faults) > 0 {
			marked, err = true, s.markBroken(ctx, faults)
		}
		if err != nil {
			return false, err
		}
	}
	return marked, p.check(&s.cp)
}

// repair publishes tables again, each in a transaction of its own, and has their feeds healed from there on. It returns those
// that cannot be captured any more. A table that somebody is writing to is tried again the next time.
func (s *session) repair(ctx context.Context, faults []fault) (beyond []fault, err error) {
	s.busySince.Store(time.Now().UnixNano())
	defer s.busySince.Store(0)
	for _, f := range faults {
		err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
			if err := fence(ctx, tx, s.epoch); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `SELECT koldstore.repair_table($1, $2)`, f.table, f.reason)
			return err
		})
		var pg *pgconn.PgError
		switch {
		case err == nil:
			s.a.metrics.unpublished.Inc()
			s.a.log.Warn().Str("table", f.name).Str("reason", f.reason).Msg("published a table again: its streams have a hole, its feed is compared with it")
		case sqlState(err) == "55P03": // lock_not_available
			s.a.log.Warn().Str("table", f.name).Str("reason", f.reason).Msg("a table has to be published again, and somebody is writing to it all the time")
		case errors.As(err, &pg) && pg.Code == "55000":
			f.reason += "; " + pg.Message
			beyond = append(beyond, f)
		default:
			return nil, fmt.Errorf("publish table %s again: %w", f.name, err)
		}
	}
	return beyond, nil
}

// checkPartitions notices partitions that came, went or were truncated on their own. What follows their table is compared with it
// from a marker on, which comes through the log behind everything that was committed before.
func (s *session) checkPartitions(ctx context.Context) error {
	return s.lookAt(ctx, "partitions", `SELECT t.table_oid FROM koldstore.published_table t JOIN pg_class c ON c.oid = t.table_oid
		WHERE c.relkind = 'p' AND (koldstore.partitions_moved(c.oid) IS NOT NULL
			OR EXISTS (SELECT FROM koldstore.leaves(c.oid) l WHERE l.relreplident <> 'f' AND l.relkind = 'r'))`, func(tx pgx.Tx, table uint32) error {
		_, err := tx.Exec(ctx, `SELECT koldstore.look_at_partitions($1)`, table)
		return err
	})
}

// checkTables notices captured tables that were altered where no event trigger says so: without it, only the next write would tell.
func (s *session) checkTables(ctx context.Context) error {
	return s.lookAt(ctx, "altered tables", `SELECT koldstore.altered_tables()`, func(tx pgx.Tx, table uint32) error {
		var name string
		var captured bool
		if _, err := tx.Exec(ctx, `SELECT koldstore.note_altered($1)`, table); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, `SELECT $1::oid::regclass::text, EXISTS (SELECT FROM koldstore.published_table t WHERE t.table_oid = $1)`, table).Scan(&name, &captured)
		if err == nil && !captured {
			s.a.metrics.unpublished.Inc()
			s.a.log.Warn().Str("table", name).Msg("a table was altered and can be captured no longer: its streams and change feed are broken")
		}
		return err
	})
}

// lookAt does something about each of some tables, in a transaction of its own, for which writers of the table do not wait long. No
// transaction may be open on the session's connection.
func (s *session) lookAt(ctx context.Context, what, list string, look func(tx pgx.Tx, table uint32) error) error {
	rows, err := s.conn.Query(ctx, list)
	if err != nil {
		return fmt.Errorf("look at %s: %w", what, err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return fmt.Errorf("look at %s: %w", what, err)
	}
	s.busySince.Store(time.Now().UnixNano())
	defer s.busySince.Store(0)
	for _, table := range tables {
		err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
			if err := fence(ctx, tx, s.epoch); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '200ms'`); err != nil {
				return err
			}
			return look(tx, table)
		})
		if err != nil && sqlState(err) != "55P03" { // the next look may find a moment
			return fmt.Errorf("look at %s, table %d: %w", what, table, err)
		}
	}
	return nil
}

// lost says whether a stream or feed has lost its log, mirror, table or predicate. Nobody is told of that where there are no event
// triggers, and no change may ever come to show it.
func (s *session) lost(ctx context.Context) (yes bool, err error) {
	err = s.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM koldstore.stream s WHERE s.state IN ('seeding', 'active') AND (
				NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.log_oid) OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.table_oid)
				OR NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = s.predicate_fn)))
			OR EXISTS (SELECT FROM koldstore.managed_table m WHERE m.state IN ('seeding', 'healing', 'active') AND (
				NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = m.mirror_oid) OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = m.table_oid)))`).Scan(&yes)
	if err != nil {
		return false, fmt.Errorf("look for what was dropped: %w", err)
	}
	return yes, nil
}

// markBroken takes streams and feeds of the tables out for good: changes of theirs are missing.
func (s *session) markBroken(ctx context.Context, faults []fault) error {
	s.busySince.Store(time.Now().UnixNano())
	defer s.busySince.Store(0)
	err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
		if err := fence(ctx, tx, s.epoch); err != nil {
			return err
		}
		for _, f := range faults {
			_, err := tx.Exec(ctx, `WITH stream AS (
					UPDATE koldstore.stream SET state = 'broken', reason = $2 WHERE table_oid = $1 AND state <> 'broken'),
				feed AS (
					UPDATE koldstore.managed_table SET state = 'broken', reason = $2 WHERE table_oid = $1 AND state <> 'broken' RETURNING seed_job)
				UPDATE koldstore.job j SET status = 'error', error = $2, ended_at = clock_timestamp()
				FROM feed WHERE j.job_id = feed.seed_job AND j.status IN ('queued', 'running')`, f.table, f.reason)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("mark what the publication does not cover: %w", err)
	}
	for _, f := range faults {
		s.a.metrics.unpublished.Inc()
		s.a.log.Warn().Str("table", f.name).Str("reason", f.reason).Msg("streams and the change feed of a table are broken")
	}
	return nil
}
