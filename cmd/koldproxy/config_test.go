package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "koldproxy.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const goodConfig = `
[postgres]
dsn = "postgres://koldproxy:geheim@db.internal/app"
databases = ["app"]
[proxy]
listen = "127.0.0.1:7000, unix:/run/koldproxy/.s.PGSQL.7000"
drain_timeout = "10s"
`

func TestLaterSourcesWin(t *testing.T) {
	t.Parallel()
	path := writeConfig(t, goodConfig)
	c, err := loadConfig(
		&options{configFile: path, set: []string{"http.listen=127.0.0.1:1", "postgres.databases=a, b"}},
		[]string{"KOLDPROXY_HTTP_LISTEN=127.0.0.1:2", "KOLDPROXY_MQTT_ENABLED=true", "KOLDPROXY_PORT=tcp://10.0.0.1:6543", "HOME=/"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"proxy.drain_timeout": "file " + path,
		"http.listen":         "flag --set",
		"mqtt.enabled":        "environment KOLDPROXY_MQTT_ENABLED",
		"mqtt.listen":         "default",
		"postgres.databases":  "flag --set",
	} {
		if got := c.origins[key]; got != want {
			t.Errorf("%s comes from %q, want %q", key, got, want)
		}
	}
	if c.HTTP.Listen != "127.0.0.1:1" || !c.MQTT.Enabled || time.Duration(c.Proxy.DrainTimeout) != 10*time.Second {
		t.Errorf("wrong values: %+v", c)
	}
	if strings.Join(c.Postgres.Databases, "|") != "a|b" {
		t.Errorf("databases are %q", c.Postgres.Databases)
	}
	if got := strings.Join(c.proxyAddresses(), "|"); got != "127.0.0.1:7000|unix:/run/koldproxy/.s.PGSQL.7000" {
		t.Errorf("addresses are %q", got)
	}
}

func TestEveryKeyCanBeSetFromText(t *testing.T) {
	t.Parallel()
	c := defaultConfig()
	for _, f := range c.fields() {
		text := map[string]string{"bool": "true", "int": "7", "int64": "7s"}[f.value.Kind().String()]
		if err := c.assign(f, text, "test"); err != nil {
			t.Errorf("%s: %v", f.key, err)
		}
	}
}

func TestUnknownKeysAreNamed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"[proxy]\nlisten = \"x\"\nlistne = \"y\"":    ":3: unknown key proxy.listne",
		"[prox]\nlisten = \"y\"":                     "unknown key prox",
		"[proxy]\nlisten = 5":                        ":2:10: proxy.listen: want a string",
		"[postgres]\ndatabases = \"app\"":            `:2:13: postgres.databases: want a list of strings, as ["app"]`,
		"[mqtt]\nenabled = \"yes\"":                  "mqtt.enabled: want true or false",
		"proxy = 5":                                  "proxy: want a section, [proxy]",
		"[proxy]\ndrain_timeout = \"soon\"":          `:2:17: proxy.drain_timeout: want a duration, as "1m30s"`,
		"[proxy]\ndrain_timeout = \"5 parsecs\"":     "proxy.drain_timeout: want a duration",
		"[proxy]\ndrain_timeout = 3":                 `proxy.drain_timeout: want a duration, as "1m30s", not 3`,
		"proxy.drain_timeout = 3.5":                  `proxy.drain_timeout: want a duration, as "1m30s", not 3.5`,
		"apply = {linger = 5, lock_wait = true}":     "apply.linger: want a duration",
		"[apply]\nbatch_rows = 99999999999999999999": ":2:14: apply.batch_rows: want a whole number",
		"[proxy\n": ":1:",
		"[storage]\nttl_reclaim_interval_secs=1.5": "ttl_reclaim_interval_secs",
	} {
		_, err := loadConfig(&options{configFile: writeConfig(t, text)}, nil)
		var usage usageError
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, &usage) {
			t.Errorf("%q: error %v, want a usage error with %q", text, err, want)
		}
	}
	for name, known := range map[string]bool{
		"KOLDPROXY_PROXY_LISTNE=x": false, "KOLDPROXY_": false, "KOLDPROXY_SERVICES=x": false, "KOLDPROXY_PORTS=5": false,
		"KOLDPROXY_SERVICE_HOST=10.0.0.1": true, "KOLDPROXY_SERVICE_PORT_PSQL=6543": true, "KOLDPROXY_PORT_6543_TCP_ADDR=10.0.0.1": true, "KOLDPROXYX=1": true,
	} {
		if _, err := loadConfig(&options{}, []string{name}); (err == nil) != known || err != nil && !strings.Contains(err.Error(), "unknown key") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	for set, want := range map[string]string{
		"proxy.listne=x": "unknown key", "proxy.listen": "want KEY=VALUE", "mqtt.enabled=perhaps": `mqtt.enabled (flag --set): want true or false, not "perhaps"`,
		"apply.batch_rows=99999999999999999999": "apply.batch_rows (flag --set): want a whole number", "apply.linger=5": `apply.linger (flag --set): want a duration, as "1m30s", not "5"`,
		`postgres.databases=["a", 5]`: "postgres.databases (flag --set): want a list of strings", `postgres.databases=["a`: "want a list of strings",
	} {
		if _, err := loadConfig(&options{set: []string{set}}, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("--set %s: %v", set, err)
		}
	}
}

