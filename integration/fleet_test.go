package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// takeoverTime is how long changes may go unapplied when the instance that applies them goes away.
const takeoverTime = 5 * time.Second

// TestRollingRestart restarts two koldproxies behind a balancer one after the other, taking each out of rotation first, and then kills the one
// that applies changes. No connection is refused, the other one takes over in time, and writers, a consumer of a stream and one of a feed,
// which only know the balancer's address, lose nothing.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	s := newService(t, localpg.TestCluster(t), true)
	fleet := []*instance{s.serve(t), s.serve(t)}
	lb := newBalancer(t, fleet[0].ports.proxy, fleet[1].ports.proxy)
	app := s.connect(t, &instance{ports: ports{proxy: lb.port()}})
	app.exec("CREATE TABLE orders (id bigint PRIMARY KEY, total numeric NOT NULL); CREATE STREAM big ON orders WHEN (total > 1000)")
	app.exec("SELECT koldstore.manage_table('orders')")
	app.fence()
	crowd := newCrowd(t, app.Config().ConnString(), lb)
	for range 2 {
		crowd.spawn(crowd.write)
	}
	crowd.spawn(crowd.followStream)
	crowd.spawn(crowd.followFeed)
	for i, inst := range fleet {
		other := fleet[1-i]
		crowd.awaitWrites(t, 20)
		lb.takeOut(inst.ports.proxy)
		leads := inst.leads(t)
		must(t, inst.stop(syscall.SIGTERM))
		if leads {
			other.awaitLeads(t)
		}
		crowd.awaitWrites(t, 20)
		must(t, inst.start(nil))
		lb.putIn(inst.ports.proxy)
	}
	leader := slices.IndexFunc(fleet, func(i *instance) bool { return i.leads(t) })
	if leader < 0 {
		t.Fatal("nobody applies changes")
	}
	crowd.awaitWrites(t, 20)
	crowd.killing.Store(true)
	must(t, fleet[leader].kill())
	fleet[1-leader].awaitLeads(t)
	crowd.awaitWrites(t, 20)
	crowd.end()

	app = s.connect(t, fleet[1-leader])
	app.fence()
	app.checkFold("big", "orders", "total > 1000")
	app.checkFeed("orders")
	crowd.catchUp(t, app)
	if written := app.text("SELECT count(*)::text FROM orders"); written != strconv.FormatInt(crowd.written.Load(), 10) {
		t.Errorf("%s rows are there, %d were written", written, crowd.written.Load())
	}
	t.Logf("%d rows written, %d sessions cut", crowd.written.Load(), crowd.cut.Load())
	app.forget("big", "orders")
}

// leads says whether the instance applies changes.
func (i *instance) leads(t *testing.T) bool {
	t.Helper()
	_, text := i.get(t, "/metrics")
	return regexp.MustCompile(`(?m)^koldproxy_walapply_leading\{.*\} 1$`).MatchString(text)
}

func (i *instance) awaitLeads(t *testing.T) {
	t.Helper()
	for begin := time.Now(); !i.leads(t); time.Sleep(10 * time.Millisecond) { // polls, since nothing tells
		if time.Since(begin) > takeoverTime {
			t.Fatalf("the other instance does not apply changes after %v", takeoverTime)
		}
	}
}

// balancer hands TCP connections to the ports in rotation in turn. One that cannot be reached is passed over.
type balancer struct {
	ln net.Listener

	mu    sync.Mutex
	ports []int
	taken int // how often one was taken out
	next  int
	open  map[net.Conn]bool
	wg    sync.WaitGroup
}

func newBalancer(t *testing.T, ports ...int) *balancer {
	t.Helper()
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	b := &balancer{ln: ln, ports: ports, open: map[net.Conn]bool{}}
	b.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			b.wg.Go(func() { b.serve(conn) })
		}
	})
	t.Cleanup(func() {
		must(t, ln.Close())
		b.mu.Lock()
		for conn := range b.open {
			_ = conn.Close() // ends the copying
		}
		b.mu.Unlock()
		b.wg.Wait()
	})
	return b
}

func (b *balancer) port() int { return b.ln.Addr().(*net.TCPAddr).Port }

