package proxy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// SessionAttrs says what kind of server a session may go to. The words are those of libpq's target_session_attrs.
type SessionAttrs string

const (
	SessionAny           SessionAttrs = "any"            // the first that can be reached
	SessionReadWrite     SessionAttrs = "read-write"     // one whose sessions may write by default
	SessionReadOnly      SessionAttrs = "read-only"      // one whose sessions may not
	SessionPrimary       SessionAttrs = "primary"        // one that is not in recovery
	SessionStandby       SessionAttrs = "standby"        // one that is
	SessionPreferStandby SessionAttrs = "prefer-standby" // a standby, or else any
)

var allSessionAttrs = []SessionAttrs{
	SessionAny, SessionReadWrite, SessionReadOnly, SessionPrimary, SessionStandby, SessionPreferStandby,
}

// LoadBalance says in which order several servers are tried. The words are those of libpq's load_balance_hosts.
type LoadBalance string

const (
	LoadBalanceDisable LoadBalance = "disable" // as they are listed
	LoadBalanceRandom  LoadBalance = "random"  // in another order for each session
)

// ServerState is what a server of PostgreSQL 14 or later reports about itself at the beginning of a session.
type ServerState struct {
	HotStandby      bool // in_hot_standby: it is in recovery
	DefaultReadOnly bool // default_transaction_read_only
}

// Prober logs into a server to see what state it is in. The sessions of clients show it too, but only when a client has
// proved who it is, and then it is too late to send it elsewhere.
type Prober interface {
	// Probe connects to a server and returns what it reports. network and address are for net.Dial; host is the name that
	// its certificate must have. It is called from many sessions at once, though for each server only once at a time.
	Probe(ctx context.Context, network, address, host string) (ServerState, error)
}

// note takes in a ParameterStatus message.
func (s *ServerState) note(body []byte) {
	name, rest, _ := cString(body)
	value, _, _ := cString(rest)
	switch string(name) {
	case "in_hot_standby":
		s.HotStandby = string(value) == "on"
	case "default_transaction_read_only":
		s.DefaultReadOnly = string(value) == "on"
	}
}

// accepts says whether sessions of a server in this state are what is wanted, by the rules of libpq.
func (a SessionAttrs) accepts(state ServerState) bool {
	readOnly := state.HotStandby || state.DefaultReadOnly
	switch a {
	case SessionReadWrite:
		return !readOnly
	case SessionReadOnly:
		return readOnly
	case SessionPrimary:
		return !state.HotStandby
	case SessionStandby:
		return state.HotStandby
	}
	return true
}

// passes are what is looked for, one after the other.
func (a SessionAttrs) passes() []SessionAttrs {
	if a == SessionPreferStandby {
		return []SessionAttrs{SessionStandby, SessionAny}
	}
	return []SessionAttrs{a}
}

// endpoint is one server.
type endpoint struct {
	network, address string // for net.Dial
	host             string // the name that its certificate must have; empty for a Unix socket
}

// parseEndpoints understands a list of host:port and unix:/path, separated by commas.
func parseEndpoints(list string) ([]endpoint, error) {
	var all []endpoint
	for part := range strings.SplitSeq(list, ",") {
		network, address, err := splitAddress(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		e := endpoint{network: network, address: address}
		if network != "unix" {
			e.host, _, _ = net.SplitHostPort(address)
		}
		if slices.Contains(all, e) {
			return nil, fmt.Errorf("%s is named twice", address)
		}
		all = append(all, e)
	}
	return all, nil
}

// splitAddress understands host:port and unix:/path.
func splitAddress(address string) (network, addr string, err error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if path == "" {
			return "", "", errors.New("unix: needs the path of a socket")
		}
		return "unix", path, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", "", fmt.Errorf("%q is neither host:port nor unix:/path", address)
	}
	if port == "" {
		return "", "", fmt.Errorf("%q has no port", address)
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// inOrder are the endpoints in the order in which a session is to try them.
func (s *settings) inOrder() []endpoint {
	if s.LoadBalanceHosts != LoadBalanceRandom || len(s.endpoints) < 2 {
		return s.endpoints
	}
	order := slices.Clone(s.endpoints)
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// stateLife is how long an answer to a probe is believed. A session that lands on the wrong server because the answer has
// become wrong meanwhile is refused when the server says so, and the answer forgotten.
const stateLife = time.Second

// serverStates remembers what probes have found out.
type serverStates struct {
	prober  Prober
	flights singleflight.Group

	mu    sync.Mutex
	known map[endpoint]knownState
}

type knownState struct {
	ServerState
	err error
	at  time.Time
}

// of returns the state of a server, which it asks when nobody has done so lately. A server that could not be asked is not
// asked again for a while either, so that one that is down does not cost each client its time.
func (s *serverStates) of(ctx context.Context, e endpoint, timeout time.Duration) (ServerState, error) {
	s.mu.Lock()
	known, ok := s.known[e]
	s.mu.Unlock()
	if ok && time.Since(known.at) < stateLife {
		return known.ServerState, known.err
	}
	found := s.flights.DoChan(e.network+" "+e.address, func() (any, error) {
		// The probe is for everybody who waits, so it does not end with the session that happens to be the first.
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		defer stop()
		state, err := s.prober.Probe(ctx, e.network, e.address, e.host)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.known == nil {
			s.known = map[endpoint]knownState{}
		}
		s.known[e] = knownState{state, err, time.Now()}
		return state, err
	})
	select {
	case result := <-found:
		state, _ := result.Val.(ServerState)
		return state, result.Err
	case <-ctx.Done():
		return ServerState{}, ctx.Err()
	}
}

// forget makes sure that a server is asked again.
func (s *serverStates) forget(e endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, e)
}
