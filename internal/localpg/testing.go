package localpg

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// TB is the part of testing.TB that is needed here. Naming it keeps package testing out of the product.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// shared is the one cluster of a test binary.
var shared struct {
	once    sync.Once
	cluster *Cluster
	err     error
}

// TestCluster returns the cluster that all tests of the binary share; the first call starts it. The package's TestMain must
// be [Main], which stops it.
func TestCluster(tb TB) *Cluster {
	tb.Helper()
	shared.once.Do(func() {
		shared.cluster, shared.err = Start(context.Background(), Config{})
	})
	if shared.err != nil {
		tb.Fatalf("%v", shared.err)
	}
	return shared.cluster
}

// OwnCluster starts a cluster that is the test's alone, for what disturbs others, and stops it when the test ends.
func OwnCluster(tb TB, cfg Config) *Cluster {
	tb.Helper()
	cluster, err := Start(context.Background(), cfg)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if err := cluster.Stop(ctx); err != nil {
			tb.Errorf("stop the cluster: %v", err)
		}
	})
	return cluster
}

// stopTimeout bounds how long a cluster of tests may take for a fast shutdown, and a test database to disappear.
const stopTimeout = 20 * time.Second

// Main is the body of a TestMain: it calls [Run] and exits. Options go to goleak.
func Main(m interface{ Run() int }, options ...goleak.Option) {
	os.Exit(Run(m, options...))
}

// Run runs the tests, fails the run if they leave goroutines behind, stops the shared cluster and returns the exit code.
func Run(m interface{ Run() int }, options ...goleak.Option) int {
	code := m.Run()
	if code == 0 {
		options = append(options, goleak.IgnoreAnyFunction("github.com/koldproxy/koldproxy/internal/localpg.(*process).hold"))
		if err := goleak.Find(options...); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines left behind after the tests:", err)
			code = 1
		}
	}
	if shared.cluster != nil {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if err := shared.cluster.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "stop the test cluster:", err)
			code = 1
		}
	}
	return code
}

// TestDatabase makes a fresh database and returns the superuser's DSN for it. At the end of the test the database is
// dropped together with its connections and replication slots.
func (c *Cluster) TestDatabase(tb TB) string {
	tb.Helper()
	return c.TestDatabaseLike(tb, "template1")
}

// TestDatabaseLike is [Cluster.TestDatabase] with a copy of a database that nobody is connected to.
func (c *Cluster) TestDatabaseLike(tb TB, template string) string {
	tb.Helper()
	ctx := context.Background()
	name := "test_" + strings.ToLower(randomName(10))
	admin, err := pgx.Connect(ctx, c.DSN("postgres", "", ""))
	if err != nil {
		tb.Fatalf("connect to the test cluster: %v\nend of its log:\n%s", err, tail(c.LogPath, logLines))
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template); err != nil {
		tb.Fatalf("create database %s: %v", name, err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if err := c.dropDatabase(ctx, name); err != nil {
			tb.Errorf("drop database %s: %v", name, err)
		}
	})
	return c.DSN(name, "", "")
}

// dropDatabase drops a database with whatever still uses it. A slot whose walsender has just been ended is in use for a
// moment longer, so it tries until ctx ends.
func (c *Cluster) dropDatabase(ctx context.Context, name string) error {
	admin, err := pgx.Connect(ctx, c.DSN("postgres", "", ""))
	if err != nil {
		return err
	}
	defer admin.Close(context.Background()) //nolint:contextcheck // also after ctx has ended
	for {
		err := dropOnce(ctx, admin, name)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pollInterval):
		}
	}
}

func dropOnce(ctx context.Context, admin *pgx.Conn, name string) error {
	_, err := admin.Exec(ctx, `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
		WHERE database = $1 AND active_pid IS NOT NULL`, name)
	if err != nil {
		return err
	}
	_, err = admin.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
		WHERE database = $1 AND NOT active`, name)
	if err != nil {
		return err
	}
	_, err = admin.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	return err
}
