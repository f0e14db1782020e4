package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/koldproxy/koldproxy/changefeed/mqtt"
	"github.com/koldproxy/koldproxy/changefeed/sse"
	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/proxy"
)

// endpoints are the addresses that a running koldproxy listens at; nil where it does not.
type endpoints struct {
	proxy []net.Addr
	mqtt  net.Addr
	http  net.Addr
}

// listeners are the open sockets of one koldproxy.
type listeners struct {
	proxy, mqtt []net.Listener
	http        net.Listener
}

// service is one koldproxy in front of one server.
type service struct {
	cfg       *config
	running   *config // cfg with what was reloaded; for reload alone
	log       zerolog.Logger
	registry  *prometheus.Registry
	databases databases
	cold      coldstore.Bucket
	verifiers *verifiers   // nil without auth = "scram"
	broker    *mqtt.Broker // nil when turned off, as the two below
	relay     *mqtt.Relay
	events    *sse.Handler
	proxy     *proxy.Server
}

// run is the one way to start koldproxy: it opens the sockets, brings the catalog of each database up to date, and serves
// until ctx ends or a part fails. ready is called when everything accepts connections; an error of it ends run too. Each
// value from hangups, which may be nil, reloads what can be reloaded.
func run(
	ctx context.Context, cfg *config, log zerolog.Logger, hangups <-chan os.Signal, ready func(context.Context, endpoints) error,
) error {
	ls, err := listen(ctx, cfg, log)
	if err != nil {
		return errors.Join(err, ls.close())
	}
	s := &service{cfg: cfg, running: cfg, log: log, registry: prometheus.NewRegistry()}
	defer s.close()
	if err := s.open(ctx); err != nil {
		return errors.Join(unlessDone(ctx, err), ls.close())
	}
	return s.serve(ctx, ls, hangups, ready)
}

// unlessDone drops an error of work that was cut short because the person at the keyboard said so.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

func listen(ctx context.Context, cfg *config, log zerolog.Logger) (ls listeners, err error) {
	listen := proxy.Listen
	if cfg.Proxy.ReusePort {
		listen = proxy.ListenShared
	}
	for _, address := range cfg.proxyAddresses() {
		open := listen
		if strings.HasPrefix(address, systemdPrefix) {
			open = func(context.Context, string) (net.Listener, error) { return systemdListener(address) }
		}
		ln, err := open(ctx, address)
		if err != nil {
			return ls, fmt.Errorf("proxy.listen: %w", err)
		}
		ls.proxy = append(ls.proxy, ln)
	}
	if cfg.MQTT.Enabled {
		if ls.mqtt, err = listenMQTT(ctx, cfg.MQTT, log.With().Str("part", "mqtt").Logger(), listen); err != nil {
			return ls, err
		}
	}
	if cfg.HTTP.Listen != "" {
		if ls.http, err = listen(ctx, cfg.HTTP.Listen); err != nil {
			return ls, fmt.Errorf("http.listen: %w", err)
		}
	}
	return ls, nil
}

func (ls listeners) close() error {
	var errs []error
	for _, ln := range slices.Concat([]net.Listener{ls.http}, ls.mqtt, ls.proxy) {
		if ln != nil {
			errs = append(errs, ln.Close())
		}
	}
	return errors.Join(errs...)
}

func (ls listeners) endpoints() endpoints {
	var e endpoints
	for _, ln := range ls.proxy {
		e.proxy = append(e.proxy, ln.Addr())
	}
	if len(ls.mqtt) > 0 {
		e.mqtt = ls.mqtt[0].Addr()
	}
	if ls.http != nil {
		e.http = ls.http.Addr()
	}
	return e
}

// open makes all parts; nothing runs yet.
func (s *service) open(ctx context.Context) error {
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var err error
	if s.databases, err = openDatabases(ctx, s.cfg, s.log, s.registry); err != nil {
		return err
	}
	live, err := s.openLive()
	if err != nil {
		return err
	}
	bucket, err := openServerCold(ctx, s.cfg, s.log)
	if err != nil {
		return err
	}
	s.cold = bucket
	if err := s.databases.wire(bucket, live); err != nil {
		return err
	}
	pg, err := s.cfg.pgxConfig("")
	if err != nil {
		return err
	}
	pc := s.cfg.proxyConfig(pg)
	pc.Databases = s.databases.names()
	deps := proxy.Deps{
		Log:         s.log.With().Str("part", "proxy").Logger(),
		Metrics:     proxy.NewMetrics(s.registry),
		Fulfiller:   s.databases,
		StreamStats: s.databases,
		Prober:      prober{s.cfg},
	}
	if pc.Auth == proxy.AuthSCRAM {
		if s.verifiers, err = openVerifiers(ctx, s.cfg); err != nil {
			return err
		}
		deps.Verifiers = s.verifiers
	}
	s.proxy, err = proxy.New(pc, deps)
	return err
}

func (s *service) close() {
	s.verifiers.close()
	s.databases.close()
	if s.cold != nil {
		if err := closeCold(s.cold); err != nil {
			s.log.Warn().Err(err).Msg("cold storage could not be closed")
		}
	}
}

// serve runs all parts. When ctx ends it first drains the proxy, whose sessions may still need the others, and then stops
// them.
func (s *service) serve(
	ctx context.Context, ls listeners, hangups <-chan os.Signal, ready func(context.Context, endpoints) error,
) error {
	base, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	parts, partsCtx := errgroup.WithContext(base)
	front, frontCtx := errgroup.WithContext(ctx)
	front.Go(func() error {
		select {
		case <-partsCtx.Done(): // a part that fails takes the front down, too
			return errPartFailed
		case <-frontCtx.Done():
			return nil
		}
	})

	for _, db := range s.databases {
		parts.Go(func() error { return db.run(partsCtx) })
	}
	for _, ln := range ls.mqtt {
		parts.Go(func() error { return s.broker.Serve(partsCtx, ln) })
	}
	if s.relay != nil {
		parts.Go(func() error { return s.relay.Run(partsCtx) })
	}
	if ls.http != nil {
		page, err := s.statusPage(ls.http.Addr())
		if err != nil {
			return err
		}
		isReady := func() error {
			if frontCtx.Err() != nil {
				return errDraining
			}
			return s.databases.ready(partsCtx)
		}
		server := newHTTPServer(s.registry, isReady, page, s.events, s.cfg.HTTP.Pprof)
		parts.Go(func() error { return page.Run(partsCtx) })
		parts.Go(func() error { return serveHTTP(partsCtx, ls.http, server) })
	}
	for _, ln := range ls.proxy {
		front.Go(func() error { return s.proxy.Serve(frontCtx, ln) })
	}
	front.Go(func() error { return s.reloadOn(frontCtx, hangups) })
	front.Go(func() error {
		if err := s.databases.awaitReady(frontCtx); err != nil {
			return err
		}
		if err := ready(frontCtx, ls.endpoints()); err != nil {
			return err
		}
		<-frontCtx.Done() // so that a koldproxy without a proxy port runs as well
		return nil
	})

	err := front.Wait()
	stop()
	if partErr := parts.Wait(); partErr != nil {
		return partErr // the cause; the front only followed
	}
	if errors.Is(err, context.Canceled) { // told to stop while starting
		return unlessDone(ctx, err)
	}
	return err
}

var (
	errPartFailed = errors.New("a part of koldproxy failed")
	errDraining   = errors.New("koldproxy is shutting down: sessions end, newcomers are refused")
)
