package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/walapply"
)

// database is the runtime of one database with streams and feeds.
type database struct {
	name    string
	cfg     *config
	dsn     string
	log     zerolog.Logger
	metrics prometheus.Registerer
	pool    *pgxpool.Pool

	cold      *coldstore.Store
	applier   *walapply.Applier
	tail      *changefeed.Tail
	follower  *changefeed.Tail
	leading   sync.Mutex // held while this instance leads
	sweeper   *changefeed.Sweeper
	fulfiller *changefeed.Fulfiller

	mu    sync.Mutex
	unfit error // why nothing is done in the database yet; nil once its catalog is up to date
}

// openDatabase makes the parts that need no other part. It does not connect yet, and nothing runs.
func openDatabase(ctx context.Context, cfg *config, name string, log zerolog.Logger, reg prometheus.Registerer) (*database, error) {
	dsn, err := cfg.dsn(name)
	if err != nil {
		return nil, err
	}
	pc, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("postgres.dsn is no connection string")
	}
	pc.ConnConfig.RuntimeParams["application_name"] = "koldproxy"
	// Nothing of a user is ever found where something of PostgreSQL is meant.
	pc.ConnConfig.RuntimeParams["search_path"] = "pg_catalog, pg_temp"
	// A server that was away for a moment leaves dead connections behind. pgx looks only at those that were idle for a while;
	// the answer to a client's demand must not depend on that.
	pc.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
	pc.MaxConns = max(pc.MaxConns, minPoolConns)
	db := &database{
		name:    name,
		cfg:     cfg,
		dsn:     dsn,
		log:     log,
		metrics: prometheus.WrapRegistererWith(prometheus.Labels{"db": name}, reg),
		unfit:   errNotLookedAt,
	}
	if db.pool, err = pgxpool.NewWithConfig(ctx, pc); err != nil {
		return nil, fmt.Errorf("open a connection pool: %w", err)
	}
	return db, nil
}

// minPoolConns is what a database's parts may need at once: flushes beside each other, compaction, pages, the feed.
const minPoolConns = 10

// wire connects the parts of the database with each other, with the place for cold segments and with those who receive
// live events.
func (db *database) wire(bucket coldstore.Bucket, live publishers) error {
	cc := coldstore.DefaultConfig()
	cc.Registerer = db.metrics
	cc.OpenStorage = func(ctx context.Context, spec coldstore.StorageSpec) (coldstore.Bucket, error) {
		return openStorage(ctx, db.cfg, spec)
	}
	cc.Fence = func(ctx context.Context, tx pgx.Tx) error { return db.applier.Fence(ctx, tx) }
	var err error
	if db.cold, err = coldstore.New(db.pool, bucket, db.part("coldstore").With().Str("db", db.name).Logger(), cc); err != nil {
		return err
	}
	metrics := changefeed.NewMetrics(db.metrics)
	log := db.part("changefeed")
	db.tail = changefeed.NewTail(changefeed.DefaultTailConfig(db.name), db.pool, live, log, metrics)
	db.follower = changefeed.NewFollower(changefeed.DefaultTailConfig(db.name), db.pool, live.local(), log, metrics)
	interval := time.Duration(db.cfg.Storage.TTLReclaimIntervalSecs) * time.Second
	db.sweeper = changefeed.NewSweeper(interval, db.pool, log, metrics)
	db.fulfiller = changefeed.NewFulfiller(func(string) (*pgxpool.Pool, bool) { return db.pool, true }, coldPages{db.cold}, log, metrics)

	tc := changefeed.DefaultConfig(db.name)
	tc.EvalTimeout = time.Duration(db.cfg.Apply.EvalTimeout)
	tc.DSN = db.dsn
	tc.Cold = coldPages{db.cold}
	tc.Committed = db.tail.Wake
	tc.Wake = func() { db.applier.Poke() }
	target, err := changefeed.NewTarget(tc, log, metrics)
	if err != nil {
		return err
	}
	ac := db.cfg.applyConfig(db.dsn)
	ac.WhileLeading = db.lead
	db.applier, err = walapply.New(ac, target, db.part("walapply"), walapply.NewMetrics(db.metrics))
	return err
}

// lead is what only the instance that applies changes does.
func (db *database) lead(ctx context.Context) error {
	db.leading.Lock()
	defer db.leading.Unlock()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return db.tail.Run(ctx) })
	group.Go(func() error { return db.sweeper.Run(ctx) })
	group.Go(func() error { return db.cold.Run(ctx) })
	return group.Wait()
}

// part is the logger of one package, which adds the database's name itself.
func (db *database) part(name string) zerolog.Logger { return db.log.With().Str("part", name).Logger() }

// run brings the catalog up to date, as soon as that can be done, and runs the database's parts until ctx ends. Nothing that is wrong
// with the server or the database ends it.
func (db *database) run(ctx context.Context) error {
	if !db.prepare(ctx) {
		return nil
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return db.applier.Run(ctx) })
	group.Go(func() error { return db.follower.Follow(ctx, &db.leading) })
	return group.Wait()
}

var errNotLookedAt = errors.New("its catalog has not been looked at yet")

