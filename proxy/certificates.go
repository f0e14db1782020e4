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

// watched is a value that is made from files, and made again when they change. What was made stays as it is for those who have it. Its
// methods may be called concurrently.
type watched[T any] struct {
	log   zerolog.Logger
	value atomic.Pointer[T]

	mu      sync.Mutex // guards the fields below
	files   []string
	load    func() (*T, error)
	stamp   string // of the files as they were when they were last read
	failed  string // the error that has been logged
	checked time.Time
}

func watch[T any](files []string, load func() (*T, error), log zerolog.Logger) (*watched[T], error) {
	w := &watched[T]{log: log, files: files, load: load, stamp: stampOf(files), checked: time.Now()}
	value, err := load()
	if err != nil {
		return nil, err
	}
	w.value.Store(value)
	return w, nil
}

// current returns the newest value that could be made.
func (w *watched[T]) current() *T {
	if w.mu.TryLock() { // somebody else is looking otherwise
		defer w.mu.Unlock()
		if now := time.Now(); now.Sub(w.checked) >= recheck {
			w.checked = now
			if stamp := stampOf(w.files); stamp != w.stamp || w.failed != "" {
				_ = w.read(stamp)
			}
		}
	}
	return w.value.Load()
}

// reload reads other files, now. After an error, which is logged too, the old value and the old files stay in use.
func (w *watched[T]) reload(files []string, load func() (*T, error)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failed = "" // asked for, so it is said again
	oldFiles, oldLoad := w.files, w.load
	w.files, w.load = files, load
	err := w.read(stampOf(files))
	if err != nil {
		w.files, w.load = oldFiles, oldLoad
	}
	return err
}

// read reads the files; the caller holds mu. The stamp is taken before, so that a change while reading is seen next time.
func (w *watched[T]) read(stamp string) error {
	w.stamp = stamp
	value, err := w.load()
	if err != nil {
		if w.failed != err.Error() {
			w.log.Error().Err(err).Msg("cannot reload the TLS files, the old ones stay in use")
		}
		w.failed = err.Error()
		return err
	}
	w.failed = ""
	w.value.Store(value)
	if stamp != "" {
		w.log.Info().Msg("TLS files reloaded")
	}
	return nil
}

// stampOf changes when one of the files does.
func stampOf(files []string) string {
	var b strings.Builder
	for _, path := range files {
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

// certificates are the TLS material of a Server.
type certificates struct{ *watched[material] }

func newCertificates(cfg Config, log zerolog.Logger) (*certificates, error) {
	w, err := watch(cfg.tlsFiles(), cfg.loadTLS, log)
	return &certificates{w}, err
}

// reload reads the files that a configuration names.
func (c *certificates) reload(cfg Config) error { return c.watched.reload(cfg.tlsFiles(), cfg.loadTLS) }

func (c Config) tlsFiles() []string {
	return []string{c.TLSCert, c.TLSKey, c.ClientCA, c.ServerCA, c.ServerCert, c.ServerKey}
}

// ReloadedTLS is for koldproxy's other listeners: it shows clients the certificate in two PEM files, which are read again when they
// change, as the proxy's own are.
func ReloadedTLS(certFile, keyFile string, log zerolog.Logger) (*tls.Config, error) {
	w, err := watch([]string{certFile, keyFile}, func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		return &pair, err
	}, log)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return w.current(), nil },
	}, nil
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
