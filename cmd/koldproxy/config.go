package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pelletier/go-toml/v2"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/walapply"
)

// config is everything that can be configured. Each field carries its TOML name; keys are written section.name, also in
// error messages, --set flags and (upper case, KOLDPROXY_SECTION_NAME) environment variables.
type config struct {
	Postgres struct {
		// DSN is the service connection: a URL or key=value string of a role with REPLICATION that owns, or is member of the
		// owners of, the tables with streams and feeds. The database in it does not matter. PG* variables fill what it omits.
		DSN string `toml:"dsn"`
		// PasswordFile is a file with the service role's password, for those who keep it out of the configuration.
		PasswordFile string `toml:"password_file"`
		// Databases are those with streams and feeds, one at least; every other database is passed through as it is.
		Databases []string `toml:"databases"`
	} `toml:"postgres"`
	Proxy proxySection `toml:"proxy"`
	Apply struct {
		// BatchRows and BatchBytes bound one apply transaction while there is a backlog.
		BatchRows  int `toml:"batch_rows"`
		BatchBytes int `toml:"batch_bytes"`
		// Linger is how long a source transaction may wait for company while more is arriving. While many commit all the time,
		// koldproxy also rests up to 30 ms between batches, so that the application keeps the processors; 0 turns both off.
		Linger duration `toml:"linger"`
		// QueueBytes is how much may be received while a batch is being applied; the server waits beyond it.
		QueueBytes int `toml:"queue_bytes"`
		// LockWait is how long sessions may keep the applier waiting for a lock on what belongs to koldproxy before they are
		// terminated; 0 for ever.
		LockWait duration `toml:"lock_wait"`
		// EvalTimeout is how long code of users (predicates, checks of domains) may take over a row before the row counts as
		// one that cannot be evaluated.
		EvalTimeout duration `toml:"eval_timeout"`
		// OnGap is heal (changes that may be missing are made up for: feeds are compared with their tables, streams show a hole)
		// or stop (nothing is applied until somebody runs koldproxy heal).
		OnGap string `toml:"on_gap"`
		// WarnRetained is how much write-ahead log, in MiB, the slot may hold back before koldproxy warns; 0 never does.
		// MaxRetained is where it gives the slot up, which is a gap, rather than fill the disk; 0 never does.
		WarnRetained int `toml:"warn_retained_mib"`
		MaxRetained  int `toml:"max_retained_mib"`
	} `toml:"apply"`
	Cold struct {
		// URL is where segments of the storage named default are kept: file:///absolute/path, s3://bucket/prefix, gs://bucket/prefix or
		// azblob://container/prefix, with parameters as docs/operations.md has them. Credentials of a cloud come from the
		// environment, its configuration files or the machine's role.
		URL string `toml:"url"`
		// SecretsDir is the folder whose files credentials of registered storages may refer to. Empty: none.
		SecretsDir string `toml:"secrets_dir"`
		// FilesystemRoot is the folder in which registered storages of type filesystem may be. Empty: nowhere.
		FilesystemRoot string `toml:"filesystem_root"`
	} `toml:"cold"`
	Storage struct {
		// TTLReclaimIntervalSecs is the time in seconds between two retention sweeps; 0 turns the sweep off.
		TTLReclaimIntervalSecs int `toml:"ttl_reclaim_interval_secs"`
	} `toml:"storage"`
	MQTT mqttSection `toml:"mqtt"`
	HTTP struct {
		// Listen is the host:port of /metrics, /healthz, /readyz, /streams/ (server-sent events) and the status page. Empty turns it off.
		Listen string `toml:"listen"`
		// TokenFile is a file with what readers of the status page have to show. Without it, only clients of a loopback
		// address may look, and values of rows are left out.
		TokenFile string `toml:"token_file"`
		// Pprof serves Go's profiler at /debug/pprof/, to those who may look at the status page.
		Pprof bool `toml:"pprof"`
	} `toml:"http"`
	Log struct {
		// Level is one of debug, info, warn, error.
		Level string `toml:"level"`
	} `toml:"log"`

	origins map[string]string       // key to where its value came from
	again   func() (*config, error) // reads the same sources again; nil when there are none
}

