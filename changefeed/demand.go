package changefeed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// Fulfiller answers demands (docs/architecture.md). The proxy has asked the server whether the client is entitled to the
// answer; what the demand says is untrusted all the same, since anybody can raise one. Its methods may be called concurrently.
type Fulfiller struct {
	pool    func(database string) (*pgxpool.Pool, bool)
	cold    ColdPages
	log     zerolog.Logger
	metrics *Metrics
}

// NewFulfiller makes a Fulfiller. pool returns the service connections of a database that has feeds. Nil metrics count into the
// void.
func NewFulfiller(pool func(database string) (*pgxpool.Pool, bool), cold ColdPages, log zerolog.Logger, metrics *Metrics) *Fulfiller {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Fulfiller{pool: pool, cold: cold, log: log, metrics: metrics}
}

// Bounds of what a demand may ask for.
const (
	maxPageRows     = 1_000_000
	maxSegments     = 100_000
	maxDemandBytes  = 8 << 20
	firstJobPoll    = 20 * time.Millisecond
	slowestJobPoll  = 200 * time.Millisecond
	maxFlushQueuing = 100
)

// demand is every field that a demand may have; nil means that it is absent.
type demand struct {
	Kind       string       `json:"kind"`
	Table      int64        `json:"table"`
	Generation *int64       `json:"generation,omitempty"`
	Segments   *[]uuid.UUID `json:"segments,omitempty"`
	Mode       string       `json:"mode,omitempty"`
	After      *int64       `json:"after,omitempty"`
	Limit      *int64       `json:"limit,omitempty"`
	Force      *bool        `json:"force,omitempty"`
}

// Fulfil answers a demand that was raised in a session on database: with the demand itself and the answer's fields added. A
// *[koldproxy.Error] is meant for the client: 08P01 if the demand is not one of ours, KS002 if cold storage cannot be read.
func (f *Fulfiller) Fulfil(ctx context.Context, database string, text json.RawMessage) (json.RawMessage, error) {
	d, err := parseDemand(text)
	if err != nil {
		f.metrics.demands.WithLabelValues("invalid", "error").Inc()
		return nil, err
	}
	var answer json.RawMessage
	switch d.Kind {
	case "cold_page":
		answer, err = f.page(ctx, database, d)
	default:
		answer, err = f.flush(ctx, database, d)
	}
	outcome := "ok"
	if err != nil {
		outcome = "error"
		f.log.Debug().Err(err).Str("db", database).Str("kind", d.Kind).Int64("table", d.Table).Msg("a demand could not be answered")
	}
	f.metrics.demands.WithLabelValues(d.Kind, outcome).Inc()
	return answer, err
}

// DemandNames lists the views, functions and tables of a database that lead to a demand, see koldstore.demanding_names.
func (f *Fulfiller) DemandNames(ctx context.Context, database string) ([]string, error) {
	pool, ok := f.pool(database)
	if !ok {
		return nil, nil
	}
	rows, err := pool.Query(ctx, "SELECT n::text FROM koldstore.demanding_names() n")
	if err == nil {
		var names []string
		if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return names, nil
		}
	}
	return nil, fmt.Errorf("list the names that lead to a demand: %w", err)
}

func parseDemand(text json.RawMessage) (*demand, error) {
	bad := func(why string) error {
		return koldproxy.Errorf(koldproxy.CodeProtocolViolation, "invalid demand: %s", why).
			WithHint("Demands are raised by koldstore's functions and by nobody else.")
	}
	if len(text) > maxDemandBytes {
		return nil, bad("it is too long")
	}
	var d demand
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		return nil, bad("it is not an object of known fields")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, bad("something follows it")
	}
	if d.Table < 1 || d.Table > math.MaxUint32 {
		return nil, bad("table is no OID")
	}
	switch d.Kind {
	case "flush":
		if d.Force == nil || d.Generation != nil || d.Segments != nil || d.Mode != "" || d.After != nil || d.Limit != nil {
			return nil, bad("a flush has the fields table and force")
		}
		return &d, nil
	case "cold_page":
	default:
		return nil, bad("unknown kind")
	}
	switch {
	case d.Force != nil || d.Generation == nil || *d.Generation < 0:
		return nil, bad("a page has a generation")
	case d.Segments == nil || len(*d.Segments) > maxSegments:
		return nil, bad("a page has a bounded list of segments")
	case d.Limit == nil || *d.Limit < 1 || *d.Limit > maxPageRows:
		return nil, bad("a page has a limit of 1 to 1000000")
	case d.Mode == PageForward && (d.After == nil || *d.After < 0):
		return nil, bad("a forward page begins after a seq")
	case d.Mode == PageLast && d.After != nil:
		return nil, bad("a last page begins at the end")
	case d.Mode != PageForward && d.Mode != PageLast:
		return nil, bad("unknown mode")
	}
	return &d, nil
}

