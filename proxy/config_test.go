package proxy

import (
	"strings"
	"testing"
)

func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err == nil {
		t.Error("the zero Config is valid")
	}
	cfg := DefaultConfig()
	cfg.Upstream = "localhost"
	cfg.ServerTLS = TLSRequire
	cfg.ClientTLS = "sometimes"
	cfg.MaxConnections = 0
	err := cfg.Validate()
	for _, name := range []string{"proxy.upstream", "proxy.server_tls", "proxy.client_tls", "proxy.max_connections"} {
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
