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

// service is an existing server with an application's database, and koldproxy in front of it with a role of its own.
type service struct {
	database string
	password string // of the roles app and svc_…
	app, svc string
}

// serveExisting is `koldproxy serve --config` on the test cluster. superuser says whether the service role is one.
func serveExisting(t *testing.T, superuser bool) (*instance, *client, *client) {
	t.Helper()
	cluster := localpg.TestCluster(t)
	admin := open(t, cluster.TestDatabase(t))
	db := admin.text("SELECT current_database()")
	s := service{database: db, password: "secret '\" of " + db, app: "app_" + db, svc: "svc_" + db}
	options := "REPLICATION"
	if superuser {
		options = "SUPERUSER REPLICATION"
	}
	quoted := "'" + strings.ReplaceAll(s.password, "'", "''") + "'"
	admin.exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN PASSWORD %[3]s; CREATE ROLE %[2]s LOGIN %[4]s PASSWORD %[3]s; GRANT %[1]s TO %[2]s;
		ALTER DATABASE %[5]s OWNER TO %[1]s; ALTER SCHEMA public OWNER TO %[1]s`, s.app, s.svc, quoted, options, db))
	t.Cleanup(func() { // before the database is dropped
		owned := open(t, cluster.DSN(db, "", ""))
		owned.exec("DROP EVENT TRIGGER IF EXISTS koldproxy_drop; DROP EVENT TRIGGER IF EXISTS koldproxy_ddl; DROP PUBLICATION IF EXISTS koldproxy; DROP SCHEMA IF EXISTS koldstore CASCADE")
		owned.exec(fmt.Sprintf("REASSIGN OWNED BY %s, %s TO postgres; DROP OWNED BY %s, %s", s.app, s.svc, s.app, s.svc))
		owned.exec(fmt.Sprintf("DROP ROLE %s, %s", s.svc, s.app))
	})

	inst := newInstance(t, func(home string, p ports) ([]string, error) {
		cold := filepath.Join(home, keptName)
		if err := os.Mkdir(cold, 0o755); err != nil {
			return nil, err
		}
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
`, cluster.DSN(db, s.svc, s.password), db, p.proxy, "file://"+cold, p.mqtt, p.http)
		path := filepath.Join(home, configName)
		return []string{"serve", "--config", path}, os.WriteFile(path, []byte(config), 0o600)
	})
	u := url.URL{Scheme: "postgres", User: url.UserPassword(s.app, s.password), Host: fmt.Sprintf("127.0.0.1:%d", inst.ports.proxy), Path: "/" + db}
	return inst, open(t, u.String()), admin
}

// TestServe runs koldproxy against a server that exists, once with a superuser as its role and once, as on a managed
// service, with a role that may replicate and is a member of the tables' owner.
func TestServe(t *testing.T) {
	t.Parallel()
	for name, superuser := range map[string]bool{"service role": false, "superuser": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inst, app, admin := serveExisting(t, superuser)
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
				answer, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", inst.ports.http, path))
				if err != nil {
					t.Fatal(err)
				}
				answer.Body.Close()
				if answer.StatusCode != http.StatusOK {
					t.Errorf("%s: %s", path, answer.Status)
				}
			}
			http.DefaultClient.CloseIdleConnections()
			// The database is dropped at the end of the test: the stream, the feed and koldproxy have to be gone before.
			app.exec("DROP STREAM big")
			app.exec("SELECT koldstore.unmanage_table('orders', drop_cold => true)")
			if got := app.text("SELECT relreplident FROM pg_class WHERE oid = 'orders'::regclass"); got != "d" {
				t.Errorf("the replica identity is %q afterwards", got)
			}
			if err := inst.stop(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		})
	}
}
