package proxy

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err == nil {
		t.Error("the zero Config is valid")
	}
	cfg := DefaultConfig()
	cfg.Upstream = "localhost"
	cfg.ServerTLS = "always"
	cfg.ClientTLS = "sometimes"
	cfg.Auth = "maybe"
	cfg.MaxConnections = 0
	err := cfg.Validate()
	for _, name := range []string{"proxy.upstream", "proxy.server_tls", "proxy.client_tls", "proxy.auth", "proxy.max_connections"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not reported: %v", name, err)
		}
	}
	cfg = DefaultConfig()
	cfg.Upstream = "unix:/tmp/.s.PGSQL.5432"
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}

func TestLoopsThatCannotBeHadAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		loops int
		poll  time.Duration
		want  string // empty: it is possible
	}{
		{"as many as fit", 0, 0, ""},
		{"none", -1, 0, ""},
		{"polling in none", -1, time.Microsecond, "only event loops"},
		{"polling backwards", 0, -time.Microsecond, "must be between"},
		{"polling for long", 0, time.Second, "must be between"},
		{"two", 2, 0, map[bool]string{false: "there are none on " + runtime.GOOS}[loopsExist]},
		{"two that poll", 2, time.Millisecond, map[bool]string{false: "there are none on " + runtime.GOOS}[loopsExist]},
	} {
		cfg := DefaultConfig()
		cfg.Upstream, cfg.EventLoops, cfg.BusyPoll = "localhost:5432", c.loops, c.poll
		err := cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestImpossibleTLSIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		set  func(*Config)
		want string // empty: it is possible
	}{
		{"verify-full with the system's authorities", func(c *Config) { c.ServerTLS = ServerTLSVerifyFull }, ""},
		{"verify-ca without authorities", func(c *Config) { c.ServerTLS = ServerTLSVerifyCA }, "needs proxy.server_ca"},
		{
			"authorities that nobody looks at",
			func(c *Config) { c.ServerTLS, c.ServerCA = ServerTLSRequire, "ca.pem" }, `or leave server_ca out`,
		},
		{"direct without TLS", func(c *Config) { c.ServerTLSNegotiation = NegotiationDirect }, `or the negotiation to "postgres"`},
		{
			"direct with a fallback",
			func(c *Config) { c.ServerTLS, c.ServerTLSNegotiation = ServerTLSPrefer, NegotiationDirect }, `or the negotiation to "postgres"`,
		},
		{"direct", func(c *Config) { c.ServerTLS, c.ServerTLSNegotiation = ServerTLSRequire, NegotiationDirect }, ""},
		{"unknown negotiation", func(c *Config) { c.ServerTLSNegotiation = "later" }, "must be postgres or direct"},
		{"preferring TLS on a Unix socket", func(c *Config) { c.Upstream, c.ServerTLS = "unix:/s", ServerTLSPrefer }, ""},
		{
			"requiring TLS on a Unix socket",
			func(c *Config) { c.Upstream, c.ServerTLS = "unix:/s", ServerTLSRequire }, "or reach the server by host:port",
		},
		{"half a certificate", func(c *Config) { c.ServerTLS, c.ServerCert = ServerTLSRequire, "c.pem" }, "needs proxy.server_key"},
		{
			"a certificate without TLS",
			func(c *Config) { c.ServerCert, c.ServerKey = "c.pem", "k.pem" }, "or leave server_cert out",
		},
		{"client TLS without a certificate", func(c *Config) { c.ClientTLS = TLSAllow }, "needs proxy.tls_cert and proxy.tls_key"},
		{"client certificates without TLS", func(c *Config) { c.ClientCA = "ca.pem" }, "or leave client_ca out"},
		{
			"client certificates that can be evaded", func(c *Config) {
				c.ClientTLS, c.TLSCert, c.TLSKey, c.ClientCA = TLSAllow, "c.pem", "k.pem", "ca.pem"
			}, `or client_cert to "optional"`,
		},
		{"client certificates as one likes", func(c *Config) {
			c.ClientTLS, c.TLSCert, c.TLSKey, c.ClientCA, c.ClientCert = TLSAllow, "c.pem", "k.pem", "ca.pem", ClientCertOptional
		}, ""},
		{"unknown client_cert", func(c *Config) { c.ClientCert = "never" }, "must be optional, verify-ca or verify-full"},
	} {
		cfg := DefaultConfig()
		cfg.Upstream = "localhost:5432"
		c.set(&cfg)
		err := cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	cfg := DefaultConfig()
	cfg.Upstream, cfg.Auth = "localhost:5432", AuthSCRAM
	if _, err := New(cfg, Deps{}); err == nil || !strings.Contains(err.Error(), "proxy.auth") {
		t.Errorf("scram without verifiers: %v", err)
	}
}
