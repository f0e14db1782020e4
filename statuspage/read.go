package statuspage

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// read is everything that the page shows of a database, in one snapshot of its own.
func (d *Database) read(ctx context.Context) (s snapshot) {
	s.Name = d.Name
	if d.Unfit != nil {
		if err := d.Unfit(); err != nil {
			return snapshot{Name: d.Name, Err: err.Error()}
		}
	}
	err := pgx.BeginTxFunc(ctx, d.Pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		return s.fill(ctx, tx, d.live())
	})
	if err != nil {
		return snapshot{Name: d.Name, Err: err.Error()}
	}
	return s
}

func (d *Database) live() json.RawMessage {
	if d.Live == nil {
		return json.RawMessage("{}")
	}
	return d.Live()
}

func (s *snapshot) fill(ctx context.Context, tx pgx.Tx, live json.RawMessage) (err error) {
	if s.Applier, err = readApplier(ctx, tx); err != nil {
		return err
	}
	if s.Tables, err = collect[table](ctx, tx, "managed tables", `
		SELECT quote_ident(m.schema_name) || '.' || quote_ident(m.table_name) AS name, m.state, m.reason,
		       coalesce(pg_stat_get_live_tuples(m.mirror_oid), 0) AS hotrows, coalesce(pg_total_relation_size(m.mirror_oid), 0) AS hotbytes,
		       coalesce(c.rows, 0) AS coldrows, coalesce(c.bytes, 0) AS coldbytes, c.segments, m.floor, m.storage
		FROM koldstore.managed_table m
		CROSS JOIN LATERAL (
			SELECT count(*) AS segments, sum(s.row_count - s.dead_count)::bigint AS rows, sum(s.size_bytes)::bigint AS bytes
			FROM koldstore.segment s WHERE s.table_oid = m.table_oid AND s.state = 'active') AS c
		ORDER BY m.schema_name, m.table_name`); err != nil {
		return err
	}
	if s.Streams, err = collect[stream](ctx, tx, "streams", `
		SELECT s.schema_name::text AS schema, s.name::text AS name, v.name AS title, v."table", v.predicate, v.state, s.reason,
		       coalesce(v.consumers, 0)::bigint AS consumers, v.lag, t.events, v.events_lost AS eventslost, v.retention::text AS retention
		FROM koldstore.show_streams($1) AS v
		JOIN koldstore.stream s ON v.name = quote_ident(s.schema_name) || '.' || quote_ident(s.name)
		JOIN koldstore.stream_status t USING (stream_id)
		ORDER BY s.schema_name, s.name`, string(live)); err != nil {
		return err
	}
	if s.Jobs, err = collect[job](ctx, tx, "jobs", `
		SELECT j.job_type AS type, j.table_oid::regclass::text AS "table", j.status, j.progress, j.error,
		       j.created_at AS created, j.started_at AS started, j.ended_at AS ended
		FROM koldstore.job j ORDER BY j.ended_at IS NULL DESC, j.created_at DESC LIMIT 12`); err != nil {
		return err
	}
	if err = tx.QueryRow(ctx, "SELECT count(*) FROM koldstore.quarantine").Scan(&s.Quarantined); err != nil {
		return fmt.Errorf("count the quarantine: %w", err)
	}
	return nil
}

func readApplier(ctx context.Context, tx pgx.Tx) (a applier, err error) {
	var raw []byte
	if err = tx.QueryRow(ctx, "SELECT koldstore.async_mirror_status()").Scan(&raw); err != nil {
		return a, fmt.Errorf("read the applier's status: %w", err)
	}
	if err = json.Unmarshal(raw, &a); err != nil {
		return a, fmt.Errorf("read the applier's status: %w", err)
	}
	return a, nil
}

// readSample is the little that is kept for the charts.
func readSample(ctx context.Context, pool *pgxpool.Pool) (s sample, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		a, err := readApplier(ctx, tx)
		if err != nil {
			return err
		}
		s.rowsApplied = a.RowsApplied
		if a.LagBytes != nil {
			s.lagBytes = *a.LagBytes
		}
		if a.RetainedBytes != nil {
			s.retained = *a.RetainedBytes
		}
		type counter struct {
			Title  string
			Events int64
		}
		counters, err := collect[counter](ctx, tx, "the streams' counters", `
			SELECT quote_ident(s.schema_name) || '.' || quote_ident(s.name) AS title, t.events
			FROM koldstore.stream s JOIN koldstore.stream_status t USING (stream_id)`)
		s.events = make(map[string]int64, len(counters))
		for _, c := range counters {
			s.events[c.Title] = c.Events
		}
		return err
	})
	return s, err
}

// readEvents are the newest events of a stream, newest first. pgx.ErrNoRows says that there is no such stream.
func readEvents(ctx context.Context, pool *pgxpool.Pool, schema, name string, limit int) (events []event, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var log string
		if err := tx.QueryRow(ctx, "SELECT log_oid::regclass::text FROM koldstore.stream WHERE schema_name = $1 AND name = $2", schema, name).Scan(&log); err != nil {
			return err
		}
		events, err = collect[event](ctx, tx, "events",
			`SELECT id, op, coalesce(k::text, 'null') AS key, coalesce(doc::text, 'null') AS doc, ts AS at FROM `+log+` ORDER BY id DESC LIMIT $1`, limit)
		return err
	})
	return events, err
}

func collect[T any](ctx context.Context, tx pgx.Tx, what, sql string, args ...any) ([]T, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err == nil {
		var list []T
		if list, err = pgx.CollectRows(rows, pgx.RowToStructByNameLax[T]); err == nil {
			return list, nil
		}
	}
	return nil, fmt.Errorf("read %s: %w", what, err)
}
