package walapply_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/internal/localpg"
	"github.com/koldproxy/koldproxy/walapply"
)

func TestConfigReportsEveryProblem(t *testing.T) {
	t.Parallel()
	if err := walapply.DefaultConfig("postgres://h/d").Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
	_, err := walapply.New(walapply.Config{DSN: "postgres://u:secret@h:port/d"}, nil, zerolog.Nop(), nil)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"postgres.dsn", "apply.publication", "apply.batch_rows", "apply.batch_bytes", "apply.queue_bytes", "apply.status_interval", "apply.lease", "apply.takeover_interval", "apply.retry_min"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("nothing about %s in %q", want, err)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("a password in %q", err)
	}
}

// What an operator has to put right is shown, and applying begins once it is right.
func TestSetupProblems(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, breakIt, want, repair string
		appliedBefore               bool
	}{
		{
			name:    "no publication",
			breakIt: `DROP PUBLICATION koldproxy`, want: "publication koldproxy does not exist",
			repair: `CREATE PUBLICATION koldproxy FOR TABLE koldstore.wal_marker, t`,
		},
		{
			name:    "publication of inserts",
			breakIt: `ALTER PUBLICATION koldproxy SET (publish = 'insert')`, want: "not what koldproxy made",
			repair: `ALTER PUBLICATION koldproxy SET (publish = 'insert, update, delete, truncate')`,
		},
		{
			name:    "no catalog",
			breakIt: `ALTER SCHEMA koldstore RENAME TO hidden`, want: "run koldproxy migrate up",
			repair: `ALTER SCHEMA hidden RENAME TO koldstore`,
		},
		{
			name:    "slot of another plugin",
			breakIt: `SELECT pg_create_logical_replication_slot((SELECT slot_name FROM koldstore.checkpoint), 'test_decoding')`, want: `plugin "test_decoding"`,
			repair: `SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`,
		},
		{
			name:    "slot gone",
			breakIt: `SELECT pg_drop_replication_slot(slot_name) FROM koldstore.checkpoint`, want: "does not exist any more",
			repair: beginAnew(t), appliedBefore: true,
		},
		{
			name:    "another server",
			breakIt: `UPDATE koldstore.checkpoint SET system_identifier = '1'`, want: "system identifier 1",
			repair: beginAnew(t), appliedBefore: true,
		},
		{
			name:    "another timeline",
			breakIt: `UPDATE koldstore.checkpoint SET timeline = 7`, want: "timeline 7",
			repair: beginAnew(t), appliedBefore: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, localpg.TestCluster(t))
			d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
			if tt.appliedBefore {
				a := d.startStreaming(&recorder{})
				d.exec(`INSERT INTO t VALUES (0)`)
				d.awaitApplied()
				a.stop()
				d.exec(`TRUNCATE recorded`)
			}
			d.exec(tt.breakIt)
			rec := &recorder{}
			var led atomic.Bool
			a := d.start(rec, func(c *walapply.Config) {
				c.WhileLeading = func(ctx context.Context) error { led.Store(true); <-ctx.Done(); return nil }
			})
			d.await("the problem to show", func() bool { return a.Status().Err != nil })
			err := a.Status().Err
			var setup *walapply.SetupError
			if !errors.As(err, &setup) || !strings.Contains(err.Error(), tt.want) || setup.Hint == "" {
				t.Errorf("status shows %v", err)
			}
			d.exec(tt.repair)
			d.await("the applier to stream", func() bool { return a.Status().Streaming })
			d.exec(`INSERT INTO t VALUES (1)`)
			d.awaitApplied()
			d.equal(d.lines(), []string{"INSERT t (1)"})
			if err := a.Status().Err; err != nil {
				t.Errorf("status still shows %v", err)
			}
			a.stop()
			if !led.Load() {
				t.Error("WhileLeading did not run after the repair")
			}
		})
	}
}

func TestSlotLostToTheSizeLimitIsNotReplaced(t *testing.T) {
	t.Parallel()
	cluster := ownCluster(t, map[string]string{"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"})
	d := newDatabase(t, cluster)
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.startStreaming(&recorder{}).stop()
	for range 4 {
		d.exec(`CREATE TABLE junk AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
		d.exec(`DROP TABLE junk`)
		d.exec(`SELECT pg_switch_wal()`)
		d.exec(`CHECKPOINT`)
	}
	a := d.start(&recorder{})
	d.await("the loss to show", func() bool { return a.Status().Err != nil })
	var setup *walapply.SetupError
	if err := a.Status().Err; !errors.As(err, &setup) || !strings.Contains(err.Error(), "is lost") {
		t.Errorf("status shows %v", err)
	}
}

func TestServerWithoutLogicalLog(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, ownCluster(t, map[string]string{"wal_level": "replica"}))
	a := d.start(&recorder{})
	d.await("the problem to show", func() bool { return a.Status().Err != nil })
	if err := a.Status().Err; !strings.Contains(err.Error(), "wal_level") {
		t.Errorf("status shows %v", err)
	}
}

func TestRoleNeedsReplicationAndNothingMore(t *testing.T) {
	t.Parallel()
	cluster := ownCluster(t)
	d := newDatabase(t, cluster)
	d.exec(`CREATE ROLE poor LOGIN PASSWORD 'poor'; GRANT ALL ON SCHEMA koldstore TO poor;
		DO $$ DECLARE t regclass; BEGIN
			FOR t IN SELECT oid FROM pg_class WHERE relnamespace = 'koldstore'::regnamespace AND relkind = 'r' LOOP
				EXECUTE format('ALTER TABLE %s OWNER TO poor', t);
			END LOOP;
		END $$`)
	a := d.start(&recorder{}, func(c *walapply.Config) {
		c.DSN = cluster.DSN(query[string](d, `SELECT current_database()`), "poor", "poor")
	})
	d.await("the problem to show", func() bool { return a.Status().Err != nil })
	var setup *walapply.SetupError
	if err := a.Status().Err; !errors.As(err, &setup) || !strings.Contains(err.Error(), "REPLICATION") {
		t.Errorf("status shows %v", err)
	}
	// That attribute is all it needs besides its tables.
	d.exec(`ALTER ROLE poor REPLICATION; GRANT ALL ON recorded TO poor; CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t`)
	d.await("the applier to stream", func() bool { return a.Status().Streaming })
	d.exec(`INSERT INTO t VALUES (1)`)
	d.awaitApplied()
	d.equal(d.lines(), []string{"INSERT t (1)"})
}

// An open transaction anywhere holds the making of a slot up. That must show, and end in one slot.
func TestSlotWaitsForOlderTransactions(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, ownCluster(t))
	d.exec(`CREATE TABLE t (id int PRIMARY KEY); ALTER PUBLICATION koldproxy ADD TABLE t; BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'old'`)
	begin := time.Now()
	a := d.start(&recorder{})
	d.await("the wait to show", func() bool { return a.Status().Err != nil })
	if err := a.Status().Err; !strings.Contains(err.Error(), "older than the replication slot") {
		t.Errorf("status shows %v after %v", err, time.Since(begin))
	}
	d.exec(`COMMIT PREPARED 'old'`)
	d.await("the applier to stream", func() bool { return a.Status().Streaming })
	d.exec(`INSERT INTO t VALUES (2)`)
	d.awaitApplied()
	d.equal(d.lines(), []string{"INSERT t (2)"})
}
