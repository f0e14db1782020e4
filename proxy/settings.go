package proxy

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// settings are a Config together with what follows from it. They are immutable: a reload makes new ones, and a connection
// keeps those that it began with.
type settings struct {
	Config
	endpoints []endpoint
	sources   sources
}

func newSettings(cfg Config) (*settings, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	endpoints, err := parseEndpoints(cfg.Upstream)
	if err != nil {
		return nil, err
	}
	from, err := parseSources(cfg.ProxyProtocolFrom)
	return &settings{Config: cfg, endpoints: endpoints, sources: from}, err
}

// fixed are the fields that Reload cannot change, by their names in the configuration file: they are in use in ways that
// sessions share, or decided what New had to prepare.
var fixed = map[string]string{
	"Auth":         "proxy.auth",
	"Databases":    "postgres.databases",
	"MaxCancels":   "proxy.max_cancels",
	"InspectBytes": "proxy.inspect_bytes",
	"HoldBytes":    "proxy.hold_bytes",
	"EventLoops":   "proxy.event_loops",
	"BusyPoll":     "proxy.busy_poll",
}

// Reload puts a new configuration in force for connections that come from now on, and reads the TLS files again.
// Connections that exist go on as they began. It returns the names of those keys whose change needs a restart, which keep
// their values. After an error everything stays as it was.
func (s *Server) Reload(cfg Config) (needRestart []string, err error) {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	old := reflect.ValueOf(s.current().Config)
	next := reflect.ValueOf(&cfg).Elem()
	for field, key := range fixed {
		if was, now := old.FieldByName(field), next.FieldByName(field); !reflect.DeepEqual(was.Interface(), now.Interface()) {
			needRestart = append(needRestart, key)
			now.Set(was)
		}
	}
	slices.Sort(needRestart)
	set, err := newSettings(cfg)
	if err != nil {
		return nil, err
	}
	if err := s.needs(set); err != nil {
		return nil, err
	}
	if err := s.certs.reload(cfg); err != nil {
		return nil, err
	}
	s.settings.Store(set)
	return needRestart, nil
}

// current are the settings for a connection that begins now.
func (s *Server) current() *settings { return s.settings.Load() }

// sources are the networks from which a PROXY header comes.
type sources struct {
	networks []netip.Prefix
	unix     bool
}

// sourceUnix stands for clients of Unix sockets.
const sourceUnix = "unix"

// parseSources understands networks in CIDR notation, addresses, and "unix".
func parseSources(list []string) (sources, error) {
	var s sources
	for _, text := range list {
		if text == sourceUnix {
			s.unix = true
			continue
		}
		if !strings.Contains(text, "/") {
			address, err := netip.ParseAddr(text)
			if err != nil {
				return s, fmt.Errorf("%q is neither a network as 10.0.0.0/8, nor an address, nor unix", text)
			}
			s.networks = append(s.networks, netip.PrefixFrom(address.Unmap(), address.Unmap().BitLen()))
			continue
		}
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return s, fmt.Errorf("%q is neither a network as 10.0.0.0/8, nor an address, nor unix", text)
		}
		if network != network.Masked() {
			return s, fmt.Errorf("%q has bits behind its mask; %q is the network", text, network.Masked())
		}
		s.networks = append(s.networks, network)
	}
	return s, nil
}

// include says whether connections of a peer begin with a PROXY header.
func (s sources) include(p peer) bool {
	if p.isUnix() {
		return s.unix
	}
	return slices.ContainsFunc(s.networks, func(n netip.Prefix) bool { return n.Contains(p.address.Addr()) })
}
