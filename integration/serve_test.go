package integration_test

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

const configName = "koldproxy.toml"

// service is an application's database on a server that exists, with a role for koldproxy.
type service struct {
	cluster   *localpg.Cluster
	database  string
	app, role string // the owner of the database, and koldproxy's role
	password  string // of both
	cold      string // the folder for segments
}

// newService makes database and roles. superuser says whether koldproxy's role is one; otherwise it is what a managed
// service can give: a role that may replicate and is a member of the tables' owner.
func newService(t *testing.T, cluster *localpg.Cluster, superuser bool) *service {
	t.Helper()
	admin := open(t, cluster.TestDatabase(t))
	db := admin.text("SELECT current_database()")
	s := &service{cluster: cluster, database: db, app: "app_" + db, role: "svc_" + db, password: "secret '\" of " + db, cold: t.TempDir()}
	options := "REPLICATION"
	if superuser {
		options = "SUPERUSER REPLICATION"
	}
	quoted := "'" + strings.ReplaceAll(s.password, "'", "''") + "'"
	admin.exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN PASSWORD %[3]s; CREATE ROLE %[2]s LOGIN %[4]s PASSWORD %[3]s; GRANT %[1]s TO %[2]s;
		ALTER DATABASE %[5]s OWNER TO %[1]s; ALTER SCHEMA public OWNER TO %[1]s`, s.app, s.role, quoted, options, db))
	if !superuser { // what docs/operations.md asks an administrator for
		admin.exec(fmt.Sprintf(`DO $$ BEGIN IF to_regrole('koldproxy_eval') IS NULL THEN CREATE ROLE koldproxy_eval NOLOGIN; END IF; END $$; GRANT koldproxy_eval TO %s`, s.role))
	}
	t.Cleanup(func() { // before the database is dropped
		admin := s.admin(t)
		for _, trigger := range []string{"koldproxy_drop", "koldproxy_ddl", "koldproxy_publication", "koldproxy_publication_drop", "koldproxy_function", "koldproxy_function_drop"} {
			admin.exec("DROP EVENT TRIGGER IF EXISTS " + trigger)
		}
		admin.exec("DROP PUBLICATION IF EXISTS koldproxy; DROP SCHEMA IF EXISTS koldstore CASCADE")
		admin.exec(fmt.Sprintf("REASSIGN OWNED BY %[1]s, %[2]s TO postgres; DROP OWNED BY %[1]s, %[2]s; DROP ROLE %[1]s, %[2]s", s.role, s.app))
	})
	return s
}

// admin is a direct session as the server's superuser.
func (s *service) admin(t *testing.T) *client {
	t.Helper()
	return open(t, s.cluster.DSN(s.database, "", ""))
}

// serve starts a koldproxy in front of the server.
func (s *service) serve(t *testing.T) *instance {
	t.Helper()
	return newInstance(t, func(home string, p ports) ([]string, error) {
		config := fmt.Sprintf(`
[postgres]
dsn = %q
databases = [%q]
[proxy]
listen = "127.0.0.1:%d"
[cold]
url = %q
[mqtt]
enabled = true
listen = "127.0.0.1:%d"
[http]
listen = "127.0.0.1:%d"
`, s.cluster.DSN(s.database, s.role, s.password), s.database, p.proxy, "file://"+s.cold, p.mqtt, p.http)
		path := filepath.Join(home, configName)
		return []string{"serve", "--config", path}, os.WriteFile(path, []byte(config), 0o600)
	})
}

// connect is a session of the application through one of its koldproxies.
func (s *service) connect(t *testing.T, through *instance) *client {
	t.Helper()
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(s.app, s.password),
		Host: fmt.Sprintf("127.0.0.1:%d", through.ports.proxy), Path: "/" + s.database,
	}
	return open(t, u.String())
}

// forget takes stream and feed back, without which the database could not be dropped.
func (c *client) forget(stream, table string) {
	c.t.Helper()
	c.exec("DROP STREAM " + stream)
	c.exec("SELECT koldstore.unmanage_table($1::text::regclass, drop_cold => true)", table)
}

// TestServe runs koldproxy against a server that exists, once with a superuser as its role and once, as on a managed
// service, with a role that may replicate and is a member of the tables' owner.
func TestServe(t *testing.T) {
	t.Parallel()
	for name, superuser := range map[string]bool{"service role": false, "superuser": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newService(t, localpg.TestCluster(t), superuser)
			inst := s.serve(t)
			app, admin := s.connect(t, inst), s.admin(t)
			app.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); INSERT INTO orders VALUES (1, 10), (2, 2000)")
			if tag := app.exec("CREATE STREAM big ON orders WHEN (total > 1000) WITH (start = 'earliest', pre_image = true)"); tag != "CREATE STREAM" {
				t.Errorf("tag %q", tag)
			}
			app.exec("SELECT koldstore.manage_table('orders')")
			app.exec("INSERT INTO orders SELECT i, i * 100 FROM generate_series(3, 30) i")
			app.exec("UPDATE orders SET total = 5 WHERE id = 2; DELETE FROM orders WHERE id > 25")
			app.fence()
			app.checkFold("big", "orders", "total > 1000")
			app.checkFeed("orders")
			if n := app.flush("orders"); n != 30 {
				t.Errorf("%d rows flushed, want 30", n)
			}
			if tombstones := app.checkFeed("orders"); len(tombstones) != 5 {
				t.Errorf("tombstones: %v", tombstones)
			}
			if _, err := admin.Exec(admin.ctx, "DELETE FROM _stream_big"); err == nil {
				t.Error("a superuser writes to the log")
			}
			for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
				if status, body := inst.get(t, path); status != http.StatusOK {
					t.Errorf("%s: %d %s", path, status, body)
				}
			}
			app.forget("big", "orders")
			if got := app.text("SELECT relreplident FROM pg_class WHERE oid = 'orders'::regclass"); got != "d" {
				t.Errorf("the replica identity is %q afterwards", got)
			}
			if err := inst.stop(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestServerCrash: koldproxy outlives its server, takes up where it was when the server is back, and lets clients in again.
func TestServerCrash(t *testing.T) {
	t.Parallel()
	cluster := localpg.OwnCluster(t, localpg.Config{})
	s := newService(t, cluster, true)
	inst := s.serve(t)
	app := s.connect(t, inst)
	app.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000)")
	app.exec("SELECT koldstore.manage_table('orders')")
	for round := range 3 {
		app.exec(fmt.Sprintf("INSERT INTO orders SELECT i, i * 100 FROM generate_series(%d, %d) i", round*100+1, round*100+100))
		if round == 1 {
			app.flush("orders")
		}
		app.exec("UPDATE orders SET total = 0 WHERE id % 7 = 0")
		must(t, cluster.Kill(app.ctx))
		if _, err := app.Exec(app.ctx, "SELECT 1"); err == nil {
			t.Error("a session outlived its server")
		}
		must(t, cluster.Restart(app.ctx))
		app = s.connect(t, inst)
		app.fence()
		app.checkFold("big", "orders", "total > 1000")
		app.checkFeed("orders")
	}
	app.forget("big", "orders")
	must(t, inst.stop(syscall.SIGTERM))
}

// TestStandby runs two koldproxies in front of one database. Both serve clients; when the one that applies changes is killed
// the other one does.
func TestStandby(t *testing.T) {
	t.Parallel()
	s := newService(t, localpg.TestCluster(t), true)
	leader := s.serve(t)
	standby := s.serve(t)
	app := s.connect(t, standby)
	app.exec("CREATE TABLE orders (id int PRIMARY KEY, total numeric); CREATE STREAM big ON orders WHEN (total > 1000)")
	app.exec("SELECT koldstore.manage_table('orders')")
	app.exec("INSERT INTO orders SELECT i, i * 100 FROM generate_series(1, 100) i")
	if n := app.flush("orders"); n != 100 {
		t.Errorf("%d rows flushed through the standby", n)
	}
	app.checkFeed("orders")

	app.exec("UPDATE orders SET total = total + 1 WHERE id % 2 = 0")
	must(t, leader.kill())
	app.exec("DELETE FROM orders WHERE id % 3 = 0")
	app.flush("orders")
	app.checkFold("big", "orders", "total > 1000")
	if tombstones := app.checkFeed("orders"); len(tombstones) != 33 {
		t.Errorf("%d tombstones", len(tombstones))
	}
	app.forget("big", "orders")
	must(t, standby.stop(syscall.SIGTERM))
}