// prepare waits until the catalog is up to date. It says false if ctx ended before.
func (db *database) prepare(ctx context.Context) bool {
	attempt := func(ctx context.Context) error {
		err := migrateUp(ctx, db.cfg, db.name)
		db.mu.Lock()
		defer db.mu.Unlock()
		db.unfit = err
		return err
	}
	log, failed := db.log.With().Str("db", db.name).Logger(), false
	ok := untilItWorks(ctx, attempt, func(err error) {
		failed = true
		log.Error().Err(err).Str("hint", connectHint(err, db.name)).
			Msg("the database cannot be used yet, trying again; sessions are forwarded, changes are not applied")
	})
	if ok && failed {
		log.Info().Msg("the database can be used now")
	}
	return ok
}

// fit says nil once the catalog is up to date, and what is in the way before.
func (db *database) fit() error {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.unfit
}

// readyTimeout bounds one look at a database's readiness.
const readyTimeout = 2 * time.Second

// ready says nil when changes of the database are being applied, by this instance or another one.
func (db *database) ready(ctx context.Context) error {
	if err := db.fit(); err != nil {
		return fmt.Errorf("database %s: %w", db.name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	problems, err := walapply.Inspect(ctx, db.pool, walapply.DefaultConfig("").Publication, db.cfg.Apply.OnGap)
	if err != nil {
		return fmt.Errorf("database %s: %w", db.name, err)
	}
	for _, p := range problems {
		if p.Gap || p.Stalled {
			return fmt.Errorf("database %s: %w", db.name, p)
		}
	}
	var active bool
	// While a slot is being created it counts as active, but what is committed by then will never be decoded.
	err = db.pool.QueryRow(ctx, `SELECT coalesce(bool_or(s.active AND s.confirmed_flush_lsn IS NOT NULL), false) FROM koldstore.checkpoint c
		JOIN pg_catalog.pg_replication_slots s ON s.slot_name = c.slot_name AND s.database = current_database()`).Scan(&active)
	if err != nil {
		return fmt.Errorf("database %s: %w", db.name, err)
	}
	if !active && len(problems) > 0 {
		return fmt.Errorf("database %s: %w", db.name, problems[0])
	}
	if !active {
		return fmt.Errorf("database %s: nobody reads its replication slot", db.name)
	}
	return nil
}

func (db *database) close() {
	if db.cold != nil {
		if err := db.cold.Close(); err != nil {
			db.log.Warn().Err(err).Msg("registered storages could not be closed")
		}
	}
	db.pool.Close()
}

// databases are the runtimes in the order of the configuration.
type databases []*database

func openDatabases(ctx context.Context, cfg *config, log zerolog.Logger, reg prometheus.Registerer) (databases, error) {
	var all databases
	for _, name := range cfg.Postgres.Databases {
		db, err := openDatabase(ctx, cfg, name, log, reg)
		if err != nil {
			return all, fmt.Errorf("database %s: %w", name, err)
		}
		all = append(all, db)
	}
	return all, nil
}

func (all databases) wire(bucket coldstore.Bucket, live publishers) error {
	for _, db := range all {
		if err := db.wire(bucket, live); err != nil {
			return fmt.Errorf("database %s: %w", db.name, err)
		}
	}
	return nil
}

func (all databases) close() {
	for _, db := range all {
		db.close()
	}
}

func (all databases) names() []string {
	names := make([]string, len(all))
	for i, db := range all {
		names[i] = db.name
	}
	return names
}

func (all databases) pools() map[string]*pgxpool.Pool {
	pools := make(map[string]*pgxpool.Pool, len(all))
	for _, db := range all {
		pools[db.name] = db.pool
	}
	return pools
}

func (all databases) ready(ctx context.Context) error {
	var errs []error
	for _, db := range all {
		errs = append(errs, db.ready(ctx))
	}
	return errors.Join(errs...)
}

// Fulfil answers a demand of a session, see [proxy.Fulfiller].
func (all databases) Fulfil(ctx context.Context, name string, demand json.RawMessage) (json.RawMessage, error) {
	for _, db := range all {
		if db.name != name {
			continue
		}
		if err := db.fit(); err != nil {
			return nil, koldproxy.Errorf(koldproxy.CodeCannotConnectNow, "koldproxy cannot use database %q yet: %v", name, err).
				WithHint("It tries again by itself; koldproxy check says what to do.")
		}
		return db.fulfiller.Fulfil(ctx, name, demand)
	}
	return nil, noFeeds(name)
}

// StageSecrets are what answers are sealed with, see [proxy.Fulfiller].
func (all databases) StageSecrets(ctx context.Context, name, mark string) (secret, seal []byte, err error) {
	for _, db := range all {
		if db.name == name {
			return db.fulfiller.StageSecrets(ctx, name, mark)
		}
	}
	return nil, nil, noFeeds(name)
}

// noFeeds is the error of a demand in a database that koldproxy has nothing to do with.
func noFeeds(name string) error {
	return koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "koldproxy does not serve feeds of database %q", name).
		WithHint("Add it to [postgres] databases in koldproxy's configuration.")
}

// DemandNames lists what leads to a demand, see [proxy.DemandNames].
func (all databases) DemandNames(ctx context.Context, name string) ([]string, error) {
	for _, db := range all {
		if db.name == name {
			return db.fulfiller.DemandNames(ctx, name)
		}
	}
	return nil, nil
}

// StreamStats is what this instance knows about live subscribers, see [proxy.StreamStats].
func (all databases) StreamStats(name string) json.RawMessage {
	for _, db := range all {
		if db.name == name {
			if stats := db.tail.Stats(); string(stats) != "{}" {
				return stats
			}
			return db.follower.Stats()
		}
	}
	return json.RawMessage("{}")
}
