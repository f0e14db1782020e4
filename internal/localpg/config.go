package localpg

import (
	"errors"
	"time"
)

// Config says what kind of cluster [Start] makes. The zero value is a throw-away cluster for tests.
type Config struct {
	// BinDir holds postgres and initdb; empty means [FindBinaries] decides.
	BinDir string
	// Dir is a folder that keeps the cluster's data and log between runs; it is made if missing. Empty means a temporary
	// folder that Stop removes. One process at a time can use a Dir.
	Dir string
	// Host is the address to listen on; default 127.0.0.1.
	Host string
	// Port is the TCP port; 0 means a free one.
	Port int
	// SocketOnly turns TCP off; Port then only names the Unix socket.
	SocketOnly bool
	// Superuser is the bootstrap role; default "postgres". It counts when the data directory is made, not later.
	Superuser string
	// Password is the bootstrap role's password; default is a random one. Required with Dir.
	Password string
	// Durable keeps fsync and full_page_writes on. A temporary cluster has no use for them and is much faster without.
	Durable bool
	// Settings are further server settings (name to value); they win over those that Start chooses.
	Settings map[string]string
	// HBA are lines for pg_hba.conf in front of the rule that asks everybody for a SCRAM password.
	HBA []string
	// StartTimeout bounds how long the server may take until it accepts connections, crash recovery included; default
	// one minute.
	StartTimeout time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.Dir != "" && c.Password == "" {
		return c, errors.New("a kept cluster needs a password that the next start knows too")
	}
	if c.Host == "" {
		c.Host = "127.0.0.1"
	}
	if c.Superuser == "" {
		c.Superuser = "postgres"
	}
	if c.Password == "" {
		c.Password = randomName(24)
	}
	if c.StartTimeout == 0 {
		c.StartTimeout = time.Minute
	}
	return c, nil
}