// defaultConfig is the one place with default values.
func defaultConfig() *config {
	c := &config{origins: map[string]string{}}
	c.Proxy = defaultProxySection()
	ac := walapply.DefaultConfig("")
	c.Apply.BatchRows = ac.BatchRows
	c.Apply.BatchBytes = ac.BatchBytes
	c.Apply.Linger = duration(ac.Linger)
	c.Apply.QueueBytes, c.Apply.LockWait = ac.QueueBytes, duration(ac.LockWait)
	c.Apply.EvalTimeout = duration(changefeed.DefaultConfig("").EvalTimeout)
	c.Apply.OnGap = ac.OnGap
	c.Apply.WarnRetained, c.Apply.MaxRetained = int(ac.WarnRetainedBytes>>20), int(ac.MaxRetainedBytes>>20)
	c.Cold.URL = "file:///var/lib/koldproxy/cold"
	c.Storage.TTLReclaimIntervalSecs = 900
	c.MQTT = defaultMQTTSection()
	c.HTTP.Listen = "127.0.0.1:9632"
	c.Log.Level = "info"
	for _, f := range c.fields() {
		c.origins[f.key] = "default"
	}
	return c
}

// loadConfig reads defaults, file, environment (as os.Environ gives it) and --set flags, later ones winning. All errors are
// usage errors.
func loadConfig(opts *options, environ []string) (*config, error) {
	c := defaultConfig()
	if opts.configFile != "" {
		if err := c.readFile(opts.configFile); err != nil {
			return nil, usageError{err}
		}
	}
	var errs []error
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		errs = append(errs, c.assignEnv(name, value))
	}
	for _, kv := range opts.set {
		errs = append(errs, c.assignFlag(kv))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

// readFile reads a TOML file strictly: a key that means nothing is an error that names it.
func (c *config) readFile(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := c.checkDurations(raw); err != nil { // the decoder would take 5 for five nanoseconds
		return fmt.Errorf("%s: %w", path, err)
	}
	decoder := toml.NewDecoder(bytes.NewReader(raw)).DisallowUnknownFields()
	err = decoder.Decode(c)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		var errs []error
		for _, e := range unknown.Errors {
			row, _ := e.Position()
			errs = append(errs, fmt.Errorf("%s:%d: unknown key %s", path, row, strings.Join(e.Key(), ".")))
		}
		return errors.Join(errs...)
	case errors.As(err, &wrong):
		row, column := wrong.Position()
		return fmt.Errorf("%s:%d:%d: %s", path, row, column, c.explain(wrong))
	case err != nil:
		return fmt.Errorf("%s: %w", path, err)
	}
	present := map[string]map[string]any{}
	if err := toml.Unmarshal(raw, &present); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, f := range c.fields() {
		if _, ok := present[f.section][f.name]; ok {
			c.origins[f.key] = "file " + path
		}
	}
	return nil
}

// otherVariables have the prefix and are not meant for koldproxy: Kubernetes describes a service named koldproxy with them
// (KOLDPROXY_SERVICE_HOST, KOLDPROXY_PORT_6543_TCP_ADDR), and koldproxy's own tests have some.
var otherVariables = regexp.MustCompile(`^KOLDPROXY_(SERVICE_(HOST|PORT(_.*)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|TEST_.*)$`)

func (c *config) assignEnv(name, value string) error {
	if !strings.HasPrefix(name, "KOLDPROXY_") || otherVariables.MatchString(name) {
		return nil
	}
	for _, f := range c.fields() {
		if name == f.env() {
			return c.assign(f, value, "environment "+name)
		}
	}
	return fmt.Errorf("environment %s: unknown key", name)
}

// checkDurations refuses durations that are no strings. Whatever else is wrong with a file, the decoder says better.
func (c *config) checkDurations(raw []byte) error {
	sections := map[string]any{}
	if err := toml.Unmarshal(raw, &sections); err != nil {
		return nil //nolint:nilerr // see above
	}
	var errs []error
	for _, f := range c.fields() {
		section, _ := sections[f.section].(map[string]any)
		value, there := section[f.name]
		if _, isText := value.(string); there && !isText && f.value.Type() == reflect.TypeFor[duration]() {
			errs = append(errs, fmt.Errorf("%s: want %s, not %v", f.key, f.kind(), value))
		}
	}
	return errors.Join(errs...)
}