func (b *balancer) takeOut(port int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ports = slices.DeleteFunc(slices.Clone(b.ports), func(p int) bool { return p == port })
	b.taken++
}

// takenOut is how often a port was taken out.
func (b *balancer) takenOut() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.taken
}

func (b *balancer) putIn(port int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ports = append(slices.Clone(b.ports), port)
}

// inTurn is the ports to try, each time beginning with another one.
func (b *balancer) inTurn() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next++
	at := b.next % len(b.ports)
	return slices.Concat(b.ports[at:], b.ports[:at])
}

func (b *balancer) serve(client net.Conn) {
	defer client.Close()
	for _, port := range b.inTurn() {
		server, err := (&net.Dialer{}).Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		defer server.Close()
		b.track(true, client, server)
		defer b.track(false, client, server)
		var both sync.WaitGroup
		for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
			both.Go(func() {
				_, _ = io.Copy(way[0], way[1]) // the end of either side is no error of a balancer
				_ = way[0].(*net.TCPConn).CloseWrite()
			})
		}
		both.Wait()
		return
	}
}

func (b *balancer) track(open bool, conns ...net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range conns {
		if open {
			b.open[c] = true
		} else {
			delete(b.open, c)
		}
	}
}

// crowd is applications that know one address: writers with a connection for each row, and consumers that keep theirs. All of them
// take a session that is cut for what it is and connect again. A connection that is refused is an error, unless it is older than what
// the balancer knows: whoever is about to log in where koldproxy is told to end gets 57P03, as from PostgreSQL, and nothing was done yet.
type crowd struct {
	dsn     string
	lb      *balancer
	ctx     context.Context //nolint:containedctx // of the crowd's goroutines
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	ended   chan struct{}
	written atomic.Int64
	cut     atomic.Int64
	killing atomic.Bool

	mu     sync.Mutex
	errs   []error
	events []string // ids of events, as they came
	keys   []string // of the same events
	cursor int64    // of the feed
	feed   map[string]bool
}

func newCrowd(t *testing.T, dsn string, lb *balancer) *crowd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	c := &crowd{dsn: dsn, lb: lb, ctx: ctx, cancel: cancel, ended: make(chan struct{}), feed: map[string]bool{}}
	t.Cleanup(func() {
		cancel()
		c.wg.Wait()
	})
	return c
}

// spawn runs one application until the crowd ends. do works with a connection until it is cut, or has nothing more to do with it.
func (c *crowd) spawn(do func(conn *pgx.Conn) error) {
	c.wg.Go(func() {
		for {
			select {
			case <-c.ended:
				return
			default:
			}
			conn, err := c.connect()
			if err == nil {
				err = do(conn)
				_ = conn.Close(c.ctx) // it may be cut
				if wasCut(err) {
					c.cut.Add(1)
					err = nil
				}
			}
			if err != nil {
				c.mu.Lock()
				c.errs = append(c.errs, err)
				c.mu.Unlock()
				return
			}
		}
	})
}

// connect logs in. A login that is under way may be cut by a kill, and refused by an instance that was taken out meanwhile; it
// is begun again then.
func (c *crowd) connect() (*pgx.Conn, error) {
	for {
		taken := c.lb.takenOut()
		conn, err := pgx.Connect(c.ctx, c.dsn)
		again := c.killing.Load() && wasCut(err) || c.lb.takenOut() > taken && isEnding(err)
		if err == nil || !again || c.ctx.Err() != nil {
			return conn, err
		}
		c.cut.Add(1)
	}
}

// wasCut says whether a session was ended from the other side: by a drain (57P01), or with its process.
func wasCut(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code == "57P01"
	}
	var op *net.OpError
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &op) || err != nil && strings.Contains(err.Error(), "conn closed")
}

// isEnding says whether a server has refused a login because it is about to end.
func isEnding(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "57P03"
}

// write inserts one row. One whose session is cut may be there or not; it is written again.
func (c *crowd) write(conn *pgx.Conn) error {
	id := c.written.Add(1)
	for {
		_, err := conn.Exec(c.ctx, "INSERT INTO orders VALUES ($1, $2) ON CONFLICT DO NOTHING", id, id%20*100)
		if !wasCut(err) {
			return err
		}
		c.cut.Add(1)
		_ = conn.Close(c.ctx)
		if conn, err = c.connect(); err != nil {
			return err
		}
		defer conn.Close(c.ctx)
	}
}

