package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// TestLogOnAStandbyServer: a log replicates like any table. On a physical standby it is read, resumed and guarded as on the primary, and
// what has expired is invisible there at once.
func TestLogOnAStandbyServer(t *testing.T) {
	t.Parallel()
	clientTools(t, "pg_basebackup")
	primary := localpg.OwnCluster(t, localpg.Config{})
	s := newService(t, primary, true)
	inst := s.serve(t)
	c := s.connect(t, inst)
	c.exec(`CREATE TABLE orders (id int PRIMARY KEY); CREATE STREAM s ON orders WHEN (true) WITH (retention = '1h');
		CREATE STREAM short ON orders WHEN (true) WITH (retention = '2s'); INSERT INTO orders SELECT generate_series(1, 500)`)
	c.fence()

	folder, err := newFolder()
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(folder)) })
	data := filepath.Join(folder, filepath.Base(primary.DataDir))
	program{name: "pg_basebackup", args: []string{"-d", primary.DSN("postgres", "", ""), "-D", data, "-X", "stream", "-c", "fast", "-R"}}.mustRun(t)
	if out, err := exec.Command("chown", "-R", "--reference="+primary.DataDir, data).CombinedOutput(); err != nil {
		t.Fatalf("chown: %v %s", err, out)
	}
	standby := localpg.OwnCluster(t, localpg.Config{Dir: folder, Password: "of the primary"})
	reader := open(t, standby.DSN(s.database, s.app, s.password))
	if got := reader.text("SELECT pg_is_in_recovery()"); got != "t" {
		t.Fatal("this is no standby")
	}

	const digest = "SELECT concat_ws(' ', count(*), md5(string_agg(l::text, ',' ORDER BY id))) FROM _stream_s l"
	same := func() bool { return reader.text(digest) == c.text(digest) }
	await(t, "the standby to have the log", same)
	c.exec("INSERT INTO orders VALUES (501); DELETE FROM orders WHERE id = 7")
	c.fence()
	await(t, "the standby to have what is new", same)
	if rows := reader.rows("SELECT id FROM _stream_s WHERE id > $1 ORDER BY id LIMIT 500", c.text("SELECT id FROM _stream_s ORDER BY id OFFSET 99 LIMIT 1")); len(rows) != 402 {
		t.Errorf("%d events behind the hundredth", len(rows))
	}
	// The clock alone hides events: nothing is written, and nothing has to be replayed.
	await(t, "the events to expire on the standby", func() bool { return reader.text("SELECT count(*) FROM _stream_short") == "0" })
	const floor = "SELECT koldstore.stream_floor('short')"
	if here, there := reader.text(floor), c.text(floor); here < c.text("SELECT koldstore.stream_floor('s')") || here > there {
		t.Errorf("the floor is %s on the standby, %s on the primary", here, there)
	}
	if got := reader.text("SELECT concat_ws(' ', s ->> 'running', (s ->> 'current_lsn')::pg_lsn > '0/0') FROM koldstore.async_mirror_status() s"); got != "false t" {
		t.Errorf("the status on the standby is %q", got)
	}
	_, err = reader.Exec(reader.ctx, "SELECT koldstore.wait_for_async_mirror()")
	wantError(t, err, "55000", "a standby server cannot tell what has been committed")
	_, err = reader.Exec(reader.ctx, "INSERT INTO _stream_s (id, op, k, ts) VALUES ('1', 'put', '1', now())")
	wantError(t, err, "25006", "read-only")
	c.exec("DROP STREAM s; DROP STREAM short")
}

// TestEveryInstancePushes: subscribers of an instance that does not apply changes receive events, over MQTT and HTTP, and SHOW STREAMS
// tells of the instance that is asked.
func TestEveryInstancePushes(t *testing.T) {
	t.Parallel()
	s := newService(t, localpg.TestCluster(t), true)
	leader := s.serve(t)
	app := s.connect(t, leader)
	app.exec("CREATE TABLE orders (id int PRIMARY KEY); CREATE STREAM s ON orders WHEN (true); INSERT INTO orders VALUES (1)")
	app.exec("SELECT koldstore.wait_for_async_mirror()") // so that this one leads
	other := s.serve(t)
	elsewhere := s.connect(t, other)
	topic := "$stream/" + s.database + "/s"
	sub := other.subscribe(t, s.app, s.password, topic)
	if _, ok := sub.await("Subscribed"); !ok {
		t.Fatal("not subscribed")
	}
	shown := func(c *client) string { row := find(c.rows("SHOW STREAMS"), "s"); return row[3] + " " + row[4] }
	await(t, "the subscriber to be counted where it is", func() bool { return shown(elsewhere) == "1 0" })
	await(t, "nothing to be behind elsewhere", func() bool { return shown(app) == "0 0" })
	for i := range 3 {
		app.exec("INSERT INTO orders VALUES ($1)", i+2)
	}
	app.fence()
	for _, want := range app.rows("SELECT id FROM _stream_s ORDER BY id OFFSET 1") {
		if _, payload := sub.message(); !strings.Contains(payload, want[0]) {
			t.Errorf("received %s, want %s", payload, want[0])
		}
	}
	// The other one takes over. What comes then is pushed there; what was pushed may come again, in its order.
	must(t, leader.kill())
	elsewhere.exec("INSERT INTO orders VALUES (100)")
	elsewhere.fence()
	last := elsewhere.text("SELECT max(id) FROM _stream_s")
	for {
		if _, payload := sub.message(); strings.Contains(payload, last) {
			break
		}
	}
	elsewhere.exec("DROP STREAM s")
}