// explain says what is wrong with a value without naming types of Go.
func (c *config) explain(wrong *toml.DecodeError) string {
	text := strings.TrimPrefix(wrong.Error(), "toml: ")
	key := strings.Join(wrong.Key(), ".")
	for _, f := range c.fields() {
		if f.key == key && (strings.Contains(text, "cannot decode") || f.value.Kind() != reflect.String) {
			return fmt.Sprintf("%s: want %s", key, f.kind())
		}
		if f.section == key && strings.Contains(text, "cannot decode") {
			return fmt.Sprintf("%s: want a section, [%s]", key, key)
		}
	}
	return text
}

func (c *config) assignFlag(kv string) error {
	key, value, ok := strings.Cut(kv, "=")
	if !ok {
		return fmt.Errorf("--set %s…: want KEY=VALUE", beginsAsKey.FindString(kv))
	}
	for _, f := range c.fields() {
		if f.key == key {
			return c.assign(f, value, "flag --set")
		}
	}
	if beginning := beginsAsKey.FindString(key); beginning != key {
		key = beginning + "…"
	}
	return fmt.Errorf("--set %s: unknown key", key)
}

// beginsAsKey is what can be repeated of a --set that is none: the rest may be a password.
var beginsAsKey = regexp.MustCompile(`^[a-z_]*\.?[a-z_]*`)

// validate reports all problems at once, in the words of the file.
func (c *config) validate() error {
	var errs []error
	bad := func(key, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
	}
	if c.Postgres.DSN == "" {
		bad("postgres.dsn", "is missing; koldproxy init writes a configuration, --config names it")
	} else if pg, err := c.pgxConfig(""); err != nil {
		bad("postgres.dsn", "%v", err)
	} else {
		errs = append(errs, c.proxyConfig(pg).Validate(), c.applyConfig(c.Postgres.DSN).Validate())
		if low := 10 * time.Millisecond; time.Duration(c.Apply.EvalTimeout) < low {
			errs = append(errs, fmt.Errorf("apply.eval_timeout: want at least %v, not %v", low, time.Duration(c.Apply.EvalTimeout)))
		}
	}
	if len(c.Postgres.Databases) == 0 {
		bad("postgres.databases", "names no database")
	}
	for i, name := range c.Postgres.Databases {
		if name == "" || slices.Contains(c.Postgres.Databases[:i], name) {
			bad("postgres.databases", "%q is empty or named twice", name)
		}
	}
	for _, addr := range c.proxyAddresses() {
		if strings.HasPrefix(addr, systemdPrefix) {
			continue // known when it is taken over
		}
		if path, ok := strings.CutPrefix(addr, "unix:"); !ok {
			checkHostPort(bad, "proxy.listen", addr)
		} else if !filepath.IsAbs(path) {
			bad("proxy.listen", "%q is no absolute path", path)
		}
	}
	if err := checkColdURL(c.Cold.URL); err != nil {
		bad("cold.url", "%v", err)
	}
	for key, folder := range map[string]string{"cold.secrets_dir": c.Cold.SecretsDir, "cold.filesystem_root": c.Cold.FilesystemRoot} {
		if folder != "" && !filepath.IsAbs(folder) {
			bad(key, "%q is no absolute path", folder)
		}
	}
	if c.Storage.TTLReclaimIntervalSecs < 0 {
		bad("storage.ttl_reclaim_interval_secs", "is negative; 0 turns the sweep off")
	}
	c.MQTT.validate(bad)
	if c.HTTP.Listen != "" {
		checkHostPort(bad, "http.listen", c.HTTP.Listen)
	}
	if _, err := c.httpToken(); err != nil {
		bad("http.token_file", "%v", err)
	}
	if _, err := c.logLevel(); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return usageError{fmt.Errorf("the configuration cannot be used:\n%w", err)}
	}
	return nil
}

// logLevel is log.level. zerolog knows more levels, which make no sense here.
func (c *config) logLevel() (zerolog.Level, error) {
	for _, level := range []zerolog.Level{zerolog.DebugLevel, zerolog.InfoLevel, zerolog.WarnLevel, zerolog.ErrorLevel} {
		if c.Log.Level == level.String() {
			return level, nil
		}
	}
	return zerolog.NoLevel, fmt.Errorf("log.level: %q is none of debug, info, warn, error", c.Log.Level)
}

func checkHostPort(bad func(key, format string, args ...any), key, address string) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		bad(key, "%q is not host:port", address)
		return
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		bad(key, "%q has no port number", address)
	}
}

