package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/changefeed/mqtt"
	"github.com/koldproxy/koldproxy/changefeed/sse"
	"github.com/koldproxy/koldproxy/proxy"
)

// publishers hand each event to all ways of live push.
type publishers []changefeed.Publisher

func (p publishers) Publish(topic string, payload []byte) {
	for _, one := range p {
		one.Publish(topic, payload)
	}
}

func (p publishers) Consumers(topic string) (n int) {
	for _, one := range p {
		n += one.Consumers(topic)
	}
	return n
}

func (p publishers) Wants(topic string) bool {
	return slices.ContainsFunc(p, func(one changefeed.Publisher) bool { return one.Wants(topic) })
}

// local are those whose subscribers are connected to this instance. The others are told by the instance that leads.
func (p publishers) local() publishers {
	return slices.DeleteFunc(slices.Clone(p), func(one changefeed.Publisher) bool {
		_, elsewhere := one.(*mqtt.Relay)
		return elsewhere
	})
}

// sseAuth is the broker's view of who may do what, for server-sent events.
type sseAuth struct {
	*mqtt.PostgresAuth
	rights *mqtt.Rights // many clients ask the same
}

// MaySubscribe is asked by every client all the time.
func (a sseAuth) MaySubscribe(ctx context.Context, user, topic string) (bool, error) {
	return a.rights.MaySubscribe(ctx, user, topic)
}

// Refused says whether a login failed because PostgreSQL said no.
func (sseAuth) Refused(err error) bool { return errors.Is(err, mqtt.ErrRefused) }

// NoPassword says whether a login failed because PostgreSQL asks for no password.
func (sseAuth) NoPassword(err error) bool { return errors.Is(err, mqtt.ErrNoPassword) }

// openLive makes the parts of live push. Nothing runs yet; without any, nobody receives events but those who LISTEN.
func (s *service) openLive() (publishers, error) {
	login, err := s.cfg.pgxConfig("")
	if err != nil {
		return nil, err
	}
	auth := mqtt.NewPostgresAuth(login, s.databases.pools())
	log := s.log.With().Str("part", "mqtt").Logger()
	var all publishers
	if s.cfg.MQTT.Enabled {
		if s.broker, err = mqtt.New(mqtt.DefaultConfig(), auth, log, s.registry); err != nil {
			return nil, err
		}
		all = append(all, s.broker)
	}
	if s.cfg.MQTT.URL != "" {
		if s.relay, err = mqtt.NewRelay(s.cfg.MQTT.relay(), log, s.registry); err != nil {
			return nil, err
		}
		all = append(all, s.relay)
	}
	if s.cfg.HTTP.Listen != "" {
		s.events = sse.New(sse.DefaultConfig(), sseAuth{auth, mqtt.NewRights(mqtt.DefaultConfig(), auth)}, s.databases.pools(), s.log.With().Str("part", "sse").Logger())
		all = append(all, s.events)
	}
	return all, nil
}

// listenMQTT opens the broker's listeners. On an error those that are open come along.
func listenMQTT(
	ctx context.Context, m mqttSection, log zerolog.Logger, listen func(context.Context, string) (net.Listener, error),
) (all []net.Listener, err error) {
	for _, l := range m.listeners() {
		if l.address == "" {
			continue
		}
		ln, err := listen(ctx, l.address)
		if err != nil {
			return all, fmt.Errorf("%s: %w", l.key, err)
		}
		if l.tls {
			secure, err := proxy.ReloadedTLS(m.TLSCert, m.TLSKey, log)
			if err != nil {
				return append(all, ln), fmt.Errorf("mqtt.tls_cert: %w", err)
			}
			ln = tls.NewListener(ln, secure)
		}
		if l.ws {
			ln = mqtt.WebsocketListener(ln)
		}
		all = append(all, ln)
	}
	return all, nil
}
