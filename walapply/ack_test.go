package walapply_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

// walsender is the process id of the database's walsender, 0 if there is none.
func (d *database) walsender() int {
	d.t.Helper()
	return query[int](d, `SELECT coalesce(max(active_pid), 0) FROM pg_replication_slots WHERE database = current_database()`)
}

func TestIdleDatabaseBesideABusyOneLetsGoOfTheLog(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	d, busy := newDatabase(t, cluster), newDatabase(t, cluster)
	d.exec(`CREATE TABLE unpublished (v text)`)
	d.startStreaming(&recorder{})
	d.awaitApplied()
	applied := query[string](d, `SELECT applied_lsn::text FROM koldstore.checkpoint`)
	busy.exec(`CREATE TABLE b AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
	d.exec(`INSERT INTO unpublished SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
	begin := time.Now()
	d.awaitApplied()
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	if now := query[string](d, `SELECT applied_lsn::text FROM koldstore.checkpoint`); now != applied {
		t.Errorf("progress alone moved the checkpoint from %s to %s", applied, now)
	}
}

func TestPositionIsAcknowledgedRightAfterTheCommit(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.startStreaming(&recorder{}, func(c *walapply.Config) { c.StatusInterval = time.Hour })
	d.awaitApplied()
	begin := time.Now()
	for i := range 50 {
		d.exec(fmt.Sprintf(`INSERT INTO t VALUES (%d)`, i))
		d.awaitApplied()
		if n := query[int](d, `SELECT count(*) FROM recorded`); n != i+1 {
			t.Fatalf("acknowledged before it was applied: %d of %d", n, i+1)
		}
	}
	// Fifty rounds without a timer anywhere; one lost wake-up would cost half of wal_sender_timeout.
	if took := time.Since(begin); took > 15*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestNothingIsAcknowledgedBeforeItIsApplied(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t; CREATE TABLE unpublished (v text)`)
	entered, leave := make(chan struct{}), make(chan struct{})
	rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
		select {
		case entered <- struct{}{}:
		case <-ctx.Done():
		}
		<-leave
		return nil
	}}
	d.startStreaming(rec, func(c *walapply.Config) { c.StatusInterval = time.Millisecond })
	d.awaitApplied()
	before := query[string](d, `SELECT pg_current_wal_insert_lsn()::text`)
	d.exec(`INSERT INTO t VALUES (1)`)
	<-entered
	d.exec(`INSERT INTO unpublished SELECT repeat('x', 1000) FROM generate_series(1, 1000)`)
	// Wait until the server has seen status updates from after that.
	seen := time.Now()
	d.await("status updates", func() bool {
		return query[time.Time](d, `SELECT reply_time FROM pg_stat_replication WHERE pid = $1`, d.walsender()).After(seen.Add(20 * time.Millisecond))
	})
	if !query[bool](d, `SELECT confirmed_flush_lsn <= $1::text::pg_lsn FROM pg_replication_slots WHERE database = current_database()`, before) {
		t.Error("a position behind an unapplied change was acknowledged")
	}
	close(leave)
	d.awaitApplied()
}

func TestSlowApplyKeepsTheConnection(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY, pad text); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.exec(`ALTER DATABASE ` + query[string](d, `SELECT current_database()`) + ` SET wal_sender_timeout = '3s'`)
	var slow atomic.Bool
	rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
		if slow.CompareAndSwap(false, true) {
			select {
			case <-time.After(10 * time.Second): // the slowness is what is tested
			case <-ctx.Done():
			}
		}
		return nil
	}}
	d.startStreaming(rec, func(c *walapply.Config) { c.QueueBytes = 64 << 10 }) // the receiver has to stop reading
	pid := d.walsender()
	d.exec(`INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 100000) g`)
	d.awaitApplied()
	if now := d.walsender(); now != pid {
		t.Errorf("walsender %d was replaced by %d", pid, now)
	}
	if n := query[int](d, `SELECT count(*) FROM recorded`); n != 100000 {
		t.Errorf("%d lines", n)
	}
}

func TestStatusUpdatesDoNotDisturbABusyStream(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY, pad text); ALTER PUBLICATION koldproxy ADD TABLE t`)
	rec := &recorder{}
	d.startStreaming(rec, func(c *walapply.Config) { c.StatusInterval, c.BatchRows = time.Millisecond, 100 })
	d.awaitApplied()
	pid := d.walsender()
	for i := range 20 {
		d.exec(fmt.Sprintf(`INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(%d, %d) g`, i*1000, i*1000+999))
	}
	d.awaitApplied()
	if now := d.walsender(); now != pid {
		t.Errorf("walsender %d was replaced by %d", pid, now)
	}
	if n := rec.count(&rec.resets); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

func TestServerStopsWithoutWaitingForTheApplier(t *testing.T) {
	t.Parallel()
	cluster := ownCluster(t)
	d := newDatabase(t, cluster)
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	var hold atomic.Bool
	hold.Store(true)
	entered := make(chan struct{}, 1)
	rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
		if hold.Load() {
			entered <- struct{}{}
			for hold.Load() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
		}
		return nil
	}}
	d.startStreaming(rec)
	d.exec(`INSERT INTO t VALUES (1)`)
	<-entered
	release := time.AfterFunc(time.Second, func() { hold.Store(false) }) // the batch ends during the shutdown
	defer release.Stop()
	begin := time.Now()
	if err := cluster.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 15*time.Second {
		t.Errorf("the restart took %v", took)
	}
	d.reconnect()
	d.exec(`INSERT INTO t VALUES (2)`)
	d.awaitApplied()
	d.equal(d.lines(), []string{"INSERT t (1)", "INSERT t (2)"})
}

// A COMMIT whose outcome the applier does not learn must not be repeated.
func TestUnknownOutcomeOfACommit(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, localpg.TestCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t;
		CREATE TABLE slow (v int);
		CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.pg_sleep(0.5); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON recorded DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`)
	d.startStreaming(&recorder{})
	d.exec(`INSERT INTO t VALUES (1)`)
	d.await("the commit", func() bool {
		return query[bool](d, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
			AND application_name = 'koldproxy apply' AND query ILIKE 'commit%' AND state = 'active'`)
	})
	// Losing the leader's session cancels the COMMIT that is under way.
	d.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'koldproxy leader'`)
	d.exec(`INSERT INTO t VALUES (2)`)
	d.awaitApplied()
	d.equal(d.lines(), []string{"INSERT t (1)", "INSERT t (2)"})
}

// The checkpoint and the COMMIT travel together; if the checkpoint is not what it was, nothing of the transaction stays.
func TestMovedCheckpointStopsTheCommitBehindIt(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]string{"another epoch": "epoch = epoch + 1", "another watermark": "watermark = watermark + 1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, localpg.TestCluster(t))
			d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
			other, err := pgx.Connect(t.Context(), d.dsn)
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close(context.Background())
			var calls atomic.Int64
			rec := &recorder{before: func(ctx context.Context, _ []koldproxy.Change) error {
				if calls.Add(1) > 1 {
					return nil
				}
				_, err := other.Exec(ctx, `UPDATE koldstore.checkpoint SET `+set)
				return err
			}}
			d.startStreaming(rec)
			d.exec(`INSERT INTO t VALUES (1)`)
			d.awaitApplied()
			d.equal(d.lines(), []string{"INSERT t (1)"})
			if n := calls.Load(); n != 2 {
				t.Errorf("it was applied %d times, want once in vain and once for good", n)
			}
		})
	}
}