// proxyAddresses splits proxy.listen.
func (c *config) proxyAddresses() []string {
	var list []string
	for part := range strings.SplitSeq(c.Proxy.Listen, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	return list
}

// dsn is the service connection to a database, with the password of the password file; an empty name keeps the database of
// the configuration.
func (c *config) dsn(database string) (string, error) {
	return c.dsnWith(map[string]string{"dbname": database})
}

// dsnWith is the service connection with other values for some of libpq's keywords; empty ones change nothing.
func (c *config) dsnWith(changes map[string]string) (string, error) {
	extra := map[string]string{}
	for name, value := range changes {
		if value != "" {
			extra[name] = value
		}
	}
	if c.Postgres.PasswordFile != "" {
		raw, err := os.ReadFile(c.Postgres.PasswordFile)
		if err != nil {
			return "", fmt.Errorf("postgres.password_file: %w", err)
		}
		extra["password"] = strings.TrimRight(string(raw), "\r\n")
	}
	one, hosts := hostsApart(c.Postgres.DSN)
	if u, err := url.Parse(one); err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql") {
		// To PostgreSQL a plus in a URL is a plus, and no blank.
		u.RawQuery = strings.ReplaceAll(u.RawQuery, "+", "%2B")
		query := u.Query()
		for name, value := range extra {
			query.Set(name, value)
		}
		u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
		if hosts != "" {
			u.Host = ""
			scheme, rest, _ := strings.Cut(u.String(), "://")
			end := strings.IndexAny(rest+"/", "/?")
			return scheme + "://" + rest[:end] + hosts + rest[end:], nil
		}
		return u.String(), nil
	}
	dsn := c.Postgres.DSN
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	for name, value := range extra {
		dsn += " " + name + "='" + quote.Replace(value) + "'"
	}
	return dsn, nil
}

// hostsApart replaces several hosts in a postgres URL by one, if they cannot stay: a URL in general has one host, and [::1],[::2] is none.
func hostsApart(dsn string) (one, hosts string) {
	scheme, rest, ok := strings.Cut(dsn, "://")
	authority := rest[:strings.IndexAny(rest+"/", "/?#")]
	begin := strings.LastIndex(authority, "@") + 1
	if hosts = authority[begin:]; !ok || !strings.Contains(hosts, ",") || !strings.Contains(hosts, "[") {
		return dsn, ""
	}
	return scheme + "://" + authority[:begin] + "several" + rest[len(authority):], hosts
}

// pgxConfig is the parsed service connection to a database. Its errors do not repeat the DSN.
func (c *config) pgxConfig(database string) (*pgx.ConnConfig, error) {
	return c.pgxConfigWith(map[string]string{"dbname": database})
}

// pgxConfigWith is the service connection with other values for some of libpq's keywords; empty ones change nothing.
func (c *config) pgxConfigWith(changes map[string]string) (*pgx.ConnConfig, error) {
	dsn, err := c.dsnWith(changes)
	if err != nil {
		return nil, err
	}
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		if inner := errors.Unwrap(err); inner != nil {
			return nil, fmt.Errorf("cannot be used: %w", inner)
		}
		return nil, errors.New("is no connection string")
	}
	cc.RuntimeParams["application_name"] = "koldproxy"
	return cc, nil
}

// applyConfig is what package walapply has to know about one database.
func (c *config) applyConfig(dsn string) walapply.Config {
	ac := walapply.DefaultConfig(dsn)
	ac.BatchRows, ac.BatchBytes, ac.Linger = c.Apply.BatchRows, c.Apply.BatchBytes, time.Duration(c.Apply.Linger)
	ac.QueueBytes, ac.LockWait = c.Apply.QueueBytes, time.Duration(c.Apply.LockWait)
	ac.OnGap, ac.WarnRetainedBytes, ac.MaxRetainedBytes = c.Apply.OnGap, int64(c.Apply.WarnRetained)<<20, int64(c.Apply.MaxRetained)<<20
	return ac
}

// duration is a time.Duration that TOML and environment variables spell as "1m30s".
type duration time.Duration

// UnmarshalText reads Go's spelling of durations.
func (d *duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = duration(parsed)
	return err
}

// MarshalText writes the same spelling.
func (d duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }
