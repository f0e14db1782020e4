package changefeed

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
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

	mu      sync.Mutex
	secrets map[string]stageSecrets // of each database
}

type stageSecrets struct {
	mark         string
	secret, seal []byte
}

// NewFulfiller makes a Fulfiller. pool returns the service connections of a database that has feeds. Nil metrics count into the
// void.
func NewFulfiller(pool func(database string) (*pgxpool.Pool, bool), cold ColdPages, log zerolog.Logger, metrics *Metrics) *Fulfiller {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	return &Fulfiller{pool: pool, cold: cold, log: log, metrics: metrics}
}

const (
	firstJobPoll    = 20 * time.Millisecond
	slowestJobPoll  = 200 * time.Millisecond
	maxFlushQueuing = 100
)

// Fulfil answers a demand that was raised in a session on database: with the demand itself and the answer's fields added. A
// *[koldproxy.Error] is meant for the client: 08P01 if the demand is not one of ours, KS002 if cold storage cannot be read.
func (f *Fulfiller) Fulfil(ctx context.Context, database string, text json.RawMessage) (json.RawMessage, error) {
	d, err := koldproxy.ParseDemand(text)
	if err != nil {
		f.metrics.demands.WithLabelValues(invalidDemand, outcomeError).Inc()
		return nil, err
	}
	var answer json.RawMessage
	switch d.Kind {
	case koldproxy.DemandColdPage:
		answer, err = f.page(ctx, database, d)
	default:
		answer, err = f.flush(ctx, database, d)
	}
	outcome := outcomeOK
	if err != nil {
		outcome = outcomeError
		f.log.Debug().Err(err).Str("db", database).Str("kind", d.Kind).Uint32("table", d.Table).Msg("a demand could not be answered")
	}
	f.metrics.demands.WithLabelValues(d.Kind, outcome).Inc()
	return answer, err
}

// StageSecrets reads koldstore.stage_secret of a database, again whenever what was read before is not what mark is about: the
// SHA-256 of the second in hexadecimal. The caller must not change them.
func (f *Fulfiller) StageSecrets(ctx context.Context, database, mark string) (secret, seal []byte, err error) {
	f.mu.Lock()
	known := f.secrets[database]
	f.mu.Unlock()
	if known.mark == mark {
		return known.secret, known.seal, nil
	}
	pool, ok := f.pool(database)
	if !ok {
		return nil, nil, koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "database %q has no change feeds", database)
	}
	if err := pool.QueryRow(ctx, "SELECT secret, seal FROM koldstore.stage_secret").Scan(&known.secret, &known.seal); err != nil {
		return nil, nil, fmt.Errorf("read the secrets of staging: %w", err)
	}
	sum := sha256.Sum256(known.seal)
	if known.mark = hex.EncodeToString(sum[:]); known.mark != mark {
		return nil, nil, errors.New("the session is on another database than the service connection")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.secrets == nil {
		f.secrets = map[string]stageSecrets{}
	}
	f.secrets[database] = known
	return known.secret, known.seal, nil
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

func (f *Fulfiller) page(ctx context.Context, database string, d koldproxy.Demand) (json.RawMessage, error) {
	request := PageRequest{
		Database: database, Table: d.Table, Generation: d.Generation, Mode: d.Mode, After: d.After, Limit: d.Limit,
		Segments: make([]uuid.UUID, len(d.Segments)),
	}
	for i, text := range d.Segments {
		id, err := uuid.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("segment of a demand: %w", err)
		}
		request.Segments[i] = id
	}
	page, err := f.cold.Page(ctx, request)
	if err != nil {
		return nil, err
	}
	if page.Rows == nil {
		page.Rows = []PageRow{}
	}
	return answered(d, struct {
		Rows     []PageRow     `json:"rows"`
		Through  koldproxy.Seq `json:"through"`
		Complete bool          `json:"complete"`
	}{page.Rows, page.Through, page.Complete})
}

// answered is the demand itself with the answer's fields added, as PostgreSQL likes JSON: without escapes for HTML.
func answered(d koldproxy.Demand, fields any) (json.RawMessage, error) {
	var b bytes.Buffer
	demand := d.String()
	b.WriteString(demand)
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(fields); err != nil {
		return nil, fmt.Errorf("encode the answer to a demand: %w", err)
	}
	out := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	out[len(demand)-1] = ','                                   // for the brace that ends the demand,
	return slices.Delete(out, len(demand), len(demand)+1), nil // and the one that begins the fields
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
func (f *Fulfiller) flush(ctx context.Context, database string, d koldproxy.Demand) (json.RawMessage, error) {
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
		err = pool.QueryRow(ctx, `SELECT coalesce(q.job_id::text, ''), coalesce(q.status, '') FROM koldstore.enqueue_flush($1::oid, $2) q`, d.Table, d.Force).Scan(&job, &status)
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
	return answered(d, struct {
		Result flushResult `json:"result"`
	}{result})
}

// flushDue says whether there is anything to flush, and refuses tables that are not managed.
func (f *Fulfiller) flushDue(ctx context.Context, pool *pgxpool.Pool, d koldproxy.Demand) (due bool, err error) {
	err = pool.QueryRow(ctx, `SELECT $2 OR koldstore.flush_due(m) > 0 FROM koldstore.managed_table m WHERE m.table_oid = $1`,
		d.Table, d.Force).Scan(&due)
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