// What config print shows of a list can be given back, with --set and in the environment.
func TestListsAreReadAsTheyAreShown(t *testing.T) {
	t.Parallel()
	for _, list := range [][]string{{"app"}, {"a", "b"}, {`quo"ted`, "com,ma", "sp ace", "[x]"}, {}} {
		c := defaultConfig()
		for _, f := range c.fields() {
			if f.key != "postgres.databases" {
				continue
			}
			text := f.toml(list)
			for _, opts := range []struct {
				set, environ []string
			}{{set: []string{f.key + "=" + text}}, {environ: []string{f.env() + "=" + text}}} {
				got, err := loadConfig(&options{set: opts.set}, opts.environ)
				if err != nil || !slices.Equal(got.Postgres.Databases, list) {
					t.Errorf("%s is read as %q, %v", text, got.Postgres.Databases, err)
				}
			}
		}
	}
}

func TestValidateReportsAllProblemsAtOnce(t *testing.T) {
	t.Parallel()
	c, err := loadConfig(&options{set: []string{
		"postgres.dsn=postgres://h/d?sslmode=nonsense", "postgres.databases=a,a", "proxy.listen=nowhere", "cold.url=s3://key:secret@bucket", "cold.secrets_dir=secrets",
		"storage.ttl_reclaim_interval_secs=-1", "mqtt.enabled=true", "mqtt.listen=host:port", "http.listen=9632", "log.level=trace",
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = c.validate()
	if err == nil {
		t.Fatal("nothing is wrong")
	}
	for _, key := range []string{
		"postgres.dsn", "postgres.databases", "proxy.listen", "cold.url", "cold.secrets_dir", "storage.ttl_reclaim_interval_secs", "mqtt.listen", "http.listen", "log.level",
	} {
		if !strings.Contains(err.Error(), key+": ") {
			t.Errorf("%s is missing in:\n%v", key, err)
		}
	}
}

func TestValidateAsksThePackages(t *testing.T) {
	t.Parallel()
	c, err := loadConfig(&options{set: []string{
		"postgres.dsn=postgres://h/d", "postgres.databases=d", "proxy.client_tls=require", "proxy.server_tls=verify-ca", "proxy.max_connections=0", "apply.batch_rows=0",
		"proxy.event_loops=-1", "proxy.busy_poll=50us",
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = c.validate()
	for _, key := range []string{"proxy.client_tls", "proxy.server_tls", "proxy.max_connections", "proxy.busy_poll", "apply.batch_rows"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s is missing in:\n%v", key, err)
		}
	}
}

func TestSecretsAreNeverPrinted(t *testing.T) {
	t.Parallel()
	for _, dsn := range []string{
		"postgres://koldproxy:geheim@db.internal/app",
		"postgres://koldproxy@db.internal/app?password=geheim",
		"host=db.internal user=koldproxy password=geheim dbname=app",
		`host=db.internal password = 'ge\'heim geheim' dbname=app`,
	} {
		for _, format := range [][]string{nil, {"--json"}} {
			var out, errOut bytes.Buffer
			args := append([]string{"config", "print", "--set", "postgres.dsn=" + dsn}, format...)
			if code := execute(t.Context(), args, &out, &errOut); code != exitFine {
				t.Fatalf("%s: exit code %d, %s", dsn, code, errOut.String())
			}
			if strings.Contains(out.String(), "heim") || !strings.Contains(out.String(), "db.internal") {
				t.Errorf("%s is printed as\n%s", dsn, out.String())
			}
		}
	}
	// Whoever prints the configuration because a connection string does not work has one that cannot be understood.
	for _, between := range []string{"#", "/", "?", "%zz", " ", "@", ":", "&", "=", "'", `"`, `\`, "\n", " host=", "?x=", "#@", "/@", "?@", "@[", "[", "%40", "://", "'a b"} {
		for _, secret := range []string{"qxz" + between + "qvz", "12" + between + "qvz", "qxz" + between} {
			for key, texts := range map[string][]string{
				"postgres.dsn": {
					"postgres://koldproxy:P@h/app", "postgres://koldproxy:P@h:nonsense/app", "postgres://koldproxy:P@[::1]:5432,[::2]:5432/app", " postgres://koldproxy:P@h/app",
					"postgres://koldproxy:P@h/app\n", "//koldproxy:P@h/app", "koldproxy:P@h/app", "postgres:koldproxy:P@h/app", "postgres://h/app?password=P",
					"postgres://h/app?sslpassword=P&x=%zz", "host=h password=P user=u", "host=h password='P' user=u", "host=h password=P", "host h password P", "P",
				},
				"mqtt.url": {"mqtt://relay:P@h:1883", "relay:P@h:1883", "mqtt://relay:P@h:nonsense", "mqtt://relay:P@h\n"},
				"cold.url": {"s3://key:P@bucket/x", "s3://bucket/x?secret_access_key=P", "s3:/key:P@bucket"},
			} {
				for _, text := range texts {
					text = strings.ReplaceAll(text, "P", secret)
					c := defaultConfig()
					if err := c.assignFlag(key + "=" + text); err != nil {
						t.Fatal(err)
					}
					for _, f := range c.fields() {
						if f.key != key {
							continue
						}
						if shown := fmt.Sprint(f.shown()); strings.Contains(shown, "qxz") || strings.Contains(shown, "qvz") {
							t.Errorf("%s = %q is shown as %q", key, text, shown)
						}
					}
				}
			}
			for _, set := range []string{"postgres.dsn postgres://u:" + secret + "@h", "postgres.dsn:" + secret, "postgres://u:" + secret + "@h?x=y"} {
				_, err := loadConfig(&options{set: []string{set}}, nil)
				if text := fmt.Sprint(err); err == nil || strings.Contains(text, "qvz") || strings.Contains(text, "qxz") {
					t.Errorf("--set %q: %v", set, err)
				}
			}
		}
	}
	for text, want := range map[string]string{
		"postgres://u:p@h:5432,g:5433/app?sslmode=require":  "postgres://u:xxxxx@h:5432,g:5433/app?sslmode=require",
		"postgres://u:p#q@h/app":                            "postgres://xxxxx@h/app",
		"postgres://u:p@[::1]:5432,[::2]:5432/app?sslkey=k": "postgres://xxxxx@[::1]:5432,[::2]:5432/app?sslkey=xxxxx",
		"host='my host' user = u password='p \\' q' port=":  "host='my host' user=u password=xxxxx port=",
		"host=h pasword=p":                                  "xxxxx",
		"":                                                  "",
	} {
		if got := maskDSN(text); got != want {
			t.Errorf("%s is shown as %s, want %s", text, got, want)
		}
	}
	c := defaultConfig()
	c.Postgres.Databases = []string{"app"}
	c.Postgres.DSN = "postgres://koldproxy:geheim@db.internal/app?sslmode=nonsense"
	if err := c.validate(); err == nil || strings.Contains(err.Error(), "geheim") {
		t.Errorf("the error shows the password: %v", err)
	}
}

func TestPasswordFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(path, []byte("ge'h\\eim\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := defaultConfig()
	c.Postgres.PasswordFile = path
	for _, dsn := range []string{"postgres://koldproxy@db.internal/app", "host=db.internal user=koldproxy dbname=app"} {
		c.Postgres.DSN = dsn
		pg, err := c.pgxConfig(`o'th\er`)
		if err != nil || pg.Password != `ge'h\eim` || pg.Database != `o'th\er` || pg.Host != "db.internal" || pg.User != "koldproxy" {
			t.Errorf("%s: password %q, database %q, %v", dsn, pg.Password, pg.Database, err)
		}
	}
	c.Postgres.PasswordFile += ".missing"
	if err := c.validate(); err == nil || !strings.Contains(err.Error(), "postgres.password_file") {
		t.Errorf("a missing password file: %v", err)
	}
}

func TestProxyUpstreamComesFromTheDSN(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]string{
		"postgres://db.internal/app":            "db.internal:5432",
		"postgres://db.internal:6000/app":       "db.internal:6000",
		"host=/run/postgresql dbname=app":       "unix:/run/postgresql/.s.PGSQL.5432",
		"postgres:///app?host=/run/p&port=6000": "unix:/run/p/.s.PGSQL.6000",
		"postgres://[::1]:6000/app":             "[::1]:6000",
	} {
		c := defaultConfig()
		c.Postgres.DSN = dsn
		pg, err := c.pgxConfig("")
		if err != nil {
			t.Fatal(err)
		}
		if got := c.proxyConfig(pg).Upstream; got != want {
			t.Errorf("%s: upstream %q, want %q", dsn, got, want)
		}
	}
}
