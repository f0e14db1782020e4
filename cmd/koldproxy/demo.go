package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// demoOptions are the flags of `demo`.
type demoOptions struct {
	data, pgBin                              string
	listen, pgListen, mqttListen, httpListen string
	tour                                     bool
	logLevel                                 string
}

const (
	demoDatabase = "default"
	demoService  = "koldproxy"
	demoUser     = "demo"
	// demoDrain leaves room within the five seconds that Ctrl-C may take.
	demoDrain = time.Second
	// demoStop bounds the fast shutdown of PostgreSQL.
	demoStop = 2 * time.Second
)

func newDemoCommand(_ *options) *cobra.Command {
	d := &demoOptions{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "start a private PostgreSQL with koldproxy in front of it",
		Example: `  koldproxy demo
  koldproxy demo --data /tmp/koldproxy --listen 127.0.0.1:7543
  koldproxy demo --tour`,
		Long: `Starts a private PostgreSQL from the binaries found on this machine and koldproxy in front of it.

Database "default"; roles demo (password demo, owner of the database) and postgres (password postgres, superuser).
An empty --…-listen turns that listener off; port 0 takes a free one.`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return d.run(cmd.Context(), cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&d.data, "data", "", "keep everything in this `DIR`; without it a temporary folder is used and removed at exit")
	flags.StringVar(&d.pgBin, "pg-bin", "", "`DIR` with the PostgreSQL binaries; default: the newest found")
	flags.StringVar(&d.listen, "listen", "127.0.0.1:6543", "`ADDRESS` of the proxy, host:port or unix:/path/.s.PGSQL.6543")
	flags.StringVar(&d.pgListen, "pg-listen", "127.0.0.1:0", "`ADDRESS` of PostgreSQL itself")
	flags.StringVar(&d.mqttListen, "mqtt-listen", "127.0.0.1:1883", "`ADDRESS` of the MQTT broker")
	flags.StringVar(&d.httpListen, "http-listen", "127.0.0.1:9632", "`ADDRESS` of /metrics, /healthz and /readyz")
	flags.BoolVar(&d.tour, "tour", false, "run the README's tour, show each statement and its result, and exit; 0 means that every step was right")
	flags.StringVar(&d.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func (d *demoOptions) run(ctx context.Context, cmd *cobra.Command) error {
	cfg, err := d.config()
	if err != nil {
		return err
	}
	log, err := cfg.logger(cmd)
	if err != nil {
		return usageError{err}
	}
	clusterConfig, err := d.clusterConfig()
	if err != nil {
		return err
	}
	log.Info().Str("version", release).Msg("demo starts")
	cluster, err := localpg.Start(ctx, clusterConfig)
	if err != nil {
		return d.unlessTold(ctx, err)
	}
	err = whileRunning(ctx, cluster, func(ctx context.Context) error { return d.serve(ctx, cmd, cfg, cluster, log) })
	// PostgreSQL is stopped last, and whatever happened before.
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), demoStop)
	defer cancel()
	return errors.Join(err, cluster.Stop(stopping))
}

// errTourInterrupted ends a tour that was told to stop: what was not shown cannot be called right.
var errTourInterrupted = errors.New("the tour was interrupted")

// unlessTold drops errors that are there only because the person at the keyboard ended the demo.
func (d *demoOptions) unlessTold(ctx context.Context, err error) error {
	if ctx.Err() != nil && d.tour {
		return errTourInterrupted
	}
	return unlessDone(ctx, err)
}

// whileRunning calls do with a context that also ends when PostgreSQL does, which is an error then.
func whileRunning(ctx context.Context, cluster *localpg.Cluster, do func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	exited := cluster.Exited()
	lost := make(chan error, 1)
	go func() {
		defer close(lost)
		select {
		case <-exited:
			lost <- fmt.Errorf("PostgreSQL has ended; see %s", cluster.LogPath)
			cancel()
		case <-ctx.Done():
		}
	}()
	err := do(ctx)
	cancel()
	return errors.Join(err, <-lost)
}

// config is everything that does not depend on the cluster.
func (d *demoOptions) config() (*config, error) {
	cfg := defaultConfig()
	cfg.Postgres.Databases = []string{demoDatabase}
	cfg.Proxy.Listen = d.listen
	cfg.Proxy.DrainTimeout = duration(demoDrain)
	cfg.MQTT.Enabled = d.mqttListen != ""
	cfg.MQTT.Listen = d.mqttListen
	cfg.HTTP.Listen = d.httpListen
	cfg.Log.Level = d.logLevel
	if d.tour && (d.listen == "" || d.mqttListen == "") {
		return nil, usageError{errors.New("--tour needs the proxy and the broker; --listen and --mqtt-listen must not be empty")}
	}
	return cfg, nil
}

func (d *demoOptions) clusterConfig() (localpg.Config, error) {
	c := localpg.Config{BinDir: d.pgBin, Password: "postgres", Durable: d.data != "", SocketOnly: d.pgListen == ""}
	if d.data != "" {
		c.Dir = filepath.Join(d.data, "postgres")
	}
	if d.pgListen != "" {
		host, port, err := net.SplitHostPort(d.pgListen)
		if err != nil {
			return c, usageError{fmt.Errorf("--pg-listen %s: want host:port", d.pgListen)}
		}
		c.Host = host
		if c.Port, err = strconv.Atoi(port); err != nil {
			return c, usageError{fmt.Errorf("--pg-listen %s: %q is no port number", d.pgListen, port)}
		}
	}
	return c, nil
}

// serve prepares the cluster and runs koldproxy on it.
func (d *demoOptions) serve(ctx context.Context, cmd *cobra.Command, cfg *config, cluster *localpg.Cluster, log zerolog.Logger) error {
	password := rand.Text()
	if err := prepareDemo(ctx, cluster, password); err != nil {
		return d.unlessTold(ctx, fmt.Errorf("prepare the demo database: %w", err))
	}
	if err := d.finishConfig(cfg, cluster, password); err != nil {
		return err
	}
	if err := migrateUp(ctx, cfg, demoDatabase); err != nil { // serve would try it again and again
		return d.unlessTold(ctx, err)
	}
	serving, cancel := context.WithCancel(ctx)
	defer cancel()
	toured, tourErr := false, error(nil)
	err := run(serving, cfg, log, nil, watch{
		listening: func(endpoints) error { return nil },
		ready: func(ctx context.Context, e endpoints) error {
			if err := d.announce(cmd, e); err != nil || !d.tour {
				return err
			}
			t := &tour{dsn: demoDSN(e), broker: e.mqtt.String(), out: cmd.OutOrStdout()}
			tourErr, toured = t.run(ctx, tourText), true
			cancel()
			return nil
		},
	})
	if d.tour && !toured {
		tourErr = errors.New("the tour was not finished")
	}
	if tourErr != nil {
		tourErr = d.unlessTold(ctx, tourErr)
	}
	return errors.Join(err, tourErr)
}

// finishConfig fills in what is known once the cluster runs, and leaves a configuration file for the admin commands.
func (d *demoOptions) finishConfig(cfg *config, cluster *localpg.Cluster, password string) error {
	folder := cluster.Folder
	if d.data != "" {
		var err error
		if folder, err = filepath.Abs(d.data); err != nil {
			return err
		}
	}
	cfg.Cold.URL = (&url.URL{Scheme: "file", Path: filepath.Join(folder, "cold")}).String()
	socket := url.Values{"host": {cluster.SocketDir}, "port": {strconv.Itoa(cluster.Port)}}
	cfg.Postgres.DSN = (&url.URL{
		Scheme: "postgres", User: url.UserPassword(demoService, password), Path: "/" + demoDatabase, RawQuery: socket.Encode(),
	}).String()
	if err := cfg.validate(); err != nil {
		return err
	}
	return writeAdminConfig(filepath.Join(folder, "koldproxy.toml"), cfg)
}

// demoDSN is how the role demo connects through the proxy.
func demoDSN(e endpoints) string {
	u := url.URL{Scheme: "postgres", User: url.UserPassword(demoUser, demoUser), Path: "/" + demoDatabase}
	address := e.proxy[0].String()
	if e.proxy[0].Network() != "unix" {
		u.Host = address
		return u.String()
	}
	folder, name := filepath.Split(address)
	u.RawQuery = url.Values{"host": {filepath.Clean(folder)}, "port": {strings.TrimPrefix(name, ".s.PGSQL.")}}.Encode()
	return u.String()
}

// announce tells the person, and whoever waits for the first line, that everything accepts connections.
func (d *demoOptions) announce(cmd *cobra.Command, e endpoints) error {
	text := "koldproxy ready\n"
	if len(e.proxy) > 0 {
		dsn := demoDSN(e)
		if strings.Contains(dsn, "?") { // which a shell would take for a pattern
			dsn = "'" + dsn + "'"
		}
		text += "psql " + dsn + "\n"
	}
	if e.mqtt != nil {
		host, port, err := net.SplitHostPort(e.mqtt.String())
		if err != nil {
			return err
		}
		text += fmt.Sprintf("mosquitto_sub -h %s -p %s -u %s -P %s -t '$stream/%s/#'\n", host, port, demoUser, demoUser, demoDatabase)
	}
	if e.http != nil {
		text += "curl http://" + e.http.String() + "/metrics\n"
	}
	_, err := cmd.OutOrStdout().Write([]byte(text))
	return err
}

// prepareDemo makes roles and database, on a kept cluster only what is missing. The service role gets a new password at
// each start: nobody has to remember it.
func prepareDemo(ctx context.Context, cluster *localpg.Cluster, password string) error {
	conn, err := pgx.Connect(ctx, cluster.DSN("postgres", "", ""))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, role := range []struct{ name, options string }{
		{demoService, "LOGIN SUPERUSER REPLICATION"},
		{demoUser, "LOGIN PASSWORD 'demo'"},
	} {
		var known bool
		if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role.name).Scan(&known); err != nil {
			return err
		}
		if !known {
			if _, err := conn.Exec(ctx, "CREATE ROLE "+role.name+" "+role.options); err != nil {
				return err
			}
		}
	}
	if _, err := conn.Exec(ctx, "ALTER ROLE "+demoService+" PASSWORD '"+password+"'"); err != nil {
		return err
	}
	var known bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", demoDatabase).Scan(&known); err != nil || known {
		return err
	}
	_, err = conn.Exec(ctx, `CREATE DATABASE "`+demoDatabase+`" OWNER `+demoUser)
	return err
}

// writeAdminConfig leaves a configuration with which the admin commands reach this demo. Only its owner may read it: it
// holds the service role's password.
func writeAdminConfig(path string, cfg *config) error {
	text := fmt.Sprintf("# Written by koldproxy demo at each start, for koldproxy --config FILE status and the like.\n"+
		"[postgres]\ndsn = %q\ndatabases = [%q]\n[cold]\nurl = %q\n", cfg.Postgres.DSN, demoDatabase, cfg.Cold.URL)
	temporary := path + ".new"
	if err := os.WriteFile(temporary, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