// followStream reads the log page by page, behind the last event it has.
func (c *crowd) followStream(conn *pgx.Conn) error {
	for {
		n, err := c.readEvents(conn)
		if err != nil || n == 0 && c.pause() {
			return err
		}
	}
}

func (c *crowd) readEvents(conn *pgx.Conn) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sql := "SELECT id, k::text FROM _stream_big ORDER BY id LIMIT 50"
	if len(c.events) > 0 {
		sql += " AFTER ('" + c.events[len(c.events)-1] + "')"
	}
	rows, err := conn.Query(c.ctx, sql)
	if err != nil {
		return 0, err
	}
	var ids, keys []string
	var id, key string
	_, err = pgx.ForEachRow(rows, []any{&id, &key}, func() error {
		ids, keys = append(ids, id), append(keys, key)
		return nil
	})
	if err != nil {
		return 0, err
	}
	c.events, c.keys = append(c.events, ids...), append(c.keys, keys...)
	return len(ids), nil
}

// followFeed reads the feed page by page.
func (c *crowd) followFeed(conn *pgx.Conn) error {
	for {
		n, err := c.readFeed(conn)
		if err != nil || n == 0 && c.pause() {
			return err
		}
	}
}

func (c *crowd) readFeed(conn *pgx.Conn) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rows, err := conn.Query(c.ctx, "SELECT seq, pk ->> 'id' FROM koldstore.changes_since('orders', since_seq => $1, limit_rows => 50)", c.cursor)
	if err != nil {
		return 0, err
	}
	last, keys := c.cursor, []string(nil)
	var key string
	_, err = pgx.ForEachRow(rows, []any{&last, &key}, func() error {
		keys = append(keys, key)
		return nil
	})
	if err != nil {
		return 0, err
	}
	c.cursor = last
	for _, key := range keys {
		c.feed[key] = true
	}
	return len(keys), nil
}

// pause lets a consumer that has everything wait a little, as one that polls does. It says whether the crowd has ended.
func (c *crowd) pause() (ended bool) {
	select {
	case <-c.ended:
		return true
	case <-time.After(20 * time.Millisecond):
		return false
	}
}

// awaitWrites waits until so many more rows are being written.
func (c *crowd) awaitWrites(t *testing.T, n int64) {
	t.Helper()
	for target := c.written.Load() + n; c.written.Load() < target; time.Sleep(time.Millisecond) { // polls a counter
		c.check(t)
		if c.ctx.Err() != nil {
			t.Fatal("nobody writes any more")
		}
	}
}

func (c *crowd) check(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.errs) > 0 {
		t.Fatalf("applications have errors: %v", errors.Join(c.errs...))
	}
}

func (c *crowd) end() {
	close(c.ended)
	c.wg.Wait()
}

// catchUp reads what is left for the consumers and compares what they have with the table.
func (c *crowd) catchUp(t *testing.T, app *client) {
	t.Helper()
	c.check(t)
	for n := 1; n > 0; {
		var err error
		n, err = c.readEvents(app.Conn)
		must(t, err)
	}
	for n := 1; n > 0; {
		var err error
		n, err = c.readFeed(app.Conn)
		must(t, err)
	}
	if !slices.IsSorted(c.events) || len(slices.Compact(slices.Clone(c.events))) != len(c.events) {
		t.Error("events came out of order, or twice")
	}
	keys := slices.Sorted(slices.Values(c.keys))
	if want := app.text("SELECT coalesce(string_agg(id::text, ' ' ORDER BY id::text COLLATE \"C\"), '') FROM orders WHERE total > 1000"); strings.Join(keys, " ") != want {
		t.Errorf("the consumer of the stream has %d keys: %v\nwant %s", len(keys), keys, want)
	}
	if want := app.text("SELECT count(*)::text FROM orders"); want != strconv.Itoa(len(c.feed)) {
		t.Errorf("the consumer of the feed has %d keys, want %s", len(c.feed), want)
	}
}
