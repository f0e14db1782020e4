package proxy

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
)

// recheck is how often the TLS files are looked at for changes, at most: a new connection looks, nothing does so in the
// background.
const recheck = time.Second

// material is what the TLS files say.
type material struct {
	client *tls.Config // towards clients; nil when off
	server *tls.Config // towards the server; nil when off
}

// certificates holds the TLS material of a Server and reads it again when its files change. Connections that exist are not
// touched. Its methods may be called concurrently.
type certificates struct {
	log   zerolog.Logger
	value atomic.Pointer[material]

	mu      sync.Mutex // guards the fields below
	cfg     Config
	stamp   string // of the files as they were when they were last read
	failed  string // the error that has been logged
	checked time.Time
}

func newCertificates(cfg Config, log zerolog.Logger) (*certificates, error) {
	c := &certificates{cfg: cfg, log: log, checked: time.Now(), stamp: cfg.tlsStamp()}
	m, err := cfg.loadTLS()
	if err != nil {
		return nil, err
	}
	c.value.Store(m)
	return c, nil
}

// current returns the newest material that could be read.
func (c *certificates) current() *material {
	if c.mu.TryLock() { // somebody else is looking otherwise
		defer c.mu.Unlock()
		if now := time.Now(); now.Sub(c.checked) >= recheck {
			c.checked = now
			if stamp := c.cfg.tlsStamp(); stamp != c.stamp || c.failed != "" {
				_ = c.read(stamp)
			}
		}
	}
	return c.value.Load()
}

// reload reads the files that a configuration names, now. After an error, which is logged too, the old material and the old
// configuration stay in use.
func (c *certificates) reload(cfg Config) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = "" // asked for, so it is said again
	old := c.cfg
	c.cfg = cfg
	err := c.read(cfg.tlsStamp())
	if err != nil {
		c.cfg = old
	}
	return err
}

// read reads the files; the caller holds mu. The stamp is taken before, so that a change while reading is seen next time.
func (c *certificates) read(stamp string) error {
	c.stamp = stamp
	m, err := c.cfg.loadTLS()
	if err != nil {
		if c.failed != err.Error() {
			c.log.Error().Err(err).Msg("cannot reload the TLS files, the old ones stay in use")
		}
		c.failed = err.Error()
		return err
	}
	c.failed = ""
	c.value.Store(m)
	if stamp != "" {
		c.log.Info().Msg("TLS files reloaded")
	}
	return nil
}

// tlsStamp changes when one of the TLS files does.
func (c Config) tlsStamp() string {
	var b strings.Builder
	for _, path := range []string{c.TLSCert, c.TLSKey, c.ClientCA, c.ServerCA, c.ServerCert, c.ServerKey} {
		if path == "" {
			continue
		}
		if info, err := os.Stat(path); err == nil {
			fmt.Fprintf(&b, "%d %d,", info.ModTime().UnixNano(), info.Size())
		} else {
			b.WriteString("missing,")
		}
	}
	return b.String()
}

func (c Config) loadTLS() (*material, error) {
	client, err := c.clientTLS()
	if err != nil {
		return nil, err
	}
	server, err := c.serverTLS()
	if err != nil {
		return nil, err
	}
	return &material{client, server}, nil
}

// baseTLS is what both sides have in common.
func baseTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{alpn},
		// PostgreSQL has no session tickets, and clients that would use them are rare.
		SessionTicketsDisabled: true,
		// Small records first are meant for browsers; here they cost throughput.
		DynamicRecordSizingDisabled: true,
	}
}

// clientTLS loads what is shown to clients; nil means that TLS is off.
func (c Config) clientTLS() (*tls.Config, error) {
	if c.ClientTLS == TLSDisable {
		return nil, nil
	}
	config := baseTLS()
	certificate, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("load proxy.tls_cert and proxy.tls_key: %w", err)
	}
	config.Certificates = []tls.Certificate{certificate}
	if c.ClientCA != "" {
		if config.ClientCAs, err = loadCA(c.ClientCA); err != nil {
			return nil, fmt.Errorf("load proxy.client_ca: %w", err)
		}
		// One that is missing is an error with words, later (clientPolicy.permits), and none for a cancel request.
		config.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return config, nil
}

// serverTLS loads what is needed towards the server; nil means that TLS is off. ServerName is left to be set.
func (c Config) serverTLS() (*tls.Config, error) {
	if c.ServerTLS == ServerTLSDisable {
		return nil, nil
	}
	config := baseTLS()
	if c.ServerCert != "" {
		certificate, err := tls.LoadX509KeyPair(c.ServerCert, c.ServerKey)
		if err != nil {
			return nil, fmt.Errorf("load proxy.server_cert and proxy.server_key: %w", err)
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	if c.ServerCA != "" {
		roots, err := loadCA(c.ServerCA)
		if err != nil {
			return nil, fmt.Errorf("load proxy.server_ca: %w", err)
		}
		config.RootCAs = roots
	}
	switch c.ServerTLS {
	case ServerTLSPrefer, ServerTLSRequire:
		config.InsecureSkipVerify = true // they encrypt and verify nothing, as in libpq
	case ServerTLSVerifyCA:
		config.InsecureSkipVerify = true // all but the name is verified here:
		config.VerifyConnection = chainOnly(config.RootCAs)
	}
	return config, nil
}

func loadCA(path string) (*x509.CertPool, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return nil, errors.New("no certificates in " + path)
	}
	return pool, nil
}