func (f *Fulfiller) page(ctx context.Context, database string, d *demand) (json.RawMessage, error) {
	request := PageRequest{
		Database: database, Table: uint32(d.Table), Generation: *d.Generation, Segments: *d.Segments, Mode: d.Mode, Limit: int(*d.Limit),
	}
	if d.After != nil {
		request.After = koldproxy.Seq(*d.After)
	}
	page, err := f.cold.Page(ctx, request)
	if err != nil {
		return nil, err
	}
	if page.Rows == nil {
		page.Rows = []PageRow{}
	}
	return marshal(struct {
		*demand
		Rows     []PageRow     `json:"rows"`
		Through  koldproxy.Seq `json:"through"`
		Complete bool          `json:"complete"`
	}{d, page.Rows, page.Through, page.Complete})
}

// marshal writes JSON as PostgreSQL likes it: without escapes for HTML.
func marshal(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode the answer to a demand: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// flushResult is what koldstore.flush_table returns.
type flushResult struct {
	OK          bool    `json:"ok"`
	JobID       *string `json:"job_id"`
	Status      string  `json:"status"`
	RowsFlushed int64   `json:"rows_flushed"`
	Segments    int64   `json:"segments"`
	Error       *string `json:"error"`
}

// flush queues a flush and waits for its end. A flush that is on its way already may have begun before the caller's last
// write; it is waited for, and then one is queued that has not.
func (f *Fulfiller) flush(ctx context.Context, database string, d *demand) (json.RawMessage, error) {
	pool, ok := f.pool(database)
	if !ok {
		return nil, koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "database %q has no change feeds", database)
	}
	var result flushResult
	for range maxFlushQueuing {
		due, err := f.flushDue(ctx, pool, d)
		if err != nil {
			return nil, err
		}
		if !due {
			result = flushResult{OK: true, Status: "not_due"}
			break
		}
		var job, status string
		err = pool.QueryRow(ctx, `SELECT coalesce(q.job_id::text, ''), coalesce(q.status, '') FROM koldstore.enqueue_flush($1::oid, $2) q`, uint32(d.Table), *d.Force).Scan(&job, &status)
		if err != nil {
			return nil, fmt.Errorf("queue a flush: %w", err)
		}
		if job == "" { // the job that kept ours out has ended in between
			continue
		}
		if result, err = waitForJob(ctx, pool, job); err != nil {
			return nil, err
		}
		if status == "queued" {
			break
		}
	}
	return marshal(struct {
		*demand
		Result flushResult `json:"result"`
	}{d, result})
}

// flushDue says whether there is anything to flush, and refuses tables that are not managed.
func (f *Fulfiller) flushDue(ctx context.Context, pool *pgxpool.Pool, d *demand) (due bool, err error) {
	err = pool.QueryRow(ctx, `SELECT $2 OR koldstore.flush_due(m) > 0 FROM koldstore.managed_table m WHERE m.table_oid = $1`,
		uint32(d.Table), *d.Force).Scan(&due)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "the table with OID %d is not managed by koldstore", d.Table).
			WithHint("SELECT koldstore.manage_table(…) gives a table a change feed.")
	}
	if err != nil {
		return false, fmt.Errorf("ask whether a flush is due: %w", err)
	}
	return due, nil
}

// waitForJob polls: whoever runs the job may be another instance.
func waitForJob(ctx context.Context, pool *pgxpool.Pool, job string) (flushResult, error) {
	result := flushResult{JobID: &job}
	pause := firstJobPoll
	for {
		err := pool.QueryRow(ctx, `SELECT status, coalesce((progress ->> 'rows_flushed')::bigint, 0), coalesce((progress ->> 'segments')::bigint, 0), error
			FROM koldstore.job WHERE job_id = $1::text::uuid`, job).Scan(&result.Status, &result.RowsFlushed, &result.Segments, &result.Error)
		if err != nil {
			return result, fmt.Errorf("wait for flush %s: %w", job, err)
		}
		if result.Status != "queued" && result.Status != "running" {
			result.OK = result.Status == "completed" || result.Status == "not_due"
			return result, nil
		}
		timer := time.NewTimer(pause)
		pause = min(pause*3/2, slowestJobPoll)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return result, ctx.Err()
		}
	}
}
