package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

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

// watch is what somebody wants to know of a koldproxy. An error of one of its functions ends run.
type watch struct {
	// listening is called once, when all sockets are open and sessions are forwarded.
	listening func(endpoints) error
	// ready is called once, when the changes of every database are applied for the first time.
	ready func(context.Context, endpoints) error
	// state, which may be nil, is called with what keeps changes from being applied, and with nil when nothing does, at each
	// change of that. drain, which may be nil, is called when sessions are being ended.
	state func(error) error
	drain func() error
}

// run is the one way to start koldproxy: it opens the sockets and forwards sessions at once. Each database comes in when its
// server lets it: the catalog is brought up to date, and changes are applied. run serves until ctx ends. Only what can never work
// ends it with an error: a socket that cannot be opened, a file that cannot be read. Each value from hangups, which may be nil,
// reloads what can be reloaded.
func run(ctx context.Context, cfg *config, log zerolog.Logger, hangups <-chan os.Signal, w watch) error {
	ls, err := listen(ctx, cfg, log)
	if err != nil {
		return errors.Join(err, ls.close())
	}
	s := &service{cfg: cfg, running: cfg, log: log, registry: prometheus.NewRegistry()}
	defer s.close()
	if err := s.open(ctx); err != nil {
		return errors.Join(unlessDone(ctx, err), ls.close())
	}
	return s.serve(ctx, ls, hangups, w)
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
	bucket, err := openServerCold(ctx, s.cfg)
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
func (s *service) serve(ctx context.Context, ls listeners, hangups <-chan os.Signal, w watch) error {
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
	parts.Go(func() error {
		makeColdFolder(partsCtx, s.cold, s.log)
		return nil
	})
	if s.verifiers != nil {
		parts.Go(func() error {
			s.verifiers.await(partsCtx, s.log)
			return nil
		})
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
	front.Go(func() error { return w.follow(frontCtx, ls.endpoints(), s.databases.ready) }) // also without a proxy port

	err := front.Wait()
	stop()
	if partErr := parts.Wait(); partErr != nil {
		return partErr // the cause; the front only followed
	}
	return err
}

// How often watch looks at readiness: often at first, and from time to time once changes are applied.
const (
	watchMin  = 20 * time.Millisecond
	watchMax  = time.Second
	watchRest = 10 * time.Second
)

// follow calls the functions of w until ctx ends. ready says what keeps changes from being applied.
func (w watch) follow(ctx context.Context, e endpoints, ready func(context.Context) error) error {
	if err := w.listening(e); err != nil {
		return err
	}
	told, wasReady := "", false
	for pause := watchMin; ctx.Err() == nil; pause = min(2*pause, watchMax) {
		state := ready(ctx)
		if ctx.Err() != nil {
			break // which is why it is not ready
		}
		if text := fmt.Sprint(state); text != told && w.state != nil {
			told = text
			if err := w.state(state); err != nil {
				return err
			}
		}
		wait := pause
		if state == nil {
			wait = watchRest
		}
		if state == nil && !wasReady {
			wasReady = true
			if err := w.ready(ctx, e); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	if w.drain != nil {
		return w.drain()
	}
	return nil
}

var (
	errPartFailed = errors.New("a part of koldproxy failed")
	errDraining   = errors.New("koldproxy is shutting down: sessions end, newcomers are refused")
)
